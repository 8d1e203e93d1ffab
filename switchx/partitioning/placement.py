# SPDX-License-Identifier: Apache-2.0
"""The placement of a sparse layer's tokens and experts on a mesh, by its rules.

Fedus et al. 2021 (arXiv:2101.03961), section 5; Chen et al. 2023 (Pipeline MoE,
arXiv:2304.11414), section 3.3. Dims: G groups of tokens, E experts, F feed-forward, D model
"""

import dataclasses
import math

from switchx.partitioning.rules import MeshAxes, Rules


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh axes that hold each part of a sparse layer, without axes of one device.

    Attributes:
        batch: axes whose devices have different groups of tokens.
        experts: axes that the experts are split over.
        parts: axes whose devices have parts of the same experts (F).
        gathered: axes that keep slices of D of the experts' weights.
        sizes: devices along each axis of the mesh.
    """

    batch: MeshAxes
    experts: MeshAxes
    parts: MeshAxes
    gathered: MeshAxes
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def on(cls, mesh, rules: Rules) -> "Placement":
        """Reads `rules` for a mesh, or for anything with a `shape` like one's."""
        return cls(
            batch=rules.axes("G", mesh, table="activations"),
            experts=rules.axes("E", mesh, table="expert_params"),
            parts=rules.axes("F", mesh, table="expert_params"),
            gathered=rules.axes("D", mesh, table="expert_params"),
            sizes=tuple(mesh.shape.items()),
        )

    def size(self, axes: MeshAxes) -> int:
        """The number of devices along `axes` together."""
        return math.prod(dict(self.sizes)[axis] for axis in axes)

    def shared_by(self, num_groups: int) -> MeshAxes | None:
        """The axes along which devices share each of so many groups of tokens.

        () if devices have whole groups, the same number each. Otherwise the last axes of the
        batch, with one group at each position along the axes before; None if there are not as
        many of these positions as groups.
        """
        if num_groups % self.size(self.batch) == 0:
            return ()
        for i in range(len(self.batch)):
            if self.size(self.batch[:i]) == num_groups:
                return self.batch[i:]
        return None

    @property
    def varying(self) -> MeshAxes:
        """Axes along which devices compute different things."""
        axes = self.batch + self.gathered + self.experts + self.parts
        return tuple(dict.fromkeys(axes))

    @property
    def summed(self) -> MeshAxes:
        """Axes whose devices have terms of one token's output."""
        return tuple(axis for axis in self.varying if axis not in self.batch)


ONE_DEVICE = Placement((), (), (), (), ())
