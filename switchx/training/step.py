# SPDX-License-Identifier: Apache-2.0
"""One training step, pure: gradients over microbatches, clipping, update or skip.

Dims: B batch, L length, V vocabulary, N Switch layers, E experts
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from switchx.fields import (
    at_resume,
    require,
    require_above_zero,
    require_at_least,
    require_below_one,
    require_pairs,
)
from switchx.models.config import ModelConfig
from switchx.models.params import init_params
from switchx.moe.stats import RoutingStats
from switchx.optim.multipliers import keep_frozen, moved_average, without_frozen
from switchx.optim.protocol import apply_updates, clip_scale, global_norm, sliced_global_norm
from switchx.partitioning.buckets import require_bucket_bytes
from switchx.partitioning.host_stack import (
    add_gradients,
    host_stacks,
    with_totals,
    zero_gradients,
)
from switchx.partitioning.optimizer_slices import has_slices, into_slices, out_of_slices
from switchx.partitioning.replicas import run_on_replicas
from switchx.partitioning.schedule import Schedule
from switchx.training.distillation import Teacher, WrittenTeacher, distilled_batch_loss
from switchx.training.fused_loss import fused_batch_loss
from switchx.training.losses import (
    LossConfig,
    TokenSums,
    batch_loss,
    into_microbatches,
    loss_denominators,
    own_rows_axes,
)
from switchx.training.pipelined import pipelined_gradients
from switchx.training.switch_layers import with_balanced_biases, with_replicas

# Dynamic loss scaling (Micikevicius et al. 2018): doubled after this many good steps.
LOSS_SCALE_PATIENCE = 2000


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """How a batch becomes an update.

    Attributes:
        num_microbatches: parts the batch is split into; gradients are summed over them.
        clip_norm: largest global gradient norm; larger gradients are scaled down to it.
        bucket_bytes: gather parameters that are sliced over `fsdp` in buckets of at most so
            many bytes, and scatter their gradients so (`training/fused_loss.py`); None
            leaves both to the compiler.
        rate_multipliers: of learning rates by pattern of a parameter's path, 0 to freeze it
            (`optim/multipliers.py`).
        ema_decay: of the average of parameters over steps, which evaluations in training
            take; None keeps none.
    """

    num_microbatches: int = at_resume(1)
    clip_norm: float | None = None
    bucket_bytes: int | None = at_resume(None)
    rate_multipliers: tuple[tuple[str, float], ...] = ()
    ema_decay: float | None = None

    def __post_init__(self):
        require_pairs("StepConfig.rate_multipliers", self.rate_multipliers, (float, int))
        for pattern, factor in self.rate_multipliers:
            require(
                0 <= factor < math.inf,
                f"StepConfig.rate_multipliers: {factor} of {pattern!r}; use 0 or more",
            )
        rules = tuple((pattern, float(factor)) for pattern, factor in self.rate_multipliers)
        object.__setattr__(self, "rate_multipliers", rules)
        require_below_one(self, "ema_decay")
        if self.bucket_bytes is not None:
            require_bucket_bytes(self.bucket_bytes)
        require_at_least(self, 1, "num_microbatches")
        require_above_zero(self, "clip_norm")

    @property
    def has_average(self) -> bool:
        return self.ema_decay is not None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """One value of everything that training changes.

    Attributes:
        step: steps taken, skipped ones among them.
        params: nested dictionary of parameters.
        opt_state: the optimizer's state.
        key_data: the run's random key; each step folds its number in.
        skipped: steps left out so far for a non-finite loss or gradient.
        skipped_in_a_row: those since the last good step; float16's do not count while a
            smaller loss scale may mend them.
        loss_scale: what the loss is multiplied by before the backward pass, so that
            float16 gradients do not underflow; 1 in other dtypes.
        good_steps: good steps since the loss scale last changed.
        average: of the parameters over good steps, float32, with `StepConfig.ema_decay`.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key_data: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    loss_scale: jax.Array
    good_steps: jax.Array
    average: Any = None

    @property
    def evaluated_params(self):
        """The average where there is one, in the parameters' dtypes and shardings; otherwise
        these."""
        if self.average is None:
            return self.params

        def as_param(average, w):
            return jax.device_put(average.astype(w.dtype), w.sharding)

        return jax.tree.map(as_param, self.average, self.params)

    @property
    def key(self):
        """The random key of this step alone."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.key_data), self.step)


def init_key(seed: int):
    """The key that a run's parameters are drawn from."""
    return jax.random.split(jax.random.key(seed))[0]


