# SPDX-License-Identifier: Apache-2.0
"""Bytes of a device: the state's exactly, activations within a factor of compiled programs."""

import dataclasses

import jax
import pytest

from pallas_kernels.aot import tpu_compiler
from switchx.compiled.workload import workload_of
from switchx.models.config import Precision
from switchx.optim.adafactor import Adafactor
from switchx.optim.adamw import AdamW
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from switchx.pipeline.schedule import ScheduleSpec
from switchx.planner.layout import Layout
from switchx.planner.memory import in_flight, memory_use, state_bytes, updated_bytes
from switchx.training.programs import compiled_program
from tests.cases import slow
from tests.planner.workloads import DENSE, SPARSE, SWITCH, make_workload
from tests.processes import script_with_compiler
from tests.training.jobs import MODERN, make_job

GROUPED = dataclasses.replace(
    DENSE, positions="rotary", num_kv_heads=2, qk_norm="head", scale_attention=True
)


@pytest.mark.parametrize(
    ("sizes", "slices", "optimizer", "model"),
    [
        (dict(data=1, fsdp=2, expert=2, model=2), (), Adafactor(), SPARSE),
        (dict(data=2, fsdp=2, model=2), ("data",), AdamW(), SPARSE),
        (
            dict(data=2, expert=4), ("data",), Adafactor(min_dim_size_to_factor=8, beta1=0.9),
            SPARSE,
        ),
        # Two heads of keys are whole on four devices.
        (dict(data=1, fsdp=2, model=4), (), Adafactor(), MODERN),
    ],
)  # fmt: skip
def test_state_is_the_programs_arguments(sizes, slices, optimizer, model):
    mesh = MeshSpec(**sizes, rules=Rules(optimizer_slices=slices))
    job = make_job(model, mesh=mesh, batch_size=16, optimizer=optimizer)
    program = compiled_program(job, jax.devices()[:8])
    state, shardings = program.abstract_state, program.shardings

    def local(tree, sharding):
        sizes = jax.tree.map(
            lambda leaf, place: (
                jax.numpy.prod(jax.numpy.array(place.shard_shape(leaf.shape))).item()
                * leaf.dtype.itemsize
                if leaf.shape
                else 0
            ),
            tree,
            sharding,
        )
        return sum(jax.tree.leaves(sizes))

    layout = Layout(**sizes, dispatcher="all_to_all", has_optimizer_slices=bool(slices))
    workload = workload_of(job)
    assert state_bytes(workload, layout, "params") == local(state.params, shardings.params)
    kept = state_bytes(workload, layout, "optimizer")
    assert kept == local(state.opt_state, shardings.opt_state)
    whole = dataclasses.replace(layout, has_optimizer_slices=False)
    assert updated_bytes(workload, whole) == state_bytes(workload, layout, "params")
    if slices:  # nearly all of it divides
        assert kept <= 0.51 * state_bytes(workload, whole, "optimizer")
        assert updated_bytes(workload, layout) <= 0.51 * updated_bytes(workload, whole)


@pytest.mark.parametrize(
    ("remat", "of"),
    [slow("full", DENSE), ("none", DENSE), slow("full", GROUPED), slow("none", GROUPED)],
)
def test_temporaries_are_those_of_a_compiled_step(remat, of):
    """Within a third: what XLA fuses and shares is not modelled."""
    model = dataclasses.replace(
        of, remat=remat, vocab_size=256, num_decoder_layers=8, max_length=None
    )
    job = make_job(
        model, batch_size=8, inputs_length=64, targets_length=64, mesh=MeshSpec(data=1)
    )
    program = compiled_program(job, jax.devices()[:1])
    rows = job.features.batch([[] for _ in range(8)])
    batch = {
        name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=program.batch_sharding)
        for name, each in rows.items()
    }
    with program.scope():
        compiled = program.train_step.lower(program.abstract_state, batch).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    use = memory_use(workload_of(job), Layout())
    assert (use.total - use.state) / temporaries == pytest.approx(1.0, abs=0.34)


