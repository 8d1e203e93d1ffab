# SPDX-License-Identifier: Apache-2.0
"""Restoring: parameters alone, by name, and errors that list all that does not fit."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.restore import restore_by_name, restore_params
from switchx.checkpoint.run_folder import RunFolder
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


def test_parameters_alone_without_knowing_the_optimizer(run):
    for step, value in ((None, 30), (20, 20), ("best", 10)):
        params = restore_params(run, step)
        assert set(params) == {"embedding_VD", "decoder"}
        assert isinstance(params["embedding_VD"], np.ndarray)
        np.testing.assert_array_equal(
            params["embedding_VD"], np.full((16, 8), value, np.float32)
        )
        assert params["decoder"]["layer_0"]["ffn"]["w_in_DF"].dtype == ml_dtypes.bfloat16


def test_parameters_on_a_mesh(run):
    sharding = jax.NamedSharding(jax.make_mesh((len(jax.devices()),), ("data",)), jax.P("data"))
    params = restore_params(run, target=shapes(filled_state(0).params, sharding))
    assert params["embedding_VD"].sharding == sharding
    np.testing.assert_array_equal(np.asarray(params["embedding_VD"]), np.full((16, 8), 30.0))


def test_plain_orbax_reads_the_parameters(run):
    with ocp.StandardCheckpointer() as reader:
        params = reader.restore(run / "checkpoints" / "20" / "params")
    assert float(params["embedding_VD"][3, 3]) == 20


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


def test_restore_by_name_copies_into_the_target_s_places(run):
    source = restore_params(run, 20)
    params, summary = restore_by_name(filled_state(0).params, source)
    assert summary == "restored all 2 parameter arrays by name, 768 bytes"
    source["embedding_VD"][:] = -1
    np.testing.assert_array_equal(np.asarray(params["embedding_VD"]), np.full((16, 8), 20.0))


def test_restore_by_name_guesses_nothing():
    target = {"a": {"w_DF": jnp.zeros((2, 3))}, "bias_D": jnp.zeros(2)}
    source = {"a": {"w_DF": np.zeros((3, 2), np.float32)}, "scale_D": np.zeros(2, np.float32)}
    message = (
        "the source of the parameters does not fit; 3 of 3 arrays differ:\n"
        "  a/w_DF: expected float32[2, 3], got float32[3, 2]\n"
        "  bias_D: expected float32[2], got nothing\n"
        "  scale_D: expected nothing, got float32[2]\n"
        "use the configuration that it was made with, or another source"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        restore_by_name(target, source)
