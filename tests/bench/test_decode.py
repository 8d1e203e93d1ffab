# SPDX-License-Identifier: Apache-2.0
"""`switchx bench decode` measures what it says, on models small enough to wait for."""

import dataclasses
import time

import pytest

from pallas_kernels.bench.timing import Contender
from switchx.bench import decode as bench
from switchx.bench import decode_programs, offload, serving, speculation, train
from switchx.bench.peers import ctranslate2_peer, torch_peer
from switchx.models.config import ModelConfig, SwitchConfig

# Little but experts, so that int4 ones take an eighth of the bytes.
SMALL = dataclasses.replace(
    train.DENSE, vocab_size=32, d_model=16, d_ff=256, num_heads=2, d_head=8,
    num_encoder_layers=1, num_decoder_layers=1, switch=SwitchConfig(64, every=1),
)  # fmt: skip


def small_switch(num_experts: int) -> ModelConfig:
    return dataclasses.replace(SMALL, switch=SwitchConfig(num_experts, every=1))


@pytest.fixture
def small(monkeypatch):
    def small(num_experts: int) -> ModelConfig:
        return SMALL

    sizes = {"BATCH": 2, "INPUTS": 4, "NEW_TOKENS": 4, "PRUNED_BATCH": 2, "NUM_EXPERTS": (64,)}
    cases = {"CASES": (((2, 1), "greedy_b16_vs_torch", 2.5),), "PRUNINGS": ("none", "compact")}
    for module, changes in (
        (bench, {"DENSE": SMALL, "switch_model": small} | sizes | cases),
        (decode_programs, {"VOCABULARY": 512, "STEPS": 1, "RECORDED_TOKENS": 2}),
        (speculation, {"PERIOD": 3, "CYCLES": 2, "NEW_TOKENS": 16, "BATCHES": (2,)}),
        (offload, {"NUM_EXPERTS": 4, "TIMED_SLOTS": 2, "TIMED_TOKENS": 4, "TURNS": 2}),
        (offload, {"switch_model": small_switch, "model": offload.model.__wrapped__}),
        (decode_programs, {"switch_model": small}),
        (speculation, {"switch_model": small}),
        (serving, {"is_available": lambda: False}),  # it has its own test
        (ctranslate2_peer, {"NEEDED": ("no_such_package",)}),  # so has the comparison
    ):
        for name, value in changes.items():
            monkeypatch.setattr(module, name, value)


def test_a_step_that_samples_is_timed_over_a_greedy_one(small, monkeypatch):
    """Of drafted tokens `vs_greedy` is a speed."""
    step = {"greedy": lambda: None}
    monkeypatch.setattr(
        decode_programs, "_step",
        lambda name, *_: Contender(name, step.get(name, lambda: time.sleep(0.001))),
    )  # fmt: skip
    (greedy, sampled, *_), _ = decode_programs.sampling(1)
    assert greedy["time_vs_greedy"] == 1 < sampled["time_vs_greedy"]
    assert "vs_greedy" not in sampled


@pytest.mark.slow
def test_without_pytorch_ours_is_measured_alone(small, monkeypatch, cli):
    monkeypatch.setattr(torch_peer, "is_available", lambda: False)
    printed = cli.json("bench", "decode", "--rounds=1", "--json", status=None)
    assert printed["command"] == "bench decode"
    names = [row.get("decoding", "") for row in printed["results"]]
    assert names[0] == "ours, 64 experts, batch 2, 1 beams"
    assert sum(name.startswith("pruning") for name in names) == 2
    checks = {check["name"]: check for check in printed["checks"]}
    assert checks["pruning_tokens_identical"]["holds"]
    assert checks["int4_bytes_vs_f32"]["holds"]
    assert set(checks) == {
        "pruning_gain", "pruning_tokens_identical", "int4_bytes_vs_f32",
        "sampling_vs_greedy_step", "speculation_tokens_identical", "step_vs_bound",
        "record_vs_none",
    }  # fmt: skip
    assert printed["results"][-1] == {
        "peer": "CTranslate2",
        "status": "not run: no_such_package not installed",
    }
