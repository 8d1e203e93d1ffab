# SPDX-License-Identifier: Apache-2.0
"""What decoding settings cost: steps that sample, and a record of routing.

Dims: B rows of a batch, M tokens of a source
"""

import contextlib
import dataclasses
import functools
import itertools
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.timing import Contender, speedup, take_turns
from switchx.bench.train import in_ms, switch_model
from switchx.inference.config import DecodingConfig
from switchx.inference.decode import prefill, run_step
from switchx.inference.generate import Generator, for_decoding
from switchx.inference.logits_processors import Rows, RowSettings
from switchx.models.config import ModelConfig
from switchx.models.params import init_params
from switchx.results import Check
from switchx.routing_record import RecordInfo, RecordWriter

# A step with T5's vocabulary.
BATCH, VOCABULARY, NUM_EXPERTS, NEW_TOKENS = 8, 32_128, 8, 16
STEPS = 8  # of a turn
RECORDED_TOKENS, RECORDED_BEAMS = 64, (1, 4)
WAYS = {
    "greedy": {},
    "samples": {"temperature": 0.8},
    "samples of top-k 50": {"temperature": 0.8, "top_k": 50},
    "samples of top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
}


def sampling(rounds: int) -> tuple[list[dict[str, Any]], list[Check]]:
    """Times a step, greedy and sampling, with random weights, whose logits are flat."""
    config = dataclasses.replace(switch_model(NUM_EXPERTS), vocab_size=VOCABULARY)
    config, params = for_decoding(config), init_params(config, jax.random.key(0))
    greedy, *others = (_step(name, config, params) for name in WAYS)
    take_turns([greedy, *others], rounds, STEPS)
    rows = [
        {"step": each.name, **in_ms(each), "time_vs_greedy": speedup(greedy, each)}
        for each in (greedy, *others)
    ]
    return rows, [Check("sampling_vs_greedy_step", speedup(greedy, others[0]), "<=1.3")]


def recording(
    rounds: int, **models: tuple[ModelConfig, dict]
) -> tuple[list[dict[str, Any]], list[Check]]:
    """Times batches of texts with a record of routing, including its file, and without one.

    Args:
        models: configurations and parameters by name, besides a model with random weights.
    """
    config, rows = switch_model(NUM_EXPERTS), []
    models |= {f"{NUM_EXPERTS} experts": (config, init_params(config, jax.random.key(0)))}
    for (name, (config, params)), beams in itertools.product(models.items(), RECORDED_BEAMS):
        decoding = DecodingConfig(RECORDED_TOKENS, beam_size=beams, eos_id=-1)
        generator = Generator(for_decoding(config), params, decoding, 4 * BATCH)
        texts = np.random.default_rng(0).integers(3, config.vocab_size, (4 * BATCH, 32))
        step = functools.partial(_written, generator, texts.tolist())
        with tempfile.TemporaryDirectory() as folder:
            recorded = functools.partial(step, f"{folder}/record")
            ways = Contender("", step), Contender(f"{name}, {beams} beams, recorded", recorded)
            take_turns(ways, rounds)
        cost = {"vs_no_record": speedup(*ways)}
        rows.append({"decoding": ways[1].name} | in_ms(ways[1]) | cost)
    return rows, [Check("record_vs_none", max(row["vs_no_record"] for row in rows), "<=1.05")]


def _written(generator: Generator, texts, path: str | None = None) -> None:
    switch = generator.config.switch
    layers = generator.config.sparse_layers_by_stack
    info = RecordInfo(switch, layers, 0, "generate")
    with RecordWriter(path, info) if path else contextlib.nullcontext() as generator.record:
        list(generator(texts))


def begun(config: ModelConfig, params: dict, decoding: DecodingConfig, source_BM):
    """The state of a batch before its first step: sources without padding, no prompts."""
    B, program = len(source_BM), decoding.program_of(decoding.max_new_tokens)
    settings = RowSettings.of([decoding] * B).fitted(program)
    limit_B = np.full(B, decoding.max_new_tokens, np.int32)
    return prefill(
        config,
        program,
        params,
        prompt_BP=np.zeros((B, 1), np.int32),
        is_prompt_BP=np.ones((B, 1), bool),
        rows=Rows(np.arange(B, dtype=np.int32), np.ones(B, bool), limit_B, settings),
        source_BM=source_BM,
        is_source_BM=np.ones(source_BM.shape, bool),
    )


def _step(name: str, config: ModelConfig, params: dict) -> Contender:
    decoding = DecodingConfig(NEW_TOKENS, eos_id=-1, pruning="none", **WAYS[name])
    source_BM = np.random.default_rng(0).integers(3, config.vocab_size, (BATCH, 32))
    state = begun(config, params, decoding, jnp.array(source_BM))
    program = decoding.program_of(NEW_TOKENS)
    step = functools.partial(run_step, config, program, params, state)
    name = f"{name}, batch {BATCH}, vocabulary of {VOCABULARY:,}"
    return Contender(name, lambda: jax.block_until_ready(step()))
