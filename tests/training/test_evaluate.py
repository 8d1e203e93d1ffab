# SPDX-License-Identifier: Apache-2.0
"""Evaluation: sums over batches, and samples of where tokens are routed, bounded and cheap."""

import dataclasses
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.analysis.routing import read_snapshots
from switchx.data.features import Example
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.moe import layer
from switchx.partitioning.mesh import MeshSpec
from switchx.routing_record import StackRecord
from switchx.training import evaluate as evaluation
from switchx.training.evaluate import RoutingLog, RoutingSample, eval_step, evaluate
from switchx.training.losses import TokenSums
from switchx.training.programs import compiled_program
from switchx.training.step import StepConfig
from tests.cases import slow
from tests.data.refusals import refused
from tests.training.jobs import (
    DENSE,
    ENCODER_DECODER,
    LENGTH,
    SPARSE,
    make_batch,
    make_job,
    make_params,
    with_switch,
)
from tests.training.routing_stats import two_layers


def sums_of(params, batch):
    """What a model would report, had the batch these numbers."""
    return TokenSums(**{name: jnp.float32(value) for name, value in batch.items()}), None, {}


def test_batches_weigh_by_their_tokens():
    batches = [
        dict(loss=10.0, nll=9.0, correct=1, tokens=2),
        dict(loss=90.0, nll=81.0, correct=9, tokens=98),
    ]
    metrics = evaluate(sums_of, None, batches)
    assert metrics == {
        "neg_log_perplexity": pytest.approx(-0.9),
        "cross_entropy": pytest.approx(0.9),
        "accuracy": pytest.approx(0.1),
        "target_tokens": 100.0,
    }


def test_routing_adds_up_over_batches():
    def step(params, batch):
        balance = np.array([2 * batch, 8 * batch])
        stats = dataclasses.replace(two_layers(), balance=balance)
        return sums_of(None, dict(loss=1, nll=1, correct=1, tokens=1))[0], stats, {}

    metrics = evaluate(step, None, [np.float32(1.0), np.float32(2.0)])
    assert metrics["routing"]["balance_loss"] == [1.5, 3.0]
    assert metrics["routing"]["router_z_loss"] == [0.5, 0.25]
    assert metrics["routing"]["load"] == [[0.75, 0.25], [0.25, 0.75]]
    assert metrics["dropped_fraction"] == 0.25


def test_no_batch_is_an_error():
    with refused("evaluation got no batch"):
        evaluate(sums_of, None, [])


@pytest.fixture(scope="module")
def model():
    """A sparse model with much noise in training, and its jitted evaluation step."""
    config = dataclasses.replace(
        with_switch(
            SPARSE,
            router=RouterConfig(jitter=0.9),
            capacity_factor=0.1,
            eval_capacity_factor=8.0,
        ),
        dropout_rate=0.9,
    )
    return config, make_params(config), jax.jit(functools.partial(eval_step, config))


def test_the_whole_split_gives_the_same_in_any_batches(model):
    config, params, step = model
    batch = make_batch(config, 8)
    parts = [{n: rows[i : i + 2] for n, rows in batch.items()} for i in (0, 2, 4, 6)]
    whole, split = evaluate(step, params, [batch]), evaluate(step, params, parts)
    for name in ("neg_log_perplexity", "cross_entropy", "accuracy", "target_tokens"):
        assert split[name] == pytest.approx(whole[name], rel=1e-6)
    assert split["routing"]["load"] == whole["routing"]["load"]
    assert whole["target_tokens"] == np.count_nonzero(batch["decoder_target_tokens"])


def test_there_is_no_noise_and_the_evaluation_capacity_holds_every_token(model):
    config, params, step = model
    batch = make_batch(config, 8)
    first, again = evaluate(step, params, [batch]), evaluate(step, params, [batch])
    assert first == again
    assert first["dropped_fraction"] == 0  # capacity 0.1 would drop nearly all
    assert first["neg_log_perplexity"] == -first["cross_entropy"]  # no z-loss, no smoothing
    assert math.isfinite(first["cross_entropy"])


TWO_LAYERS = dataclasses.replace(with_switch(SPARSE, group_size=27), num_decoder_layers=4)


