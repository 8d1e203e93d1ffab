# SPDX-License-Identifier: Apache-2.0
"""The training loss: cross-entropy plus the routers' auxiliary losses, summed in one place.

Dims: B batch, L length, D model, V vocabulary, N Switch layers, M microbatches, G routing
groups, P parts of a device's tokens, T tokens of a group or a part
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from switchx.fields import check_choices, require_at_least, require_below_one
from switchx.layers.embedding import Embedding, summed_over_tokens
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import bind, forward
from switchx.moe.balance_loss import count_sequences
from switchx.moe.capacity import into_groups, layer_groups
from switchx.moe.stats import RoutingStats
from switchx.partitioning.collectives import vary_alike
from switchx.partitioning.rules import MeshAxes
from switchx.training.microbatches import into_microbatches, sparse_stacks


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights of the terms that are added to the cross-entropy.

    Attributes:
        balance_weight: alpha of the balance loss (Fedus et al. 2021, eq. 4: 1e-2).
        router_z_weight: weight of the router z-loss (Zoph et al. 2022: 1e-3; Switch has none).
        layer_reduction: reduction of auxiliary losses over the sparse layers, to the `mean`
            (t5x) or the `sum` (Mesh-TensorFlow, so the paper's runs). They differ by the
            number of sparse layers, so no default is right for both.
        z_loss: weight of log(Z)^2 of the output softmax (t5x: 1e-4).
        label_smoothing: probability mass spread evenly over the other tokens.
    """

    layer_reduction: Literal["mean", "sum"]
    balance_weight: float = 1e-2
    router_z_weight: float = 0.0
    z_loss: float = 1e-4
    label_smoothing: float = 0.0

    def __post_init__(self):
        check_choices(self)
        require_at_least(self, 0, "balance_weight", "router_z_weight", "z_loss")
        require_below_one(self, "label_smoothing")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenSums:
    """Sums over real target tokens; divide by `tokens` for means.

    Attributes:
        loss: cross-entropy with label smoothing and z-loss, in nats; for a student, mixed with
            the soft loss (`distillation/soft_loss.py`).
        nll: negative log-likelihood in nats, without label smoothing and z-loss.
        correct: tokens whose most probable prediction is the target; among equally probable
            tokens the first id is predicted, as by `argmax`.
        tokens: real target tokens (the sum of the loss weights).
        soft_loss: a student's soft loss, `T^2 KL(teacher || student)`, in nats; None without a
            teacher.
    """

    loss: jax.Array
    nll: jax.Array
    correct: jax.Array
    tokens: jax.Array
    soft_loss: jax.Array | None = None


