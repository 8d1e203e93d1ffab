# SPDX-License-Identifier: Apache-2.0
"""A teacher beside a student's step: its bytes, FLOPs and collectives as programs have them."""

import collections
import dataclasses

import jax
import pytest

from switchx.axes import dims_of
from switchx.compiled.collectives import collectives
from switchx.compiled.training_step import batch_shapes, bytes_on_one_device
from switchx.compiled.workload import workload_of
from switchx.hardware.spec import load_hardware
from switchx.models.flops import count_parameters, flops_per_sequence
from switchx.models.params import abstract_params, forward
from switchx.partitioning.mesh import MeshSpec
from switchx.planner.layout import Layout
from switchx.planner.memory import memory_use
from switchx.planner.search import search
from switchx.planner.step_comm import step_collectives
from switchx.planner.step_time import device_flops, step_time
from switchx.planner.storage_tiers import Storage
from switchx.training.distillation.soft_loss import Distillation
from switchx.training.distillation.student import DistilledProgram
from switchx.training.program import TrainingProgram
from switchx.tree import num_bytes
from tests.cases import slow
from tests.data.refusals import refused
from tests.planner.workloads import DENSE, SPARSE
from tests.promises.planned_bytes import compiled_on_cpu
from tests.training.jobs import make_job
from tests.training.saved_runs import save_run

