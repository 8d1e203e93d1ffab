# SPDX-License-Identifier: Apache-2.0
"""Routing statistics whose shares are easily worked out."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from switchx.moe.stats import RoutingStats


def two_layers() -> RoutingStats:
    """Two layers, two experts: 8 tokens of which 2 are dropped, and 4 of which 1 is."""
    numbers = dict(
        tokens=[8, 4],
        groups=[2, 4],
        balance=[3, 5],
        router_z=[4, 1],
        load_E=[[6, 2], [1, 3]],
        dropped=[2, 1],
        entropy=[4, 1],
        gate=[6, 3],
        prob_E=[[6, 2], [1, 3]],
        mass=[6, 2],
        margin=[2, 3],
        expected_dropped=[1, 0.5],
    )
    return RoutingStats(
        **{name: np.array(value, np.float32) for name, value in numbers.items()}
    )


def with_loads(load_NE) -> RoutingStats:
    """Statistics of layers with these loads, of one choice a token; all else is 0."""
    load_NE = jnp.asarray(load_NE, jnp.float32)
    fields = [each.name for each in dataclasses.fields(RoutingStats)[:8]]
    stats = RoutingStats(**dict.fromkeys(fields, jnp.zeros(load_NE.shape[:-1])))
    return dataclasses.replace(stats, load_E=load_NE, counted_E=load_NE, tokens=load_NE.sum(-1))
