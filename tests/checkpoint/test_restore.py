# SPDX-License-Identifier: Apache-2.0
"""Restoring: parameters alone or all, on any mesh, scanned or unrolled, bit for bit."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from switchx import tree
from switchx.checkpoint import items
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.restore import choose_step, restore_params
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.loader import TrainLoader, merge_states
from switchx.optim.adamw import AdamW
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from switchx.training.program import TrainingProgram
from switchx.training.programs import compiled_program
from switchx.training.resume import write_run_config
from switchx.training.step import StepConfig
from tests.cases import slow
from tests.training.jobs import SPARSE, SWITCH, make_job
from tests.training.train_states import damage, filled_state, shapes


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints 10 (the best), 20 and 30."""
    folder = tmp_path_factory.mktemp("run")
    with Checkpointer(RunFolder(folder), Retention()) as checkpointer:
        for step in (10, 20, 30):
            metrics = {"neg_log_perplexity": -float(step), "routing": {"load": [[0.5]]}}
            checkpointer.save(step, filled_state(step), metrics=metrics)
    return folder


def test_parameters_alone_on_a_mesh_and_by_plain_orbax(run):
    for step, value in ((None, 30), (20, 20), ("best", 10)):
        params = restore_params(run, step)
        assert set(params) == {"embedding_VD", "decoder"}
        assert isinstance(params["embedding_VD"], np.ndarray)
        np.testing.assert_array_equal(
            params["embedding_VD"], np.full((16, 8), value, np.float32)
        )
        assert params["decoder"]["layer_0"]["ffn"]["w_in_DF"].dtype == ml_dtypes.bfloat16
    sharding = jax.NamedSharding(jax.make_mesh((len(jax.devices()),), ("data",)), jax.P("data"))
    params = restore_params(run, target=shapes(filled_state(0).params, sharding))
    assert params["embedding_VD"].sharding == sharding
    np.testing.assert_array_equal(np.asarray(params["embedding_VD"]), np.full((16, 8), 30.0))
    with ocp.StandardCheckpointer() as reader:
        params = reader.restore(run / "checkpoints" / "20" / "params")
    assert float(params["embedding_VD"][3, 3]) == 20


def test_the_best_is_by_the_metric_of_the_newest(tmp_path):
    """A run may go on with another one, whose numbers are of another size."""
    run, numbers = RunFolder(tmp_path / "run"), ((100, 30, -3), (200, 20, -2.5), (300, 10, -2))
    for name, steps in (("bleu", numbers[:2]), ("neg_log_perplexity", numbers[2:])):
        with Checkpointer(run, Retention(keep_last=9, best_metric=name)) as checkpointer:
            for step, bleu, likelihood in steps:
                metrics = {"bleu": bleu, "neg_log_perplexity": likelihood}
                checkpointer.save(step, filled_state(step), metrics=metrics)
    assert choose_step(run, "best") == 300
    cost = Retention(keep_last=9, best_metric="bleu", best_mode="min")
    with Checkpointer(run, cost) as checkpointer:
        checkpointer.save(400, filled_state(400), metrics={"bleu": 15})
    assert choose_step(run, "best") == 300
    with Checkpointer(run, Retention(keep_last=9, best_metric="bleu")) as checkpointer:
        checkpointer.save(500, filled_state(500), metrics={"bleu": 0})
    assert choose_step(run, "best") == 100


def test_damaged_checkpoints_are_skipped_by_readers_and_stay_where_they_are(tmp_path, caplog):
    with Checkpointer(RunFolder(tmp_path), Retention()) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, filled_state(step), metrics={"neg_log_perplexity": step})
    folder = tmp_path / "checkpoints"
    damage(folder / "30" / "manifest.json")
    assert restore_params(tmp_path)["embedding_VD"][0, 0] == 20
    assert f"checkpoint {folder / '30'} is skipped: its manifest.json is damaged" in caplog.text
    assert restore_params(tmp_path, "best")["embedding_VD"][0, 0] == 20
    found = (
        "found checkpoints 30, 20, 10; make one with `switchx train --gin_file=... --model_dir="
    )
    with pytest.raises(ValueError, match=f"no complete checkpoint of step 30 in .*: {found}"):
        restore_params(tmp_path, 30)
    assert sorted(path.name for path in folder.iterdir()) == ["10", "20", "30"]


