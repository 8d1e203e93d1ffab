# SPDX-License-Identifier: Apache-2.0
"""Seconds of a training step: products, collectives, the pipeline's bubble, the update.

    step = (products + collectives of the layers) / (1 - bubble)
           + collectives once a step + update

Nothing overlaps: XLA and NCCL hide some communication behind products, so this is a bound
from above, and `overlapped_s` (the longer of the two) one from below. The bubble is
(P-1)/(M+P-1) of the pipelined part (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
"""

import dataclasses

from switchx.planner.collective_time import collective_seconds, crosses_nodes
from switchx.planner.hardware import Hardware
from switchx.planner.layout import Layout
from switchx.planner.memory import EQUAL_BLOCKS, state_bytes
from switchx.planner.model_cost import SequenceFlops, flops_per_sequence
from switchx.planner.step_comm import StepCollective, step_collectives
from switchx.planner.workload import Workload


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one step.

    Attributes:
        compute_s: of matrix products, recomputed ones among them.
        collectives_s: by part (`StepCollective.part`).
        between_s: of all collectives, those that leave a node.
        update_s: of reading and writing the optimizer's state.
        bubble_s: in which a stage waits.
        bubble: part of the pipelined time that is bubble.
    """

    compute_s: float
    collectives_s: dict[str, float]
    between_s: float
    update_s: float
    bubble_s: float
    bubble: float

    @property
    def communication_s(self) -> float:
        return sum(self.collectives_s.values())

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s + self.update_s + self.bubble_s

    @property
    def overlapped_s(self) -> float:
        """Where all communication runs behind products."""
        busy = max(self.compute_s, self.communication_s)
        return busy + self.update_s + self.bubble_s


def step_time(
    workload: Workload,
    layout: Layout,
    hardware: Hardware,
    collectives: list[StepCollective] | None = None,
) -> StepTime:
    """Predicts one step.

    Args:
        collectives: of another system than this one; None takes `step_collectives`.

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
        in_ticks += spent if _is_in_ticks(each) else 0.0
    compute = device_flops(workload, layout) / hardware.compute.flops_per_s
    bubble = bubble_fraction(layout.pipe, layout.num_microbatches)
    return StepTime(
        compute_s=compute,
        collectives_s=seconds,
        between_s=between,
        update_s=_update_bytes(workload, layout) / hardware.memory.achieved_bytes_per_s,
        bubble_s=(compute + in_ticks) * bubble / (1 - bubble),
        bubble=bubble,
    )


def bubble_fraction(stages: int, microbatches: int, chunks: int = 1) -> float:
    """(P-1)/(v M + P-1): GPipe and 1F1B with v = 1, interleaved with v chunks a stage."""
    return (stages - 1) / (chunks * microbatches + stages - 1)


def device_flops(workload: Workload, layout: Layout) -> float:
    """FLOPs of a step on one device of the busiest stage: forward, backward, recomputed."""
    model = workload.model
    flops = flops_per_sequence(model, workload.encoder_length, workload.decoder_length)
    rows = workload.batch_size
    passes = 4 if model.remat == "full" else 3
    blocks = forward_flops(flops, layout) * passes * rows / layout.size
    # Not on `model`, whose devices all route the same tokens.
    blocks += flops.router * passes * rows / (layout.size / layout.model)
    parts = layout.parts(layout.rules.axes("V", layout, table="params"))
    parts = parts if model.vocab_size % parts == 0 else 1
    replicas = layout.size / layout.pipe / layout.model
    # The last stage has its blocks and the logits.
    return blocks + 3 * flops.logits * rows / replicas / parts


def forward_flops(flops: SequenceFlops, layout: Layout) -> int:
    """Of the blocks, one row, without the router; full and empty slots where there are any."""
    experts = flops.expert_slots if layout.dispatcher in EQUAL_BLOCKS else flops.experts
    return (
        flops.attention
        + flops.scores
        + flops.weighted_values
        + flops.cross_memory
        + flops.dense_ffn
        + experts
    )


def _is_in_ticks(each: StepCollective) -> bool:
    """Whether it happens for every microbatch, so that a bubble stretches it."""
    is_sent = each.part == "pipeline" and each.kind != "all-reduce"
    return each.part in ("layers", "exchange") or is_sent


def _update_bytes(workload: Workload, layout: Layout) -> float:
    """Read and written by the optimizer: parameters and state both ways, gradients one."""
    params = state_bytes(workload, layout, "params")
    return 3 * params + 2 * state_bytes(workload, layout, "optimizer")
