# SPDX-License-Identifier: Apache-2.0
"""`switchx.load`: the model that was saved, or why there is none. Trained: integration."""

import dataclasses
import json

import numpy as np
import pytest

import switchx
from switchx import tree
from switchx.training.checkpoints import Checkpointer
from switchx.training.retention import Retention
from switchx.training.run_config import write_run_config
from switchx.training.run_folder import RunFolder
from switchx.training.state import init_state
from tests.data.refusals import refused
from tests.training.jobs import SPARSE, make_job, make_params


@pytest.fixture
def run(tmp_path):
    """A run of `SPARSE` with checkpoints 5, the best, and 9."""
    folder, job = RunFolder(tmp_path), make_job()
    write_run_config(folder, job)
    optimizer = job.optimizer.build(job.schedule)
    with Checkpointer(folder, Retention()) as checkpointer:
        for step, score in ((5, -1.0), (9, -2.0)):
            params = make_params(SPARSE, seed=step)
            state = init_state(SPARSE, optimizer, seed=0, params=params)
            checkpointer.save(step, state, metrics={"neg_log_perplexity": score})
    return folder


def test_the_newest_a_certain_and_the_best_checkpoint(run):
    for step, want in ((None, 9), (9, 9), (5, 5), ("best", 5)):
        model = switchx.load(run.path, step)
        assert model.step == want
        params = tree.named_leaves(make_params(SPARSE, seed=want))
        got = tree.named_leaves(model.params)
        assert got.keys() == params.keys()
        for name, leaf in params.items():
            np.testing.assert_array_equal(got[name], leaf, err_msg=name)


def test_a_model_knows_its_configuration_size_and_vocabulary(run):
    model = switchx.load(str(run.path))
    assert model.config == SPARSE
    assert model.num_params == sum(
        leaf.size for leaf in tree.named_leaves(model.params).values()
    )
    assert model.vocabulary.decode(model.vocabulary.encode("gate")) == "gate"
    assert repr(model) == f"Model(config={SPARSE!r}, step=9)"  # not all its numbers


def test_a_folder_that_is_no_run(tmp_path):
    with refused(
        f"{tmp_path / 'no'} is not a run folder, its config.json cannot be read ([Errno 2] No "
        "such file or directory: <any>): nothing is there; give the model_dir of a run"
    ):
        switchx.load(tmp_path / "no")


def test_a_run_without_a_checkpoint_or_without_this_one(run, tmp_path):
    fresh = RunFolder(tmp_path / "fresh").create()
    write_run_config(fresh, make_job())
    with refused(
        f"no complete checkpoint in {fresh.root}: found config.json, vocabulary.json; make one "
        f"with `switchx train --gin_file=... --model_dir={fresh.path}`, or give another folder"
    ):
        switchx.load(fresh.path)
    with refused(
        f"no complete checkpoint of step 7 in {run.root}: found checkpoints 9, 5; make one "
        f"with `switchx train --gin_file=... --model_dir={run.path}`, or give another folder"
    ):
        switchx.load(run.path, step=7)


def test_parameters_that_are_not_those_of_the_configuration_are_all_named(run):
    config = json.loads(run.config.read_text())
    config["model"] |= {"d_ff": 32, "tie_embeddings": False}
    run.config.write_text(json.dumps(config))
    with pytest.raises(ValueError) as caught:
        switchx.load(run.path)
    text = str(caught.value)
    block = "params/decoder/blocks"
    for line in (
        f"{block}/layer_0/ffn/w_in_DF: expected float32[16, 32], got float32[16, 24]",
        f"{block}/layer_1/ffn/experts/w_out_EFD: expected float32[8, 32, 16], got "
        "float32[8, 24, 16]",
        "params/embedding/w_logits_DV: expected float32[16, 384], got nothing",
    ):
        assert line in text
    assert "5 of 21 arrays differ" in text


def test_a_vocabulary_that_is_gone(run):
    (run.root / "vocabulary.json").unlink()
    with pytest.raises(ValueError, match=f"no vocabulary can be read from {run.root}"):
        switchx.load(run.path)


def test_a_model_cannot_be_changed(run):
    with pytest.raises(dataclasses.FrozenInstanceError):
        switchx.load(run.path).step = 1
