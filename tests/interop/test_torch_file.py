# SPDX-License-Identifier: Apache-2.0
"""`pytorch_model.bin`: what PyTorch wrote is read, and nothing that a file asks for is run."""

import io
import json
import os
import pathlib
import pickle
import random
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from switchx.interop.tensor_folder import TensorFolder
from switchx.interop.torch_file import TorchFile
from tests.data.refusals import refused
from tests.processes import ROOT

FILE = "pytorch_model.bin"


def tensors():
    import torch

    table = torch.arange(12.0).reshape(3, 4)
    return {
        "table": table,
        "tied": table,
        "turned": table.t(),
        "part": torch.arange(10, dtype=torch.float64)[3:],
        "half": torch.nn.Parameter(torch.tensor([0.5, -3.0], dtype=torch.float16)),
        "brain": torch.tensor([[0.5], [-3.0]], dtype=torch.bfloat16),
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 4),
    }


def archive(path: pathlib.Path, description: bytes, *records: bytes, **options) -> pathlib.Path:
    """A file as `torch.save` makes it, of a description and storages."""
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("a/data.pkl", description)
        for number, record in enumerate(records):
            file.writestr(f"a/data/{number}", record)
    return path


def described(shape=(2, 3), strides=(3, 1), offset=0, numel=6, kind="FloatStorage", key="0"):
    """The description of one tensor `w`, as PyTorch pickles it, in protocol 2."""

    def number(n):
        return b"\x8a\x08" + n.to_bytes(8, "little", signed=True)

    def text(value):
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    storage = text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu")
    return b"".join([
        b"\x80\x02}", text("w"), b"ctorch._utils\n_rebuild_tensor_v2\n((", storage,
        number(numel), b"tQ", number(offset), b"(", *map(number, shape), b"t(",
        *map(number, strides), b"t\x89ccollections\nOrderedDict\n)RtRs.",
    ])  # fmt: skip


SIX = np.arange(6, dtype="<f4").tobytes()


@pytest.mark.hf
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_pytorch_wrote(tmp_path, protocol):
    import torch

    want = tensors()
    torch.save(want, tmp_path / FILE, pickle_protocol=protocol)
    folder = TensorFolder(tmp_path)
    assert folder.shapes == {name: tuple(tensor.shape) for name, tensor in want.items()}
    for name, tensor in want.items():
        got = folder.read(name)
        assert got.dtype == np.float32 and got.flags.c_contiguous
        np.testing.assert_array_equal(got, tensor.detach().float().numpy())
    # A module's dictionary is an OrderedDict with attributes.
    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / FILE)
    assert TensorFolder(tmp_path).shapes == {"weight": (3, 2), "bias": (3,)}


@pytest.mark.hf
def test_shards_and_their_index(tmp_path):
    import torch

    want, places = tensors(), {}
    for number, name in enumerate(want):
        places[name] = f"pytorch_model-{number % 2 + 1:05}-of-00002.bin"
    for file in set(places.values()):
        part = {name: tensor for name, tensor in want.items() if places[name] == file}
        torch.save(part, tmp_path / file)
    index = tmp_path / f"{FILE}.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    folder = TensorFolder(tmp_path)
    assert folder.shapes.keys() == want.keys()
    np.testing.assert_array_equal(folder.read("turned"), want["turned"].numpy())
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with refused(f"{index} names the file 'model.safetensors'"):
        TensorFolder(tmp_path)


def test_a_file_made_by_hand_is_read_or_quantized(tmp_path):
    file = TorchFile(archive(tmp_path / FILE, described(), SIX))
    np.testing.assert_array_equal(file.read("w"), [[0, 1, 2], [3, 4, 5]])
    turned = described((3, 2), (1, 3))
    file = TorchFile(archive(tmp_path / FILE, turned, SIX))
    np.testing.assert_array_equal(file.read("w"), [[0, 3], [1, 4], [2, 5]])
    path = archive(tmp_path / FILE, described(kind="CharStorage"), SIX[:6])
    with refused(f"{path}: tensor w has the type int8"):
        TensorFolder(tmp_path)


