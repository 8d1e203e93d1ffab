# SPDX-License-Identifier: Apache-2.0
"""The part of `switchx bench decode` about drafted tokens (`inference/prompt_lookup.py`).

One model writes two kinds of text, whose tokens its logit matrix decides: after each token one
other is the likeliest. Some tokens are in short cycles, so that a prompt with one cycle is
copied over and over; all others are in one long cycle, so that nothing is repeated and no
draft is right. All else is random, and is computed. Greedy decoding and drafts take turns.
Dims: D model, V vocabulary
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.timing import Contender, speedup, take_turns
from switchx.bench.train import in_ms, switch_model
from switchx.inference.config import DecodingConfig
from switchx.inference.generate import for_decoding
from switchx.inference.running_batch import RunningBatch
from switchx.models.config import ModelConfig
from switchx.models.params import init_params
from switchx.results import Check

NUM_EXPERTS, NEW_TOKENS, DRAFTS = 8, 64, 7
BATCHES = 1, 4
PERIOD, CYCLES = 16, 16  # tokens of a short cycle; number of short cycles
FIRST = 3  # first token that is not padding, end or start


def successors(vocab_size: int) -> np.ndarray:
    """The successor of each token: short cycles, then one cycle of all other tokens."""
    after_V = np.arange(vocab_size) + 1
    after_V[FIRST - 1] = 0
    long = FIRST + PERIOD * CYCLES
    for first in range(FIRST, long, PERIOD):
        after_V[first + PERIOD - 1] = first
    after_V[-1] = long
    return after_V


def model() -> tuple[ModelConfig, dict]:
    """A sparse decoder-only model that writes each token's successor."""
    config = dataclasses.replace(
        switch_model(NUM_EXPERTS),
        architecture="decoder_only",
        num_encoder_layers=0,
        tie_embeddings=False,
    )
    params = init_params(config, jax.random.key(0))
    # What blocks add to a token is small beside it, and the rows of random tables are nearly
    # orthogonal: a token's own row has the largest product with it.
    table_VD = params["embedding"]["embedding_VD"] * 16
    before_V = np.empty(config.vocab_size, int)
    before_V[successors(config.vocab_size)] = np.arange(config.vocab_size)
    embedding = params["embedding"] | {
        "embedding_VD": table_VD,
        "w_logits_DV": jnp.asarray(table_VD[before_V].T),
    }
    return for_decoding(config), params | {"embedding": embedding}


def inputs(batch: int, vocab_size: int, *, is_copied: bool) -> list[list[int]]:
    """A prompt of `PERIOD` tokens for each row: a short cycle, or part of the long one."""
    long = FIRST + PERIOD * CYCLES
    begin, apart = (FIRST, PERIOD) if is_copied else (long, (vocab_size - long) // batch)
    firsts = [begin + row * apart for row in range(batch)]
    return [list(range(first, first + PERIOD)) for first in firsts]


def decoder(config: ModelConfig, params: dict, decoding: DecodingConfig, sentences) -> Callable:
    """A function that decodes the sentences, and returns their tokens and the decode steps."""
    size = len(sentences)

    def decode() -> tuple[list[list[int]], int]:
        batch = RunningBatch(config, params, decoding)
        batch.admit(sentences, numbers=range(size), token_limits=[NEW_TOKENS] * size)
        hypotheses = batch.advance()
        return [hypotheses[number][0].tokens for number in sorted(hypotheses)], batch.num_steps

    return decode


def speculation(rounds: int) -> tuple[list[dict[str, Any]], list[Check]]:
    """Times whole outputs with drafts against outputs without, and compares their tokens."""
    config, params = model()
    rows = []
    are_same = []
    plain = DecodingConfig(NEW_TOKENS, eos_id=-1, pruning="none")
    drafting = dataclasses.replace(plain, prompt_lookup_num_tokens=DRAFTS)
    for batch in BATCHES:
        for text, is_copied in (("copied", True), ("without repetition", False)):
            sentences = inputs(batch, config.vocab_size, is_copied=is_copied)
            greedy, drafted = (
                Contender(name, decoder(config, params, decoding, sentences))
                for name, decoding in (("greedy", plain), (f"{DRAFTS} drafts", drafting))
            )
            take_turns([greedy, drafted], rounds)
            found = [each.step() for each in (greedy, drafted)]
            are_same.append(found[0][0] == found[1][0])
            rows += [
                {
                    "drafts": f"{each.name}, {text}, batch {batch}",
                    **in_ms(each),
                    "ms_per_token": 1e3 * each.median_s / NEW_TOKENS,
                    "tokens_per_step": NEW_TOKENS / num_steps,
                    "vs_greedy": speedup(each, greedy),
                }
                for each, (_, num_steps) in zip((greedy, drafted), found, strict=True)
            ]
    return rows, [Check("speculation_tokens_identical", float(all(are_same)), "==1")]
