# SPDX-License-Identifier: Apache-2.0
"""Steps compiled for eight simulated devices, and for slices where the compiler is there."""

import dataclasses
import json
import math
import subprocess
import sys
import types

import jax
import pytest

from pallas_kernels.aot import gpu_compiler, tpu_compiler
from switchx.compiled.devices import (
    CHILD_VARIABLE,
    has_compiler,
    json_of_child,
    require_mesh_fits,
    run_with_compiler,
)
from switchx.compiled.training_step import (
    Memory,
    batch_shapes,
    bytes_on_one_device,
    compile_step,
    memory_in_refusal,
    memory_of,
    slots_per_token,
)
from switchx.compiled.workload import layout_of, workload_of
from switchx.models.flops import count_parameters, flops_per_sequence
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.topology import GENERATIONS, Topology
from switchx.planner.step_time import executed_flops
from switchx.training.distillation.soft_loss import Distillation
from switchx.training.distillation.student import DistilledProgram
from switchx.training.distillation.written_teacher import write_logits
from switchx.training.programs import compiled_program
from switchx.training.step import StepConfig
from tests.processes import ROOT, script_with_compiler, skip_without
from tests.promises import torus
from tests.promises.step_cases import CASES
from tests.promises.step_cases import make_job as make_case_job
from tests.training.jobs import DENSE, SPARSE, SWITCH, make_job
from tests.training.saved_runs import save_run

SCANNED = dataclasses.replace(
    SPARSE,
    scan_layers=True,
    remat="full",
    num_decoder_layers=4,
    switch=dataclasses.replace(SWITCH, dispatcher="all_to_all"),
)
PLENTY = 1 << 40


def job_on(spec: MeshSpec, model=SCANNED):
    return dataclasses.replace(make_job(model), mesh=spec, batch_size=16)


@pytest.fixture(scope="module")
def step():
    return compile_step(job_on(MeshSpec(data=2, expert=4)), jax.devices(), PLENTY)


def test_facts_of_a_step(step):
    assert step.devices == 8
    assert step.parameters == count_parameters(SCANNED).total
    assert step.slots_per_token == 2.0  # factor 2, and 8 tokens divide over 8 experts
    assert step.memory.fits
    assert step.memory.excess == 0
    assert step.memory.needed >= step.memory.arguments + step.memory.temporaries


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("teacher") / "run", SPARSE)


@pytest.mark.slow  # compiles two steps
def test_a_step_with_a_teacher(teacher_run, monkeypatch):
    """Its parameters are arguments beside the state's, and its checkpoint is not read."""
    monkeypatch.setattr("switchx.training.distillation.student.restore_params", None)
    job = make_job(DENSE, mesh=MeshSpec(data=2, model=2), batch_size=16)
    devices = jax.devices()[:4]
    alone = compile_step(job, devices, PLENTY)
    taught = dataclasses.replace(job, distillation=Distillation(str(teacher_run)))
    beside = compile_step(taught, devices, PLENTY)
    theirs = DistilledProgram(taught, devices).abstract_beside
    assert beside.memory.arguments - alone.memory.arguments == bytes_on_one_device(theirs)
    assert beside.parameters == alone.parameters == count_parameters(DENSE).total
    assert beside.teacher_parameters == count_parameters(SPARSE).total
    # Its forward pass, and no backward pass of it.
    teacher = flops_per_sequence(SPARSE, 0, 8).executed * 16 / 4
    assert beside.flops - alone.flops == pytest.approx(teacher, rel=0.05)
    assert beside.memory.temporaries > alone.memory.temporaries


@pytest.mark.slow  # compiles three programs
def test_a_step_with_logits_on_a_disk(teacher_run, tmp_path):
    settings = Distillation(str(teacher_run), starts_from_teacher=False)
    job = make_job(DENSE, distillation=settings, train_steps=1)
    write_logits(job, tmp_path / "top", 4, jax.devices()[:1])
    settings = dataclasses.replace(settings, teacher=str(tmp_path / "top"))
    job = dataclasses.replace(job, distillation=settings)
    found = compile_step(job, jax.devices()[:1], PLENTY)
    alone = compile_step(dataclasses.replace(job, distillation=None), jax.devices()[:1], PLENTY)
    # Of each of 8 rows of 8 places four ids and four logits.
    assert found.memory.arguments - alone.memory.arguments == 8 * 8 * 4 * (4 + 4)
    assert found.teacher_parameters == 0


