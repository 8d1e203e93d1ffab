# SPDX-License-Identifier: Apache-2.0
"""`switchx plan`: what it prints, what it writes, and what it refuses."""

import copy
import json
import re

import gin
import pytest

from switchx.cli.plan import print_search, print_tiers, row
from switchx.gin_config import building
from switchx.hardware.spec import SPECS, load_hardware
from switchx.models.config import ModelConfig
from switchx.models.flops import count_parameters
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import SLICED_RULES, Rules
from switchx.pipeline.schedule import ScheduleSpec
from switchx.planner.layout import Layout
from switchx.planner.search import ON_DEVICE, predict, search
from switchx.training.job import TrainingJob
from tests.planner.workloads import make_workload
from tests.training.saved_runs import save_run

PLAN = [
    "plan",
    "--gin_file=runs/pretrain_tiny.gin",
    "--gin.ModelConfig.d_model=32",
    "--gin.ModelConfig.d_ff=64",
    "--gin.SwitchConfig.group_size=64",
    "--gin.VOCAB_SIZE=500",
]


@pytest.fixture(autouse=True)
def folder(in_a_folder):
    return in_a_folder


def rows_of(cli, *options: str) -> list[dict]:
    return cli.json(*PLAN, "--json", *options)["results"]


def test_a_table_and_three_plans_in_words(cli):
    out = cli(*PLAN, "--hardware=v5e", "--devices=8", "--top=4").out
    assert "8 devices of v5e (TPU v5e chip)" in out
    assert [f"\n{i}. " in out for i in (1, 2, 3)] == [True] * 3
    assert "the first" in out and "Refused:" in out


@pytest.mark.parametrize("hardware", ["h100x8x1", "b200x8x1", "tpu7x"])
def test_newer_chips_are_planned_for(cli, hardware):
    [first] = rows_of(cli, f"--hardware={hardware}", "--devices=8", "--top=1")
    assert first["step_s"] > 0


def test_json_is_the_last_line(cli):
    report = cli.json(*PLAN, "--hardware=h200x4x2", "--json", "--top=3")
    assert report["command"] == "plan"
    assert report["checks"] == [{"name": "fits", "value": 1, "bound": "==1", "holds": True}]
    rows = report["results"]
    assert [row["rank"] for row in rows] == [1, 2, 3]
    assert rows[0]["step_s"] <= rows[1]["step_s"] <= rows[2]["step_s"]
    sizes = [rows[0][axis] for axis in ("pipe", "data", "fsdp", "node", "expert", "model")]
    product = 1
    for size in sizes:
        product *= size
    assert product == 8
    assert rows[0]["memory_bytes"] > rows[0]["memory_state_bytes"] > 0
    assert rows[0]["collective_bytes"]["all-reduce"] > 0


