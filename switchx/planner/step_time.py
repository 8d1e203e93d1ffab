# SPDX-License-Identifier: Apache-2.0
"""Seconds of a training step: products, collectives, the pipeline's bubble, the update.

    step = products / (1 - bubble) + collectives + update

No overlap is assumed: XLA and NCCL hide some communication behind products, so this is an
upper bound, and `overlapped_s` (the longer of the two) a lower one. The bubble is
(P-1)/(v M+P-1) of the pipelined part (Narayanan et al. 2021, arXiv:2104.04473, section 2.2):
the logits are not in it. Our stages also run collectives in it, which are counted
(`Layout.is_ours`); those of other systems wait for as long.

A collective takes its bytes over the achieved bandwidth, plus its messages' latencies. Switches
join rings as NCCL runs them: with n devices of a group, g of them in each node, m bytes where
the array is whole, B the achieved bytes per second of a device and a the latency of a message,

    all-gather, reduce-scatter   (n-1)/n m / min(B_in, g B_out) + (n - n/g) a_in + (n/g) a_out
    all-reduce                   twice that
    all-to-all                   max((g-1)/n m / B_in, (n-g)/n m / B_out)
                                 + (g-1) a_in + (n-g) a_out

if n > g; without the second network if n = g. On a torus (`torus.py`) a group sends both ways
through each ring it lies along and one way and back through a line, and an all-to-all's bytes
pass n/4 links of a ring on average, a quarter of what an all-gather of the same array takes.
Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.2, says why the hierarchical all-to-all
sends fewer messages.
Symbols: P stages, M microbatches, v chunks of a stage
"""

import dataclasses
import functools

from switchx.hardware.spec import Hardware, Network
from switchx.models.flops import flops_per_sequence
from switchx.planner.layout import Layout, Workload
from switchx.planner.memory import state_bytes, updated_bytes, vocabulary_parts
from switchx.planner.step_comm import StepCollective, step_collectives
from switchx.planner.torus import Line, lines_of, slice_sides


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one step.

    Attributes:
        compute_s: seconds of matrix products, recomputed ones included.
        collectives_s: seconds of collectives, by part (`StepCollective.part`).
        between_s: seconds of the collectives that leave a node.
        update_s: seconds of reading and writing parameters and optimizer state.
        bubble_s: seconds that a stage waits.
        bubble: share of `bubble_s` in the pipelined time.
        storage_s: seconds that experts in storage add: copies that are not hidden
            (storage_tiers.py).
    """

    compute_s: float
    collectives_s: dict[str, float]
    between_s: float
    update_s: float
    bubble_s: float
    bubble: float
    storage_s: float = 0.0

    @property
    def communication_s(self) -> float:
        return sum(self.collectives_s.values())

    @property
    def step_s(self) -> float:
        busy = self.compute_s + self.communication_s + self.update_s + self.bubble_s
        return busy + self.storage_s

    @property
    def overlapped_s(self) -> float:
        """Seconds of the step if all communication ran behind products."""
        busy = max(self.compute_s, self.communication_s)
        return busy + self.update_s + self.bubble_s + self.storage_s


def step_time(
    workload: Workload,
    layout: Layout,
    hardware: Hardware,
    collectives: list[StepCollective] | None = None,
) -> StepTime:
    """Predicts the seconds of one step.

    Args:
        collectives: collectives of another system; None takes `step_collectives`.

    Raises:
        ValueError: the layout does not divide a parameter, or a formula is missing.
    """
    if collectives is None:
        collectives = step_collectives(workload, layout, hardware.compute)
    seconds, between, in_ticks = {}, 0.0, 0.0
    for each in collectives:
        spent = each.count * collective_seconds(
            each.kind, each.num_bytes, each.axes, layout, hardware
        )
        if each.kind == "ragged-all-to-all" and each.part == "exchange":
            spent *= workload.uneven(layout)  # time until the busiest device has its rows
        seconds[each.part] = seconds.get(each.part, 0.0) + spent
        between += spent if crosses_nodes(each.axes, layout, hardware) else 0.0
        # It happens for every microbatch, so a bubble stretches it.
        is_sent = each.part == "pipeline" and each.kind != "all-reduce"
        in_ticks += spent if is_sent or each.part in ("layers", "exchange") else 0.0
    compute = device_flops(workload, layout) / hardware.compute.flops_per_s
    chunks = layout.schedule.num_chunks
    bubble = bubble_fraction(layout.pipe, chunks * layout.num_microbatches)
    waiting = (compute + in_ticks) * bubble / (1 - bubble)
    if layout.is_ours:
        waiting = executed_flops(workload, layout) / hardware.compute.flops_per_s - compute
    # The optimizer reads and writes parameters and its state, and reads gradients.
    update_bytes = 3 * updated_bytes(workload, layout)
    update_bytes += 2 * state_bytes(workload, layout, "optimizer")
    return StepTime(
        compute_s=compute,
        collectives_s=seconds,
        between_s=between,
        update_s=update_bytes / hardware.memory.achieved_bytes_per_s,
        bubble_s=waiting,
        bubble=bubble,
    )


def bubble_fraction(stages: int, microbatches: int) -> float:
    """The bubble of GPipe and of 1F1B as a share of their time: (P-1)/(M+P-1).

    Args:
        microbatches: M, times the v chunks of an interleaved schedule.
    """
    return (stages - 1) / (microbatches + stages - 1)


def device_flops(workload: Workload, layout: Layout) -> float:
    """FLOPs of a step on one device of a stage: forward, backward and recomputation, and
    a teacher's forward pass."""
    flops = _trained_flops(workload, layout)
    if (teacher := workload.taught_by) is not None:
        flops += _flops(teacher, layout.of_teacher(teacher), 1, 1)
    return flops


