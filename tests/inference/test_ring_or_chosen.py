# SPDX-License-Identifier: Apache-2.0
"""Where the formula decides for each call: prompts stream, steps move what they chose."""

import dataclasses
import gc
import tracemalloc

import jax
import numpy as np
import pytest

from switchx import tree
from switchx.hardware.spec import load_hardware
from switchx.inference.config import ExpertSlots
from switchx.inference.offload.ring_decode import RingExperts
from switchx.inference.offload.ring_or_chosen import RingOrChosen, outside_of_device
from switchx.models.params import init_params
from tests.data.refusals import refused
from tests.inference.ring_models import MODEL, E, L, T, model, resident, written
from tests.inference.tiny import trained

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

SLOW = pytest.mark.slow
H200 = load_hardware("h200")


def hardware(tokens: float):
    """On which a float32 expert needs so many tokens to hide its copy: 4 bytes / 2 * F / B."""
    host = dataclasses.replace(H200.host, bytes_per_s=1e9, efficiency=1.0)
    compute = dataclasses.replace(
        H200.compute, peak_flops_per_s=tokens / 2 * 1e9, efficiency=1.0
    )
    return dataclasses.replace(H200, host=host, compute=compute)


def both(bits, asked: ExpertSlots, tokens: float = 2.0) -> RingOrChosen:
    return RingOrChosen(RingExperts(*model(bits), asked.ring_slots), asked, hardware(tokens))


CASES = [(None, 1, False), (8, 2, False), (4, 1, True)]


@pytest.mark.parametrize(
    "bits, beam_size, prefetch",
    [pytest.param(*case, marks=[SLOW] * (case[0] is not None)) for case in CASES],
)
def test_prompts_stream_and_steps_choose(bits, beam_size, prefetch):
    """4 prompts of 4 tokens are 4 tokens an expert; a step's 4 or 8 are 1 or 2."""
    asked = ExpertSlots(2, prefetch=prefetch, ring_slots=3)
    weight_bytes = {None: 4, 8: 1.2, 4: 0.7}[bits]  # with scales
    tokens = 2.5 * 4 / weight_bytes
    experts = both(bits, asked, tokens)
    assert written(experts.config, experts.params, beam_size, experts) == resident(
        bits, beam_size
    )
    traffic = experts.traffic
    assert (traffic.calls_streamed, traffic.calls_chosen) == (1, T)
    layer = traffic.ring.expert_bytes // (2 * L)
    assert traffic.ring.moved_bytes == (L - 1) * layer
    # Layers that are resident have no slots and move nothing.
    assert traffic.chosen.num_layers == 2 * (L - 1)
    assert 0 < traffic.chosen.moved_bytes <= T * (L - 1) * layer
    said = str(traffic).splitlines()
    assert said[0] == f"experts: 1 calls streamed whole layers, {T} moved chosen experts"
    kinds = experts.kinds(hardware(tokens))
    kinds = [(kind.count, kind.ran, kind.streaming.mode) for kind in kinds]
    assert kinds[0] == (1, "ring", "ring") and (T, "chosen", "chosen") in kinds


@pytest.mark.parametrize(("tokens", "calls"), [(0.5, (T + 1, 0)), (9.0, (0, T + 1))])
@SLOW
def test_the_hardware_decides(tokens, calls):
    experts = both(None, ExpertSlots(2, ring_slots=3), tokens)
    assert written(experts.config, experts.params, 1, experts) == resident(None, 1)
    assert (experts.traffic.calls_streamed, experts.traffic.calls_chosen) == calls


@pytest.mark.slow  # a large model
def test_host_memory_has_experts_once():
    """All arrays that are alive, those of the device among them: on a CPU it is one memory."""
    config, params = model(None)
    dense = sum(
        leaf.nbytes
        for name, leaf in tree.named_leaves(params).items()
        if "/experts/" not in name
    )
    layer = sum(
        leaf.nbytes for name, leaf in tree.named_leaves(params).items() if "/experts/" in name
    ) // (2 * L)

    def alive() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    before = alive()
    tracemalloc.start()
    fresh = trained.__wrapped__(None, MODEL, seed=7)
    ring = RingExperts(*fresh, 3)
    experts = RingOrChosen(ring, ExpertSlots(1, ring_slots=3), hardware(2.0))
    del fresh
    gc.collect()
    of_numpy = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
    traces = tracemalloc.take_snapshot().filter_traces([of_numpy]).traces
    tracemalloc.stop()
    streamed, kept = 2 * (L - 1) * layer, 2 * layer
    assert experts.ring.bank.host_bytes == streamed
    # A slot has one of E experts, in each layer that streams.
    assert alive() - before == dense + streamed + kept + streamed // E
    # An array of JAX may be the memory of an array of NumPy; beside it there is none.
    assert sum(trace.size for trace in traces) <= 1.1 * streamed


def test_a_call_may_meet_no_switch_layer():
    """Steps of a dense decoder move no experts."""
    switch = dataclasses.replace(MODEL.switch, stacks="encoder")
    config = dataclasses.replace(MODEL, switch=switch)
    params = init_params(config, jax.random.key(0))
    asked = ExpertSlots(2, ring_slots=3)
    experts = RingOrChosen(RingExperts(config, params, 3), asked, hardware(2.0))
    assert written(experts.config, experts.params, 1, experts) == written(config, params, 1)
    assert experts.traffic.calls_streamed == 1


def test_a_row_of_the_stack_is_the_expert():
    for bits in (None, 4, 8):
        bank = RingExperts(*model(bits), 3).bank
        number = bank.numbers[-1]
        layer = jax.jit(lambda bank, number=number: bank.fetch(number, None))(bank)
        one = bank.expert(number, 2)
        jax.tree.map(
            lambda all_, row: np.testing.assert_array_equal(all_[2:3], row), layer, one
        )


def test_what_is_refused_or_better_without_a_ring():
    no_host = dataclasses.replace(H200, host=None)
    asked = ExpertSlots(2, ring_slots=3)
    with refused("the spec of h200 has no [host]: "):
        RingOrChosen(RingExperts(*model(None), 3), asked, no_host)
    with refused("nothing says what a device 'cpu' can do"):
        outside_of_device(*model(None), asked, None)
    with refused(f"expert_slots={E + 1} of a model with {E} experts a layer"):
        outside_of_device(*model(None), ExpertSlots(E + 1, ring_slots=3), None)
    few = RingExperts(MODEL, model(None)[1], 2).traffic
    all_ = RingExperts(MODEL, model(None)[1], L).traffic
    assert "a resident model is better" in str(all_)
    assert "a resident model" not in str(few)