def test_arguments_are_what_the_compiler_counts(step):
    program = compiled_program(job_on(MeshSpec(data=2, expert=4)))
    arguments = program.abstract_state, batch_shapes(program)
    # Arguments that nothing reads (a skipped step's counters) are not passed.
    assert 0 <= bytes_on_one_device(arguments) - step.memory.arguments < 200


def test_every_layers_exchanges_are_counted(step):
    """Two sparse blocks: two all-to-alls forward, two when remat computes the
    block again (the last of them is not needed), two backward."""
    count, num_bytes = step.collectives["all-to-all"]
    assert count in (2 * 5, 2 * 6)
    # E g C D floats: 8 experts, 2 groups of a device, 2 slots, D = 16.
    assert num_bytes == count * 8 * 2 * 2 * 16 * 4


def test_flops_are_those_of_the_model(step):
    """Forward once, again by remat, and two products backward for each one forward."""
    one = flops_per_sequence(SCANNED, *job_on(MeshSpec()).sequence_lengths).executed
    # Not computed again: the logits, and the last product of a block.
    assert 3 * one * 16 / 8 < step.flops < 4 * one * 16 / 8


CONDITIONAL = """\
HloModule step, num_partitions=8

%active (x: f32[4,2]) -> f32[4,2] {
  %x = f32[4,2] parameter(0)
  %y = f32[4,4] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %r = f32[4,2] all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}
}

%otherwise (x: f32[4,2]) -> f32[4,2] {
  %z = f32[4,2] negate(%x)
}

%tick (x: f32[4,2]) -> f32[4,2] {
  %x = f32[4,2] parameter(0)
  %c = f32[4,2] conditional(%p, %x, %x), branch_computations={%active, %otherwise}, \
metadata={op_name="jit(train_step)/while/body/if_any_active/cond"}
}

ENTRY %main (x: f32[4,2]) -> f32[4,2] {
  %w = f32[4,2] while(%x), condition=%c, body=%tick, \
backend_config={"known_trip_count":{"n":"TICKS"}}
}
"""


def test_ticks_without_an_op_do_not_count(monkeypatch):
    """Nor what they would have sent."""
    model = dataclasses.replace(DENSE, scan_layers=True)
    job = dataclasses.replace(
        job_on(MeshSpec(pipe=2), model), step=StepConfig(num_microbatches=4)
    )
    schedule = compiled_program(job).pipeline
    text = CONDITIONAL.replace("TICKS", str(schedule.num_ticks))
    measured = Memory(0, 0, 0, 1), text, 0
    monkeypatch.setattr("switchx.compiled.training_step._measure", lambda *arguments: measured)
    found = compile_step(job, jax.devices(), PLENTY)
    with_op = int(schedule.forward.is_active_TPS.any(axis=1).sum())
    assert with_op < schedule.num_ticks
    assert found.flops == with_op * 2 * 4 * 4 * 2
    assert found.collectives == {"all-reduce": (with_op, with_op * 8 * 4)}


@pytest.mark.slow
def test_flops_of_a_pipeline_are_the_planned_ones():
    [case] = [case for case in CASES if case.name == "1f1b pipe=2 data=4"]
    job = make_case_job(case)
    found = compile_step(job, jax.devices(), PLENTY)
    planned = executed_flops(workload_of(job), layout_of(job, job.mesh.sizes(8)))
    assert found.flops == pytest.approx(planned, rel=0.05)


def test_what_is_too_large_is_said_without_compiling(monkeypatch):
    monkeypatch.setattr("switchx.compiled.training_step._compile", None)
    step = compile_step(job_on(MeshSpec(data=2, expert=4)), jax.devices(), 10_000)
    assert not step.memory.fits
    assert step.memory.excess == step.memory.arguments - 10_000
    assert (step.flops, step.collectives) == (None, None)
    assert step.slots_per_token == 2.0


def test_equal_blocks_that_are_not_found_are_an_error(monkeypatch):
    monkeypatch.setattr("switchx.compiled.training_step.executed_slots", lambda jaxpr, model: 0)
    with pytest.raises(RuntimeError, match="no product"):
        slots_per_token(compiled_program(job_on(MeshSpec(data=2, expert=4))))


