# SPDX-License-Identifier: Apache-2.0
"""Experts divided among tasks: who may choose whom, where they are, and what is sent."""

import dataclasses
import functools
import re
import types

import jax
import numpy as np
import pytest

import switchx
from switchx import tree
from switchx.checkpoint.run_folder import RunFolder
from switchx.compiled.elastic import job_for_devices
from switchx.compiled.training_step import batch_shapes
from switchx.data.loader import TrainLoader
from switchx.data.mixtures import Mixture
from switchx.data.objectives import CausalLM
from switchx.data.tasks import Task
from switchx.data.tokenizers import ByteVocabulary
from switchx.deploy.checked_plan import DeployPlan, DeploySettings
from switchx.models.config import RouterConfig
from switchx.models.params import forward, of_task
from switchx.moe.capacity import layer_groups
from switchx.moe.copy_placement import place_tasks, tasks_of_parts
from switchx.partitioning.mesh import MeshSpec
from switchx.training.expert_copies_program import task_tables, with_copies
from switchx.training.loop import train
from switchx.training.programs import compiled_program
from switchx.training.step import Seam, StepConfig, gradients
from tests.cases import slow
from tests.compare import assert_close_to_largest
from tests.compiled.fewer_devices import V5E, losses_on_fewer
from tests.data.fakes import text_corpus
from tests.data.refusals import refused
from tests.training.jobs import (
    LENGTH,
    LOSS,
    SPARSE,
    Events,
    make_batch,
    make_job,
    make_params,
    run_model,
    with_switch,
)
from tests.training.saved_runs import lines
from tests.training.steps import raw_gradients

TASKS = tuple(
    Task(name, text_corpus(*[letter * 160] * 4), ByteVocabulary(), CausalLM())
    for name, letter in (("one", "a"), ("two", "b"), ("three", "c"), ("four", "d"))
)
ROWS = (8, 4, 2, 2)
# Two experts a task.
ROUTER = RouterConfig("task", num_tasks=4, jitter=0.0)
MODEL = with_switch(SPARSE, router=ROUTER)


def tasks_job(model=MODEL, **changes):
    return make_job(
        model, source=Mixture(TASKS, rows=ROWS), batch_size=sum(ROWS), seed=1, **changes
    )


def loader_of(**changes) -> TrainLoader:
    job = dataclasses.replace(tasks_job(), **changes)
    return TrainLoader(job.source, job.batches, seed=0)


def test_rows_are_of_their_tasks_and_resume():
    loader = loader_of()
    letters = [ord(letter) + 3 for letter in "abcd"]
    batches = [next(loader) for _ in range(3)]
    state = loader.state()
    want = np.repeat(range(4), ROWS)
    for batch in batches:
        np.testing.assert_array_equal(batch["task_ids"], want)
        for row, task in zip(batch["decoder_target_tokens"], want, strict=True):
            assert set(row.tolist()) <= {0, 1, letters[task]}
    following = next(loader)
    loader.restore(state)
    jax.tree.map(np.testing.assert_array_equal, next(loader), following)
    loader.close()


def test_all_records_of_a_task_are_read_by_its_rows():
    """A task with 2 of 16 rows reads each of its records once an epoch, as with 16."""
    corpus = text_corpus(*[chr(ord("a") + i) * (LENGTH - 1) for i in range(16)])
    tasks = tuple(Task(n, corpus, ByteVocabulary(), CausalLM()) for n in ("x", "y"))
    job = make_job(source=Mixture(tasks, rows=(14, 2)), batch_size=16, seed=0)
    loader = TrainLoader(job.source, job.batches, seed=0)
    seen = {
        token for _ in range(40) for token in next(loader)["decoder_target_tokens"][14:].flat
    }
    loader.close()
    assert {ord("a") + i + 3 for i in range(16)} <= seen