def cross_entropy(
    logits_BLV, targets_BL, weights_BL, config: LossConfig, axes: MeshAxes = ()
) -> TokenSums:
    """Weighted cross-entropy sums of a batch, in float32.

    With label smoothing s the target distribution is 1 - s on the target and s / (V - 1)
    on every other token; its entropy, a constant, is subtracted (t5x does the same), so a
    perfect prediction costs 0. Targets have to be 0 to V - 1: others are not detected;
    a job's `check_vocabulary` keeps them out.

    Args:
        axes: inside of a `shard_map`, the axes that V is split over: devices exchange what they
            sum over V (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3).
    """

    def sum_over_v(array_BLV):
        total_BL = jnp.sum(array_BLV, axis=-1)
        return jax.lax.psum(total_BL, axes) if axes else total_BL

    logits_BLV = logits_BLV.astype(jnp.float32)
    max_BL = jax.lax.stop_gradient(jnp.max(logits_BLV, axis=-1))
    V, first = logits_BLV.shape[-1], 0
    if axes:
        max_BL = jax.lax.pmax(max_BL, axes)
        first, V = jax.lax.axis_index(axes) * V, V * jax.lax.axis_size(axes)
    shifted_BLV = logits_BLV - max_BL[..., None]
    log_z_BL = jnp.log(sum_over_v(jnp.exp(shifted_BLV)))
    # Not a gather: on logits split over V, it aborts XLA's partitioner in a pipeline.
    token_BLV = jax.lax.broadcasted_iota(
        targets_BL.dtype, shifted_BLV.shape, shifted_BLV.ndim - 1
    )
    is_target_BLV = token_BLV == targets_BL[..., None] - first
    target_BL = sum_over_v(jnp.where(is_target_BLV, shifted_BLV, 0))
    nll_BL = log_z_BL - target_BL
    loss_BL = nll_BL + config.z_loss * (log_z_BL + max_BL) ** 2
    smoothing = config.label_smoothing
    if smoothing:
        others_BL = sum_over_v(shifted_BLV) - target_BL
        other_nll_BL = log_z_BL - others_BL / (V - 1)
        entropy = -(1 - smoothing) * jnp.log(1 - smoothing) - smoothing * jnp.log(
            smoothing / (V - 1)
        )
        loss_BL = loss_BL + smoothing * (other_nll_BL - nll_BL) - entropy
    # The first of equal logits is predicted, as by `argmax`: none before the target is equal.
    is_best_before_BLV = (token_BLV < targets_BL[..., None] - first) & (shifted_BLV >= 0)
    num_before_BL = sum_over_v(is_best_before_BLV.astype(jnp.float32))
    is_correct_BL = ((target_BL >= 0) & (num_before_BL == 0)).astype(jnp.float32)
    return TokenSums(
        loss=jnp.sum(loss_BL * weights_BL),
        nll=jnp.sum(jax.lax.stop_gradient(nll_BL) * weights_BL),
        correct=jnp.sum(is_correct_BL * weights_BL),
        tokens=jnp.sum(weights_BL),
    )


