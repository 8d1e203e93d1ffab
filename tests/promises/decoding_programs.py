# SPDX-License-Identifier: Apache-2.0
"""`programs_bounded`: a thousand settings of decoding compile a bounded set of programs."""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, for_decoding
from switchx.inference.program_cache import COMPILATIONS, PROGRAMS, num_maps
from switchx.models.config import ModelConfig
from switchx.models.params import init_params

# The first 200 of 1,000 settings use all programs.
SETTINGS, FIRST = 1_000, 200
SMALL = ModelConfig("encoder_decoder", 64, 16, 32, 2, 8, 1, 1)


def growth() -> Iterator[tuple]:
    """Memory maps and memory after all settings over those after the first ones."""
    config = for_decoding(SMALL)
    params, rng = init_params(config, jax.random.key(0)), np.random.default_rng(0)
    before, found = COMPILATIONS.number, []
    for done in range(1, SETTINGS + 1):
        inputs = rng.integers(3, SMALL.vocab_size, (rng.integers(1, 3), 8))
        generator = Generator(config, params, DecodingConfig(**random_settings(rng)))
        assert len(list(generator(inputs.tolist()))) == len(inputs)
        if done in (FIRST, SETTINGS):
            found.append({"memory_maps": num_maps(), "resident_bytes": _resident_bytes()})
            yield "compilations", f"{done:,} settings", COMPILATIONS.number - before
            yield "programs", f"{done:,} settings", len(PROGRAMS)
    first, last = found
    for name in first:
        yield "programs_bounded", name, last[name] / max(first[name], 1)


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
    """Resident bytes of this process; 0 if the system does not report them."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