ON_A_TPU = """
import dataclasses, pathlib, sys
from switchx.models.config import ModelConfig, Precision, SwitchConfig
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.topology import Topology
from switchx.planner.layout import Layout
from switchx.planner.memory import memory_use
from switchx.compiled.training_step import batch_shapes
from switchx.compiled.devices import describe_devices
from switchx.training.distillation.soft_loss import Distillation
from switchx.training.distillation.student import DistilledProgram
from switchx.training.program import TrainingProgram
from switchx.training.programs import compiled_program
from switchx.compiled.workload import workload_of
from tests.training.jobs import make_job
from tests.training.saved_runs import save_run

dense = ModelConfig(
    "decoder_only", 4096, 512, 2048, 4, 128, 6, activation="geglu", scan_layers=True,
    precision=Precision(compute="bfloat16"),
)
switch = SwitchConfig(8, every=2, capacity_factor=1.25, group_size=512)
# With logits that a v5e's 128 MiB of vector memory do not hold.
student = dataclasses.replace(
    dense, vocab_size=32128, num_decoder_layers=2, scan_layers=False
)
teacher = dataclasses.replace(student, num_decoder_layers=4)
run = save_run(pathlib.Path(sys.argv[1]), teacher)
for name, model, settings in (
    ("sparse", dataclasses.replace(dense, switch=switch), None),
    ("remat", dataclasses.replace(dense, switch=switch, remat="full"), None),
    ("taught", student, Distillation(str(run), starts_from_teacher=False)),
):
    job = make_job(
        model, mesh=MeshSpec(data=1), batch_size=4, inputs_length=256, targets_length=256,
        distillation=settings,
    )
    made = TrainingProgram if settings is None else DistilledProgram
    program = made(job, describe_devices(Topology.parse("v5e:2x2"))[:1])
    with program.scope():
        compiled = program.trace_step(batch_shapes(program)).lower().compile()
    memory, use = compiled.memory_analysis(), memory_use(workload_of(job), Layout())
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    print(name, use.total / needed)
"""


@pytest.mark.aot
@pytest.mark.timeout(900)  # three minutes of one core
def test_memory_is_that_of_a_step_compiled_for_a_tpu(tmp_path):
    """What the planner is asked is whether a step fits: arguments and temporaries together.

    A step with a teacher is planned at twice what it takes.
    """
    done = script_with_compiler(tpu_compiler, ON_A_TPU, str(tmp_path / "run"))
    ratios = dict(line.split() for line in done.stdout.splitlines()[-3:])
    # A teacher's logits, probabilities and the student's are counted apart; this compiler fuses
    # them, and no step is refused or chosen for less than it takes.
    assert 1.0 < float(ratios.pop("taught")) < 2.2
    assert {name: float(ratio) for name, ratio in ratios.items()} == {
        name: pytest.approx(1.0, abs=0.2) for name in ("sparse", "remat")
    }


def test_remat_keeps_less_and_microbatches_halve_activations():
    kept = {
        remat: memory_use(make_workload(dataclasses.replace(DENSE, remat=remat)), Layout())
        for remat in ("none", "minimal", "full")
    }
    assert kept["none"].activations > kept["minimal"].activations > kept["full"].activations
    # Of each of four blocks its input: 16 rows of 16 tokens of 64 numbers of four bytes.
    assert kept["full"].activations == 4 * 16 * 16 * 64 * 4
    one = memory_use(make_workload(), Layout(dispatcher="gather"))
    two = memory_use(make_workload(), Layout(dispatcher="gather", num_microbatches=2))
    assert two.activations == pytest.approx(one.activations / 2)
    assert two.gradients == 2 * one.gradients
    assert two.state == one.state


def test_flash_attention_keeps_no_weights():
    model = dataclasses.replace(DENSE, remat="none")
    flash = dataclasses.replace(model, training_attention="cudnn")
    kept, others = (
        memory_use(make_workload(each), Layout()).activations for each in (model, flash)
    )
    layers, rows, heads, length, width = 4, 16, 8, 16, 4
    assert kept - others == layers * rows * length * heads * length * width


def test_cross_attention_keeps_keys_and_values_of_all_inputs():
    """A decoder block by hand, of 8 tokens that read 32 inputs."""
    model = dataclasses.replace(
        DENSE, architecture="encoder_decoder", num_encoder_layers=1, activation="relu"
    )
    kept = [
        memory_use(
            make_workload(each, inputs_length=32, targets_length=8), Layout()
        ).activations
        for each in (model, dataclasses.replace(model, num_decoder_layers=5))
    ]
    D, H, HK, F = 64, 8, 64, 128
    own = 8 * (2 * D + 2 * HK + H * 8) + 8 * 2 * HK
    cross = 8 * (2 * D + 2 * HK + H * 32) + 32 * 2 * HK
    rows, width = 16, 4
    assert kept[1] - kept[0] == rows * width * (own + cross + 8 * (2 * D + 2 * F))


