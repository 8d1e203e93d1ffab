# SPDX-License-Identifier: Apache-2.0
"""What a new run takes of another: by T5X's rules, of any step, onto any mesh or layout."""

import dataclasses
import json

import numpy as np
import pytest

from switchx.checkpoint.items import _read_records
from switchx.checkpoint.restore import restore_params
from switchx.checkpoint.run_folder import RunFolder
from switchx.optim.schedules import LinearWarmup
from switchx.partitioning.mesh import MeshSpec
from switchx.training.initialize import Source, assign
from switchx.training.job import InitConfig
from switchx.training.loop import train
from switchx.training.offload.disk_program import LayeredProgram
from switchx.training.offload.host_program import HostProgram
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.programs import compiled_program
from switchx.tree import named_leaves
from tests.compare import assert_close
from tests.data.refusals import refused
from tests.training.jobs import DENSE, SPARSE, Events, make_job
from tests.training.saved_runs import lines

pytestmark = pytest.mark.usefixtures("steps_traced_once")

# Two layers that can be scanned as one period.
TINY = dataclasses.replace(DENSE, d_model=8, d_ff=8, num_heads=1)
NAMES = ("a/w", "a/b", "c/w")


def init(*rules, **fields):
    return InitConfig(rules=rules, **fields)


def test_rules_are_those_of_t5x():
    """The numbered semantics of `apply_assignment_map`'s docstring, and its order."""

    def sources(*rules, names=NAMES, there=NAMES, drop=()):
        return assign(init(*rules, drop=drop), names, there).sources

    assert sources() == {"a/w": "a/w", "a/b": "a/b", "c/w": "c/w"}
    # A whole match, groups filled in.
    assert sources((r"(.)/w", r"\1/b"), there=(*NAMES, "c/b")) == {
        "a/w": "a/b", "a/b": "a/b", "c/w": "c/b",
    }  # fmt: skip
    # The first that matches decides, and what is read twice is copied (3.).
    assert sources(("a/w", "c/w"), ("a/.*", None)) == {
        "a/w": "c/w", "a/b": None, "c/w": "c/w",
    }  # fmt: skip
    # A chain that rotates.
    assert sources(("a/w", "a/b"), ("a/b", "c/w"), ("c/w", "a/w")) == {
        "a/w": "a/b", "a/b": "c/w", "c/w": "a/w",
    }  # fmt: skip
    with refused("InitConfig.rules: 'a' decides for no parameter<any>a/w"):
        sources(("a", None))  # no full match
    with refused("'a/w' decides for no parameter"):
        sources(("a/.*", None), ("a/w", "a/b"))
    with refused("(<any>) takes a/w from d/w, which the source does not have<any>a/w"):
        sources(("a/w", "d/w"))
    assert assign(init(("a/.*", None)), NAMES, NAMES).dropped == ("a/w", "a/b")
    assert assign(init(drop=("d/.*",)), NAMES, (*NAMES, "d/w")).dropped == ("d/w",)
    with refused("InitConfig.drop: 'a/.*' matches no path of the source that is left over"):
        sources(drop=("a/.*",))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": "newest"}, "InitConfig.step='newest'"),
        ({"step": True}, "InitConfig.step=True"),
        ({"rules": [("(", None)]}, "InitConfig.rules: '(' is no regular expression"),
        ({"rules": ["a/w"]}, "InitConfig.rules: 'a/w' is no pair"),
        ({"rules": [("a/w", 3)]}, "InitConfig.rules: ('a/w', 3) is no pair"),
        ({"drop": ["*"]}, "InitConfig.drop: '*' is no regular expression"),
    ],
)
def test_bad_settings(fields, message):
    with refused(message):
        InitConfig(**fields)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of four steps, with checkpoints at 2 and 4."""
    run = RunFolder(tmp_path_factory.mktemp("source"))
    train(make_job(TINY), run, Events())
    return run


def start_of(source, model=TINY, mesh=None, **fields):
    """What a run from `source` would begin with; nothing is read."""
    init, mesh = InitConfig(**fields), mesh or MeshSpec()
    job = make_job(model, init_from=str(source.path), init=init, mesh=mesh)
    program = compiled_program(job)
    with program.scope():
        return Source(job, program), program


def start(source, model=TINY, mesh=None, **fields):
    """The state that a run from `source` begins with, and what is said of it."""
    found, program = start_of(source, model, mesh, **fields)
    with program.scope():
        return found.state(), found


def test_a_step_with_its_optimizer(source):
    state, found = start(source, step=2, optimizer=True)
    assert_close(state.params, restore_params(source.root, 2))
    assert int(state.step) == 0 and int(state.opt_state.count) == 2
    assert any(np.any(leaf) for leaf in named_leaves(state.opt_state.statistics).values())
    assert "optimizer as there, step is fresh" in found.notes[0]
    state, _ = start(source, step="best")
    assert int(state.opt_state.count) == 0


def test_the_rate_that_is_logged_goes_on_with_the_optimizers_count(source, tmp_path):
    run = RunFolder(tmp_path / "run")
    job = make_job(
        TINY, schedule=LinearWarmup(1.0, 10), init_from=str(source.path), train_steps=2,
        init=InitConfig(optimizer=True),
    )  # fmt: skip

    def rates():
        return [line["learning_rate"] for line in lines(run.metrics)]

    train(job, run, Events())
    assert rates() == pytest.approx([0.4, 0.5])  # the source has taken four steps
    train(dataclasses.replace(job, train_steps=3), run, Events())  # resumed
    assert rates() == pytest.approx([0.4, 0.5, 0.6])


def test_another_model_by_rules_on_a_mesh(source):
    """Three layers from two: one is copied, the first FFN is fresh, all else taken."""
    wider = dataclasses.replace(TINY, num_decoder_layers=3)
    rules = (
        (r"decoder/blocks/layer_2/(.*)", r"decoder/blocks/layer_1/\1"),
        (r"decoder/blocks/layer_0/ffn/.*", None),
    )
    mesh = MeshSpec(data=2, fsdp=4)
    state, found = start(source, wider, rules=rules, mesh=mesh, optimizer=True)
    got, there = named_leaves(state.params), named_leaves(restore_params(source.root))
    fresh = named_leaves(compiled_program(make_job(wider)).init_state().params)
    for name, leaf in got.items():
        if name.startswith("decoder/blocks/layer_0/ffn/"):
            expected = fresh[name]
        else:
            expected = there[name.replace("layer_2", "layer_1")]
        np.testing.assert_array_equal(leaf, expected, err_msg=name)
    assert any(not leaf.sharding.is_fully_replicated for leaf in got.values())
    assert "new for what is drawn afresh (at the old count, so that AdamW's" in found.notes[0]
    changes = found.assignment.changes()
    ffn = [name for name in there if name.startswith("decoder/blocks/layer_0/ffn/")]
    assert f"{ffn[0]}: drawn afresh" in changes and f"{ffn[0]}: dropped" in changes
    # The optimizer's arrays go with their parameters; fresh ones are zero.
    for name, leaf in named_leaves(state.opt_state.statistics).items():
        assert np.any(leaf) != name.startswith("decoder/blocks/layer_0/ffn/"), name


def test_layers_are_stacked_on_the_way(source):
    scanned = dataclasses.replace(TINY, scan_layers=True)
    layer = restore_params(source.root)["decoder"]["blocks"]["layer_1"]
    norms = (r".*/scale_D", None), (r"decoder/.*/w_out_FD", None)
    state, _ = start(source, scanned, rules=norms)
    stacked = named_leaves(state.params["decoder"]["blocks"]["layer_0"])
    for name, leaf in named_leaves(layer).items():
        if not name.endswith(("scale_D", "w_out_FD")):
            np.testing.assert_array_equal(stacked[name][1], leaf)
    with refused("InitConfig.optimizer=True, but the layers of <any> are unrolled"):
        start(source, scanned, optimizer=True)


def test_what_was_taken_is_kept_in_the_run_folder(source, tmp_path):
    run, events = RunFolder(tmp_path / "run"), Events()
    rules = InitConfig(rules=((".*/w_out_FD", None),))
    train(make_job(TINY, init_from=str(source.path), init=rules, train_steps=0), run, events)
    kept = json.loads(run.initialization.read_text())
    assert kept["checkpoint"] == str(source.checkpoints / "4") and not kept["optimizer"]
    fresh = [name for name, origin in kept["parameters"].items() if origin is None]
    assert fresh and kept["dropped"] == fresh
    assert f"{fresh[0]}: drawn afresh" in events.notes


def test_what_does_not_fit_is_refused_before_anything_is_read(source, monkeypatch):
    monkeypatch.setattr("switchx.training.initialize.read_leaves", None)
    monkeypatch.setattr("switchx.training.initialize.restore_items", None)
    with refused("InitConfig.step=3 is not in "):
        start(source, step=3)
    names = named_leaves(restore_params(source.root))
    query = next(name for name in names if name.endswith("w_query_DHK"))
    with refused(
        "checkpoint <any> does not fit; 1 of <any>\n"
        f"  params/{query} (from embedding/embedding_VD): expected float32[8, 1, 8], got "
        "float32[384, 8]"
    ):
        start(source, rules=[(query, "embedding/embedding_VD")])
    shallow = dataclasses.replace(TINY, num_decoder_layers=1)
    with refused("params/decoder/blocks/layer_1/ffn/w_in_DF: expected nothing, got float32"):
        start(source, shallow)
    start_of(source, shallow, drop=("decoder/blocks/layer_1/.*",))
    with refused("InitConfig.drop: '.*/layer_2/.*' matches no path<any>left over are none"):
        start(source, drop=[".*/layer_2/.*"])
    with refused("TrainingJob.init=<any>without init_from"):
        make_job(TINY, init=InitConfig(step=2))


@pytest.mark.slow  # two more programs
def test_onto_experts_in_host_memory_and_on_a_disk(tmp_path):
    """A matrix of every expert is drawn, all else comes from the source."""
    model = dataclasses.replace(SPARSE, num_decoder_layers=4, scan_layers=True)
    source = RunFolder(tmp_path / "source")
    train(make_job(model, train_steps=1), source, Events())
    there = named_leaves(restore_params(source.root))
    rules = ((r".*/w_in_EDF", None),)
    fresh = named_leaves(compiled_program(make_job(model)).init_state().params)
    for kind, has_optimizer in (("host", True), ("disk", False)):
        init = InitConfig(rules=rules, optimizer=has_optimizer)
        storage = StorageSpec(kind, slots=2)
        job = make_job(
            model, init_from=str(source.path), init=init, storage=storage, train_steps=0
        )
        run = RunFolder(tmp_path / kind).create()
        program = HostProgram(job) if kind == "host" else LayeredProgram(job, run)
        with program.scope():
            state = Source(job, program).state()
            assert int(state.opt_state.count) == has_optimizer
            got = named_leaves({"params": state.params})
            if kind == "disk":
                program.experts.save(tmp_path / "saved")
                (tmp_path / "whole").mkdir()
                (tmp_path / "saved").rename(tmp_path / "whole" / "experts")
                names = {f"params/{name}" for name in there} - got.keys()
                got |= _read_records(tmp_path / "whole", names)
        for name, leaf in there.items():
            expected = fresh[name] if name.endswith("w_in_EDF") else leaf
            np.testing.assert_allclose(got[f"params/{name}"], expected, rtol=1e-6, err_msg=name)
    with refused("InitConfig.optimizer=True with StorageSpec.experts='disk'"):
        disk = dataclasses.replace(job, init=InitConfig(optimizer=True))
        program = LayeredProgram(disk, RunFolder(tmp_path / "refused"))
        with program.scope():
            Source(disk, program)
