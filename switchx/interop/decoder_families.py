# SPDX-License-Identifier: Apache-2.0
"""Decoder-only models of transformers, dense and sparse: families and their `config.json`.

A family is a row of `DECODERS`; reading, also of tensors (decoder_tensors.py), and writing
(decoder_descriptions.py) use the same row. All have RMSNorm, rotary positions and gated FFNs
with SiLU; they differ in the norms of queries and keys, in biases, in the place of norms, and
in their experts. In their files `gate_proj` (`w1`) is the activated matrix, our `w_in`, and
`up_proj` (`w3`) the factor, our `w_gate`.

Dims: V vocabulary, D model, E experts, F ffn, H heads, K head size, Z heads of keys and values
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, Literal

from switchx.fields import require
from switchx.interop.huggingface_config import MOST_BLOCKS, Fields, shown
from switchx.layers.rotary import RotaryConfig
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig

ROTARY = {"none": "default", "linear": "linear", "yarn": "yarn", "llama3": "llama3"}
# Their name -> ours, for the values of a scaling.
SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "low_freq_factor": "low_frequency",
    "high_freq_factor": "high_frequency",
    "beta_slow": "beta_slow",
    "beta_fast": "beta_fast",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
}
SCALED = {
    "linear": ("factor",),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_slow", "beta_fast",
        "attention_factor", "truncate",
    ),
    "llama3": (
        "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A family of decoder-only models, by how it differs from Llama.

    Attributes:
        model_type: name of the family in config.json.
        architecture: class of the family in transformers.
        qk_norm, norm_place: our fields of these names; the first may also be the flag of
            config.json that turns `head` on.
        heads: whether transformers takes `any` sizes of heads, only numbers that `divide` D, or
            only heads that `fill` D, whose norms of queries have the size of the model.
        bias: biases of attention: a value of our `attention_bias`, or the flag of config.json
            that turns those of `flagged_bias` on.
        flagged_bias: a value of our `attention_bias`.
        epsilon, theta, tied: values of `rms_norm_eps`, `rope_theta` and `tie_word_embeddings`
            if a file has none.
        fraction: `partial_rotary_factor` if a file has none; None in a family that rotates
            whole heads.
        window: `sliding_window` if a file has none, in a family that reads it; one as long
            as the context hides nothing.
        whole_blocks: `max_window_layers` if a file has none, the number of first blocks
            without that window; None in a family that has it in all blocks.
        window_flag: field without which there is no window.
        has_pairs: whether rotary positions rotate features 2 i and 2 i + 1 together; ours are
            halves, and rows of queries and keys are put in that order.
        has_multipliers: whether embeddings, scores, sublayers and logits have factors, which
            are multiplied into the weights as they are read; written as Mixtral.
        ffn: module of an FFN in the names of tensors.
        matrices: names of an expert's `w_in`, `w_gate` and `w_out`.
        router: name of the router in a sparse FFN.
        fused: names in files of a layer's `gate_proj` above `up_proj`, and of `down_proj`, for
            all experts, if they are not separate.
        num_experts: field with the number of experts; "" in a dense family.
        num_selected: field of k.
        expert_d_ff: field of an expert's F.
        normalizes: whether gates are always normalized; False reads `norm_topk_prob`.
        normalized: `norm_topk_prob` if a file has none.
        router_bias: name, in a sparse FFN, of the bias that is added to scores when experts
            are chosen; "" without one.
        has_sigmoid: whether scores are sigmoids, gates have a factor and experts are in groups
            (`routed_scaling_factor`, `n_group`, `topk_group`), as in DeepSeek-V3.
        sparse: fields that name the sparse blocks: none for `all`, `decoder_sparse_step` and
            `mlp_only_layers` for `step`, `moe_layer_interval` and the indices of the first and
            the last for `range`, `first_k_dense_replace` for `after`.
        dense_blocks: `first_k_dense_replace` if a file has none.
        shared_d_ff: field of F of a gated shared expert; "" without one.
        shared_count: field of the number of shared experts without a gate, which are one
            FFN of that many times an expert's F; "" without them.
        num_shared: this number if a file has none; None if the file must have it.
        unread: part of the names of tensors that transformers also leaves out, those that
            predict tokens further ahead; "" for none, `block` for a block after the last
            one.
        only: fields of which switchx supports one value, and that value.
    """

    model_type: str
    architecture: str
    qk_norm: str = "none"
    norm_place: str = "before"
    heads: Literal["any", "divide", "fill"] = "any"
    bias: str = "attention_bias"
    flagged_bias: str = "all"
    epsilon: float = 1e-6
    theta: float = 1e4
    tied: bool = False
    fraction: float | None = None
    window: tuple[int | None, ...] = ()
    whole_blocks: int | None = None
    window_flag: str = ""
    has_pairs: bool = False
    has_multipliers: bool = False
    ffn: str = "mlp"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    fused: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    num_experts: str = ""
    num_selected: str = "num_experts_per_tok"
    expert_d_ff: str = "intermediate_size"
    normalizes: bool = False
    normalized: bool = False
    router_bias: str = ""
    has_sigmoid: bool = False
    sparse: Literal["all", "step", "range", "after"] = "all"
    dense_blocks: int = 0
    shared_d_ff: str = ""
    shared_count: str = ""
    num_shared: int | None = None
    unread: str = ""
    only: tuple[tuple[str, Any], ...] = ()


