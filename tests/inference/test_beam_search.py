# SPDX-License-Identifier: Apache-2.0
"""Beam search against a loop over Python lists, and against trying every text."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from switchx.inference.beam_search import continuations
from switchx.inference.config import DecodingConfig
from tests.cases import slow_unless
from tests.inference.beam_oracle import (
    EOS,
    V,
    advance,
    rows_of,
    search,
    search_by_lists,
    start,
    tables,
    text,
)

# Each rule and each penalty by default.
DEFAULT_RULES = [
    (0.0, True), (0.6, "never"), (1.0, False), (2.0, "never"), (-1.5, False), (-10.0, "never"),
]  # fmt: skip
RULES = [
    slow_unless(rule in DEFAULT_RULES, *rule)
    for rule in itertools.product((0.0, 0.6, 1.0, 2.0, -1.5, -10.0), (True, False, "never"))
]


@pytest.mark.parametrize(("length_penalty", "early_stopping"), RULES)
def test_texts_and_scores_are_those_of_a_loop_over_lists(early_stopping, length_penalty):
    for beam_size in (2, 5):
        config = DecodingConfig(
            max_new_tokens=7,
            beam_size=beam_size,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
        )
        log_prob_BTVV = np.stack([tables(seed, 7) for seed in range(8)])
        # A row stops by itself, whatever the others do.
        for log_prob_TVV, got in zip(log_prob_BTVV, search(log_prob_BTVV, config), strict=True):
            want = search_by_lists(log_prob_TVV, config)
            assert [tokens for tokens, _ in got[: len(want)]] == [tokens for tokens, _ in want]
            np.testing.assert_allclose(
                [score for _, score in got[: len(want)]],
                [score for _, score in want],
                rtol=1e-5,
            )


@pytest.mark.hf
@pytest.mark.parametrize("length_penalty, least", [(-1.0, 0), (-0.3, 4), (1.0, 0)])
def test_texts_and_scores_are_those_of_transformers(length_penalty, least):
    """Of a small T5 with random weights, whose logits are not too sharp."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=24, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
            dropout_rate=0.0, decoder_start_token_id=0, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        theirs.lm_head.weight *= 0.3
    sources = [[5, 9, 3, 14, 1], [7, 7, 20, 4, 1], [11, 2, 18, 6, 1]]
    config = DecodingConfig(8, beam_size=3, length_penalty=length_penalty, min_new_tokens=least)
    want = theirs.generate(
        torch.tensor(sources), num_beams=3, num_return_sequences=3, max_new_tokens=8,
        length_penalty=length_penalty, return_dict_in_generate=True, output_scores=True,
        min_new_tokens=least or None,
    )  # fmt: skip

    def logits_of(prefixes):
        with torch.no_grad():
            out = theirs(
                input_ids=torch.tensor(np.repeat(sources, 3, axis=0)),
                decoder_input_ids=torch.tensor(prefixes),
            )
        return out.logits[:, -1].numpy().reshape(3, 3, -1)

    program, is_live_B = config.program_of(8), np.ones(3, bool)
    beams, step = start(3, program), 0
    text_BLT = np.zeros((3, 3, 1), np.int64)
    while is_live_B.any():
        rows = rows_of(is_live_B, config)
        logits_BLV = logits_of(text_BLT.reshape(9, -1))
        beams, _, is_live_B = advance(beams, logits_BLV, np.int32(step), rows, program=program)
        step, is_live_B = step + 1, np.asarray(is_live_B)
        text_BLT = np.pad(np.asarray(beams.token_BLT)[:, :, :step], ((0, 0), (0, 0), (1, 0)))
    token_BLT, score_BL = map(np.asarray, beams.results(rows))
    assert np.all(np.isfinite(score_BL))  # no answer is empty
    got = [text(tokens) for tokens in token_BLT.reshape(9, -1)]
    assert got == [text(tokens) for tokens in want.sequences[:, 1:].tolist()]
    np.testing.assert_allclose(score_BL.ravel(), want.sequences_scores, rtol=1e-4)


