# SPDX-License-Identifier: Apache-2.0
"""The family of a decoder-only model, and its `config.json` for transformers.

The nearest row of `DECODERS` (decoder_families.py) describes a model. The description is read
back, and a model that it does not reproduce is refused.
"""

import dataclasses
from typing import Any

import numpy as np

from switchx import tree
from switchx.fields import require
from switchx.interop.decoder_families import (
    DECODERS,
    ROTARY,
    SCALED,
    SCALING,
    Decoder,
    read_config,
    sparse_layers,
)
from switchx.interop.huggingface_config import Fields
from switchx.interop.t5x import unexpected
from switchx.layers.rotary import RotaryConfig
from switchx.models.config import ModelConfig, require_our_blocks
from switchx.models.params import abstract_params

_NO_LIMIT = 32768  # positions, if a model has no limit
_NO_SHARED_D_FF = 128  # tensor parallelism divides it
_ALSO_GLM = "GLM-4-MoE of whole heads is one model with dots1: Dots1ForCausalLM is written"


def describe(config: ModelConfig) -> tuple[Decoder, dict[str, Any], list[str]]:
    """The family that has this unrolled model, the content of its `config.json`, and notes.

    Raises:
        ValueError: no family has such a model; gives all reasons.
    """
    require_our_blocks(config, "conversion")
    kin = _family_of(config)
    switch = config.switch
    notes = []
    has_dense = len(sparse_layers(config)) < config.num_decoder_layers
    expert_d_ff = config.d_ff if switch is None else switch.d_ff or config.d_ff
    if config.max_length is None:
        notes.append(
            f"the model has no limit of length; max_position_embeddings={_NO_LIMIT} is written"
        )
    notes += [_ALSO_GLM] * (kin.model_type == "dots1" and config.biases_of_attention == "none")
    values = {
        "architectures": [kin.architecture],
        "model_type": kin.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        # An expert's, if the family has one size for both.
        "intermediate_size": config.d_ff if has_dense or kin.sparse != "all" else expert_d_ff,
        "num_hidden_layers": config.num_decoder_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.d_head,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_length or _NO_LIMIT,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.biases_of_attention == kin.flagged_bias,
        **dict(kin.only),
        **({"sliding_window": None} if kin.window else {}),
        **({kin.window_flag: False} if kin.window_flag else {}),
        **_describe_rotary(kin, config.rotary),
    }
    if kin.qk_norm == "use_qk_norm":
        values["use_qk_norm"] = config.qk_norm == "head"
    if switch is not None and kin.num_experts:
        values |= _describe_experts(kin, config, expert_d_ff)
        if switch.router.overflow != "dropless":
            notes.append("transformers drops no token; here experts have a capacity")
    try:
        again = read_config(kin, Fields(values, "config.json"))
        reasons = _differences(kin, config, again)
    except ValueError as error:
        reasons = [str(error)]
    require(
        not reasons,
        f"this model cannot be written for transformers as {kin.architecture}, which is the "
        f"nearest of {', '.join(DECODERS)}: {'; '.join(reasons)}",
    )
    dtype = config.precision.params
    return kin, values | {"torch_dtype": dtype, "dtype": dtype}, notes


def config_with_shared_expert(config: ModelConfig) -> ModelConfig:
    """The configuration of `with_shared_expert`."""
    switch = config.switch
    if switch is None or switch.shared_d_ff is not None or not _family_of(config).shared_d_ff:
        return config
    switch = dataclasses.replace(switch, shared_d_ff=_NO_SHARED_D_FF, shared_gate=True)
    return dataclasses.replace(config, switch=switch)


def with_shared_expert(config: ModelConfig, params: dict) -> tuple[ModelConfig, dict]:
    """The same model, with a gated shared expert of zeros if its family always has one.

    So an upcycled Qwen2 is a Qwen2-MoE.
    """
    if (shared := config_with_shared_expert(config)) == config:
        return config, params
    config, leaves = shared, tree.named_leaves(params)
    for name, leaf in tree.named_leaves(abstract_params(config)).items():
        if name not in leaves:
            leaves[name] = np.zeros(leaf.shape, leaf.dtype)
    return config, tree.nested(leaves)


def _family_of(config: ModelConfig) -> Decoder:
    """The row that shares most features with a model."""
    switch = config.switch
    if switch is None:
        if config.norm_place == "after":
            return DECODERS["olmo2"]
        if config.qk_norm == "head":
            return DECODERS["qwen3"]
        return DECODERS["qwen2" if config.biases_of_attention == "qkv" else "llama"]
    if config.norm_place == "after":
        return DECODERS["flex_olmo"]
    is_shared, router = switch.shared_d_ff is not None, switch.router
    if router.score == "sigmoid":
        has_norms = config.qk_norm == "head" and config.biases_of_attention != "qkv"
        return DECODERS["dots1" if has_norms and config.rotary.fraction == 1 else "glm4_moe"]
    if router.has_bias or (is_shared and not switch.shared_gate):
        return DECODERS["ernie4_5_moe"]
    if is_shared or config.biases_of_attention == "qkv":
        return DECODERS["qwen2_moe"]
    return DECODERS[{"head": "qwen3_moe", "all": "olmoe", "none": "mixtral"}[config.qk_norm]]


