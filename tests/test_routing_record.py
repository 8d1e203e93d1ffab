# SPDX-License-Identifier: Apache-2.0
"""Records of routing against loops over tokens; bad files are named."""

import dataclasses
import functools
import json
import re

import jax
import numpy as np
import pyarrow.parquet
import pytest

from switchx.analysis.atlas import Labels, read_layers
from switchx.analysis.drops import prediction_errors
from switchx.models.config import RouterConfig, SwitchConfig
from switchx.models.params import forward
from switchx.routing_record import KEY, RecordInfo, RecordWriter, open_record, recorded
from tests.data.refusals import refused
from tests.processes import ROOT
from tests.training.jobs import ENCODER_DECODER, make_batch, make_params

ROUTERS = {
    "top 1": RouterConfig(),
    "top 2 by gate": RouterConfig(num_selected=2, gate="normalized", priority="gate"),
    "reroute": RouterConfig(overflow="reroute", max_rounds=3),
    "bias": RouterConfig(num_selected=2, bias_update_rate=0.001),
}


def model_of(router: RouterConfig):
    switch = SwitchConfig(8, every=2, eval_capacity_factor=1.0, group_size=32, router=router)
    return dataclasses.replace(ENCODER_DECODER, switch=switch)


@functools.partial(jax.jit, static_argnums=0)
def statistics(model, params, batch):
    return forward(model, params, batch, is_training=False)[1]


@pytest.fixture(scope="module", params=ROUTERS)
def written(request, tmp_path_factory):
    """A model, its batch, the statistics of the forward pass, and the record of two batches."""
    model = model_of(ROUTERS[request.param])
    batch, params = make_batch(model, 8), make_params(model)
    stats = statistics(model, params, batch)
    path = tmp_path_factory.mktemp("record") / "record.parquet"
    info = RecordInfo(model.switch, model.sparse_layers_by_stack, 7, "eval", "model", "words")
    with RecordWriter(path, info) as writer:
        for number in range(2):
            writer.add(number, jax.device_get(recorded(model, stats, batch)), 8)
    return model, batch, stats, path


def test_a_record_has_what_the_layers_did(written):
    model, batch, stats, path = written
    record = open_record(path)
    assert record.info == RecordInfo(
        model.switch, model.sparse_layers_by_stack, 7, "eval", "model", "words"
    )
    found = list(record.batches())
    assert [(each.stack, each.number) for each in found] == [
        (stack, number) for number in range(2) for stack in ("encoder", "decoder")
    ]
    for each, choices in zip(found, stats.choices * 2, strict=True):
        L = each.token_BL.shape[1]
        np.testing.assert_array_equal(each.row_B, 8 * each.number + np.arange(8))
        np.testing.assert_array_equal(each.token_BL, batch[f"{each.stack}_input_tokens"])
        np.testing.assert_array_equal(each.segment_BL, batch[f"{each.stack}_segment_ids"])
        np.testing.assert_array_equal(each.expert_NBLS, choices.expert_BLS)
        np.testing.assert_array_equal(each.is_dropped_NBLS, choices.dropped_BLS)
        routed = each.expert_NBLS < 8
        gate_NBLS = np.where(routed, choices.gate_BLS, 0)
        np.testing.assert_allclose(each.gate_NBLS, gate_NBLS, rtol=1e-6)
        assert each.group_shape[1] == min(32, 8 * L) and each.is_dropped_NBLS.any()
    dropped = sum(float(each.is_dropped_NBLS.sum()) for each in found)
    assert dropped == 2 * float(stats.dropped.sum())
    (layer, *_) = model.sparse_layers_by_stack["decoder"]
    apart = list(record.batches(stacks=["decoder"], layers=[layer]))
    assert [(each.stack, each.layers) for each in apart] == [("decoder", (layer,))] * 2
    np.testing.assert_array_equal(apart[0].rank_NBLR, found[1].rank_NBLR[:1])


def test_the_record_alone_says_what_was_dropped(written):
    """Its groups, capacity, order and ranks; slots are tests/analysis/test_drops.py's."""
    record = open_record(written[-1])
    errors = prediction_errors(record, record).values()
    assert all(each.differing == 0 < each.both for each in errors)


