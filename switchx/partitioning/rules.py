# SPDX-License-Identifier: Apache-2.0
"""The mesh axes that each dimension letter is split over: one table for the whole project.

Fedus et al. 2021 (Switch Transformers, arXiv:2101.03961), section 5, for the default; Chen
et al. 2023 (Pipeline MoE, arXiv:2304.11414), section 3.3, for its alternative. The letters are
the global ones of `switchx/axes.py`.
"""

import dataclasses
import math

from jax.sharding import NamedSharding, PartitionSpec

from switchx import tree
from switchx.axes import DIMENSIONS, dims_of
from switchx.fields import require, require_above_zero

MeshAxes = tuple[str, ...]
TABLES = ("activations", "params", "expert_params")
# Axes whose devices have different tokens.
BATCH = ("data", "fsdp", "node", "expert")


@dataclasses.dataclass(frozen=True)
class Rules:
    """Mesh axes of the dimensions of arrays of three kinds; a letter not named is whole.

    Axes that the mesh does not have are left out. The default is Switch Transformers'
    (section 5): experts on the devices that have different tokens, F, heads and vocabulary
    over `model`. Pipeline MoE (section 3.3) has whole experts on `model` instead:
    `expert_params=(("N", ("pipe",)), ("E", ("model",)), ("D", ("fsdp",)))`.

    Attributes:
        activations: arrays of tokens.
        params: parameters and their optimizer state, except those of `expert_params`.
        expert_params: parameters of which each expert has its own (E before another letter; the
            router `DE` has experts in it and belongs to none).
        may_stay_whole: letters of parameters that are replicated if the axes do not divide
            them: a vocabulary's size is given by its tokenizer, and there may be fewer heads of
            keys and values than an axis has devices. Other letters raise an error.
        vocab_room: size of the buffers of the exchange, if V of parameters is split over axes
            of the batch (`layers/embedding.py`), in even shares of tokens that are all
            different. A buffer too small for a text costs time, never rows.
        optimizer_slices: axes of the batch along which the optimizer state is sliced, besides
            the parameter's own axes; parameters are whole along them (ZeRO-1,
            `optimizer_slices.py`).
    """

    activations: tuple[tuple[str, MeshAxes], ...] = (
        ("B", BATCH),
        ("G", BATCH),
        ("E", ("node", "expert")),
        ("R", ("data", "fsdp")),
        ("H", ("model",)),
        ("F", ("model",)),
    )
    params: tuple[tuple[str, MeshAxes], ...] = (
        ("N", ("pipe",)),
        ("D", ("fsdp",)),
        ("F", ("model",)),
        ("H", ("model",)),
        ("Z", ("model",)),
        ("V", ("model",)),
    )
    expert_params: tuple[tuple[str, MeshAxes], ...] = (
        ("N", ("pipe",)),
        ("E", ("node", "expert")),
        ("D", ("fsdp",)),
        ("F", ("model",)),
        ("H", ("model",)),
    )
    may_stay_whole: tuple[str, ...] = ("V", "Z")
    vocab_room: float = 1.0
    optimizer_slices: MeshAxes = ()

    def __post_init__(self):
        for name in TABLES:
            letters = [letter for letter, _ in getattr(self, name)]
            require(
                len(set(letters) & set(DIMENSIONS)) == len(letters),
                f"Rules.{name} names {', '.join(letters)}; use each letter once, out of "
                f"{''.join(DIMENSIONS)}",
            )
        require_above_zero(self, "vocab_room")
        self._check_vocabulary()
        batch = dict(self.activations).get("B", ())
        others = [axis for axis in self.optimizer_slices if axis not in batch]
        require(
            not others and len(set(self.optimizer_slices)) == len(self.optimizer_slices),
            f"Rules.optimizer_slices={self.optimizer_slices!r}; use axes that split the batch, "
            f"each once, out of {', '.join(batch)}: gradients are summed over these",
        )

    def _check_vocabulary(self) -> None:
        """Checks that all axes of V or none split the batch, and that no such V stays whole."""
        rows = dict(self.params).get("V", ())
        batch = dict(self.activations).get("B", ())
        shared = [axis for axis in rows if axis in batch]
        others = [axis for axis in rows if axis not in batch]
        require(
            not (shared and others),
            f"Rules.params splits V over {', '.join(rows)}, of which {', '.join(others)} "
            f"has the same tokens everywhere and {', '.join(shared)} has not; use axes of "
            "one kind",
        )
        require(
            not shared or "V" not in self.may_stay_whole,
            f"Rules.params splits V over {', '.join(rows)} to save memory, but V is in "
            "Rules.may_stay_whole: a vocabulary that does not divide would be whole on "
            "every device; use may_stay_whole=()",
        )

    def without(self, axes: MeshAxes) -> "Rules":
        """The rules for each of the devices along `axes` by itself."""
        tables = {
            name: tuple(
                (letter, tuple(axis for axis in own if axis not in axes))
                for letter, own in getattr(self, name)
            )
            for name in TABLES
        }
        slices = tuple(axis for axis in self.optimizer_slices if axis not in axes)
        return dataclasses.replace(self, **tables, optimizer_slices=slices)

    def slice_axes(self, mesh) -> MeshAxes:
        """The axes of `optimizer_slices` that `mesh` has, outermost first."""
        return tuple(
            axis
            for axis, size in mesh.shape.items()
            if size > 1 and axis in self.optimizer_slices
        )

    def axes(self, letter: str, mesh, *, table: str) -> MeshAxes:
        """The axes of `mesh`, of more than one device, that a dimension is split over."""
        axes = dict(getattr(self, table)).get(letter, ())
        return tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)

    def has_slices_of_weights(self, mesh) -> bool:
        """Whether devices keep slices of D, so that weights are gathered for their use."""
        return any(self.axes("D", mesh, table=table) for table in ("params", "expert_params"))

    def spec(self, dims: str, shape, mesh, *, table: str) -> PartitionSpec:
        """The partition of an array with some dimensions over `mesh`.

        Args:
            dims: dimension letters, such as `NEDF`.
            table: one of `TABLES`.

        Raises:
            ValueError: two dimensions claim one mesh axis, or a parameter's size is not
                divisible. An activation that is not divisible stays whole along that
                dimension: a batch of evaluation may be small.
        """
        used, entries = {}, []
        for letter, size in zip(dims, shape, strict=True):
            axes = self.axes(letter, mesh, table=table)
            if table == "expert_params" and letter == "H" and "F" in dims:
                # In experts that write heads (`EFHK`), F has the axis that both may have.
                axes = tuple(axis for axis in axes if axis not in used)
            for axis in axes:
                if axis in used:
                    raise ValueError(
                        f"dimensions {used[axis]} and {letter} of {dims} both claim mesh axis "
                        f"{axis!r}; give them different axes in Rules.{table}"
                    )
            parts = math.prod(mesh.shape[axis] for axis in axes)
            if size % parts:
                if table != "activations" and letter not in self.may_stay_whole:
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


