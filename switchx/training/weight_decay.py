# SPDX-License-Identifier: Apache-2.0
"""Which parameters weight decay shrinks: the matrices of the layers, and nothing else."""

from switchx import tree
from switchx.axes import dims_of, matrix_dims

# First letter of a table that is looked up: words, positions, relative position buckets.
_TABLE_LETTERS = "VLU"


def is_decayed(name: str, param) -> bool:
    """Whether a parameter is a matrix that inputs are multiplied by, from its letters.

    Norm scales and biases are not: shrinking them shrinks what they scale or shift, not a
    map. Embedding tables are not: a row's gradient comes only with its word, its decay
    would come every step. Logits (`w_logits_DV`), routers and experts are.

    Args:
        name: path of the parameter; the last part ends in its dimension letters.
        param: anything with a shape.

    Raises:
        ValueError: the name's letters do not fit the shape.
    """
    dims = dims_of(name.rsplit("/", 1)[-1], len(param.shape))
    matrix = matrix_dims(dims)
    return matrix is not None and dims[matrix.num_batch] not in _TABLE_LETTERS


def decay_mask(params):
    """`is_decayed` of every parameter, as a tree of bools."""
    return tree.map_named(is_decayed, params)
