# SPDX-License-Identifier: Apache-2.0
"""The training loss: cross-entropy plus the routers' auxiliary losses, summed in one place.

Dims: B L V N
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from switchx.moe.stats import RoutingStats


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights of everything that is added to the cross-entropy.

    Attributes:
        balance_weight: alpha of the balance loss (Fedus et al. 2021, eq. 4: 1e-2).
        router_z_weight: of the router z-loss (Zoph et al. 2022: 1e-3; Switch has none).
        layer_reduction: auxiliary losses are averaged over the sparse layers (t5x) or
            summed (Mesh-TensorFlow, so the paper's runs). They differ by the number of
            sparse layers, so the choice has no default that is right for both.
        z_loss: weight of log(Z)^2 of the output softmax (t5x: 1e-4).
        label_smoothing: probability mass spread evenly over the other tokens.
    """

    layer_reduction: Literal["mean", "sum"]
    balance_weight: float = 1e-2
    router_z_weight: float = 0.0
    z_loss: float = 1e-4
    label_smoothing: float = 0.0

    def __post_init__(self):
        if self.layer_reduction not in ("mean", "sum"):
            raise ValueError(
                f"LossConfig.layer_reduction={self.layer_reduction!r}; use 'mean' (t5x) or "
                "'sum' (Mesh-TensorFlow)"
            )
        for name in ("balance_weight", "router_z_weight", "z_loss"):
            if getattr(self, name) < 0:
                raise ValueError(f"LossConfig.{name}={getattr(self, name)}; use 0 or more")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"LossConfig.label_smoothing={self.label_smoothing}; use 0 <= mass < 1"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenSums:
    """Sums over real target tokens; divide by `tokens` for means.

    Attributes:
        loss: cross-entropy with label smoothing and z-loss, in nats.
        nll: negative log-likelihood, in nats, without either.
        correct: tokens whose most probable prediction is the target.
        tokens: real target tokens (the sum of the loss weights).
    """

    loss: jax.Array
    nll: jax.Array
    correct: jax.Array
    tokens: jax.Array


def cross_entropy(logits_BLV, targets_BL, weights_BL, config: LossConfig) -> TokenSums:
    """Weighted cross-entropy sums of a batch, in float32.

    With label smoothing s the target distribution is 1 - s on the target and s / (V - 1)
    on every other token; its entropy, a constant, is subtracted (t5x does the same), so a
    perfect prediction costs 0. Targets have to be 0 to V - 1: others are
    not told apart, `check_vocabulary` of a job is what keeps them out.
    """
    logits_BLV = logits_BLV.astype(jnp.float32)
    max_BL = jax.lax.stop_gradient(jnp.max(logits_BLV, axis=-1))
    shifted_BLV = logits_BLV - max_BL[..., None]
    log_z_BL = jnp.log(jnp.sum(jnp.exp(shifted_BLV), axis=-1))
    # Not a gather: of logits that are split over V it aborts XLA's partitioner in a pipeline.
    token_BLV = jax.lax.broadcasted_iota(targets_BL.dtype, shifted_BLV.shape, 2)
    is_target_BLV = token_BLV == targets_BL[..., None]
    target_BL = jnp.sum(jnp.where(is_target_BLV, shifted_BLV, 0), axis=-1)
    nll_BL = log_z_BL - target_BL
    loss_BL = nll_BL + config.z_loss * (log_z_BL + max_BL) ** 2
    smoothing = config.label_smoothing
    if smoothing:
        num_others = logits_BLV.shape[-1] - 1
        others_BL = jnp.sum(shifted_BLV, axis=-1) - target_BL
        other_nll_BL = log_z_BL - others_BL / num_others
        entropy = -(1 - smoothing) * jnp.log(1 - smoothing) - smoothing * jnp.log(
            smoothing / num_others
        )
        loss_BL = loss_BL + smoothing * (other_nll_BL - nll_BL) - entropy
    is_correct_BL = (target_BL >= 0).astype(jnp.float32)
    return TokenSums(
        loss=jnp.sum(loss_BL * weights_BL),
        nll=jnp.sum(jax.lax.stop_gradient(nll_BL) * weights_BL),
        correct=jnp.sum(is_correct_BL * weights_BL),
        tokens=jnp.sum(weights_BL),
    )


def auxiliary_loss(
    stats: RoutingStats | None, config: LossConfig, *, num_layers: int | None = None
):
    """Weighted balance and z-losses over the sparse layers; 0 for a dense model.

    Args:
        num_layers: sparse layers of the whole model, where `stats` are of a part of them:
            the parts' losses then add up to the whole's. None where they are of all.
    """
    if stats is None:
        return jnp.zeros((), jnp.float32)
    count = 1
    if config.layer_reduction == "mean":
        count = stats.balance_loss.shape[0] if num_layers is None else num_layers
    return config.balance_weight * (jnp.sum(stats.balance_loss) / count) + (
        config.router_z_weight * (jnp.sum(stats.router_z_loss) / count)
    )
