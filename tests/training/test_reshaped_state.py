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
from switchx.models.upcycle import multiply_experts, upcycle, upcycled_config
from switchx.optim.adafactor import Adafactor
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import Constant
from switchx.training.reshaped_state import reshaped_state
from switchx.training.step import init_state
from tests.cases import slow
from tests.training.jobs import DENSE, SPARSE, make_params

FFN = "decoder/blocks/layer_1/ffn/"
ADAFACTOR = Adafactor(min_dim_size_to_factor=4).build(Constant(1e-2))
ADAMW = AdamW().build(Constant(1e-2))
SCANNED = dataclasses.replace(SPARSE, num_decoder_layers=4, scan_layers=True)


def saved(path, config, optimizer):
    """A checkpoint with random moments, and these by name."""
    rng = np.random.default_rng(0)
    state = init_state(config, optimizer, seed=0, params=make_params(config))
    moments = jax.tree.map(
        lambda x: jnp.asarray(rng.random(x.shape) + 1).astype(x.dtype), state.opt_state
    )
    with Checkpointer(RunFolder(path), Retention()) as checkpointer:
        checkpointer.save(3, dataclasses.replace(state, opt_state=moments))
    return RunFolder(path).checkpoints / "3", tree.named_leaves({"opt_state": moments})


def reshaped(how: str, config):
    """The model, and the experts before that the last layer's are made of."""
    if how == "dense":
        return upcycle(upcycled_config(config, 4), config, make_params(config)), [0] * 4
    origin = [*range(SPARSE.switch.num_experts)] * 2
    return multiply_experts(config, make_params(config), len(origin), "counts_merged"), origin


OUT = "experts/w_out_EFD/v_row_EF"


@pytest.mark.parametrize(
    ("how", "config", "optimizer", "after", "before", "axis"),
    [
        ("more", SPARSE, ADAFACTOR, "w_router_DE/v_col_E", "w_router_DE/v_col_E", 0),
        slow("more", SPARSE, ADAFACTOR, OUT, OUT, 0),
        slow("more", SPARSE, ADAMW, "w_router_DE", "w_router_DE", 1),
        slow("more", SCANNED, ADAMW, "experts/w_in_EDF", "experts/w_in_EDF", 0),
        slow("dense", DENSE, ADAFACTOR, OUT, "w_out_FD/v_row_F", 0),
    ],
)
def test_moments_are_those_of_the_experts_before(
    how, config, optimizer, after, before, axis, tmp_path
):
    path, old = saved(tmp_path, config, optimizer)
    found, origin = reshaped(how, config)
    state, said = reshaped_state(path, optimizer, config, found)
    new = tree.named_leaves(state)
    wanted = tree.named_leaves({"opt_state": optimizer.init(found.params)})
    assert {"step", "key_data", *wanted} <= new.keys()
    assert all(new[name].shape == leaf.shape for name, leaf in wanted.items())
    begin = f"opt_state/{'statistics' if optimizer is ADAFACTOR else '0/nu'}/{FFN}"
    expected = np.asarray(old[begin + before])
    expected = expected[0] if config.scan_layers else expected
    expected = np.take(expected[None] if how == "dense" else expected, origin, axis)
    np.testing.assert_array_equal(new[begin + after], expected)
    kind = "w_router_DE" if how == "dense" else "router_log_count_E"
    begin = f"the optimizer's state goes along, new for {kind} (at the old count, so that"
    assert said.startswith(begin)
    others = [name for name in old if "blocks" not in name]
    assert others and all(np.array_equal(new[name], old[name]) for name in others)


def test_the_state_of_another_optimizer_stays_behind(tmp_path):
    path, _ = saved(tmp_path, SPARSE, ADAMW)
    state, said = reshaped_state(path, ADAFACTOR, SPARSE, reshaped("more", SPARSE)[0])
    assert state is None and said.endswith("another optimizer, and stays behind")
