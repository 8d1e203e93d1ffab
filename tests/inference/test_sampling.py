# SPDX-License-Identifier: Apache-2.0
"""The next token: settings, top-k, what is sampled and how often, greedy hypotheses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.inference.config import MAX_INT32, DecodingConfig
from switchx.inference.sampling import (
    BLOCK,
    Greedy,
    Rows,
    RowSettings,
    drawn,
    largest,
    least_likely,
    next_token,
    top_k,
)
from tests.jaxprs import equations

PROB_V = np.array([0.1, 0.4, 0.05, 0.3, 0.15], np.float32)
NO_K, NO_P = MAX_INT32, 1.0

least = jax.jit(least_likely)
draw = jax.jit(drawn)
choose = jax.jit(next_token)
_advance = jax.jit(Greedy.advance, static_argnames="program")


def advance(hypotheses, logits_BLV, step, rows, *, program):
    """Token number `step` of every sentence."""
    number_B = np.full(rows.sentence_B.shape, step, np.int32)
    return _advance(hypotheses, logits_BLV, number_B, np.int32(0), rows, program=program)


def kept(logits_BV, top_k, top_p):
    """Whether each token stays, of every row by its own k and p."""
    B = len(logits_BV)
    top_k_B, top_p_B = np.full(B, top_k, np.int32), np.full(B, top_p, np.float32)
    return logits_BV >= np.asarray(least(logits_BV, top_k_B, top_p_B))[:, None]


def test_scores_are_finite_whatever_the_length_penalty():
    """-1e5 / 4096 ** -10 is beyond float32; NaN stays what it is."""
    decoding = DecodingConfig(4096, length_penalty=-10.0)
    rows = Rows(
        np.arange(2), np.ones(2, bool), np.full(2, 4096), RowSettings.of([decoding] * 2)
    )
    said = dataclasses.replace(
        Greedy.start(2, decoding.program),
        log_prob_B=jnp.array([-1e5, jnp.nan]),
        length_B=jnp.array([4096, 4096]),
    )
    _, ((huge,), (nan,)) = said.results(rows)
    assert huge == jnp.finfo(jnp.float32).min and jnp.isnan(nan)


def many_logits(kind: str) -> np.ndarray:
    """Rows of 1,000: their largest 128 reach most p, some p or none."""
    rng = np.random.default_rng(5)
    x_BV = rng.normal(size=(6, 1000)).astype(np.float32)
    scale = {"sharp": 6.0, "flat": 0.05, "ties": 1.0}[kind]
    return np.round(x_BV * 2) / 2 if kind == "ties" else x_BV * scale


def kept_by_sorting(logits_BV, top_k, top_p):
    """By definition, in float64: of equal ones all or none."""
    x_BV = logits_BV.astype(np.float64)
    larger_BVV = x_BV[:, None, :] > x_BV[:, :, None]
    in_k_BV = larger_BVV.sum(-1) < top_k
    weight_BV = np.exp(x_BV - x_BV.max(1, keepdims=True)) * in_k_BV
    above_BV = (larger_BVV * weight_BV[:, None]).sum(-1) / weight_BV.sum(1, keepdims=True)
    return in_k_BV & ((above_BV < top_p) | (top_p == NO_P))


CHOICES = [
    (1, NO_P), (50, NO_P), (300, NO_P), (999, NO_P), (NO_K, 0.2), (NO_K, 0.9), (NO_K, 0.999),
    (20, 0.5), (400, 0.7), (2000, NO_P),
    (NO_K, 1e-12), (NO_K, 1e-60),  # 0 in float32: the first always stays
]  # fmt: skip


@pytest.mark.parametrize("kind", ["sharp", "flat", "ties"])
def test_those_stay_that_stay_after_sorting(kind):
    logits_BV = many_logits(kind)
    for most, share in CHOICES:
        want_BV = kept_by_sorting(logits_BV, most, share)
        got_BV = kept(logits_BV, most, share)
        np.testing.assert_array_equal(got_BV, want_BV, f"top_k={most}, top_p={share}")


@pytest.mark.hf
@pytest.mark.parametrize("kind", ["sharp", "flat"])
def test_those_stay_that_stay_in_transformers(kind):
    """Without equal logits: there transformers keeps those that its sort puts last."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logits_BV = many_logits(kind)
    for most, share in CHOICES:
        theirs = torch.tensor(logits_BV)
        if most != NO_K:
            theirs = transformers.TopKLogitsWarper(most)(None, theirs)
        if share != NO_P:
            theirs = transformers.TopPLogitsWarper(share)(None, theirs)
        want_BV = np.isfinite(theirs.numpy())
        np.testing.assert_array_equal(kept(logits_BV, most, share), want_BV)


