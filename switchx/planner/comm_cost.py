# SPDX-License-Identifier: Apache-2.0
"""Which collectives a sparse layer runs on a mesh, forward and backward, and their bytes.

Chen et al. 2023 (Pipeline MoE, arXiv:2304.11414), section 3.3.4; Shen et al. 2022 (SE-MoE,
arXiv:2205.10034), section 4.2. Counted as the dispatchers say them, before XLA combines
those of equal groups into one instruction. `gather` and `einsum` have no formula: there the
compiler decides. Dims: G T S E C D F
"""

import dataclasses
from typing import Literal

from switchx.models.config import ModelConfig
from switchx.partitioning.placement import Placement
from switchx.partitioning.rules import MeshAxes, Rules

GATE_BYTES = COUNT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class SparseLayer:
    """What of a sparse layer decides its communication; counts are of the global batch.

    Attributes:
        num_groups, tokens_per_group, num_choices, capacity: G, T, S and C.
        num_experts, d_model, d_ff: E, D and F.
        is_gated, has_bias: which weights an expert has.
        activation_bytes, param_bytes: of one element.
    """

    num_groups: int
    tokens_per_group: int
    num_choices: int
    capacity: int
    num_experts: int
    d_model: int
    d_ff: int
    is_gated: bool = False
    has_bias: bool = False
    activation_bytes: int = 4
    param_bytes: int = 4

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        num_groups: int,
        tokens_per_group: int,
        num_choices: int,
        capacity: int,
        activation_bytes: int,
        param_bytes: int,
    ) -> "SparseLayer":
        """A sparse layer of the model that `config` describes.

        Raises:
            ValueError: the model is dense.
        """
        if config.switch is None:
            raise ValueError("a dense model has no sparse layer; give a config with switch")
        return cls(
            num_groups,
            tokens_per_group,
            num_choices,
            capacity,
            config.switch.num_experts,
            config.d_model,
            config.switch.d_ff or config.d_ff,
            config.is_gated,
            config.switch.expert_bias,
            activation_bytes,
            param_bytes,
        )

    @property
    def weights(self) -> tuple[str, ...]:
        """Dimension letters of an expert's weights."""
        gate = ("EDF",) if self.is_gated else ()
        return ("EDF", *gate, "EFD", *(("EF", "ED") if self.has_bias else ()))


@dataclasses.dataclass(frozen=True)
class PlannedCollective:
    """One collective of one sparse layer.

    Attributes:
        kind: as HLO names it.
        what: what it moves, for people.
        phase: when; gradients of weights are a part of the backward pass.
        axes: the mesh axes that it goes over.
        num_bytes: on one device, where the array is whole (`HloCollective.num_bytes`); of a
            ragged all-to-all its operand, of which no more than the load's rows travel.
    """

    kind: str
    what: str
    phase: Literal["forward", "backward"]
    axes: MeshAxes
    num_bytes: int


def sparse_layer_collectives(
    dispatcher: str, layer: SparseLayer, mesh, rules: Rules
) -> list[PlannedCollective]:
    """The collectives of one sparse layer from the plan to its output, forward and backward.

    Without remat. The router before it is replicated wherever tokens are: on `model` its
    gradient needs nothing, over the batch's axes it is summed with all other parameters'.

    Raises:
        ValueError: the dispatcher leaves its communication to the compiler.
    """
    place = Placement.on(mesh, rules)
    exchange = {
        "dropless": _nothing,
        "all_to_all": _all_to_all,
        "hierarchical": _hierarchical,
        "ragged_all_to_all": _ragged,
        "sliced": _nothing,
        "sliced_scatter": _nothing,
    }.get(dispatcher)
    if exchange is None:
        raise ValueError(
            f"dispatcher={dispatcher!r} leaves its communication to the compiler; use one of "
            "dropless, all_to_all, hierarchical, ragged_all_to_all, sliced, sliced_scatter"
        )
    is_split = dispatcher == "sliced_scatter"
    return [
        *exchange(layer, place),
        *_outputs(layer, place, is_split=is_split),
        *_weights(layer, place, mesh, rules),
    ]


def emulated(planned: list[PlannedCollective], mesh) -> list[PlannedCollective]:
    """The same on CPU, where a ragged all-to-all is an all-gather of all operands."""
    return [
        dataclasses.replace(
            each, kind="all-gather", num_bytes=each.num_bytes * _size(mesh, each.axes)
        )
        if each.kind == "ragged-all-to-all"
        else each
        for each in planned
    ]


def promoted(planned: list[PlannedCollective], layer: SparseLayer) -> list[PlannedCollective]:
    """The same on CPU, where XLA sends what has two bytes an element in float32."""
    weights = {f"{prefix}w_{dims}" for dims in layer.weights for prefix in ("", "gradient of ")}

    def promote(each):
        width = layer.param_bytes if each.what in weights else layer.activation_bytes
        if each.what in ("gradient of gates", "loads", "slots of choices"):
            width = 4
        return dataclasses.replace(each, num_bytes=each.num_bytes * max(1, 4 // width))

    return [promote(each) for each in planned]


def _size(mesh, axes: MeshAxes) -> int:
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def _nothing(layer: SparseLayer, place: Placement) -> list[PlannedCollective]:
    return []


def _there_and_back(kind: str, axes: MeshAxes, there: int, back: int):
    """An exchange of `there` bytes to the experts, of `back` bytes from them; both reversed."""
    return [
        PlannedCollective(kind, "tokens to experts", "forward", axes, there),
        PlannedCollective(kind, "results to tokens", "forward", axes, back),
        PlannedCollective(kind, "gradients of results", "backward", axes, there),
        PlannedCollective(kind, "gradients of tokens", "backward", axes, back),
    ]


def _slot_bytes(layer: SparseLayer, place: Placement) -> int:
    """All slots of one device's groups, for the experts of all devices: E G C D."""
    groups = layer.num_groups // place.size(place.batch)
    slots = layer.num_experts * groups * layer.capacity
    return slots * layer.d_model * layer.activation_bytes


def _all_to_all(layer: SparseLayer, place: Placement) -> list[PlannedCollective]:
    if shared := place.shared_by(layer.num_groups):
        return _shared(layer, place, shared)
    slots = _slot_bytes(layer, place)
    return _there_and_back("all-to-all", place.experts, slots, slots)


def _shared(layer: SparseLayer, place: Placement, shared: MeshAxes) -> list[PlannedCollective]:
    """Of groups that devices share: rows travel among those, full slots between groups."""
    devices = place.size(shared)
    between = tuple(axis for axis in place.experts if axis not in shared)
    row = layer.d_model * layer.activation_bytes
    choices = layer.tokens_per_group // devices * layer.num_choices
    slots = layer.num_experts * layer.capacity // devices
    counts = devices * layer.num_choices * layer.num_experts * COUNT_BYTES
    found = [
        PlannedCollective("all-gather", "loads", "forward", shared, counts),
        PlannedCollective(
            "all-gather", "slots of choices", "forward", shared, devices * choices * COUNT_BYTES
        ),
        *_there_and_back("ragged-all-to-all", shared, choices * row, slots * row),
    ]
    if between:
        found += _there_and_back("all-to-all", between, slots * row, slots * row)
    return found


def _hierarchical(layer: SparseLayer, place: Placement) -> list[PlannedCollective]:
    """Twice as many as flat, the same bytes each: inside of nodes, then between them."""
    slots = _slot_bytes(layer, place)
    return [
        each
        for axis in reversed(place.experts)
        for each in _there_and_back("all-to-all", (axis,), slots, slots)
    ]


def _ragged(layer: SparseLayer, place: Placement) -> list[PlannedCollective]:
    num_parts = place.size(place.experts)
    groups = layer.num_groups // place.size(place.batch)
    choices = groups * layer.tokens_per_group * layer.num_choices
    received = min(num_parts * choices, layer.num_experts * groups * layer.capacity)
    row = layer.d_model * layer.activation_bytes
    counts = num_parts * layer.num_experts * COUNT_BYTES
    return [
        PlannedCollective("all-gather", "loads", "forward", place.experts, counts),
        *_there_and_back("ragged-all-to-all", place.experts, choices * row, received * row),
    ]


def _outputs(
    layer: SparseLayer, place: Placement, *, is_split: bool
) -> list[PlannedCollective]:
    """Sums over devices that share tokens: as after a tensor-parallel dense FFN, and gates."""
    if not place.summed:
        return []
    tokens = layer.num_groups * layer.tokens_per_group // place.size(place.batch)
    activations = tokens * layer.d_model * layer.activation_bytes
    gates = tokens * layer.num_choices * GATE_BYTES
    if is_split:
        rows = [
            ("all-gather", "tokens", "forward", activations),
            ("reduce-scatter", "outputs", "forward", activations),
            ("all-gather", "gradients of outputs", "backward", activations),
            ("reduce-scatter", "gradients of tokens", "backward", activations),
        ]
    else:
        rows = [
            ("all-reduce", "outputs", "forward", activations),
            ("all-reduce", "gradients of tokens", "backward", activations),
        ]
    rows.append(("all-reduce", "gradient of gates", "backward", gates))
    return [
        PlannedCollective(kind, what, phase, place.summed, num_bytes)
        for kind, what, phase, num_bytes in rows
    ]


def _weights(layer, place: Placement, mesh, rules: Rules) -> list[PlannedCollective]:
    """Slices of D gathered and their gradients scattered; gradients summed over replicas."""
    sizes = {"E": layer.num_experts, "D": layer.d_model, "F": layer.d_ff}
    planned = []
    for dims in layer.weights:
        elements, split = 1, set()
        for letter in dims:
            axes = rules.axes(letter, mesh, table="expert_params")
            elements *= sizes[letter] // _size(mesh, axes)
            split |= set(axes)
        what, num_bytes = f"w_{dims}", elements * layer.param_bytes
        if "D" in dims and place.gathered:
            whole = num_bytes * _size(mesh, place.gathered)
            planned += [
                PlannedCollective("all-gather", what, "forward", place.gathered, whole),
                PlannedCollective(
                    "reduce-scatter", f"gradient of {what}", "backward", place.gathered, whole
                ),
            ]
        replicas = tuple(axis for axis in place.varying if axis not in split)
        if replicas:
            planned.append(
                PlannedCollective(
                    "all-reduce", f"gradient of {what}", "backward", replicas, num_bytes
                )
            )
    return planned