def test_a_row_chooses_experts_of_its_task_as_the_tasks_own_model_does():
    batch, params = make_batch(MODEL, 8), make_params(MODEL)
    batch["task_ids"] = np.repeat(np.arange(4), 2).astype(np.int32)
    logits_BLV, stats = run_model(MODEL, params, batch, is_training=False)
    expert_BLS = np.asarray(stats.choices[0].expert_BLS)[0]
    is_token_BL = batch["decoder_segment_ids"] > 0
    task_BLS = np.broadcast_to(batch["task_ids"][:, None, None], expert_BLS.shape)
    np.testing.assert_array_equal(expert_BLS[is_token_BL] // 2, task_BLS[is_token_BL])
    source = {"tasks": [{"name": each.name} for each in TASKS]}
    for task in range(4):
        config, own, _ = of_task(MODEL, params, source, TASKS[task].name)
        assert config.switch.num_experts == 2
        assert config.switch.router.kind == "top_k"
        rows = {name: x[2 * task : 2 * task + 2] for name, x in batch.items()}
        want_BLV, _ = run_model(config, own, rows, is_training=False)
        got_BLV = logits_BLV[2 * task : 2 * task + 2]
        np.testing.assert_allclose(got_BLV, want_BLV, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows_of_group", [slow(2), 8])
def test_the_balance_loss_is_that_of_the_tasks_own_models(rows_of_group):
    """In groups of one task their mean, and else that weighted by tokens; gradients too."""
    model = with_switch(MODEL, group_size=rows_of_group * LENGTH)
    batch, params = make_batch(model, 8), make_params(model)
    batch["task_ids"] = np.repeat(np.arange(4), 2).astype(np.int32)
    is_token_BL = batch["decoder_segment_ids"] > 0

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.value_and_grad, argnums=1)
    def run(config, params, batch):
        stats = forward(config, params, batch, is_training=False)[1]
        return stats.balance_loss.mean()

    got, got_grads = run(model, params, batch)
    source = {"tasks": [{"name": each.name} for each in TASKS]}
    want, want_router_DE = 0.0, []
    for task in range(4):
        config, own, _ = of_task(model, params, source, TASKS[task].name)
        rows = slice(2 * task, 2 * task + 2)
        loss, grads = run(config, own, {name: x[rows] for name, x in batch.items()})
        is_alone = rows_of_group == 2
        weight = 0.25 if is_alone else is_token_BL[rows].sum() / is_token_BL.sum()
        want += weight * loss
        want_router_DE.append(weight * router_of(grads))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    want_router_DE = np.concatenate(want_router_DE, axis=1)
    assert np.abs(want_router_DE).max() > 1e-3
    np.testing.assert_allclose(router_of(got_grads), want_router_DE, rtol=1e-4, atol=1e-6)


def router_of(params):
    """The router's weights of the model's one Switch layer."""
    leaves = tree.named_leaves(params).items()
    (w_router_DE,) = (leaf for name, leaf in leaves if name.endswith("w_router_DE"))
    return w_router_DE


@pytest.mark.parametrize(
    ("rows", "parts", "tasks"),
    [
        # SE-MoE, Table 3: 4, 2, 1 and 1 devices; on four the two light tasks share one.
        ((512, 256, 128, 128), 8, [[0]] * 4 + [[1]] * 2 + [[2], [3]]),
        ((512, 256, 128, 128), 4, [[0], [0], [1], [2, 3]]),
        # Figure 6, of 1:1:2: (b) joins the light tasks, (c) divides the heavy one.
        ((1, 1, 2), 2, [[0, 1], [2]]),
        ((1, 1, 2), 4, [[0], [1], [2], [2]]),
    ],
)
def test_even_parts_of_the_ordered_rows_are_the_papers_assignment(rows, parts, tasks):
    assert [list(part) for part in tasks_of_parts(rows, parts)] == tasks


def test_a_device_has_the_experts_of_its_tasks():
    table = place_tasks((512, 256, 128, 128), 8, 4, 4).reshape(4, -1)
    assert [sorted(set(device)) for device in table.tolist()] == [
        [0, 1],
        [0, 1],
        [2, 3],
        [4, 5, 6, 7],
    ]


@pytest.mark.parametrize(
    "spec",
    [
        MeshSpec(data=1, expert=8),
        slow(MeshSpec(data=2, expert=4)),
        slow(MeshSpec(data=1, fsdp=2, expert=4)),
        slow(MeshSpec(data=2, expert=2, model=2)),
    ],
)
def test_raw_gradients_on_a_mesh_are_those_of_one_device(spec):
    job = tasks_job(mesh=spec)
    batch, params = make_batch(MODEL, sum(ROWS)), make_params(MODEL)
    batch["task_ids"] = np.repeat(range(4), ROWS).astype(np.int32)

    def run(params, batch):
        return gradients(MODEL, LOSS, StepConfig(), params, batch, key=None)[:2]

    want = jax.jit(run)(params, batch)
    program = compiled_program(job)
    assert len(program.slot_tables) == 1
    got = raw_gradients(program, batch, seam_of=functools.partial(with_copies, Seam()))[:2]
    assert_close_to_largest(got, want, 5e-6, least=1e-3)


def test_no_token_travels():
    """An accelerator sends two arrays of weights there, and their gradients back."""
    sent = {}
    for name, dispatcher in (("all", "all_to_all"), ("own", "gather")):
        job = tasks_job(with_switch(MODEL, dispatcher=dispatcher), mesh=MeshSpec(1, expert=8))
        program = compiled_program(job)
        seam = with_copies(Seam(), *program.beside) if name == "own" else None
        compute = functools.partial(
            gradients, job.model, LOSS, StepConfig(), key=None, seam=seam
        )
        with program.scope():
            traced = jax.jit(compute).trace(
                program.abstract_state.params, batch_shapes(program)
            )
            text = traced.lower(lowering_platforms=("tpu",)).as_text()
        sent[name] = {
            kind: len(re.findall(rf"{kind}\b", text))
            for kind in ("ragged_all_to_all", "stablehlo.all_to_all")
        }
    assert sent["own"] == {"ragged_all_to_all": 4, "stablehlo.all_to_all": 0}
    assert sent["all"] == {"ragged_all_to_all": 0, "stablehlo.all_to_all": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on one device."""
    run = RunFolder(tmp_path_factory.mktemp("one"))
    train(tasks_job(), run, Events(), devices=jax.devices()[:1])
    return run


def test_a_run_evaluates_each_task_and_loads_one(whole):
    last = lines(whole.validation)[-1]
    assert sorted(last["tasks"]) == ["four", "one", "three", "two"]
    load_E = np.array(last["tasks"]["three"]["routing"]["load"][0])
    assert load_E[4:6].sum() == pytest.approx(1) and load_E.sum() == pytest.approx(1)
    model = switchx.load(whole.path, task="three")
    assert model.fingerprint != switchx.load(whole.path, task="two").fingerprint
    assert model.config.switch.num_experts == 2
    assert model.generate([[102]], max_new_tokens=2)[0]
    with refused("task='five' of <any>divided among the tasks one, two, three, four"):
        switchx.load(whole.path, task="five")
    with refused("the experts of <any>divided among 4 tasks<any>export --task=NAME"):
        DeployPlan(whole.path, None, DeploySettings("cpu"))
    with refused("the experts of this model are divided among 4 tasks<any>task=NAME"):
        switchx.load(whole.path).generate([[102]], max_new_tokens=2)


def test_tasks_have_their_experts_beside_their_rows():
    job = tasks_job()
    here = job_for_devices(job, V5E, jax.devices()[:7])
    assert len(here.devices) == 4
    program = compiled_program(here.job, here.devices)
    assert len(program.slot_tables) == 1 and program.notes == ()
    # One group of several devices' rows: tokens travel.
    wide = tasks_job(with_switch(MODEL, group_size=256))
    here = job_for_devices(wide, V5E, jax.devices()[:4])
    assert compiled_program(here.job, here.devices).slot_tables == ()


def test_experts_are_beside_rows_only_where_groups_are():
    """Otherwise a device routes tokens of the next one's rows, whose experts it has not."""
    used = {True: [], False: []}
    for size in range(4, 140):
        job = tasks_job(with_switch(MODEL, group_size=size))
        mesh = types.SimpleNamespace(shape=MeshSpec(data=1, expert=2).sizes(2))
        rows, parts = job.batch_size, 2
        G, T = layer_groups(job.model.switch, rows, LENGTH)
        token = np.arange(rows * LENGTH)
        is_beside = G % parts == 0 and np.array_equal(
            token // T // (G // parts), token // LENGTH // (rows // parts)
        )
        used[bool(task_tables(job, mesh, job.mesh.rules, 1))].append(is_beside)
    assert used[True] and used[False]
    assert all(used[True]) and not any(used[False])


@pytest.mark.slow
def test_lost_devices_change_no_loss(tmp_path):
    losses_on_fewer(tasks_job(), tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: loader_of(source=TASKS[0]), "a source of 1 tasks with rows=None"),
        (
            lambda: loader_of(batch_size=8),
            "Mixture.rows=(8, 4, 2, 2) are 16 rows, and batch_size=8",
        ),
        (lambda: Mixture(TASKS, rows=(1, 2)), "Mixture.rows=(1, 2) for the tasks"),
        (lambda: Mixture(TASKS, rows=(1, 2, 3, 0)), "Mixture.rows=(1, 2, 3, 0) for"),
        (lambda: Mixture(TASKS, (1.0,) * 4, rows=ROWS), "rows fix how often a task is drawn"),
        (lambda: RouterConfig("task"), "RouterConfig.num_tasks=1 with kind='task'"),
        (lambda: RouterConfig(num_tasks=2), "RouterConfig.num_tasks=2 with kind='top_k'"),
        (
            lambda: dataclasses.replace(SPARSE.switch, num_experts=6, router=ROUTER),
            "SwitchConfig.num_experts=6 does not divide among",
        ),
        (
            lambda: dataclasses.replace(SPARSE.switch, num_replicas=8, router=ROUTER),
            "SwitchConfig.num_replicas=8 with RouterConfig.kind='task'",
        ),
        (
            lambda: RouterConfig("task", num_tasks=2, bias_update_rate=0.1),
            "RouterConfig.bias_update_rate=0.1 with kind='task'",
        ),
    ],
)
def test_refused_configurations(make, message):
    with refused(message):
        make()