def test_rows_have_their_own_thresholds():
    """Some found among the largest, some by bisection, some not wanted."""
    logits_BV = many_logits("flat")
    top_k_B = np.array([3, 700, NO_K, NO_K, NO_K, 10], np.int32)
    top_p_B = np.array([1, 1, 0.05, 0.95, 1, 0.5], np.float32)
    got_BV = logits_BV >= np.asarray(least(logits_BV, top_k_B, top_p_B))[:, None]
    for row, (most, share) in enumerate(zip(top_k_B, top_p_B, strict=True)):
        want_V = kept_by_sorting(logits_BV[row : row + 1], most, float(share))[0]
        np.testing.assert_array_equal(got_BV[row], want_V, f"row {row}")


def test_nothing_of_the_size_of_the_vocabulary_is_sorted():
    V = 512 * BLOCK
    settings, logits_BV = settings_of(2, temperature=1.0), np.zeros((2, V), np.float32)
    program = jax.make_jaxpr(next_token)(logits_BV, logits_BV, np.zeros(2), settings)
    sorting = [
        equation.invars[0].aval.size
        for equation in equations(program.jaxpr)
        if equation.primitive.name in ("sort", "top_k", "approx_top_k")
    ]
    assert sorting and max(sorting) <= V // 2  # of 2 V logits


def settings_of(size: int, **settings) -> RowSettings:
    return RowSettings.of([DecodingConfig(**settings)] * size)


def test_the_likeliest_token_is_the_default():
    logits_BV = np.log(PROB_V)[None] + 5.0
    token_B, log_prob_B = choose(logits_BV, logits_BV, None, settings_of(1))
    assert token_B.tolist() == [1] and token_B.dtype == jnp.int32
    assert float(log_prob_B[0]) == pytest.approx(np.log(0.4), rel=1e-5)
    assert not DecodingConfig().is_sampling and DecodingConfig().beam_size == 1


WAYS = [
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 40},
    {"temperature": 1.5, "top_p": 0.6},
]


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_samples_are_as_frequent_as_their_probabilities(settings):
    """Chi-square against a softmax of NumPy; log-probabilities are the model's own."""
    draws, V = 4_000, 200
    logits_V = np.random.default_rng(2).normal(size=V).astype(np.float32) * 2
    config = DecodingConfig(1, seed=11, eos_id=V, **settings)
    warm_V = logits_V / config.temperature
    is_kept_V = kept_by_sorting(warm_V[None], config.top_k or NO_K, config.top_p or NO_P)[0]
    want_V = np.where(is_kept_V, np.exp(warm_V - warm_V.max(), dtype=np.float64), 0)
    want_V *= draws / want_V.sum()

    own = RowSettings.of([config] * draws)
    rows = Rows(np.arange(draws), np.ones(draws, bool), np.ones(draws, np.int32), own)
    program = config.program_of(1)
    said, token_BL, _ = advance(
        Greedy.start(draws, program),
        np.broadcast_to(logits_V, (draws, 1, V)),
        np.int32(0),
        rows,
        program=program,
    )
    token_B = np.asarray(token_BL)[:, 0]
    got_V = np.bincount(token_B, minlength=V)
    assert np.all(got_V[~is_kept_V] == 0)
    is_often_V = want_V >= 5  # the others are one class
    got = np.append(got_V[is_often_V], got_V[~is_often_V].sum())
    want = np.append(want_V[is_often_V], want_V[~is_often_V].sum() + 1e-9)
    freedom = len(got) - 1
    # Fisher's normal approximation: 3.3 is exceeded by one seed in two thousand.
    chi_square = np.sum((got - want) ** 2 / want)
    assert np.sqrt(2 * chi_square) - np.sqrt(2 * freedom - 1) < 3.3
    log_prob_V = logits_V - np.log(np.sum(np.exp(logits_V)))
    np.testing.assert_allclose(said.log_prob_B, log_prob_V[token_B], rtol=1e-4)