def init_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    seed: int,
    params=None,
    has_average: bool = False,
) -> TrainState:
    """A state at step 0; `params` of an earlier run, or drawn from `seed`.

    Args:
        has_average: the state has an average, which begins as the parameters.
    """
    run_key = jax.random.split(jax.random.key(seed))[1]
    params = init_params(config, init_key(seed)) if params is None else params
    is_half = config.precision.compute == "float16"
    average = None
    if has_average:
        average = jax.tree.map(lambda w: jnp.array(w, jnp.float32, copy=True), params)
    # A new zero each time: donated buffers must not be shared.
    counters = ("step", "skipped", "skipped_in_a_row", "good_steps")
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        key_data=jax.random.key_data(run_key),
        loss_scale=jnp.full((), 2.0**15 if is_half else 1.0, jnp.float32),
        average=average,
        **{name: jnp.zeros((), jnp.int32) for name in counters},
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What a step reports; `routing` is None for a dense model."""

    sums: TokenSums
    loss: jax.Array
    routing: RoutingStats | None
    grad_norm: jax.Array
    is_skipped: jax.Array
    skipped_in_a_row: jax.Array


def gradients(
    config: ModelConfig,
    loss: LossConfig,
    step: StepConfig,
    params,
    batch,
    *,
    key,
    loss_scale=1.0,
    expert_of_slot_NR=None,
    teacher: Teacher | WrittenTeacher | None = None,
):
    """Raw gradients of `loss_scale` times the loss over the whole batch.

    Args:
        expert_of_slot_NR: of every Switch layer, the expert in each of R slots
            (`moe/replicas.py`); None, there are no replicas. It changes no number.
        teacher: of a student that is distilled (`distillation.py`), without buckets.

    Returns:
        gradients, the unscaled loss, token sums, routing statistics (None for a dense model).
    """
    denominators = loss_denominators(config, batch, step.num_microbatches)

    loss_of = batch_loss
    if step.bucket_bytes is not None:
        loss_of = functools.partial(fused_batch_loss, bucket_bytes=step.bucket_bytes)
    elif teacher is not None:
        loss_of = functools.partial(distilled_batch_loss, teacher=teacher)

    def scaled_loss(params, totals, batch, key):
        params = with_totals(params, totals)
        if expert_of_slot_NR is not None:
            params = with_replicas(params, expert_of_slot_NR)
        value, aux = loss_of(config, loss, params, batch, denominators=denominators, key=key)
        return value * loss_scale, (value, *aux)

    microbatch_gradients = jax.grad(scaled_loss, has_aux=True)
    is_one = step.num_microbatches == 1
    # A replica's slots of tasks are the whole mesh's.
    if is_one and not (has_slices() and expert_of_slot_NR is None):
        grads, (value, sums, stats) = microbatch_gradients(params, None, batch, key)
        return grads, value, sums, stats
    rows = into_microbatches(config, batch, step.num_microbatches)
    keys = jax.random.split(key, step.num_microbatches)

    def added_up(rows, params):
        if is_one:
            batch = jax.tree.map(lambda x: x[:, 0], rows)
            return microbatch_gradients(params, None, batch, key)
        batches = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows)
        first = jax.tree.map(lambda x: x[0], (batches, keys))
        no_grads = zero_gradients(params)
        _, measured = jax.eval_shape(microbatch_gradients, params, no_grads, *first)
        zeros = no_grads, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), measured)

        def add(total, microbatch):
            grads, measured = microbatch_gradients(params, total[0], *microbatch)
            return (
                add_gradients(total[0], grads),
                jax.tree.map(jnp.add, total[1], measured),
            ), None

        return jax.lax.scan(add, zeros, (batches, keys))[0]

    readers = (config, teacher.config) if isinstance(teacher, Teacher) else (config,)
    # Gradients in host memory are added up there, of all replicas.
    axes = () if host_stacks(params) else own_rows_axes(rows, *readers)
    grads, (value, sums, stats) = run_on_replicas(added_up, axes, rows, params)
    return grads, value, sums, stats


def train_step(
    config: ModelConfig,
    loss: LossConfig,
    step: StepConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: dict,
    expert_of_slot_NR=None,
    *,
    pipeline: Schedule | None = None,
    teacher: Teacher | WrittenTeacher | None = None,
) -> tuple[TrainState, StepMetrics]:
    """The state after one batch, and what was measured on the way; see `take_step`.

    Args:
        expert_of_slot_NR: see `gradients`; a pipeline has none.
        pipeline: by which the microbatches go through the stages of a pipeline; None where
            the mesh has none.
        teacher: see `gradients`; a pipeline has none.
    """
    is_half = config.precision.compute == "float16"
    if pipeline is None:
        compute = functools.partial(
            gradients,
            config,
            loss,
            step,
            expert_of_slot_NR=expert_of_slot_NR,
            teacher=teacher,
        )
    else:
        compute = functools.partial(pipelined_gradients, config, loss, pipeline)
    grads, value, sums, stats = compute(
        state.params, batch, key=state.key, loss_scale=state.loss_scale if is_half else 1.0
    )
    grads = into_slices(grads)
    norm_of = global_norm if step.bucket_bytes is None else sliced_global_norm
    # A frozen parameter's gradient has no other use, and is not computed where XLA sees it.
    raw_norm = norm_of(without_frozen(step.rate_multipliers, grads))
    state, metrics, _ = take_step(
        config, step, optimizer, state, grads, raw_norm, value, sums, stats
    )
    return state, metrics


def take_step(
    config: ModelConfig,
    step: StepConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    grads,
    raw_norm,
    value,
    sums: TokenSums,
    stats: RoutingStats | None,
):
    """The state after an update by raw gradients, or without one.

    A step whose loss or global gradient norm is not finite changes neither parameters nor
    optimizer state; it is counted in the state and flagged in the metrics.

    Args:
        grads: of the parameters that are in the state.
        raw_norm: of all gradients, those of experts in storage among them, those of frozen
            parameters not.
        value, sums, stats: of `gradients`.

    Returns:
        state, metrics, and what the raw gradients were multiplied by.
    """
    is_half = config.precision.compute == "float16"
    unscale = 1 / state.loss_scale if is_half else 1.0
    grad_norm = raw_norm * unscale
    is_finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
    clip = 1.0 if step.clip_norm is None else clip_scale(grad_norm, step.clip_norm)

    def update(params, opt_state, average):
        own = into_slices(params)  # whole where the optimizer's state is
        updates, opt_state = optimizer.update(
            grads, opt_state, own, gradient_scale=unscale * clip
        )
        updated = out_of_slices(into_slices(apply_updates(own, updates)))
        if stats is not None and config.switch.router.has_bias:
            updated = with_balanced_biases(config, params, updated, stats.load_E)
        updated = keep_frozen(step.rate_multipliers, params, updated)
        if average is not None:
            average = moved_average(average, into_slices(updated), step.ema_decay)
        return updated, opt_state, average

    # A conditional keeps the update in place; `jnp.where` afterwards would copy everything.
    kept = state.params, state.opt_state, state.average
    params, opt_state, average = jax.lax.cond(is_finite, update, lambda *kept: kept, *kept)
    is_skipped = 1 - is_finite.astype(jnp.int32)
    # An overflow that a smaller loss scale may mend is no sign that training has diverged.
    is_counted = is_skipped * (state.loss_scale <= 1) if is_half else is_skipped
    skipped_in_a_row = (state.skipped_in_a_row + is_counted) * is_skipped
    loss_scale, good_steps = (
        _next_loss_scale(state, is_finite) if is_half else (state.loss_scale, state.good_steps)
    )
    next_state = dataclasses.replace(
        state,
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        average=average,
        skipped=state.skipped + is_skipped,
        skipped_in_a_row=skipped_in_a_row,
        loss_scale=loss_scale,
        good_steps=good_steps,
    )
    metrics = StepMetrics(sums, value, stats, grad_norm, is_skipped, skipped_in_a_row)
    return next_state, metrics, jnp.asarray(unscale * clip, jnp.float32)


def _next_loss_scale(state: TrainState, is_finite):
    """Halved after a non-finite step, doubled after LOSS_SCALE_PATIENCE good ones."""
    good_steps = jnp.where(is_finite, state.good_steps + 1, 0)
    is_patient = good_steps >= LOSS_SCALE_PATIENCE
    grown = jnp.where(is_patient, state.loss_scale * 2, state.loss_scale)
    loss_scale = jnp.where(is_finite, grown, jnp.maximum(state.loss_scale / 2, 1.0))
    return loss_scale, jnp.where(is_patient, 0, good_steps)
