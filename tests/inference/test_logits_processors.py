# SPDX-License-Identifier: Apache-2.0
"""Repetition penalty, n-grams, forced tokens, n best, stops, log-probabilities: against loops.

`transformers` itself is asked in tests/interop/test_generate_parity.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.data.tokenizers import ByteVocabulary
from switchx.fields import FieldError
from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, text_of
from switchx.inference.logits_processors import Rows, RowSettings
from switchx.inference.program_cache import COMPILATIONS
from switchx.inference.running_batch import RunningBatch
from switchx.inference.score import Scorer
from tests.cases import slow
from tests.inference import beam_oracle, tiny
from tests.inference.tiny import assert_same_texts, tokens, written

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

EOS, NEVER_ENDS, T = 1, -1, 6
INPUTS = [[3, 4, 5, 8], [6, 2, 7, 3], [5, 5, 2, 5], [11, 4, 4, 3], [9, 9, 8, 2]]


def processed_by_loops(x_V, text, number: int, config: DecodingConfig):
    """Of one hypothesis, by the definitions of `transformers`, in float64.

    Args:
        text: what stands before the next token, `number` new tokens among it.
    """
    x_V, n = np.array(x_V, np.float64), config.no_repeat_ngram_size
    for token in set(text):
        x_V[token] *= config.repetition_penalty ** (1 if x_V[token] < 0 else -1)
    if n and len(text) + 1 >= n:
        last = tuple(text[len(text) - n + 1 :])
        ngrams = {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}
        x_V[[token for token in range(len(x_V)) if (*last, token) in ngrams]] = -np.inf
    if number < config.min_new_tokens:
        x_V[EOS] = -np.inf
    if number < len(config.forced_prefix):
        x_V[:] = -np.inf
        x_V[config.forced_prefix[number]] = 0
    return x_V


SETTINGS = [
    {},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.4, "min_new_tokens": 9},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 3},
    {"no_repeat_ngram_size": 9},
    {"forced_prefix": [3, 3, 4, 2, 5], "no_repeat_ngram_size": 2},
]


def test_logits_are_those_of_a_loop():
    """Each row with its own settings, after prompts and answers of every length."""
    rng, size, L, P = np.random.default_rng(0), len(SETTINGS), 2, 5
    configs = [DecodingConfig(16, **settings) for settings in SETTINGS]
    program = configs[-1].program_of(16)
    settings = RowSettings.of(configs).fitted(program)
    allowed = jax.jit(lambda rows, *arrays: rows.allowed(*arrays, program))
    num_banned = 0
    for _ in range(20):
        x_BLV = rng.normal(size=(size, L, 12)).astype(np.float32)
        token_BLT = rng.integers(2, 6, (size, L, 16)).astype(np.int32)
        number_B = rng.integers(0, 16, size).astype(np.int32)
        length_B = rng.integers(1, P + 1, size)
        read_BP = rng.integers(2, 6, (size, P)).astype(np.int32)
        read_BP[np.arange(P)[None] < P - length_B[:, None]] = -1
        rows = Rows(np.arange(size), np.ones(size, bool), np.full(size, 16), settings, read_BP)
        got_BLV = np.asarray(allowed(rows, x_BLV, token_BLT, number_B))
        for b, config in enumerate(configs):
            for beam in range(L):
                new = token_BLT[b, beam, : number_B[b]].tolist()
                text = [*read_BP[b, P - length_B[b] :].tolist(), *new]
                want_V = processed_by_loops(x_BLV[b, beam], text, number_B[b], config)
                np.testing.assert_allclose(got_BLV[b, beam], want_V, rtol=1e-5)
                num_banned += config.no_repeat_ngram_size == 3 and np.isneginf(want_V).any()
    assert num_banned > 5


def test_where_every_token_is_banned_all_are_allowed():
    config = DecodingConfig(16, no_repeat_ngram_size=1)
    settings = RowSettings.of([config]).fitted(config.program)
    read_BP, row = np.arange(6, dtype=np.int32)[None], np.array([0])
    rows = Rows(row, row == 0, row + 16, settings, read_BP)
    x_BLV = jnp.ones((1, 1, 6))
    allowed = jax.jit(lambda rows, *arrays: rows.allowed(*arrays, config.program))
    got_BLV = allowed(rows, x_BLV, np.zeros((1, 1, 16), np.int32), row)
    np.testing.assert_array_equal(got_BLV, x_BLV)


@pytest.mark.parametrize(
    "settings",
    [
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.5},
        slow({"no_repeat_ngram_size": 3}),
        slow({"forced_prefix": (4, 4), "repetition_penalty": 0.5}),
    ],
)
def test_a_search_is_that_of_a_loop_over_lists(settings):
    config = DecodingConfig(7, beam_size=3, length_penalty=0.6, **settings)
    plain = dataclasses.replace(
        config, no_repeat_ngram_size=0, repetition_penalty=1.0, forced_prefix=()
    )
    log_prob_BTVV = np.stack([beam_oracle.tables(seed, 7) for seed in range(8)])
    found, num_changed = beam_oracle.search(log_prob_BTVV, config), 0
    for log_prob_TVV, got in zip(log_prob_BTVV, found, strict=True):

        def processed(log_prob_V, tokens):
            return processed_by_loops(log_prob_V, [0, *tokens], len(tokens), config)

        want = beam_oracle.search_by_lists(log_prob_TVV, config, processed)
        assert [tokens for tokens, _ in got[: len(want)]] == [tokens for tokens, _ in want]
        scores = ([score for _, score in texts] for texts in (got[: len(want)], want))
        np.testing.assert_allclose(*scores, rtol=1e-5)
        num_changed += want != beam_oracle.search_by_lists(log_prob_TVV, plain)
    assert num_changed >= 1


def generated(decoding, inputs=INPUTS, **options):
    return written(Generator(*tiny.model(), decoding), inputs, **options)


ROWS = [
    {"no_repeat_ngram_size": 1, "min_new_tokens": 4},
    {"repetition_penalty": 3.0},
    {},
    {"forced_prefix": (7, 7), "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("beam_size", [1, slow(2)])
def test_rows_of_a_batch_have_their_own_and_join_at_any_step(beam_size):
    """Each says what it says alone, in one program; the third needs none of it."""
    first = {"beam_size": beam_size, "eos_id": NEVER_ENDS, "pruning": "experts", "logprobs": 2}
    own = [DecodingConfig(16, **first, **row) for row in ROWS]

    def alone(index, config):
        return generated(config, [INPUTS[index]])[0]

    want = {0: alone(0, own[0])}
    before = COMPILATIONS.number
    want |= {index: alone(index, own[index]) for index in (1, 3)}
    assert COMPILATIONS.number == before
    plain = [alone(index, own[2]) for index in range(4)]
    want = [*map(want.get, (0, 1)), plain[2], want[3]]
    batch, said = RunningBatch(*tiny.model(), own[0]), {}

    def admit(*indices):
        batch.admit(
            [INPUTS[index] for index in indices],
            numbers=indices,
            token_limits=[16] * len(indices),
            settings=RowSettings.of([own[index] for index in indices]),
            length=4,
        )

    admit(0, 1)
    said |= batch.advance(3, is_compacting=False)
    admit(2, 3)
    while batch.waiting:
        said |= batch.advance(5, is_compacting=False)
    got = [[each.with_logprobs(2) for each in said[index]] for index in range(4)]
    assert_same_texts(got, want)
    for one, other in zip(sum(got, []), sum(want, []), strict=True):
        np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, rtol=1e-4)
        assert [list(each) for each in one.top_logprobs] == [
            list(each) for each in other.top_logprobs
        ]
    assert got[3][0].tokens[:2] == [7, 7]
    differ = [one != other for one, other in zip(tokens(got), tokens(plain), strict=True)]
    assert differ == [True, True, False, True]


@pytest.mark.parametrize("settings", [{"eos_id": NEVER_ENDS}, slow({}), slow({"beam_size": 2})])
def test_log_probabilities_are_those_of_the_score(settings):
    decoding = DecodingConfig(16, logprobs=5, pruning="experts", **settings)
    ends = [decoding.eos_id]
    for said, *_ in [generated(decoding, [each])[0] for each in INPUTS]:
        length = len(said.tokens) + said.is_finished
        assert len(said.token_logprobs) == len(said.top_logprobs) == length
        assert said.score == pytest.approx(sum(said.token_logprobs) / length, rel=1e-5)
        chosen = said.tokens + ends * said.is_finished
        for token, own, top in zip(chosen, said.token_logprobs, said.top_logprobs, strict=True):
            assert list(top.values()) == sorted(top.values(), reverse=True) and len(top) == 5
            assert top.get(token, own) == pytest.approx(own, abs=1e-5)
            is_greedy = "beam_size" not in settings
            assert next(iter(top)) == token or not is_greedy
        assert said.with_logprobs(0).top_logprobs is None
        assert said.with_logprobs(None).token_logprobs is None


def test_scores_are_float32_where_logits_are_rounded():
    config, params = tiny.model()
    precision = dataclasses.replace(config.precision, logits="bfloat16")
    config = dataclasses.replace(config, precision=precision)
    decoding = DecodingConfig(16, logprobs=0, eos_id=NEVER_ENDS)
    [[said, *_]] = written(Generator(config, params, decoding), INPUTS[:1])
    rounded = np.asarray(said.token_logprobs, jnp.bfloat16).astype(np.float32)
    assert np.mean(rounded == np.float32(said.token_logprobs)) < 0.5
    [(_, score)] = Scorer(config, params, start_id=decoding.start_id)(
        [(INPUTS[0], said.tokens)]
    )
    assert sum(said.token_logprobs) == pytest.approx(score.log_likelihood, abs=1e-4)


@pytest.mark.slow  # by default tests/serving asks for samples
def test_samples_are_those_of_numbers_and_the_best_of_them_come_first():
    decoding = DecodingConfig(T, temperature=1.0, seed=5, pruning="experts")
    want = generated(decoding, [INPUTS[0]] * 2 + [INPUTS[1]] * 2)
    two = dataclasses.replace(decoding, num_return_sequences=2)
    # An input's samples in batches of their own, and all in one.
    for size in (1, 4):
        said = written(Generator(*tiny.model(), two, size), INPUTS[:2])
        assert tokens(said) == [[each[0].tokens for each in want[i : i + 2]] for i in (0, 2)]
    assert want[0][0].tokens != want[1][0].tokens
    best = generated(dataclasses.replace(decoding, best_of=2), INPUTS[:2])
    for of_input, samples in zip(best, said, strict=True):
        scores = [each.score for each in of_input]
        assert scores == sorted((each.score for each in samples), reverse=True)


class Letters(ByteVocabulary):
    """A letter a token."""

    def decode(self, tokens):
        return "".join(chr(ord("a") + token) for token in tokens)


def test_a_text_ends_before_a_stop():
    settings = {"eos_id": NEVER_ENDS, "length_penalty": 0.5, "pruning": "experts"}
    ((said,),) = generated(DecodingConfig(16, logprobs=1, **settings), INPUTS[:1])
    text = Letters().decode(said.tokens)
    stop = text[7:9]
    decoding = DecodingConfig(16, stop=["zzz", stop], logprobs=1, **settings)
    generator = Generator(*tiny.model(), decoding, vocabulary=Letters())
    ((_, (got,)),) = generator(INPUTS[:1])
    place = text.index(stop)
    assert text_of(got, Letters(), generator.stops) == text[:place]
    assert got.tokens == said.tokens[: place + 2] and got.is_finished
    own = said.token_logprobs[: place + 2]
    assert got.score == pytest.approx(sum(own) / len(own) ** 0.5, rel=1e-4)
    assert got.token_logprobs == pytest.approx(own, rel=1e-4) and len(got.top_logprobs[0]) == 1


@pytest.mark.parametrize(
    ("settings", "field", "way_out"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty", "0.01 to 100"),
        ({"repetition_penalty": -1.0}, "repetition_penalty", "0.01 to 100"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty", "0.01 to 100"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size", "use 0 to"),
        ({"forced_prefix": [-1]}, "forced_prefix", "use 0 to"),
        ({"forced_prefix": ["a"]}, "forced_prefix", "a list of token ids"),
        ({"forced_prefix": 5}, "forced_prefix", "a list of token ids"),
        ({"forced_prefix": [True]}, "forced_prefix", "a list of token ids"),
        ({"forced_prefix": [3, 1]}, "forced_prefix", "id 1 ends an output"),
        ({"forced_prefix": [3] * 65}, "forced_prefix", "max_new_tokens=64"),
        ({"stop": [""]}, "stop", "texts that are not empty"),
        ({"stop": "x", "beam_size": 2}, "stop", "use beam_size=1"),
        ({"num_return_sequences": 0}, "num_return_sequences", "use 1 to"),
        ({"num_return_sequences": 2}, "num_return_sequences", "set beam_size"),
        ({"num_return_sequences": 3, "beam_size": 2}, "num_return_sequences", "1 to beam_"),
        ({"best_of": 2}, "best_of", "set a temperature"),
        ({"best_of": 2, "num_return_sequences": 3, "temperature": 1}, "best_of", "use num_"),
        ({"logprobs": -1}, "logprobs", "use 0 to 5"),
        ({"logprobs": 6}, "logprobs", "use 0 to 5"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(settings, field, way_out):
    with pytest.raises(FieldError, match=way_out) as error:
        DecodingConfig(**settings)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("settings", "way_out"),
    [
        ({"forced_prefix": [12]}, "the vocabulary has 0 to 11, not 12"),
        ({"stop": "a"}, "without a vocabulary"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(settings, way_out):
    with pytest.raises(FieldError, match=way_out):
        Generator(*tiny.model(), DecodingConfig(T, **settings))


def test_settings_are_data_and_a_row_has_no_more_than_its_program():
    # Other penalties, sizes and tokens are of the same program.
    programs = {DecodingConfig(16, **row).program for row in ROWS if row}
    assert len(programs) == 1
    assert {DecodingConfig(logprobs=n).program.num_kept for n in (1, 3, 5)} == {5}
    assert DecodingConfig(stop="a").program.num_kept == 0
    assert DecodingConfig().program.num_kept is None
    batch = RunningBatch(*tiny.model(), DecodingConfig(T))
    asks = RowSettings.of([DecodingConfig(T, no_repeat_ngram_size=2)])
    with pytest.raises(ValueError, match="its program has none"):
        batch.admit([[3]], numbers=[0], token_limits=[T], settings=asks)