def test_the_ends_of_the_unit_interval_are_tokens_that_stay():
    """Also where the first and the last blocks hold none."""
    logits_BV = np.full((2, 3 * BLOCK + 7), -np.inf, np.float32)
    logits_BV[:, BLOCK + 3], logits_BV[:, BLOCK + 90], logits_BV[:, 2 * BLOCK] = 0, 1, -9
    numbers_B = np.array([0, np.nextafter(np.float32(1), np.float32(0))], np.float32)
    token_B = draw(logits_BV, np.full(2, -5, np.float32), numbers_B)
    assert token_B.tolist() == [BLOCK + 3, BLOCK + 90]


@pytest.mark.parametrize("num_blocks", [1, 31])
def test_numbers_at_the_edges_of_rounded_sums_draw_tokens_that_stay(num_blocks):
    """Where products are fused into sums, the same sum has two values a last bit apart."""
    texts, K, V = 40, 20, 31 * BLOCK + 7
    rng = np.random.default_rng(0)
    logits_NV = np.full((texts, V), -np.inf, np.float32)
    for logits_V in logits_NV:
        logits_V[rng.choice(num_blocks * BLOCK, K, replace=False)] = rng.normal(size=K) * 2
    edge_NV = np.cumsum(np.exp(logits_NV, dtype=np.float64), axis=1)
    edge_NK = np.stack([np.unique(edge_V)[-K:] for edge_V in edge_NV])
    # `jax.random.uniform` gives multiples of 2^-23.
    number_NKX = np.round(edge_NK / edge_NK[:, -1:] * 2**23)[..., None] + np.arange(-4, 4)
    number_B = np.clip(number_NKX, 0, 2**23 - 1).ravel().astype(np.float32) / 2**23
    logits_BV = np.repeat(logits_NV, 8 * K, axis=0)
    # Tests are compiled without fused multiply-add; users' programs are not.
    fused = jax.jit(drawn, compiler_options={"xla_backend_optimization_level": 3})
    token_B = np.asarray(fused(logits_BV, np.full(len(logits_BV), -1e9, np.float32), number_B))
    assert np.all(np.isfinite(logits_BV[np.arange(len(token_B)), np.minimum(token_B, V - 1)]))


def numbers(kind: str, V: int) -> np.ndarray:
    rng = np.random.default_rng(V)
    if kind == "ties":
        return rng.integers(0, 4, (6, V)).astype(np.float32)
    if kind == "in one block":
        x_BV = rng.normal(size=(6, V)).astype(np.float32)
        x_BV[:, -BLOCK:] += 100
        return x_BV
    return rng.normal(size=(6, V)).astype(np.float32)


blocked_top_k = jax.jit(top_k, static_argnums=1)


@pytest.mark.parametrize("V", [24 * BLOCK, 300])
@pytest.mark.parametrize("kind", ["random", "ties", "in one block"])
def test_finds_what_numpy_finds(kind, V):
    x_BV = numbers(kind, V)
    for k in (1, 8):
        # A stable sort: equal numbers in the order of places.
        place_BV = np.argsort(-x_BV, axis=1, kind="stable")[:, :k]
        value_BV, index_BV = blocked_top_k(x_BV, k)
        np.testing.assert_array_equal(index_BV, place_BV)
        np.testing.assert_array_equal(value_BV, np.take_along_axis(x_BV, place_BV, axis=1))


CONFIG = DecodingConfig(max_new_tokens=3, eos_id=1, pad_id=0, length_penalty=0.5)


def logits(tokens, V=4):
    """Of which each token has probability 1/2 and the others share the rest."""
    prob_BV = np.full((len(tokens), V), 0.5 / (V - 1), np.float32)
    prob_BV[np.arange(len(tokens)), tokens] = 0.5
    return np.log(prob_BV)[:, None]


