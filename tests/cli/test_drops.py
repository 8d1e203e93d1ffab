# SPDX-License-Identifier: Apache-2.0
"""`switchx drops`: predictions against evaluations at that capacity, and bad input."""

import dataclasses
import shutil

import numpy as np
import pytest

from switchx.analysis.drops import training_note
from switchx.cli.drops import _group_sizes
from switchx.cli.main import main
from switchx.moe.config import SwitchConfig
from switchx.routing_record import RecordInfo, RecordWriter, StackRecord, open_record
from tests.analysis.recorded import write_record, write_run
from tests.integration.runs import arguments

pytestmark = pytest.mark.usefixtures("programs_compiled_once", "one_device")


@pytest.fixture(scope="module")
def records(finished_run, tmp_path_factory):
    """One model's records of the same batches, by eval_capacity_factor."""
    folder, paths = tmp_path_factory.mktemp("records"), {}
    for factor in (2.0, 0.5):
        paths[factor] = folder / f"{factor}.parquet"
        words = [f"--model_dir={finished_run.folder}", f"--record={paths[factor]}"]
        words += [f"--gin.SwitchConfig.eval_capacity_factor={factor}"] * (factor != 2.0)
        assert main(["eval", *words]) == 0
    return paths


def computed(cli, *options) -> tuple[list[dict], list[dict]]:
    """The rows and the checks that `switchx drops --json` prints."""
    found = cli.json("drops", "--json", *options)
    return found["results"], found["checks"]


@pytest.mark.parametrize(("before", "after"), [(2.0, 0.5), (0.5, 2.0), (0.5, 0.5)])
def test_predictions_are_those_of_an_evaluation_at_that_factor(records, cli, before, after):
    """Token by token in the first layer."""
    measured = open_record(records[after])
    rows, (check,) = computed(cli, records[before], f"--measured={records[after]}")
    assert check["value"] == rows[0]["differing"] == 0 and rows[0]["jaccard"] == 1
    assert [row["layer"] for row in rows] == measured.info.all_layers
    parts = [*measured.batches(["encoder"])]
    tokens = sum(part.is_token_BL.sum() for part in parts)
    dropped = sum(part.is_dropped_NBLS[0].sum() for part in parts)
    words = [f"--factors={after}", "--target=1"]
    found, (check,) = computed(cli, records[before], *words)
    assert (check["name"], check["value"]) == ("choices_unlike_recorded", 0)
    (row,) = (x for x in found if (x["layer"], x["factor"]) == (rows[0]["layer"], after))
    assert row["dropped_share"] == rows[0]["predicted_share"] == dropped / tokens
    assert (dropped > 0) or after == 2.0
    assert rows[1]["differing"] < 0.05 * rows[1]["choices"]
    assert before != after or rows[1]["differing"] == 0


def test_what_is_printed_is_what_is_asked(records, finished_run, cli):
    words = [str(records[0.5]), f"--model_dir={finished_run.folder}"]
    factors = "--factors=0.5,1,1.125,1.25,1.375,1.5,1.625,1.75,1.875"
    said = cli("drops", *words, factors, "--group_sizes=16,32").out
    assert "…" not in said  # a narrow terminal cuts nothing
    assert "groups of 16" in said and "groups of 32 would drop" in said
    assert "slot bytes a token" in said and "1.00% takes factor" in said
    other = ["--factors=1", "--rule=megatron", "--ranks=2", "--microbatches=2"]
    rows, _ = computed(cli, *words, *other)
    assert {row["rule"] for row in rows} == {"megatron"}
    assert {row["priority"] for row in rows} == {"gate"}


def test_training_says_at_its_start_what_the_run_before_dropped(finished_run, cli, tmp_path):
    folder = shutil.copytree(finished_run.folder, tmp_path / "run")
    words = arguments(folder, finished_run.files)
    said = cli("train", *words).err
    assert f"step_000012.parquet of {folder}: At factor 1.25 and groups of " in said
    assert " All this is of that one checkpoint, routed without exploration" in said
    (there,) = folder.glob("routing/step_000012.parquet")
    there.write_bytes(b"PAR1")
    note = training_note(there.parent, ["encoder 0"], SwitchConfig(8), 64)
    assert note.startswith(f"step_000012.parquet of {folder} says nothing of drops: ")


