# SPDX-License-Identifier: Apache-2.0
"""Slices of accelerators that programs are compiled for, such as `v4:8x8x16` or `h200:8`."""

import dataclasses
import functools
import math
import re
from typing import Literal

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Generation:
    """The shapes of slices of one kind of chip.

    Attributes:
        platform: platform, as JAX names it.
        axes: number of sides of a slice.
        devices_per_chip: JAX devices per chip: 2 for a tpu7x, one for each core. Both cores of
            a v4 are one device, "megacore", as on existing machines.
        most_chips: chips of the largest slice that is one network.
        hbm_bytes: bytes of a device's memory that a program may use, as the compiler says when
            it refuses one (`test_training_step.py` asks it). For a GPU this is an
            assumption: 8% of its memory is left to CUDA and NCCL. The planner's spec files say
            the same.
        source: publication that gives the sizes.
    """

    platform: Literal["tpu", "cuda"]
    axes: int
    devices_per_chip: int
    most_chips: int
    hbm_bytes: int
    source: str


GENERATIONS = {
    "v4": Generation(
        "tpu", 3, 1, 4096, int(30.75 * GIB), "Jouppi et al. 2023, arXiv:2304.01433"
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
        if self.shape not in _slices(self.kind):
            near = " or ".join(map(str, self._nearest()))
            raise ValueError(
                f"topology {str(self)!r} does not exist: {_rule(self.kind)}; use {near}"
            )

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Reads a text such as `v4:8x8x16`; a single GPU may be `h200`."""
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
        """Slices of this kind with `count` devices, the most cubic one first."""
        per_chip = self.generation.devices_per_chip
        return [
            Topology(self.kind, shape)
            for shape in _slices(self.kind)
            if math.prod(shape) * per_chip == count and _is_ascending(shape)
        ]

    def _nearest(self) -> list["Topology"]:
        """The slice with the nearest sides, or those with the next fewer and more chips.

        Among flat slices, which are few, they are the nearest in the number of chips.
        """
        wanted, slices = math.prod(self.shape), _slices(self.kind)
        if self.generation.axes != len(self.shape):
            chips = sorted(set(map(math.prod, slices)))
            near = {
                *[n for n in chips if n <= wanted][-1:],
                *[n for n in chips if n >= wanted][:1],
            }
            per_chip = self.generation.devices_per_chip
            return [self.with_devices(n * per_chip)[0] for n in sorted(near)]
        is_flat = self.generation.axes == 2
        sides = sorted(self.shape) if is_flat else self.shape

        def distance(shape):
            chips = math.prod(shape)
            squares = sum((a - b) ** 2 for a, b in zip(sides, shape, strict=True))
            return abs(wanted - chips) if is_flat else 0, squares, -chips

        return [Topology(self.kind, min(slices, key=distance))]


@functools.cache
def _slices(kind: str) -> tuple[tuple[int, ...], ...]:
    """The sides of every slice of a kind, the most cubic first.

    Hosts have 2x2 chips; along a third axis, and beyond 4 chips, cubes of 4 are joined.
    """
    generation = GENERATIONS[kind]
    most = generation.most_chips
    if generation.axes == 1:
        return tuple((side,) for side in range(1, most + 1))
    if generation.axes == 2:
        return FLAT_SLICES

    def sides(largest: int) -> list[int]:
        return [side for side in (2, *range(4, largest + 1, 4)) if side <= largest]

    found = [
        (a, b, c)
        for a in sides(most // 2)
        for b in sides(most // a)
        for c in (1, *sides(most // (a * b)))
    ]
    return tuple(sorted(found, key=sum))


def _is_ascending(shape: tuple[int, ...]) -> bool:
    """Whether a slice has its sides in their usual order; a flat one's third side is last."""
    return list(shape) == sorted(shape) or (shape[-1] == 1 and shape[0] <= shape[1])


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
