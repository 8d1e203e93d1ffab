# SPDX-License-Identifier: Apache-2.0
"""Switch attention: experts make the queries, and the keys and values, which are shared.

Fedus et al. 2021 (arXiv:2101.03961), appendix A, Figure 10, Table 10: in self-attention the
matrices of query, key and value are replaced by a Switch layer. A token is routed once; its
expert has one set of weights for the query and one for a vector that is both its key and its
value. Each expert is a linear map or an FFN. The paper found it unstable in bfloat16.
Dims: B batch, L length, M memory, D model, H heads, K head size, E experts, R rows, F features
of all heads together, G groups, T tokens of a group
"""

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers.attention import AttentionOutput
from switchx.layers.dense import split_key, weight
from switchx.layers.kv_cache import KeysValues
from switchx.moe.capacity import out_of_groups
from switchx.moe.dispatchers import FUNCTIONS
from switchx.moe.experts import ExpertFFN, blocks_product
from switchx.moe.layer import RoutedLayer
from switchx.partitioning.constrain import constrain


class ProjectionExperts(nnx.Module):
    """E maps of rows to heads: `y_ERF = experts(x_ERD)`, where F is H * K of query and memory.

    They have no biases: Table 10 uses T5's blocks, which have none.
    """

    def __init__(self, config, *, key):
        self.config = config
        D, H, K = config.d_model, config.num_heads, config.d_head
        E, F = config.switch.num_experts, config.switch.d_ff or config.d_ff
        query_scale = config.init_scale / (1 if config.scale_attention else K)
        key_query, key_memory = jax.random.split(key)
        for name, scale, part_key in (
            ("query", query_scale, key_query),
            ("memory", config.init_scale, key_memory),
        ):
            keys = jax.random.split(part_key, 3)

            def draw(suffix, key, shape, name=name, **options):
                drawn = weight(config, key, shape, fan_in=shape[1], **options)
                setattr(self, f"w_{name}_{suffix}", drawn)

            if config.switch.attention_experts == "linear":
                draw("EDHK", keys[0], (E, D, H, K), scale=scale)
                continue
            draw("in_EDF", keys[0], (E, D, F))
            if config.is_gated:
                draw("gate_EDF", keys[1], (E, D, F))
            draw("out_EFHK", keys[2], (E, F, H, K), scale=scale)

    def __call__(self, x_ERD, *, key=None):
        """Queries and shared keys and values of every row, `[E, R, 2 H K]`.

        Args:
            key: random key of the dropout inside FFN experts.
        """
        keys = split_key(key, 2)
        parts = [
            self._project(x_ERD, name, part_key)
            for name, part_key in zip(("query", "memory"), keys, strict=True)
        ]
        return jnp.concatenate(parts, axis=-1)

    def _project(self, x_ERD, name: str, key):
        def of(suffix):
            w = getattr(self, f"w_{name}_{suffix}")[...]
            return w.reshape(*w.shape[:2], -1)  # heads and head size as one dimension

        if self.config.switch.attention_experts == "linear":
            return blocks_product(x_ERD, of("EDHK"))
        gate_EDF = of("gate_EDF") if self.config.is_gated else None
        experts = ExpertFFN.of(self.config, of("in_EDF"), of("out_EFHK"), gate_EDF, key=key)
        return experts(x_ERD)


class SwitchAttention(RoutedLayer, AttentionOutput):
    """Self-attention whose queries, keys and values are made by experts.

    A token that gets no slot has a query, key and value of zero: it attends to all tokens
    equally, and contributes nothing to any that attends to it.
    """

    def __init__(self, config, *, key):
        keys = jax.random.split(key, 3)
        RoutedLayer.__init__(self, config, key=keys[0])
        AttentionOutput.__init__(
            self, config, num_correlations=config.num_correlations, key=keys[2]
        )
        self.projections = ProjectionExperts(config, key=keys[1])

    def __call__(
        self,
        x_BLD,
        is_token_BL,
        token_BL=None,
        task_B=None,
        segment_BL=None,
        *,
        is_training: bool,
        key=None,
        **biases,
    ):
        """Output `[B, L, D]` and routing statistics.

        Args:
            is_token_BL: false for padding.
            token_BL: ids of the tokens, for a router that hashes them.
            task_B: task of each row, for a router by task.
            segment_BL: sequence of each token in its row; with None, each row is one sequence.
            biases: see `AttentionOutput.read`.
        """
        config = self.config
        B, L, _ = x_BLD.shape
        key_router, key_experts, key_weights = split_key(key, 3)
        routed = self.route(
            x_BLD,
            is_token_BL,
            token_BL,
            task_B,
            segment_BL=segment_BL,
            is_training=is_training,
            key=key_router,
        )

        def run_experts(x_ERD):
            y_ERF = self.projections(constrain(x_ERD, "ERD", uneven="R"), key=key_experts)
            return constrain(y_ERF, "ERF", uneven="R")

        y_GTF = FUNCTIONS[config.switch.dispatcher](routed.x_GTD, routed.plan, run_experts)
        heads = out_of_groups(y_GTF, B, L).reshape(B, L, 2, config.num_heads, config.d_head)
        query_BLHK, memory_BMHK = heads[:, :, 0], heads[:, :, 1]
        memory = KeysValues(jnp.moveaxis(memory_BMHK, 1, 3), jnp.moveaxis(memory_BMHK, 1, 2))
        y_BLD = self.read(query_BLHK, memory, key=key_weights, **biases)
        return y_BLD, self.measure(routed, B, L)
