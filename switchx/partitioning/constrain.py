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


def current_rules() -> Rules:
    """The rules of the innermost `use_mesh`."""
    return _rules.get()


def num_devices() -> int:
    """Devices of the innermost `use_mesh`; 1 outside of any."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.size


def constrain(x, dims: str):
    """Splits activation `x` as the rules say; leaves it alone outside of `use_mesh`."""
    if num_devices() == 1:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(
        x, _rules.get().spec(dims, x.shape, mesh, table="activations")
    )
