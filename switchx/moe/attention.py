# SPDX-License-Identifier: Apache-2.0
"""Switch attention: experts make the queries, and the keys and values, which are shared.

Fedus et al. 2021 (arXiv:2101.03961), appendix A, Figure 10, Table 10: in self-attention the
matrices of query, key and value are replaced by a Switch layer. A token is routed once; its
expert has one set of weights for the query and one for a vector that is its key and its value
alike. Each expert is a linear map or an FFN. The paper found it unstable in bfloat16.
Dims: B batch, L length, M memory, D model, H heads, K head size, E experts, R rows, F ffn, or
the heads joined
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers import initializers
from switchx.layers.attention import KeysValues, attend, weight_dropout
from switchx.layers.dropout import dropout, split_key
from switchx.layers.ffn import activate
from switchx.layers.initializers import along_last
from switchx.moe.capacity import out_of_groups
from switchx.moe.dispatchers import FUNCTIONS
from switchx.moe.experts import expert_matmul
from switchx.moe.layer import RoutedLayer
from switchx.partitioning.constrain import constrain


class ProjectionExperts(nnx.Module):
    """E maps of rows to heads: `y_ERF = experts(x_ERD)`, where F is H * K of query and memory.

    Without biases: Table 10 has T5's blocks, which have none.
    """

    def __init__(self, config, *, key):
        self.config = config
        D, H, K = config.d_model, config.num_heads, config.d_head
        E, F = config.switch.num_experts, config.switch.d_ff or config.d_ff
        query_scale = config.init_scale / (1 if config.scale_attention else K)
        scales = {"query": query_scale, "memory": config.init_scale}
        for (name, scale), part_key in zip(
            scales.items(), jax.random.split(key, 2), strict=True
        ):
            keys = jax.random.split(part_key, 3)
            draw = functools.partial(initializers.weight, config)
            if config.switch.attention_experts == "linear":
                weight = draw(keys[0], (E, D, H, K), fan_in=D, scale=scale)
                setattr(self, f"w_{name}_EDHK", weight)
                continue
            setattr(self, f"w_{name}_in_EDF", draw(keys[0], (E, D, F), fan_in=D))
            if config.is_gated:
                setattr(self, f"w_{name}_gate_EDF", draw(keys[1], (E, D, F), fan_in=D))
            weight = draw(keys[2], (E, F, H, K), fan_in=F, scale=scale)
            setattr(self, f"w_{name}_out_EFHK", weight)

    def __call__(self, x_ERD, *, key=None):
        """Queries and shared keys and values of every row, `[E, R, 2 H K]`.

        Args:
            key: of the dropout inside of FFN experts.
        """
        keys = split_key(key, 2)
        parts = [
            self._project(x_ERD, name, part_key)
            for name, part_key in zip(("query", "memory"), keys, strict=True)
        ]
        return jnp.concatenate(parts, axis=-1)

    def _project(self, x_ERD, name: str, key):
        switch = self.config.switch
        if switch.attention_experts == "linear":
            return expert_matmul(x_ERD, _joined(getattr(self, f"w_{name}_EDHK")[...]))
        h_ERF = expert_matmul(x_ERD, getattr(self, f"w_{name}_in_EDF")[...])
        gate_ERF = None
        if self.config.is_gated:
            gate_ERF = expert_matmul(x_ERD, getattr(self, f"w_{name}_gate_EDF")[...])
        rate = switch.expert_dropout_rate
        rate = self.config.dropout_rate if rate is None else rate
        h_ERF = dropout(activate(self.config.activation, h_ERF, gate_ERF), rate, key=key)
        return expert_matmul(h_ERF, _joined(getattr(self, f"w_{name}_out_EFHK")[...]))


def _joined(w):
    """Heads and head size as one dimension."""
    return w.reshape(*w.shape[:2], -1)


class SwitchAttention(RoutedLayer):
    """Self-attention whose queries, keys and values are made by experts.

    A token that gets no slot has a query, key and value of zero: it looks at all tokens
    alike, and gives nothing to any that looks at it.
    """

    def __init__(self, config, *, key):
        keys = jax.random.split(key, 3)
        super().__init__(config, key=keys[0])
        D, H, K = config.d_model, config.num_heads, config.d_head
        self.projections = ProjectionExperts(config, key=keys[1])
        self.w_out_HKD = initializers.weight(config, keys[2], (H, K, D), fan_in=H * K)
        if config.use_bias:
            self.b_out_D = nnx.Param(jnp.zeros((D,), config.precision.params))

    def __call__(
        self,
        x_BLD,
        is_token_BL,
        token_BL=None,
        *,
        is_training: bool,
        bias_HLM=None,
        row_bias_BHLM=None,
        mask_BLM=None,
        key=None,
    ):
        """Output `[B, L, D]` and routing statistics.

        Args:
            is_token_BL: false for padding.
            token_BL: ids of the tokens, for a router that hashes them.
        """
        config, switch = self.config, self.config.switch
        B, L, _ = x_BLD.shape
        key_router, key_experts, key_weights = split_key(key, 3)
        routed = self.route(
            x_BLD, is_token_BL, token_BL, is_training=is_training, key=key_router
        )

        def run_experts(x_ERD):
            y_ERF = self.projections(constrain(x_ERD, "ERD"), key=key_experts)
            return constrain(y_ERF, "ERF")

        y_GTF = FUNCTIONS[switch.dispatcher](routed.x_GTD, routed.plan, run_experts)
        heads = out_of_groups(y_GTF, B, L).reshape(B, L, 2, config.num_heads, config.d_head)
        query_BLHK, memory_BMHK = heads[:, :, 0], heads[:, :, 1]
        if config.scale_attention:
            scale = (config.num_correlations * config.d_head) ** -0.5
            query_BLHK = query_BLHK * jnp.asarray(scale, query_BLHK.dtype)
        memory_BHMK = jnp.swapaxes(memory_BMHK, 1, 2)
        out_BLHK = attend(
            query_BLHK,
            KeysValues(memory_BHMK, memory_BHMK),
            bias_HLM=bias_HLM,
            row_bias_BHLM=row_bias_BHLM,
            mask_BLM=mask_BLM,
            drop=weight_dropout(config.dropout_rate, key_weights),
        )
        w_out_HKD = self.w_out_HKD[...].astype(out_BLHK.dtype)
        y_BLD = jnp.einsum("BLHK,HKD->BLD", out_BLHK, w_out_HKD)
        if config.use_bias:
            y_BLD = y_BLD + along_last(self.b_out_D[...], y_BLD)
        return y_BLD, self.measure(routed, B, L)
