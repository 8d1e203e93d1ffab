# SPDX-License-Identifier: Apache-2.0
"""The axes of a mesh along the sides of a TPU slice, and the links that they get there.

A slice of a torus is a box of devices. A side is a ring if it is long enough for its ends to
be joined, else a line. An axis takes whole sides if its size is their product, as many as it
can, the innermost axis first, as JAX's `mesh_utils.create_device_mesh` does; otherwise parts of
sides, which are lines whatever the side is. If an axis inside it has a part of the same side,
its devices are not neighbours, and adjacent groups share the links between them.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

from switchx.planner.layout import Layout


@dataclasses.dataclass(frozen=True)
class Line:
    """Devices of a group along one side of a slice.

    Attributes:
        length: number of devices.
        links: links of each device that the group sends through, in both directions together: 2
            in a ring, 1 in a line, divided by the number of groups that share them.
    """

    length: int
    links: float


@functools.cache
def slice_sides(devices: int, dims: int) -> tuple[int, ...]:
    """The most cubic slice of this number of devices, its sides ascending."""
    found = [sides for sides in factorizations(devices, dims) if list(sides) == sorted(sides)]
    return min(found, key=sum)


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def factorizations(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as an ordered product of `factors` factors."""
    if factors == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in factorizations(number // first, factors - 1):
            yield first, *rest


def lines_of(axes: tuple[str, ...], layout: Layout, sides: tuple[int, ...], wraps_at: int):
    """The lines that a group of devices along `axes` lies along, in a slice with these sides.

    What does not divide over the sides is left out.
    """
    parts = _parts(tuple(layout.shape.items()), sides)
    found = []
    for side, whole in enumerate(sides):
        length = math.prod(parts[axis][side] for axis in axes)
        if length == 1:
            continue
        # The axes that have a part of this side, from the group's outermost one inwards.
        order = [axis for axis in layout.shape if parts[axis][side] > 1]
        inner = order[order.index(next(axis for axis in order if axis in axes)) :]
        stride = math.prod(parts[axis][side] for axis in inner if axis not in axes)
        is_ring = length * stride == whole and wraps_at > 0 and whole % wraps_at == 0
        found.append(Line(length, (2 if is_ring else 1) / stride))
    return found


@functools.cache
def _parts(shape: tuple[tuple[str, int], ...], sides: tuple[int, ...]) -> dict[str, list[int]]:
    """The number of devices along each side of the slice, for every axis."""
    left, parts = list(sides), {}
    for axis, size in reversed(shape):
        parts[axis] = [1] * len(sides)
        for side, taken in _taken(size, left):
            parts[axis][side] = taken
            left[side] //= taken
    return parts


def _taken(size: int, left: list[int]) -> list[tuple[int, int]]:
    """(side, devices along it) that an axis takes of what is left: whole sides, or parts."""
    sides = [side for side, rest in enumerate(left) if rest > 1]
    for count in range(len(sides), 0, -1):
        for chosen in itertools.combinations(sides, count):
            if math.prod(left[side] for side in chosen) == size:
                return [(side, left[side]) for side in chosen]
    found = []
    # The shortest side that the axis divides; otherwise by the largest common divisor.
    for side in sorted(sides, key=lambda side: (-math.gcd(size, left[side]), left[side])):
        if (common := math.gcd(size, left[side])) > 1:
            found.append((side, common))
            size //= common
    return found
