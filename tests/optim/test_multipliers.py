# SPDX-License-Identifier: Apache-2.0
"""Learning rates by pattern, frozen parameters, and the average of parameters."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from switchx import tree
from switchx.checkpoint.averaging import moving_average, write_average
from switchx.checkpoint.items import read_items
from switchx.checkpoint.run_folder import RunFolder
from switchx.compiled.workload import state_arrays
from switchx.data.features import Example
from switchx.optim.adafactor import Adafactor
from switchx.optim.adamw import AdamW
from switchx.optim.multipliers import multipliers, with_multipliers
from switchx.optim.protocol import Optax
from switchx.optim.schedules import Constant
from switchx.optim.updates import moved_average
from switchx.partitioning.mesh import MeshSpec
from switchx.training.loop import train
from switchx.training.offload.disk_program import LayeredProgram
from switchx.training.offload.host_program import HostProgram
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.programs import compiled_program
from switchx.training.step import StepConfig
from tests.data.refusals import refused
from tests.training.jobs import DENSE, SPARSE, Events, make_job, make_params, with_switch
from tests.training.saved_runs import lines

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

PARAMS = {
    "a": {"w_DF": np.full((2, 3), 0.5, np.float32)},
    "b": {"w_DF": np.ones((2, 3), np.float32)},
}
NON_EXPERTS = ((r".*/experts/.*", 0.0), (r"embedding/.*", 0.5))


def test_the_first_pattern_that_matches_a_whole_path_decides():
    rules = (("a/.*", 0.5), (".*/w_DF", 2.0))
    leaves = {"a/w_DF": np.zeros((2, 3)), "b/w_DF": np.zeros((2, 3)), "b/b_F": np.zeros(3)}
    assert multipliers(rules, leaves, None) == {"a/w_DF": 0.5, "b/w_DF": 2.0, "b/b_F": 1.0}
    only = {"a/w_DF": leaves["a/w_DF"]}
    with refused("StepConfig.rate_multipliers: 'a' decides for no parameter<any>a/w_DF"):
        multipliers((("a", 0.0),), only, None)
    with refused("'a/w_DF' decides for no parameter"):
        multipliers((*rules, ("a/w_DF", 0.0)), leaves, None)
    with refused("StepConfig.rate_multipliers freezes all parameters"):
        multipliers(((".*", 0.0),), only, None)


def test_patterns_name_layers_whatever_is_stacked():
    """Of four layers in a stack of two periods of two, layer_1 of it is layers 1 and 3."""
    path, other = "decoder/blocks/layer_1/ffn/w_DF", "decoder/blocks/layer_0/ffn/w_DF"
    stacked = {path: np.zeros((2, 4, 8)), other: np.zeros((2, 4, 8))}
    unrolled = {path.replace("1", f"{i}"): np.zeros((4, 8)) for i in range(4)}
    layer_1 = ((r".*/blocks/layer_1/.*", 1e-6),)
    assert [*multipliers(layer_1, unrolled, None).values()] == [1.0, 1e-6, 1.0, 1.0]
    last = path.replace("1", "3")
    with refused(
        f"StepConfig.rate_multipliers: {path} has 1e-06, {last} has 1, and these are scanned "
        "as one array<any>ModelConfig.scan_layers=False"
    ):
        multipliers(layer_1, stacked, 2)
    both = ((r".*/blocks/layer_[13]/.*", 0.5),)
    assert multipliers(both, stacked, 2) == {path: 0.5, other: 1.0}
    # Layers 1 and 3 by two rules; a rule of no layer is as it was.
    assert multipliers((*layer_1, (".*layer_3.*", 1e-6)), stacked, 2)[path] == 1e-6
    assert multipliers(((".*/w_DF", 0.5),), stacked, 2) == {path: 0.5, other: 0.5}
    # A job passes on what it scans.
    for model, said in ((STACKED, "<any> has 1, and these are scanned"), (DENSE, "")):
        job = make_job(model, step=StepConfig(rate_multipliers=[(".*/layer_1/.*", 0.5)]))
        with refused(said) if said else contextlib.nullcontext():
            compiled_program(job)


def drawn_gradients(step):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda w: rng.normal(size=w.shape).astype(w.dtype), PARAMS)


@pytest.mark.parametrize("optimizer", [AdamW(weight_decay=0.1), Optax(optax.lion)])
def test_updates_are_those_of_other_learning_rates(optimizer):
    """Of a parameter alone, with its own constant rate, its decay included."""
    ours = with_multipliers(optimizer.build(Constant(0.1)), (("a/.*", 0.25),), None)
    state, params = ours.init(PARAMS), PARAMS
    for step in range(3):
        gradients = drawn_gradients(step)
        updates, state = ours.update(gradients, state, params, gradient_scale=0.5)
        params = optax.apply_updates(params, updates)
    for name, rate in (("a", 0.025), ("b", 0.1)):
        alone = optimizer.build(Constant(rate))
        expected = {name: PARAMS[name]}
        state = alone.init(expected)
        for step in range(3):
            own = {name: drawn_gradients(step)[name]}
            updates, state = alone.update(own, state, expected, gradient_scale=0.5)
            expected = optax.apply_updates(expected, updates)
        np.testing.assert_allclose(params[name]["w_DF"], expected[name]["w_DF"], rtol=1e-6)


def test_frozen_parameters_have_no_statistics():
    state = with_multipliers(Adafactor().build(Constant(0.1)), (("a/.*", 0.0),), None).init(
        PARAMS
    )
    assert list(tree.named_leaves(state.statistics)) == ["b/w_DF/v_DF"]


STEP = StepConfig(clip_norm=1e-3, rate_multipliers=NON_EXPERTS, ema_decay=0.75)


def batch(job, seed):
    features, rng = job.features, np.random.default_rng(seed)
    nothing = np.zeros(0, int)
    rows = [[Example(nothing, rng.integers(3, 384, 8))] for _ in range(job.batch_size)]
    return features.batch(rows)


def stepped(optimizer, mesh, step=STEP, steps=2, model=SPARSE, devices=None):
    """The first state, those after each step, on the host, and the gradient norms."""
    job = make_job(model, optimizer=optimizer, mesh=mesh, step=step)
    program = compiled_program(job, devices)
    states, norms = [], []
    with program.scope():
        params = jax.device_put(make_params(model), program.shardings.params)
        state = program.init_state(params)
        states.append(jax.device_get(state))
        for i in range(steps):
            state, metrics = program.train_step(state, program.place(batch(job, i)))
            states.append(jax.device_get(state))
            norms.append(float(metrics.grad_norm))
    return states, norms


ONE_LAYER = dataclasses.replace(with_switch(SPARSE, every=1), num_decoder_layers=1)


def test_a_step_keeps_frozen_bits_and_averages_what_is_trained():
    optimizer = AdamW(weight_decay=0.5)
    alone = dict(mesh=MeshSpec(), model=ONE_LAYER, devices=jax.devices()[:1])
    states, norms = stepped(optimizer, **alone)
    leaves = [tree.named_leaves(state.params) for state in states]
    frozen = [name for name in leaves[0] if "/experts/" in name]
    assert frozen
    for name, leaf in leaves[0].items():
        is_same = leaf.tobytes() == leaves[-1][name].tobytes()
        assert is_same == (name in frozen), name
    statistics = [n for n in tree.named_leaves(states[-1].opt_state) if "experts" in n]
    assert not statistics
    job = make_job(ONE_LAYER, optimizer=optimizer, step=STEP)
    planned = [a.name for a in state_arrays(job) if a.kind == "optimizer"]
    assert not [name for name in planned if "mu" in name and "experts" in name]
    # a_t = d a_{t-1} + (1 - d) w_t, from a_0 = w_0.
    for name in leaves[0]:
        expected = leaves[0][name].astype(np.float64)
        for each in leaves[1:]:
            expected = 0.75 * expected + 0.25 * each[name]
        got = tree.named_leaves(states[-1].average)[name]
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7, err_msg=name)
    # The norm is that of what is trained, and clipping takes it.
    all_trained = dataclasses.replace(STEP, rate_multipliers=())
    _, of_all = stepped(optimizer, step=all_trained, steps=1, **alone)
    assert 0 < norms[0] < of_all[0]


# Plain descent, which shows the size of every gradient, and a norm that clips.
MOMENTUM = Optax(optax.sgd, {"momentum": 0.9})
CLIPPED = dataclasses.replace(STEP, clip_norm=0.5)
STACKED = dataclasses.replace(SPARSE, num_decoder_layers=4, scan_layers=True, remat="minimal")


@pytest.fixture(scope="module")
def alone():
    """Two steps of two microbatches on one device, raw norms among them."""
    step = dataclasses.replace(CLIPPED, num_microbatches=2)
    return stepped(MOMENTUM, MeshSpec(), step, model=STACKED, devices=jax.devices()[:1])


@pytest.mark.slow  # compiles three steps
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        (MeshSpec(pipe=2, data=2, expert=2), {"num_microbatches": 2}),
        (MeshSpec(fsdp=8), {"bucket_bytes": 4096}),
        (MeshSpec(data=2, expert=2), {"num_microbatches": 2}),
    ],
    ids=["pipeline", "buckets", "experts"],
)
def test_meshes_take_the_steps_of_one_device(alone, mesh, changes):
    devices = jax.devices()[: mesh.num_devices(1)]
    step = dataclasses.replace(CLIPPED, **changes)
    states, norms = stepped(MOMENTUM, mesh, step, model=STACKED, devices=devices)
    expected, expected_norms = alone
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    assert min(norms) > CLIPPED.clip_norm
    first, got, want = (
        tree.named_leaves({"params": state.params, "average": state.average})
        for state in (expected[0], states[-1], expected[-1])
    )
    for name, leaf in want.items():
        moved = np.max(np.abs(leaf - first[name]))
        if "/experts/" in name and name.startswith("params"):
            assert got[name].tobytes() == first[name].tobytes() == leaf.tobytes(), name
        else:
            np.testing.assert_allclose(
                got[name], leaf, rtol=0, atol=1e-4 * moved + 1e-7, err_msg=name
            )
            assert moved > 0 or "/experts/" in name, name


def test_the_average_of_a_constant_is_that_constant():
    w = {"w": jnp.asarray(np.random.default_rng(0).normal(size=100), jnp.bfloat16)}
    average = jax.tree.map(lambda x: x.astype(jnp.float32), w)
    assert np.array_equal(moved_average(average, w, 0.999)["w"], average["w"])


def test_bad_settings(tmp_path):
    with refused("StepConfig.rate_multipliers: -1.0 of 'a'"):
        StepConfig(rate_multipliers=[("a", -1.0)])
    with refused("StepConfig.rate_multipliers: ('a', None) is no pair"):
        StepConfig(rate_multipliers=[("a", None)])
    with refused("StepConfig.rate_multipliers: 'nothing' decides for no parameter"):
        compiled_program(make_job(step=StepConfig(rate_multipliers=[("nothing", 0.0)])))
    for fields in ({"rate_multipliers": NON_EXPERTS}, {"ema_decay": 0.9}):
        for kind in ("host", "disk"):
            storage = StorageSpec(kind, slots=2)
            job = make_job(STACKED, step=StepConfig(**fields), storage=storage)
            with refused(
                f"StepConfig.{next(iter(fields))}=<any> with StorageSpec.experts='{kind}'"
            ):
                HostProgram(job) if kind == "host" else LayeredProgram(job, RunFolder(tmp_path))


@pytest.mark.slow  # a run, and what is made of it
def test_a_run_saves_evaluates_and_exports_its_average(tmp_path):
    def job(**changes):
        return make_job(DENSE, step=StepConfig(ema_decay=0.5), checkpoint_every=1, **changes)

    run = RunFolder(tmp_path / "run")
    train(job(train_steps=1), run, Events())
    train(job(train_steps=2), run, Events())  # resumed
    averages, params = (
        [
            tree.named_leaves(read_items(run.checkpoints / step, {item: None})[item])
            for step in "12"
        ]
        for item in ("average", "params")
    )
    for name, leaf in averages[1].items():
        expected = 0.5 * averages[0][name].astype(np.float64) + 0.5 * params[1][name]
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-7, err_msg=name)
    # Another run's evaluation of the exported average is that of this run.
    (tmp_path / "average").mkdir()
    write_average(run, moving_average(run, 2), RunFolder(tmp_path / "average"), "an average")
    other = RunFolder(tmp_path / "other")
    start = make_job(DENSE, init_from=str(tmp_path / "average"), train_steps=1)
    train(start, other, Events())
    last, first = lines(run.validation)[-1], lines(other.validation)[0]
    assert last["step"] == 2
    assert first["neg_log_perplexity"] == pytest.approx(last["neg_log_perplexity"])
