# SPDX-License-Identifier: Apache-2.0
"""Evaluation: the model's sums over a fixed set of batches, without any randomness."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from switchx.models.config import ModelConfig
from switchx.models.params import forward
from switchx.moe.stats import RoutingStats
from switchx.training.losses import LossConfig, TokenSums, cross_entropy
from switchx.training.metrics import routing_metrics, token_metrics
from switchx.training.routing_sample import RoutingSample, StackSample, sample_routing

# Evaluation reports the plain likelihood whatever the training loss adds to it.
PLAIN_LOSS = LossConfig(layer_reduction="mean", z_loss=0.0)


def eval_step(
    config: ModelConfig, params, batch: dict
) -> tuple[TokenSums, RoutingStats | None, dict[str, StackSample]]:
    """Token sums, routing statistics and a sample of the routing of one batch: no dropout,
    no jitter, and the evaluation capacity."""
    logits_BLV, stats = forward(config, params, batch, is_training=False)
    sums = cross_entropy(
        logits_BLV, batch["decoder_target_tokens"], batch["decoder_loss_weights"], PLAIN_LOSS
    )
    summed = None if stats is None else stats.summed
    return sums, summed, sample_routing(stats, batch)


def evaluate(
    step: Callable[[Any, dict], tuple],
    params,
    batches: Iterable[dict],
    sample: RoutingSample | None = None,
) -> dict[str, Any]:
    """Metrics over all batches together.

    Args:
        step: `eval_step` with its configuration bound, jitted.
        sample: takes in the routing of the first batches; None keeps none.

    Raises:
        ValueError: there is no batch.
    """
    total = None
    if sample is not None:
        sample.begin_task()
    for batch in batches:
        *sums, part = step(params, batch)
        if sample is not None:
            sample.add(part)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    if total is None:
        raise ValueError(
            "evaluation got no batch; expected at least one: the validation split is smaller "
            "than one batch, so use a smaller BATCH_SIZE or more validation text"
        )
    sums, stats = jax.device_get(total)
    return token_metrics(sums) | routing_metrics(stats)