def cross_entropy_of(
    embedding: Embedding, x_BLD, targets_BL, weights_BL, config: LossConfig
) -> TokenSums:
    """`cross_entropy` of `embedding.logits(x_BLD)`, of which one part exists at a time.

    The logits `[B, L, V]` in float32 and their gradient would be a step's largest arrays. The
    gradient of a part is computed with its sums (Hsu et al. 2024, Liger Kernel,
    arXiv:2410.10989, section 3.2): what comes backward is one number that multiplies it. So it
    is that of `loss` only, by activations and parameters, and there is no forward mode.
    """
    x_BLD, weight, dims = embedding.factors(x_BLD)

    def compute(x_BLD, weight, targets_BL, weights_BL, axes):
        parts = embedding.config.num_logit_parts(math.prod(x_BLD.shape[:2]))
        x_BLD, weight = vary_alike(x_BLD, weight)
        x_PTD, *of_tokens = (
            array.reshape(parts, -1, *array.shape[2:])
            for array in (x_BLD, targets_BL, weights_BL)
        )
        return _sums_of_parts(config, axes, dims, x_PTD, weight, *of_tokens)

    return summed_over_tokens(compute, x_BLD, weight, dims, targets_BL, weights_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sums_of_parts(config, axes, dims: str, x_PTD, weight, targets_PT, weights_PT):
    def of_part(_, part):
        x_TD, *of_tokens = part
        logits_TV = jnp.einsum(f"TD,{dims}->TV", x_TD, weight)
        return None, cross_entropy(logits_TV, *of_tokens, config, axes)

    parts = x_PTD, targets_PT, weights_PT
    _, sums = jax.lax.scan(of_part, None, parts, unroll=len(x_PTD) == 1)
    return _added(sums)


def _sums_and_gradients(config, axes, dims: str, x_PTD, weight, targets_PT, weights_PT):
    """The sums and the gradients of `loss`, at least in float32."""
    dtype = jnp.promote_types(weight.dtype, jnp.float32)
    product = functools.partial(jnp.einsum, preferred_element_type=dtype)
    # Values too small for float16 before the loss scale multiplies them stay in float32.
    operand = dtype if weight.dtype == jnp.float16 else weight.dtype

    def of_part(d_weight, part):
        x_TD, *of_tokens = part

        def loss(logits_TV):
            sums = cross_entropy(logits_TV, *of_tokens, config, axes)
            return sums.loss, sums

        logits_TV = jnp.einsum(f"TD,{dims}->TV", x_TD, weight)
        d_logits_TV, sums = jax.grad(loss, has_aux=True)(logits_TV.astype(dtype))
        d_logits_TV = d_logits_TV.astype(operand)
        # The larger operand is the right one: XLA transposes a left one on CPUs.
        d_weight += product(f"TD,TV->{dims}", x_TD, d_logits_TV)
        return d_weight, (sums, product(f"TV,{dims}->TD", d_logits_TV, weight))

    zeros, _ = vary_alike(jnp.zeros(weight.shape, dtype), x_PTD)
    parts, is_one = (x_PTD, targets_PT, weights_PT), len(x_PTD) == 1
    d_weight, (sums, dx_PTD) = jax.lax.scan(of_part, zeros, parts, unroll=is_one)
    return _added(sums), (x_PTD, weight, dx_PTD, d_weight)


def _scaled_gradients(config, axes, dims: str, residuals, d_sums: TokenSums):
    *inputs, dx_PTD, d_weight = residuals
    gradients = zip((dx_PTD, d_weight), inputs, strict=True)
    scaled = [(d_sums.loss * gradient).astype(x.dtype) for gradient, x in gradients]
    return *scaled, None, None


_sums_of_parts.defvjp(_sums_and_gradients, _scaled_gradients)


def _added(sums: TokenSums) -> TokenSums:
    return jax.tree.map(functools.partial(jnp.sum, axis=0), sums)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossDenominators:
    """The divisors of the loss's sums: counts over the whole batch.

    They depend only on padding and on the routing groups, so they are known before any
    microbatch is run, and the terms of microbatches, stages and devices add up to the loss.

    Attributes:
        target_tokens: the sum of the loss weights.
        tokens, groups: number of real tokens, and of groups of the balance loss that have any,
            by stack.
        share_NE: shares of the choices of the whole batch, which the balance loss of its parts
            compares with (`RoutingStats.with_load`); None where each part has its own.
    """

    target_tokens: jax.Array
    tokens: dict[str, jax.Array]
    groups: dict[str, jax.Array]
    share_NE: jax.Array | None = None


def loss_denominators(
    model: ModelConfig, batch: dict, num_microbatches: int = 1
) -> LossDenominators:
    """The denominators of a batch that is cut by `into_microbatches`."""
    tokens, groups = {}, {}
    split = into_microbatches(model, batch, num_microbatches)
    for stack in sparse_stacks(model):
        is_token_BML = split[f"{stack}_segment_ids"] > 0
        if model.switch.router.padding == "counted":
            is_token_BML = jnp.ones_like(is_token_BML)
        tokens[stack] = jnp.sum(is_token_BML, dtype=jnp.float32)
        if model.switch.router.balance_scope == "sequence":
            groups[stack] = count_sequences(batch[f"{stack}_segment_ids"])
        elif model.switch.router.keeps_load:
            groups[stack] = tokens[stack]
        else:
            groups[stack] = _count_groups(model.switch, is_token_BML)
    return LossDenominators(jnp.sum(batch["decoder_loss_weights"]), tokens, groups)


def _count_groups(switch: SwitchConfig, is_token_BML):
    """Routing groups that have real tokens, as layers form them in each microbatch."""
    B, _, L = is_token_BML.shape
    G, T = layer_groups(switch, B, L)
    into = jax.vmap(lambda is_token_BL: into_groups(is_token_BL, G, T), in_axes=1)
    has_tokens_MG = jnp.any(into(is_token_BML), axis=-1)
    if switch.router.balance_scope == "batch":
        has_tokens_MG = jnp.any(has_tokens_MG, axis=-1, keepdims=True)
    return jnp.sum(has_tokens_MG, dtype=jnp.float32)


def loss_terms(
    loss: LossConfig,
    model: ModelConfig,
    denominators: LossDenominators,
    sums: TokenSums | None,
    stats: RoutingStats | None,
    *,
    stack: str | None = None,
):
    """The part of the loss that comes from these token sums and this routing.

    Parts add up; together they are the cross-entropy per target token plus the weighted balance
    loss and router z-loss, averaged or summed over the Switch layers.

    Args:
        sums: token sums; None for a part without target tokens.
        stats: `[N, ...]` of all Switch layers, or of some layers of one stack; None for none.
        stack: the stack whose layers the statistics are of; None if they are of the whole
            model.
    """
    value = jnp.zeros((), jnp.float32)
    if sums is not None:
        value = sums.loss / jnp.maximum(denominators.target_tokens, 1)
    if stats is None:
        return value
    layers = model.sparse_layer_names
    tokens, groups = (
        _by_layer(model, counts) if stack is None else counts[stack]
        for counts in (denominators.tokens, denominators.groups)
    )
    auxiliary = jnp.sum(
        loss.balance_weight * stats.balance / jnp.maximum(groups, 1)
        + loss.router_z_weight * stats.router_z / jnp.maximum(tokens, 1)
    )
    return value + auxiliary / (len(layers) if loss.layer_reduction == "mean" else 1)


def _by_layer(model: ModelConfig, counts: dict[str, jax.Array]):
    """Counts by stack as `[N]`, one for each Switch layer."""
    return jnp.stack([counts[name.split()[0]] for name in model.sparse_layer_names])


def whole_load(model: ModelConfig, params, rows: dict, keys, denominators: LossDenominators):
    """The denominators with the load of the whole batch, which a first forward pass counts.

    Args:
        rows: the batch, as `into_microbatches` returns it.
        keys: keys of the microbatches, as for the gradients: noise and thus choices are equal.
    """

    def counted(params, batch, key):
        if model.build is not None:
            _, stats = forward(model, params, batch, is_training=True, key=key)
        else:
            _, stats = bind(model, params).activations(batch, is_training=True, key=key)
        return stats.counted_E

    batches = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows)
    counts_MNE = jax.lax.map(lambda each: counted(params, *each), (batches, keys))
    count_NE = jnp.sum(counts_MNE, axis=0)
    share_NE = count_NE / jnp.maximum(jnp.sum(count_NE, axis=-1, keepdims=True), 1)
    return dataclasses.replace(
        denominators,
        groups=jax.tree.map(jnp.ones_like, denominators.groups),
        share_NE=jax.lax.stop_gradient(share_NE),
    )