_QWEN_WINDOW = dict(window=(4096,), window_flag="use_sliding_window")
# The experts of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
_LIKE_DEEPSEEK = dict(
    num_experts="n_routed_experts", expert_d_ff="moe_intermediate_size", has_sigmoid=True,
    router_bias="gate.e_score_correction_bias", sparse="after",
    shared_count="n_shared_experts",
)  # fmt: skip
DECODERS = {
    each.model_type: each
    for each in (
        Decoder("llama", "LlamaForCausalLM", heads="divide", only=(("mlp_bias", False),)),
        Decoder("mistral", "MistralForCausalLM", bias="none", window=(4096,)),
        Decoder("qwen2", "Qwen2ForCausalLM", bias="qkv", whole_blocks=28, **_QWEN_WINDOW),
        Decoder(
            "qwen3", "Qwen3ForCausalLM", qk_norm="head", whole_blocks=28, **_QWEN_WINDOW
        ),
        Decoder(
            "olmo2", "Olmo2ForCausalLM", qk_norm="all", norm_place="after", epsilon=1e-5,
        ),
        Decoder(
            "mixtral", "MixtralForCausalLM", bias="none", epsilon=1e-5, theta=1e6,
            ffn="block_sparse_moe", matrices=("w1", "w3", "w2"),
            num_experts="num_local_experts", normalizes=True, window=(None,),
        ),
        Decoder(
            "granitemoe", "GraniteMoeForCausalLM", has_multipliers=True, ffn="block_sparse_moe",
            router="router.layer", fused=("input_linear.weight", "output_linear.weight"),
            num_experts="num_local_experts", normalizes=True,
        ),
        Decoder(
            "olmoe", "OlmoeForCausalLM", qk_norm="all", heads="fill", epsilon=1e-5,
            num_experts="num_experts", only=(("clip_qkv", None),),
        ),
        Decoder(
            "flex_olmo", "FlexOlmoForCausalLM", qk_norm="all", norm_place="after", theta=5e5,
            num_experts="num_experts",
        ),
        Decoder(
            "qwen2_moe", "Qwen2MoeForCausalLM", bias="qkv", num_experts="num_experts",
            expert_d_ff="moe_intermediate_size", sparse="step",
            shared_d_ff="shared_expert_intermediate_size",
            only=(("qkv_bias", True),), **_QWEN_WINDOW,
        ),
        Decoder(
            "qwen3_moe", "Qwen3MoeForCausalLM", qk_norm="head", num_experts="num_experts",
            expert_d_ff="moe_intermediate_size", sparse="step", **_QWEN_WINDOW,
        ),
        Decoder(
            "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", bias="none", epsilon=1e-5, theta=5e5,
            tied=True, has_pairs=True, num_experts="moe_num_experts", num_selected="moe_k",
            expert_d_ff="moe_intermediate_size", normalizes=True,
            router_bias="moe_statics.e_score_correction_bias", sparse="range",
            shared_count="moe_num_shared_experts", num_shared=2, unread="mtp",
            only=(("use_bias", False), ("moe_norm_min", 1e-12)),
        ),
        Decoder(
            "glm4_moe", "Glm4MoeForCausalLM", qk_norm="use_qk_norm", flagged_bias="qkv",
            epsilon=1e-5, fraction=0.5, normalized=True, dense_blocks=1, num_shared=1,
            unread="block", **_LIKE_DEEPSEEK,
        ),
        Decoder(
            "dots1", "Dots1ForCausalLM", qk_norm="head", window=(4096,), whole_blocks=62,
            **_LIKE_DEEPSEEK,
        ),
    )
}  # fmt: skip


