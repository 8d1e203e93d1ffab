# SPDX-License-Identifier: Apache-2.0
"""Seconds of a training step: products, collectives, the pipeline's bubble, the update.

    step = (products + collectives of the layers) / (1 - bubble)
           + collectives once a step + update

Nothing overlaps: XLA and NCCL hide some communication behind products, so this is a bound
from above, and `overlapped_s` (the longer of the two) one from below. The bubble is
(P-1)/(M+P-1) of the pipelined part (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

A collective takes its bytes over the achieved bandwidth, and its messages' latencies. Switches
join rings as NCCL runs them: with n devices of a group, g of them in each node, m bytes where
the array is whole, B the achieved bytes a second of a device and a the latency of a message,

    all-gather, reduce-scatter   (n-1)/n m / min(B_in, g B_out) + (n - n/g) a_in + (n/g) a_out
    all-reduce                   twice that
    all-to-all                   max((g-1)/n m / B_in, (n-g)/n m / B_out)
                                 + (g-1) a_in + (n-g) a_out

where n > g; without the second network where n = g. On a torus a ring sends both ways
through each dimension it lies along, and an all-to-all's bytes pass n/4 links on average,
a quarter of what an all-gather of the same array takes. Shen et al. 2022 (SE-MoE,
arXiv:2205.10034), section 4.2, says why the hierarchical all-to-all sends fewer messages.
Symbols: P stages, M microbatches
"""

import dataclasses
import math

from switchx.planner.hardware import Hardware, Network
from switchx.planner.layout import Layout, Workload
from switchx.planner.memory import state_bytes, vocabulary_parts
from switchx.planner.model_cost import flops_per_sequence
from switchx.planner.step_comm import StepCollective, step_collectives


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one step.

    Attributes:
        compute_s: matrix products, recomputed ones among them.
        collectives_s: collectives by part (`StepCollective.part`).
        between_s: those of all collectives that leave a node.
        update_s: reading and writing parameters and the optimizer's state.
        bubble_s: the time in which a stage waits.
        bubble: its share of the pipelined time.
        storage_s: what experts in storage add: copies that do not hide (storage_tiers.py).
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
        collectives: those of another system; None takes `step_collectives`.

    Raises:
        ValueError: the layout does not divide a parameter, or a formula is missing.
    """
    if collectives is None:
        collectives = step_collectives(workload, layout)
    seconds, between, in_ticks = {}, 0.0, 0.0
    for each in collectives:
        spent = each.count * collective_seconds(
            each.kind, each.num_bytes, each.axes, layout, hardware
        )
        seconds[each.part] = seconds.get(each.part, 0.0) + spent
        between += spent if crosses_nodes(each.axes, layout, hardware) else 0.0
        # It happens for every microbatch, so that a bubble stretches it.
        is_sent = each.part == "pipeline" and each.kind != "all-reduce"
        in_ticks += spent if is_sent or each.part in ("layers", "exchange") else 0.0
    compute = device_flops(workload, layout) / hardware.compute.flops_per_s
    bubble = bubble_fraction(layout.pipe, layout.num_microbatches)
    # The optimizer reads and writes parameters and its state, and reads gradients.
    update_bytes = 3 * state_bytes(workload, layout, "params")
    update_bytes += 2 * state_bytes(workload, layout, "optimizer")
    return StepTime(
        compute_s=compute,
        collectives_s=seconds,
        between_s=between,
        update_s=update_bytes / hardware.memory.achieved_bytes_per_s,
        bubble_s=(compute + in_ticks) * bubble / (1 - bubble),
        bubble=bubble,
    )


def bubble_fraction(stages: int, microbatches: int) -> float:
    """The bubble of GPipe and of 1F1B as a share of their time: (P-1)/(M+P-1)."""
    return (stages - 1) / (microbatches + stages - 1)


def device_flops(workload: Workload, layout: Layout) -> float:
    """FLOPs of a step on one device of the busiest stage: forward, backward, recomputed; and
    a teacher's forward pass."""
    flops = _flops(workload, layout, 4 if workload.model.remat == "full" else 3, 3)
    if (teacher := workload.taught_by) is not None:
        flops += _flops(teacher, layout.of_teacher(teacher), 1, 1)
    return flops