def test_shared_experts_keep_hidden_values_of_all_tokens():
    """Before and after relu, in two Switch layers of 16 rows of 16 tokens."""
    relu = dataclasses.replace(SPARSE, activation="relu")
    own = dataclasses.replace(SWITCH, shared_d_ff=1024)
    with_shared = dataclasses.replace(relu, switch=own)
    layout = Layout(model=2, dispatcher="dropless")
    alone, both = (memory_use(make_workload(each), layout) for each in (relu, with_shared))
    hidden = 2 * 16 * 16 * 1024 / layout.model * 4
    assert both.activations - alone.activations == 2 * hidden
    # A block's buffers are of the mean of its period, one dense and one sparse.
    assert both.working - alone.working == 2 * hidden / 2


def test_experts_with_copies_are_in_slots_and_on_their_way_there():
    """8 experts and 8 copies on 4 devices: 4 slots each, and at most 10 of its own 2 sent.

    Slots of both layers are kept; one layer's travel.
    """
    copied = dataclasses.replace(SPARSE, switch=dataclasses.replace(SWITCH, num_replicas=8))
    layout = Layout(expert=4, dispatcher="all_to_all")
    expert = 2 * 64 * 128 * 4
    for model, experts in ((SPARSE, 0), (copied, 2 * 4 + 3 * 10 + 4 * 4)):
        assert memory_use(make_workload(model), layout).gathered == experts * expert
    # Copies have blocks of as many rows: of 4 groups 2 rows each, with all that gelu keeps.
    own, both = (memory_use(make_workload(each), layout) for each in (SPARSE, copied))
    rows = 4 * 8 * 2
    assert both.activations - own.activations == 2 * rows * (2 * 64 + 7 * 128) * 4


def test_1f1b_keeps_as_many_microbatches_and_a_stage_has_its_blocks():
    # Activation memory does not grow with microbatches of the same size.
    used = []
    for number in (16, 32, 64):
        workload = make_workload(DENSE, batch_size=number)
        layout = Layout(pipe=4, num_microbatches=number)
        used.append(memory_use(workload, layout).activations)
        assert in_flight(layout) == (5,)
    assert len(set(used)) == 1
    assert in_flight(Layout(pipe=4, num_microbatches=4)) == (4,)
    # An encoder's inputs wait for the decoder's backward pass.
    assert in_flight(Layout(pipe=4, num_microbatches=64), 2) == (13, 7)
    all_of_them = Layout(pipe=4, num_microbatches=32, schedule=ScheduleSpec("gpipe"))
    assert in_flight(all_of_them) == (32,)
    workload = make_workload(DENSE)
    whole = state_bytes(workload, Layout(), "params")
    stage = state_bytes(workload, Layout(pipe=4, num_microbatches=4), "params")
    blocks = sum(
        4 * jax.numpy.prod(jax.numpy.array(each.shape)).item()
        for each in workload.state
        if each.kind == "params" and each.is_in_blocks
    )
    assert stage == whole - blocks * 3 / 4


def test_slices_and_slots():
    workload = make_workload()
    sliced = memory_use(workload, Layout(fsdp=8, dispatcher="dropless"))
    assert sliced.gathered > 0
    assert memory_use(workload, Layout(data=8, dispatcher="dropless")).gathered == 0
    double = dataclasses.replace(SWITCH, capacity_factor=2.0)
    padded = make_workload(dataclasses.replace(SPARSE, switch=double))
    layout = Layout(expert=8, dispatcher="all_to_all")
    assert memory_use(padded, layout).working > memory_use(workload, layout).working
    # A loop over blocks gathers copies in the products' dtype, which are made of all at once.
    half = dataclasses.replace(SPARSE, precision=Precision(compute="bfloat16"))
    rounded = memory_use(make_workload(half), Layout(fsdp=8, dispatcher="dropless"))
    embedding = 2 * 4 * 64 * SPARSE.vocab_size / 8  # tables, which are in no block
    assert rounded.gathered - sliced.gathered == pytest.approx(
        (sliced.params - embedding) / 2, rel=0.1
    )
    assert memory_use(make_workload(half), Layout(data=8, dispatcher="dropless")).gathered == 0
    gathered_once = dataclasses.replace(SPARSE, scan_layers=False)
    kept = memory_use(make_workload(gathered_once), Layout(fsdp=8, dispatcher="dropless"))
    assert kept.gathered > sliced.gathered
