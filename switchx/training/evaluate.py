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

# Evaluation reports the plain likelihood whatever the training loss adds to it.
PLAIN_LOSS = LossConfig(layer_reduction="mean", z_loss=0.0)


def eval_step(
    config: ModelConfig, params, batch: dict
) -> tuple[TokenSums, RoutingStats | None]:
    """Token sums and routing statistics of one batch: no dropout, no jitter, and the
    evaluation capacity."""
    logits_BLV, stats = forward(config, params, batch, is_training=False)
    sums = cross_entropy(
        logits_BLV, batch["decoder_target_tokens"], batch["decoder_loss_weights"], PLAIN_LOSS
    )
    return sums, stats


def evaluate(
    step: Callable[[Any, dict], tuple[TokenSums, RoutingStats | None]],
    params,
    batches: Iterable[dict],
) -> dict[str, Any]:
    """Metrics over all batches together.

    Args:
        step: `eval_step` with its configuration bound, jitted.

    Raises:
        ValueError: there is no batch.
    """
    total, num_batches = None, 0
    for batch in batches:
        sums = step(params, batch)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        num_batches += 1
    if total is None:
        raise ValueError(
            "evaluation got no batch; expected at least one: the validation split is smaller "
            "than one batch, so use a smaller BATCH_SIZE or more validation text"
        )
    sums, stats = jax.device_get(total)
    metrics = token_metrics(sums) | routing_metrics(stats)
    for name in ("balance_loss", "router_z_loss"):  # means over groups, added up above
        if "routing" in metrics:
            losses = metrics["routing"][name]
            metrics["routing"][name] = [value / num_batches for value in losses]
    return metrics