def _flops(workload: Workload, layout: Layout, passes: int, passes_of_logits: int) -> float:
    """FLOPs of so many passes through the blocks and the logits."""
    model = workload.model
    flops = flops_per_sequence(model, workload.encoder_length, workload.decoder_length)
    rows = workload.batch_size
    # Of slots both full and empty ones.
    blocks = flops.attention + flops.scores + flops.weighted_values + flops.cross_memory
    blocks += flops.dense_ffn + (
        flops.expert_slots if layout.has_equal_blocks else flops.experts
    )
    blocks = blocks * passes * rows / layout.size
    # Not on `model`, whose devices all route the same tokens.
    blocks += flops.router * passes * rows / (layout.size / layout.model)
    replicas = layout.size / layout.pipe / layout.model
    # The last stage has its blocks and the logits.
    return blocks + passes_of_logits * flops.logits * rows / replicas / vocabulary_parts(
        workload, layout
    )


EXCHANGES = ("all-to-all", "ragged-all-to-all")


def collective_seconds(
    kind: str, num_bytes: float, axes: tuple[str, ...], layout: Layout, hardware: Hardware
) -> float:
    """Seconds of one collective over `axes`.

    Args:
        kind: as HLO names it.
        num_bytes: on one device, where the array is whole (`PlannedCollective.num_bytes`).

    Raises:
        ValueError: the kind is not one of the planner's.
    """
    devices = layout.group(axes)
    n = len(devices)
    if n == 1 or num_bytes == 0:
        return 0.0
    inside = sum(device < hardware.devices_per_node for device in devices)
    if kind == "collective-permute":
        link = hardware.inside if inside == n else hardware.between
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


def _ring(num_bytes: float, n: int, inside: int, hardware: Hardware) -> float:
    """Seconds of one pass around the ring: every device sends all parts but one."""
    share = (n - 1) / n * num_bytes
    if inside == n:
        return share / _ring_bytes_per_s(hardware.inside, n) + _hops(hardware.inside, n)
    nodes = n // inside
    slowest = inside * hardware.between.achieved_bytes_per_s
    if inside > 1:
        slowest = min(slowest, _ring_bytes_per_s(hardware.inside, inside))
    latency = (n - nodes) * hardware.inside.latency_s + nodes * hardware.between.latency_s
    return share / slowest + latency


def _exchange(num_bytes: float, n: int, inside: int, hardware: Hardware) -> float:
    """Seconds of an exchange: every device sends 1/n of its bytes to each."""
    fast, slow = hardware.inside, hardware.between
    near = _exchange_inside(fast, num_bytes * inside / n, inside) if inside > 1 else 0.0
    far = (n - inside) / n * num_bytes / slow.achieved_bytes_per_s
    messages = _hops(fast, inside) + (n - inside) * slow.latency_s
    return max(near, far) + messages


def _exchange_inside(network: Network, num_bytes: float, n: int) -> float:
    if not network.torus_dims:
        return (n - 1) / n * num_bytes / network.achieved_bytes_per_s
    side, wraps = _side(network, n)
    # n/4 links on a ring, n/3 on a line, over two directions of one link each way.
    return num_bytes * side / (8 if wraps else 4) / network.achieved_bytes_per_s


def _ring_bytes_per_s(network: Network, n: int) -> float:
    if not network.torus_dims:
        return network.achieved_bytes_per_s
    _, wraps = _side(network, n)
    return (2 if wraps else 1) * _dims(network, n) * network.achieved_bytes_per_s


def _hops(network: Network, n: int) -> float:
    """Seconds of latency: of a device's n - 1 messages; on a torus, of the way around."""
    if not network.torus_dims:
        return (n - 1) * network.latency_s
    return _dims(network, n) * (_side(network, n)[0] - 1) * network.latency_s


def _dims(network: Network, n: int) -> int:
    """The number of torus dimensions that a group of n lies along: as few as hold it."""
    dims = math.ceil(round(math.log(n) / math.log(network.torus_side), 6))
    return min(network.torus_dims, max(1, dims))


def _side(network: Network, n: int) -> tuple[float, bool]:
    """Devices along each dimension of a group of n, and whether those are rings."""
    side = n ** (1 / _dims(network, n))
    whole = round(side)
    return side, abs(side - whole) > 1e-6 or whole % network.wraps_at == 0