@functools.cache
def sampled(config, mesh=None):
    """Statistics and sample of an evaluation step over a whole program, of eight rows."""
    devices = None if mesh else jax.devices()[:1]
    program = compiled_program(make_job(config, mesh=mesh or MeshSpec()), devices)
    batch = make_batch(config, 8)
    with program.scope():
        params = jax.device_put(make_params(config), program.shardings.params)
        _, stats, parts = program.eval_step(params, program.place(batch))
    return stats, parts


@pytest.mark.parametrize(
    ("model", "scan_layers"),
    [
        (TWO_LAYERS, True),
        (ENCODER_DECODER, False),
        slow(TWO_LAYERS, False),
        slow(ENCODER_DECODER, True),
    ],
)
def test_sample_has_the_tokens_and_the_loads_of_the_batch(model, scan_layers):
    model = dataclasses.replace(model, scan_layers=scan_layers)
    batch = make_batch(model, 8)
    stats, parts = sampled(model)
    parts = jax.device_get(parts)
    stacks = ("encoder", "decoder") if model.is_encoder_decoder else ("decoder",)
    assert parts.keys() == set(stacks) and stats.choices == ()
    num_experts, loads = model.switch.num_experts, []
    for stack in stacks:
        part, is_token_BL = parts[stack], batch[f"{stack}_segment_ids"] > 0
        np.testing.assert_array_equal(part.is_token_BL, is_token_BL)
        np.testing.assert_array_equal(part.token_BL, batch[f"{stack}_input_tokens"])
        for expert_BLS in np.asarray(part.expert_NBLS):
            np.testing.assert_array_equal(expert_BLS[..., 0] < num_experts, is_token_BL)
            loads.append(np.bincount(expert_BLS[is_token_BL].ravel(), minlength=num_experts))
        np.testing.assert_array_equal(
            part.rank_NBLR[:, is_token_BL], part.expert_NBLS[:, is_token_BL]
        )
        probabilities = part.prob_NBLR[:, is_token_BL]
        assert 1 / num_experts < probabilities.min() and probabilities.max() < 1
    # Layer by layer: the statistics count the same choices in another way.
    np.testing.assert_array_equal(loads, stats.load_E)
    assert len(loads) == model.num_sparse_layers
    assert not np.array_equal(loads[0], loads[1])


@pytest.mark.parametrize("model", [slow(SPARSE), ENCODER_DECODER])
def test_a_mesh_gives_the_same_sample_to_everyone(model):
    batch = make_batch(model, 8)
    of_one, want = sampled(model)
    of_mesh, got = sampled(model, MeshSpec(data=2, expert=4))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, of_mesh, of_one)
    assert of_one.expected_dropped.shape == of_one.margin.shape == of_one.tokens.shape
    for leaf in jax.tree.leaves(got):
        assert leaf.sharding.is_fully_replicated and len(leaf.devices()) == 8
    for stack, part in want.items():
        for name in ("token_BL", "segment_BL", "rank_NBLR", "expert_NBLS", "is_dropped_NBLS"):
            np.testing.assert_array_equal(getattr(got[stack], name), getattr(part, name))
        np.testing.assert_allclose(got[stack].prob_NBLR, part.prob_NBLR, rtol=1e-5)
    sample = RoutingSample(model)
    sample.begin_task()
    sample.add(len(batch["decoder_segment_ids"]), got)
    ((_, kept),) = sample.batches
    np.testing.assert_array_equal(kept["decoder"].token_BL, batch["decoder_input_tokens"])


def test_a_sample_of_a_sparse_decoder_has_its_tokens():
    model = with_switch(ENCODER_DECODER, encoder_layers=(), decoder_layers=(1,))
    batch = make_batch(model, 2)
    step = functools.partial(evaluation.eval_step, model)
    parts = jax.eval_shape(step, make_params(model), batch)[2]
    assert list(parts) == ["decoder"]
    assert parts["decoder"].token_BL.shape == batch["decoder_input_tokens"].shape


