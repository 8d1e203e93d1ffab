# SPDX-License-Identifier: Apache-2.0
"""`switchx bench`, its measured models shrunk to seconds."""

import dataclasses
import json

import pytest

from pallas_kernels.bench import kernels, products
from pallas_kernels.bench.cells import Cell
from switchx.bench import moe, torch_peer, train
from switchx.cli.main import main


@pytest.fixture
def small_models(monkeypatch):
    """Models of the same form that compile and run in seconds."""
    small = dataclasses.replace(
        train.DENSE, d_model=8, d_ff=16, num_heads=1, d_head=8, num_encoder_layers=2,
        num_decoder_layers=2, vocab_size=64,
    )  # fmt: skip
    monkeypatch.setattr(train, "DENSE", small)
    monkeypatch.setattr(train, "BATCH", 2)
    monkeypatch.setattr(train, "NUM_EXPERTS", (8, 64))
    monkeypatch.setattr(torch_peer, "is_available", lambda: False)


def test_train_prints_one_json_object(small_models, capsys):
    assert main(["bench", "train", "--rounds=1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    models = [row["model"] for row in printed["results"]]
    assert models == ["dense", "switch 8", "switch 64"]
    assert all(row["step_ms"] > 0 and row["peak_mib"] > 0 for row in printed["results"])
    checks = {check["name"]: check["bound"] for check in printed["checks"]}
    assert checks == {"switch8_vs_dense": ">=0.93", "switch64_vs_dense": ">=0.68"}


def test_moe_prints_one_json_object(monkeypatch, capsys):
    small = dataclasses.replace(moe.DENSE, d_model=8, d_ff=16, num_heads=1, d_head=8)
    for name, value in (
        ("DENSE", small), ("ROWS", 2), ("LENGTH", 16), ("NUM_EXPERTS", (8, 32)),
        ("DECODING_EXPERTS", 8),
    ):  # fmt: skip
        monkeypatch.setattr(moe, name, value)
    assert main(["bench", "moe", "--rounds=1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["command"] == "bench moe"
    checks = {check["name"]: check["bound"] for check in printed["checks"]}
    assert checks == {
        "default8_vs_dense": ">=0.8",
        "default32_vs_einsum": ">=2",
        "decode_flops_vs_ideal": "<=4",
        "decode_time_vs_ideal": "<=4",
    }


def test_kernels_prints_one_json_object(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "cells_of_a_cpu", lambda: [Cell(8, 12, 4, 4, 3)])
    monkeypatch.setitem(products.ROTATED_BYTES, "cpu", 2**11)
    assert main(["bench", "kernels", "--rounds=1", "--json"]) == 0
    output = capsys.readouterr()
    printed = json.loads(output.out.splitlines()[-1])
    assert printed["command"] == "bench kernels"
    assert {check["name"] for check in printed["checks"]} == {
        "reference_vs_batched_einsum", "int8_bytes_vs_f32", "int4_bytes_vs_f32",
        "max_error_vs_float64",
    }  # fmt: skip
    assert "1/1" in output.err


def test_rounds_must_be_at_least_one(capsys):
    assert main(["bench", "train", "--rounds=0"]) == 2
    assert "--rounds=0; use at least 1" in capsys.readouterr().err


def test_scale_has_no_rounds(capsys):
    assert main(["bench", "scale", "--rounds=3"]) == 2
    assert "leave --rounds out" in capsys.readouterr().err
