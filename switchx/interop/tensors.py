# SPDX-License-Identifier: Apache-2.0
"""Our parameters out of named tensors of another program, and back: names, shapes, layout.

Nothing is allocated before all names and shapes are found to be those of the configuration.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from switchx.axes import dims_of, matrix_dims
from switchx.interop.names import is_linear
from switchx.models.config import ModelConfig

# Of a model that has nothing in common with its checkpoint, so many lines are enough.
MOST_LINES = 1000


def sizes_of(config: ModelConfig) -> dict[str, int]:
    """Sizes of the dimensions that parameters have, by letter."""
    sizes = {
        "V": config.vocab_size,
        "D": config.d_model,
        "H": config.num_heads,
        "K": config.d_head,
        "F": config.d_ff,
        "U": config.relative_buckets,
    }
    return sizes | ({"E": config.switch.num_experts} if config.switch else {})


def letters_of(parameter: str) -> str:
    """`D`, `HK`, ... of a parameter's name."""
    return parameter.rpartition("_")[2]


def torch_shape(parameter: str, config: ModelConfig) -> tuple[int, ...]:
    """Shape of the tensors in PyTorch's layout that make up a parameter."""
    sizes, letters = sizes_of(config), letters_of(parameter)
    if not is_linear(parameter):
        return tuple(sizes[letter] for letter in letters)
    rows, columns = _sides(letters)
    return tuple(math.prod(sizes[letter] for letter in side) for side in (columns, rows))


def from_torch(parameter: str, config: ModelConfig, tensors: Iterable[np.ndarray]):
    """The parameter, float arrays as they are, out of its tensors: one, or one an expert."""
    sizes, letters = sizes_of(config), letters_of(parameter)
    shape = tuple(sizes[letter] for letter in letters)
    if not is_linear(parameter):
        (tensor,) = tensors
        return tensor
    if letters[0] != "E":
        (tensor,) = tensors
        return np.ascontiguousarray(tensor.T).reshape(shape)
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
    letters = dims_of(parameter.rpartition("/")[2], value.ndim)
    rows, _ = _sides(letters)
    matrices = list(value) if letters[0] == "E" else [value]
    return [
        np.ascontiguousarray(each.reshape(math.prod(each.shape[: len(rows)]), -1).T)
        for each in matrices
    ]


def _sides(letters: str) -> tuple[str, str]:
    """Letters of a linear map's inputs and outputs, the experts' apart."""
    split = matrix_dims(letters)
    rows = split.num_batch + split.num_rows
    return letters[split.num_batch : rows], letters[rows:]


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


def fill(
    config: ModelConfig,
    names: Mapping[str, tuple[str, ...]],
    read: Callable[[str], np.ndarray],
) -> dict:
    """All parameters, as a nested dictionary, out of tensors in PyTorch's layout.

    Args:
        names: of our parameters -> of theirs, all of which exist in their shapes.
        read: gives a tensor.
    """
    return nested(
        {
            parameter: from_torch(parameter, config, map(read, theirs))
            for parameter, theirs in names.items()
        }
    )


def nested(named: Mapping[str, np.ndarray]) -> dict:
    """`{"a/b": x}` -> `{"a": {"b": x}}`."""
    tree = {}
    for name, leaf in named.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree
