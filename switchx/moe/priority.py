# SPDX-License-Identifier: Apache-2.0
"""Batch-prioritized routing: the surest tokens get their slots first.

Riquelme et al. 2021 (arXiv:2106.05974), section 4.2, algorithm 2, with the largest gate as
the priority. Dims: G T S E
"""

import jax
import jax.numpy as jnp

from pallas_kernels.sorted_rows import stable_argsort


def by_gate(gate_GT, place):
    """Runs `place` on tokens in the order of their gates, the largest first.

    A token's slot then depends on all tokens of its group, later ones among them.

    Args:
        gate_GT: gate of each token's first choice; ties keep the order of the tokens.
        place: `expert_GTS` -> arrays `[G, T, ...]` in the same order of tokens.

    Returns:
        `expert_GTS` -> what `place` returns, in the old order of tokens.
    """
    order_GT = stable_argsort(-jax.lax.stop_gradient(gate_GT))
    # Where each token went: the inverse of a permutation is the order of it.
    inverse_GT = stable_argsort(order_GT)

    def reordered(expert_GTS):
        placed = place(_take(expert_GTS, order_GT))
        return jax.tree.map(lambda array: _take(array, inverse_GT), placed)

    return reordered


def _take(array, index_GT):
    index = index_GT.reshape(index_GT.shape + (1,) * (array.ndim - 2))
    return jnp.take_along_axis(array, index, axis=1)
