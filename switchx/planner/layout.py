# SPDX-License-Identifier: Apache-2.0
"""How a training step is spread over devices: mesh sizes, dispatcher, microbatches.

Dims: none; sizes are of mesh axes.
"""

import dataclasses
import functools
import itertools
import math

from switchx.moe.config import DISPATCHERS
from switchx.partitioning.mesh import AXES
from switchx.partitioning.rules import MeshAxes, Rules

# Pipeline MoE (section 3.3): whole experts inside of the tensor-parallel group.
SLICED_RULES = Rules(
    expert_params=(
        *(rule for rule in Rules().expert_params if rule[0] == "N"),
        ("E", ("model",)),
        ("D", ("fsdp",)),
    )
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and what runs on it.

    Attributes:
        dispatcher: of Switch layers; None for a dense model.
        num_microbatches: parts a batch is split into, one after the other.
    """

    pipe: int = 1
    data: int = 1
    fsdp: int = 1
    node: int = 1
    expert: int = 1
    model: int = 1
    dispatcher: str | None = None
    num_microbatches: int = 1

    def __post_init__(self):
        for name in (*AXES, "num_microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; use at least 1")

    @functools.cached_property
    def shape(self) -> dict[str, int]:
        """Sizes by axis, as a mesh has them."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def stage(self) -> "Layout":
        """The layout of one stage of the pipeline."""
        return dataclasses.replace(self, pipe=1)

    @property
    def size(self) -> int:
        """Devices."""
        return math.prod(self.shape.values())

    @property
    def rules(self) -> Rules:
        """Whole experts on `model` where the dispatcher slices, Switch's rules elsewhere."""
        return SLICED_RULES if (self.dispatcher or "").startswith("sliced") else Rules()

    @property
    def has_equal_blocks(self) -> bool:
        """Whether every expert computes a block of as many rows, full or empty."""
        return self.dispatcher is not None and DISPATCHERS[self.dispatcher].has_equal_blocks

    def parts(self, axes: MeshAxes) -> int:
        """Devices along `axes` together."""
        return math.prod(self.shape[axis] for axis in axes)

    def group(self, axes: MeshAxes) -> tuple[int, ...]:
        """Numbers of the devices that communicate with device 0 over `axes`."""
        strides, stride = {}, 1
        for axis in reversed(AXES):
            strides[axis] = stride
            stride *= self.shape[axis]
        steps = (range(0, self.shape[a] * strides[a], strides[a]) for a in axes)
        return tuple(sorted(map(sum, itertools.product(*steps))))

    @property
    def name(self) -> str:
        """`data=2 expert=4 all_to_all`: what is more than one, and the dispatcher."""
        sizes = [f"{axis}={size}" for axis, size in self.shape.items() if size > 1]
        rest = [self.dispatcher] if self.dispatcher else []
        if self.num_microbatches > 1:
            rest.append(f"microbatches={self.num_microbatches}")
        return " ".join([*(sizes or ["data=1"]), *rest])