def test_experts_that_choose_have_gates_and_drop_whom_none_takes(tmp_path):
    router = RouterConfig(kind="expert_choice", exploration="none")
    switch = SwitchConfig(8, stacks="encoder", eval_capacity_factor=0.5, router=router)
    model = dataclasses.replace(ENCODER_DECODER, switch=switch)
    batch, path = make_batch(model, 8), tmp_path / "record.parquet"
    stats = statistics(model, make_params(model), batch)
    with RecordWriter(path, RecordInfo(switch, model.sparse_layers_by_stack, 7, "eval")) as to:
        to.add(0, jax.device_get(recorded(model, stats, batch)), 8)
    (each,), gate_NBLS = open_record(path).batches(), np.asarray(stats.choices[0].gate_BLS)
    np.testing.assert_array_equal(each.gate_NBLS, gate_NBLS)
    labels = Labels(("all",), np.zeros(8, int), np.arange(8))
    for n, layer in enumerate(read_layers(open_record(path), labels)):
        load, refused = np.zeros(8, int), 0
        for gates in gate_NBLS[n, each.is_token_BL]:
            load += gates > 0
            refused += not gates.any()
        assert layer.load_E.tolist() == load.tolist() and refused > 0
        assert layer.dropped == refused / (load.sum() + refused)
        assert all(x.gate > 0 for examples in layer.examples for x in examples)
    # Records of before 2026-11-29 lack gates.
    schema = pyarrow.parquet.read_schema(path)
    names = [name for name in schema.names if "/gate " in name]
    rewritten(path, lambda table: table.drop_columns(names))
    (old,) = open_record(path).batches()
    np.testing.assert_array_equal(old.chosen_NBLS, each.chosen_NBLS)
    assert np.isnan(old.gate_NBLS).all() and len(names) == 8 * len(gate_NBLS)


def test_margins_are_the_room_of_the_last_choice():
    model = model_of(ROUTERS["top 2 by gate"])
    params, batch = make_params(model), make_batch(model, 8)
    stats = statistics(model, params, batch)
    whole = dataclasses.replace(
        model.switch.router, num_selected=8, gate="softmax", overflow="dropless"
    )
    all_ranks = dataclasses.replace(
        model, switch=dataclasses.replace(model.switch, router=whole)
    )
    # The first layer reads the same, whatever follows: its eight probabilities, in order.
    ranked = statistics(all_ranks, params, batch).choices[0].prob_BLR[0]
    margin = stats.choices[0].margin_BL[0]
    np.testing.assert_allclose(margin, ranked[..., 1] - ranked[..., 2], atol=1e-7)


def test_layers_and_stacks_are_read_apart(written):
    model, _, _, path = written
    (layer, *_) = model.sparse_layers_by_stack["decoder"]
    found = list(open_record(path).batches(stacks=["decoder"], layers=[layer]))
    assert [(each.stack, each.layers) for each in found] == [("decoder", (layer,))] * 2
    assert found[0].rank_NBLR.shape[0] == 1
    asked = list(open_record(path).batches(layers=[layer]))  # no batches without layers
    assert [each.stack for each in asked] == ["decoder"] * 2


@pytest.fixture
def plain(tmp_path):
    """A small record of one stack, its parts, and how to write it."""
    model = model_of(ROUTERS["top 1"])
    stats = statistics(model, make_params(model), make_batch(model, 8))
    parts = jax.device_get(recorded(model, stats, make_batch(model, 8)))
    info = RecordInfo(model.switch, model.sparse_layers_by_stack, 7, "eval")
    return tmp_path / "record.parquet", info, parts


def test_a_full_record_says_so(plain):
    path, info, parts = plain
    with RecordWriter(path, info, max_places=1) as writer:
        writer.add(0, parts, 8)
        writer.add(1, parts, 8)
    record = open_record(path)
    assert not record.info.is_whole and {each.number for each in record.batches()} == {0}
    assert "more were left out: 1 are the most" in writer.summary()


def test_a_record_is_there_whole_or_not_at_all(plain):
    path, info, parts = plain
    with pytest.raises(KeyboardInterrupt), RecordWriter(path, info) as writer:
        writer.add(0, parts, 8)
        raise KeyboardInterrupt
    assert list(path.parent.iterdir()) == []
    with (
        refused(f"{path}: nothing was recorded; record a model with Switch layers"),
        RecordWriter(path, info),
    ):
        pass
    with refused(
        f"record='{path.parent}' cannot be written: its folder is not there or is "
        "locked, or it is a folder; give a file in a folder that exists"
    ):
        RecordWriter(path.parent, info)


def test_a_recorder_takes_the_place_of_one_that_was_killed(plain):
    path, info, parts = plain
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(b"PAR1 half of it")
    for each in (path, partial):
        with refused(
            f"{each} is no routing record that can be read (its recording goes on, or"
        ):
            open_record(each)
    with RecordWriter(path, info) as writer:
        writer.add(0, parts, 8)
        said = f"record='{path}' is being written by another process"
        with refused(said), RecordWriter(path, info) as other:
            other.add(0, parts, 8)
    assert open_record(path).info.is_whole and [*path.parent.iterdir()] == [path]


