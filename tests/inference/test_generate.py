# SPDX-License-Identifier: Apache-2.0
"""Generated tokens are those of the whole forward pass, whatever is pruned and batched."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, for_decoding
from switchx.inference.running_batch import BATCHES, LENGTHS
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import forward
from switchx.moe.config import RouterConfig
from tests.cases import slow, slow_unless
from tests.inference.tiny import CONFIG, V, assert_same_texts, trained, written
from tests.models.batches import GPT_STYLE
from tests.training.jobs import with_switch

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

T, EOS = 6, 1
MODELS = {
    "encoder-decoder": CONFIG,
    "scanned": ModelConfig(
        "encoder_decoder", V, 16, 32, 2, 8, 2, 2, switch=SwitchConfig(4, every=1),
        init_scale=4.0, scan_layers=True,
    ),
    # Two blocks: in one, what a prompt's tokens see of each other changes no later token.
    "decoder-only": ModelConfig(
        "decoder_only", V, 16, 32, 2, 8, 2, init_scale=4.0, scan_layers=True,
        switch=SwitchConfig(4, every=1, router=RouterConfig(num_selected=2)),
    ),
    "gpt": ModelConfig(
        "decoder_only", V, 16, 32, 2, 8, 1, max_length=32, init_scale=4.0, **GPT_STYLE,
        switch=SwitchConfig(4, every=1, expert_bias=True),
    ),
    "tupe": ModelConfig(
        "encoder_decoder", V, 16, 32, 2, 8, 1, 1, init_scale=4.0, positions="tupe",
        max_length=7, scale_attention=True, switch=SwitchConfig(4, every=1),
    ),
    "tupe decoder": ModelConfig(
        "decoder_only", V, 16, 32, 2, 8, 1, init_scale=4.0, positions="tupe_relative",
        max_length=14, scale_attention=True,
    ),
    "rotary": ModelConfig(
        "decoder_only", V, 16, 32, 4, 8, 2, activation="swiglu", positions="rotary",
        num_kv_heads=2, qk_norm="head", scale_attention=True, init_scale=4.0,
        switch=SwitchConfig(4, every=1, router=RouterConfig(num_selected=2)),
    ),
    "dense": ModelConfig("encoder_decoder", V, 16, 32, 2, 8, 1, 1, init_scale=4.0),
}  # fmt: skip
# These decode by default in another test, or are the others without a part.
SLOW = ("scanned", "tupe", "tupe decoder", "dense")
# Five or six tokens, so that all lengths are rounded up to six.
INPUTS = [
    [3, 4, 5, 8, 2], [6, 2, 7, 8, 9, 10], [5, 5, 2, 5, 5], [11, 4, 4, 3, 9, 2], [7, 3, 9, 2, 8],
    [2, 3, 2, 3, 2, 3],
]  # fmt: skip
# New tokens of each, so that they end at different steps and pruning has something to do.
TOKEN_LIMITS = [6, 2, 5, 1, 6, 4]


# Every way of decoding, the others in the slow tests; other models decode greedily alone.
IN_ALL_WAYS = ("encoder-decoder", "gpt", "rotary")
# All inputs in one batch that is not made smaller: two programs. In batches of 4 and of 2 that
# shrink there are ten.
WHOLE = {"batch_size": 8, "pruning": "none"}
SHRINKING = {"batch_size": 4, "pruning": "compact"}


@functools.cache
def prepared(name: str):
    """(config, params) as decoding runs them."""
    config, params = trained(None, MODELS[name], seed=44)
    return for_decoding(config), params


@pytest.fixture(params=[slow_unless(n not in SLOW, n) for n in MODELS])
def any_model(request):
    return prepared(request.param)


@pytest.fixture(params=[IN_ALL_WAYS[0], *map(slow, IN_ALL_WAYS[1:])])
def model(request):
    return prepared(request.param)


@functools.partial(jax.jit, static_argnames="config")
def whole_forward_pass(config, params, batch):
    return jax.nn.log_softmax(forward(config, params, batch, is_training=False)[0][0], axis=-1)


def log_probs(config, params, source, tokens, *, is_prompt_bidirectional=False):
    """Of every next token, by one forward pass over the whole text, `[n + 1, V]`."""
    text = [0, *tokens] if config.is_encoder_decoder else [*source, *tokens]

    def features(stack, tokens, length):
        row = np.zeros((2, 1, length), np.int32)
        row[:, 0, : len(tokens)] = tokens, np.ones(len(tokens))
        return {
            f"{stack}_input_tokens": jnp.array(row[0]),
            f"{stack}_segment_ids": jnp.array(row[1]),
            f"{stack}_positions": jnp.arange(length)[None],
        }

    batch = features("decoder", text, 12 + T)
    is_prefix = np.arange(12 + T)[None] < len(source) * is_prompt_bidirectional
    batch["decoder_prefix_mask"] = jnp.array(is_prefix, jnp.int32)
    if config.is_encoder_decoder:
        batch |= features("encoder", source, 8)
    log_prob_LV = np.asarray(whole_forward_pass(config, params, batch))
    return log_prob_LV[len(text) - len(tokens) - 1 : len(text)]


def generate(model, inputs=INPUTS, token_limits=TOKEN_LIMITS, *, batch_size=8, **settings):
    decoding = DecodingConfig(**{"max_new_tokens": T, **settings})
    said = written(Generator(*model, decoding, batch_size), inputs, token_limits=token_limits)
    return dict(enumerate(said))


def with_end(hypothesis):
    return hypothesis.tokens + [EOS] * hypothesis.is_finished


def test_greedy_tokens_are_the_likeliest_of_the_whole_forward_pass(any_model):
    got = generate(any_model, pruning="none")
    assert len(got) == len(INPUTS)
    for number, (hypothesis,) in got.items():
        tokens = with_end(hypothesis)
        log_prob_TV = log_probs(*any_model, INPUTS[number], tokens[:-1])
        assert np.argmax(log_prob_TV, axis=1).tolist() == tokens
        mean = np.mean(log_prob_TV[np.arange(len(tokens)), tokens])
        assert hypothesis.score == pytest.approx(mean, rel=1e-4)
        assert hypothesis.is_finished or len(tokens) == TOKEN_LIMITS[number]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"beam_size": 3}, {"temperature": 1.0, "seed": 7}], ids=str
)
def test_results_depend_on_neither_pruning_nor_the_batch(model, settings):
    want = generate(model, **WHOLE, **settings)
    ways = [SHRINKING, {"pruning": "experts"}]
    for way in ways:
        got = generate(model, **settings, **way)
        assert_same_texts([*got.values()], [*want.values()], rtol=2e-5)


def test_beams_score_what_the_forward_pass_says(model):
    got = generate(model, **WHOLE, beam_size=3)
    greedy = generate(model, **WHOLE)
    for number, hypotheses in got.items():
        scores = [each.score for each in hypotheses]
        assert scores == sorted(scores, reverse=True) and len(scores) == 3
        for hypothesis in hypotheses:
            tokens = with_end(hypothesis)
            log_prob_TV = log_probs(*model, INPUTS[number], tokens[:-1])
            total = np.sum(log_prob_TV[np.arange(len(tokens)), tokens])
            assert hypothesis.score == pytest.approx(total / len(tokens), rel=1e-4)
    better = sum(got[n][0].score >= greedy[n][0].score - 1e-5 for n in got)
    assert better >= len(INPUTS) - 1  # beam search may lose what greedy finds


@pytest.mark.parametrize("name", ["tupe decoder", slow("rotary")])
def test_beams_have_the_positions_of_their_text(name):
    """Prompts of two lengths, so that the shorter is padded; a relative bias beside TUPE."""
    model = prepared(name)
    for number, hypotheses in generate(model, INPUTS[:2], None, **WHOLE, beam_size=2).items():
        for hypothesis in hypotheses:
            tokens = with_end(hypothesis)
            log_prob_TV = log_probs(*model, INPUTS[number], tokens[:-1])
            mean = np.mean(log_prob_TV[np.arange(len(tokens)), tokens])
            assert hypothesis.score == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("settings", [slow({}), {"beam_size": 3}], ids=str)
def test_a_sentence_with_less_room_is_what_it_would_be_if_all_had_as_little(settings):
    model, token_limits = prepared("encoder-decoder"), [1, 6, 3, 2, 3, 4]
    got = generate(model, INPUTS, token_limits, **WHOLE, **settings)
    all_with_3 = generate(model, INPUTS, None, **WHOLE, max_new_tokens=3, **settings)
    for number in (2, 4):
        want = all_with_3[number]
        assert [each.tokens for each in got[number]] == [each.tokens for each in want]
        assert got[number][0].score == pytest.approx(want[0].score, rel=1e-4)
    assert all(len(got[n][0].tokens) <= limit for n, limit in enumerate(token_limits))


@pytest.mark.parametrize("limit", [0, T + 1])
def test_a_limit_that_is_none_is_refused(limit):
    generator = Generator(MODELS["dense"], {}, DecodingConfig(max_new_tokens=T))
    with pytest.raises(ValueError, match=f"input 0 may have {limit} new tokens; use 1 to 6"):
        list(generator([[3]], [limit]))


def test_a_prompt_may_see_itself_whole():
    model = prepared("decoder-only")
    got = generate(model, **WHOLE, is_prompt_bidirectional=True)
    for number, (hypothesis,) in got.items():
        tokens = with_end(hypothesis)
        log_prob_TV = log_probs(
            *model, INPUTS[number], tokens[:-1], is_prompt_bidirectional=True
        )
        assert np.argmax(log_prob_TV, axis=1).tolist() == tokens


def test_seeds_give_other_samples(model):
    sampling = WHOLE | {"temperature": 1.0}
    by_seed = [
        [best.tokens for _, (best,) in sorted(generate(model, **sampling, seed=s).items())]
        for s in (0, 0, 1)
    ]
    assert by_seed[0] == by_seed[1] != by_seed[2]


def test_capacity_is_kept_where_it_is_asked_for():
    config = MODELS["encoder-decoder"]
    dropping = for_decoding(config, is_dropless=False)
    assert dropping == config
    router = dataclasses.replace(config.switch.router, padding="counted")
    dropless = for_decoding(with_switch(config, expert_capacity=2, router=router))
    assert dropless.switch.router.overflow == "dropless"
    assert dropless.switch.router.padding == "ignored"  # so that what is finished is pruned


def test_switch_attention_is_refused():
    with pytest.raises(ValueError, match="have no cache; decode a model with"):
        for_decoding(with_switch(MODELS["encoder-decoder"], sublayers="both"))


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("dense", [[3], []], "input 1 is empty"),
        ("dense", [[3, V]], f"input 0 has token id {V}, the vocabulary has 0 to {V - 1}"),
        ("dense", [[-1]], "input 0 has token id -1"),
        ("gpt", [[3] * 27], "input 0 needs 33 positions, the model has 32"),
        ("tupe", [[3] * 8], "input 0 needs 8 positions, the model has 7"),
        ("tupe decoder", [[3] * 9], "input 0 needs 15 positions, the model has 14"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(name, inputs, message):
    generator = Generator(MODELS[name], {}, DecodingConfig(max_new_tokens=T))
    with pytest.raises(ValueError, match=message):
        list(generator(inputs))


@pytest.mark.parametrize("batch_size", [0, BATCHES[-1] + 1])
def test_batches_of_nothing_or_too_much_are_refused(batch_size):
    with pytest.raises(ValueError, match=f"batch_size={batch_size}; use 1 to"):
        Generator(MODELS["dense"], {}, DecodingConfig(), batch_size=batch_size)


def test_lengths_waste_no_more_than_a_third():
    assert LENGTHS[:8] == (1, 2, 3, 4, 6, 8, 12, 16)
    steps = zip(LENGTHS, LENGTHS[1:], strict=False)
    assert all(after - before - 1 <= after / 3 for before, after in steps)


def test_more_beams_than_tokens_are_refused():
    config = for_decoding(CONFIG)
    with pytest.raises(ValueError, match="beam_size=1000 with a vocabulary of .* use 1 to"):
        Generator(config, {}, DecodingConfig(beam_size=1000))
