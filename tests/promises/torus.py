# SPDX-License-Identifier: Apache-2.0
"""How the axes of meshes lie in TPU slices: whether their groups are neighbours on the torus.

A group is the devices along one axis. Where it fills a box of chips, its exchange stays on the
links between them; in a line with gaps it shares the links of others. Nothing is compiled, and
chips are their coordinates, which `test_training_step.py` compares with the compiler's.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from switchx.partitioning.mesh import AXES, arranged, is_box, named_axes
from switchx.partitioning.topology import Topology

KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}
# (slice, number of slices, axes): each axis spans whole sides of a slice, or crosses slices. Of
# axes that share a side, only the innermost one can have groups without gaps.
MESHES = (
    ("v5p:8x8x16", 1, {"fsdp": 8, "expert": 128}),
    ("v5p:8x8x16", 1, {"data": 8, "fsdp": 8, "expert": 16}),
    ("v5e:16x16", 1, {"fsdp": 16, "expert": 16}),
    ("v5p:4x4x4", 2, {"data": 2, "fsdp": 4, "expert": 16}),
    ("v5p:4x4x4", 2, {"fsdp": 4, "node": 2, "expert": 16}),
    ("v4:8x8x16", 1, {"fsdp": 8, "node": 8, "expert": 16}),
)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device as `mesh_utils.create_device_mesh` looks at it."""

    id: int
    coords: tuple[int, int, int]
    device_kind: str
    slice_index: int = 0
    core_on_chip: int = 0
    process_index: int = 0
    platform: str = "tpu"


def chips_of(topology: Topology, slices: int = 1) -> list[Chip]:
    """The chips of equal slices in the order of their ids, x first."""
    x, y, z = (*topology.shape, 1)[:3]
    places = [place[::-1] for place in itertools.product(range(z), range(y), range(x))]
    return [
        Chip(number * len(places) + i, place, KINDS[topology.kind], number)
        for number in range(slices)
        for i, place in enumerate(places)
    ]


def groups_of(mesh: np.ndarray, axis: int) -> list[list[Chip]]:
    """The chips of each group along an axis that are in one slice."""
    lines = np.moveaxis(mesh, axis, -1).reshape(-1, mesh.shape[axis])
    return [
        list(group)
        for line in lines
        for _, group in itertools.groupby(line, key=lambda chip: chip.slice_index)
    ]


def sides_of(chips: list[Chip]) -> str:
    """`1x8x1`: the box around chips, in the order of x, y and z."""
    return "x".join(str(side) for side in np.ptp([chip.coords for chip in chips], axis=0) + 1)


def axes_on_slices() -> Iterator[tuple]:
    """The share of each mesh's groups that fill a box."""
    for name, slices, axes in MESHES:
        sizes = {axis: axes.get(axis, 1) for axis in AXES}
        mesh = arranged(chips_of(Topology.parse(name), slices), sizes)
        groups = {axis: groups_of(mesh, AXES.index(axis)) for axis in axes}
        are_boxes = [is_box(group) for each in groups.values() for group in each]
        boxes = ", ".join(f"{axis} {sides_of(each[0])}" for axis, each in groups.items())
        what = f"{named_axes(sizes)} on {slices} of {name}: {boxes}"
        yield "torus_contiguous", what, sum(are_boxes) / len(are_boxes)
