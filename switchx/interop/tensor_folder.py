# SPDX-License-Identifier: Apache-2.0
"""Tensor files of a folder, and our parameters from PyTorch's tensors, and back.

Files are safetensors, or `pytorch_model.bin` (torch_file.py) if there are none; one file, or an
index of several, and not both if they differ. Nothing in a checkpoint is executed, and an index
names only files of its own folder. Names and shapes are read at once, tensors one by one;
nothing is allocated before all names and shapes are found to be those of the configuration.

Dims: D model, E experts, F ffn, H heads, K head size, V vocabulary
"""

import json
import math
import os
import pathlib
import tempfile
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from switchx.axes import matrix_dims
from switchx.data.special_ids import in_our_order
from switchx.fields import require
from switchx.interop.torch_file import TorchFile
from switchx.models.config import ModelConfig
from switchx.models.stored_experts import EXPERTS_PATH
from switchx.object_store import read_json_object, require_no_lfs_pointer
from switchx.tree import nested

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Each kind's file, the index of its shards, and how their names end.
_KINDS = {
    MODEL: (INDEX, ".safetensors"),
    "pytorch_model.bin": ("pytorch_model.bin.index.json", ".bin"),
}
# Remedy if names or shapes are not those of config.json.
WAY_OUT = "use the config.json that belongs to these files, and all of the files"
# Ends of the names of classes with a head, including an early one of T5.
_WHOLE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_UNREAD = ("*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")
_FLOATS = ("F64", "F32", "F16", "BF16")
_WRITTEN = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# More than any description of a model, and of the tensors of one, needs.
MOST_CONFIG_BYTES = 1 << 20
_MOST_INDEX_BYTES = 1 << 28
_MOST_MAPPED_BYTES = 1 << 25


class TensorFolder:
    """The tensors of a folder's only file, or of all files that its index names.

    Attributes:
        shapes: shape of every tensor, by name.
        unread: weight files in formats that are not read.

    Raises:
        ValueError: there is no file that can be read, or a file is damaged or of another
            format.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}  # open: a header has thousands of experts
        for path in self._paths():
            self._add(path)

    def _paths(self) -> list[pathlib.Path]:
        tensor_files = [
            name
            for each, (index, _) in _KINDS.items()
            for name in (each, index)
            if (self.folder / name).is_file()
        ]
        for name, (index, suffix) in _KINDS.items():
            self.unread = [other for other in tensor_files if other not in (name, index)]
            if name in tensor_files and index in tensor_files:
                self._require_one_model(self.folder / name, self.folder / index, suffix)
            if name in tensor_files:
                return [self.folder / name]
            if index in tensor_files:
                return self._indexed(self.folder / index, suffix)
        others = sorted(path.name for each in _UNREAD for path in self.folder.glob(each))
        require(
            not others,
            f"{self.folder} has {', '.join(others)} and no {' or '.join(_KINDS)}; load "
            "the model in transformers and save it with `model.save_pretrained(DIR)`, which "
            f"writes {MODEL}, or take the repository's safetensors",
        )
        raise ValueError(
            f"{self.folder} has no {MODEL} and no {INDEX}, and no pytorch_model.bin; give a "
            "folder that `save_pretrained` wrote"
        )

    def _require_one_model(self, path: pathlib.Path, index: pathlib.Path, suffix: str) -> None:
        """Refuses an index beside a single file, unless it has the same tensors."""
        try:
            one = _reader(path)
            shards = [_reader(each) for each in self._indexed(index, suffix)]
            described = sorted(item for file in shards for item in file.headers.items())
            is_same = described == sorted(one.headers.items()) and all(
                np.array_equal(file.read(name), one.read(name), equal_nan=True)
                for file in shards
                for name in file.headers
            )
            reason = "whose tensors differ"
        except ValueError as error:
            is_same = False
            reason = f"and not all of these can be read: {error}"
        require(
            is_same,
            f"{path} and {index.name} are both there, {reason}; transformers reads "
            f"{path.name} alone: remove the one that is not this model's",
        )

    def _indexed(self, path: pathlib.Path, suffix: str) -> list[pathlib.Path]:
        index = read_json(path, _MOST_INDEX_BYTES)
        places = index.get("weight_map")
        are_names = isinstance(places, dict) and all(type(n) is str for n in places.values())
        require(are_names, f"{path} has no weight_map of names; restore the file")
        names = sorted(set(places.values()))
        for name in names:
            is_plain = name == pathlib.PurePath(name).name and "\\" not in name
            require(
                is_plain and name.endswith(suffix),
                f"{path} names the file {name!r}; expected {suffix} files in its own "
                "folder: do not use this checkpoint, or correct its index",
            )
            is_there = (self.folder / name).is_file()
            require(is_there, f"{path} names {name}, which is not there; fetch that file")
        return [self.folder / name for name in names]

    def _add(self, path: pathlib.Path) -> None:
        file = _reader(path)
        for name, (dtype, shape) in file.headers.items():
            require(
                dtype in _FLOATS,
                f"{path}: tensor {name} has the type {dtype}; expected one of "
                f"{', '.join(_FLOATS)}: switchx reads no scales of quantized weights (FP8, "
                "MXFP4, AWQ, GPTQ); export the model without quantization",
            )
            require(
                name not in self.shapes,
                f"tensor {name} is in two files, {path.name} the second; remove the file that "
                "does not belong to this checkpoint",
            )
            self.shapes[name], self._files[name] = shape, file

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32: exact except for float64, which is rounded.

        Raises:
            ValueError: one of its numbers is not finite.
        """
        tensor = self._files[name].read(name)
        with np.errstate(over="ignore"):
            tensor = tensor.astype(np.float32, copy=False)
        require_finite(tensor, name, self.folder)
        return tensor


