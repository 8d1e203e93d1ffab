# SPDX-License-Identifier: Apache-2.0
"""The collectives that one sparse layer runs on a mesh, forward and backward, and their bytes.

Chen et al. 2023 (Pipeline MoE, arXiv:2304.11414), section 3.3.4; Shen et al. 2022 (SE-MoE,
arXiv:2205.10034), section 4.2. They are counted as the dispatchers state them, before XLA
combines those of equal groups into one instruction. `gather` and `einsum` have no formula:
for these the compiler decides.
Dims: G groups, T tokens of a group, S choices of a token, E experts, R slots for experts,
C slots of an expert and group, D model, F feed-forward
"""

import dataclasses
import functools
import math
from typing import Literal

from switchx.partitioning.placement import Placement
from switchx.partitioning.rules import MeshAxes, Rules

GATE_BYTES = COUNT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class SparseLayer:
    """The properties of a sparse layer that determine its communication, for the global batch.

    Attributes:
        num_groups, tokens_per_group, num_choices, capacity: G, T, S and C.
        num_experts, d_model, d_ff: E, D and F.
        is_gated, has_bias: whether an expert has gate weights, and biases.
        activation_bytes, param_bytes: bytes of one element of the activations and parameters.
        num_slots: R of a bank that is gathered from the experts (`moe/expert_copies.py`); None
            if experts stay where they are.
        is_local: whether a device has the experts of its tokens among its slots, so that no
            token travels.
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
    num_slots: int | None = None
    is_local: bool = False

    @property
    def over_slots(self) -> "SparseLayer":
        """The layer that runs on the gathered bank: R experts."""
        return dataclasses.replace(self, num_experts=self.num_slots or self.num_experts)

    @property
    def weights(self) -> tuple[str, ...]:
        """Dimension letters of each of an expert's weights."""
        gate = ("EDF",) if self.is_gated else ()
        return ("EDF", *gate, "EFD", *(("EF", "ED") if self.has_bias else ()))

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's vector."""
        return self.d_model * self.activation_bytes


@dataclasses.dataclass(frozen=True)
class PlannedCollective:
    """One collective of one sparse layer.

    Attributes:
        kind: kind of the collective, as HLO names it.
        what: description of the array, for the user.
        phase: the pass; gradients of weights are part of the backward pass.
        axes: the mesh axes that it spans.
        num_bytes: bytes on one device, where the array is whole (`HloCollective.num_bytes`);
            for a ragged all-to-all, bytes of its operand, of which only rows with tokens
            travel.
        is_operand: whether only the experts' products read the result.
    """

    kind: str
    what: str
    phase: Literal["forward", "backward"]
    axes: MeshAxes
    num_bytes: int
    is_operand: bool = False


def sparse_layer_collectives(
    dispatcher: str, layer: SparseLayer, mesh, rules: Rules
) -> list[PlannedCollective]:
    """The collectives of one sparse layer from the plan to its output, forward and backward.

    Remat is not included. The router before the plan is replicated wherever tokens are:
    over `model` its gradient needs no sum, over the batch's axes it is summed with those of all
    other parameters.

    Raises:
        ValueError: the dispatcher leaves its communication to the compiler.
    """
    place = Placement.on(mesh, rules)
    if dispatcher not in _EXCHANGES:
        raise ValueError(
            f"dispatcher={dispatcher!r} leaves its communication to the compiler; use one of "
            f"{', '.join(_EXCHANGES)}"
        )
    exchange, is_scattered = _EXCHANGES[dispatcher], dispatcher == "sliced_scatter"
    if layer.is_local:
        exchange = None
    slots = layer.over_slots
    return [
        *bank_collectives(layer, mesh, rules),
        *(exchange(slots, place) if exchange else ()),
        *_outputs(layer, place, is_scattered=is_scattered),
        *_weights(slots, place, mesh, rules),
    ]


def gather_forward_collectives(
    layer: SparseLayer, mesh, rules: Rules
) -> list[PlannedCollective]:
    """Collectives of a forward pass by `gather`, as the compiler derives them from shardings.

    Slots go to the devices of their experts and back. If F is split, their outputs are summed.
    If groups do not divide over the devices, each device has only the outputs of its experts'
    slots, and tokens are summed over the devices.
    """
    place, tokens = Placement.on(mesh, rules), layer.num_groups * layer.tokens_per_group
    slots, found = _slot_bytes(layer, place), []
    if place.experts:
        rows = tuple(axis for axis in place.batch if axis not in place.experts)
        sent = tokens // place.size(rows) * layer.row_bytes
        is_whole = place.shared_by(layer.num_groups) == ()
        back = ("all-to-all", slots) if is_whole else ("all-reduce", sent)
        found += [
            ("all-to-all", "tokens to experts", place.experts, slots),
            (back[0], "results to tokens", place.experts, back[1]),
        ]
    if place.summed:
        found.append(("all-reduce", "outputs", place.summed, slots))
    weights = (each for each in _weights(layer, place, mesh, rules) if each.phase == "forward")
    return [
        PlannedCollective(kind, what, "forward", axes, num_bytes)
        for kind, what, axes, num_bytes in found
    ] + list(weights)


def bank_collectives(layer: SparseLayer, mesh, rules: Rules) -> list[PlannedCollective]:
    """Collectives that take experts' weights to the devices of their slots, gradients back.

    A device has E / P experts and R / P slots. E / P slots of each other device may be for that
    device's own experts, so it sends at most R - E + E / P experts.
    """
    place = Placement.on(mesh, rules)
    if layer.num_slots is None or not place.experts:
        return []
    devices = place.size(place.experts)
    own, sizes = layer.num_experts // devices, {"D": layer.d_model, "F": layer.d_ff}
    sent, received = layer.num_slots - layer.num_experts + own, layer.num_slots // devices
    found = []
    for dims in layer.weights:
        of_one = layer.param_bytes
        for letter in dims.removeprefix("E"):
            axes = rules.axes(letter, mesh, table="expert_params")
            of_one *= sizes[letter] // place.size(axes)
        found += [
            PlannedCollective(
                "ragged-all-to-all",
                f"{what} of slots",
                phase,
                place.experts,
                rows * of_one,
                is_operand=phase == "forward",
            )
            for what, phase, rows in (
                (f"w_{dims}", "forward", sent),
                (f"gradient of w_{dims}", "backward", received),
            )
        ]
    return found


def _all_to_all(layer: SparseLayer, place: Placement) -> list[PlannedCollective]:
    if shared := place.shared_by(layer.num_groups):
        return _all_to_all_of_shared_groups(layer, place, shared)
    slots = _slot_bytes(layer, place)
    return _to_experts_and_back("all-to-all", place.experts, slots, slots)


def _all_to_all_of_shared_groups(
    layer: SparseLayer, place: Placement, shared: MeshAxes
) -> list[PlannedCollective]:
    """Rows travel between the devices of a group, full slots between groups."""
    devices = place.size(shared)
    between = tuple(axis for axis in place.experts if axis not in shared)
    choices = layer.tokens_per_group // devices * layer.num_choices
    slots = layer.num_experts * layer.capacity // devices * layer.row_bytes
    counts = devices * layer.num_choices * layer.num_experts * COUNT_BYTES
    places = devices * choices * COUNT_BYTES
    found = [
        PlannedCollective("all-gather", "loads", "forward", shared, counts),
        PlannedCollective("all-gather", "slots of choices", "forward", shared, places),
        *_to_experts_and_back("ragged-all-to-all", shared, choices * layer.row_bytes, slots),
    ]
    if between:
        found += _to_experts_and_back("all-to-all", between, slots, slots)
    return found


def _hierarchical(layer: SparseLayer, place: Placement) -> list[PlannedCollective]:
    """Twice as many collectives as flat, of equal bytes: inside nodes, then between them."""
    slots = _slot_bytes(layer, place)
    return [
        each
        for axis in reversed(place.experts)
        for each in _to_experts_and_back("all-to-all", (axis,), slots, slots)
    ]


def _ragged(layer: SparseLayer, place: Placement) -> list[PlannedCollective]:
    num_parts = place.size(place.experts)
    groups = layer.num_groups // place.size(place.batch)
    choices = groups * layer.tokens_per_group * layer.num_choices
    received = min(num_parts * choices, layer.num_experts * groups * layer.capacity)
    counts = num_parts * layer.num_experts * COUNT_BYTES
    sent, received = choices * layer.row_bytes, received * layer.row_bytes
    return [
        PlannedCollective("all-gather", "loads", "forward", place.experts, counts),
        *_to_experts_and_back("ragged-all-to-all", place.experts, sent, received),
    ]


# None: every device has what its experts need.
_EXCHANGES = {
    "dropless": None,
    "all_to_all": _all_to_all,
    "hierarchical": _hierarchical,
    "ragged_all_to_all": _ragged,
    "sliced": None,
    "sliced_scatter": None,
}


def _to_experts_and_back(kind: str, axes: MeshAxes, sent: int, received: int):
    """An exchange of `sent` bytes to the experts and `received` bytes back; then reversed."""
    # Rows of a ragged exchange are put into slots before they are multiplied.
    sent_as_read = functools.partial(PlannedCollective, is_operand=kind == "all-to-all")
    return [
        sent_as_read(kind, "tokens to experts", "forward", axes, sent),
        PlannedCollective(kind, "results to tokens", "forward", axes, received),
        sent_as_read(kind, "gradients of results", "backward", axes, sent),
        PlannedCollective(kind, "gradients of tokens", "backward", axes, received),
    ]


def _slot_bytes(layer: SparseLayer, place: Placement) -> int:
    """Bytes of all slots of one device's groups, for the experts of all devices: E G C D."""
    groups = layer.num_groups // place.size(place.batch)
    return layer.num_experts * groups * layer.capacity * layer.row_bytes


def _outputs(
    layer: SparseLayer, place: Placement, *, is_scattered: bool
) -> list[PlannedCollective]:
    """Sums over devices that share tokens: those of a tensor-parallel FFN, and of gates."""
    if not place.summed:
        return []
    tokens = layer.num_groups * layer.tokens_per_group // place.size(place.batch)
    activations = tokens * layer.row_bytes
    gates = tokens * layer.num_choices * GATE_BYTES
    if is_scattered:
        found = [
            ("all-gather", "tokens", "forward", activations),
            ("reduce-scatter", "outputs", "forward", activations),
            ("all-gather", "gradients of outputs", "backward", activations),
            ("reduce-scatter", "gradients of tokens", "backward", activations),
        ]
    else:
        found = [
            ("all-reduce", "outputs", "forward", activations),
            ("all-reduce", "gradients of tokens", "backward", activations),
        ]
    found.append(("all-reduce", "gradient of gates", "backward", gates))
    return [
        PlannedCollective(kind, what, phase, place.summed, num_bytes)
        for kind, what, phase, num_bytes in found
    ]


def _weights(
    layer: SparseLayer, place: Placement, mesh, rules: Rules
) -> list[PlannedCollective]:
    """Slices of D gathered and their gradients scattered; gradients summed over replicas."""
    sizes = {"E": layer.num_experts, "D": layer.d_model, "F": layer.d_ff}
    found = []
    for dims in layer.weights:
        split = {letter: rules.axes(letter, mesh, table="expert_params") for letter in dims}
        elements = math.prod(sizes[letter] // place.size(split[letter]) for letter in dims)
        what, num_bytes = f"w_{dims}", elements * layer.param_bytes
        gradient = f"gradient of {what}"
        if "D" in dims and (axes := place.gathered):
            whole = num_bytes * place.size(axes)
            found += [
                PlannedCollective("all-gather", what, "forward", axes, whole, is_operand=True),
                PlannedCollective("reduce-scatter", gradient, "backward", axes, whole),
            ]
        used = {axis for axes in split.values() for axis in axes}
        replicas = tuple(axis for axis in place.varying if axis not in used)
        if replicas:
            found.append(
                PlannedCollective("all-reduce", gradient, "backward", replicas, num_bytes)
            )
    return found
