# SPDX-License-Identifier: Apache-2.0
"""Files that someone else wrote, their checksums too: read, or refused in one short line."""

import hashlib
import json
import random
import shutil
import time

import pytest

from switchx.checkpoint.run_folder import RunFolder, read_config, read_model_config
from switchx.data.tokenizers import ByteVocabulary
from switchx.data.vocabularies import DESCRIPTION_FILE, load_vocabulary, save_vocabulary
from switchx.inference import run_exported
from switchx.inference.artifact import MANIFEST, open_artifact, read_artifact, write_artifact
from switchx.inference.quantize import quantize_experts
from switchx.interop import t5x
from switchx.object_store import MAX_JSON_DEPTH
from switchx.training.resume import write_run_config
from switchx.whole_folders import checksum_of
from tests.interop.t5x_files import SWITCH, by_layers, write_t5x
from tests.training.jobs import ENCODER_DECODER, make_job, make_params


def nested(depth: int):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


VALUES = (
    None, True, -1, 0, 3, 10**400, 2**40, 1e308, -0.5, "", "x" * 3000, "../../etc/passwd",
    "os.path", [], {}, [[1]], {"a": 1}, {"type": "json.JSONDecoder"}, {"type": 3},
    nested(MAX_JSON_DEPTH - 8), nested(400),
)  # fmt: skip


def changed(value, draw: random.Random):
    """A value of JSON with one node lost, or of another kind."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    key, inner = draw.choice(items)
    copy = value.copy()
    if isinstance(inner, dict | list) and inner and draw.random() < 0.7:
        copy[key] = changed(inner, draw)
    elif draw.random() < 0.2:
        del copy[key]
    else:
        copy[key] = draw.choice(VALUES)
    return copy


def run_folder(folder):
    write_run_config(RunFolder(folder).create(), make_job(ENCODER_DECODER))
    return "config.json", lambda: (
        read_config(RunFolder(folder)), read_model_config(RunFolder(folder))
    )  # fmt: skip


def vocabulary(folder):
    folder.mkdir()
    save_vocabulary(ByteVocabulary(), folder)
    return DESCRIPTION_FILE, lambda: load_vocabulary(folder)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "artifact"
    config, params, *_ = quantize_experts(ENCODER_DECODER, make_params(ENCODER_DECODER), bits=4)
    write_artifact(folder, config, params, {"step": 1})
    return folder


def refused_briefly(read, most_lines: int = 1) -> bool:
    start_s = time.monotonic()
    try:
        read()
    except ValueError as error:
        said = str(error)
        assert said.count("\n") < most_lines and 10 < len(said) < 1500, said[:300]
        return True
    finally:
        assert time.monotonic() - start_s < 20
    return False


def attack(file, read, number: int, sign=lambda content: content, **options) -> int:
    """How many of so many changed contents are refused; the others are read."""
    content, draw, num_refused = json.loads(file.read_text()), random.Random(0), 0
    for _ in range(number):
        file.write_text(json.dumps(sign(changed(content, draw))))
        num_refused += refused_briefly(read, **options)
    for text in ("", "[" * 100_000, '{"a":' * 5000, "3", "[1]", "\xff", '{"files": '):
        file.write_bytes(text.encode("latin-1"))
        assert refused_briefly(read)
    file.write_text(json.dumps(content))
    return num_refused


@pytest.mark.parametrize("make", [run_folder, vocabulary])
def test_configurations(tmp_path, make):
    name, read = make(tmp_path / "folder")
    read()
    assert attack(tmp_path / "folder" / name, read, 400) > 25
    read()


@pytest.mark.parametrize("reader", [read_artifact, open_artifact])
def test_artifacts_with_the_right_checksum(quantized, tmp_path, reader):
    def signed(content):
        content.pop("sha256", None)
        return content | {"sha256": checksum_of(content, "sha256")}

    folder = shutil.copytree(quantized, tmp_path / "copy")
    assert attack(folder / MANIFEST, lambda: reader(folder), 150, signed) > 80
    reader(folder)


def test_headers_of_weights(quantized, tmp_path):
    """The length that a file of safetensors begins with is not believed."""
    folder = shutil.copytree(quantized, tmp_path / "copy")
    weights, manifest = folder / "weights.safetensors", folder / MANIFEST
    data, content = weights.read_bytes(), json.loads(manifest.read_text())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(name for name in header if name != "__metadata__")
    headers = [b"[]", b"{", json.dumps(nested(500)).encode()]
    for change in ({"dtype": "I64"}, {"dtype": 3}, {"shape": [2**62]}, {"data_offsets": [0]}):
        headers.append(json.dumps(header | {name: header[name] | change}).encode())
    heads = [len(each).to_bytes(8, "little") + each for each in headers]
    for head in (b"\xff" * 8, b"", (2**40).to_bytes(8, "little"), *heads):
        weights.write_bytes(head + data[8 + size :])
        sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
        content["files"]["weights.safetensors"] = [weights.stat().st_size, sha256]
        content.pop("sha256", None)
        content["sha256"] = checksum_of(content, "sha256")
        manifest.write_text(json.dumps(content))
        for read in (read_artifact, open_artifact):
            assert refused_briefly(lambda read=read: read(folder))


def test_zarr_metadata_of_t5x(tmp_path):
    write_t5x(tmp_path / "t5x", by_layers(SWITCH, make_params(SWITCH)), compressor="gzip")

    def read():
        t5x.read_checkpoint(tmp_path / "t5x", SWITCH)

    read()
    assert attack(next(tmp_path.rglob(".zarray")), read, 150, most_lines=3) > 60
    read()


def test_manifests_of_exported_programs(tmp_path):
    file = tmp_path / run_exported.MANIFEST
    for text in ("[" * 100_000, '{"sha256": 3}', "[]", '{"a":' * 5000):
        file.write_text(text)
        assert refused_briefly(lambda: run_exported._read_manifest(tmp_path))