def test_the_newest_record_is_that_of_the_last_step(tmp_path):
    for step in ("000999000", "1000000"):
        (tmp_path / f"step_{int(step):06d}.parquet").write_bytes(b"PAR1")
    assert training_note(tmp_path, ["encoder 0"], SwitchConfig(8), 64).startswith(
        f"step_1000000.parquet of {tmp_path.parent}"
    )


def test_sizes_of_groups_are_those_that_every_stack_recorded(tmp_path):
    """Of a training batch that was recorded in part, the shorter stack has fewer places."""
    layers = {"encoder": ["encoder 1"], "decoder": ["decoder 1"]}
    info = RecordInfo(SwitchConfig(4, group_size=64), layers, 0, "train")
    with RecordWriter(tmp_path / "record.parquet", info) as writer:
        parts = {}
        for stack, length in (("encoder", 64), ("decoder", 16)):
            rank = np.zeros((1, 8, length, 1), np.int16)
            token, nothing = np.ones(rank.shape[1:3], np.int32), np.zeros(rank.shape, bool)
            prob = np.ones(rank.shape, np.float32)
            parts[stack] = StackRecord(token, token, rank, prob, prob[..., 0], nothing, rank)
        writer.add(0, parts, 16)
    record = open_record(tmp_path / "record.parquet")
    assert _group_sizes(record, "t5x") == [None, 128]  # 8 rows of 16 places of the decoder


def test_a_plan_has_the_drops_of_its_groups(in_a_folder, cli, tmp_path):
    """Those of a record of another batch, at the group size of the plan."""
    random, experts, record = np.random.default_rng(0), 8, tmp_path / "record.parquet"
    rank = random.integers(0, experts, (2, 64, 128, 1))
    write_record(record, SwitchConfig(experts), [rank])
    words = ["plan", "--gin_file=runs/pretrain_tiny.gin", "--hardware=v5e", "--devices=1"]
    words += ["--gin.SwitchConfig.group_size=64", "--gin.SwitchConfig.capacity_factor=1.0"]
    words += [f"--record={record}", "--gin.VOCAB_SIZE=500", "--json"]
    assert "is of 8 experts in encoder 1, encoder 3, and the model" in cli.refused(*words)
    first, *_ = cli.json(*words, "--gin.SwitchConfig.stacks=encoder")["results"]
    load = [np.bincount(x, minlength=experts) for x in rank.reshape(-1, 64)]
    want = np.maximum(np.array(load) - 8, 0).sum() / rank.size
    assert first["dropped_share"] == pytest.approx(want) and want > 0.1


def test_bad_input_is_named(records, cli, tmp_path):
    def refused(*words) -> str:
        return cli.refused("drops", *words)

    whole = records[0.5].read_bytes()
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole[: len(whole) // 2])
    assert "give a whole file of `--record`" in refused(cut)
    half = records[0.5]
    assert "rounds=4 needs the 4 best experts of each token" in refused(half, "--rounds=4")
    assert "num_selected=2 needs the 2 best" in refused(half, "--num_selected=2")
    assert "'0,1' are no numbers above 0" in refused(half, "--factors=0,1")
    assert "do not divide into 3 parts" in refused(half, "--microbatches=3")
    other = write_run(tmp_path / "other")
    assert "and the model has 2 in encoder 1" in refused(half, f"--model_dir={other}")
    record = open_record(half)
    router = dataclasses.replace(record.info.switch.router, replay=True, replay_drops=True)
    switch = dataclasses.replace(record.info.switch, router=router)
    info = dataclasses.replace(record.info, switch=switch)
    with RecordWriter(tmp_path / "replayed", info) as writer:
        for batch in record.batches(stacks=["encoder"]):
            writer.add(batch.number, {"encoder": batch}, batch.batch_size)
    assert "give the record whose choices were replayed" in refused(tmp_path / "replayed")