@pytest.mark.parametrize("name", ["_described", "_require_files_unchanged"])
def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_called_damaged(
    tmp_path, monkeypatch, name
):
    with Checkpointer(RunFolder(tmp_path), Retention()) as checkpointer:
        checkpointer.save(10, filled_state(10))
    read = getattr(items, name)

    def too_late(path, *arguments):
        path.rename(tmp_path / "expired")
        return read(path, *arguments)

    monkeypatch.setattr(items, name, too_late)
    with pytest.raises(ValueError, match="checkpoint .*10 was deleted while it was read"):
        restore_params(tmp_path)


def test_folder_without_a_checkpoint_says_what_was_found(tmp_path):
    with pytest.raises(
        ValueError, match="no complete checkpoint in .*/no: nothing is there; make"
    ):
        restore_params(tmp_path / "no")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(
        ValueError, match="no complete checkpoint with a score in .*: found notes.txt"
    ):
        restore_params(tmp_path, "best")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_all_leaves_that_do_not_fit_are_listed_in_one_error(run):
    target = shapes(filled_state(0, optax.sgd(1e-3, momentum=0.9), size=32, dtype=jnp.bfloat16))
    target.params["w_logits_DV"] = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    del target.params["decoder"]
    with (
        Checkpointer(RunFolder(run), Retention()) as checkpointer,
        pytest.raises(ValueError) as caught,
    ):
        checkpointer.restore(target)
    text = str(caught.value)
    assert re.search(r"checkpoint .*/30 does not fit; 10 of 12 arrays differ:", text), text
    for line in (
        "params/decoder/layer_0/ffn/w_in_DF: expected nothing, got bfloat16[8, 16]",
        "params/embedding_VD: expected bfloat16[32, 8], got float32[16, 8]",
        "params/w_logits_DV: expected float32[8, 16], got nothing",
        "train_state/opt_state/0/trace/embedding_VD: expected bfloat16[32, 8], got nothing",
        "train_state/opt_state/0/count: expected nothing, got int32[]",
    ):
        assert f"\n  {line}\n" in text, text
    assert text.endswith("use the configuration that it was made with, or another source")


STEP = 3
# 4 blocks, every other one sparse: a scan over 2 periods of 2.
MODEL = dataclasses.replace(
    SPARSE, num_decoder_layers=4, switch=dataclasses.replace(SWITCH, num_experts=8)
)
PIPELINE_MOE = Rules(expert_params=(("E", ("model",)), ("D", ("fsdp",))))
MESHES = {
    "data": MeshSpec(),
    "fsdp": MeshSpec(fsdp=8),
    "expert": MeshSpec(data=2, expert=4),
    "model": MeshSpec(data=4, model=2),
    "hierarchical": MeshSpec(data=1, node=2, expert=4),
    "sliced": MeshSpec(data=4, model=2, rules=PIPELINE_MOE),
    "all": MeshSpec(data=1, fsdp=2, expert=2, model=2),
    "one": MeshSpec(data=1),
    "pipe": MeshSpec(pipe=2, data=2, expert=2),
}


def job_on(mesh: str, *, is_scanned: bool, optimizer=None):
    model = dataclasses.replace(MODEL, scan_layers=is_scanned)
    changes = {} if optimizer is None else {"optimizer": optimizer}
    if mesh == "pipe":  # a microbatch a stage
        changes["step"] = StepConfig(num_microbatches=2)
    return make_job(model, mesh=MESHES[mesh], **changes)


def program_of(job) -> TrainingProgram:
    return compiled_program(job, jax.devices()[:1] if job.mesh == MESHES["one"] else None)


def filled(program: TrainingProgram):
    """A state on the program's mesh, each number its own: as NumPy, and as it is there."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return np.full(leaf.shape, STEP, leaf.dtype)
        return rng.normal(size=leaf.shape).astype(leaf.dtype)

    values = jax.tree.map(draw, program.abstract_state)
    placed = jax.tree.map(
        lambda value, sharding: jax.device_put(jnp.array(value), sharding),
        values,
        program.shardings,
    )
    return values, placed


def loader_at(job, step: int) -> TrainLoader:
    loader = TrainLoader(job.source, job.batches, seed=job.seed)
    for _ in range(step):
        next(loader)
    return loader


def save_job(run: RunFolder, job):
    """A checkpoint of the job's mesh; its values, and the batch that comes next."""
    write_run_config(run.create(), job)
    program = program_of(job)
    values, placed = filled(program)
    with contextlib.closing(loader_at(job, STEP)) as loader:
        with program.scope(), Checkpointer(run, Retention()) as checkpointer:
            checkpointer.save(STEP, placed, loader.state(), {"neg_log_perplexity": -1.0})
        return values, next(loader)


