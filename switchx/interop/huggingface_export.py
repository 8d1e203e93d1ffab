# SPDX-License-Identifier: Apache-2.0
"""Our ModelConfig as Hugging Face's `config.json`: T5, or Switch Transformers where sparse."""

from typing import Any

from switchx.interop.names import SWITCH
from switchx.interop.sparse_steps import num_sparse
from switchx.layers.norm import EPSILON
from switchx.models.config import ModelConfig, SwitchConfig

_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu_new",
    "geglu": "gated-gelu",
    "swiglu": "gated-silu",
}
# Slots of an expert of which none is ever the last.
_UNLIMITED = 2**31 - 1


def describe(config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """The content of `config.json`, and what a reader should know beside it.

    Raises:
        ValueError: transformers has no such model; gives all reasons.
    """
    reasons = _reasons(config) + (_sparse_reasons(config) if config.switch else [])
    if reasons:
        raise ValueError(
            f"this model cannot be written for transformers: {'; '.join(reasons)}; there are "
            "T5, and Switch Transformers with top-1 routing, to write for"
        )
    description = {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "d_kv": config.d_head,
        "num_heads": config.num_heads,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_max_distance,
        "dropout_rate": config.dropout_rate,
        "layer_norm_epsilon": EPSILON,
        # What is tied is scaled there; what is not is written twice.
        "tie_word_embeddings": config.tie_embeddings and config.scale_tied_logits,
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "torch_dtype": config.precision.params,
    }
    if config.switch is None:
        return description | {"feed_forward_proj": _ACTIVATIONS[config.activation]}, []
    switch_fields, notes = _describe_switch(config, config.switch)
    return description | switch_fields, notes


def _describe_switch(
    config: ModelConfig, switch: SwitchConfig
) -> tuple[dict[str, Any], list[str]]:
    notes, capacity = [], switch.expert_capacity
    if switch.router.overflow == "dropless" or capacity is None:
        capacity = _UNLIMITED
    if switch.router.overflow == "drop" and switch.expert_capacity is None:
        notes.append(
            "transformers counts an expert's slots for each sequence, switchx here by a "
            f"capacity factor ({switch.eval_capacity_factor} in evaluation) in groups of up to "
            f"{switch.group_size} tokens: the export drops nothing. Set expert_capacity in its "
            "config.json for a limit"
        )
    if switch.router.overflow == "identity":
        notes.append(
            "a token whose expert is full keeps its input here, as in transformers up to 4.51; "
            "later releases drop it"
        )
    blocks = _sparse_blocks(config)
    return {
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "model_type": SWITCH,
        "dense_act_fn": _ACTIVATIONS[config.activation],
        "num_experts": switch.num_experts,
        "expert_capacity": capacity,
        "num_sparse_encoder_layers": num_sparse(config.num_encoder_layers, blocks["encoder"]),
        "num_sparse_decoder_layers": num_sparse(config.num_decoder_layers, blocks["decoder"]),
        "router_bias": False,
        "router_dtype": "float32",
        "router_jitter_noise": switch.router.jitter
        if switch.router.exploration == "jitter"
        else 0.0,
    }, notes


def _sparse_blocks(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        stack: tuple(
            layer
            for layer in range(getattr(config, f"num_{stack}_layers"))
            if config.is_sparse(layer, stack)
        )
        for stack in ("encoder", "decoder")
    }


def _reasons(config: ModelConfig) -> list[str]:
    wanted = {
        "architecture": "encoder_decoder",
        "norm": "rms",
        "positions": "relative",
        "use_bias": False,
        "scale_attention": False,
    }
    return [
        f"{name}={getattr(config, name)!r} (expected {value!r})"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]


def _sparse_reasons(config: ModelConfig) -> list[str]:
    switch, router = config.switch, config.switch.router
    reasons = [
        f"{name}={value!r} (expected {expected!r})"
        for name, value, expected in (
            ("SwitchConfig.sublayers", switch.sublayers, "ffn"),
            ("SwitchConfig.shared_d_ff", switch.shared_d_ff, None),
            ("SwitchConfig.expert_bias", switch.expert_bias, False),
            ("SwitchConfig.d_ff", switch.d_ff or config.d_ff, config.d_ff),
            ("RouterConfig.kind", router.kind, "top_k"),
            ("RouterConfig.num_selected", router.num_selected, 1),
            ("RouterConfig.bias_update_rate", router.bias_update_rate, None),
            ("Precision.router", config.precision.router, "float32"),
        )
        if value != expected
    ]
    if router.overflow == "reroute":
        reasons.append("RouterConfig.overflow='reroute' (expected 'drop' or 'dropless')")
    if config.is_gated:
        reasons.append(
            f"activation={config.activation!r} with experts (its experts have one input "
            "matrix: expected 'relu' or 'gelu')"
        )
    if config.is_encoder_decoder:
        for stack, blocks in _sparse_blocks(config).items():
            count = getattr(config, f"num_{stack}_layers")
            if num_sparse(count, blocks) is None:
                reasons.append(
                    f"the sparse blocks {', '.join(map(str, blocks))} of the {count} of the "
                    f"{stack} (expected 1 and every n-th after it, all or none)"
                )
    return reasons
