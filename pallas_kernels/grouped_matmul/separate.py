# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix product with every expert's matrix in an array of its own: CPUs' fast path.

XLA's CPU product in a loop first copies the matrix that the loop takes out of a stack; of a
matrix that is an array by itself it reads each weight once. With a few rows per expert, as in
decoding, that is most of the time. So a loop runs over tiles of rows, and branches to the
product with their expert's matrix. Forward only.
Dims: R rows, D inputs, F outputs, E experts; b rows of a tile; P tiles, at most
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.epilogue import apply_epilogue
from pallas_kernels.grouped_matmul.tile_schedule import RowTiles
from pallas_kernels.operands import check_epilogue, check_rows
from pallas_kernels.sorted_rows import in_32_bits, int32_sizes, rows_of_groups

# With larger tiles, more rows of other experts are multiplied for nothing.
MAX_ROWS = 32
# A branch is compiled for each expert: more of them take longer than they save.
MAX_EXPERTS = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeparateMatrices:
    """E matrices `[D, F]` that are read one by one, in place of `w_EDF`.

    Attributes:
        matrices: arrays of one shape and dtype.
    """

    ndim: ClassVar[int] = 3
    matrices: tuple[jax.Array, ...]

    @classmethod
    def of(cls, w_EDF) -> "SeparateMatrices":
        """Parts of an array on a CPU: the same memory, not copied if it is aligned.

        Raises:
            ValueError: there is no expert in it.
        """
        parts = np.asarray(w_EDF)
        if parts.ndim != 3 or len(parts) == 0:
            raise ValueError(
                f"w_EDF has shape {parts.shape}; expected [experts, inputs, outputs] of one "
                "expert or more: reshape it"
            )
        return cls(tuple(jax.device_put(w_DF, may_alias=True) for w_DF in parts))

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.matrices), *self.matrices[0].shape

    @property
    def dtype(self):
        return self.matrices[0].dtype


def separate_matmul(
    x_RD,
    w: SeparateMatrices,
    group_sizes_E,
    *,
    w_gate: SeparateMatrices | None = None,
    bias_EF=None,
    activation: str | None = None,
    gate_R=None,
):
    """Like `grouped_matmul`, forward only; w_gate is like w.

    The epilogue follows the loop: for a few rows it is little work, and inside of the loop it
    would be compiled once for each branch.

    Raises:
        ValueError: shapes that do not agree, or sizes below 0 or above R in sum.
    """
    matrices = [w] if w_gate is None else [w, w_gate]
    for name, each in zip(("w", "w_gate"), matrices, strict=False):
        if not isinstance(each, SeparateMatrices):
            raise ValueError(
                f"{name} is a {type(each).__name__}; expected SeparateMatrices: use "
                "SeparateMatrices.of(w_EDF), or grouped_matmul"
            )
        if each.shape != w.shape:
            raise ValueError(
                f"w_gate has shape {each.shape}; expected {w.shape}, that of w: give both "
                "matrices of a gated linear unit in one layout"
            )
        check_rows(x_RD, each.shape, group_sizes_E)
    check_epilogue(x_RD, w.shape, bias_EF=bias_EF, activation=activation, gate_R=gate_R)
    group_sizes_E = int32_sizes(group_sizes_E, len(x_RD))
    return _forward(x_RD, matrices, group_sizes_E, bias_EF, activation, gate_R)


@in_32_bits
def _forward(x_RD, matrices, group_sizes_E, bias_EF, activation, gate_R):
    sums = [_multiply(x_RD, each, group_sizes_E) for each in matrices]
    if len(sums) == 1 and bias_EF is activation is gate_R is None:
        return sums[0].astype(x_RD.dtype)
    rows = rows_of_groups(group_sizes_E, len(x_RD))
    return apply_epilogue(sums, *rows, bias_EF, activation, gate_R)[0].astype(x_RD.dtype)


def _multiply(x_RD, w: SeparateMatrices, group_sizes_E):
    """float32 `[R, F]`."""
    (R, _), (E, _, F) = x_RD.shape, w.shape
    y_RF = jax.lax.full_like(x_RD, 0, jnp.float32, shape=(R, F))
    if R == 0:
        return y_RF
    b = tile_rows(R, E)
    tiles = _tiles(group_sizes_E, R, b)
    branches = [lambda x_bD, w_DF=w_DF: _product(x_bD, w_DF) for w_DF in w.matrices]

    def tile(n, y_RF):
        first, offset = tiles.start_P[n], tiles.offset_P[n]
        x_bD = jax.lax.dynamic_slice_in_dim(x_RD, first, b)
        new_bF = jax.lax.switch(tiles.expert_P[n], branches, x_bD)
        old_bF = jax.lax.dynamic_slice_in_dim(y_RF, first, b)
        row_b = jax.lax.iota(jnp.int32, b)
        is_its_b = (row_b >= offset) & (row_b < offset + tiles.size_P[n])
        return jax.lax.dynamic_update_slice_in_dim(
            y_RF, jnp.where(is_its_b[:, None], new_bF, old_bF), first, axis=0
        )

    return jax.lax.fori_loop(0, tiles.count[0], tile, y_RF)


def tile_rows(R: int, E: int) -> int:
    """The power of two above the rows that an expert has on average, up to `MAX_ROWS`."""
    return min(max(2, 2 ** (R // E).bit_length()), MAX_ROWS, R)


def _tiles(group_sizes_E, R: int, b: int) -> RowTiles:
    """Tiles of b rows; one that would end after R begins earlier."""
    E = group_sizes_E.shape[0]
    start_E, tiles_E = _before(group_sizes_E), (group_sizes_E + b - 1) // b
    first_tile_E = _before(tiles_E)
    tile_P = jax.lax.iota(jnp.int32, R // b + min(E, R))
    ends_PE = (first_tile_E + tiles_E)[None] <= tile_P[:, None]
    expert_P = jnp.minimum(jnp.sum(ends_PE, axis=1, dtype=jnp.int32), E - 1)
    begin_P = start_E[expert_P] + (tile_P - first_tile_E[expert_P]) * b
    size_P = (start_E + group_sizes_E)[expert_P] - begin_P
    start_P = jnp.minimum(begin_P, R - b)
    return RowTiles(expert_P, start_P, begin_P - start_P, size_P, jnp.sum(tiles_E)[None])


def _before(size_E):
    """For each size the sum of all sizes before it; a few comparisons are one operation."""
    index_E = jax.lax.iota(jnp.int32, size_E.shape[0])
    return jnp.sum(jnp.where(index_E[None] < index_E[:, None], size_E[None], 0), axis=1)


def _product(x_bD, w_DF):
    # Weights in the dtype of x, as in every product; added up in float32.
    return jnp.dot(
        x_bD.astype(jnp.float32),
        w_DF.astype(x_bD.dtype).astype(jnp.float32),
        preferred_element_type=jnp.float32,
    )
