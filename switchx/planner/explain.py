# SPDX-License-Identifier: Apache-2.0
"""A plan in words: where its time goes, how full its memory is, why it is not the first."""

from switchx.planner.hardware import Hardware
from switchx.planner.search import Plan
from switchx.planner.step_time import StepTime

WHAT = {
    "layers": "tensor-parallel sums of activations",
    "exchange": "tokens going to experts and back",
    "weights": "gradients and gathered weights",
    "embedding": "the embedding and the logits",
    "pipeline": "activations between stages",
}
ROLES = {
    "pipe": "pipeline stages",
    "data": "replicas",
    "fsdp": "slices of the parameters",
    "node": "outer parts of the experts",
    "expert": "parts of the experts",
    "model": "parts of every layer",
}


def explain(plan: Plan, hardware: Hardware, first: Plan) -> str:
    """Two to four sentences about `plan`.

    Args:
        first: the fastest plan, to compare with; `plan` itself explains why it is first.
    """
    layout, time, memory = plan.layout, plan.time, plan.memory
    axes = [f"{size} {ROLES[axis]}" for axis, size in layout.shape.items() if size > 1]
    text = f"{', '.join(axes) or 'One device'}"
    if layout.dispatcher:
        text += f", Switch layers by {layout.dispatcher}"
    if layout.num_microbatches > 1:
        text += f", {layout.num_microbatches} microbatches"
    text += (
        f". Of a step of {seconds(time.step_s)} products take {_share(time.compute_s, time)}"
    )
    parts = sorted(time.collectives_s.items(), key=lambda item: -item[1])
    if parts and parts[0][1] > 0:
        name, longest = parts[0]
        text += (
            f", communication {_share(time.communication_s, time)}, most of it "
            f"{WHAT[name]} ({_share(longest, time)})"
        )
        if time.between_s:
            text += f"; {_share(time.between_s, time)} leaves a node"
    if time.bubble_s:
        text += f"; stages wait {_share(time.bubble_s, time)}"
    usable = hardware.memory.usable_bytes
    biggest = max(
        ("parameters", memory.params), ("gradients", memory.gradients),
        ("optimizer state", memory.optimizer), ("activations", memory.activations),
        ("one block's buffers", memory.working), ("logits", memory.logits),
        ("gathered weights", memory.gathered), key=lambda item: item[1],
    )  # fmt: skip
    text += (
        f". A device holds {num_bytes(memory.total)} of {num_bytes(usable)}, most of it "
        f"{biggest[0]} ({num_bytes(biggest[1])})."
    )
    return text + _difference(plan, first)


def _difference(plan: Plan, first: Plan) -> str:
    """What the time over the first plan's goes to."""
    if plan is first:
        return ""
    mine, best = plan.time, first.time
    deltas = {
        "products": mine.compute_s - best.compute_s,
        "the update": mine.update_s - best.update_s,
        "waiting stages": mine.bubble_s - best.bubble_s,
    }
    for part in mine.collectives_s.keys() | best.collectives_s.keys():
        there = mine.collectives_s.get(part, 0.0) - best.collectives_s.get(part, 0.0)
        deltas[WHAT[part]] = there
    name, most = max(deltas.items(), key=lambda item: item[1])
    slower = mine.step_s / best.step_s - 1
    if most <= 0:
        return " As fast as the first."
    return f" {slower:.1%} slower than the first, most of it by {name} (+{seconds(most)})."


def _share(spent: float, time: StepTime) -> str:
    return f"{spent / time.step_s:.0%}"


def seconds(number: float) -> str:
    """`1.23 s` or `4.56 ms`."""
    return f"{number:.3g} s" if number >= 1 else f"{1e3 * number:.3g} ms"


def num_bytes(number: float) -> str:
    """`1.23 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e3:.3g} kB"
