# SPDX-License-Identifier: Apache-2.0
"""Parameters of a scanned stack, rearranged as those of the same stack unrolled."""

import jax


def unrolled_stack(params: dict, period: int) -> dict:
    """`layer_i` of repeat n, one slice of a stacked array, becomes `layer_{n * period + i}`."""
    repeats = len(jax.tree.leaves(params["blocks"])[0])
    blocks = {
        f"layer_{n * period + i}": jax.tree.map(
            lambda leaf, n=n: leaf[n], params["blocks"][f"layer_{i}"]
        )
        for n in range(repeats)
        for i in range(period)
    }
    return params | {"blocks": blocks}
