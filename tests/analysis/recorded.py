# SPDX-License-Identifier: Apache-2.0
"""A run folder written by hand: what training leaves for the analysis, with easy numbers.

Two experts, byte tokens; the encoder has two Switch layers and the decoder one.
"""

import json
import pathlib

import numpy as np

from switchx.checkpoint.run_folder import RunFolder
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.routing_record import (
    RecordInfo,
    RecordWriter,
    RoutingRecord,
    StackRecord,
    open_record,
)
from switchx.training.resume import write_run_config
from tests.training.jobs import DENSE, make_job

MODEL = ModelConfig(
    "encoder_decoder", 384, 16, 24, 2, 8, num_encoder_layers=4, num_decoder_layers=2,
    activation="relu", switch=SwitchConfig(2, every=2),
)  # fmt: skip
NONE = 2  # as an expert: nothing is chosen

# "ab 1!" in bytes, each b is byte b + 3.
ENCODER_TOKENS = [100, 101, 35, 52, 36]
DECODER_TOKENS = [0, 100, 101]
# By step, layer and token.
ENCODER_EXPERTS = {
    0: [[0, 1, 0, 1, NONE], [0, 0, 0, 0, 0]],
    10: [[0, 0, 0, 1, NONE], [0, 0, 1, 0, 0]],
    20: [[0, 0, 1, 1, NONE], [0, 0, 1, 1, 0]],
}
DECODER_EXPERTS = {0: [[1, 1, 1]], 10: [[0, 0, 1]], 20: [[0, 1, 1]]}


def write_snapshot(folder: pathlib.Path, step: int, /, **changes) -> None:
    arrays = {"step": step, "num_experts": 2}
    for stack, layers, tokens, experts in (
        ("encoder", ["encoder 1", "encoder 3"], ENCODER_TOKENS, ENCODER_EXPERTS[step]),
        ("decoder", ["decoder 1"], DECODER_TOKENS, DECODER_EXPERTS[step]),
    ):
        expert_NTS = np.array(experts, np.int16)[..., None]
        arrays |= {
            f"{stack}_layers_N": layers,
            f"{stack}_token_T": np.array(tokens, np.int32),
            f"{stack}_expert_NTS": expert_NTS,
            f"{stack}_gate_NTS": np.full(expert_NTS.shape, 0.75, np.float16),
        }
    folder.mkdir(exist_ok=True)
    np.savez_compressed(folder / f"step_{step:06d}.npz", **(arrays | changes))


def routing_line(step: int, load: list) -> dict:
    """A line of metrics.jsonl whose other numbers follow from the step."""
    by_layer = [step / 100] * len(load)
    names = "dropped entropy gate max_violation effective_experts information margin"
    routing = {"load": load} | dict.fromkeys(names.split(), by_layer)
    return {"step": step, "loss": 1.0, "routing": routing}


def write_lines(path: pathlib.Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(folder: pathlib.Path, model: ModelConfig = MODEL) -> pathlib.Path:
    """Steps 10 and 20 logged, 0, 10 and 20 evaluated; at the end an expert is dead."""
    run = RunFolder(folder).create()
    write_run_config(run, make_job(model))
    even = [[0.5, 0.5]] * 3
    last = [[0.5, 0.5], [1.0, 0.0], [0.75, 0.25]]
    write_lines(run.metrics, [routing_line(10, even), routing_line(20, last)])
    for step in (0, 10, 20):
        write_snapshot(run.routing, step)
    return run.root


def write_dense_run(folder: pathlib.Path) -> pathlib.Path:
    run = RunFolder(folder).create()
    write_run_config(run, make_job(DENSE))
    write_lines(run.metrics, [{"step": 10, "loss": 1.0}])
    return run.root


def write_record(path, switch: SwitchConfig, ranks) -> RoutingRecord:
    """A record of an encoder without padding or drops; `ranks` are `[N, B, L, R]`, by batch."""
    layers = {"encoder": [f"encoder {2 * n + 1}" for n in range(len(ranks[0]))]}
    with RecordWriter(path, RecordInfo(switch, layers, 0, "eval")) as writer:
        for number, rank in enumerate(ranks):
            token, rank = np.ones(rank.shape[1:3], np.int32), rank.astype(np.int16)
            prob, nothing = np.ones(rank.shape, np.float32), np.zeros(rank.shape, bool)
            part = StackRecord(token, token, rank, prob, prob[..., 0], nothing, rank)
            writer.add(number, {"encoder": part}, len(token))
    return open_record(path)
