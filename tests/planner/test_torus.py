# SPDX-License-Identifier: Apache-2.0
"""Axes of a mesh along the sides of a slice, against JAX' own assignment of them."""

import itertools

import numpy as np
import pytest
from jax._src import mesh_utils

from switchx.partitioning.mesh import AXES
from switchx.partitioning.topology import Topology
from switchx.planner.layout import Layout
from switchx.planner.torus import Line, lines_of, slice_sides


@pytest.mark.parametrize("kind, devices", [("v5e", 8), ("v5e", 128), ("v5p", 64), ("v5p", 512)])
def test_slices_are_the_most_cubic_ones_there_are(kind, devices):
    (first, *_) = Topology.parse(f"{kind}:{'4x4' if kind == 'v5e' else '4x4x4'}").with_devices(
        devices
    )
    assert slice_sides(devices, len(first.shape)) == first.shape


def lines(axes, sides, wraps_at=4, **sizes):
    return lines_of(axes, Layout(**sizes), sides, wraps_at)


def test_sides_are_rings_where_they_wrap_and_parts_are_lines():
    assert lines(("model",), (4, 4, 8), model=8) == [Line(8, 2)]
    assert lines(("model",), (4, 4, 8), wraps_at=16, model=8) == [Line(8, 1)]
    assert lines(("model",), (4, 4, 8), wraps_at=0, model=8) == [Line(8, 1)]
    # As many sides as there are: 16 is two of 4, not a part of anything.
    assert lines(("model",), (4, 4, 8), model=16) == [Line(4, 2), Line(4, 2)]
    assert lines(("data", "model"), (4, 8), data=4, model=8) == [Line(4, 2), Line(8, 2)]
    assert lines(("model",), (16, 16), wraps_at=16, data=64, model=4) == [Line(4, 1)]
    # Two parts of one side are the ring again.
    both = dict(data=4, expert=4, model=16)
    assert lines(("data", "expert"), (16, 16), wraps_at=16, **both) == [Line(16, 2)]
    # `data` has every fourth device of a side: four groups send through the same links.
    sizes = dict(data=4, expert=4, model=16)
    assert lines(("data",), (16, 16), wraps_at=16, **sizes) == [Line(4, 2 / 4)]
    assert lines(("data",), (16, 16), wraps_at=32, **sizes) == [Line(4, 1 / 4)]


SIDES = [(4, 4), (8, 16), (4, 4, 8), (8, 8, 16)]


@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_axes_take_the_sides_that_jax_gives_them(sides):
    """Of every mesh of up to three axes for which JAX splits no side."""
    devices, compared = np.arange(np.prod(sides)).reshape(sides), 0
    for sizes in itertools.product(*[[2**n for n in range(11)]] * 3):
        if np.prod(sizes) != devices.size:
            continue
        shape = dict(zip(("data", "expert", "model"), sizes, strict=True))
        layout = Layout(**shape)
        _, assigned = mesh_utils._create_device_mesh_for_nd_torus(
            devices, [layout.shape[axis] for axis in AXES], allow_split_physical_axes=True
        )
        if np.any(np.sum(assigned > 1, axis=1) > 1):  # a side is split among axes
            continue
        for i, axis in enumerate(AXES):
            found = [line.length for line in lines_of((axis,), layout, sides, 4)]
            assert sorted(found) == sorted(n for n in assigned[:, i] if n > 1), (shape, axis)
        compared += 1
    assert compared >= 4
