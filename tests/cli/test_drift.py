# SPDX-License-Identifier: Apache-2.0
"""`switchx drift`: two checkpoints, a model and itself, their losses, and what is refused."""

import dataclasses
import json

import pytest

from switchx.cli.main import main
from switchx.data.objectives import SpanCorruption
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from tests.training.jobs import TASK
from tests.training.saved_runs import save_run

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

SWITCH = SwitchConfig(4, every=1, router=RouterConfig(num_selected=2))
MODEL = ModelConfig("encoder_decoder", 384, 8, 8, 1, 8, 1, 1, switch=SWITCH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    task = dataclasses.replace(TASK, objective=SpanCorruption())
    return str(save_run(tmp_path_factory.mktemp("run"), MODEL, source=task))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    file = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    file.write_text("a gate\tof\nan expert\tx\nslot\ty\n")
    return str(file)


def compared(cli, *words) -> list[dict]:
    return cli.json("drift", "--json", *words)["results"]


def score(capsys, folder, pairs, step, record) -> float:
    """The loss of a token, by the program that `switchx drift` has compiled."""
    words = [f"--model_dir={folder}", f"--input={pairs}", f"--step={step}", "--json"]
    assert main(["score", *words, "--logprobs=1", f"--record={record}"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return -sum(x["log_likelihood"] for x in lines) / sum(x["num_tokens"] for x in lines)


def test_checkpoints_are_compared_by_their_routing_and_loss(
    folder, pairs, capsys, cli, tmp_path
):
    *rows, losses = compared(cli, folder, folder, "--steps=5,9", f"--input={pairs}")
    assert [row["layer"] for row in rows] == ["encoder 0", "decoder 0"]
    assert all(row["differing_share"] > 0 and row["overlap"] < 1 for row in rows)
    for name, step in (("loss_a", 5), ("loss_b", 9)):
        want = score(capsys, folder, pairs, step, tmp_path / "record.parquet")
        assert losses[name] == pytest.approx(want, rel=1e-5)
    assert losses["k3"] > 0 and losses["mean_change"] > 0


def test_a_model_does_not_drift_from_itself(folder, pairs, cli):
    *rows, losses = compared(cli, folder, folder, f"--input={pairs}")
    assert [row["differing_share"] for row in rows] == [0, 0]
    assert [row["kl_at_least_nats"] for row in rows] == [0, 0]
    assert losses["k3"] == losses["far_share"] == 0
    said = cli("drift", folder, folder, f"--input={pairs}").out
    assert "0.000% of" in said and "Loss a token: " in said


@pytest.mark.slow
def test_an_artifact_is_compared_with_its_run_and_asked_for_its_drops(
    folder, pairs, cli, tmp_path
):
    artifact, record = str(tmp_path / "int8"), str(tmp_path / "record.parquet")
    cli("quantize", f"--model_dir={folder}", f"--output={artifact}", "--bits=8")
    *rows, losses = compared(cli, folder, artifact, f"--input={pairs}")
    # The first layer reads the same; its router is no expert and is not quantized.
    assert rows[0]["differing_share"] == 0 and 0 < losses["mean_change"] < 0.1
    words = [f"--model_dir={artifact}", f"--input={pairs}", f"--record={record}"]
    cli("score", *words)
    rows = cli.json("drops", record, "--json", "--factors=1", "--group_sizes=8")["results"]
    assert {row["layer"] for row in rows} == {"all", "encoder 0", "decoder 0"}


def test_bad_input_is_named(folder, pairs, capsys, cli):
    assert "is no routing record that can be read" in cli.refused("drift", folder, folder)
    assert main(["drift", folder, folder, "--steps=5", f"--input={pairs}"]) == 2
    assert "--steps=[5]; give two, of A and of B, with --input" in capsys.readouterr().err