def advance_all(steps, config=CONFIG):
    program = config.program_of(config.max_new_tokens)
    hypotheses, live = Greedy.start(2, program), []
    is_live_B, max_new_tokens_B = np.ones(2, bool), np.array([3, 3])
    for step, tokens in enumerate(steps):
        settings = RowSettings.of([config] * 2)
        rows = Rows(np.arange(2), np.asarray(is_live_B), max_new_tokens_B, settings)
        hypotheses, token_BL, is_live_B = advance(
            hypotheses, logits(tokens), step, rows, program=program
        )
        live.append(is_live_B.tolist())
    return hypotheses, token_BL, live


def test_a_text_ends_with_its_end_or_its_room_and_has_its_score():
    hypotheses, token_BL, live = advance_all([[2, 3], [1, 3], [3, 2]])
    assert live == [[True, True], [False, True], [False, False]]
    np.testing.assert_array_equal(hypotheses.token_BT, [[2, 1, 0], [3, 3, 2]])
    np.testing.assert_array_equal(token_BL, [[0], [2]])  # the ended one says nothing more
    np.testing.assert_array_equal(hypotheses.length_B, [2, 3])
    settings = RowSettings.of([CONFIG] * 2)
    rows = Rows(jnp.arange(2), jnp.zeros(2, bool), jnp.array([3, 3]), settings)
    token_BLT, score_BL = hypotheses.results(rows)
    assert token_BLT.shape == (2, 1, 3)
    want = [[2 * np.log(0.5) / 2**0.5], [3 * np.log(0.5) / 3**0.5]]
    np.testing.assert_allclose(score_BL, want, rtol=1e-5)


def test_a_text_does_not_end_before_it_may():
    """The second likeliest is said in the place of an early end."""
    config = dataclasses.replace(CONFIG, min_new_tokens=2)
    hypotheses, _, live = advance_all([[1, 3], [1, 1], [1, 1]], config)
    assert live == [[True, True], [True, True], [False, False]]
    token_BT = np.asarray(hypotheses.token_BT)
    assert 1 not in token_BT[:, :2] and token_BT[:, 2].tolist() == [1, 1]
    # log-probabilities are the model's own: of a third of the other half
    want = np.log(0.5 / 3) * 2 + np.log(0.5)
    assert float(hypotheses.log_prob_B[0]) == pytest.approx(want, rel=1e-5)


def test_a_sample_is_its_sentences_own():
    """Sentences in another order sample the same texts."""
    config = DecodingConfig(max_new_tokens=8, temperature=1.0, seed=1, eos_id=99)

    def sampled(*sentences):
        program, settings = config.program_of(8), RowSettings.of([config] * 2)
        hypotheses = Greedy.start(2, program)
        rows = Rows(np.array(sentences), np.ones(2, bool), np.array([8, 8]), settings)
        zeros_BLV = np.zeros((2, 1, 4), np.float32)
        for step in range(8):
            hypotheses, _, _ = advance(hypotheses, zeros_BLV, step, rows, program=program)
        return np.asarray(hypotheses.token_BT)

    forward, backward = sampled(5, 9), sampled(9, 5)
    np.testing.assert_array_equal(forward, backward[::-1])
    assert np.any(forward[0] != forward[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0; use 1 to 1048576"),
        ({"beam_size": 0}, "beam_size=0; use at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0; use 0 to 100"),
        ({"temperature": 1e-21}, "temperature=1e-21; use 0 for the likeliest token"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0; use 1 to "),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5; use 0 to 1"),
        ({"early_stopping": "soon"}, "use one of True, False, never"),
        ({"pruning": "all"}, "use one of none, experts, compact"),
        ({"temperature": 1.0, "beam_size": 2}, "beam_size=2; temperature=1.0 samples"),
        ({"top_k": 3}, "temperature=0 does not sample"),
        (
            {"min_new_tokens": 9, "max_new_tokens": 8},
            "min_new_tokens=9; use 0 to max_new_tokens=8",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DecodingConfig(**settings)


def test_largest_of_rows_that_are_split_over_devices():
    """XLA's partitioner ended the process where one barrier had both results."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    x_BV = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    _, index_BK = jax.jit(largest, static_argnums=1)(jax.device_put(x_BV, columns), 4)
    np.testing.assert_array_equal(index_BK, np.argsort(-x_BV, axis=1)[:, :4])
