# SPDX-License-Identifier: Apache-2.0
"""The number of buckets in which a step gathers parameters, by the sizes of their slices."""

import jax

from switchx import tree
from switchx.partitioning.buckets import Slicing
from switchx.partitioning.rules import param_dims


def count_buckets(params, slicing: Slicing) -> tuple[int, int]:
    """Buckets of all that is outside of blocks, and of the blocks of all scanned periods.

    A step gathers the former once and the latter twice, and scatters each once.

    Args:
        params: the whole parameters, or their shapes.
    """
    groups: dict[str, dict] = {}
    for name, leaf in tree.named_leaves(params).items():
        stack, _, inner = name.partition("/blocks/")
        block = f"{stack}/{inner.split('/')[0]}" if inner else ""
        shape = list(leaf.shape)
        if (axis := slicing.sliced_axis(name, shape)) is not None:
            shape[axis] //= slicing.num_parts
        if param_dims(name, shape).startswith("N"):
            shape = shape[1:]  # a loop gathers one repetition at a time
        slices = groups.setdefault(block, {})
        slices[name] = jax.ShapeDtypeStruct(shape, leaf.dtype)
    counts = {block: slicing.index(slices).num_buckets for block, slices in groups.items()}
    return counts.pop(""), sum(counts.values())