def test_as_many_beams_as_there_are_texts_find_the_likeliest():
    """All 5 + 5^2 + 5^3 texts that end, or are 3 long, of a vocabulary of 6."""
    log_prob_TVV = tables(3, 3)
    texts = [
        tokens
        for length in (1, 2, 3)
        for tokens in itertools.product(range(V), repeat=length)
        if EOS not in tokens[:-1] and (tokens[-1] == EOS or length == 3)
    ]

    def log_prob(tokens):
        before = (0, *tokens)
        return sum(log_prob_TVV[i, before[i], token] for i, token in enumerate(tokens))

    best = max(texts, key=log_prob)
    config = DecodingConfig(
        max_new_tokens=3, beam_size=36, length_penalty=0.0, early_stopping="never"
    )
    tokens, score = search(log_prob_TVV[None], config)[0][0]
    assert tokens == best
    assert score == pytest.approx(log_prob(best), rel=1e-5)


def test_a_sentence_that_is_done_stays_as_it_is():
    """Its beams are stepped on beside a living one's."""
    config = DecodingConfig(max_new_tokens=4, beam_size=2)
    log_prob_TVV = tables(0, 4)
    logits_BLV = log_prob_TVV[0].astype(np.float32)[np.zeros((2, 2), np.int32)]
    logits_BLV[:, :, EOS] = 9.0  # everything ends
    rows = rows_of([False, True], config)
    after, _, still_B = advance(
        start(2, config.program_of(4)), logits_BLV, 0, rows, program=config.program_of(4)
    )
    np.testing.assert_array_equal(after.is_finished_BL[0], False)
    assert bool(after.is_finished_BL[1, 0])
    assert not bool(still_B[0])


@pytest.mark.parametrize("vocabulary", [1024, 1000], ids=["blocks", "no whole blocks"])
def test_continuations_are_the_first_of_all_sorted_ones(vocabulary):
    """Against NumPy, equal ones in the order of their places; three tokens are excluded."""
    rng, (B, L, num) = np.random.default_rng(0), (2, 3, 6)
    logits_BLV = rng.normal(size=(B, L, vocabulary)).round(1).astype(np.float32)
    log_prob_BL = np.array([[-1.0, -1.5, -2.0], [-0.25, -np.inf, -np.inf]], np.float32)
    allowed_BLV = logits_BLV.copy()
    for token in (3, 500, np.argmax(logits_BLV[0, 0])):
        allowed_BLV[:, :, token] = -np.inf
    found = continuations(*map(jnp.array, (logits_BLV, allowed_BLV, log_prob_BL)), num)
    wide_BLV = logits_BLV.astype(np.float64)
    normalizer_BL1 = np.log(np.exp(wide_BLV).sum(-1, keepdims=True))
    all_BLV = log_prob_BL[..., None] + np.where(
        np.isfinite(allowed_BLV), wide_BLV - normalizer_BL1, -np.inf
    )
    order_BX = np.argsort(-all_BLV.reshape(B, -1), axis=1, kind="stable")[:, :num]
    log_prob_BJ, parent_BJ, token_BJ = map(np.asarray, found)
    expected_BJ = np.take_along_axis(all_BLV.reshape(B, -1), order_BX, axis=1)
    np.testing.assert_allclose(log_prob_BJ, expected_BJ, rtol=1e-5)
    assert (parent_BJ * vocabulary + token_BJ).tolist() == order_BX.tolist()


def test_ancestors_are_the_places_of_a_texts_tokens():
    """Reading the token in each ancestor's place gives back the running text."""
    config = DecodingConfig(max_new_tokens=5, beam_size=3, eos_id=V)  # nothing ends
    log_prob_TVV = tables(1, 5)
    program = config.program_of(5)
    beams, placed = start(1, program), []
    last_BL, rows = np.zeros((1, 3), np.int32), rows_of([True], config)
    for step in range(4):
        logits_BLV = log_prob_TVV[step].astype(np.float32)[np.asarray(last_BL)]
        beams, last_BL, _ = advance(beams, logits_BLV, step, rows, program=program)
        placed.append(np.asarray(last_BL[0]))
        ancestor_LT, token_LT = (
            np.asarray(beams.ancestor_BLT[0]),
            np.asarray(beams.token_BLT[0]),
        )
        for beam in range(3):
            # A token is at the place after its number's: the first is the prompt's last.
            got = [placed[t][ancestor_LT[beam, t + 1]] for t in range(step + 1)]
            assert got == token_LT[beam, : step + 1].tolist()
