# SPDX-License-Identifier: Apache-2.0
"""Which mesh axis each dimension letter is split over: one table for the whole project."""

import dataclasses

from jax.sharding import NamedSharding, PartitionSpec

from switchx import tree
from switchx.axes import DIMENSIONS, dims_of

MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Mesh axes of parameters' and of activations' dimensions; a letter not named is whole.

    Activations split the batch over every axis that holds different tokens, the experts'
    buffers over `expert`; parameters split the experts. Axes that the mesh does not have
    are left out.
    """

    activations: tuple[tuple[str, MeshAxes], ...] = (
        ("B", ("data", "expert")),
        ("G", ("data", "expert")),
        ("E", ("expert",)),
        ("R", ("data",)),
    )
    params: tuple[tuple[str, MeshAxes], ...] = (("E", ("expert",)),)

    def __post_init__(self):
        for name in ("activations", "params"):
            letters = [letter for letter, _ in getattr(self, name)]
            unknown = [letter for letter in letters if letter not in DIMENSIONS]
            if unknown or len(set(letters)) != len(letters):
                raise ValueError(
                    f"Rules.{name} names {', '.join(letters)}; use each letter once, out of "
                    f"{''.join(DIMENSIONS)}"
                )

    def spec(self, dims: str, shape, mesh, *, table: str) -> PartitionSpec:
        """The partition of an array with these dimensions over `mesh`.

        Args:
            dims: dimension letters, as `NEDF`.
            table: `params` or `activations`.

        Raises:
            ValueError: two dimensions claim one mesh axis, or a parameter's size is not
                divisible. An activation that is not divisible stays whole along that
                dimension: a batch of evaluation may be small.
        """
        rules, used, entries = dict(getattr(self, table)), {}, []
        for letter, size in zip(dims, shape, strict=True):
            axes = tuple(a for a in rules.get(letter, ()) if mesh.shape.get(a, 1) > 1)
            for axis in axes:
                if axis in used:
                    raise ValueError(
                        f"dimensions {used[axis]} and {letter} of {dims} both claim mesh axis "
                        f"{axis!r}; give them different axes in Rules.{table}"
                    )
            parts = 1
            for axis in axes:
                parts *= mesh.shape[axis]
            if size % parts:
                if table == "params":
                    below = size - size % parts
                    choices = f"{below} or {below + parts}" if below else f"{parts}"
                    raise ValueError(
                        f"{DIMENSIONS[letter]} dimension {letter}={size} is not divisible by "
                        f"mesh axis {'*'.join(axes)!r} of size {parts}; use {choices}, or a "
                        f"mesh with an axis that divides {size}"
                    )
                axes = ()
            used.update(dict.fromkeys(axes, letter))
            entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
        return PartitionSpec(*entries)


def param_sharding(rules: Rules, mesh, name: str, leaf) -> NamedSharding:
    """Sharding of one parameter, from the dimension letters in its name."""
    dims = dims_of(name.rsplit("/", 1)[-1], len(leaf.shape))
    return NamedSharding(mesh, rules.spec(dims, leaf.shape, mesh, table="params"))


def param_shardings(rules: Rules, mesh, params):
    """Shardings of a whole tree of parameters (arrays or shape structs)."""
    return tree.map_named(lambda name, leaf: param_sharding(rules, mesh, name, leaf), params)