def read_config(
    kin: Decoder, fields: Fields, tensors: Collection[str] = (), overflow: str = "dropless"
) -> ModelConfig:
    """The model that a `config.json` describes; tensors and `overflow` add nothing.

    Raises:
        ValueError: a value is wrong, or asks for what switchx lacks.
    """
    for name, expected in (("hidden_act", "silu"), *kin.only):
        fields.only(name, expected, f"{kin.model_type} of switchx has nothing else")
    length, window = fields.whole("max_position_embeddings"), None
    if kin.window and _has_window(kin, fields):
        window = fields.values.get("sliding_window", *kin.window)
    require(
        window is None or (type(window) is int and window >= length),
        f"{fields.where}: sliding_window={shown(window)} cannot be converted: switchx has no "
        f"windows, and positions go up to {length}; expected null, where the model was trained "
        "so, or a max_position_embeddings of the window at most, which limits texts",
    )
    D, H = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if fields.values.get("head_dim") is None:
        require(
            D % H == 0,
            f"{fields.where}: hidden_size={D} does not divide by num_attention_heads={H}",
        )
    bias, qk_norm = kin.bias, kin.qk_norm
    if bias == "attention_bias":
        bias = kin.flagged_bias if fields.flag(bias, False) else "none"
    if qk_norm == "use_qk_norm":
        qk_norm = "head" if fields.flag(qk_norm, False) else "none"
    config = ModelConfig(
        architecture="decoder_only",
        vocab_size=fields.whole("vocab_size"),
        d_model=D,
        d_ff=fields.whole("intermediate_size"),
        num_heads=H,
        d_head=fields.whole("head_dim", D // H),
        num_kv_heads=fields.whole("num_key_value_heads", H),
        num_decoder_layers=fields.whole("num_hidden_layers", most=MOST_BLOCKS),
        activation="swiglu",
        norm_epsilon=fields.number("rms_norm_eps", kin.epsilon),
        norm_place=kin.norm_place,
        qk_norm=qk_norm,
        attention_bias=None if bias == "none" else bias,
        positions="rotary",
        rotary=_read_rotary(kin, fields),
        max_length=length,
        scale_attention=True,
        tie_embeddings=fields.flag("tie_word_embeddings", kin.tied),
        scale_tied_logits=False,
        dropout_rate=0.0,
    )
    return dataclasses.replace(config, switch=_read_switch(kin, fields, config))


def _read_switch(kin: Decoder, fields: Fields, config: ModelConfig) -> SwitchConfig | None:
    if not kin.num_experts:
        return None
    N, E = config.num_decoder_layers, kin.num_experts
    sparse = _sparse_blocks(kin, fields, N)
    if not sparse:
        return None
    step = N // len(sparse)
    where = {"encoder_layers": (), "decoder_layers": sparse}
    if N % step == 0 and sparse == tuple(range(step - 1, N, step)):
        where = {"every": step}
    is_normalized = kin.normalizes or fields.flag("norm_topk_prob", kin.normalized)
    num_selected = fields.whole(kin.num_selected)
    require(
        num_selected > 1 or not is_normalized,
        f"{fields.where}: {kin.num_selected}=1 with normalized gates cannot be converted: each "
        "gate is 1 whatever the router says, which switchx has not; expected 2 or more"
        f"{'' if kin.normalizes else ', or norm_topk_prob=false'}, if it was trained so",
    )
    scores: dict[str, Any] = {}
    if kin.has_sigmoid:
        scores = {
            "score": "sigmoid",
            "gate_scale": fields.number("routed_scaling_factor", 1.0),
            "num_expert_groups": fields.whole("n_group", 1),
            "expert_groups_per_token": fields.whole("topk_group", 1),
        }
    names = (E, "num_experts", "num_local_experts")  # transformers 5 renames it
    name = next((each for each in names if each in fields.values), E)
    num_experts = fields.experts(name, len(sparse))
    d_ff, shared = fields.whole(kin.expert_d_ff), None
    if kin.shared_d_ff:
        shared = fields.whole(kin.shared_d_ff)
    elif kin.shared_count:
        shared = fields.whole(kin.shared_count, kin.num_shared, least=0) * d_ff or None
    return SwitchConfig(
        num_experts=num_experts,
        d_ff=None if d_ff == config.d_ff else d_ff,
        shared_d_ff=shared,
        shared_gate=bool(kin.shared_d_ff),
        dispatcher="dropless",
        router=RouterConfig(
            num_selected=num_selected,
            gate="normalized" if is_normalized else "score" if kin.has_sigmoid else "softmax",
            exploration="none",
            overflow="dropless",
            bias_update_rate=0.0 if kin.router_bias else None,  # the bias stays as it is
            **scores,
        ),
        **where,
    )


def _sparse_blocks(kin: Decoder, fields: Fields, N: int) -> tuple[int, ...]:
    """Numbers of the blocks with experts, of N."""
    if kin.sparse == "range":
        step, first = (
            fields.whole(f"moe_layer_{name}", 1, least=least)
            for name, least in (("interval", 1), ("start_index", 0))
        )
        last = fields.values.get("moe_layer_end_index", -1)
        last = N - 1 if last in (-1, None) else fields.whole("moe_layer_end_index", least=0)
        return tuple(i for i in range(N) if first <= i <= last and (i + 1) % step == 0)
    if kin.sparse == "all":
        return tuple(range(N))
    if kin.sparse == "after":
        return tuple(range(fields.whole("first_k_dense_replace", kin.dense_blocks, least=0), N))
    step = fields.whole("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers") or []
    require(
        isinstance(dense, list) and all(type(i) is int for i in dense),
        f"{fields.where}: mlp_only_layers={shown(dense)}; expected a list of blocks",
    )
    dense = set(dense)
    return tuple(i for i in range(N) if i not in dense and (i + 1) % step == 0)


def _has_window(kin: Decoder, fields: Fields) -> bool:
    """Whether some block has the window of `sliding_window`."""
    if kin.window_flag and not fields.flag(kin.window_flag, False):
        return False
    if kin.whole_blocks is None:
        return True
    if (kinds := fields.values.get("layer_types")) is not None:
        return kinds != ["full_attention"] * fields.whole("num_hidden_layers", most=MOST_BLOCKS)
    whole = fields.whole("max_window_layers", kin.whole_blocks, least=0)
    return fields.whole("num_hidden_layers") > whole


def _read_rotary(kin: Decoder, fields: Fields) -> RotaryConfig:
    """The frequencies of `rope_parameters`, or of `rope_theta` and `rope_scaling`."""
    old, new = (fields.values.get(name) or {} for name in ("rope_scaling", "rope_parameters"))
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        require(
            isinstance(value, dict) and not any(isinstance(v, dict) for v in value.values()),
            f"{fields.where}: {name}={shown(value)}; expected one object of numbers for all "
            "layers",
        )
    kinds = {_kind(values, fields.where) for values in (old, new) if values}
    require(
        len(kinds) < 2 and not any(old[n] != new[n] for n in old.keys() & new.keys()),
        f"{fields.where}: rope_scaling={shown(old)} and rope_parameters={shown(new)} differ; "
        "keep the one that the model was trained with",
    )
    theta, values = fields.values.get("rope_theta"), new | old
    inner = values.get("rope_theta")
    require(
        theta is None or inner is None or theta == inner,
        f"{fields.where}: rope_theta={shown(theta)} and the rope_theta={shown(inner)} of "
        f"{'rope_scaling' if 'rope_theta' in old else 'rope_parameters'} differ; keep the one "
        "that the model was trained with",
    )
    values["rope_theta"] = theta if inner is None else inner
    own = Fields({n: v for n, v in values.items() if v is not None}, fields.where)
    kind = kinds.pop() if kinds else "default"
    scaling = next((ours for ours, theirs in ROTARY.items() if theirs == kind), None)
    require(
        scaling is not None,
        f"{fields.where}: rope type {shown(kind)} cannot be converted: switchx has not "
        f"{_NEEDED.get(kind, 'this type')}; expected one of {', '.join(ROTARY.values())}",
    )
    found: dict[str, Any] = {"theta": own.number("rope_theta", kin.theta)}
    found["fraction"] = kin.fraction or 1.0
    for each in (fields, own):
        found["fraction"] = each.number("partial_rotary_factor", found["fraction"])
        require(
            found["fraction"] == 1 or kin.fraction is not None,
            f"{fields.where}: partial_rotary_factor={each.values.get('partial_rotary_factor')} "
            f"cannot be converted: {kin.architecture} turns whole heads; remove the field if "
            "the model was trained so",
        )
    if scaling == "none":
        return RotaryConfig(**found)
    defaults = {"beta_slow": RotaryConfig.beta_slow, "beta_fast": RotaryConfig.beta_fast}
    for theirs in SCALED[scaling]:
        ours = SCALING[theirs]
        if theirs == "original_max_position_embeddings":
            most = fields.whole(theirs, fields.whole("max_position_embeddings"))
            found[ours] = own.whole(theirs, most)
            require(
                theirs not in fields.values or found[ours] == most,
                f"{fields.where}: {theirs} is {most}, and {found[ours]} in the rope's own "
                "settings; transformers 5 takes the first: remove the one that is wrong",
            )
        elif theirs == "truncate":
            found[ours] = own.flag(theirs, True)
        elif theirs == "attention_factor":
            found[ours] = _attention_factor(own)
        else:
            found[ours] = own.number(theirs, defaults.get(ours))  # others are required
    return RotaryConfig(scaling=scaling, **found)


# Rope types that are refused: what switchx lacks, and which models need it.
_NEEDED = {
    "dynamic": "angles by the text's length (InternLM2 needs them)",
    "longrope": "two tables of factors (Phi-3.5-MoE and Phi-3 of 128k tokens need them)",
}


def _kind(values: dict[str, Any], where: str) -> str:
    fields = Fields(values, where)
    return fields.text("rope_type", fields.text("type", "default"))


def _attention_factor(own: Fields) -> float | None:
    """yarn's, or the ratio of `mscale` and `mscale_all_dim` that DeepSeek's files have."""
    if "attention_factor" in own.values:
        return own.number("attention_factor", 1.0)
    scales = own.number("mscale", 0.0), own.number("mscale_all_dim", 0.0)
    require(
        min(scales) >= 0,
        f"{own.where}: mscale, mscale_all_dim={scales}; expected numbers from 0 on",
    )
    if not all(scales):
        return None
    log = math.log(max(1.0, own.number("factor", 1.0)))
    return (0.1 * scales[0] * log + 1) / (0.1 * scales[1] * log + 1)


def sparse_layers(config: ModelConfig) -> list[int]:
    """Numbers of the blocks that have experts."""
    layers = range(config.num_decoder_layers)
    return [i for i in layers if config.is_sparse(i, "decoder")]
