# SPDX-License-Identifier: Apache-2.0
"""Names and sizes of a tree's leaves, written down by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from switchx import tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    first: object
    second: object


def example():
    return {
        "decoder": {"layer_1": {"w_in_EDF": np.ones((2, 3, 4), np.float32)}},
        "state": Pair(first=[np.zeros(5, np.int8), np.zeros((), np.float32)], second=None),
        "bfloat16": jnp.zeros((2, 3), jnp.bfloat16),
    }


def test_names_of_leaves():
    leaves = tree.named_leaves(example())
    # A tree's order sorts the keys of dictionaries; None is no leaf.
    assert list(leaves) == [
        "bfloat16",
        "decoder/layer_1/w_in_EDF",
        "state/first/0",
        "state/first/1",
    ]
    assert leaves["state/first/0"].shape == (5,)
    assert tree.named_leaves(3) == {"": 3}
    left, right = {"a": 1, "b": [2, 3]}, {"a": 10, "b": [20, 30]}
    mapped = tree.map_named(lambda name, x, y: f"{name}={x + y}", left, right)
    assert mapped == {"a": "a=11", "b": ["b/0=22", "b/1=33"]}


def test_sizes_of_arrays_and_of_shapes():
    # 24 float32, 5 int8, 1 float32, 6 bfloat16.
    assert tree.num_elements(example()) == 24 + 5 + 1 + 6
    assert tree.num_bytes(example()) == 24 * 4 + 5 * 1 + 1 * 4 + 6 * 2
    shapes = jax.eval_shape(lambda: example())
    assert tree.num_elements(shapes) == tree.num_elements(example())
    assert tree.num_bytes(shapes) == tree.num_bytes(example())
    # Switch-C has 1.6e12 parameters; sizes are Python integers.
    shape = jax.ShapeDtypeStruct((2048, 1024, 1024, 1024), jnp.float32)
    assert tree.num_elements({"w": shape}) == 2**41
    assert tree.num_bytes({"w": shape}) == 2**43
