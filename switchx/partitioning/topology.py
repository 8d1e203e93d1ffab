# SPDX-License-Identifier: Apache-2.0
"""Slices of accelerators that programs are compiled for, named as `v4:8x8x16` or `h200:8`."""

import dataclasses
import itertools
import math
import re
from typing import Literal

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Generation:
    """What slices of one kind of chip look like.

    Attributes:
        platform: as JAX names it.
        axes: sides of a slice.
        devices_per_chip: a v4's two cores are devices of their own to the compiler.
        most_chips: of the largest slice that is one network.
        hbm_bytes: that a program may use of a device's memory, as the compiler says when it
            refuses one (`tests/training/test_aot.py` asks it). Of a GPU, an assumption: 8% of
            its memory are left to CUDA and NCCL. The planner's spec files say the same.
        source: where the sizes are from.
    """

    platform: Literal["tpu", "cuda"]
    axes: int
    devices_per_chip: int
    most_chips: int
    hbm_bytes: int
    source: str


GENERATIONS = {
    "v4": Generation(
        "tpu", 3, 2, 4096, int(15.25 * GIB), "Jouppi et al. 2023, arXiv:2304.01433"
    ),
    "v5e": Generation(
        "tpu", 2, 1, 256, int(15.75 * GIB), "https://cloud.google.com/tpu/docs/v5e"
    ),
    "v5p": Generation(
        "tpu", 3, 1, 6144, int(95.74 * GIB), "https://cloud.google.com/tpu/docs/v5p"
    ),
    "v6e": Generation(
        "tpu", 2, 1, 256, int(31.25 * GIB), "https://cloud.google.com/tpu/docs/v6e"
    ),
    "tpu7x": Generation(
        "tpu", 3, 2, 9216, int(94.75 * GIB), "https://cloud.google.com/tpu/docs/tpu7x"
    ),
    "h200": Generation(
        "cuda", 1, 1, 8, 92 * 141 * 10**7, "NVIDIA H200 datasheet: 141 GB, 8 in a machine"
    ),
}
# All slices of a v5e and a v6e of more than one chip (https://cloud.google.com/tpu/docs/v5e).
FLAT_SLICES = ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_NAME = re.compile(r"([a-z0-9]+)(?::(\d+(?:x\d+)*))?")


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice: a generation's name and the chips along each side.

    Raises:
        ValueError: there is no such slice; the message names ones near it.
    """

    kind: str
    shape: tuple[int, ...]

    def __post_init__(self):
        if self.kind not in GENERATIONS:
            raise ValueError(
                f"topology {str(self)!r}: there is no {self.kind!r}; use "
                f"{', '.join(GENERATIONS)}, as v4:8x8x16"
            )
        if not self._is_there():
            near = " or ".join(map(str, self._nearest()))
            raise ValueError(
                f"topology {str(self)!r} does not exist: {_rule(self.kind)}; use {near}"
            )

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """`v4:8x8x16`; a GPU alone may be `h200`."""
        match = _NAME.fullmatch(text)
        if not match or (match[2] is None and match[1] != "h200"):
            raise ValueError(
                f"topology {text!r} is not understood; write KIND:SIDES with a kind of "
                f"{', '.join(GENERATIONS)}, as v4:8x8x16, v5e:16x16 or h200:8"
            )
        return cls(match[1], tuple(int(side) for side in (match[2] or "1").split("x")))

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def generation(self) -> Generation:
        return GENERATIONS[self.kind]

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape) * self.generation.devices_per_chip

    def with_devices(self, count: int) -> list["Topology"]:
        """Slices of this kind with so many devices, the most cubic one first."""
        chips, rest = divmod(count, self.generation.devices_per_chip)
        if rest or chips > self.generation.most_chips:
            return []
        return [Topology(self.kind, shape) for shape in _shapes(self.kind, chips)]

    def _is_there(self) -> bool:
        generation = self.generation
        return (
            len(self.shape) == generation.axes
            and math.prod(self.shape) <= generation.most_chips
            and _sides_go_together(self.kind, self.shape)
        )

    def _nearest(self) -> list["Topology"]:
        """The slices with the next fewer and the next more chips."""
        axes, most = self.generation.axes, self.generation.most_chips
        wanted = math.prod(self.shape)
        if axes == len(self.shape) == 2:
            return [Topology(self.kind, min(FLAT_SLICES, key=self._distance))]
        if axes == len(self.shape):  # first the same shape, each side made one that is there
            sides = [_near_side(self.kind, i, side) for i, side in enumerate(self.shape)]
            while math.prod(sides) > most:
                axis = sides.index(max(sides))
                below = range(sides[axis] - 1, 0, -1)
                sides[axis] = next(n for n in below if _is_side(self.kind, axis, n))
            return [Topology(self.kind, tuple(sides))]
        fewer = next(
            (s for n in range(min(wanted, most), 0, -1) for s in _shapes(self.kind, n)), None
        )
        more = next((s for n in range(wanted, most + 1) for s in _shapes(self.kind, n)), None)
        return [Topology(self.kind, s) for s in dict.fromkeys((fewer, more)) if s]

    def _distance(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """From a flat slice: in chips, then in sides."""
        sides = zip(sorted(self.shape), shape, strict=True)
        chips = abs(math.prod(self.shape) - math.prod(shape))
        return chips, sum(abs(a - b) for a, b in sides)


def _sides_go_together(kind: str, shape: tuple[int, ...]) -> bool:
    if GENERATIONS[kind].axes == 2:
        return shape in FLAT_SLICES
    return all(map(_is_side, itertools.repeat(kind), range(3), shape))


def _is_side(kind: str, axis: int, side: int) -> bool:
    """Hosts have 2x2 chips; along a third axis, and beyond 4 chips, cubes of 4 are joined."""
    if GENERATIONS[kind].axes == 1:
        return side >= 1
    if side > 4:
        return side % 4 == 0
    return side in (1, 2, 4) if axis == 2 else side >= 2 and side % 2 == 0


def _near_side(kind: str, axis: int, side: int) -> int:
    return min(
        (n for n in range(1, 2 * side + 5) if _is_side(kind, axis, n)),
        key=lambda n: (abs(n - side), -n),
    )


def _shapes(kind: str, chips: int) -> list[tuple[int, ...]]:
    """Shapes of so many chips, sides ascending, the most cubic first."""
    axes = GENERATIONS[kind].axes
    if axes == 2:
        return [shape for shape in FLAT_SLICES if math.prod(shape) == chips]
    found = []

    def extend(sides, left):
        if len(sides) == axes - 1:
            sides = (*sides, left)
            is_there = all(_is_side(kind, i, side) for i, side in enumerate(sides))
            if is_there and (axes < 3 or left >= sides[-2] or left == 1):
                found.append(sides)
            return
        for side in range(sides[-1] if sides else 1, left + 1):
            if left % side == 0:
                extend((*sides, side), left // side)

    extend((), chips)
    return sorted(found, key=sum)


def _rule(kind: str) -> str:
    generation = GENERATIONS[kind]
    if generation.axes == 1:
        return f"{kind} stand in machines of 1 to {generation.most_chips}, as {kind}:8"
    if generation.axes == 2:
        sides = ", ".join("x".join(map(str, shape)) for shape in FLAT_SLICES)
        return (
            f"a {kind} slice has 2 sides, of {sides}, and at most {generation.most_chips} chips"
        )
    return (
        f"a {kind} slice has 3 sides, each 2 or a multiple of 4, the third may be 1, and at "
        f"most {generation.most_chips} chips"
    )