def test_a_dense_model_has_no_sample(tmp_path):
    parts = evaluation.sample_routing(DENSE, None, make_batch(DENSE, 8))
    sample = RoutingSample(DENSE)
    sample.begin_task()
    sample.add(8, parts)
    assert parts == {} and sample.batches == []
    RoutingLog(tmp_path / "routing", -1).write(5, sample)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("places", "group_size", "rows"),
    [
        (3 * LENGTH + 1, 4, 3),
        (2, 4, 1),  # one row at least
        (3 * LENGTH, 2 * LENGTH, 2),  # a group is two rows
        (LENGTH, 8 * LENGTH, 8),
        (LENGTH, 3 * LENGTH, 8),  # groups end within rows: the whole batch
    ],
)
def test_rows_of_a_batch_are_cut_to_whole_groups(places, group_size, rows):
    model = with_switch(SPARSE, recorded_places=places, group_size=group_size)
    batch = make_batch(model, 8)
    step = functools.partial(evaluation.eval_step, model)
    (part,) = jax.eval_shape(step, make_params(model), batch)[2].values()
    assert part.token_BL.shape == (rows, LENGTH)
    assert part.rank_NBLR.shape == part.expert_NBLS.shape == (1, rows, LENGTH, 1)


def part_of(model, lengths, start=10):
    """Rows of these lengths in each stack, ids counting up, each routed to id % 8."""
    is_token_BL = np.arange(4)[None] < np.array(lengths)[:, None]
    token_BL = np.zeros(is_token_BL.shape, np.int32)
    token_BL[is_token_BL] = start + np.arange(sum(lengths))
    rank_NBLR = (token_BL % 8).astype(np.int16)[None, ..., None]
    part = StackRecord(
        token_BL=token_BL,
        segment_BL=is_token_BL.astype(np.int32),
        rank_NBLR=rank_NBLR,
        prob_NBLR=np.full(rank_NBLR.shape, 0.5, np.float32),
        margin_NBL=np.full(rank_NBLR.shape[:-1], 0.25, np.float32),
        is_dropped_NBLS=np.zeros(rank_NBLR.shape, bool),
        expert_NBLS=np.where(is_token_BL[None, ..., None], rank_NBLR, np.int16(8)),
    )
    return dict.fromkeys(model.sparse_layers_by_stack, part)


def test_every_task_has_its_part_of_a_sample(tmp_path):
    model = with_switch(SPARSE, recorded_places=16)
    sample = RoutingSample(model, num_tasks=2)
    for start in (10, 20):
        sample.begin_task()
        for _ in range(3):
            sample.add(2, part_of(model, [2, 2], start))
    RoutingLog(tmp_path, -1).write(7, sample)
    (snapshot,) = read_snapshots(tmp_path)
    assert snapshot.stacks[0].token_T.tolist() == [10, 11, 12, 13, 20, 21, 22, 23]


def test_what_is_written_is_what_the_analysis_reads(tmp_path):
    sample = RoutingSample(ENCODER_DECODER)
    sample.begin_task()
    sample.add(3, part_of(ENCODER_DECODER, [3, 1, 4]))
    folder = tmp_path / "routing"
    RoutingLog(folder, -1).write(400, sample)
    assert [path.name for path in folder.iterdir()] == ["step_000400.parquet"]
    (snapshot,) = read_snapshots(folder)
    assert (snapshot.step, snapshot.num_experts) == (400, 8)
    assert snapshot.layers == ENCODER_DECODER.sparse_layer_names
    for stack in snapshot.stacks:
        np.testing.assert_array_equal(stack.token_T, np.arange(10, 18))
        np.testing.assert_array_equal(stack.expert_NTS, np.arange(10, 18)[None, :, None] % 8)
        np.testing.assert_array_equal(stack.gate_NTS, 0.5)


