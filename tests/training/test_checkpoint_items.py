# SPDX-License-Identifier: Apache-2.0
"""A training state as nested dictionaries by name, and back."""

import jax
import numpy as np
import pytest

from switchx.checkpoint import items as checkpoint_items
from switchx.tree import named_leaves
from tests.training.train_states import filled_state, raw


def test_parameters_stand_apart_and_the_state_comes_back():
    state = filled_state(3)
    items = checkpoint_items.to_items(state)
    assert items.keys() == {"params", "train_state"}
    assert named_leaves(items["params"]).keys() == named_leaves(state.params).keys()
    assert "step" in items["train_state"]
    again = checkpoint_items.from_items(items, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(raw(got), raw(want))


@pytest.mark.parametrize("data_state", [None, b"\x00\xff", {"step": 3, "rows": [1, 2]}])
def test_a_data_state_survives_json(data_state, tmp_path):
    import json

    encoded = json.loads(json.dumps(checkpoint_items.encode_data_state(data_state)))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / checkpoint_items.data_file()).write_text(json.dumps(encoded))
    assert checkpoint_items.read_data_states(tmp_path) == [data_state]


def test_data_states_of_all_processes_come_back_or_none(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for index in (0, 10, *range(2, 10)):
        (folder / f"process_{index}_of_11.json").write_text(f'{{"json": {index}}}')
    with pytest.raises(ValueError, match="process_9_of_11.json, not one of each process that"):
        checkpoint_items.read_data_states(tmp_path)
    (folder / "process_1_of_11.json").write_text('{"json": 1}')
    assert checkpoint_items.read_data_states(tmp_path) == list(range(11))
    with pytest.raises(ValueError, match="has data iterator states none, not one of each"):
        checkpoint_items.read_data_states(folder)
