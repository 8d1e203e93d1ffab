# SPDX-License-Identifier: Apache-2.0
"""`switchx drops`: predictions against evaluations at that capacity, and bad input."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from switchx.analysis.drops import dropped, setting_of
from switchx.cli.main import main
from switchx.moe.config import SwitchConfig
from switchx.routing_record import RecordInfo, RecordWriter, StackRecord, open_record
from tests.analysis.recorded import write_run
from tests.integration.runs import arguments

pytestmark = pytest.mark.usefixtures("programs_compiled_once", "one_device")

CAPACITIES = {
    "dropless": "RouterConfig.overflow=dropless",
    "half": "SwitchConfig.eval_capacity_factor=0.5",
}


@pytest.fixture(scope="module")
def records(finished_run, tmp_path_factory):
    """One model's records of the same batches, by capacity."""
    folder, paths = tmp_path_factory.mktemp("records"), {}
    for name, setting in CAPACITIES.items():
        paths[name] = folder / f"{name}.parquet"
        words = [f"--model_dir={finished_run.folder}", f"--gin.{setting}"]
        assert main(["eval", *words, f"--record={paths[name]}"]) == 0
    return paths


def predicted(capsys, *options) -> list[dict]:
    assert main(["drops", "--json", *map(str, options)]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in found["checks"]] == ["choices_unlike_recorded"]
    return found["results"]


def test_the_first_layers_drops_are_those_of_an_evaluation_at_that_capacity(records, capsys):
    """Both ways, token by token."""
    first = open_record(records["half"]).info.all_layers[0]
    for name, other, factor in (("dropless", "half", 0.5), ("half", "dropless", 8.0)):
        there, measured = open_record(records[name]), open_record(records[other])
        setting = setting_of(there.info, group_size=measured.info.switch.group_size)
        counts = np.zeros(2, int)
        for batch, want in zip(
            there.batches(layers=[first], stacks=["encoder"]),
            measured.batches(layers=[first], stacks=["encoder"]),
            strict=True,
        ):
            found_NPS = dropped(batch, setting, factor)
            np.testing.assert_array_equal(
                found_NPS.reshape(-1), want.is_dropped_NBLS.reshape(-1)
            )
            counts += want.is_dropped_NBLS.sum(), want.is_token_BL.sum()
        (row,) = (
            row
            for row in predicted(capsys, records[name], f"--factors={factor}", "--target=1")
            if row["layer"] == first and row["factor"] == factor
        )
        assert row["dropped_share"] == counts[0] / counts[1]
        assert (counts[0] > 0) == (other == "half")


def test_a_prediction_is_compared_with_a_measurement(records, capsys):
    rows = {}
    for name, other in (("dropless", "half"), ("half", "dropless"), ("half", "half")):
        words = [str(records[name]), f"--measured={records[other]}", "--json"]
        assert main(["drops", *words]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [check["value"] for check in found["checks"]] == [0]
        rows[name, other] = found["results"]
    first, second = rows["dropless", "half"]
    assert first["jaccard"] == 1 and first["predicted_share"] == first["measured_share"] > 0
    assert second["differing"] < 0.05 * second["choices"]
    assert {row["differing"] for row in rows["half", "half"]} == {0}


def test_what_is_printed_is_what_is_asked(records, finished_run, capsys):
    words = [str(records["half"]), f"--model_dir={finished_run.folder}"]
    factors = "--factors=0.5,1,1.125,1.25,1.375,1.5,1.625,1.75,1.875"
    assert main(["drops", *words, factors, "--group_sizes=16,32"]) == 0
    said = capsys.readouterr().out
    assert "…" not in said  # a narrow terminal cuts nothing
    assert "groups of 16" in said and "groups of 32 would drop" in said
    assert "slot bytes a token" in said and "1.00% takes factor" in said
    rows = predicted(
        capsys, *words, "--factors=1", "--rule=megatron", "--ranks=2", "--microbatches=2"
    )
    assert {row["rule"] for row in rows} == {"megatron"}
    assert {row["priority"] for row in rows} == {"gate"}


def test_training_says_at_its_start_what_the_run_before_dropped(finished_run, capsys, tmp_path):
    folder = shutil.copytree(finished_run.folder, tmp_path / "run")
    words = arguments(folder, finished_run.files)
    assert main(["train", *words]) == 0
    said = capsys.readouterr().err
    assert f"step_000012.parquet of {folder}: At factor 1.25 and groups of " in said
    (there,) = folder.glob("routing/step_000012.parquet")
    there.write_bytes(b"PAR1")
    assert main(["train", *words]) == 0
    assert "says nothing of drops: " in capsys.readouterr().err


def test_a_plan_has_the_drops_of_its_groups(in_a_folder, capsys, tmp_path):
    """Those of a record of another batch, at the group size of the plan."""
    tokens, record = np.ones((64, 128), np.int32), tmp_path / "record.parquet"
    random, experts = np.random.default_rng(0), 8
    info = RecordInfo(SwitchConfig(experts), {"encoder": ["encoder 1", "encoder 3"]}, 0, "eval")
    rank = random.integers(0, experts, (2, 64, 128, 1)).astype(np.int16)
    prob, nothing = np.ones_like(rank, np.float32), np.zeros_like(rank, bool)
    with RecordWriter(record, info) as writer:
        part = StackRecord(tokens, tokens, rank, prob, prob[..., 0], nothing, rank)
        writer.add(0, {"encoder": part}, 64)
    words = ["plan", "--gin_file=runs/pretrain_tiny.gin", "--hardware=v5e", "--devices=1"]
    words += ["--gin.SwitchConfig.group_size=64", "--gin.SwitchConfig.capacity_factor=1.0"]
    words += [f"--record={record}", "--gin.VOCAB_SIZE=500", "--json"]
    assert main(words) == 2
    assert "is of 8 experts in encoder 1, encoder 3, and the model" in capsys.readouterr().err
    assert main([*words, "--gin.SwitchConfig.stacks=encoder"]) == 0
    first, *_ = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    load = [np.bincount(x, minlength=experts) for x in rank.reshape(-1, 64)]
    want = np.maximum(np.array(load) - 8, 0).sum() / rank.size
    assert first["dropped_share"] == pytest.approx(want) and want > 0.1


def test_bad_input_is_named(records, capsys, tmp_path):
    def refused(*words) -> str:
        assert main(["drops", *map(str, words)]) == 2
        return capsys.readouterr().err

    whole = records["half"].read_bytes()
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole[: len(whole) // 2])
    assert "give a whole file of `--record`" in refused(cut)
    half = records["half"]
    assert "4 experts a token (num_selected=1, rounds=4)" in refused(half, "--rounds=4")
    assert "2 experts a token" in refused(half, "--num_selected=2")
    assert "'0,1' are no numbers above 0" in refused(half, "--factors=0,1")
    assert "do not divide into 3 parts" in refused(half, "--microbatches=3")
    other = write_run(tmp_path / "other")
    assert f"--model_dir={other} has 2 experts in" in refused(half, f"--model_dir={other}")
    record = open_record(half)
    router = dataclasses.replace(record.info.switch.router, replay=True, replay_drops=True)
    switch = dataclasses.replace(record.info.switch, router=router)
    info = dataclasses.replace(record.info, switch=switch)
    with RecordWriter(tmp_path / "replayed", info) as writer:
        for batch in record.batches(stacks=["encoder"]):
            writer.add(batch.number, {"encoder": batch}, batch.batch_size)
    assert "give the record whose choices were replayed" in refused(tmp_path / "replayed")
