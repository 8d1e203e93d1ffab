# SPDX-License-Identifier: Apache-2.0
"""The optimizer's state of reshaped models: whose moments experts go on with.

Dims: E experts
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.run_folder import RunFolder
from switchx.models.reshape import LayerSample, drop_experts, to_dense
from switchx.models.upcycle import multiply_experts, upcycle, upcycled_config
from switchx.optim.adafactor import Adafactor
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import Constant
from switchx.training.reshaped_state import reshaped_state
from switchx.training.step import init_state
from tests.cases import slow
from tests.training.jobs import DENSE, SPARSE, make_params

E = SPARSE.switch.num_experts
FFN = "decoder/blocks/layer_1/ffn/"
OPTIMIZERS = {
    "adafactor": Adafactor(min_dim_size_to_factor=4).build(Constant(1e-2)),
    "adamw": AdamW().build(Constant(1e-2)),
}
BEFORE = {
    "drop": SPARSE,
    "more": SPARSE,
    "dense": DENSE,
    "to_dense": SPARSE,
}


# Ends of names after and before, and the dimension of the experts, None where it is not there.
KEPT = {
    "adafactor": [
        ("experts/w_in_EDF/v_row_ED", "experts/w_in_EDF/v_row_ED", 0),
        ("experts/w_out_EFD/v_col_ED", "experts/w_out_EFD/v_col_ED", 0),
        ("w_router_DE/v_row_D", "w_router_DE/v_row_D", None),
        ("w_router_DE/v_col_E", "w_router_DE/v_col_E", 0),
    ],
    "adamw": [("mu/X/experts/w_in_EDF", "mu/X/experts/w_in_EDF", 0),
              ("nu/X/w_router_DE", "nu/X/w_router_DE", 1)],
    "adafactor, dense": [("experts/w_out_EFD/v_row_EF", "w_out_FD/v_row_F", 0)],
    "adamw, dense": [("nu/X/experts/w_in_EDF", "nu/X/w_in_DF", 0)],
    "adafactor, to_dense": [("w_out_FD/v_row_F", "experts/w_out_EFD/v_row_EF", 0)],
    "adamw, to_dense": [("nu/X/w_in_DF", "nu/X/experts/w_in_EDF", 0)],
}  # fmt: skip


def random_run(path, config, transformation):
    """Checkpoint 3 of a run, whose optimizer's moments are random; its path and these."""
    rng, params = np.random.default_rng(0), make_params(config)
    state = init_state(config, transformation, seed=0, params=params)
    moments = jax.tree.map(
        lambda x: jnp.asarray(rng.random(x.shape) + 1).astype(x.dtype), state.opt_state
    )
    run = RunFolder(path)
    with Checkpointer(run, Retention()) as checkpointer:
        checkpointer.save(3, dataclasses.replace(state, opt_state=moments))
    return run.checkpoints / "3", tree.named_leaves({"opt_state": moments})


def reshaped(how: str, config):
    """The model, and the experts before that the last layer's are made of."""
    params = make_params(config)
    samples = [
        LayerSample(np.arange(E), np.ones((3, config.d_model), np.float32))
        for _ in config.sparse_layer_names
    ]
    if how == "drop":
        return drop_experts(config, params, samples, 4), [4, 5, 6, 7]
    if how == "dense":
        return upcycle(upcycled_config(config, 4), config, params), [0] * 4
    if how == "to_dense":
        return to_dense(config, params, samples, is_merged=False), [7]
    return multiply_experts(config, params, 2 * E, "counts_merged"), [*range(E), *range(E)]


def ending(leaves: dict, end: str) -> np.ndarray:
    """The array of the last layer whose name ends so; X is the layer's path."""
    end = end.replace("X/", FFN) if "X" in end else FFN + end
    (name,) = (name for name in leaves if name.endswith(end))
    return np.asarray(leaves[name])


@pytest.mark.parametrize(
    ("how", "optimizer"),
    [
        ("more", "adafactor"),
        *(slow(how, "adafactor") for how in ("drop", "dense", "to_dense")),
        *(slow(how, "adamw") for how in ("more", "dense", "to_dense")),
    ],
)
def test_moments_are_those_of_the_experts_before(how, optimizer, tmp_path):
    config, transformation = BEFORE[how], OPTIMIZERS[optimizer]
    path, old = random_run(tmp_path, config, transformation)
    found, origin = reshaped(how, config)
    state, said = reshaped_state(path, transformation, config, found)
    assert said.startswith("the optimizer's state goes along")
    new = tree.named_leaves(state)
    wanted = tree.named_leaves({"opt_state": transformation.init(found.params)})
    assert {n: np.shape(x) for n, x in new.items() if n.startswith("opt_state")} == {
        n: x.shape for n, x in wanted.items()
    }
    for after, before, axis in KEPT.get(f"{optimizer}, {how}", KEPT[optimizer]):
        expected = ending(old, before)
        if how == "dense":
            expected = np.stack([expected] * 4)
        elif how == "to_dense":
            expected = expected[7]
        elif axis is not None:
            expected = np.take(expected, origin, axis)
        np.testing.assert_array_equal(ending(new, after), expected, err_msg=after)
    if how == "dense":
        assert all(not np.any(x) for name, x in new.items() if "w_router_DE" in name)
        assert said.endswith("new for w_router_DE")
    others = [n for n in old if "blocks" not in n or "layer_0" in n]
    assert others and all(np.array_equal(new[n], old[n]) for n in others)
    assert int(new["step"]) == 0 and {"key_data", "skipped"} <= new.keys()


@pytest.mark.slow
def test_scanned_layers_are_unrolled(tmp_path):
    config = dataclasses.replace(SPARSE, num_decoder_layers=4, scan_layers=True)
    path, old = random_run(tmp_path, config, OPTIMIZERS["adamw"])
    found, origin = reshaped("more", config)
    new = tree.named_leaves(reshaped_state(path, OPTIMIZERS["adamw"], config, found)[0])
    end = "ffn/experts/w_in_EDF"
    for layer, repeat in ((1, 0), (3, 1)):
        expected = old[f"opt_state/0/mu/decoder/blocks/layer_1/{end}"][repeat]
        found = new[f"opt_state/0/mu/decoder/blocks/layer_{layer}/{end}"]
        np.testing.assert_array_equal(found, np.take(expected, origin, 0))


def test_the_state_of_another_optimizer_stays_behind(tmp_path):
    path, _ = random_run(tmp_path, SPARSE, OPTIMIZERS["adamw"])
    found, _ = reshaped("more", SPARSE)
    state, said = reshaped_state(path, OPTIMIZERS["adafactor"], SPARSE, found)
    assert state is None and said.endswith("another optimizer, and stays behind")
