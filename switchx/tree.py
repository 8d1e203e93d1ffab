# SPDX-License-Identifier: Apache-2.0
"""Pytree paths: names like `decoder/layer_1/ffn/w_in_EDF`, mapping with names, sizes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

Tree = Any


def path_name(path) -> str:
    """`jax.tree_util` key path -> names joined by `/`."""
    return "/".join(
        str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path
    )


def named_leaves(tree: Tree) -> dict[str, Any]:
    """All leaves by name, in tree order."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries of leaves by name: for such a tree, the inverse of `named_leaves`."""
    root: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return root


def map_named(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Maps every leaf to `function(name, leaf, *leaves_of_rest)`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(path_name(path), *leaves), tree, *rest
    )


def num_elements(tree: Tree) -> int:
    """Total number of elements in all arrays (or shape structs)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def num_bytes(tree: Tree) -> int:
    """Total number of bytes of all arrays (or shape structs)."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def parted(leaves: Sequence, chosen: Sequence[bool]) -> tuple[list, list]:
    """Splits leaves into those that are chosen and the others."""
    pairs = list(zip(leaves, chosen, strict=True))
    return [leaf for leaf, is_in in pairs if is_in], [
        leaf for leaf, is_in in pairs if not is_in
    ]