def executed_flops(workload: Workload, layout: Layout) -> float:
    """`device_flops` plus what a stage computes in ticks in which it has no microbatch."""
    rounds = layout.rounds / layout.num_microbatches
    idle = _trained_flops(workload, layout, has_logits=False) * (rounds - 1)
    return device_flops(workload, layout) + idle


def _trained_flops(workload: Workload, layout: Layout, has_logits: bool = True) -> float:
    """FLOPs of the trained model: backward takes two products for each one of forward."""
    is_again = workload.model.remat == "full"
    flops = _flops(workload, layout, layout.forwards + 2 + is_again, 3 if has_logits else 0)
    return flops - (_not_again(workload) / layout.size if is_again and layout.is_ours else 0)


def _not_again(workload: Workload) -> float:
    """FLOPs of a forward pass that remat does not need again: the last product of a dense FFN
    is a term of a sum that is kept."""
    model = workload.model
    flops = flops_per_sequence(model, workload.encoder_length, workload.decoder_length)
    return flops.dense_ffn * workload.batch_size / (3 if model.is_gated else 2)


def _flops(workload: Workload, layout: Layout, passes: int, passes_of_logits: int) -> float:
    """FLOPs of the given numbers of passes through the blocks and the logits."""
    model = workload.model
    flops = flops_per_sequence(model, workload.encoder_length, workload.decoder_length)
    rows = workload.batch_size
    # Empty slots are computed like full ones.
    blocks = flops.attention + flops.scores + flops.weighted_values + flops.cross_memory
    blocks += flops.dense_ffn
    if layout.has_whole_kv_heads(model):
        again = layout.parts_of("H") - 1
        blocks += flops.attention * model.kv_heads / (model.num_heads + model.kv_heads) * again
    if layout.has_equal_blocks and model.switch is not None:  # a teacher may be dense
        slots = 1 + model.switch.num_replicas / model.switch.num_experts
        blocks += flops.expert_slots * slots
    else:
        blocks += flops.experts * workload.uneven(layout)
    blocks = blocks * passes * rows / layout.size
    # Not divided by `model`, whose devices all route the same tokens.
    blocks += flops.router * passes * rows / (layout.size / layout.model)
    # Each stage has a part of the logits, and so does `model` if it splits the vocabulary.
    replicas = layout.size / layout.model
    return blocks + passes_of_logits * flops.logits * rows / replicas / vocabulary_parts(
        workload, layout
    )


EXCHANGES = ("all-to-all", "ragged-all-to-all")


