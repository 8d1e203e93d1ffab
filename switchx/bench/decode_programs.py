# SPDX-License-Identifier: Apache-2.0
"""What settings of decoding cost: a step that samples, against a greedy one.

Dims: B rows of a batch, M tokens of a source
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.timing import Contender, speedup, take_turns
from switchx.bench.train import in_ms, switch_model
from switchx.inference.config import DecodingConfig
from switchx.inference.decode import prefill, run_step
from switchx.inference.generate import for_decoding
from switchx.inference.rows import Rows, RowSettings
from switchx.models.config import ModelConfig
from switchx.models.params import init_params
from switchx.results import Check

# A step of T5's vocabulary.
BATCH, VOCABULARY, NUM_EXPERTS, NEW_TOKENS = 8, 32_128, 8, 16
STEPS = 8  # of a turn
WAYS = {
    "greedy": {},
    "samples": {"temperature": 0.8},
    "samples of top-k 50": {"temperature": 0.8, "top_k": 50},
    "samples of top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
}


def sampling(rounds: int) -> tuple[list[dict[str, Any]], list[Check]]:
    """Times a decoding step, greedy and of samples; random weights, whose logits are flat."""
    config = dataclasses.replace(switch_model(NUM_EXPERTS), vocab_size=VOCABULARY)
    config, params = for_decoding(config), init_params(config, jax.random.key(0))
    greedy, *others = (_step(name, config, params) for name in WAYS)
    take_turns([greedy, *others], rounds, STEPS)
    rows = [
        {"step": each.name, **in_ms(each), "vs_greedy": speedup(greedy, each)}
        for each in (greedy, *others)
    ]
    return rows, [Check("sampling_vs_greedy_step", speedup(greedy, others[0]), "<=1.3")]


def _step(name: str, config: ModelConfig, params: dict) -> Contender:
    decoding = DecodingConfig(NEW_TOKENS, eos_id=-1, pruning="none", **WAYS[name])
    source_BM = np.random.default_rng(0).integers(3, config.vocab_size, (BATCH, 32))
    state = prefill(
        config,
        decoding.program,
        params,
        prompt_BP=jnp.zeros((BATCH, 1), jnp.int32),
        is_prompt_BP=jnp.ones((BATCH, 1), bool),
        rows=Rows(
            jnp.arange(BATCH),
            jnp.ones(BATCH, bool),
            jnp.full(BATCH, NEW_TOKENS),
            jax.tree.map(jnp.array, RowSettings.of([decoding] * BATCH)),
        ),
        source_BM=jnp.array(source_BM),
        is_source_BM=jnp.ones(source_BM.shape, bool),
    )
    step = functools.partial(run_step, config, decoding.program, params, state)
    name = f"{name}, batch {BATCH}, vocabulary of {VOCABULARY:,}"
    return Contender(name, lambda: jax.block_until_ready(step()))