def rewritten(path, change) -> None:
    """Changes the table, and keeps what describes it."""
    file = pyarrow.parquet.ParquetFile(path)
    about = file.metadata.metadata[KEY]
    groups = [change(file.read_row_group(group)) for group in range(file.num_row_groups)]
    with pyarrow.parquet.ParquetWriter(path, groups[0].schema) as writer:
        for table in groups:
            writer.write_table(table)
        writer.add_key_value_metadata({KEY: about})


def numbered(table, name: str, number: int):
    """The table with one number in all of a column."""
    column = pyarrow.array([number] * len(table), table[name].type)
    return table.set_column(table.schema.names.index(name), name, column)


FAULTS = {
    "it lacks encoder 1/margin, which it describes": lambda table: table.drop_columns(
        ["encoder 1/margin"]
    ),
    "row group 0 is not of whole rows of one batch": lambda table: table.slice(1),
    "is not of whole rows of one batch": lambda table: numbered(table, "place", -1),
    "0 is not of whole rows of one batch": lambda table: numbered(table, "batch_size", 0),
    "it has no places, or no layers": lambda table: table.slice(0, 0),
    "groups of <any> places that these do not fill": lambda table: table.slice(
        0, 3 * len(table) // 8
    ),
    "row group 0 has experts from 0 to 99, and the model 8": lambda table: table.set_column(
        table.schema.names.index("encoder 1/rank 0"),
        "encoder 1/rank 0",
        pyarrow.array([0, 99] * (len(table) // 2), pyarrow.int16()),
    ),
}


@pytest.mark.parametrize("said", FAULTS)
def test_other_tables_are_refused(plain, said):
    path, info, parts = plain
    with RecordWriter(path, info) as writer:
        writer.add(0, parts, 8)
    rewritten(path, FAULTS[said])
    with refused(f"{path} is no routing record that can be read (<any>{said}<any>"):
        list(open_record(path).batches())


def test_other_files_are_refused(plain):
    path, info, parts = plain
    with RecordWriter(path, info) as writer:
        writer.add(0, parts, 8)
    whole = path.read_bytes()
    for content in (whole[:-100], whole[: len(whole) // 2], b"", b"text"):
        path.write_bytes(content)
        with refused(f"{path} is no routing record that can be read (<any>"):
            open_record(path)
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), path)
    with refused(f"{path} is no routing record that can be read (it is a Parquet <any>"):
        open_record(path)
    with refused(f"{path}2 is no routing record that can be read (<any>"):
        open_record(f"{path}2")
    with pyarrow.parquet.ParquetWriter(path, pyarrow.schema([])) as writer:
        writer.add_key_value_metadata({KEY: b"[" * 100_000})
    with refused(f"{path} is no routing record that can be read (<any>"):
        open_record(path)
    about = json.loads(info.as_json())
    for change, said in (
        ({"version": 2}, "it is of version 2 of the format, not 1"),
        ({"step": "x"}, "its step is 'x'"),
        ({"more": 1}, "its description has <any>"),
    ):
        with refused(said):
            RecordInfo.from_json(json.dumps(about | change))


@pytest.mark.slow
def test_choices_of_a_record_are_replayed_and_recorded_again(tmp_path):
    """By the snippet of docs/routing.md; other choices are used, and recorded, too."""
    page = (ROOT / "docs/routing.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    router = RouterConfig(num_selected=2, overflow="dropless")
    plain, replaying = (
        model_of(each) for each in (router, dataclasses.replace(router, replay=True))
    )
    params, batch, rows = make_params(plain), make_batch(plain, 8), np.arange(8)

    def record(model, batch, name):
        info = RecordInfo(model.switch, model.sparse_layers_by_stack, 7, "eval")
        stats = statistics(model, params, batch)
        with RecordWriter(tmp_path / name, info) as writer:
            writer.add(0, jax.device_get(recorded(model, stats, batch)), 8)
        (found,) = open_record(tmp_path / name).batches(["decoder"])
        return found.expert_NBLS, stats

    first_NBLS, stats = record(plain, batch, "first")
    names = dict(path=tmp_path / "first", config=replaying, batch=dict(batch), rows=rows)
    exec(snippet, names)
    again_NBLS, same = record(replaying, names["batch"], "again")
    np.testing.assert_array_equal(again_NBLS, first_NBLS)
    jax.tree.map(np.testing.assert_array_equal, same.summed, stats.summed)
    shape_BL = batch["decoder_segment_ids"].shape
    names["batch"]["decoder_replay"] = np.tile(np.int16([6, 5]), (*shape_BL, 1, 1))
    other_NBLS, _ = record(replaying, names["batch"], "other")
    is_token_BL = batch["decoder_segment_ids"] > 0
    assert np.all(other_NBLS[:, is_token_BL] == [6, 5])
