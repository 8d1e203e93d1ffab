# SPDX-License-Identifier: Apache-2.0
"""With experts streamed through a ring, what is written is what the whole model writes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from switchx.hardware.spec import load_hardware
from switchx.inference.config import ExpertSlots
from switchx.inference.generate import with_capacity
from switchx.inference.offload.ring_decode import RingExperts, check_ring
from switchx.inference.offload.ring_program import copied_bytes
from switchx.inference.running_batch import are_compiled
from switchx.inference.score import Scorer
from switchx.models.config import Precision, SwitchConfig
from switchx.models.unroll import unrolled
from tests.data.refusals import refused
from tests.inference.ring_models import MODEL, L, generator, model, resident, written

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

SLOW = pytest.mark.slow
BFLOAT16 = Precision(params="bfloat16", compute="bfloat16")


@functools.cache
def ringed(bits: int | None, beam_size: int, slots: int):
    """The experts in a ring, and what was written with them."""
    ring = RingExperts(*model(bits), slots)
    return ring, written(ring.config, ring.params, beam_size, ring)


CASES = [(None, 1, 3), (4, 2, 2), (None, 1, 2), (8, 1, 2), (8, 2, L), (None, 2, L)]


@pytest.mark.parametrize(
    "bits, beam_size, slots",
    [pytest.param(*case, marks=[SLOW] * (case != CASES[1])) for case in CASES],
)
def test_tokens_are_those_of_the_resident_model(bits, beam_size, slots):
    ring, found = ringed(bits, beam_size, slots)
    assert found == resident(bits, beam_size)
    # `PROGRAMS` keeps those of the ring, and drops them as all others.
    assert are_compiled(generator(ring.config, ring.params, beam_size, ring), 4, 4)
    traffic = ring.traffic
    layer = traffic.expert_bytes // (2 * L)
    # In both stacks K - 2 layers are resident, and all others share two slots.
    assert traffic.device_bytes == 2 * (slots - 1) * layer
    # The encoder once, then the decoder's step for each token.
    streamed = L - slots + 2
    assert traffic.moved_bytes == streamed * layer * traffic.calls
    assert "a ring of" in str(traffic)


@SLOW
@pytest.mark.parametrize(
    "changes",
    [
        {"num_encoder_layers": 2 * L, "num_decoder_layers": 2 * L, "every": 2},
        {"scan_layers": False, "encoder_layers": (0, 2), "decoder_layers": (1, 2)},
        {"architecture": "decoder_only", "num_encoder_layers": 0, "precision": BFLOAT16},
    ],
    ids=["every other block", "named blocks", "decoder, bfloat16"],
)
def test_switch_layers_may_be_anywhere(changes):
    names = {field.name for field in dataclasses.fields(SwitchConfig)}
    switch = {name: value for name, value in changes.items() if name in names}
    others = {name: value for name, value in changes.items() if name not in names}
    switch = dataclasses.replace(MODEL.switch, **switch)
    config, params = model(None, dataclasses.replace(MODEL, switch=switch, **others))
    ring = RingExperts(config, params, 2)
    config, params = unrolled(config, params)
    assert written(ring.config, ring.params, 1, ring) == written(config, params, 1)


def test_streaming_is_said_of_each_kind_of_call():
    ring, _ = ringed(*CASES[1])
    kinds = ring.kinds(load_hardware("h200"))
    # Two beams of each.
    assert sorted((k.streaming.stack, k.streaming.num_tokens) for k in kinds) == [
        ("decoder", 4 * 2),
        ("encoder", 4 * 4),
    ]
    assert sum(kind.count for kind in kinds) == ring.traffic.calls
    assert {kind.ran for kind in kinds} == {"ring"}


def test_bytes_are_counted_in_the_program():
    """Of loops as often as they turn, whatever is in them."""

    def fetch(x):
        return jax.device_put(x, jax.memory.Space.Device)

    def program(x_NX):
        total, _ = jax.lax.scan(lambda sum_X, x: (sum_X + fetch(x), None), x_NX[0], x_NX)
        return total + jax.jit(fetch)(x_NX[0])

    jaxpr = jax.jit(program).trace(np.zeros((5, 3), np.float32)).jaxpr.jaxpr
    assert copied_bytes(jaxpr) == (5 + 1) * 3 * 4


@SLOW
def test_scores_with_capacity_are_the_same():
    config, params = model(None)
    pairs = [([3, 4, 5], [6, 7, 1]), ([5, 5], [5, 5, 5, 1])]
    want = sorted(Scorer(with_capacity(config), params)(pairs))
    ring = RingExperts(config, params, 2)
    got = sorted(Scorer(with_capacity(ring.config), ring.params, experts=ring)(pairs))
    for (_, ours), (_, theirs) in zip(got, want, strict=True):
        assert ours.log_likelihood == pytest.approx(theirs.log_likelihood, rel=1e-5)


@pytest.mark.parametrize(
    "changes, slots, words",
    [
        ({}, 1, f"a ring of 1 slot, but the encoder has {L} Switch layers"),
        ({}, L + 1, f"a ring of {L + 1} slots, but the encoder has {L} Switch layers"),
        (
            {"num_decoder_layers": 2},
            9,
            "a ring of 9 slots, but the decoder has 2 Switch layers",
        ),
        ({"num_decoder_layers": 1}, 9, "the decoder has one Switch layer"),
        ({"switch": None}, 2, "a dense model, which has no experts to move"),
    ],
)
def test_refusals(changes, slots, words):
    with refused(words):
        check_ring(dataclasses.replace(MODEL, **changes), slots)


def test_what_a_ring_does_not_take():
    for asked, words in (
        ({"ring_slots": 2, "prefetch": True}, "ring_slots=2 with prefetch, which predicts"),
        ({"ring_slots": 2, "host_bytes": 9}, "ring_slots=2 with host_bytes=9: a ring has all"),
        ({"ring_slots": 2, "hardware": "h200"}, "hardware='h200' without slots and ring_slots"),
        ({}, "ExpertSlots without slots and ring_slots; give one of the two, or both"),
    ):
        with refused(words):
            ExpertSlots(**asked)
