# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention: a pure function of arrays, the module that owns its weights, masks.

Vaswani et al. 2017 (arXiv:1706.03762); T5's form has no 1/sqrt(K) (it is in the query's
initializer) and adds a relative position bias. Where keys and values have fewer heads, each is
read by an equal group of queries (Ainslie et al. 2023, arXiv:2305.13245). Norms of queries and
keys: Dehghani et al. 2023 (arXiv:2302.05442), section 2, here RMSNorm.
Dims: B batch, L queries, M keys and values (the memory), D model, H heads, K head size,
Z heads of keys and values, which are the H of `KeysValues`
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.implementations import current_device
from switchx.layers.dense import plus, times, weight, zeros
from switchx.layers.dropout import cheap_again, dropout
from switchx.layers.kv_cache import KeysValues
from switchx.layers.norm import rms_norm
from switchx.partitioning.constrain import constrain, current_rules, num_devices

MASKED = -1e9


def segment_mask(query_segment_BL, key_segment_BM):
    """True where query and key belong to one packed example; segment 0 is padding."""
    is_same_BLM = query_segment_BL[:, :, None] == key_segment_BM[:, None, :]
    return is_same_BLM & (key_segment_BM[:, None, :] > 0)


def causal_mask(segment_BL, prefix_mask_BL=None):
    """The segment mask in which a position sees only itself and what comes before it.

    Args:
        prefix_mask_BL: non-zero in each example's prefix, all of which every position of
            the example sees (prefix LM); None for a purely causal model.
    """
    length = segment_BL.shape[1]
    is_visible_BLM = jnp.tril(jnp.ones((1, length, length), bool))
    if prefix_mask_BL is not None:
        is_visible_BLM = is_visible_BLM | (prefix_mask_BL[:, None, :] > 0)
    return segment_mask(segment_BL, segment_BL) & is_visible_BLM


