# SPDX-License-Identifier: Apache-2.0
"""Replay of a model's own choices is the same step, on every mesh; the backward pass decides
nothing."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures, Example
from switchx.models import stack as stack_module
from switchx.models.config import RouterConfig
from switchx.models.params import abstract_params, forward
from switchx.moe import layer as layer_module
from switchx.moe.replay import UNSET, check_replay, unset_choices
from switchx.moe.router import router_logits
from switchx.optim.updates import global_norm
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import SLICED_RULES
from switchx.training.distillation.soft_loss import Distillation, Teacher
from switchx.training.evaluate import eval_step
from switchx.training.microbatches import sparse_stacks
from switchx.training.program import TrainingProgram
from switchx.training.programs import compiled_program
from switchx.training.step import StepConfig
from tests.cases import slow_unless
from tests.training.jobs import (
    ENCODER_DECODER,
    LENGTH,
    SPARSE,
    WEIGHTY,
    make_job,
    make_params,
    with_switch,
)
from tests.training.pipelines import assert_equal, pipelined, stacked, unpipelined
from tests.training.steps import raw_gradients

ROWS = 32
PAIRS = RouterConfig(num_selected=2, jitter=0.0, overflow="dropless")


def with_router(config, router=PAIRS, dispatcher="gather", **changes):
    """The configuration with a router, and other changes of the model."""
    switch = dataclasses.replace(config.switch, router=router).with_dispatcher(dispatcher)
    return dataclasses.replace(config, switch=switch, **changes)


def replaying(config):
    router = dataclasses.replace(
        config.switch.router, replay=True, replay_drops=config.switch.router.overflow == "drop"
    )
    return with_router(config, router, config.switch.dispatcher)


DECODER = with_router(stacked(SPARSE, 4))
BOTH = with_router(stacked(ENCODER_DECODER, 4))


@functools.cache
def packed(is_encoder_decoder: bool) -> dict:
    """Rows of one or two examples, and padding in most of them."""
    rng = np.random.default_rng(0)

    def example(size):
        inputs, targets = rng.integers(3, 384, (2, size))
        return Example(inputs if is_encoder_decoder else inputs[:0], targets)

    features = DecoderOnlyFeatures(LENGTH)
    if is_encoder_decoder:
        features = EncoderDecoderFeatures(LENGTH, LENGTH)
    sizes = [(3, 4), (5,), (2, 6), (8,)] * (ROWS // 4)
    return features.batch([[example(size) for size in row] for row in sizes])


def batch_of(config) -> dict:
    return packed(config.is_encoder_decoder)


@functools.cache
def own_choices(config) -> dict[str, np.ndarray]:
    """What the routers of a model on one device choose, as features of its batch."""
    batch = batch_of(config)
    choose = jax.jit(lambda params: forward(config, params, batch, is_training=True)[1].choices)
    found = {}
    for stack, choices in zip(sparse_stacks(config), choose(make_params(config)), strict=True):
        expert_BLNS = np.moveaxis(np.asarray(choices.expert_BLS), 0, 2)
        is_nothing = expert_BLNS == config.switch.num_experts
        found[f"{stack}_replay"] = np.where(is_nothing, UNSET, expert_BLNS).astype(np.int16)
    check_replay(replaying(config), batch | found)
    return found


def step_of(config, given=None, *, mesh=None, num_microbatches=1, bucket_bytes=None):
    """Raw gradients, loss, token sums and statistics of a step."""
    batch = batch_of(config) | (given or {})
    if mesh is None:
        return unpipelined(config, num_microbatches, batch)
    if mesh.pipe > 1:
        return pipelined(config, mesh, None, num_microbatches, batch)
    step = StepConfig(num_microbatches=num_microbatches, bucket_bytes=bucket_bytes)
    job = make_job(config, mesh=mesh, step=step, loss=WEIGHTY, batch_size=ROWS)
    return jax.device_get(raw_gradients(compiled_program(job), batch))


def assert_bit_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def permuted(given: dict) -> dict:
    """The choices of the tokens of each row in the opposite order, padding as it was."""
    found = {}
    for name, choices_BLNS in given.items():
        found[name] = choices_BLNS.copy()
        for row in found[name]:
            tokens = np.flatnonzero(row[:, 0, 0] != UNSET)
            row[tokens] = row[tokens[::-1]]
    return found


def test_own_choices_are_the_same_step_and_others_are_not():
    """With scanned layers, remat, packed rows and microbatches."""
    config = dataclasses.replace(
        with_switch(DECODER, every=1), num_decoder_layers=2, remat="full"
    )
    replayed = functools.partial(step_of, replaying(config), num_microbatches=4)
    want, own = step_of(config, num_microbatches=4), own_choices(config)
    assert_bit_equal(replayed(own), want)
    assert_bit_equal(replayed(unset_choices(config, batch_of(config))), want)
    grads, loss, _, stats = replayed(permuted(own))
    assert abs(loss - want[1]) > 1e-3
    np.testing.assert_array_equal(stats.load_E, want[3].load_E)  # the same experts, permuted
    routers = [leaf for name, leaf in tree.named_leaves(grads).items() if "w_router" in name]
    assert len(routers) == 1 and len(routers[0]) == 2
    assert np.all(np.max(np.abs(routers[0]), axis=(1, 2)) > 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("remat", ["none", "minimal", "full"])
def test_own_choices_under_remat_and_scan(remat, scan_layers, num_microbatches):
    config = dataclasses.replace(BOTH, remat=remat, scan_layers=scan_layers)
    step = functools.partial(step_of, num_microbatches=num_microbatches)
    assert_bit_equal(step(replaying(config), own_choices(config)), step(config))


@pytest.mark.slow
@pytest.mark.parametrize("priority", ["position", "gate"])
def test_own_choices_with_drops(priority):
    router = RouterConfig(num_selected=2, gate="normalized", jitter=0.0, priority=priority)
    config = with_switch(DECODER, router=router, capacity_factor=1.0)
    want = step_of(config)
    assert np.min(want[3].dropped) > 0
    assert_bit_equal(step_of(replaying(config), own_choices(config)), want)


@pytest.mark.slow
def test_own_choices_in_evaluation():
    """Of a model whose encoder alone has Switch layers."""
    config = dataclasses.replace(with_switch(BOTH, stacks="encoder"), scan_layers=False)
    own, params = own_choices(config), make_params(config)
    assert own.keys() == {"encoder_replay"}
    want = jax.jit(functools.partial(eval_step, config))(params, batch_of(config))
    replayed = jax.jit(functools.partial(eval_step, replaying(config)))
    assert_bit_equal(replayed(params, batch_of(config) | own), want)
    assert_bit_equal(replayed(params, batch_of(config)), want)
    other, _, sample = replayed(params, batch_of(config) | permuted(own))
    assert abs(other.loss - want[0].loss) > 1e-3
    expert_NBLS = np.asarray(sample["encoder"].expert_NBLS)
    given_NBLS = np.moveaxis(permuted(own)["encoder_replay"], 2, 0)
    is_given = given_NBLS != UNSET
    np.testing.assert_array_equal(expert_NBLS[is_given], given_NBLS[is_given])


# Dispatcher, mesh, and bytes of a bucket.
MESHES = {
    "data": ("gather", MeshSpec(data=8), None),
    "dropless": ("dropless", MeshSpec(data=8), None),
    "fsdp": ("gather", MeshSpec(fsdp=8), None),
    "buckets": ("gather", MeshSpec(data=2, fsdp=4), 1 << 12),
    "all_to_all": ("all_to_all", MeshSpec(data=2, expert=4), None),
    "hierarchical": ("hierarchical", MeshSpec(data=2, node=2, expert=2), None),
    "ragged": ("ragged_all_to_all", MeshSpec(expert=8), None),
    "tensor": ("gather", MeshSpec(data=2, expert=2, model=2), None),
    "sliced": ("sliced", MeshSpec(data=4, model=2, rules=SLICED_RULES), None),
    "stages": ("gather", MeshSpec(pipe=2, data=2, expert=2), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("name", MESHES)
def test_own_choices_on_a_mesh(name, num_microbatches):
    """Bit-equal to the mesh without replay; to one device up to the order of sums."""
    dispatcher, mesh, bucket_bytes = MESHES[name]
    config = with_router(DECODER, dispatcher=dispatcher)
    if bucket_bytes:
        config = dataclasses.replace(config, remat="full")
    one_device = step_of(dataclasses.replace(DECODER, remat=config.remat))
    options = dict(mesh=mesh, num_microbatches=num_microbatches, bucket_bytes=bucket_bytes)
    own = own_choices(DECODER)
    got = step_of(replaying(config), own, **options)
    assert_bit_equal(got, step_of(config, **options))
    np.testing.assert_allclose(got[1], one_device[1], rtol=1e-6)
    difference = jax.tree.map(np.subtract, got[0], one_device[0])
    assert global_norm(difference) <= 1e-6 * global_norm(one_device[0])
    assert_equal(got, one_device)


def test_a_batch_is_checked_before_a_step_reads_it():
    """A job that replays does not train on batches without choices; it evaluates on them."""
    config = with_router(SPARSE, dataclasses.replace(PAIRS, replay=True))
    trainer = TrainingProgram(make_job(config, batch_size=ROWS), jax.devices()[:1])
    batch = batch_of(config)
    given = unset_choices(config, batch)
    assert trainer.place(batch | given).keys() == (batch | given).keys()
    given["decoder_replay"][2, 1, 0] = 9, 2
    with pytest.raises(ValueError, match=r"decoder_replay, row 2, place 1, layer 0 .*\[9, 2\]"):
        trainer.place(batch | given)
    with pytest.raises(ValueError, match="replay=True and a training batch without"):
        train = functools.partial(forward, config, is_training=True)
        jax.eval_shape(train, abstract_params(config), batch)
    trainer.place(batch)
    jax.eval_shape(
        functools.partial(forward, config, is_training=False), abstract_params(config), batch
    )


def decisions(jaxpr, is_backward=False) -> list[str]:
    """The primitives that choose by floating numbers in what remat runs in a backward pass."""
    found = []
    for equation in jaxpr.eqns:
        is_inside = is_backward or equation.params.get("differentiated", False)
        is_choice = equation.primitive.name in ("argmax", "top_k", "sort")
        if is_inside and is_choice and equation.invars[0].aval.dtype == jnp.float32:
            found.append(equation.primitive.name)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found += decisions(inner, is_inside)
    return found


ROUTERS = {
    "top 1": RouterConfig(),
    "top 2": RouterConfig(num_selected=2),
    "sampled": RouterConfig(exploration="sample"),
    "biased": RouterConfig(bias_update_rate=0.001),
    "surest first": RouterConfig(priority="gate"),
    "rerouted": RouterConfig(overflow="reroute"),
    "rerouted, surest first": RouterConfig(overflow="reroute", priority="gate"),
    "replayed": RouterConfig(overflow="dropless", replay=True),
    "expert choice": RouterConfig(kind="expert_choice"),
}


def backward_decisions(router: RouterConfig, remat: str) -> list[str]:
    config, stacks = SPARSE, "all"
    if router.kind == "expert_choice":
        config, stacks = ENCODER_DECODER, "encoder"
    config = dataclasses.replace(with_switch(config, router=router, stacks=stacks), remat=remat)
    batch = batch_of(config)
    if router.replay:
        batch = batch | unset_choices(config, batch)

    def loss(params):
        logits_BLV, stats = forward(
            config, params, batch, is_training=True, key=jax.random.key(0)
        )
        return jnp.sum(logits_BLV) + jnp.sum(stats.balance)

    return decisions(jax.make_jaxpr(jax.grad(loss))(make_params(config)).jaxpr)


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        slow_unless((name, remat) == ("top 2", "full"), name, remat)
        for name, remat in itertools.product(ROUTERS, ("minimal", "full"))
    ],
)
def test_the_backward_pass_decides_nothing(name, remat, monkeypatch):
    assert backward_decisions(ROUTERS[name], remat) == []
    # Without the names that policies keep it would.
    monkeypatch.setitem(
        stack_module.REMAT_POLICIES, remat, jax.checkpoint_policies.nothing_saveable
    )
    assert backward_decisions(ROUTERS[name], remat) != []


@pytest.mark.slow  # not compiled, so that the passes come one after the other
@pytest.mark.parametrize("remat", ["minimal", "full"])
def test_near_ties_are_not_decided_again(remat, monkeypatch):
    """A router of equal logits, whose last bits differ from call to call as those of another
    program may: the gradient is that of the experts that the forward pass used."""

    def used(policy=None) -> list[int]:
        """The experts that get a gradient."""
        calls = itertools.count()

        def trembling(x_GTD, w_router_DE, *, dtype):
            logits_GTE = 0 * router_logits(x_GTD, w_router_DE, dtype=dtype)

            def tilt(logits_GTE):
                sign = (-1) ** next(calls)
                return np.float32(sign * 1e-6) * np.arange(
                    logits_GTE.shape[-1], dtype=np.float32
                )

            shape = jax.ShapeDtypeStruct(logits_GTE.shape[-1:], jnp.float32)
            tilt_E = jax.pure_callback(tilt, shape, jax.lax.stop_gradient(logits_GTE))
            return logits_GTE + tilt_E[None, None]

        with monkeypatch.context() as patch:
            patch.setattr(layer_module, "router_logits", trembling)
            if policy is not None:
                patch.setitem(stack_module.REMAT_POLICIES, remat, policy)
            config = with_router(
                SPARSE, RouterConfig(jitter=0.0, overflow="dropless"), remat=remat
            )
            batch = batch_of(config)
            grads = jax.grad(
                lambda params: jnp.sum(forward(config, params, batch, is_training=True)[0] ** 2)
            )(make_params(config))
        assert next(calls) == 2  # forward, and again in backward
        w_in_EDF = tree.named_leaves(grads)["decoder/blocks/layer_1/ffn/experts/w_in_EDF"]
        return np.flatnonzero(np.any(np.asarray(w_in_EDF), axis=(1, 2))).tolist()

    assert used() == [7]
    assert used(jax.checkpoint_policies.nothing_saveable) == [0]


@pytest.mark.slow
def test_a_teacher_chooses_by_itself():
    config = with_router(SPARSE)
    batch = batch_of(config) | unset_choices(config, batch_of(config))
    teacher = Teacher(abstract_params(config), config, Distillation("runs/teacher"))
    assert jax.eval_shape(Teacher.logits, teacher, batch).shape == (ROWS, LENGTH, 384)
