# SPDX-License-Identifier: Apache-2.0
"""Which blocks of rows meet which expert: the schedule that steers the TPU kernels.

Rows lie sorted by expert and are cut into blocks of fixed size. A block that holds rows of
two experts is visited twice in a row, once for each (the scheme of Gale et al. 2022,
MegaBlocks, arXiv:2211.15841, and of JAX's megablox). The schedule is computed by XLA from
prefix sums, without a loop: built by scalar code in the kernel it costs more than the
product itself once experts are many and rows few.
Dims: R E; V visits
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.routing.groups import group_bounds


class Visits(NamedTuple):
    """Visits in order; of each array the first `count[0]` mean something.

    Attributes:
        expert_V: the expert whose matrix is used.
        block_V: the block of rows.
        begin_V, end_V: the expert's rows within the block, counted from the block's first;
            equal where the visit has no rows and only zeros are to be written.
        count: [visits, visits before the first block that lies past the last expert's rows].
    """

    expert_V: jax.Array
    block_V: jax.Array
    begin_V: jax.Array
    end_V: jax.Array
    count: jax.Array


def num_blocks(num_rows: int, block: int) -> int:
    return -(-num_rows // block)


def visits_of_blocks(group_sizes_E, num_rows: int, block: int) -> Visits:
    """Every block once for each expert that has rows in it, then the blocks without rows.

    A block past the last expert's rows is visited once, so that zeros are written to it. It
    names the expert of the visit before, whose matrix is there already.
    """
    begin_E, end_E = group_bounds(group_sizes_E, num_rows)
    first_E, last_E = begin_E // block, (end_E - 1) // block
    has_rows_E = end_E > begin_E
    per_expert_E = jnp.where(has_rows_E, last_E - first_E + 1, 0)
    last_expert = jnp.max(jnp.where(has_rows_E, jnp.arange(end_E.size), 0))
    used_blocks = -(-end_E[-1] // block)
    with_rows = jnp.sum(per_expert_E)
    count = with_rows + num_blocks(num_rows, block) - used_blocks
    # Each further expert of a block adds a visit to those of the blocks themselves.
    size = num_blocks(num_rows, block) + min(end_E.size, num_rows) - 1
    visit_V = jnp.arange(size, dtype=jnp.int32)
    expert_V = jnp.minimum(_expert_of_visit(per_expert_E, visit_V), last_expert)
    first_visit_E = jnp.cumsum(per_expert_E) - per_expert_E
    block_V = jnp.where(
        visit_V < with_rows,
        first_E[expert_V] + visit_V - first_visit_E[expert_V],
        used_blocks + visit_V - with_rows,
    )
    # Past the end, where nothing is visited, indices stay within bounds.
    block_V = jnp.minimum(block_V, num_blocks(num_rows, block) - 1)
    return _visits(begin_E, end_E, expert_V, block_V, block, jnp.stack([count, with_rows]))


def visits_of_experts(group_sizes_E, num_rows: int, block: int) -> Visits:
    """Every expert with each block that holds rows of it; one without rows once.

    That visit writes the zeros of its gradient. It names the block of the visit before,
    which is there already. Blocks past the last expert's rows are not visited.
    """
    begin_E, end_E = group_bounds(group_sizes_E, num_rows)
    has_rows_E, last_E = end_E > begin_E, (end_E - 1) // block
    first_E = jnp.where(has_rows_E, begin_E // block, jnp.maximum(end_E - 1, 0) // block)
    per_expert_E = jnp.where(has_rows_E, last_E - first_E + 1, 1)
    count = jnp.sum(per_expert_E)
    size = num_blocks(num_rows, block) + end_E.size - 1
    visit_V = jnp.arange(size, dtype=jnp.int32)
    expert_V = jnp.minimum(_expert_of_visit(per_expert_E, visit_V), end_E.size - 1)
    first_visit_E = jnp.cumsum(per_expert_E) - per_expert_E
    block_V = first_E[expert_V] + visit_V - first_visit_E[expert_V]
    block_V = jnp.clip(block_V, 0, num_blocks(num_rows, block) - 1)
    return _visits(begin_E, end_E, expert_V, block_V, block, jnp.stack([count, count]))


def _expert_of_visit(per_expert_E, visit_V):
    # Comparing with all costs less than a binary search, which would be a loop.
    return jnp.searchsorted(
        jnp.cumsum(per_expert_E), visit_V, side="right", method="compare_all"
    )


def _visits(begin_E, end_E, expert_V, block_V, block: int, count) -> Visits:
    start_V = block_V * block
    begin_V = jnp.clip(begin_E[expert_V] - start_V, 0, block)
    end_V = jnp.clip(end_E[expert_V] - start_V, 0, block)
    # A block past the last rows names an expert whose rows end before it: 0 to 0.
    arrays = (expert_V, block_V, jnp.minimum(begin_V, end_V), end_V, count)
    return Visits(*(array.astype(jnp.int32) for array in arrays))