def test_the_written_mesh_is_the_first_plans_whatever_a_run_had(folder, cli):
    """gin keeps what earlier files bound; the plan was predicted with its own rules."""
    first = rows_of(cli, "--hardware=v5e", "--devices=8", "--output=mesh.gin")[0]
    building.parse_files(["runs/pretrain_tiny.gin", str(folder / "mesh.gin")], [])
    job = building.build("JOB", TrainingJob)
    building.require_effect("JOB", [])
    for axis in ("data", "fsdp", "node", "expert", "model"):
        assert getattr(job.mesh, axis) == first[axis]
    assert job.model.switch.dispatcher == first["dispatcher"]
    assert job.step.num_microbatches == first["microbatches"]
    tiny, switch_c = "runs/pretrain_tiny.gin", "runs/pretrain_switch_c.gin"
    interleaved = ['SCHEDULE_KIND="interleaved"', "NUM_CHUNKS=2", "PIPE_PARTS=4"]
    for earlier, bindings in (
        ([switch_c], ['VOCABULARY_FILE="t5.model"']),
        ([tiny, "meshes/vocab_rows.gin"], []),
        ([tiny, "meshes/pipeline.gin"], interleaved),
    ):
        building.parse_files([*earlier, str(folder / "mesh.gin")], bindings)
        mesh = building.build("MESH", MeshSpec)
        assert mesh.rules in (Rules(), SLICED_RULES) and mesh.pipe == 1
        pipeline = copy.deepcopy(gin.query_parameter("job.TrainingJob.pipeline"))
        assert pipeline == ScheduleSpec("1f1b")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        # With 21 rows groups would not divide.
        ("v5e --devices=7", "no mesh of 7 devices runs this model with its batch of 16 rows"),
        ("v5e --devices=7", "use --devices=4 or --devices=8\n"),
        ("v9 --devices=8", "there are a100, b200, h100, h200, tpu7x, v100, v4, v5e, v5p, v6e"),
        ("v5e", "--hardware=v5e does not say how many devices there are; give --devices=N"),
        ("h200x4x2 --devices=16", "but --hardware=h200x4x2 has 8; give at most 8"),
        ("v5e --devices=0", "no whole number of at least 1"),
        (f"v5p --devices={10**20}", "give at most 131072"),
        ("h200 --devices=12", "--devices=12 of h200 are no whole nodes of 8"),
        ("h200 --devices=12", "use --devices=8 or --devices=16"),
        ("v5e --devices=8 --output=", "--output: it is empty"),
        ("v5e --devices=1 --storage=disk",
         "ModelConfig.scan_layers=False with StorageSpec.experts='disk'"),
        ("v5e --devices=1 --touched=0", "'0' is no share"),
        ("v5e --devices=1 --touched=0.5", "--touched=0.5 with StorageSpec.experts='device'"),
    ],
)  # fmt: skip
def test_devices_and_storage_that_cannot_be_are_refused(cli, options, said):
    assert said in cli.refused(*PLAN, *f"--hardware={options}".split())


def test_what_could_not_be_written_is_refused_before_the_search(cli, folder):
    """Planning for a pod takes minutes."""
    (folder / "file").touch()
    for output, why in ((".", "it is a folder"), ("file/mesh.gin", "nothing can be made in")):
        said = cli.refused(*PLAN, "--hardware=v5e", "--devices=8", f"--output={output}")
        assert f"argument --output: {output} cannot be written: {why}" in said


def test_a_model_that_does_not_fit(folder, cli):
    text = (SPECS / "v5e.toml").read_text()
    device = r"(?<=\[memory\]\n)num_bytes = .*$"
    text, number = re.subn(device, "num_bytes = 6e6", text, flags=re.MULTILINE)
    assert number == 1
    (folder / "tiny.toml").write_text(text)
    message = cli.refused(*PLAN, "--hardware=tiny.toml", "--devices=2")
    assert "the model does not fit 2 devices of tiny: the smallest of the meshes" in message
    assert "; use --devices=" in message or "other hardware" in message


def test_a_batch_that_does_not_divide(cli):
    """A person is told in a line, a program by a check."""
    options = ["--hardware=v5e", "--devices=8", "--gin.BATCH_SIZE=7"]
    options += ["--gin.ModelConfig.num_heads=1", "--gin.ModelConfig.d_ff=63"]
    message = cli.refused(*PLAN, *options)
    assert "no mesh of 8 devices runs this model with its batch of 7 rows" in message
    report = cli.json(*PLAN, *options, "--json", status=1)
    assert report["checks"] == [{"name": "fits", "value": 0, "bound": "==1", "holds": False}]
    assert all("BATCH_SIZE=8" in said for said in (message, report["results"][0]["way_out"]))


SCANNED = "--gin.ModelConfig.scan_layers=True"