def with_whole_load(
    model: ModelConfig, denominators: LossDenominators, stats: RoutingStats | None
) -> RoutingStats | None:
    """A microbatch's statistics, with a balance loss by the whole batch's load if known."""
    if stats is None or denominators.share_NE is None:
        return stats
    tokens_N = jnp.maximum(_by_layer(model, denominators.tokens), 1)
    return stats.with_load(denominators.share_NE, tokens_N)


def token_sums(
    config: ModelConfig, loss: LossConfig, params, batch, *, is_training: bool, key=None
) -> tuple[TokenSums, RoutingStats | None]:
    """The token sums of `forward`'s logits, and its statistics."""
    of_tokens = batch["decoder_target_tokens"], batch["decoder_loss_weights"], loss
    if config.build is not None:
        logits_BLV, stats = forward(config, params, batch, is_training=is_training, key=key)
        return cross_entropy(logits_BLV, *of_tokens), stats
    model = bind(config, params)
    x_BLD, stats = model.activations(batch, is_training=is_training, key=key)
    return cross_entropy_of(model.embedding, x_BLD, *of_tokens), stats


def batch_loss(
    config: ModelConfig, loss: LossConfig, params, batch, *, denominators: LossDenominators, key
):
    """One microbatch's part of the training loss.

    The gradient is that of the unsplit batch if microbatches keep its routing groups
    (`into_microbatches`).

    Args:
        denominators: denominators of the whole batch.

    Returns:
        The loss and (token sums, routing statistics).
    """
    sums, stats = token_sums(config, loss, params, batch, is_training=True, key=key)
    stats = with_whole_load(config, denominators, stats)
    value = loss_terms(loss, config, denominators, sums, stats)
    return value, (sums, None if stats is None else stats.summed)
