# SPDX-License-Identifier: Apache-2.0
"""`switchx bench decode` measures what it says, on models small enough to wait for."""

import dataclasses
import json

import jax
import pytest

from switchx.bench import decode as bench
from switchx.bench import decode_programs, inflight, offload, serving, speculation, train
from switchx.bench.peers import ctranslate2_peer, torch_peer
from switchx.cli.main import main
from switchx.inference.config import DecodingConfig
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import init_params
from switchx.serving.limits import Limits
from switchx.serving.request_queue import Group, QueuedInput
from tests.serving import served

# Little but experts, so that int4 ones take an eighth of the bytes.
SMALL = dataclasses.replace(
    train.DENSE, vocab_size=32, d_model=16, d_ff=256, num_heads=2, d_head=8,
    num_encoder_layers=1, num_decoder_layers=1, switch=SwitchConfig(64, every=1),
)  # fmt: skip


def small_switch(num_experts: int) -> ModelConfig:
    return dataclasses.replace(SMALL, switch=SwitchConfig(num_experts, every=1))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench, "DENSE", SMALL)
    for name, value in (("BATCH", 2), ("INPUTS", 4), ("NEW_TOKENS", 4), ("PRUNED_BATCH", 2)):
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "NUM_EXPERTS", (64,))
    for name, value in (("VOCABULARY", 512), ("STEPS", 1)):
        monkeypatch.setattr(decode_programs, name, value)
    monkeypatch.setattr(decode_programs, "switch_model", lambda num_experts: SMALL)
    monkeypatch.setattr(speculation, "switch_model", lambda num_experts: SMALL)
    for name, value in (("PERIOD", 3), ("CYCLES", 2), ("NEW_TOKENS", 16), ("BATCHES", (2,))):
        monkeypatch.setattr(speculation, name, value)
    monkeypatch.setattr(offload, "switch_model", small_switch)
    changes = {"NUM_EXPERTS": 4, "TIMED_SLOTS": 2, "TIMED_TOKENS": 4, "TURNS": 2}
    for name, value in changes.items():
        monkeypatch.setattr(offload, name, value)
    monkeypatch.setattr(offload, "model", offload.model.__wrapped__)
    monkeypatch.setattr(bench, "PRUNINGS", ("none", "compact"))
    monkeypatch.setattr(bench, "switch_model", lambda num_experts: SMALL)
    monkeypatch.setattr(bench, "CASES", (((2, 1), "greedy_b16_vs_torch", 2.5),))
    monkeypatch.setattr(serving, "is_available", lambda: False)  # it has its own test
    # So has the comparison.
    monkeypatch.setattr(ctranslate2_peer, "NEEDED", ("no_such_package",))


@pytest.mark.slow
def test_without_pytorch_ours_is_measured_alone(small, monkeypatch, capsys):
    monkeypatch.setattr(torch_peer, "is_available", lambda: False)
    assert main(["bench", "decode", "--rounds=1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
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
    }  # fmt: skip
    assert printed["results"][-1] == {
        "peer": "CTranslate2",
        "status": "not run: no_such_package not installed",
    }


# A server, and inputs that join a running batch.

SERVED = (("CONCURRENCY", (2,)), ("REQUESTS", 7), ("NEW_TOKENS", 4), ("BATCH_SIZE", 2))
INPUTS = [[5, 6, 7, 1], [30, 31, 32, 1]]  # of one length: few programs


@pytest.fixture
def served_model(monkeypatch):
    for name, value in SERVED:
        monkeypatch.setattr(serving, name, value)
    params = init_params(served.CONFIG, jax.random.key(33))
    return served.CONFIG, params


@pytest.mark.slow
def test_each_request_is_timed_and_compared(served_model):
    assert serving.is_available()
    (row,), (check,) = serving.serving(*served_model, INPUTS, rounds=2)
    assert row["decoding"] == "serving, concurrency 2"
    assert row["requests"] == 14 and row["wrong_answers"] == row["lost_answers"] == 0
    assert row["vs_baseline"] > 0
    assert 0 < row["p50_ms"] <= row["p99_ms"] and row["requests_per_s"] > 0
    assert (check.name, check.holds) == ("serve_wrong_answers", True)


def test_wrong_and_lost_answers_are_counted(served_model):
    """Of requests by turns answered, refused, and answered otherwise than it was wanted."""
    tally = serving.Tally()
    limits = dataclasses.replace(served.LIMITS, warm_up_tokens=0)
    with served.started(limits) as service, served.listening(service) as address:
        serving._ask(address, [[5, 1], [400]], [[7], []], 2, tally)
    assert (tally.lost, tally.wrong, len(tally.latencies_s)) == (3, 4, 4)


def test_the_baseline_takes_one_group_and_nothing_beside_what_runs():
    limits = Limits()

    def queued(new_tokens):
        settings = DecodingConfig(new_tokens)
        group = Group.of([5], settings, limits)
        return QueuedInput([5], settings, 0, group, lambda event: None)

    short, long, other = queued(9), queued(60), queued(10)
    assert inflight.batch_by_batch([], [short, long, other]) == [short, other]
    assert inflight.batch_by_batch([], [long, short]) == [long]
    assert (
        inflight.batch_by_batch([other], [short, long]) == inflight.batch_by_batch([], []) == []
    )


@pytest.mark.slow
def test_both_policies_give_the_same_answers(monkeypatch):
    mixes = [dataclasses.replace(mix, longest=16) for mix in inflight.MIXES]
    for name, value in (("REQUESTS", 12), ("SLOTS", 2), ("MIXES", mixes), ("LOAD", 5.0)):
        monkeypatch.setattr(inflight, name, value)
    params = init_params(served.CONFIG, jax.random.key(33))
    rows, checks = inflight.inflight(served.CONFIG, params, rounds=1)
    assert [row["scheduling"].split(", ")[1] for row in rows] == [
        "in flight", "batch by batch"
    ] * 2  # fmt: skip
    assert all(row["tokens_per_s"] > 0 and row["first_token_s"] > 0 for row in rows)
    assert {check.name: check.bound for check in checks} == {
        "inflight_throughput": ">=1.25", "inflight_first_token": "<=0.2",
        "inflight_short_throughput": ">=1.0", "inflight_tokens_identical": "==1",
    }  # fmt: skip
    assert checks[-1].holds