def test_a_tpu_takes_what_it_has_at_its_peak():
    """As a v5e's compiler said of a step that it accepted: 16.9 GB are there."""
    facts = types.SimpleNamespace(
        argument_size_in_bytes=6969185792, output_size_in_bytes=6969192448,
        alias_size_in_bytes=6969179648, temp_size_in_bytes=12783100928,
        generated_code_size_in_bytes=53628416, peak_memory_in_bytes=15095300096,
    )  # fmt: skip
    limit = GENERATIONS["v5e"].hbm_bytes
    memory = memory_of(facts, limit, "tpu")
    assert memory.fits and memory.needed == 15095300096 + 53628416
    assert memory.arguments + memory.temporaries == memory.needed - 12800  # results
    assert not memory_of(facts, limit, "gpu").fits
    facts.peak_memory_in_bytes = 0  # of a compiler that does not say
    assert memory_of(facts, limit, "tpu") == memory_of(facts, limit, "gpu")


def test_a_compilers_refusal_is_read():
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
        "space hbm. Used 99.70G of 15.25G hbm. Exceeded hbm capacity by 84.45G."
    )
    used, limit = memory_in_refusal(message)
    assert used == round(99.7 * 2**30)
    assert limit == round(15.25 * 2**30)
    other = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (2.00T) exceeds available HBM (15.25G)."
    )
    assert memory_in_refusal(other) == (2 << 40, round(15.25 * 2**30))
    assert memory_in_refusal("INVALID_ARGUMENT: no") is None


LIMITS = """
import jax, jax.numpy as jnp, sys
from switchx.partitioning.topology import Topology
from switchx.compiled.training_step import memory_in_refusal
from switchx.compiled.devices import describe_devices
for name in sys.argv[1:]:
    device = describe_devices(Topology.parse(name))[0]
    on = jax.sharding.SingleDeviceSharding(device)
    much = jax.ShapeDtypeStruct((1 << 40,), jnp.int8, sharding=on)
    try:
        jax.jit(lambda x: x + 1).lower(much).compile()
    except jax.errors.JaxRuntimeError as error:
        print(name.split(":")[0], memory_in_refusal(str(error))[1])
"""


@pytest.mark.aot
def test_limits_are_those_the_compiler_names():
    names = list(tpu_compiler.TOPOLOGIES.values())
    done = script_with_compiler(tpu_compiler, LIMITS, *names)
    said = dict(line.split() for line in done.stdout.splitlines())
    for kind, limit in said.items():
        assert math.isclose(int(limit), GENERATIONS[kind].hbm_bytes, rel_tol=1e-3), kind
    assert len(said) == len(names)


PLACES = """
import json, sys
from switchx.partitioning.mesh import AXES, MeshSpec
from switchx.partitioning.topology import Topology
from switchx.compiled.devices import describe_devices
for name in sys.argv[1:]:
    devices = describe_devices(Topology.parse(name))
    devices.sort(key=lambda device: device.id)
    group, first = [], devices[0]
    if len(devices) == 1024:
        mesh = MeshSpec(fsdp=8, expert=128).build(devices)
        group = [list(each.coords) for each in mesh.devices[0, 0, :, 0, 0, 0]]
    about = [first.device_kind, first.core_on_chip, [list(each.coords) for each in devices]]
    print(json.dumps([*about, group]))
"""


@pytest.mark.aot
@pytest.mark.timeout(200)
def test_chips_are_where_the_compiler_has_them():
    """As `torus_contiguous` has them; a v4's two cores are one device."""
    names = ["v4:8x8x16", "v5p:8x8x16", "v5e:16x16"]
    done = script_with_compiler(tpu_compiler, PLACES, *names)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    for name, line in zip(names, lines, strict=True):
        topology = Topology.parse(name)
        kind, core, places, group = json.loads(line)
        chips = torus.chips_of(topology)
        assert (kind, core) == (chips[0].device_kind, 0)
        assert places == [list(chip.coords) for chip in chips]
        assert len(places) == topology.num_devices
        if len(places) == 1024:
            assert group == [[0, y, 0] for y in range(8)]


V5E = Topology.parse("v5e:4x4")

