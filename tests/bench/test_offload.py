# SPDX-License-Identifier: Apache-2.0
"""`switchx bench offload` counts what it says, on a model small enough to wait for."""

import dataclasses
import json

import pytest

from switchx.bench import offload as bench
from switchx.bench import train
from switchx.cli.main import main
from switchx.models.config import SwitchConfig

SMALL = dataclasses.replace(
    train.DENSE, vocab_size=64, d_model=32, d_ff=256, num_heads=2, d_head=8,
    num_encoder_layers=1, num_decoder_layers=1,
)  # fmt: skip


def small(num_experts: int):
    return dataclasses.replace(SMALL, switch=SwitchConfig(num_experts, every=1))


@pytest.mark.slow
def test_checks_hold_and_their_names_are_fixed(monkeypatch, capsys):
    monkeypatch.setattr(bench, "switch_model", small)
    changes = {
        "SLOTS": (1, 4), "BEAMS": (2,), "NEW_TOKENS": 4, "NUM_EXPERTS": 4, "TIMED_SLOTS": 2,
        "TIMED_TOKENS": 4, "TURNS": 2,
    }  # fmt: skip
    for name, value in changes.items():
        monkeypatch.setattr(bench, name, value)
    bench.model.cache_clear()
    try:
        main(["bench", "offload", "--json"])
    finally:
        bench.model.cache_clear()
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    checks = {check["name"]: check for check in printed["checks"]}
    assert set(checks) == {
        "tokens_differing",
        "device_expert_bytes_vs_slots",
        "bytes_moved_vs_formula",
        "int4_vs_bf16_bytes_moved",
        "pinned_ring_vs_ring_bytes",
        "step_vs_bound",
    }
    # Scales are more of a small expert, and so is what a call takes beside its products.
    held = {name for name, check in checks.items() if check["holds"]}
    assert held >= set(checks) - {"int4_vs_bf16_bytes_moved", "step_vs_bound"}
    assert checks["step_vs_bound"]["bound"] == "<=1.3"
    assert len(printed["results"]) == 6 + 3 + 1 + 1


def test_it_has_no_rounds(capsys):
    assert main(["bench", "offload", "--rounds=3"]) == 2
    assert "`bench offload` takes no turns" in capsys.readouterr().err
