# SPDX-License-Identifier: Apache-2.0
"""Small training states for the tests of checkpoints: real optimizers, every leaf a number."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array  # typed


def filled_state(step: int, optimizer=None, size: int = 16, dtype=jnp.float32) -> State:
    """A state all of whose floating numbers are `step`."""
    params = {
        "embedding_VD": jnp.full((size, 8), step, dtype),
        "decoder": {"layer_0": {"ffn": {"w_in_DF": jnp.full((8, size), step, jnp.bfloat16)}}},
    }
    optimizer = optimizer or optax.adam(1e-3)
    opt_state = jax.tree.map(lambda leaf: jnp.full_like(leaf, step), optimizer.init(params))
    return State(jnp.asarray(step, jnp.int32), params, opt_state, jax.random.key(step))


def big_state(megabytes):
    values = np.random.default_rng(0).normal(size=(megabytes, 1 << 18)).astype(np.float32)
    return {"params": {"w_DF": jnp.array(values)}, "step": jnp.asarray(megabytes)}


def shapes(state, sharding=None):
    """The state as ShapeDtypeStructs, all with one sharding."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state
    )


def raw(leaf) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same(got, expected) -> None:
    """Bit-equal, of the same structure and dtypes."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(raw(a), raw(b))


def damage(path) -> None:
    """Flips one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def assert_same_gradients(got: dict, want: dict) -> None:
    """Distance over norm: 1e-6 of all arrays together, 3e-6 of each (other fusions).

    What is all zero there, as the gradient of a bias that gets none, is so here.
    """
    assert got.keys() == want.keys()
    for name, leaf in want.items():
        if np.any(leaf):
            assert relative_error([got[name]], [leaf]) <= 3e-6, name
        else:
            assert not np.any(got[name]), name
    assert relative_error([got[name] for name in want], want.values()) <= 1e-6


def relative_error(got, want) -> float:
    """Of the norm of all arrays together."""
    squares = [
        (np.sum(np.square(a - b, dtype=np.float64)), np.sum(np.square(b, dtype=np.float64)))
        for a, b in zip(got, want, strict=True)
    ]
    return np.sqrt(np.divide(*np.sum(squares, axis=0)))