class Runs:
    """Unpickling it makes a file."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def programs(opened: str) -> dict[str, tuple[bytes, str]]:
    """Descriptions that run something, and what the refusal names."""
    touch = f"touch {opened}"
    return {
        "system": (pickle.dumps(Runs(os.system, touch), 2), "asks for posix.system"),
        "stack_global": (pickle.dumps(Runs(os.system, touch), 4), "asks for posix.system"),
        "eval": (pickle.dumps(Runs(eval, f"open({opened!r}, 'w')"), 2), ".eval"),
        "inside": (pickle.dumps({"w": Runs(open, opened, "w")}, 2), "asks for io.open"),
        "inst": (f"(S'{touch}'\nios\nsystem\n.".encode(), "has the pickle opcode STRING"),
        "obj": (b"(cos\nsystem\no.", "asks for os.system"),
        "newobj": (b"ctorch\nFloatStorage\n)\x81.", "has the pickle opcode NEWOBJ"),
        "extension": (b"\x82\x01.", "has the pickle opcode EXT1"),
        "attribute": (b"ctorch\nFloatStorage\n}b.", "sets attributes of what is no dictionary"),
        "a_storage_called": (b"ctorch\nFloatStorage\n)R.", "calls torch FloatStorage"),
        "torch": (b"ctorch.hub\nload\n(X\x01\x00\x00\x00atR.", "asks for torch.hub.load"),
        "dots": (b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n.", "__globals__"),
    }


@pytest.mark.parametrize("name", programs(""))
def test_nothing_is_run(tmp_path, name):
    opened = tmp_path / "opened"
    description, reason = programs(str(opened))[name]
    path = archive(tmp_path / FILE, description, SIX)
    with pytest.raises(ValueError, match="^[^\n]*$") as error:
        TensorFolder(tmp_path)
    assert str(path) in str(error.value) and reason in str(error.value)
    assert not opened.exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"numel": 7}, "describes storage '0' as 7 x float32, its record has 24 bytes"),
        ({"key": "1"}, "describes storage '1' as 6 x float32, its record has 0 bytes"),
        ({"numel": -1}, "describes storage '0' as -1 x float32"),
        ({"shape": (2, 4), "strides": (4, 1)}, "in a storage of 6 elements"),
        ({"offset": 1}, "and offset 1 in a storage of 6 elements"),
        ({"offset": -1}, "describes a tensor in a form that PyTorch does not write"),
        ({"strides": (-3, 1)}, "describes a tensor in a form that PyTorch does not write"),
        ({"shape": (6,)}, "describes a tensor in a form that PyTorch does not write"),
        # A view of one element a million million times.
        ({"shape": (10**6, 10**6), "strides": (0, 0)}, "in a storage of 6 elements"),
        ({"kind": "UntypedStorage"}, "asks for torch.UntypedStorage"),
    ],
)
def test_tensors_lie_in_their_storages(tmp_path, changes, reason):
    path = archive(tmp_path / FILE, described(**changes), SIX)
    with pytest.raises(ValueError, match="^[^\n]*$") as error:
        TorchFile(path)
    assert str(path) in str(error.value) and reason in str(error.value)


def test_bombs_and_encrypted_records(tmp_path):
    path = tmp_path / FILE
    archive(path, described(), SIX, compression=zipfile.ZIP_DEFLATED)
    with refused(f"{path} has the record 'a/data<any>' compressed or encrypted, "):
        TorchFile(path)
    # Many tensors of one storage: one is }, its name, the tensor.
    one = described()[2:-2]
    many = b"\x80\x02}" + b"".join(
        one[1:].replace(b"\x01\x00\x00\x00w", b"\x01\x00\x00\x00" + bytes([97 + i])) + b"s"
        for i in range(5)
    )
    with refused(f"{path} describes 120 bytes of tensors in 24 bytes of storages: "):
        TorchFile(archive(path, many + b".", SIX))
    path = archive(tmp_path / FILE, described(), SIX)
    content = path.read_bytes()
    for signature, flags_at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.index(signature) + flags_at
        content = content[:at] + b"\x01" + content[at + 1 :]
    path.write_bytes(content)
    with refused(f"{path} "):
        TorchFile(path)


def with_directory(path: pathlib.Path, change) -> None:
    """Writes the archive again with entries of its central directory changed."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        at = file.start_dir
    while content[at : at + 4] == b"PK\1\2":
        name, extra, comment = (
            int.from_bytes(content[at + i : at + i + 2], "little") for i in (28, 30, 32)
        )
        change(content, at, content[at + 46 : at + 46 + name].decode())
        at += 46 + name + extra + comment
    path.write_bytes(content)


def test_records_that_overlap_or_leave_the_file(tmp_path):
    path = archive(tmp_path / FILE, described(), SIX, SIX)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        first = file.getinfo("a/data/0").header_offset

    def same_place(content, at, name):
        if name == "a/data/1":
            content[at + 42 : at + 46] = first.to_bytes(4, "little")

    def larger(content, at, name):
        if name == "a/data/1":
            content[at + 20 : at + 28] = (1 << 30).to_bytes(4, "little") * 2

    for change in (same_place, larger):
        path.write_bytes(content)
        with_directory(path, change)
        with refused(f"{path} has the record 'a/data/<any>' twice, in another record or "):
            TorchFile(path)


def test_what_is_no_archive_of_tensors(tmp_path):
    path = tmp_path / FILE
    path.write_bytes(pickle.dumps({}))
    with refused(f"{path} is no zip archive: PyTorch before 1.6 "):
        TorchFile(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x", "")
    with refused(f"{path} is a zip archive with 0 records NAME/data.pkl, expected one"):
        TorchFile(path)
    with refused(f"{path} holds a int, expected tensors by name"):
        TorchFile(archive(path, b"\x80\x02K\x03."))
    with refused(f"{path} has a int under the name 'a', expected tensors alone: "):
        TorchFile(archive(path, pickle.dumps({"a": 3}, 2)))


def test_damage_is_refused_as_a_value_error(tmp_path):
    path = archive(tmp_path / FILE, described(), SIX)
    content, draw, num_refused = path.read_bytes(), random.Random(0), 0
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        if draw.random() < 0.2:
            del damaged[draw.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        try:
            file = TorchFile(path)
            for name in file.tensors:
                file.read(name)
        except ValueError:
            num_refused += 1
    assert num_refused > 100


def test_pytorch_is_not_imported(tmp_path):
    archive(tmp_path / FILE, described(), SIX)
    program = (
        "import pathlib, sys; from switchx.interop.tensor_folder import TensorFolder; "
        f"TensorFolder(pathlib.Path({str(tmp_path)!r})).read('w'); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=environment)