def assert_restores(run: RunFolder, job, values, batch) -> None:
    """Bit for bit, each leaf on the mesh of the job as its program wants it."""
    program = program_of(job)
    with program.scope(), Checkpointer(run, Retention()) as checkpointer:
        state, data_states = checkpointer.restore(program.abstract_state, STEP, model=job.model)
    wanted, shardings = tree.named_leaves(values), tree.named_leaves(program.shardings)
    got = tree.named_leaves(state)
    assert got.keys() == wanted.keys()
    for name, leaf in got.items():
        assert leaf.sharding.is_equivalent_to(shardings[name], leaf.ndim), name
        assert leaf.dtype == wanted[name].dtype
        assert np.asarray(leaf).tobytes() == wanted[name].tobytes(), name
    with contextlib.closing(loader_at(job, 0)) as loader:
        loader.restore(merge_states(data_states))
        for name, rows in next(loader).items():
            np.testing.assert_array_equal(rows, batch[name])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, AdamW()], ids=["adafactor", "adamw"])
@pytest.mark.parametrize("is_scanned", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("saved", MESHES)
def test_every_mesh_to_every_mesh(tmp_path, saved, is_scanned, optimizer):
    if saved == "pipe" and not is_scanned:
        pytest.skip("a pipeline's layers are scanned")
    run = RunFolder(tmp_path)
    values, batch = save_job(run, job_on(saved, is_scanned=is_scanned, optimizer=optimizer))
    for restored in MESHES:
        if restored != "pipe" or is_scanned:
            job = job_on(restored, is_scanned=is_scanned, optimizer=optimizer)
            assert_restores(run, job, values, batch)


def test_a_matrix_is_split_where_its_mesh_says():
    """Without which restoring would have nothing to do."""
    specs = set()
    for mesh in MESHES:
        shardings = tree.named_leaves(program_of(job_on(mesh, is_scanned=True)).shardings)
        (name,) = [
            each for each in shardings if each.startswith("params") and "w_in_EDF" in each
        ]
        specs.add(str(shardings[name].spec))
    assert len(specs) >= 6


def in_the_other_layout(values, like):
    """The numbers of `values`, as `like` has them: layer k is repeat k // 2 of layer k % 2."""
    named, num_repeats = tree.named_leaves(values), MODEL.num_decoder_layers // MODEL.period

    def number(name, leaf):
        layer = re.search(r"blocks/layer_(\d+)/", name)
        if layer is None:
            return named[name]
        repeat, k = divmod(int(layer[1]), MODEL.period)

        def of(index):
            return named[name.replace(layer[0], f"blocks/layer_{index}/")]

        if leaf.ndim == of(k).ndim - 1:  # was scanned
            return of(k)[repeat]
        return np.stack([of(i * MODEL.period + k) for i in range(num_repeats)])

    return tree.map_named(number, like)


@pytest.mark.parametrize(
    ("optimizer", "saved", "is_scanned", "restored"),
    [
        (None, "all", True, "model"),
        slow(AdamW(), "all", True, "data"),
        slow(None, "data", False, "pipe"),
        slow(AdamW(), "hierarchical", False, "pipe"),
    ],
)
def test_layouts_of_layers(tmp_path, optimizer, saved, is_scanned, restored):
    """Scanned to unrolled and back, onto another mesh, all that the optimizer keeps too."""
    run = RunFolder(tmp_path)
    values, batch = save_job(run, job_on(saved, is_scanned=is_scanned, optimizer=optimizer))
    job = job_on(restored, is_scanned=not is_scanned, optimizer=optimizer)
    program = program_of(job)
    expected = in_the_other_layout(values, program.abstract_state)
    assert_restores(run, job, expected, batch)
    target = program.abstract_state.params
    params = restore_params(run.root, target=target, model=job.model)
    for (name, leaf), sharding in zip(
        tree.named_leaves(params).items(),
        jax.tree.leaves(program.shardings.params),
        strict=True,
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), name
    jax.tree.map(np.testing.assert_array_equal, params, expected.params)
    if job.model.scan_layers:  # on the host, as experts are read for a disk
        on_host = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_host), target
        )
        with program.scope():
            params = restore_params(run.root, target=target, model=job.model)
        jax.tree.map(np.testing.assert_array_equal, params, expected.params)