def test_log_goes_on_after_the_step_that_is_resumed(tmp_path):
    sample = RoutingSample(SPARSE)
    sample.begin_task()
    sample.add(1, part_of(SPARSE, [3]))
    log = RoutingLog(tmp_path, -1)
    for step in (0, 5, 999_999, 1_000_000):
        log.write(step, sample)
    (tmp_path / "step_000006.npz").write_bytes(b"of an earlier version")
    (tmp_path / "step_mine.npz").write_bytes(b"of a user")
    names = {path.name for path in tmp_path.iterdir()}
    RoutingLog(tmp_path, 999_999)
    assert names - {path.name for path in tmp_path.iterdir()} == {"step_1000000.parquet"}
    RoutingLog(tmp_path, -1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_mine.npz"]


# From here on: what it costs, in the compiled programs.

STEPS_TIMED = 30

MEASURED = ModelConfig(
    "encoder_decoder", 512, 64, 256, 4, 16, num_encoder_layers=2, num_decoder_layers=2,
    switch=SwitchConfig(8, every=2),
)  # fmt: skip

SCANNED = dataclasses.replace(
    MEASURED, architecture="decoder_only", num_encoder_layers=0, scan_layers=True
)


def costs(model, num_microbatches) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes of the compiled training and evaluation steps."""
    job = make_job(
        model, inputs_length=64, targets_length=32, step=StepConfig(num_microbatches)
    )
    program = compiled_program(job, jax.devices()[:1])
    state = program.abstract_state
    batch = job.features.batch([[Example(np.ones(5, int), np.ones(5, int))]] * job.batch_size)
    with program.scope():
        lowered = {
            "train": program.train_step.lower(state, batch),
            "eval": program.eval_step.lower(state.params, batch),
        }
        found = {name: step.compile().cost_analysis() for name, step in lowered.items()}
    return {name: (cost["flops"], cost["bytes accessed"]) for name, cost in found.items()}


NEWER = ("prob_E", "mass", "margin", "bias", "expected_dropped")


def unmeasured(stats) -> dict:
    """The statistics that only metrics read, as zeros, which XLA need not compute."""
    fields = {name: getattr(stats, name) for name in NEWER}
    return jax.tree.map(jnp.zeros_like, fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "num_microbatches"), [(MEASURED, 1), (SCANNED, 2)], ids=["unrolled", "scanned"]
)
def test_statistics_cost_less_than_a_fiftieth_of_a_step(model, num_microbatches, monkeypatch):
    """Against the same steps without load, drops, entropy, gate, choices and sample."""
    with_all = costs(model, num_microbatches)
    measure = layer.measure_routing

    # Outputs that are not computed and not returned: XLA takes away what they were made of.
    with monkeypatch.context() as patch:
        patch.setattr(layer, "Choices", lambda *_: None)
        patch.setattr(evaluation, "sample_routing", lambda *_: {})
        without_choices = costs(model, num_microbatches)

        def losses_alone(logits_GTE, prob_GTE, plan, *others, **options):
            stats = measure(logits_GTE, prob_GTE, plan, *others, **options)
            zero, zero_E = jnp.zeros(()), jnp.zeros(plan.num_experts)
            return dataclasses.replace(
                stats,
                tokens=zero,
                groups=zero,
                load_E=zero_E,
                dropped=zero,
                entropy=zero,
                gate=zero,
                **unmeasured(stats),
            )

        patch.setattr(layer, "measure_routing", losses_alone)
        without_all = costs(model, num_microbatches)

    # The training step drops the choices, and so does not compute them: not one byte.
    assert with_all["train"] == without_choices["train"]
    for step in ("train", "eval"):
        for counted, least in zip(with_all[step], without_all[step], strict=True):
            # Other fusions may even save a little where something is computed besides.
            assert 0.98 * least < counted < 1.02 * least, (step, counted / least)
        assert with_all[step] != without_all[step]


WIDE = ModelConfig(
    "encoder_decoder", 512, 128, 512, 4, 32, num_encoder_layers=4, num_decoder_layers=4,
    switch=SwitchConfig(8, every=2),
)  # fmt: skip


@pytest.mark.slow
def test_time_of_information_margin_and_expected_drops(monkeypatch, capsys):
    """Training steps with these and without, one after the other."""
    job = make_job(WIDE, inputs_length=128, targets_length=32, batch_size=16)
    batch = job.features.batch([[Example(np.ones(120, int), np.ones(30, int))]] * 16)
    measure, steps, states = layer.measure_routing, {}, {}

    def without(*arguments, **options):
        stats = measure(*arguments, **options)
        return dataclasses.replace(stats, **unmeasured(stats))

    for name, function in (("with", measure), ("without", without)):
        monkeypatch.setattr(layer, "measure_routing", function)
        jax.clear_caches()
        program = compiled_program(job, jax.devices()[:1])
        with program.scope():
            states[name] = program.init_state()
            steps[name] = program.train_step.lower(states[name], batch).compile()

    def seconds(name: str) -> float:
        before = time.process_time()
        states[name], metrics = steps[name](states[name], batch)
        jax.block_until_ready(metrics)
        return time.process_time() - before

    _ = [seconds(name) for name in steps for _ in range(2)]
    pairs = [(seconds("with"), seconds("without")) for _ in range(STEPS_TIMED)]
    ratio = float(np.median([a / b for a, b in pairs]))
    with capsys.disabled():
        print(f"\nCPU time of a step with the statistics over one without: {ratio:.4f}")
    assert ratio <= 1.02