ON_HOST = """
import dataclasses, json, sys
from switchx.optim.adamw import AdamW
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.topology import Topology
from switchx.training.offload.storage_spec import StorageSpec
from switchx.compiled.training_step import compile_step
from switchx.compiled.devices import describe_devices
from tests.training.jobs import SPARSE, SWITCH, make_job

topology = Topology.parse(sys.argv[1])
switch = dataclasses.replace(SWITCH, every=1, group_size=128, dispatcher="all_to_all")
model = dataclasses.replace(
    SPARSE, d_model=128, d_ff=512, d_head=64, num_decoder_layers=32, scan_layers=True,
    remat="full", switch=switch,
)
job = make_job(
    model, storage=StorageSpec("host"), optimizer=AdamW(), mesh=MeshSpec(data=1, expert=4),
    inputs_length=64, targets_length=64,
)
devices = describe_devices(topology)
step = compile_step(job, devices, topology.generation.hbm_bytes)
print(json.dumps(dataclasses.asdict(step)))
"""


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5e:2x2", "h200:4"])
def test_experts_in_host_memory_leave_the_devices(topology):
    is_tpu = topology.startswith("v")
    done = script_with_compiler(tpu_compiler if is_tpu else gpu_compiler, ON_HOST, topology)
    step = json.loads(done.stdout.splitlines()[-1])
    memory, host = step["memory"], step["host"]
    # 32 layers of 8 / 4 experts a device: weights and two moments leave it.
    weights = 32 * 2 * (2 * 128 * 512) * 4
    assert host["without"]["arguments"] - memory["arguments"] == 3 * weights
    assert host["formula"] == 4 * weights and host["needed"] <= 1.01 * 4 * weights
    assert host["needed"] > (3.99 if is_tpu else 2.99) * weights
    # The program is longer, and has the slots.
    assert host["without"]["needed"] - memory["needed"] > 2.5 * weights
    assert host["copies_overlapped"] >= 0.8
    assert host["strides"] == []


IN_PARTS = """
import sys
from switchx.models.config import Precision
from switchx.moe.experts import BLOCKS
from switchx.partitioning.compiler_options import CompilerOptions
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.topology import Topology
from switchx.compiled.training_step import compile_step
from switchx.compiled.devices import describe_devices
from tests.training.jobs import SPARSE, SWITCH, make_job
import dataclasses

topology = Topology.parse("v5e:2x2")
for parts in (1, 2):
    switch = dataclasses.replace(
        SWITCH, group_size=512, dispatcher="all_to_all", exchange_parts=parts
    )
    model = dataclasses.replace(
        SPARSE, d_model=512, d_ff=2048, d_head=64, num_heads=8, num_decoder_layers=4,
        scan_layers=True, remat="full", precision=Precision(compute="bfloat16"), switch=switch,
    )
    job = make_job(
        model, mesh=MeshSpec(data=1, expert=4), inputs_length=256, targets_length=256,
        batch_size=32, compiler=CompilerOptions(tpu=("xla_tpu_enable_async_all_to_all=True",)),
    )
    step = compile_step(job, describe_devices(topology), topology.generation.hbm_bytes)
    print(parts, step.overlapped_exchanges, step.collectives["all-to-all"][1])
"""


@pytest.mark.aot
def test_experts_compute_while_another_part_travels():
    done = script_with_compiler(tpu_compiler, IN_PARTS)
    whole, halves = (line.split() for line in done.stdout.splitlines()[-2:])
    assert int(halves[1]) >= 4 > int(whole[1])
    assert halves[2] == whole[2]  # the same bytes


@pytest.mark.aot
@pytest.mark.slow  # 3 and 7 minutes on an idle core
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("run", "topology"), [("pretrain_olmoe", "v5e:4x4"), ("pretrain_mixtral", "v5p:4x4x4")]
)
def test_todays_decoders_fit(run, topology):
    """Every check of the command holds, the planner's among them."""
    skip_without(tpu_compiler)
    words = ["compile", f"--gin_file=configs/runs/{run}.gin", f"--topology={topology}"]
    report = json_of_child([*words, "--json"], Topology.parse(topology))
    verdicts = {check["name"]: check["holds"] for check in report["checks"]}
    assert all(verdicts.values()) and {"fits", "argument_error_vs_planned"} <= verdicts.keys()
    (row,) = report["results"]
    assert row["parameters"] == row["planned_parameters"]
    assert 0.5 < row["temporaries_vs_planned"] < 1


