# SPDX-License-Identifier: Apache-2.0
"""What settings of decoding cost: a step that samples, and programs of a thousand settings.

Dims: B rows of a batch, M tokens of a source
"""

import dataclasses
import functools
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.timing import Contender, speedup, take_turns
from switchx.bench.report import Check
from switchx.bench.train import MEBIBYTE, in_ms, switch_model
from switchx.inference.config import DecodingConfig
from switchx.inference.decode import prefill, run_step
from switchx.inference.generate import Generator, for_decoding
from switchx.inference.programs import COMPILATIONS, PROGRAMS, num_maps
from switchx.inference.rows import Rows, RowSettings
from switchx.models.config import ModelConfig
from switchx.models.params import init_params

# A step of T5's vocabulary.
BATCH, VOCABULARY, NUM_EXPERTS, NEW_TOKENS = 8, 32_128, 8, 16
STEPS = 8  # of a turn
WAYS = {
    "greedy": {},
    "samples": {"temperature": 0.8},
    "samples of top-k 50": {"temperature": 0.8, "top_k": 50},
    "samples of top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
}
# Decoded with 1,000 random settings, of which the first 200 meet all programs.
SETTINGS, FIRST = 1_000, 200
SMALL = ModelConfig("encoder_decoder", 64, 16, 32, 2, 8, 1, 1)


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


def programs() -> tuple[list[dict[str, Any]], list[Check]]:
    """Decodes with random settings, and compares memory maps and memory after some of them
    with those at the end; programs are compiled for classes of settings alone."""
    config = for_decoding(SMALL)
    params, rng = init_params(config, jax.random.key(0)), np.random.default_rng(0)
    before, rows = COMPILATIONS.number, []
    for done in range(1, SETTINGS + 1):
        inputs = rng.integers(3, SMALL.vocab_size, (rng.integers(1, 3), 8))
        generator = Generator(config, params, DecodingConfig(**random_settings(rng)))
        assert len(list(generator(inputs.tolist()))) == len(inputs)
        if done in (FIRST, SETTINGS):
            rows.append(
                {
                    "settings": f"after {done:,} random ones",
                    "memory_maps": num_maps(),
                    "memory_mib": _resident_bytes() / MEBIBYTE,
                    "compilations": COMPILATIONS.number - before,
                    "programs": len(PROGRAMS),
                }
            )
    first, last = rows
    growth = max(last[name] / max(first[name], 1) for name in ("memory_maps", "memory_mib"))
    return rows, [Check("programs_bounded", growth, "<=1.05")]


def random_settings(rng: np.random.Generator) -> dict[str, Any]:
    """Fields of a `DecodingConfig`, each of which differs from call to call."""
    settings = {
        "max_new_tokens": int(rng.integers(1, 33)),
        "length_penalty": float(rng.uniform(-2, 2)),
        "seed": int(rng.integers(1 << 31)),
    }
    if rng.integers(2):
        settings["repetition_penalty"] = float(rng.uniform(0.5, 2))
        settings["no_repeat_ngram_size"] = int(rng.integers(5))
    way = rng.integers(3)
    if way == 0:
        return settings | {
            "temperature": float(rng.uniform(0.1, 2)),
            "top_k": [None, int(rng.integers(1, 60))][rng.integers(2)],
            "top_p": [None, float(rng.uniform(0.01, 1))][rng.integers(2)],
        }
    stopping = [False, True, "never"][rng.integers(3)]
    return settings | {"beam_size": int(way), "early_stopping": stopping}


def _resident_bytes() -> int:
    """Of this process; 0 where the system does not say."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