def attend(
    query_BLHK,
    memory: KeysValues,
    *,
    bias_HLM=None,
    row_bias_BHLM=None,
    mask_BLM=None,
    dropout_rate: float = 0.0,
    key=None,
):
    """softmax(q k^T + biases) v, the softmax in float32.

    The memory has as many heads as the queries or a divisor; query head h reads its head
    h // (H / Z).

    Args:
        bias_HLM: bias that is added to the scores of every row of the batch.
        row_bias_BHLM: bias that is added to the scores, one for each row.
        mask_BLM: true where a query may attend to a key; L or M may be 1 if all are alike. A
            query without any key (padding) gets an average that no loss and no other token
            reads.
        key: random key for dropout of attention weights, whose mask all queries share, as in
            T5X; None for no dropout.

    Returns:
        `out_BHLK` in the queries' dtype.
    """
    B, L, H, K = query_BLHK.shape
    Z, M = memory.value_BHMK.shape[1:3]
    if (R := H // Z) > 1:
        # The queries of a group come one after the other: keys and values are not repeated.
        query_BLHK = query_BLHK.reshape(B, L, Z, R, K)
        query_BLHK = jnp.moveaxis(query_BLHK, 3, 1).reshape(B, R * L, Z, K)
    scores_BHLM = jnp.einsum(
        "BLHK,BHKM->BHLM", query_BLHK, memory.key_BHKM, preferred_element_type=jnp.float32
    ).reshape(B, H, L, M)
    if bias_HLM is not None:
        scores_BHLM = scores_BHLM + bias_HLM.astype(scores_BHLM.dtype)[None]
    if row_bias_BHLM is not None:
        scores_BHLM = scores_BHLM + row_bias_BHLM.astype(scores_BHLM.dtype)
    if mask_BLM is not None:
        scores_BHLM = jnp.where(mask_BLM[:, None], scores_BHLM, MASKED)
    weights_BHLM = softmax_in(query_BLHK.dtype, scores_BHLM)
    # All queries share the mask, so (w mask) v = w (mask v), and v is the smaller array.
    value_BHMK = dropout(memory.value_BHMK, dropout_rate, key=key, shared_dims=(3,))
    out_BHLK = jnp.einsum("BHLM,BHMK->BHLK", weights_BHLM.reshape(B, Z, R * L, M), value_BHMK)
    return out_BHLK.reshape(B, H, L, K)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def softmax_in(dtype, scores_BHLM):
    """softmax over the last dimension in the scores' dtype, rounded to `dtype` at its end.

    Its backward pass reads the rounded weights, which the product with the values keeps too, so
    that no array of the scores' size is kept in float32. The gradient of the scores is
    w (dw - sum(w dw)) in their dtype, with w as rounded.
    """
    return jax.nn.softmax(scores_BHLM, axis=-1).astype(dtype)


def _softmax_forward(dtype, scores_BHLM):
    weights_BHLM = softmax_in(dtype, scores_BHLM)
    # An empty array, whose dtype is that of the scores.
    return weights_BHLM, (weights_BHLM, scores_BHLM[..., :0])


def _softmax_backward(dtype, residuals, dweights_BHLM):
    weights_BHLM, like = residuals
    w_BHLM = weights_BHLM.astype(like.dtype)
    dw_BHLM = dweights_BHLM.astype(like.dtype)
    return (w_BHLM * (dw_BHLM - jnp.sum(w_BHLM * dw_BHLM, axis=-1, keepdims=True)),)


softmax_in.defvjp(_softmax_forward, _softmax_backward)


def attend_by_cudnn(
    query_BLHK,
    memory: KeysValues,
    *,
    bias_HLM=None,
    row_bias_BHLM=None,
    mask_BLM=None,
    dropout_rate: float = 0.0,
    key=None,
):
    """`attend` by cuDNN's flash attention, which keeps no scores for its backward pass.

    It is a path for one platform, not measured yet; the default is `attend` (docs/compiled.md).
    JAX asks for a mask's gradient as for a bias's, which costs a workspace `[B, H, L, M]`.

    Raises:
        ValueError: cuDNN's attention cannot run here, or not on these arrays.
    """
    (_, L, _, _), M = query_BLHK.shape, memory.key_BHKM.shape[3]
    _require_cudnn(query_BLHK.dtype, L, M)
    biases = None if bias_HLM is None else bias_HLM[None], row_bias_BHLM
    bias_BHLM = sum((each for each in biases if each is not None), jnp.zeros((1, 1, L, M)))
    if mask_BLM is not None:
        bias_BHLM = jnp.where(mask_BLM[:, None], bias_BHLM, MASKED)
    value_BHMK = dropout(memory.value_BHMK, dropout_rate, key=key, shared_dims=(3,))
    out_BLHK = jax.nn.dot_product_attention(
        query_BLHK,
        jnp.moveaxis(memory.key_BHKM, 3, 1),
        jnp.moveaxis(value_BHMK, 2, 1),
        # Rounded: cuDNN has no gradient for a float32 bias, which only its plan says.
        bias_BHLM.astype(query_BLHK.dtype),
        scale=1.0,
        implementation="cudnn",
    )
    return jnp.moveaxis(out_BLHK, 2, 1)


def _require_cudnn(dtype, L: int, M: int) -> None:
    if found := _cudnn_refusals(dtype, L, M):
        raise ValueError(
            f"ModelConfig.training_attention='cudnn': {', '.join(found)}; use 'einsum'"
        )


def _cudnn_refusals(dtype, L: int, M: int) -> list[str]:
    device = current_device()
    refusals = {
        f"JAX runs on {device.kind}": not device.is_nvidia,
        f"computes in {dtype}, not in bfloat16 or float16": dtype.itemsize != 2,
        f"has {L} queries and {M} keys, not even numbers": L % 2 or M % 2,
        # Where JAX fails to divide cuDNN's calls: stages, microbatches of replicas, buckets.
        "is inside of a shard_map": jax.sharding.get_abstract_mesh().manual_axes,
    }
    return [reason for reason, holds in refusals.items() if holds]


# Sizes of a splash attention tile, in places; the largest that divides a row is used.
_SPLASH_BLOCKS = (512, 256, 128)


def attend_by_splash(
    query_BLHK,
    memory: KeysValues,
    *,
    segment_BL,
    dropout_rate: float = 0.0,
    key=None,
    interpret: bool = False,
):
    """`attend` to earlier places of the same segment by JAX's splash attention on TPUs.

    It keeps no scores, and skips the tiles above the diagonal. Padding, segment 0, attends to
    padding.

    Raises:
        ValueError: it cannot run here, or not on rows of this length.
    """
    # Imported where it is used: its import takes as long as a small model's.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    (_, L, H, _), Z = query_BLHK.shape, memory.key_BHKM.shape[1]
    if not interpret and (found := _splash_refusals(L)):
        raise ValueError(
            f"ModelConfig.training_attention='splash': {', '.join(found)}; use 'einsum'"
        )
    query_BHLK = jnp.swapaxes(query_BLHK, 1, 2)
    key_BHMK = jnp.swapaxes(memory.key_BHKM, 2, 3)
    value_BHMK = dropout(memory.value_BHMK, dropout_rate, key=key, shared_dims=(3,))

    def local(query_BHLK, key_BHMK, value_BHMK, segment_BL):
        names = (each.name for each in dataclasses.fields(splash.BlockSizes))
        sizes = {name: block for name in names if name.startswith("block_")}
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([splash.CausalMask((L, L))] * query_BHLK.shape[1]),
            block_sizes=splash.BlockSizes(**sizes),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        segments = splash.SegmentIds(segment_BL, segment_BL)
        return jax.vmap(kernel)(query_BHLK, key_BHMK, value_BHMK, segments)

    block = next(size for size in _SPLASH_BLOCKS if L % size == 0)
    if num_devices() > 1:  # no compiler divides the kernel
        mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
        specs = {
            heads: rules.spec("BHLK", (len(segment_BL), heads, L, 1), mesh, table="activations")
            for heads in (H, Z)
        }
        if specs[Z] != specs[H]:  # heads of keys that do not divide
            key_BHMK, value_BHMK = (jnp.repeat(x, H // Z, 1) for x in (key_BHMK, value_BHMK))
        spec, rows = specs[H], jax.sharding.PartitionSpec(specs[H][0])
        local = jax.shard_map(
            local, in_specs=(spec, spec, spec, rows), out_specs=spec, check_vma=False
        )
    return local(query_BHLK, key_BHMK, value_BHMK, segment_BL)


def _splash_refusals(L: int) -> list[str]:
    device, least = current_device(), _SPLASH_BLOCKS[-1]
    refusals = {
        f"JAX runs on {device.kind}": device.platform != "tpu",
        f"rows have {L} tokens, no multiple of {least}": L % least,
        "is inside of a shard_map": jax.sharding.get_abstract_mesh().manual_axes,
    }
    return [reason for reason, holds in refusals.items() if holds]


def _automatic(query_BLHK, memory: KeysValues, causal_segment_BL) -> str:
    """The implementation for `auto`: the device's flash attention if attention is plainly
    causal and it can run, else `einsum`."""
    L, M = query_BLHK.shape[1], memory.key_BHKM.shape[3]
    if causal_segment_BL is None:
        return "einsum"
    if not _splash_refusals(L):
        return "splash"
    return "einsum" if _cudnn_refusals(query_BLHK.dtype, L, M) else "cudnn"


ATTENDS = {"einsum": attend, "cudnn": attend_by_cudnn, "splash": attend_by_splash}


class AttentionOutput(nnx.Module):
    """The second half of an attention: queries read the memory, the heads go back to D.

    Attributes:
        score_scale: factor of the queries where `ModelConfig.scale_attention` is set.
    """

    def __init__(self, config, *, num_correlations: int, key):
        """Draws the weights.

        Args:
            num_correlations: number of correlations of unit variance that a score sums.
        """
        self.config = config
        self.score_scale = (num_correlations * config.d_head) ** -0.5
        D, H, K = config.d_model, config.num_heads, config.d_head
        self.w_out_HKD = weight(config, key, (H, K, D), fan_in=H * K)
        if config.biases_of_attention == "all":
            self.b_out_D = zeros(config, D)

    def read(
        self,
        query_BLHK,
        memory: KeysValues,
        *,
        by="einsum",
        causal_segment_BL=None,
        key=None,
        **biases,
    ):
        """Output `[B, L, D]` of queries that read the memory.

        Args:
            by: implementation, one of `ATTENDS`, or `auto`.
            causal_segment_BL: see `BlockInputs`; only flash attention reads it.
            key: random key of dropout; None for no dropout.
            biases: `bias_HLM`, `row_bias_BHLM` and `mask_BLM` of `attend`.
        """
        if by == "auto":
            by = _automatic(query_BLHK, memory, causal_segment_BL)
        if by == "splash":
            biases = {"segment_BL": causal_segment_BL}
        if self.config.scale_attention:
            query_BLHK = query_BLHK * jnp.asarray(self.score_scale, query_BLHK.dtype)
        rate = self.config.dropout_rate
        out_BHLK = ATTENDS[by](query_BLHK, memory, dropout_rate=rate, key=key, **biases)
        y_BLD = times("BHLK,HKD->BLD", out_BHLK, self.w_out_HKD[...])
        if self.config.biases_of_attention != "all":
            return y_BLD
        return plus(y_BLD, self.b_out_D[...])


class Attention(AttentionOutput):
    """Attention whose memory is the tokens themselves, a cache, or an encoder's output.

    Parameters of keys and values end in `ZK` where they have fewer heads than the queries.
    """

    def __init__(self, config, *, num_correlations: int = 1, key):
        keys = jax.random.split(key, 4)
        super().__init__(config, num_correlations=num_correlations, key=keys[3])
        D = config.d_model
        H = config.num_heads
        K = config.d_head
        Z = config.kv_heads
        shared = "HK" if Z == H else "ZK"
        self.dims = {"query": "HK", "key": shared, "value": shared}
        # Without 1/sqrt(K) in the scores, the queries start that much smaller.
        query_scale = config.init_scale / (1 if config.scale_attention else K)
        scales = {"query": query_scale, "key": None, "value": None}
        for (name, dims), key_of in zip(self.dims.items(), keys[:3], strict=True):
            shape = (H if name == "query" else Z, K)
            drawn = weight(config, key_of, (D, *shape), fan_in=D, scale=scales[name])
            setattr(self, f"w_{name}_D{dims}", drawn)
            if config.biases_of_attention != "none":
                setattr(self, f"b_{name}_{dims}", zeros(config, *shape))
            if config.qk_norm != "none" and name != "value":
                normed = (dims, shape) if config.qk_norm == "all" else ("K", (K,))
                scale = nnx.Param(jnp.ones(normed[1], config.precision.params))
                setattr(self, f"scale_{name}_{normed[0]}", scale)

    def _project(self, name: str, x_BLD, rotation=None):
        """Queries, keys or values: projected, normed, rotated by their positions."""
        config, dims = self.config, self.dims[name]
        y_BLHK = times(f"BLD,D{dims}->BL{dims}", x_BLD, getattr(self, f"w_{name}_D{dims}")[...])
        if config.biases_of_attention != "none":
            y_BLHK = plus(y_BLHK, getattr(self, f"b_{name}_{dims}")[...])
        if name == "value":
            return y_BLHK
        if config.qk_norm != "none":
            scale = getattr(self, f"scale_{name}_{dims if config.qk_norm == 'all' else 'K'}")
            norm = functools.partial(rms_norm, epsilon=config.norm_epsilon)
            y_BLHK = cheap_again(norm)(y_BLHK, scale[...])
        return y_BLHK if rotation is None else rotation(y_BLHK)

    def project_memory(self, x_BMD, rotation=None) -> KeysValues:
        """Keys and values of these tokens.

        Args:
            rotation: `Rotation` of the tokens, or None: keys are kept rotated.
        """
        # Not an einsum to BHKM: XLA would then transpose the weights in every decode step.
        key_BMHK = self._project("key", x_BMD, rotation)
        value_BMHK = self._project("value", x_BMD)
        if self.config.kv_heads != self.config.num_heads:
            key_BMHK, value_BMHK = (constrain(x, "BMHK") for x in (key_BMHK, value_BMHK))
        return KeysValues(jnp.moveaxis(key_BMHK, 1, 3), jnp.moveaxis(value_BMHK, 1, 2))

    def __call__(self, x_BLD, memory: KeysValues, rotation=None, *, key=None, **biases):
        """Output `[B, L, D]` of these tokens' queries; see `read`."""
        query_BLHK = self._project("query", x_BLD, rotation)
        return self.read(query_BLHK, memory, key=key, **biases)
