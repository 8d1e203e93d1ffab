# SPDX-License-Identifier: Apache-2.0
"""Copies in whole steps and runs: the same gradients, tables by load, resumed to the bit."""

import dataclasses

import jax
import numpy as np
import pytest

from switchx.checkpoint.run_folder import RunFolder
from switchx.models.params import abstract_params
from switchx.moe.copy_placement import place_copies
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.training.expert_copies_program import with_copies
from switchx.training.loop import train
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.programs import compiled_program
from switchx.training.router_bias import layers_of
from switchx.training.step import StepConfig, gradients, seam_of
from tests.cases import slow
from tests.compare import assert_close_to_largest
from tests.data.refusals import refused
from tests.training.jobs import (
    ENCODER_DECODER,
    LOSS,
    SPARSE,
    Events,
    make_batch,
    make_job,
    make_params,
    with_switch,
)
from tests.training.saved_runs import losses_of

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

# Nothing is random: microbatches ask for a key.
KEY = jax.random.key(0)
DEEP = dataclasses.replace(
    ENCODER_DECODER, num_encoder_layers=4, num_decoder_layers=4, scan_layers=True, remat="full"
)
DECODER = dataclasses.replace(SPARSE, num_decoder_layers=4, scan_layers=True, remat="full")


def with_expert_copies(config, num_replicas: int, **changes):
    return with_switch(config, num_replicas=num_replicas, **changes)


def gradients_on(spec: MeshSpec | None, config, table_NR=None, step=StepConfig()):
    batch, params = make_batch(config, 8), make_params(config)

    @jax.jit
    def run(params, batch):
        seam = None if table_NR is None else with_copies(seam_of(step), table_NR)
        grads, value, _, stats = gradients(
            config, LOSS, step, params, batch, key=KEY, seam=seam
        )
        return grads, value, stats.load_E

    if spec is None:
        return run(params, batch)
    with use_mesh(spec.build(), spec.rules):
        return run(params, batch)


@pytest.mark.parametrize(
    ("spec", "dispatcher", "model"),
    [
        (None, "gather", DECODER),
        slow(None, "gather", DEEP),
        slow(MeshSpec(data=2, expert=4), "ragged_all_to_all", DEEP),
        slow(MeshSpec(data=2, expert=4), "gather", DEEP),
        slow(MeshSpec(fsdp=2, expert=4), "all_to_all", DEEP),
    ],
)
def test_raw_gradients_of_a_model_are_those_without_copies(spec, dispatcher, model):
    """Stacked layers, each with a table of its own."""
    rng = np.random.default_rng(0)
    load_NE = rng.zipf(1.3, size=(model.num_sparse_layers, 8)).clip(max=1000)
    table_NR = place_copies(load_NE, 4, 4)
    assert len({tuple(row) for row in table_NR.tolist()}) == len(table_NR)
    want = gradients_on(None, model)
    config, step = with_expert_copies(model, 4, dispatcher=dispatcher), StepConfig(2)
    got = gradients_on(spec, config, table_NR, step if spec is None else StepConfig())
    assert_close_to_largest(got, want, 1e-5, least=1e-3)


def test_each_layer_has_its_own_row_of_the_table():
    rows = layers_of(abstract_params(DEEP), "w_in_EDF")
    assert rows == {
        "encoder/blocks/layer_1/ffn/experts/w_in_EDF": [0, 1],
        "decoder/blocks/layer_1/ffn/experts/w_in_EDF": [2, 3],
    }


PLAIN = make_job(SPARSE, train_steps=4, eval_every=2, checkpoint_every=3)
COPIED = dataclasses.replace(
    PLAIN, model=with_expert_copies(SPARSE, 4, dispatcher="gather"), mesh=MeshSpec(expert=4)
)


@pytest.mark.slow  # two runs
def test_a_run_with_copies_loses_as_one_without_and_resumes_to_the_bit(tmp_path):
    """Tables are chosen at step 0 and at every evaluation; no step is compiled again."""
    plain, job = PLAIN, COPIED
    whole, parts, other = (RunFolder(tmp_path / name) for name in ("whole", "parts", "other"))
    train(job, whole, Events())
    train(dataclasses.replace(job, train_steps=3), parts, Events())
    train(job, parts, Events())
    assert losses_of(parts) == losses_of(whole)
    train(plain, other, Events(), devices=jax.devices()[:1])
    assert losses_of(whole) == pytest.approx(losses_of(other), rel=1e-6)


@pytest.mark.slow
def test_the_number_of_copies_may_change_on_resume(tmp_path):
    run, model = RunFolder(tmp_path), with_expert_copies(SPARSE, 8, dispatcher="gather")
    train(PLAIN, run, Events(), devices=jax.devices()[:1])
    job = dataclasses.replace(COPIED, model=model, train_steps=5)
    assert train(job, run, Events()).step == 5


def test_tables_follow_the_load():
    program = compiled_program(make_job(with_expert_copies(SPARSE, 4), mesh=MeshSpec(expert=4)))
    before, compiled = program.slot_tables[0], program.train_step
    assert np.bincount(before[0], minlength=8).tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
    program.balance([[1, 1, 1, 1, 1, 1, 1, 30]])
    assert np.bincount(program.slot_tables[0][0], minlength=8).tolist() == [1] * 7 + [5]
    assert program.train_step is compiled and program.slot_tables[0].shape == before.shape


@pytest.mark.parametrize(
    ("copies", "changes", "message"),
    [
        (3, dict(mesh=MeshSpec(expert=4)), "11 slots do not divide"),
        (
            4,
            dict(step=StepConfig(bucket_bytes=1024), mesh=MeshSpec(fsdp=2)),
            "with StepConfig.bucket_bytes",
        ),
        (4, dict(storage=StorageSpec("disk")), "with StorageSpec.experts='disk'"),
        (4, dict(storage=StorageSpec("host")), "with StorageSpec.experts='host'"),
        (4, dict(mesh=MeshSpec(data=4, pipe=2)), "with mesh axis 'pipe' of size 2"),
    ],
)
def test_refusals(copies, changes, message):
    job = make_job(with_expert_copies(DECODER, copies), **changes)
    with refused(message):
        compiled_program(job)
    with refused("SwitchConfig.num_replicas=4 with sublayers='attention'"):
        with_expert_copies(SPARSE, 4, sublayers="attention")
