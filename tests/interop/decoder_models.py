# SPDX-License-Identifier: Apache-2.0
"""Small random decoder-only models of transformers, one for each family and option."""

import jax.numpy as jnp
import numpy as np

from tests.torch_weights import randomize

V, L, B = 96, 11, 2
BASE = dict(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    pad_token_id=None, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
LIKE_DEEPSEEK = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
    first_k_dense_replace=1, routed_scaling_factor=2.5,
)  # fmt: skip
SCALED = {
    "linear": dict(factor=4.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=16),
    "yarn whole": dict(
        factor=8.0, original_max_position_embeddings=32, truncate=False, beta_fast=24.0,
        attention_factor=1.25,
    ),
    "llama3": dict(
        factor=8.0, original_max_position_embeddings=16, low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
}  # fmt: skip
# model_type, and what differs from BASE.
CASES = {
    "llama": ("llama", dict(head_dim=12)),
    "llama, all heads, biases, tied": (
        "llama", dict(num_key_value_heads=4, attention_bias=True, tie_word_embeddings=True)
    ),
    "llama3": ("llama", dict(rope_parameters=dict(
        rope_type="llama3", rope_theta=5e5, **SCALED["llama3"]
    ))),
    "yarn": ("llama", dict(rope_parameters=dict(
        rope_type="yarn", rope_theta=1e4, **SCALED["yarn"]
    ))),
    "linear": ("llama", dict(rope_parameters=dict(
        rope_type="linear", rope_theta=1e4, factor=2.0
    ))),
    "mistral": ("mistral", dict(head_dim=12, sliding_window=64)),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", dict(head_dim=12)),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_key_value_heads=1)),
    "granitemoe": ("granitemoe", dict(
        num_local_experts=4, tie_word_embeddings=True, embedding_multiplier=3.0,
        attention_multiplier=0.25, residual_multiplier=0.5, logits_scaling=2.0,
    )),
    "flex_olmo": ("flex_olmo", dict(num_experts=4, num_experts_per_tok=2)),
    "ernie4_5_moe": ("ernie4_5_moe", dict(
        moe_num_experts=4, moe_k=2, moe_intermediate_size=24, moe_layer_start_index=0,
    )),
    "ernie4_5_moe, dense first, none shared": ("ernie4_5_moe", dict(
        moe_num_experts=4, moe_k=2, moe_intermediate_size=24, moe_layer_start_index=1,
        moe_num_shared_experts=0,
    )),
    "olmoe": ("olmoe", dict(num_experts=4, num_experts_per_tok=2)),
    "olmoe, normalized, tied": ("olmoe", dict(
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=True,
    )),
    "qwen2_moe": ("qwen2_moe", dict(
        EXPERTS, shared_expert_intermediate_size=40, decoder_sparse_step=2
    )),
    "qwen3_moe": ("qwen3_moe", dict(
        EXPERTS, head_dim=12, norm_topk_prob=True, mlp_only_layers=[0]
    )),
    "qwen3_moe, dense after the last sparse": ("qwen3_moe", dict(
        EXPERTS, num_hidden_layers=5, decoder_sparse_step=2
    )),
    "glm4_moe": ("glm4_moe", dict(
        LIKE_DEEPSEEK, n_shared_experts=1, attention_bias=True, use_qk_norm=True, head_dim=12,
    )),
    "glm4_moe, groups, no norms": ("glm4_moe", dict(
        LIKE_DEEPSEEK, n_routed_experts=8, n_group=4, topk_group=2, n_shared_experts=1,
        norm_topk_prob=False, partial_rotary_factor=0.25, head_dim=16,
    )),
    "dots1": ("dots1", dict(LIKE_DEEPSEEK, n_shared_experts=2, norm_topk_prob=True)),
    "dots1, groups, biases": ("dots1", dict(
        LIKE_DEEPSEEK, n_routed_experts=8, n_group=2, topk_group=1, n_shared_experts=1,
        norm_topk_prob=False, attention_bias=True,
    )),
}  # fmt: skip


def theirs(case: str, **more):
    """A random model of transformers; `more` values of its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = CASES[case]
    config = AutoConfig.for_model(kind, **of_release(BASE | changes | more))
    return randomize(AutoModelForCausalLM.from_config(config, **eager())).float()


def of_release(config: dict) -> dict:
    """Values of a configuration in the fields of the installed transformers, 4 or 5."""
    if is_release_5() or "rope_parameters" not in config:
        return config
    scaling = dict(config["rope_parameters"])
    rotary = dict(rope_theta=scaling.pop("rope_theta"), rope_scaling=scaling)
    return {key: x for key, x in config.items() if key != "rope_parameters"} | rotary


def eager() -> dict[str, str]:
    """Options of a model that computes as its Python code says."""
    experts = dict(experts_implementation="eager") if is_release_5() else {}
    return dict(attn_implementation="eager") | experts


def is_release_5() -> bool:
    import transformers

    return int(transformers.__version__.partition(".")[0]) >= 5


def special_ids_of(model) -> dict:
    """Special ids of its `generation_config.json`."""
    kinds = ("bos", "eos", "pad")
    return {each: getattr(model.generation_config, f"{each}_token_id") for each in kinds}


def batch_of(token_BL):
    """Our features of texts that fill their rows."""
    position_BL = np.broadcast_to(np.arange(token_BL.shape[1]), token_BL.shape)
    return {
        "decoder_input_tokens": jnp.asarray(token_BL),
        "decoder_segment_ids": jnp.ones(token_BL.shape, jnp.int32),
        "decoder_positions": jnp.asarray(position_BL),
        "decoder_prefix_mask": jnp.zeros(token_BL.shape, jnp.int32),
    }