IN_A_LOOP = """
import dataclasses
from switchx.models.config import Precision
from switchx.partitioning.compiler_options import DEFAULT_OPTIONS, CompilerOptions
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.topology import Topology
from switchx.compiled.training_step import batch_shapes
from switchx.compiled.devices import describe_devices
from switchx.training.programs import compiled_program
from tests.training.jobs import DENSE, make_job

((name, _),) = DEFAULT_OPTIONS["tpu"].items()
for remat in ("none", "full"):
    model = dataclasses.replace(
        DENSE, d_model=1024, d_ff=8192, num_decoder_layers=8, scan_layers=True, remat=remat,
        precision=Precision(compute="bfloat16"),
    )
    for options in ((), (f"{name}=True",)):
        job = make_job(model, mesh=MeshSpec(data=1), compiler=CompilerOptions(tpu=options))
        program = compiled_program(job, describe_devices(Topology.parse("v5e:2x2"))[:1])
        with program.scope():
            compiled = program.trace_step(batch_shapes(program)).lower().compile()
        is_copied = "bf16[8,1024,8192]" in compiled.as_text()
        print(int(is_copied), compiled.memory_analysis().temp_size_in_bytes)
sliced = make_job(model, mesh=MeshSpec(data=1, fsdp=4))
sliced = compiled_program(sliced, describe_devices(Topology.parse("v5e:2x2")))
print(len(sliced.compiler_options))
"""


@pytest.mark.aot
def test_a_loop_over_blocks_has_no_copy_of_their_weights():
    done = script_with_compiler(tpu_compiler, IN_A_LOOP)
    rows = [[int(word) for word in line.split()] for line in done.stdout.splitlines()[-5:]]
    # Copies are what devices with slices gather: there they stay.
    assert rows.pop() == [0]
    copies = 8 * 2 * 1024 * 8192 * 2  # bytes of all layers' matrices in bfloat16
    for ours, other in (rows[:2], rows[2:]):
        assert (ours[0], other[0]) == (0, 1)
        assert other[1] - ours[1] > 0.9 * copies


WITH_ROWS = """
import dataclasses
from switchx.moe.config import RouterConfig
from tests.compiled.slow_loops import copied_constants
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.topology import Topology
from switchx.compiled.training_step import batch_shapes
from switchx.compiled.devices import describe_devices
from switchx.training.programs import compiled_program
from tests.training.jobs import SPARSE, SWITCH, make_job

router = RouterConfig(jitter=0.0, overflow="dropless", balance_counts="first_choice")
switch = dataclasses.replace(SWITCH, dispatcher="ragged_all_to_all", router=router)
sizes = {"d_model": 256, "num_decoder_layers": 4, "scan_layers": True}
job = make_job(
    dataclasses.replace(SPARSE, switch=switch, **sizes), mesh=MeshSpec(expert=4), batch_size=512
)
program = compiled_program(job, describe_devices(Topology.parse("h200:4")))
with program.scope():
    compiled = program.trace_step(batch_shapes(program)).lower().compile()
print(max(copied_constants(compiled.as_text()), default=0))
"""


@pytest.mark.aot
def test_no_rows_of_constants_are_copied_in_a_loop_over_blocks():
    done = script_with_compiler(gpu_compiler, WITH_ROWS)
    # Places of 512 x 8 rows are made in constants, an int32 a row; rows have 256 floats.
    assert int(done.stdout.splitlines()[-1]) <= 4 * 512 * 8


def test_the_child_alone_sees_the_compiler(tmp_path, monkeypatch):
    (tmp_path / "libtpu").mkdir()
    monkeypatch.setenv(tpu_compiler.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.chdir(ROOT)
    seen = {}

    def run(command, env, **options):
        seen.update(command=command, env=env)

    monkeypatch.setattr(subprocess, "run", run)
    run_with_compiler(["compile", "--json"], V5E)
    assert seen["command"] == [sys.executable, "-m", "switchx", "compile", "--json"]
    assert str(tmp_path) in seen["env"]["PYTHONPATH"]
    assert seen["env"][CHILD_VARIABLE]
    assert not has_compiler()


def test_no_compiler_for_gpus_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv(gpu_compiler.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="pallas_kernels.aot.install gpu"):
        run_with_compiler(["compile"], Topology.parse("h200"))


def test_a_mesh_that_uses_all_devices():
    require_mesh_fits(MeshSpec(expert=4), V5E)
    require_mesh_fits(MeshSpec(data=4, expert=4), V5E)


@pytest.mark.parametrize(
    ("mesh", "needed", "way_out"),
    [
        (MeshSpec(expert=32), 32, "--topology=v5e:4x8"),
        (MeshSpec(data=2, expert=4), 8, "--topology=v5e:2x4, or leave MeshSpec.data out"),
        (MeshSpec(expert=3), 15, "axes whose product divides 16"),
    ],
)
def test_a_mesh_that_does_not(mesh, needed, way_out):
    with pytest.raises(
        ValueError, match=f"needs {needed} devices, but v5e:4x4 has 16"
    ) as error:
        require_mesh_fits(mesh, V5E)
    assert way_out in str(error.value)
