# SPDX-License-Identifier: Apache-2.0
"""The part of `check accelerator` that trains cells of experiments/ whole, one after another.

A file of `python -m experiments.card` has configurations and rows of tokens. A cell begins
only if 1.3 times the time of the longest so far is left in the budget; the others are left for
another call.

Dims: R rows of the text, B rows of a batch
"""

import functools
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from switchx.bench.accelerator.parts import Session, row
from switchx.data.features import read_and_predicted
from switchx.data.special_ids import PAD_ID
from switchx.fields import from_description
from switchx.models.config import ModelConfig
from switchx.models.flops import train_flops
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import WarmupCosine
from switchx.training.evaluate import eval_step, evaluate
from switchx.training.losses import LossConfig
from switchx.training.step import StepConfig, init_state, train_step

MOST_S = 1.3  # of the longest cell so far
CLASSES = {
    "model": ModelConfig,
    "optimizer": AdamW,
    "schedule": WarmupCosine,
    "loss": LossConfig,
    "step": StepConfig,
}


def ladder(session: Session) -> Iterator[dict[str, Any]]:
    """A row for each cell: the negative log perplexity of the whole validation split after the
    last step, also in bits per byte, and seconds.

    Raises:
        SystemExit: cells are left for another call.
    """
    start_s, longest_s = time.perf_counter(), 0.0
    with np.load(session.ladder) as file:
        cells = json.loads(str(file["cells"]))
        text = {split: rows_in(file, split) for split in ("train", "validation")}
    wanted = [cell for cell in cells if session.is_wanted(cell["case"])]
    for done, cell in enumerate(wanted):
        begin_s = time.perf_counter()
        if session.limit_s - (begin_s - start_s) < MOST_S * longest_s:
            sys.exit(f"{len(wanted) - done} cells are left for a next call with --after")
        steps = session.sized(cell["steps"], 2)
        found = trained(cell, text["train"], text["validation"], steps)
        longest_s = max(longest_s, seconds := time.perf_counter() - begin_s)
        quality = found if math.isfinite(found) else "diverged"
        tokens = float(text["validation"]["decoder_loss_weights"].sum())
        bits = -found * tokens / cell["validation_bytes"] / math.log(2)
        config = from_description(ModelConfig, cell["model"], "the cell")
        flops = train_flops(config, 0, text["train"]["decoder_input_tokens"].shape[1])
        yield row(
            cell["case"],
            quality,
            "nats per token",
            seconds=seconds,
            steps=steps,
            bits_per_byte=bits if math.isfinite(bits) else None,
            training_flops=flops * cell["rows"] * steps,
        )


def rows_in(file: Mapping[str, np.ndarray], split: str) -> dict[str, np.ndarray]:
    """Features [R, L] of a split. What a decoder reads is derived from its targets."""
    prefix = f"{split}/"
    rows = {name.removeprefix(prefix): file[name] for name in file if name.startswith(prefix)}
    targets = rows["decoder_target_tokens"]
    segments = rows["decoder_segment_ids"]
    read = read_and_predicted(targets, segments, PAD_ID)[0]
    return rows | {"decoder_input_tokens": read}


def trained(cell: dict[str, Any], train: dict, validation: dict, steps: int) -> float:
    """Negative log perplexity of a cell after its steps; NaN where it diverged.

    Rows are drawn without replacement, epoch by epoch, in an order that the seed sets.
    """
    model, optimizer, schedule, loss, step = (
        from_description(cls, cell[name], "the cell") for name, cls in CLASSES.items()
    )
    transformation, num_rows = optimizer.build(schedule), cell["rows"]

    def batch_of(rows: dict, index_B) -> dict:
        dtypes = {name: jnp.float32 if "weights" in name else jnp.int32 for name in rows}
        return {name: array[index_B].astype(dtypes[name]) for name, array in rows.items()}

    @functools.partial(jax.jit, donate_argnums=0)
    def one_step(state, rows, index_B):
        batch = batch_of(rows, index_B)
        return train_step(model, loss, step, transformation, state, batch)[0]

    @jax.jit
    def score(params, batch):
        return eval_step(model, params, batch)

    state = jax.jit(functools.partial(init_state, model, transformation, seed=cell["seed"]))()
    rows, random = jax.device_put(train), np.random.default_rng(cell["seed"])
    R = len(train["decoder_input_tokens"])
    order = np.concatenate([random.permutation(R) for _ in range(1 + steps * num_rows // R)])
    for i in range(steps):
        state = one_step(state, rows, order[i * num_rows : (i + 1) * num_rows])
    held_out = jax.device_put(validation)
    firsts = range(0, len(validation["decoder_input_tokens"]), num_rows)
    batches = (batch_of(held_out, np.arange(i, i + num_rows)) for i in firsts)
    return float(evaluate(score, state.params, batches)["neg_log_perplexity"])