def _differences(kin: Decoder, config: ModelConfig, again: ModelConfig) -> list[str]:
    """Where a model differs from what its description is read as."""

    def traits(config: ModelConfig) -> dict[str, Any]:
        """What computes a logit, by the names of our fields."""
        found = {
            **_fixed(config),
            "num_kv_heads": config.kv_heads,
            "attention_bias": config.biases_of_attention,
            "rotary": config.rotary,
            "sparse blocks": sparse_layers(config),
        }
        unread = {"switch", "relative_buckets", "relative_max_distance"}
        unread |= set() if config.tie_embeddings else {"scale_tied_logits"}
        if (switch := config.switch) is not None:
            found |= {f"RouterConfig.{n}": value for n, value in _fixed(switch.router).items()}
            found |= {f"SwitchConfig.{n}": value for n, value in _fixed(switch).items()}
            found["SwitchConfig.d_ff"] = switch.d_ff or config.d_ff
            found["router bias"] = switch.router.has_bias  # whatever rate it was trained with
            places = ("every", "encoder_layers", "decoder_layers", "router")
            unread |= {f"SwitchConfig.{name}" for name in places}
            unread |= {"RouterConfig.bias_update_rate", "RouterConfig.balance_load"}
            if switch.router.bias_rule != "quantile_logits":  # others all add to scores
                unread.add("RouterConfig.bias_rule")
            if not switch.has_attention:
                unread.add("SwitchConfig.attention_experts")
            if len(sparse_layers(config)) == config.num_decoder_layers:
                unread.add("d_ff")
        return {name: value for name, value in found.items() if name not in unread}

    ours, theirs = traits(config), traits(again)
    names = sorted(ours.keys() | theirs.keys())
    found = [(name, ours.get(name), theirs.get(name)) for name in names]
    if kin.heads == "fill":
        found.append(("d_head", config.d_head, config.d_model // config.num_heads))
    if kin.heads == "divide":
        found.append(("d_model % num_heads", config.d_model % config.num_heads, 0))
    return unexpected(*found)


def _fixed(config) -> dict[str, Any]:
    """The fields that may not change when a trained model is evaluated."""
    fields = dataclasses.fields(config)
    return {each.name: getattr(config, each.name) for each in fields if not each.metadata}


def _describe_experts(kin: Decoder, config: ModelConfig, expert_d_ff: int) -> dict[str, Any]:
    """What `config.json` says about experts and the blocks that have them."""
    switch = config.switch
    router = config.switch.router
    sparse = sparse_layers(config)
    values = {
        # transformers 5 has the second name for both.
        "num_experts": switch.num_experts,
        "num_local_experts": switch.num_experts,
        kin.num_experts: switch.num_experts,
        kin.num_selected: router.num_selected,
        "norm_topk_prob": router.gate == "normalized",
        kin.expert_d_ff: expert_d_ff,
    }
    if kin.sparse == "step":
        dense = [i for i in range(config.num_decoder_layers) if i not in sparse]
        values |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    elif kin.sparse == "range":
        values |= {
            "moe_layer_start_index": sparse[0],
            "moe_layer_end_index": sparse[-1],
            "moe_layer_interval": sparse[1] - sparse[0] if sparse[1:] else sparse[0] + 1,
        }
    elif kin.sparse == "after":
        values["first_k_dense_replace"] = sparse[0]
    if kin.shared_count:
        values[kin.shared_count] = (switch.shared_d_ff or 0) // expert_d_ff
    if kin.has_sigmoid:
        values |= {
            "routed_scaling_factor": router.gate_scale,
            "n_group": router.num_expert_groups,
            "topk_group": router.expert_groups_per_token,
        }
    if kin.unread == "block":
        values["num_nextn_predict_layers"] = 0
    if kin.shared_d_ff and switch.shared_d_ff:
        values[kin.shared_d_ff] = switch.shared_d_ff
    return values


def _describe_rotary(kin: Decoder, rotary: RotaryConfig) -> dict[str, Any]:
    """The frequencies in the fields of transformers 4 and of 5, with equal content."""
    scaling = None
    if rotary.scaling != "none":
        scaling = {"rope_type": ROTARY[rotary.scaling]} | {
            theirs: getattr(rotary, SCALING[theirs]) for theirs in SCALED[rotary.scaling]
        }
        scaling = {name: value for name, value in scaling.items() if value is not None}
    new = {"rope_type": "default", "rope_theta": rotary.theta} | (scaling or {})
    values = {"rope_theta": rotary.theta, "rope_scaling": scaling, "rope_parameters": new}
    if kin.fraction is None:
        return values
    new["partial_rotary_factor"] = rotary.fraction
    return values | {"partial_rotary_factor": rotary.fraction}
