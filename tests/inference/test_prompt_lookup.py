# SPDX-License-Identifier: Apache-2.0
"""Drafted tokens: what is looked up, what is kept, and outputs, which are greedy decoding's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.fields import FieldError
from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, for_decoding
from switchx.inference.logits_processors import Rows, RowSettings
from switchx.inference.prompt_lookup import Drafted, drafts
from switchx.inference.running_batch import RunningBatch
from switchx.models.config import ModelConfig
from switchx.models.params import init_params
from tests.cases import slow, slow_unless
from tests.inference import tiny

T = 24


def drafts_by_loops(text: list[int], number: int, fill: int) -> list[int]:
    """The text is lengthened by what it says next, a token at a time."""
    end = len(text)
    for size in (2, 1):
        last = text[end - size :]
        if len(last) < size or min(last) < 0:
            continue
        for at in range(end - 2, size - 2, -1):
            if text[at - size + 1 : at + 1] == last:
                longer = list(text)
                for i in range(number):
                    longer.append(longer[at + 1 + i])
                return [token if token >= 0 else fill for token in longer[end:]]
    return [fill] * number


def test_drafts_are_what_followed_the_last_occurrence():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 15, 200)
    text_BM = rng.integers(-1, 4, (200, 14))
    got_BS = jax.jit(drafts, static_argnums=(2, 3))(text_BM, lengths, 5, 9)
    want = [
        drafts_by_loops(text[:length].tolist(), 5, 9)
        for text, length in zip(text_BM, lengths, strict=True)
    ]
    assert got_BS.tolist() == want
    assert [9] * 5 in want and any(9 not in each for each in want)


@functools.partial(jax.jit, static_argnames="program")
def one_step(said, logits_BLV, rows, program):
    return said.advance(logits_BLV, said.number_B(None), 1, rows, program)


def advanced(draft, likeliest, *, most=10, least=0, is_live=True):
    """Row 0 of a batch after a step: new tokens, what is read next, whether it lives.

    It has said [3]; its prompt was [5, 3, 4, 6, 7, 1].
    """
    program = DecodingConfig(16, prompt_lookup_num_tokens=3).program
    settings = RowSettings.of([DecodingConfig(16, min_new_tokens=least)] * 2)
    rows = Rows(
        jnp.arange(2),
        jnp.array([is_live, True]),
        jnp.array([most, 10]),
        jax.tree.map(jnp.array, settings),
    )
    read_BM = jnp.array([[5, 3, 4, 6, 7, 1]] * 2)
    said = Drafted.of_texts([(read_BM, read_BM > 0)], program)
    said = dataclasses.replace(
        said,
        token_BT=said.token_BT.at[:, 0].set(3),
        length_B=jnp.ones(2, jnp.int32),
        draft_BS=jnp.array([draft, [2, 2, 2]]),
    )
    logits_BLV = 5.0 * jax.nn.one_hot(jnp.array([likeliest, [8, 8, 8, 8]]), 9)
    # The end is the second likeliest token of all lanes.
    logits_BLV = logits_BLV.at[:, :, 2].add(1.0)
    after, token_BL, is_live_B = one_step(said, logits_BLV, rows, program)
    assert after.token_BT[1, :3].tolist() == [3, 8, 0]  # whatever the other row does
    length, log_prob = int(after.length_B[0]), float(after.log_prob_B[0])
    each = 5.0 - np.log(np.exp(5.0) + np.exp(1.0) + 7)
    if not least:
        np.testing.assert_allclose(log_prob, each * (length - 1), rtol=1e-5)
    assert after.token_BT[0, length:].tolist() == [0] * (16 - length)
    return after.token_BT[0, 1:length].tolist(), token_BL[0].tolist(), bool(is_live_B[0])


def test_a_step_keeps_drafts_up_to_the_first_wrong_one_and_the_token_after_them():
    assert advanced([4, 6, 7], [4, 6, 7, 5]) == ([4, 6, 7, 5], [5, 3, 4, 6], True)
    assert advanced([4, 6, 7], [4, 6, 5, 7]) == ([4, 6, 5], [5, 3, 4, 6], True)
    assert advanced([4, 6, 7], [8, 6, 7, 5]) == ([8], [8, 0, 0, 0], True)


def test_an_end_or_a_limit_in_the_midst_of_a_right_draft_ends_the_text():
    assert advanced([4, 1, 7], [4, 1, 7, 5])[::2] == ([4, 1], False)
    assert advanced([4, 6, 7], [4, 6, 7, 5], most=3)[::2] == ([4, 6], False)
    assert advanced([4, 6, 7], [4, 6, 7, 5], most=5)[::2] == ([4, 6, 7, 5], False)
    assert advanced([4, 6, 7], [4, 6, 7, 5], most=6)[::2] == ([4, 6, 7, 5], True)
    assert advanced([4, 6, 7], [4, 6, 7, 5], is_live=False) == ([], [0, 4, 6, 7], False)


def test_a_draft_that_ends_a_text_too_early_is_wrong():
    assert advanced([4, 1, 7], [4, 1, 7, 5], least=3)[::2] == ([4, 2], True)
    assert advanced([4, 1, 7], [4, 1, 7, 5], least=2)[::2] == ([4, 1], False)


def decoder(positions: str, **options):
    config = ModelConfig(
        "decoder_only", tiny.V, 16, 32, 4, 8, 2, init_scale=4.0, positions=positions, **options
    )
    return for_decoding(config), init_params(config, jax.random.key(5))


LONGEST = 5
MODELS = {
    "sparse encoder-decoder": tiny.model,
    "relative": functools.partial(decoder, "relative"),
    # Drafts behind the last place would be beyond the table.
    "learned": functools.partial(decoder, "learned", max_length=LONGEST + T),
    "tupe": functools.partial(decoder, "tupe", max_length=LONGEST + T, scale_attention=True),
    "rotary": functools.partial(decoder, "rotary", num_kv_heads=2, scale_attention=True),
    "a bias of each layer": functools.partial(
        decoder, "relative", relative_bias_per_layer=True
    ),
}
INPUTS = [[3, 4, 5, 8, 2], [6, 2, 7], [5, 5, 2, 5], [9]]
LIMITS = [T, 17, 5, T - 1]


def decoded(model, decoding, inputs, token_limits):
    """Hypotheses of each input, and the steps it took."""
    batch = RunningBatch(*model, decoding)
    batch.admit(inputs, numbers=range(len(inputs)), token_limits=token_limits)
    said = {}
    while batch.waiting:
        said |= batch.advance()
    return [said[name][0] for name in sorted(said)], batch.num_steps


DEFAULT = ("sparse encoder-decoder", "learned")


@pytest.mark.parametrize("name", [slow_unless(name in DEFAULT, name) for name in MODELS])
@pytest.mark.parametrize("size", [4, slow(1)])
def test_outputs_are_those_of_greedy_decoding_in_fewer_steps(name, size):
    model, lengths, num_steps = MODELS[name](), [], {}
    plain = DecodingConfig(T, pruning="none", min_new_tokens=3)
    for first in range(0, len(INPUTS), size):
        part = slice(first, first + size)
        want, steps = decoded(model, plain, INPUTS[part], LIMITS[part])
        drafting = dataclasses.replace(plain, prompt_lookup_num_tokens=3)
        got, fewer = decoded(model, drafting, INPUTS[part], LIMITS[part])
        tiny.assert_same_texts([got], [want], rtol=1e-4)
        assert [each.is_finished for each in got] == [each.is_finished for each in want]
        lengths += [len(each.tokens) for each in got]
        num_steps[first] = steps, fewer
    assert max(lengths) >= 12, lengths
    assert sum(fewer for _, fewer in num_steps.values()) < 0.8 * sum(
        steps for steps, _ in num_steps.values()
    ), num_steps


@pytest.mark.parametrize(
    "field, value",
    [
        ("beam_size", 2), ("temperature", 0.5), ("repetition_penalty", 1.2),
        ("no_repeat_ngram_size", 2), ("forced_prefix", [4]), ("logprobs", 0), ("stop", "x"),
    ],
)  # fmt: skip
def test_what_drafts_do_not_go_with_is_refused(field, value):
    with pytest.raises(FieldError, match=f"prompt_lookup_num_tokens=4; .*{field} is") as error:
        DecodingConfig(prompt_lookup_num_tokens=4, **{field: value})
    assert error.value.field == "prompt_lookup_num_tokens"
    with pytest.raises(FieldError, match="prompt_lookup_num_tokens=65; use 1 to 64"):
        DecodingConfig(prompt_lookup_num_tokens=65)


def test_experts_that_drafts_would_take_from_tokens_are_refused():
    config, params = tiny.CONFIG, tiny.model()[1]
    decoding = DecodingConfig(prompt_lookup_num_tokens=4)
    with pytest.raises(FieldError, match="prompt_lookup_num_tokens=4; experts have a capacity"):
        Generator(for_decoding(config, is_dropless=False), params, decoding)
    with pytest.raises(FieldError, match="prompt_lookup_num_tokens=4; experts come when"):
        Generator(for_decoding(config), params, decoding, experts=object())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse encoder-decoder", "relative"])
def test_sentences_join_those_that_are_drafted(name):
    """At steps of their own, with longer inputs and answers than there were."""
    model, rooms = MODELS[name](), [20, 40, 33]
    plain = DecodingConfig(40, pruning="none", eos_id=-1)
    want, _ = decoded(model, plain, INPUTS[:3], rooms)
    batch = RunningBatch(*model, dataclasses.replace(plain, prompt_lookup_num_tokens=2))
    order, said = [2, 0, 1], {}
    for index in order:
        batch.admit(
            [INPUTS[index]],
            numbers=[index],
            token_limits=[rooms[index]],
            length=len(INPUTS[index]),
        )
        assert len(batch.waiting) == len(said) + order.index(index) + 1
        said |= batch.advance(3, is_compacting=False)
        assert not said
        assert all(len(each.tokens) > 0 for each in batch.so_far().values())
    while batch.waiting:
        said |= batch.advance(5, is_compacting=False)
    for row, index in enumerate(order):
        assert said[row][0].tokens == want[index].tokens
    assert batch.num_steps < 6 + max(rooms)
