# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of a folder, and our parameters out of PyTorch's tensors, and back.

Nothing in a checkpoint is executed: pickles are never opened, and an index names files of its
own folder alone. Names and shapes are read at once, tensors one by one; nothing is allocated
before all names and shapes are found to be those of the configuration.

Dims: D model, E experts, F ffn, H heads, K head size, V vocabulary
"""

import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from switchx.axes import matrix_dims
from switchx.fields import require
from switchx.models.config import ModelConfig
from switchx.object_store import read_json_object

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")
_FLOATS = ("F64", "F32", "F16", "BF16")
# More than any description of a model, and of the tensors of one, needs.
MOST_CONFIG_BYTES = 1 << 20
_MOST_INDEX_BYTES = 1 << 28


class SafetensorsFolder:
    """The tensors of `model.safetensors`, or of all files that its index names.

    Attributes:
        shapes: of every tensor, by name.

    Raises:
        ValueError: there are none, pickles alone, or a file is damaged or of another kind.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}  # open: a header has thousands of experts
        for path in self._paths():
            self._add(path)

    def _paths(self) -> list[pathlib.Path]:
        if (self.folder / INDEX).is_file():
            return self._indexed()
        if (self.folder / MODEL).is_file():
            return [self.folder / MODEL]
        pickles = sorted(path.name for each in _PICKLES for path in self.folder.glob(each))
        require(
            not pickles,
            f"{self.folder} has {', '.join(pickles)} and no {MODEL}; such a file may run any "
            "program when it is opened and is never read here: load the model in transformers "
            f"and save it with `model.save_pretrained(DIR)`, which writes {MODEL}, or take the "
            "repository's safetensors",
        )
        raise ValueError(
            f"{self.folder} has no {MODEL} and no {INDEX}; give a folder that "
            "`save_pretrained` wrote"
        )

    def _indexed(self) -> list[pathlib.Path]:
        path = self.folder / INDEX
        index = read_json(path, _MOST_INDEX_BYTES)
        places = index.get("weight_map")
        are_names = isinstance(places, dict) and all(type(n) is str for n in places.values())
        require(are_names, f"{path} has no weight_map of names; restore the file")
        names = sorted(set(places.values()))
        for name in names:
            is_plain = name == pathlib.PurePath(name).name and "\\" not in name
            require(
                is_plain and name.endswith(".safetensors"),
                f"{path} names the file {name!r}; expected .safetensors files in its own "
                "folder: do not use this checkpoint, or correct its index",
            )
            is_there = (self.folder / name).is_file()
            require(is_there, f"{path} names {name}, which is not there; fetch that file")
        return [self.folder / name for name in names]

    def _add(self, path: pathlib.Path) -> None:
        try:
            file = safe_open(path, framework="np")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} cannot be read as safetensors ({error}); it is damaged or cut short: "
                "fetch or write it again"
            ) from error
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            part = file.get_slice(name)
            require(
                part.get_dtype() in _FLOATS,
                f"{path}: tensor {name} has the type {part.get_dtype()}; expected one of "
                f"{', '.join(_FLOATS)}: export the model without quantization",
            )
            require(
                name not in self.shapes,
                f"tensor {name} is in two files, {path.name} the second; remove the file that "
                "does not belong to this checkpoint",
            )
            self.shapes[name], self._files[name] = tuple(part.get_shape()), file

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32: exact but for one of float64, which is rounded."""
        return self._files[name].get_tensor(name).astype(np.float32)


def read_json(path: pathlib.Path, most_bytes: int = MOST_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file of at most `most_bytes`.

    Raises:
        ValueError: it is missing, larger, or something else.
    """
    try:
        return read_json_object(path, most_bytes)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); restore the file") from error


def write_safetensors(
    folder: pathlib.Path, tensors: dict[str, np.ndarray], most_bytes: int
) -> None:
    """Writes `model.safetensors`, or shards of at most `most_bytes` and their index.

    A tensor that is larger has a shard of its own.
    """
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, tensor in tensors.items():
        used = sum(each.nbytes for each in shards[-1].values())
        if shards[-1] and used + tensor.nbytes > most_bytes:
            shards.append({})
        shards[-1][name] = tensor
    metadata = {"format": "pt"}  # transformers asks for it; the layout is PyTorch's
    if len(shards) == 1:
        save_file(tensors, folder / MODEL, metadata)
        return
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata)
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_json(folder / INDEX, index)


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a JSON object, indented as transformers does."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# Of a model that has nothing in common with its checkpoint, so many lines are enough.
MOST_LINES = 1000


def letters_of(parameter: str) -> str:
    """`D`, `HK`, ... of a parameter's name."""
    return parameter.rpartition("_")[2]


def shape_of(parameter: str, config: ModelConfig) -> tuple[int, ...]:
    """Shape of one of our parameters, by its letters."""
    sizes = {
        "V": config.vocab_size,
        "D": config.d_model,
        "H": config.num_heads,
        "K": config.d_head,
        "F": config.d_ff,
        "U": config.relative_buckets,
    }
    if config.switch is not None:
        sizes["E"] = config.switch.num_experts
        if "/experts/" in parameter:
            sizes["F"] = config.switch.d_ff or config.d_ff
    return tuple(sizes[letter] for letter in letters_of(parameter))


def is_linear(parameter: str) -> bool:
    """Whether a parameter is a linear map, which PyTorch keeps as `[out, in]`."""
    return parameter.rpartition("/")[2].startswith("w_")


def _matrix_shape(parameter: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Inputs and outputs of a linear map, heads joined; of one expert, where there are many."""
    split = matrix_dims(letters_of(parameter))
    shape = shape[split.num_batch :]
    return math.prod(shape[: split.num_rows]), math.prod(shape[split.num_rows :])


def torch_shape(parameter: str, config: ModelConfig) -> tuple[int, ...]:
    """Shape of the tensors in PyTorch's layout that make up a parameter."""
    shape = shape_of(parameter, config)
    return _matrix_shape(parameter, shape)[::-1] if is_linear(parameter) else shape


def from_torch(parameter: str, config: ModelConfig, tensors: Iterable[np.ndarray]):
    """The parameter, float arrays as they are, out of its tensors: one, or one an expert."""
    shape = shape_of(parameter, config)
    if letters_of(parameter)[0] != "E":
        (tensor,) = tensors
        is_map = is_linear(parameter)
        return np.ascontiguousarray(tensor.T).reshape(shape) if is_map else tensor
    parameter_E = None
    for expert, tensor in enumerate(tensors):  # one at a time: together they are large
        if parameter_E is None:
            parameter_E = np.empty(shape, tensor.dtype)
        parameter_E[expert] = tensor.T
    return parameter_E


def to_torch(parameter: str, value: np.ndarray) -> list[np.ndarray]:
    """The tensors in PyTorch's layout that a parameter is: one, or one an expert."""
    if not is_linear(parameter):
        return [np.ascontiguousarray(value)]
    matrices = value if letters_of(parameter)[0] == "E" else [value]
    shape = _matrix_shape(parameter, value.shape)
    return [np.ascontiguousarray(each.reshape(shape).T) for each in matrices]


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
    problems = [
        f"  {name}: expected {form(expected.get(name))}, got {form(found.get(name))}"
        for name in names
        if expected.get(name) != found.get(name)
    ]
    if problems:
        listing = "\n".join(problems[:MOST_LINES])
        if len(problems) > MOST_LINES:
            listing += f"\n  and {len(problems) - MOST_LINES} more"
        raise ValueError(
            f"{where} does not hold the model that is described; {len(problems)} of "
            f"{len(names)} tensors differ:\n{listing}\n{way_out}"
        )
