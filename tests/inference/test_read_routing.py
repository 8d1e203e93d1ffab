# SPDX-License-Identifier: Apache-2.0
"""What decoding records is what one pass over the texts that it wrote records."""

import dataclasses

import numpy as np
import pytest

from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, for_decoding, with_capacity
from switchx.inference.running_batch import RunningBatch
from switchx.inference.score import Scorer
from switchx.routing_record import RecordInfo, RecordWriter, open_record
from tests.data.refusals import refused
from tests.inference import tiny
from tests.inference.slot_models import INPUTS, model, with_slots
from tests.inference.test_running_batch import T

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

SLOW = pytest.mark.slow
WAYS = {
    "greedy": {},
    "samples": {"temperature": 1.5, "num_return_sequences": 2, "best_of": 3},
    "beams": {"beam_size": 3},
    "stops": {"stop": "b"},
}


class Letters:
    """A vocabulary of a letter for each token."""

    size = 12

    def decode(self, tokens):
        return "".join(chr(ord("a") + token) for token in tokens)


def info(config) -> RecordInfo:
    return RecordInfo(config.switch, config.sparse_layers_by_stack, 0, "generate")


def rows_of(path) -> dict:
    """Each row's tokens, ranks, probabilities, margins, experts and drops, by stack and row."""
    return {
        (batch.stack, int(row)): (
            batch.token_BL[b, is_token_L],
            *(
                array[:, b, is_token_L]
                for array in (
                    batch.rank_NBLR,
                    batch.prob_NBLR,
                    batch.margin_NBL,
                    batch.expert_NBLS,
                    batch.is_dropped_NBLS,
                )
            ),
        )
        for batch in open_record(path).batches()
        for b, (row, is_token_L) in enumerate(zip(batch.row_B, batch.is_token_BL, strict=True))
        if row >= 0
    }


@pytest.mark.parametrize(
    "name, way, bits, slots",
    [
        ("encoder-decoder", "beams", None, None),
        ("gpt", "samples", None, None),
        pytest.param("encoder-decoder", "greedy", 4, None, marks=SLOW),
        pytest.param("encoder-decoder", "stops", None, None, marks=SLOW),
        pytest.param("gpt", "beams", None, None, marks=SLOW),
        pytest.param("gpt", "greedy", None, 2, marks=SLOW),
    ],
)
def test_a_record_is_that_of_the_texts_read_whole(name, way, bits, slots, tmp_path):
    config, params = model(name, bits)
    config, is_gpt = for_decoding(config), name == "gpt"
    # Texts end at different steps, so that the batch shrinks.
    decoding = DecodingConfig(T, eos_id=7, other_eos_ids=(10,), **WAYS[way])
    inputs = [[0, *each] if is_gpt else each for each in INPUTS]
    options = {"vocabulary": Letters()}
    if slots:
        slotted, experts = with_slots(name, bits, slots)
        options |= {"experts": experts}
        decoding_model = for_decoding(slotted), experts.params
    else:
        decoding_model = config, params
    with RecordWriter(tmp_path / "decoded", info(config)) as record:
        generator = Generator(*decoding_model, decoding, 4, record=record, **options)
        said = dict(generator(inputs, first_number=5))
    plain = dict(Generator(*decoding_model, decoding, 4, **options)(inputs, first_number=5))
    for number, hypotheses in said.items():
        bare = [dataclasses.replace(each, routing=None) for each in hypotheses]
        assert bare == plain[number]  # a record changes no text

    pairs = []
    for number, tokens in enumerate(INPUTS, 5):
        best = said[number][0]
        pairs.append((tokens, [*best.tokens, *[7] * best.is_finished]))
    assert {each[0].is_finished for each in said.values()} == {True, False} or way == "stops"
    with RecordWriter(tmp_path / "scored", info(config)) as record:
        list(Scorer(config, params, record=record)(pairs, 5))
    got, want = rows_of(tmp_path / "decoded"), rows_of(tmp_path / "scored")
    assert got.keys() == want.keys() and len(got) == 4 * (1 if is_gpt else 2)
    for key, (*ids, prob, margin, expert, dropped) in got.items():
        tokens, rank, want_prob, want_margin, want_expert, want_dropped = want[key]
        for found, wanted in zip(
            (*ids, expert, dropped), (tokens, rank, want_expert, want_dropped), strict=True
        ):
            np.testing.assert_array_equal(found, wanted, err_msg=str(key))
        np.testing.assert_allclose(prob, want_prob, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(margin, want_margin, rtol=1e-4, atol=1e-6)
