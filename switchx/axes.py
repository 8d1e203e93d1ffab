# SPDX-License-Identifier: Apache-2.0
"""The dimension key: one capital letter per dimension, the same in every file.

A tensor's name ends in its dimensions (`x_BLD`, `w_in_EDF`), and for a parameter that
suffix is the only metadata: the partitioning rules, Adafactor's factoring and
the checkpoint readers all derive what they need from the name. A parameter with more
dimensions than its suffix was stacked by `lax.scan`; the extra leading one is `N`.
"""

import dataclasses
import re

DIMENSIONS = {
    "B": "batch",
    "L": "length",
    "M": "memory_length",
    "D": "embed",
    "H": "heads",
    "K": "head_size",
    "F": "mlp",
    "V": "vocab",
    "N": "layers",
    "T": "tokens",
    "E": "expert",
    "C": "capacity",
    "S": "selected",
    "R": "rows",
    "G": "groups",
    "P": "stages",
    "U": "relative_buckets",
    "Z": "kv_heads",
    "J": "rank",
}

_SUFFIX = re.compile(r"_([A-Z]+)$")
# Letters that index independent matrices when they precede the letters of a matrix.
_BATCH_LETTERS = "NPE"
# A side of a matrix is one letter, but heads and head size together form one side.
_JOINED = re.compile(r"[HZ]K|[A-Z]")


def dims_of(name: str, ndim: int) -> str:
    """Dimension letters of a parameter from its name, e.g. `w_in_EDF`, 4 -> `NEDF`.

    Args:
        name: the last part of the parameter's path.
        ndim: number of the array's dimensions; one more than the suffix has letters if layers
            are stacked. A scalar (an optimizer's count) has no suffix.

    Raises:
        ValueError: the suffix has unknown letters or their number does not fit `ndim`.
    """
    match = _SUFFIX.search(name)
    letters = match.group(1) if match else ""
    unknown = sorted(set(letters) - DIMENSIONS.keys())
    if unknown or ndim not in (len(letters), len(letters) + 1):
        raise ValueError(
            f"parameter {name!r} has {ndim} dimensions but its name says {letters!r}; end "
            f"the name in one known letter a dimension ({''.join(DIMENSIONS)})"
        )
    return "N" * (ndim - len(letters)) + letters


@dataclasses.dataclass(frozen=True)
class MatrixDims:
    """How many of a parameter's dimensions, in order, are batch, row and column dimensions."""

    num_batch: int
    num_rows: int
    num_columns: int


def matrix_dims(dims: str) -> MatrixDims | None:
    """Splits dimension letters into batch, row and column dimensions.

    `EDF` is E matrices of D by F, `DHK` one matrix of D by (H K), `NHKD` N matrices of
    (H K) by D. The router `DE` is one matrix: E is a batch only in front of a whole matrix.

    Returns:
        None when no matrix is left, as for `ND` (a stack of norm scales) or `EF`.
    """
    num_batch = 0
    while num_batch < len(dims) and dims[num_batch] in _BATCH_LETTERS:
        num_batch += 1
    sides = _JOINED.findall(dims[num_batch:])
    if len(sides) != 2:
        return None
    return MatrixDims(num_batch, len(sides[0]), len(sides[1]))
