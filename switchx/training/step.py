# SPDX-License-Identifier: Apache-2.0
"""One training step, a pure function: gradients over microbatches, clipping, update or skip.

Dims: B batch, L length, V vocabulary, N Switch layers, E experts
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
from switchx.optim.multipliers import keep_frozen, without_frozen
from switchx.optim.updates import (
    clip_scale,
    global_norm,
    moved_average,
    rms_by_name,
    sliced_global_norm,
    update_if,
)
from switchx.partitioning.buckets import require_bucket_bytes
from switchx.partitioning.optimizer_slices import has_slices, into_slices, out_of_slices
from switchx.training.fused_loss import fused_batch_loss
from switchx.training.losses import (
    LossConfig,
    TokenSums,
    batch_loss,
    loss_denominators,
    whole_load,
)
from switchx.training.microbatches import into_microbatches, summed_gradients
from switchx.training.router_bias import with_balanced_routers

# Dynamic loss scaling (Micikevicius et al. 2018): the scale doubles after this many good steps.
LOSS_SCALE_PATIENCE = 2000


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """The settings of a training step.

    Attributes:
        num_microbatches: parts the batch is split into; gradients are summed over them.
        clip_norm: largest global gradient norm; larger gradients are scaled down to it.
        bucket_bytes: largest bucket, in bytes, in which parameters sliced over `fsdp` are
            all-gathered and their gradients reduce-scattered (`training/fused_loss.py`); None
            leaves both to the compiler.
        rate_multipliers: pairs of a pattern that matches parameter paths (as in unrolled
            layers, even if layers are scanned) and the factor of their learning rate, 0 to
            freeze them (`optim/multipliers.py`).
        ema_decay: decay of the exponential moving average of the parameters over steps, which
            evaluations during training use; None keeps no average.
        log_rms: whether the root mean squares of each parameter, its gradient and its update
            are logged, for each expert separately (T5X's `weight_rms`); they are computed in
            every step.
    """

    num_microbatches: int = at_resume(1)
    clip_norm: float | None = None
    bucket_bytes: int | None = at_resume(None)
    rate_multipliers: tuple[tuple[str, float], ...] = ()
    ema_decay: float | None = None
    log_rms: bool = at_resume(False)

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
    """The state that a training step takes and returns.

    Attributes:
        step: steps taken, skipped ones included.
        params: nested dictionary of parameters.
        opt_state: the optimizer's state.
        key_data: data of the run's random key; each step folds its number into the key.
        skipped: steps skipped so far because the loss or a gradient was not finite.
        skipped_in_a_row: steps skipped since the last good step; with float16 a skipped step
            counts only at loss scale 1, where a smaller scale cannot help.
        loss_scale: factor of the loss before the backward pass, so that float16 gradients do
            not underflow; 1 in other dtypes.
        good_steps: good steps since the loss scale last changed.
        average: exponential moving average of the parameters over good steps, float32; None
            without `StepConfig.ema_decay`.
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
        """The average in the dtypes and shardings of `params`; `params` without an average."""
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
    """The random key that a run's parameters are drawn from."""
    return jax.random.split(jax.random.key(seed))[0]


def init_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    seed: int,
    params=None,
    has_average: bool = False,
) -> TrainState:
    """The state at step 0.

    Args:
        params: parameters of an earlier run; None draws them from `seed`.
        has_average: whether the state keeps an average, which begins as the parameters.
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
    """The measurements of one step.

    Attributes:
        sums: sums over the tokens that have a loss.
        loss: mean loss of such a token, router losses included.
        routing: statistics of the Switch layers; None for a dense model.
        grad_norm: global norm of the gradients before clipping.
        is_skipped: whether the loss or a gradient was not finite, and nothing was updated.
        skipped_in_a_row: number of such steps in a row up to this one, as in `TrainState`.
        rms: root mean squares by T5X's names and by parameter; empty if they are not logged.
    """

    sums: TokenSums
    loss: jax.Array
    routing: RoutingStats | None
    grad_norm: jax.Array
    is_skipped: jax.Array
    skipped_in_a_row: jax.Array
    rms: dict[str, dict[str, jax.Array]] = dataclasses.field(default_factory=dict)


class Seam(NamedTuple):
    """The two functions in the computation of a step's gradients that a special tier replaces.

    Attributes:
        loss_of: function that returns a microbatch's loss and its terms, with the signature of
            `losses.batch_loss`.
        summed: function that sums gradients over the microbatches and over the replicas, with
            the signature of `microbatches.summed_gradients`; not called for one microbatch
            whose gradients are whole on every device.
    """

    loss_of: Callable = batch_loss
    summed: Callable = summed_gradients


def gradients(
    config: ModelConfig,
    loss: LossConfig,
    step: StepConfig,
    params,
    batch,
    *,
    key,
    loss_scale=1.0,
    seam: Seam | None = None,
):
    """Raw gradients of `loss_scale` times the loss over the whole batch.

    Args:
        seam: the two functions of a special tier; None uses `seam_of(step)`.

    Returns:
        Gradients, the unscaled loss, token sums, routing statistics (None for a dense model).
    """
    seam, M = seam or seam_of(step), step.num_microbatches
    denominators = loss_denominators(config, batch, M)
    if M > 1 and config.switch is not None and config.switch.router.counts_first:
        rows = into_microbatches(config, batch, M)
        keys = jax.random.split(key, M)
        denominators = whole_load(config, params, rows, keys, denominators)

    def scaled_loss(params, batch, key):
        value, aux = seam.loss_of(
            config, loss, params, batch, denominators=denominators, key=key
        )
        return value * loss_scale, (value, *aux)

    gradient_of = jax.grad(scaled_loss, has_aux=True)
    if M == 1 and not has_slices():  # one microbatch, and the compiler sums over replicas
        grads, (value, sums, stats) = gradient_of(params, batch, key)
    else:
        grads, (value, sums, stats) = seam.summed(gradient_of, config, params, batch, key, M)
    return grads, value, sums, stats


def seam_of(step: StepConfig) -> Seam:
    """The seam of a step on devices that have all parameters, whole or in slices."""
    if step.bucket_bytes is None:
        return Seam()
    return Seam(functools.partial(fused_batch_loss, bucket_bytes=step.bucket_bytes))


def train_step(
    config: ModelConfig,
    loss: LossConfig,
    step: StepConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: dict,
    *,
    compute: Callable | None = None,
) -> tuple[TrainState, StepMetrics]:
    """The state after one batch, and the step's metrics; see `take_step`.

    Args:
        compute: function `(params, batch, *, key, loss_scale)` that returns what `gradients`
            returns; None uses `gradients` with the three configurations.
    """
    is_half = config.precision.compute == "float16"
    compute = compute or functools.partial(gradients, config, loss, step)
    grads, value, sums, stats = compute(
        state.params, batch, key=state.key, loss_scale=state.loss_scale if is_half else 1.0
    )
    grads = into_slices(grads)
    norm_of = global_norm if step.bucket_bytes is None else sliced_global_norm
    # A frozen parameter's gradient has no other use: where XLA sees that, it is not computed.
    raw_norm = norm_of(without_frozen(step.rate_multipliers, grads, config.scanned_period))
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
    """The state after an update by raw gradients, and the step's metrics.

    A step whose loss or global gradient norm is not finite changes neither parameters nor
    optimizer state; it is counted in the state and flagged in the metrics.

    Args:
        grads: raw gradients of the parameters that are in the state.
        raw_norm: norm of all raw gradients, including those of experts in storage and excluding
            those of frozen parameters.
        value, sums, stats: the loss, token sums and routing statistics that `gradients`
            returns.

    Returns:
        The next state, the metrics, and the float32 factor (unscaling times clipping) that the
        raw gradients were multiplied by.
    """
    is_half = config.precision.compute == "float16"
    unscale = 1 / state.loss_scale if is_half else 1.0
    grad_norm = raw_norm * unscale
    is_finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
    clip = 1.0 if step.clip_norm is None else clip_scale(grad_norm, step.clip_norm)

    def update(params, opt_state, average):
        own = into_slices(params)  # whole where the optimizer's state is whole
        updates, opt_state = optimizer.update(
            grads, opt_state, own, gradient_scale=unscale * clip
        )
        updated = out_of_slices(into_slices(optax.apply_updates(own, updates)))
        if stats is not None:
            updated = with_balanced_routers(config.switch.router, params, updated, stats)
        updated = keep_frozen(step.rate_multipliers, params, updated, config.scanned_period)
        if average is not None:
            average = moved_average(average, into_slices(updated), step.ema_decay)
        moved = jax.tree.map(jnp.subtract, updated, params) if step.log_rms else {}
        return updated, opt_state, average, rms_by_name(moved)

    kept = state.params, state.opt_state, state.average
    rms = rms_by_name(state.params if step.log_rms else {})
    unmoved = jax.tree.map(jnp.zeros_like, rms)
    params, opt_state, average, moved = update_if(is_finite, update, kept, unmoved)
    if step.log_rms:
        raw = rms_by_name(jax.tree.map(lambda gradient: gradient * unscale, grads))
        rms = {"weight_rms": rms, "weight_gradient_rms": raw, "weight_update_rms": moved}
    is_skipped = 1 - is_finite.astype(jnp.int32)
    # An overflow that a smaller loss scale may avoid is no sign that training has diverged.
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
    routing = None if stats is None else stats.reported
    metrics = StepMetrics(sums, value, routing, grad_norm, is_skipped, skipped_in_a_row, rms)
    return next_state, metrics, jnp.asarray(unscale * clip, jnp.float32)


def _next_loss_scale(state: TrainState, is_finite):
    """The loss scale, halved after a non-finite step and doubled after LOSS_SCALE_PATIENCE good
    steps, and the number of good steps since it changed."""
    good_steps = jnp.where(is_finite, state.good_steps + 1, 0)
    is_patient = good_steps >= LOSS_SCALE_PATIENCE
    grown = jnp.where(is_patient, state.loss_scale * 2, state.loss_scale)
    loss_scale = jnp.where(is_finite, grown, jnp.maximum(state.loss_scale / 2, 1.0))
    return loss_scale, jnp.where(is_patient, 0, good_steps)
