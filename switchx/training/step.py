# SPDX-License-Identifier: Apache-2.0
"""One training step, pure: gradients over microbatches, clipping, update or skip.

Dims: B batch, L length, V vocabulary
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

from switchx.fields import at_resume
from switchx.models.config import ModelConfig
from switchx.models.params import forward
from switchx.moe.stats import RoutingStats
from switchx.optim.protocol import apply_updates, clip_scale, global_norm, sliced_global_norm
from switchx.partitioning.buckets import require_bucket_bytes
from switchx.partitioning.schedule import Schedule
from switchx.training.fused_loss import fused_batch_loss
from switchx.training.losses import (
    LossConfig,
    LossDenominators,
    TokenSums,
    cross_entropy,
    loss_denominators,
    loss_terms,
)
from switchx.training.pipelined import pipelined_gradients
from switchx.training.router_bias import with_balanced_biases
from switchx.training.state import TrainState

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
    """

    num_microbatches: int = at_resume(1)
    clip_norm: float | None = None
    bucket_bytes: int | None = at_resume(None)

    def __post_init__(self):
        if self.bucket_bytes is not None:
            require_bucket_bytes(self.bucket_bytes)
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches={self.num_microbatches}; use at least 1")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clip_norm={self.clip_norm}; use a norm above 0, or None")


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
    loss_scale: jax.Array


def batch_loss(
    config: ModelConfig,
    loss: LossConfig,
    params,
    batch,
    *,
    denominators: LossDenominators,
    key,
):
    """One microbatch's part of the training loss.

    The gradient is that of the unsplit batch where groups of tokens lie within microbatches.

    Args:
        denominators: of the whole batch.

    Returns:
        The loss and (token sums, routing statistics).
    """
    logits_BLV, stats = forward(config, params, batch, is_training=True, key=key)
    sums = cross_entropy(
        logits_BLV, batch["decoder_target_tokens"], batch["decoder_loss_weights"], loss
    )
    value = loss_terms(loss, config, denominators, sums, stats)
    return value, (sums, None if stats is None else stats.summed)


def split_batch(batch: dict, num_microbatches: int) -> dict:
    """`[B, ...]` -> `[num_microbatches, B / num_microbatches, ...]`, every n-th row together.

    Strided, so that each device of a sharded batch keeps its rows.
    """

    def split(x):
        rows = x.reshape(x.shape[0] // num_microbatches, num_microbatches, *x.shape[1:])
        return jnp.swapaxes(rows, 0, 1)

    return jax.tree.map(split, batch)


def gradients(
    config: ModelConfig,
    loss: LossConfig,
    step: StepConfig,
    params,
    batch,
    *,
    key,
    loss_scale=1.0,
):
    """Raw gradients of `loss_scale` times the loss over the whole batch.

    Returns:
        gradients, the unscaled loss, token sums, routing statistics (None for a dense model).
    """
    denominators = loss_denominators(config, batch, step.num_microbatches)

    loss_of = batch_loss
    if step.bucket_bytes is not None:
        loss_of = functools.partial(fused_batch_loss, bucket_bytes=step.bucket_bytes)

    def scaled_loss(params, batch, key):
        value, aux = loss_of(config, loss, params, batch, denominators=denominators, key=key)
        return value * loss_scale, (value, *aux)

    def microbatch_gradients(batch, key):
        grads, (value, sums, stats) = jax.grad(scaled_loss, has_aux=True)(params, batch, key)
        return grads, (value, sums, stats)

    if step.num_microbatches == 1:
        grads, (value, sums, stats) = microbatch_gradients(batch, key)
    else:
        batches = split_batch(batch, step.num_microbatches)
        keys = jax.random.split(key, step.num_microbatches)
        first = jax.tree.map(lambda x: x[0], (batches, keys))
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(microbatch_gradients, *first)
        )

        def add(total, microbatch):
            return jax.tree.map(jnp.add, total, microbatch_gradients(*microbatch)), None

        (grads, (value, sums, stats)), _ = jax.lax.scan(add, zeros, (batches, keys))
    return grads, value, sums, stats


def train_step(
    config: ModelConfig,
    loss: LossConfig,
    step: StepConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: dict,
    *,
    pipeline: Schedule | None = None,
) -> tuple[TrainState, StepMetrics]:
    """The state after one batch, and what was measured on the way.

    A step whose loss or global gradient norm is not finite changes neither parameters nor
    optimizer state; it is counted in the state and flagged in the metrics.

    Args:
        pipeline: by which the microbatches go through the stages of a pipeline; None where
            the mesh has none.
    """
    is_half = config.precision.compute == "float16"
    if pipeline is None:
        compute = functools.partial(gradients, config, loss, step)
    else:
        compute = functools.partial(pipelined_gradients, config, loss, pipeline)
    grads, value, sums, stats = compute(
        state.params, batch, key=state.key, loss_scale=state.loss_scale if is_half else 1.0
    )
    unscale = 1 / state.loss_scale if is_half else 1.0
    norm_of = global_norm if step.bucket_bytes is None else sliced_global_norm
    grad_norm = norm_of(grads) * unscale
    is_finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
    clip = 1.0 if step.clip_norm is None else clip_scale(grad_norm, step.clip_norm)

    def update(params, opt_state):
        updates, opt_state = optimizer.update(
            grads, opt_state, params, gradient_scale=unscale * clip
        )
        updated = apply_updates(params, updates)
        if stats is not None:
            updated = with_balanced_biases(config, params, updated, stats.load_E)
        return updated, opt_state

    # A conditional keeps the update in place; `jnp.where` afterwards would copy everything.
    params, opt_state = jax.lax.cond(
        is_finite, update, lambda *kept: kept, state.params, state.opt_state
    )
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
        skipped=state.skipped + is_skipped,
        skipped_in_a_row=skipped_in_a_row,
        loss_scale=loss_scale,
        good_steps=good_steps,
    )
    metrics = StepMetrics(
        sums, value, stats, grad_norm, is_skipped, skipped_in_a_row, state.loss_scale
    )
    return next_state, metrics


def _next_loss_scale(state: TrainState, is_finite):
    """Halved after a non-finite step, doubled after LOSS_SCALE_PATIENCE good ones."""
    good_steps = jnp.where(is_finite, state.good_steps + 1, 0)
    is_patient = good_steps >= LOSS_SCALE_PATIENCE
    grown = jnp.where(is_patient, state.loss_scale * 2, state.loss_scale)
    loss_scale = jnp.where(is_finite, grown, jnp.maximum(state.loss_scale / 2, 1.0))
    return loss_scale, jnp.where(is_patient, 0, good_steps)