def test_the_first_tier_that_fits(folder, cli):
    text = (SPECS / "v5e.toml").read_text()
    device = r"(?<=\[memory\]\n)num_bytes = .*$"
    # Experts do not fit the device, all else does.
    text = re.sub(device, "num_bytes = 45e6", text, flags=re.MULTILINE)
    (folder / "tiny.toml").write_text(text)
    wide = "--gin.ModelConfig.d_ff=1024"
    options = ["--hardware=tiny.toml", "--devices=1", SCANNED, wide]
    assert "; use --storage=host or" in cli.refused(*PLAN, *options)
    # But not a tier that the job itself excludes.
    said = cli.refused(*PLAN, *options, "--gin.StepConfig.ema_decay=0.9")
    assert "--storage=" not in said and "; use " in said
    first, *_, device, host, disk, paper = rows_of(
        cli, *options, "--storage=auto", "--output=mesh.gin"
    )
    assert first["experts"] == "host" and first["storage_s"] > 0
    assert (device["fits"], host["fits"], disk["fits"]) == (False, True, True)
    assert host["device_bytes"] == first["memory_bytes"] < device["device_bytes"]
    assert disk["day_written_bytes"] > 0 and disk["day_written_vs_endurance"] is None
    assert paper["disk_bytes"] > 0
    assert 'storage_spec.StorageSpec.experts = "host"' in (folder / "mesh.gin").read_text()


def test_a_table_of_tiers(cli):
    out = cli(
        *PLAN, "--hardware=h200", "--devices=1", SCANNED, "--storage=disk", "--touched=0.5"
    ).out
    assert "Experts of the first plan by tier (disk is planned)" in out
    assert "a step uses 50% of the experts" in out and "of what they last" in out


def test_a_reason_is_printed_as_it_is(capsys):
    rows = [{"experts_in": "host", "reason": "the spec has no [host]"}]
    print_tiers(rows, ON_DEVICE)
    assert "host: the spec has no [host]\n" in capsys.readouterr().out


def test_ways_out_of_storage_work(folder, cli):
    """What a refusal names is planned in turn."""
    options = ["--gin_file=storage/disk.gin", "--hardware=v5e", "--devices=1"]
    message = cli.refused(*PLAN, *options, "--gin.HOST_BYTES=1000")
    assert "StorageSpec.host_bytes=1,000, but the experts of one layer" in message
    host_bytes = re.search(r"; use StorageSpec.host_bytes=(\d+) or more or --storage", message)[
        1
    ]
    cli(*PLAN, *options, f"--gin.HOST_BYTES={host_bytes.replace(',', '')}", "--json")
    # A host of less memory than all records need.
    text = (SPECS / "v5e.toml").read_text()
    host = r"(?<=\[host\]\n)num_bytes = .*$"
    text, number = re.subn(host, "num_bytes = 9e5", text, flags=re.MULTILINE)
    assert number == 1
    (folder / "little.toml").write_text(text)
    options[1] = "--hardware=little.toml"
    message = cli.refused(*PLAN, *options)
    assert "needs more memory than a host has: " in message and "--storage=device" in message
    host_bytes = re.search(r"StorageSpec.host_bytes=(\d+)", message)[1]
    cli(*PLAN, *options, f"--gin.HOST_BYTES={host_bytes}", "--json")


V5E = load_hardware("v5e")


def test_a_rows_parts_add_up():
    workload = make_workload()
    plan = predict(workload, Layout(data=2, expert=4, dispatcher="all_to_all"), V5E)
    found = row(1, plan, workload, V5E)
    parts = ("compute_s", "communication_s", "update_s", "bubble_s")
    assert found["step_s"] == pytest.approx(sum(found[name] for name in parts))
    # Two Switch layers, four exchanges each of 4 groups' slots: 2 of 8 experts, 64 numbers.
    # Two of the four are operands of products: bfloat16 on a TPU.
    assert found["collective_bytes"]["all-to-all"] == 2 * (2 + 2 / 2) * (2 * 8 * 2 * 64 * 4)
    assert found["tokens_per_s"] == pytest.approx(256 / found["step_s"])