def _reader(path: pathlib.Path) -> "TorchFile | _SafetensorsFile":
    require_no_lfs_pointer(path)
    return TorchFile(path) if path.suffix == ".bin" else _SafetensorsFile(path)


class _SafetensorsFile:
    """One file; `headers` has each tensor's type and shape."""

    def __init__(self, path: pathlib.Path):
        self._path, self._num_read = path, 0
        try:
            self._file = safe_open(path, framework="np")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} cannot be read as safetensors ({error}); it is damaged or cut short: "
                "fetch or write it again"
            ) from error
        self.headers = {}
        for name in self._file.keys():  # noqa: SIM118 - it is not a dictionary
            part = self._file.get_slice(name)
            self.headers[name] = part.get_dtype(), tuple(part.get_shape())

    def read(self, name: str) -> np.ndarray:
        tensor = self._file.get_tensor(name)
        self._num_read += tensor.nbytes
        if self._num_read > _MOST_MAPPED_BYTES:  # what was read stays mapped until it reopens
            self._file = safe_open(self._path, framework="np")
            self._num_read = 0
        return tensor


def read_json(path: pathlib.Path, most_bytes: int = MOST_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file of at most `most_bytes`.

    Raises:
        ValueError: the file is missing, larger, or not a JSON object.
    """
    try:
        return read_json_object(path, most_bytes)
    except FileNotFoundError:
        raise ValueError(
            f"{path} is not there; fetch it, or give a folder that `save_pretrained` wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); restore the file") from error


def write_safetensors(
    folder: pathlib.Path, tensors: Iterable[tuple[str, Any]], most_bytes: int
) -> None:
    """Writes `model.safetensors`, or shards of at most `most_bytes` and their index.

    A tensor that is larger has a shard of its own. One tensor is held at a time.

    Args:
        tensors: names, and arrays or what NumPy makes one from: `shape`, `dtype` and `nbytes`
            are read beforehand, the numbers only when they are written.
    """
    shards: list[dict[str, Any]] = [{}]
    used = total = 0
    for name, tensor in tensors:
        if shards[-1] and used + tensor.nbytes > most_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used, total = used + tensor.nbytes, total + tensor.nbytes
    if len(shards) == 1:
        _write_file(folder / MODEL, shards[0])
        return
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / file, shard)
        places |= dict.fromkeys(shard, file)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _write_file(path: pathlib.Path, tensors: Mapping[str, Any]) -> None:
    """Writes one safetensors file, to the byte as the library does, whose writer holds a whole
    file in memory: the header's length, the header, the tensors' numbers."""
    # transformers asks for the format; the layout is PyTorch's
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # The wider dtypes first, so that all are aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        start, end = end, end + tensors[name].nbytes
        kind = _WRITTEN[tensors[name].dtype.name]
        shape = list(tensors[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            start, end = header[name]["data_offsets"]
            numbers = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
            assert numbers.size == end - start, name
            file.seek(8 + len(text) + start)
            file.write(numbers.data)


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a JSON object, indented as transformers does."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# Lines that are enough for a model that has nothing in common with its checkpoint.
MOST_LINES = 20


# Ends of the names of vectors that are tensors of one row: a linear map to one number, and a
# bias of one group of experts.
_ROWS = (".shared_expert_gate.weight", ".moe_statics.e_score_correction_bias")


def is_row(theirs: str) -> bool:
    """Whether the tensor of this name is one row `[1, n]` of a vector."""
    return theirs.endswith(_ROWS)


def letters_of(parameter: str) -> str:
    """`D`, `HK`, ... of a parameter's name."""
    return parameter.rpartition("_")[2]


def shape_of(parameter: str, config: ModelConfig) -> tuple[int, ...]:
    """Shape of one of our parameters, by its letters."""
    sizes = {
        "V": config.vocab_size,
        "D": config.d_model,
        "H": config.num_heads,
        "Z": config.kv_heads,
        "K": config.d_head,
        "F": config.d_ff,
        "U": config.relative_buckets,
    }
    if config.switch is not None:
        sizes["E"] = config.switch.num_experts
        if EXPERTS_PATH in parameter:
            sizes["F"] = config.switch.d_ff or config.d_ff
        if "/shared_expert/" in parameter:
            sizes["F"] = config.switch.shared_d_ff
    return tuple(sizes[letter] for letter in letters_of(parameter))


def is_linear(parameter: str) -> bool:
    """Whether a parameter is a linear map, which PyTorch keeps as `[out, in]`."""
    return parameter.rpartition("/")[2].startswith("w_")


def is_vector(parameter: str) -> bool:
    """Whether a parameter is a bias, or a norm's scale, heads joined in PyTorch."""
    return parameter.rpartition("/")[2].startswith(("b_", "scale_"))


def _matrix_shape(parameter: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Inputs and outputs of a linear map, heads joined; of one expert, if there are many."""
    split = matrix_dims(letters_of(parameter))
    shape = shape[split.num_batch :]
    return math.prod(shape[: split.num_rows]), math.prod(shape[split.num_rows :])


def torch_shape(parameter: str, config: ModelConfig) -> tuple[int, ...]:
    """Shape of the tensors in PyTorch's layout that make up a parameter."""
    shape = shape_of(parameter, config)
    if is_linear(parameter):
        return _matrix_shape(parameter, shape)[::-1]
    letters = letters_of(parameter)
    is_of_experts = len(letters) > 1 and letters[0] == "E"
    return (math.prod(shape[is_of_experts:]),) if is_vector(parameter) else shape


def torch_shapes(
    names: Mapping[str, Iterable[str]], config: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, by its name, given our parameters' names -> tensors' names."""
    return {
        name: (1, *shape) if is_row(name) else shape
        for parameter, theirs in names.items()
        for shape in [torch_shape(parameter, config)]
        for name in theirs
    }


def require_finite(tensor: np.ndarray, name: str, where: str | os.PathLike) -> None:
    """Refuses a tensor with NaN or infinite numbers."""
    if not tensor.size or np.isfinite(tensor.min()) and np.isfinite(tensor.max()):
        return
    count = tensor.size - np.count_nonzero(np.isfinite(tensor))
    raise ValueError(
        f"{where}: {count} of the {tensor.size} numbers of the tensor {name} are not finite in "
        "float32; fetch the file again, or use a checkpoint from before they became so"
    )


def dtype_of(name: str, dtype: str) -> np.dtype:
    """The dtype of a parameter of a model in `dtype`."""
    return np.dtype("float32" if name.endswith("/router_bias_E") else dtype)


def in_dtype(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    """The array in another dtype; a bias that chooses experts stays in float32.

    Raises:
        ValueError: the array has finite numbers that are not finite in that dtype.
    """
    dtype = dtype_of(name, dtype)
    with np.errstate(over="ignore"):
        result = array.astype(dtype, copy=False)
    if dtype == np.float16 and np.any(np.isinf(result) & np.isfinite(array)):
        raise ValueError(
            f"{name} has numbers up to {np.max(np.abs(array)):.3g}, which are infinite in "
            "float16; use bfloat16 or float32"
        )
    return result


def on_disk(array: np.ndarray, scratch: pathlib.Path | None) -> np.ndarray:
    """The array, mapped from its own file in a folder; as it is if there is no folder."""
    if scratch is None or not array.size:
        return array
    number, name = tempfile.mkstemp(dir=scratch)
    with open(number, "wb") as file:
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return np.memmap(name, np.uint8, "r").view(array.dtype).reshape(array.shape)


def from_torch(parameter: str, config: ModelConfig, tensors: Iterable[np.ndarray]):
    """The parameter, float arrays as they are, from its tensors: one, or several."""
    shape = shape_of(parameter, config)
    letters = letters_of(parameter)
    if letters == "UH" and config.relative_bias_per_layer:
        return np.stack(list(tensors))
    if letters == "E" or letters[0] != "E":
        (tensor,) = tensors
        tensor = tensor.T if is_linear(parameter) else tensor
        return np.ascontiguousarray(tensor).reshape(shape)
    parameter_E = None
    for expert, tensor in enumerate(tensors):  # one at a time: together they are large
        if parameter_E is None:
            parameter_E = np.empty(shape, tensor.dtype)
        parameter_E[expert] = tensor.T if is_linear(parameter) else tensor
    return parameter_E


def read_parameters(
    tensors: TensorFolder,
    names: Mapping[str, Iterable[str]],
    config: ModelConfig,
    ids: tuple[tuple[int, ...], int],
    scratch: pathlib.Path | None,
    factors: Mapping[str, float] = types.MappingProxyType({}),
    orders: Mapping[str, np.ndarray] = types.MappingProxyType({}),
) -> dict:
    """Parameters by our ids, in the dtype of `config.precision.params`.

    Args:
        names: our parameters' names -> their tensors' names.
        ids: their special ids, and the one whose row begins a decoder's input.
        scratch: folder for the parameters' files; None holds them in memory.
        factors: factors of parameters, by the last part of their names.
        orders: order in which the last dimension is read, likewise.
    """
    (special_ids, start), params = ids, {}
    for parameter, theirs in names.items():
        letters = letters_of(parameter)
        value = from_torch(parameter, config, map(tensors.read, theirs))
        if "V" in letters:
            first = None if parameter == "embedding/w_logits_DV" else start
            value = in_our_order(value, letters.index("V"), special_ids, first)
        if (factor := factors.get(parameter.rpartition("/")[2], 1.0)) != 1.0:
            own = value if value.flags.writeable else None  # all experts together are large
            value = np.multiply(value, np.float32(factor), out=own)
        if (order := orders.get(parameter.rpartition("/")[2])) is not None:
            value = value[..., order]
        value = in_dtype(parameter, value, config.precision.params)
        params[parameter] = on_disk(value, scratch)
    return nested(params)


def to_torch(parameter: str, value: np.ndarray) -> list[np.ndarray]:
    """A parameter's tensors in PyTorch's layout: one, or one per expert or layer."""
    if value.ndim > len(letters_of(parameter)):
        return [np.ascontiguousarray(each) for each in value]
    if not is_linear(parameter):
        value = np.ascontiguousarray(value)
        return [value.reshape(-1) if is_vector(parameter) else value]
    matrices = value if letters_of(parameter)[0] == "E" else [value]
    shape = _matrix_shape(parameter, value.shape)
    return [np.ascontiguousarray(each.reshape(shape).T) for each in matrices]


def require_whole_model(
    description: Mapping[str, Any],
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    where: str,
    way_out: str = WAY_OUT,
) -> None:
    """`require_same_tensors`, but names a class that has no language model's head.

    Args:
        description: content of `config.json`, whose `architectures` name the class.
    """
    saved = description.get("architectures")
    named = [name for name in saved if isinstance(name, str)] if isinstance(saved, list) else []
    is_whole = not named or any(name.endswith(_WHOLE) for name in named)
    if "embed_tokens.weight" in found:  # whole decoders have `model.` before it
        is_whole, named = False, named or ["model"]
    require(
        is_whole or expected == found,
        f"{where} was saved as {', '.join(named)[:80]}, without the lm head of a language "
        "model; save the whole model, such as AutoModelForCausalLM, by `save_pretrained`",
    )
    require_same_tensors(expected, found, where, way_out)


def require_same_tensors(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    where: str,
    way_out: str,
) -> None:
    """Raises one ValueError with every missing, unexpected and differently shaped tensor."""

    def form(shape) -> str:
        return "nothing" if shape is None else f"shape {list(shape)}"

    names = sorted(expected.keys() | found.keys())
    problems = {
        name: f"  {name}: expected {form(expected.get(name))}, got {form(found.get(name))}"
        for name in names
        if expected.get(name) != found.get(name)
    }
    if problems:
        # If many are missing, those that were found say more.
        listed = sorted(problems, key=lambda name: name not in found)[:MOST_LINES]
        listing = "\n".join(problems[name] for name in sorted(listed))
        if len(problems) > MOST_LINES:
            listing += f"\n  and {len(problems) - MOST_LINES} more"
        raise ValueError(
            f"{where} does not hold the model that is described; {len(problems)} of "
            f"{len(names)} tensors differ:\n{listing}\n{way_out}"
        )
