# SPDX-License-Identifier: Apache-2.0
"""`transformers`' `generate` and ours, with the same weights: tokens, and scores of the n best.

Settings that change logits by what a text has so far; log-probabilities; stop strings. Inputs
are asked one by one, as its processors read padding, too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.api import Model
from switchx.data.tasks import TextFormat
from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, for_decoding
from switchx.interop.huggingface import read_checkpoint
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import init_params
from tests.interop.transformers_models import MODELS, SIZES, build

pytestmark = [pytest.mark.hf, pytest.mark.slow]

T, LANGUAGE = 14, 17
INPUTS = [[5, 9, 3, 14, 1], [7, 7, 20, 4, 1], [11, 2, 18, 6, 1]]


@pytest.fixture(scope="module", params=["t5_1_1", "switch_untied"])
def both(request, tmp_path_factory):
    """Their model, and ours as it is decoded."""
    import torch

    theirs = build(*MODELS[request.param]).eval()
    with torch.no_grad():
        theirs.lm_head.weight *= 3.0  # so that texts repeat, and depend on their sources
        theirs.lm_head.weight[1] *= 0.5
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    checkpoint = read_checkpoint(folder)
    return theirs, (for_decoding(checkpoint.config), checkpoint.params)


def asked(theirs, **settings):
    """Token lists without start and end, and what else there is, of each input."""
    import torch

    for source in INPUTS:
        with torch.no_grad():
            said = theirs.generate(
                torch.tensor([source]), max_new_tokens=T, do_sample=False, output_scores=True,
                output_logits=True, return_dict_in_generate=True, **settings,
            )  # fmt: skip
        yield said


def without_end(row) -> list[int]:
    row = row.tolist()[1:]
    return row[: row.index(1)] if 1 in row else row


SETTINGS = {
    "plain": {},
    "penalty": {"repetition_penalty": 1.8},
    "reward": {"repetition_penalty": 0.7, "no_repeat_ngram_size": 3},
    "bigrams": {"no_repeat_ngram_size": 2},
    "trigrams": {"no_repeat_ngram_size": 3, "min_new_tokens": 9},
    "tokens": {"no_repeat_ngram_size": 1},
    "language": {"forced_prefix": [LANGUAGE], "repetition_penalty": 1.3},
}


def theirs_of(settings: dict) -> dict:
    others = {name: value for name, value in settings.items() if name != "forced_prefix"}
    if "forced_prefix" in settings:
        others["forced_bos_token_id"] = LANGUAGE
    return others


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_tokens(both, name):
    theirs, ours = both
    settings = SETTINGS[name]
    got = dict(Generator(*ours, DecodingConfig(T, logprobs=0, **settings))(INPUTS))
    for number, want in enumerate(asked(theirs, **theirs_of(settings))):
        (said,) = got[number]
        assert said.tokens == without_end(want.sequences[0])
        # The model's own log-probabilities, which their `logits` are those of.
        chosen = want.sequences[0, 1:]
        own = [
            step[0].log_softmax(-1)[token].item()
            for step, token in zip(want.logits, chosen, strict=True)
        ]
        np.testing.assert_allclose(said.token_logprobs, own, atol=2e-4)


def test_drafted_tokens(both):
    """Of greedy decoding theirs, which drafts nothing."""
    theirs, ours = both
    decoding = DecodingConfig(T, prompt_lookup_num_tokens=3)
    for inputs in (INPUTS, INPUTS[:1]):
        got = dict(Generator(*ours, decoding)(inputs))
        for number, want in zip(range(len(inputs)), asked(theirs), strict=False):
            assert got[number][0].tokens == without_end(want.sequences[0])


@pytest.mark.parametrize("name", SETTINGS)
def test_the_n_best_of_a_search_and_their_scores(both, name):
    theirs, ours = both
    settings = SETTINGS[name] | {"length_penalty": 0.7}
    config = DecodingConfig(T, beam_size=4, num_return_sequences=3, **settings)
    got = dict(Generator(*ours, config)(INPUTS))
    wanted = asked(theirs, num_beams=4, num_return_sequences=3, **theirs_of(settings))
    for number, want in enumerate(wanted):
        best = got[number][:3]
        assert [each.tokens for each in best] == [without_end(row) for row in want.sequences]
        np.testing.assert_allclose(
            [each.score for each in best], want.sequences_scores.tolist(), rtol=1e-5
        )


def test_a_prefix_of_several_tokens(both):
    """Theirs is the beginning of the decoder's input."""
    import torch

    theirs, ours = both
    prefix = [LANGUAGE, 4, LANGUAGE]
    config = DecodingConfig(T, forced_prefix=prefix, no_repeat_ngram_size=2)
    got = dict(Generator(*ours, config)(INPUTS))
    for number, source in enumerate(INPUTS):
        with torch.no_grad():
            want = theirs.generate(
                torch.tensor([source]), decoder_input_ids=torch.tensor([[0, *prefix]]),
                max_new_tokens=T - 3, do_sample=False, no_repeat_ngram_size=2,
            )  # fmt: skip
        assert got[number][0].tokens == without_end(want[0])


DECODER = ModelConfig(
    "decoder_only", SIZES["vocab_size"], 16, 32, 2, 8, 2, init_scale=4.0,
    switch=SwitchConfig(4, every=1),
)  # fmt: skip


@functools.cache
def decoder_only() -> Model:
    params = init_params(DECODER, jax.random.key(3))
    return Model(DECODER, params, None, 0, TextFormat(False, False, False), "")


@pytest.mark.parametrize("name", ["penalty", "bigrams", "trigrams"])
def test_a_decoder_only_model_with_their_processors(name):
    """A loop over our logits, which their processors change; prompts are part of the text."""
    import torch
    import transformers

    settings, model = SETTINGS[name], decoder_only()
    prompts = [[5, 9, 5, 9, 14], [7, 7, 20], [11, 2, 18, 6, 11, 2, 18, 11, 2]]
    got = model.generate(prompts, max_length=T, **settings)
    for prompt, said in zip(prompts, got, strict=True):
        processors = transformers.LogitsProcessorList()
        if penalty := settings.get("repetition_penalty"):
            processors.append(transformers.RepetitionPenaltyLogitsProcessor(penalty))
        if size := settings.get("no_repeat_ngram_size"):
            processors.append(transformers.NoRepeatNGramLogitsProcessor(size))
        text, length = [0, *prompt], len(prompt) + 1
        if least := settings.get("min_new_tokens"):
            processors.append(transformers.MinNewTokensLengthLogitsProcessor(length, least, 1))
        while len(text) < length + T and text[-1] != 1:
            token_BL = np.zeros((1, 24), np.int32)
            token_BL[0, : len(text)] = text
            logits_V = np.asarray(model.logits(jnp.array(token_BL), dropless=True))[
                0, len(text) - 1
            ]
            changed = processors(torch.tensor([text]), torch.tensor(logits_V[None]))
            text.append(int(changed.argmax()))
        assert said == [token for token in text[length:] if token != 1]
