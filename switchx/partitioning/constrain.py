# SPDX-License-Identifier: Apache-2.0
"""Sharding constraints on activations, by dimension letters."""

import contextlib
import contextvars

import jax
from jax.sharding import Mesh

from switchx.partitioning.rules import Rules

_rules: contextvars.ContextVar[Rules] = contextvars.ContextVar("rules")


@contextlib.contextmanager
def use_mesh(mesh: Mesh, rules: Rules):
    """Makes `mesh` and `rules` those that `constrain` follows, also while tracing.

    `jax.set_mesh`, not `with mesh:`: under the latter the abstract mesh is empty and every
    constraint would vanish silently.
    """
    token = _rules.set(rules)
    try:
        with jax.set_mesh(mesh):
            yield
    finally:
        _rules.reset(token)


def constrain(x, dims: str):
    """Splits activation `x` as the rules say; leaves it alone outside of `use_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(
        x, _rules.get().spec(dims, x.shape, mesh, table="activations")
    )