V5E = load_hardware("v5e")
# Of eight heads and three blocks, one of them sparse.
TEACHERS = {
    "dense": dataclasses.replace(DENSE, scan_layers=False, num_decoder_layers=2),
    "sparse": dataclasses.replace(SPARSE, scan_layers=False, num_decoder_layers=2),
}
STUDENT = dataclasses.replace(DENSE, scan_layers=False, num_decoder_layers=1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of the teachers, without checkpoints: the planner reads none."""
    base = tmp_path_factory.mktemp("teachers")
    return {name: save_run(base / name, model) for name, model in TEACHERS.items()}


def job_of(run, mesh=None, **changes):
    fields = dict(batch_size=16, inputs_length=8, targets_length=8)
    settings = None if run is None else Distillation(str(run), starts_from_teacher=False)
    mesh = MeshSpec() if mesh is None else mesh
    return make_job(STUDENT, mesh=mesh, distillation=settings, **(fields | changes))


def layout_of(mesh: MeshSpec, **changes) -> Layout:
    return Layout(**mesh.build(jax.devices()).shape, **changes)


def by_kind(found) -> collections.Counter:
    counted = collections.Counter()
    for each in found:
        counted[each.kind] += round(each.total_bytes)
    return +counted


@pytest.mark.parametrize(
    ("teacher", "mesh"),
    [
        slow("sparse", MeshSpec(model=2)),
        ("sparse", MeshSpec(expert=4)),
        slow("dense", MeshSpec(data=1, fsdp=8)),
        slow("sparse", MeshSpec(data=1, fsdp=8)),
        slow("dense", MeshSpec(data=1, model=8)),
    ],
)
def test_collectives_are_those_of_a_compiled_forward_pass(runs, teacher, mesh):
    job = job_of(runs[teacher], mesh)
    program = DistilledProgram(job)

    def logits(params, batch):
        return forward(program.teacher, params, batch, is_training=False)[0]

    with program.scope():
        compiled = (
            jax.jit(logits).lower(*program.abstract_beside, batch_shapes(program)).compile()
        )
    found = collections.Counter()
    for each in collectives(compiled.as_text()):
        found[each.kind] += each.num_bytes
    layout, workload = layout_of(mesh), workload_of(job)
    alone = dataclasses.replace(workload, teacher=None)
    with_teacher = by_kind(compiled_on_cpu(step_collectives(workload, layout), layout))
    with_teacher.subtract(by_kind(compiled_on_cpu(step_collectives(alone, layout), layout)))
    # The forward pass has no loss: the sums of its softmax are not in it.
    sums = 3 * 4 * 16 * 16 // layout.parts(layout.batch_axes) * (layout.model > 1)
    with_teacher["all-reduce"] -= sums
    for kind in found | with_teacher:
        # Choices and gates of a Switch layer are not modelled.
        assert with_teacher[kind] == pytest.approx(found[kind], rel=0.02, abs=600), kind


def test_bytes_and_flops_of_a_forward_pass(runs):
    mesh = MeshSpec(fsdp=2, expert=2, model=2)
    job, layout = job_of(runs["sparse"], mesh), layout_of(mesh)
    workload, program = workload_of(job), DistilledProgram(job)
    alone = dataclasses.replace(workload, teacher=None)
    more, less = memory_use(workload, layout), memory_use(alone, layout)
    assert dataclasses.replace(more, teacher=0.0) == less
    # Its parameters, and the logits of 4 rows three times, are the least.
    theirs = bytes_on_one_device(program.abstract_beside)
    assert more.teacher > theirs + 3 * 4 * 4 * 16 * STUDENT.vocab_size / 2
    assert not [each for each in workload.teacher.state if each.kind != "params"]
    elements = sum(
        each.itemsize * jax.numpy.prod(jax.numpy.array(each.shape)).item() / 4
        for each in workload.teacher.state
    )
    assert elements == count_parameters(TEACHERS["sparse"]).total
    # Slots are those of evaluation.
    switch = TEACHERS["sparse"].switch
    evaluated = dataclasses.replace(switch, capacity_factor=switch.eval_capacity_factor)
    model = dataclasses.replace(TEACHERS["sparse"], switch=evaluated)
    flops = device_flops(workload, Layout(data=4)) - device_flops(alone, Layout(data=4))
    assert flops == flops_per_sequence(model, 0, 16).executed * 16 / 4
    assert step_time(workload, layout, V5E).step_s > step_time(alone, layout, V5E).step_s
    assert step_time(workload, layout, V5E).update_s == step_time(alone, layout, V5E).update_s


@pytest.mark.slow  # compiles two steps
def test_arguments_are_those_of_a_compiled_step(runs):
    """The teacher's parameters more than without one; temporaries: test_memory.py."""
    job, arguments = job_of(runs["dense"]), []
    for each in (job, dataclasses.replace(job, distillation=None)):
        made = TrainingProgram if each.distillation is None else DistilledProgram
        program = made(each, jax.devices()[:1])
        with program.scope():
            compiled = program.trace_step(batch_shapes(program)).lower().compile()
        arguments.append(compiled.memory_analysis().argument_size_in_bytes)
    theirs = num_bytes(abstract_params(TEACHERS["dense"]))
    assert (
        arguments[0] - arguments[1] == theirs < memory_use(workload_of(job), Layout()).teacher
    )


@pytest.mark.slow  # compiles a step
def test_temporaries_are_those_of_a_compiled_step(tmp_path):
    """Within a third, on a CPU."""
    sizes = dict(vocab_size=256, max_length=None, scan_layers=False)
    teacher = dataclasses.replace(DENSE, num_decoder_layers=4, **sizes)
    student = dataclasses.replace(DENSE, num_decoder_layers=2, **sizes)
    run = save_run(tmp_path / "run", teacher)
    settings = Distillation(str(run), starts_from_teacher=False)
    job = make_job(
        student, batch_size=8, inputs_length=64, targets_length=64, distillation=settings
    )
    program = DistilledProgram(job, jax.devices()[:1])
    with program.scope():
        compiled = program.trace_step(batch_shapes(program)).lower().compile()
    use = memory_use(workload_of(job), Layout())
    temporaries = use.total - use.state - num_bytes(abstract_params(teacher))
    found = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries / found == pytest.approx(1.0, abs=0.34)


def test_a_sparse_student_may_have_a_dense_teacher(runs):
    sparse = dataclasses.replace(TEACHERS["sparse"], num_decoder_layers=2)
    workload = workload_of(dataclasses.replace(job_of(runs["dense"]), model=sparse))
    alone = dataclasses.replace(workload, teacher=None)
    flops = flops_per_sequence(TEACHERS["dense"], 0, 16).executed * 16
    for layout in (Layout(expert=4, dispatcher="all_to_all"), Layout(dispatcher="gather")):
        more = device_flops(workload, layout) - device_flops(alone, layout)
        assert more == pytest.approx(flops / layout.size)
    assert search(workload, V5E, 4).plans


def test_a_search_keeps_to_what_a_student_can_run(runs, tmp_path):
    scanned = dataclasses.replace(STUDENT, num_decoder_layers=2, scan_layers=True)
    workload = workload_of(dataclasses.replace(job_of(runs["sparse"]), model=scanned))
    found = search(workload, V5E, 8)
    assert found.plans and all(plan.layout.pipe == 1 for plan in found.plans)
    assert found.refused["a teacher reads the batch beside a step without stages"] > 0
    # A teacher that is too large for a device is why nothing fits.
    table = next(each for each in workload.teacher.state if "V" in each.dims)
    huge = dataclasses.replace(table, shape=(V5E.memory.usable_bytes // 8, 16))
    huge = dataclasses.replace(workload.teacher, state=(*workload.teacher.state, huge))
    found = search(dataclasses.replace(workload, teacher=huge), V5E, 1)
    assert not found.plans and found.smallest.memory.teacher > V5E.memory.usable_bytes
    # Experts elsewhere are refused, logits on a disk are no teacher.
    assert not search(workload, V5E, 8, Storage("host")).plans
    (tmp_path / "teacher.json").write_text("{}")
    assert workload_of(job_of(tmp_path)).teacher is None
    with refused("nowhere is not a run folder"):
        workload_of(job_of(tmp_path / "nowhere"))
    assert dims_of("embedding_VD", 2) == table.dims