def collective_seconds(
    kind: str, num_bytes: float, axes: tuple[str, ...], layout: Layout, hardware: Hardware
) -> float:
    """Seconds of one collective over `axes`.

    Args:
        kind: kind of the collective, as HLO names it.
        num_bytes: bytes on one device, where the array is whole
            (`PlannedCollective.num_bytes`).

    Raises:
        ValueError: the kind is not one of the planner's.
    """
    n = layout.parts(axes)
    if n == 1 or num_bytes == 0:
        return 0.0
    inside = _inside(axes, layout, hardware)
    if kind == "collective-permute":
        link = hardware.inside if inside.devices == n else hardware.between
        lanes = 1 if not link.torus_dims else 2
        return num_bytes / (lanes * link.achieved_bytes_per_s) + link.latency_s
    if kind in EXCHANGES:
        return _exchange(num_bytes, n, inside, hardware)
    passes = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}.get(kind)
    if passes is None:
        raise ValueError(
            f"kind={kind!r} has no formula; use all-gather, reduce-scatter, all-reduce, "
            f"collective-permute or one of {', '.join(EXCHANGES)}"
        )
    return passes * _ring(num_bytes, n, inside, hardware)


def crosses_nodes(axes: tuple[str, ...], layout: Layout, hardware: Hardware) -> bool:
    """Whether a collective over `axes` leaves a node."""
    return max(layout.group(axes)) >= hardware.devices_per_node


def _ring(num_bytes: float, n: int, inside: "_Inside", hardware: Hardware) -> float:
    """Seconds of one pass around the ring: every device sends all parts except one."""
    share = (n - 1) / n * num_bytes
    if inside.devices == n:
        return share / inside.ring_bytes_per_s + inside.latency_s
    nodes = n // inside.devices
    slowest = inside.devices * hardware.between.achieved_bytes_per_s
    if inside.devices > 1:
        slowest = min(slowest, inside.ring_bytes_per_s)
    latency = (n - nodes) * hardware.inside.latency_s + nodes * hardware.between.latency_s
    return share / slowest + latency


def _exchange(num_bytes: float, n: int, inside: "_Inside", hardware: Hardware) -> float:
    """Seconds of an exchange: every device sends 1/n of its bytes to each."""
    slow, devices = hardware.between, inside.devices
    near = inside.exchange_s(num_bytes * devices / n) if devices > 1 else 0.0
    far = (n - devices) / n * num_bytes / slow.achieved_bytes_per_s
    return max(near, far) + inside.latency_s + (n - devices) * slow.latency_s


@dataclasses.dataclass(frozen=True)
class _Inside:
    """The devices of a group in one node, behind a switch or on a torus.

    Attributes:
        lines: lines that they lie along on a torus; () behind a switch.
    """

    network: Network
    devices: int
    lines: tuple[Line, ...]

    @property
    def ring_bytes_per_s(self) -> float:
        links = sum(line.links for line in self.lines) if self.lines else 1
        return links * self.network.achieved_bytes_per_s

    @property
    def latency_s(self) -> float:
        """The latency of a device's messages to all others; on a torus, of all hops around."""
        hops = sum(line.length - 1 for line in self.lines) if self.lines else self.devices - 1
        return hops * self.network.latency_s

    def exchange_s(self, num_bytes: float) -> float:
        if not self.lines:
            share = (self.devices - 1) / self.devices
            return share * num_bytes / self.network.achieved_bytes_per_s
        # n/4 links on a ring, n/3 on a line, over two directions of one link each way.
        slowest = max(line.length / (4 * line.links) for line in self.lines)
        return num_bytes * slowest / self.network.achieved_bytes_per_s


@functools.cache
def _inside(axes: tuple[str, ...], layout: Layout, hardware: Hardware) -> _Inside:
    network, most = hardware.inside, hardware.devices_per_node
    devices = sum(device < most for device in layout.group(axes))
    if not network.torus_dims or devices == 1:
        return _Inside(network, devices, ())
    sides = slice_sides(min(layout.size, most), network.torus_dims)
    lines = tuple(lines_of(axes, layout, sides, network.wraps_at))
    # Devices that do not divide over the sides of the slice are treated as one line.
    return _Inside(network, devices, lines or (Line(devices, 1),))