# Pipeline MoE (section 3.3): whole experts inside of the tensor-parallel group.
SLICED_RULES = Rules(
    expert_params=(
        *(rule for rule in Rules().expert_params if rule[0] == "N"),
        ("E", ("model",)),
        ("D", ("fsdp",)),
    )
)
# Rules of configs/meshes/pod.gin: experts on all devices with different tokens except replicas,
# and all other parameters in slices over those of their axes that `expert` does not name.
SPREAD_RULES = Rules(
    params=(
        ("N", ("pipe",)),
        ("D", ("fsdp", "node")),
        ("F", ("model",)),
        ("H", ("model",)),
        ("Z", ("model",)),
        ("V", ("model",)),
    ),
    expert_params=(("N", ("pipe",)), ("E", ("fsdp", "node", "expert")), ("F", ("model",))),
)
# ZeRO-1, as in configs/meshes/zero1.gin.
OPTIMIZER_SLICES = ("data",)


def param_table(dims: str) -> str:
    """The table of a parameter: `expert_params` if experts have their own (`NEDF`).

    The router's `DE` and `E` are `params`.
    """
    own = dims.lstrip("NP")
    return "expert_params" if own.startswith("E") and len(own) > 1 else "params"


def param_dims(name: str, shape) -> str:
    """The dimension letters of a parameter, from the last part of its name.

    A quantized matrix `w_in_EDF` is `w_in_EDF/values`, output-major, `EFD`, and
    `w_in_EDF/scales_EFG` (and `zeros_EFG`), whose G follow D if there are several
    (`pallas_kernels.QTensor`).
    """
    *_, owner, last = "", *name.split("/")
    if last == "values" or (last in ("scales_EFG", "zeros_EFG") and shape[-1] > 1):
        *batch, inputs, outputs = dims_of(owner, len(shape))
        return "".join((*batch, outputs, inputs))
    if last in ("scales_EFG", "zeros_EFG"):
        *batch, _, outputs = dims_of(owner, len(shape))
        return "".join((*batch, outputs, "G"))
    return dims_of(last, len(shape))


def param_spec(rules: Rules, mesh, name: str, shape) -> PartitionSpec:
    """The partition of one parameter, from the dimension letters in its name."""
    dims = param_dims(name, shape)
    return rules.spec(dims, shape, mesh, table=param_table(dims))


def param_sharding(rules: Rules, mesh, name: str, leaf) -> NamedSharding:
    """The sharding of one parameter, from the dimension letters in its name."""
    return NamedSharding(mesh, param_spec(rules, mesh, name, leaf.shape))


def param_shardings(rules: Rules, mesh, params):
    """The shardings of a whole tree of parameters (arrays or shape structs)."""
    return tree.map_named(lambda name, leaf: param_sharding(rules, mesh, name, leaf), params)
