# SPDX-License-Identifier: Apache-2.0
"""What decoding records is what one pass over the texts that it wrote records."""

import dataclasses
import types

import numpy as np
import pytest

from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, for_decoding, with_capacity
from switchx.inference.running_batch import RunningBatch
from switchx.inference.score import Scorer
from switchx.routing_record import RecordInfo, RecordWriter, open_record
from tests.data.refusals import refused
from tests.inference.slot_models import INPUTS, model, with_slots

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

SLOW = pytest.mark.slow
T = 6
WAYS = {
    "greedy": {},
    # In one batch to its end: few programs. In the others' it shrinks.
    "samples": dict(temperature=1.5, num_return_sequences=2, best_of=3, pruning="experts"),
    "beams": {"beam_size": 3},
    "stops": {"stop": ("b",)},
}
VOCABULARY = types.SimpleNamespace(decode=lambda ids: "".join(chr(97 + id) for id in ids))
CASES = [
    ("encoder-decoder", "beams", None, None),
    ("gpt", "samples", None, None),
    pytest.param("encoder-decoder", "greedy", 4, None, marks=SLOW),
    pytest.param("encoder-decoder", "stops", None, None, marks=SLOW),
    pytest.param("gpt", "beams", None, None, marks=SLOW),
    pytest.param("gpt", "greedy", None, 2, marks=SLOW),
]


def rows_of(path) -> dict:
    """The arrays `[N, L, ...]` of each stack and row that has a text, tokens first."""
    found = {}
    for batch in open_record(path).batches():
        for b, row in enumerate(batch.row_B):
            if row >= 0:
                is_token_L = batch.is_token_BL[b]
                parts = [batch.rank_NBLR, batch.expert_NBLS, batch.is_dropped_NBLS]
                parts += [batch.prob_NBLR, batch.margin_NBL]
                arrays = [batch.token_BL[None, b, is_token_L]]
                arrays += [part[:, b, is_token_L] for part in parts]
                found[batch.stack, int(row)] = arrays
    return found


@pytest.mark.parametrize("name, way, bits, slots", CASES)
def test_a_record_is_that_of_the_texts_read_whole(name, way, bits, slots, tmp_path):
    config, params = model(name, bits)
    config, inputs, options = for_decoding(config), INPUTS, {"vocabulary": VOCABULARY}
    if name == "gpt":
        inputs = [[0, *tokens] for tokens in INPUTS]
    decoded, with_params = config, params
    if slots:
        decoded, options["experts"] = with_slots(name, bits, slots)
        decoded, with_params = for_decoding(decoded), options["experts"].params
    # Some texts end, at different steps; others are cut off.
    decoding = DecodingConfig(T, eos_id=7, other_eos_ids=(10,), **WAYS[way])
    info = RecordInfo(config.switch, config.sparse_layers_by_stack, 0, "generate")
    with RecordWriter(tmp_path / "decoded", info) as record:
        generator = Generator(decoded, with_params, decoding, 4, record=record, **options)
        written = dict(generator(inputs, first_number=5))
    plain = Generator(decoded, with_params, decoding, 4, **options)
    for number, hypotheses in plain(inputs, first_number=5):
        assert hypotheses == [dataclasses.replace(x, routing=None) for x in written[number]]

    # All hypotheses are compared: the best beam may have been the first one all the time.
    each = [(number, said) for number in range(5, 9) for said in written[number]]
    with RecordWriter(tmp_path / "all", info) as generator.record:
        read = {i: (inputs[number - 5], said) for i, (number, said) in enumerate(each)}
        generator._write_record(read)
    pairs = [(INPUTS[n - 5], [*said.tokens, *[7] * said.is_finished]) for n, said in each]
    with RecordWriter(tmp_path / "scored", info) as record:
        list(Scorer(config, params, record=record)(pairs))
    got, want = rows_of(tmp_path / "all"), rows_of(tmp_path / "scored")
    assert got.keys() == want.keys() and len(got) == len(each) * len(info.layers)
    for key, found in got.items():
        # A text may have been stopped before its last token was read.
        L, num = found[0].shape[1], want[key][0].shape[1]
        assert num == L or (way == "stops" and num - 1 == L)
        for array, other in zip(found, want[key], strict=True):  # experts differ by 1 or more
            np.testing.assert_allclose(array, other[:, :L], rtol=1e-4, atol=1e-6)
    best = {number: i for i, (number, said) in enumerate(each) if said is written[number][0]}
    for (stack, number), found in rows_of(tmp_path / "decoded").items():
        np.testing.assert_equal(found, got[stack, best[number]])
    assert len(best) == 4 and {said.is_finished for _, said in each} == {True, False}


@SLOW  # ten programs; texts that join: test_running_batch.py
@pytest.mark.parametrize("beam_size", [1, 2])
def test_texts_that_join_a_running_batch_have_the_routing_that_they_have_alone(beam_size):
    """Where rows, prompts and the ring grow, and the ring goes on behind texts that ended."""
    config, params = model("gpt", None)
    rooms, inputs = [3, 20, 20, 2], [[0, *tokens] for tokens in INPUTS]
    decoding = DecodingConfig(20, beam_size=beam_size, eos_id=-1)

    def batch():
        return RunningBatch(for_decoding(config), params, decoding, is_recorded=True)

    def admit(batch, *indices, length):
        return batch.admit(
            [inputs[index] for index in indices],
            numbers=indices,
            token_limits=[rooms[index] for index in indices],
            length=length,
        )

    joined, said = batch(), {}
    for index, length, steps in ((0, 6, 2), (2, 6, 14), (1, 8, 4), (3, 8, 50)):
        assert admit(joined, index, length=length) == [len(said) + len(joined.waiting) - 1]
        said |= joined.advance(steps, is_compacting=False)
    order = 0, 2, 1, 3
    alone = batch()
    admit(alone, *order, length=8)
    want = alone.advance(is_compacting=False)
    assert said.keys() == want.keys() == set(range(4))
    for name, hypotheses in said.items():
        for got, other in zip(hypotheses, want[name], strict=True):
            assert got.tokens == other.tokens
            number_NLS = got.routing["decoder"]
            num_read = len(inputs[order[name]]) + rooms[order[name]] - 1
            assert number_NLS.shape[1] == num_read
            np.testing.assert_allclose(number_NLS, other.routing["decoder"], atol=1e-5)


@pytest.mark.parametrize("has_drafts", [False, True])
def test_what_steps_do_not_route_as_whole_texts_is_refused(has_drafts):
    config, params = model("gpt", None)
    config = for_decoding(config) if has_drafts else with_capacity(config)
    decoding = DecodingConfig(T, prompt_lookup_num_tokens=2 if has_drafts else None)
    with refused(
        "a record of decoding with drafts, or with experts that have a capacity: <any>"
    ):
        Generator(config, params, decoding, record=types.SimpleNamespace())