def test_the_table_has_as_many_rows_as_asked_for(capsys):
    found = search(make_workload(), V5E, 8)
    print_search(found, V5E, 8, top=2)
    out = capsys.readouterr().out
    assert f"{found.looked_at:,} layouts, {len(found.plans):,} fit" in out
    assert " 2  " in out and "\n 3  " not in out


def test_a_teacher_is_counted(tmp_path, cli):
    """Against the same job without one; what it cannot be planned with is refused."""
    model = ModelConfig("encoder_decoder", 500, 64, 128, 4, 16, 2, 2)
    run = save_run(tmp_path / "teacher", model)
    options = ["plan", "--gin_file=runs/distill.gin", f"--gin.TEACHER={run}"]
    options += ["--gin.VOCAB_SIZE=500", "--hardware=v5e", "--devices=4"]
    said, number = cli(*options, "--top=1").out, count_parameters(model).total
    assert f"A teacher of {number:,} parameters reads every batch" in said
    rows = []
    for more in ((), ("--gin.DISTILLATION=None",)):
        rows += cli.json(*options, "--json", "--top=1", *more)["results"]
    assert rows[0]["memory_teacher_bytes"] > 0 == rows[1]["memory_teacher_bytes"]
    assert rows[0]["step_s"] > rows[1]["step_s"]
    said = " ".join(cli.refused(*options, "--storage=host").split())
    assert "TrainingJob.distillation=@Distillation() with StorageSpec.experts='host': a" in said


@pytest.mark.parametrize(
    ("bindings", "said"),
    [
        (["RouterConfig.overflow='dropless'"], "overflow='dropless', which drops nothing"),
        (["SwitchConfig.expert_capacity=8"], "expert_capacity=8, which no capacity factor"),
    ],
)
def test_drops_are_predicted_where_a_capacity_factor_makes_them(cli, bindings, said):
    words = [f"--gin.{each}" for each in bindings]
    options = ("--hardware=v5e", "--devices=8", "--record=record.parquet")
    assert said in cli.refused(*PLAN, *options, *words)


def test_a_measured_load_slows_down_what_has_no_equal_blocks(cli, tmp_path):
    # Of 8 experts one is asked for by half of the choices.
    load = [[0.5] + [0.5 / 7] * 7] * 2
    routing = {name: [0.0, 0.0] for name in ("dropped", "entropy", "gate")} | {"load": load}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "routing": routing}) + "\n")

    def plans(*options):
        rows = rows_of(cli, "--hardware=v5e", "--devices=8", "--top=99", *options)
        axes = ("is_spread", "data", "fsdp", "node", "expert", "model", "pipe", "dispatcher")
        return {tuple(each[name] for name in axes): each for each in rows}

    even, measured = plans(), plans(f"--load_of={tmp_path}")
    assert {each["imbalance"] for each in even.values()} == {1.0}
    factors = {"sliced": set(), "ragged_all_to_all": set(), "all_to_all": set()}
    for name, each in measured.items():
        if each["dispatcher"] in factors and each["node"] == 1:
            parts = each["expert"] * (each["model"] if each["dispatcher"] == "sliced" else 1)
            factors[each["dispatcher"]].add((parts, round(each["imbalance"], 3)))
        if each["imbalance"] > 1:
            assert each["step_s"] > even[name]["step_s"]
        else:
            assert each["step_s"] == even[name]["step_s"]
    # Of 4 devices the busiest has the half and one more expert.
    assert (4, round(4 * (0.5 + 0.5 / 7), 3)) in factors["ragged_all_to_all"]
    assert factors["sliced"] and all(factor > 1 for _, factor in factors["sliced"])
    assert {factor for _, factor in factors["all_to_all"]} == {1.0}
    routing = {name: [0.0] for name in ("dropped", "entropy", "gate")} | {"load": [[0.5, 0.5]]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "routing": routing}) + "\n")
    said = cli.refused(*PLAN, "--hardware=v5e", "--devices=8", f"--load_of={tmp_path}")
    assert "a run of 2 experts a layer, and a model of 8; give a run" in said
