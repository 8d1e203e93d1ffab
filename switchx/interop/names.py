# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's tensor names of T5, mT5 and Switch Transformers, for each of our parameters.

Theirs are PyTorch's: a linear map is `[out, in]`, heads joined; every expert has its own.
"""

from switchx.models.config import ModelConfig

SWITCH = "switch_transformers"

_PROJECTIONS = {"w_query_DHK": "q", "w_key_DHK": "k", "w_value_DHK": "v", "w_out_HKD": "o"}
SHARED = "shared.weight"
LM_HEAD = "lm_head.weight"
# Further names of the embedding table, which may be there beside it or instead of it.
EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# T5's first checkpoints have it; no model ever read it.
UNREAD = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)


def tensor_names(config: ModelConfig, family: str) -> dict[str, tuple[str, ...]]:
    """The name of each of our parameters -> theirs: one, or one an expert.

    Args:
        config: of an unrolled encoder-decoder.
        family: Hugging Face's `model_type`: `t5`, `mt5` or `switch_transformers`.
    """
    names = {"embedding/embedding_VD": (SHARED,)}
    if not config.tie_embeddings:
        names["embedding/w_logits_DV"] = (LM_HEAD,)
    for stack in ("encoder", "decoder"):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        names[f"{stack}/relative_bias/bias_UH"] = (bias,)
        names[f"{stack}/norm/scale_D"] = (f"{stack}.final_layer_norm.weight",)
        for layer in range(getattr(config, f"num_{stack}_layers")):
            names |= _block_names(config, family, stack, layer)
    return names


def _block_names(config, family: str, stack: str, layer: int) -> dict[str, tuple[str, ...]]:
    ours, theirs = f"{stack}/blocks/layer_{layer}", f"{stack}.block.{layer}.layer"
    attentions = {"self_attention": "SelfAttention"}
    if stack == "decoder":
        attentions["cross_attention"] = "EncDecAttention"
    names = {}
    for number, (our, their) in enumerate(attentions.items()):
        names[f"{ours}/{our}_norm/scale_D"] = (f"{theirs}.{number}.layer_norm.weight",)
        for parameter, letter in _PROJECTIONS.items():
            weight = f"{theirs}.{number}.{their}.{letter}.weight"
            names[f"{ours}/{our}/{parameter}"] = (weight,)
    sublayer = f"{theirs}.{len(attentions)}"
    names[f"{ours}/ffn_norm/scale_D"] = (f"{sublayer}.layer_norm.weight",)
    ffn = f"{sublayer}.{'mlp' if family == SWITCH else 'DenseReluDense'}"
    if config.is_sparse(layer, stack):
        router = f"{ffn}.router.classifier.weight"
        names[f"{ours}/ffn/w_router_DE"] = (router,)
        for parameter, letters in (("w_in_EDF", "wi"), ("w_out_EFD", "wo")):
            names[f"{ours}/ffn/experts/{parameter}"] = tuple(
                f"{ffn}.experts.expert_{expert}.{letters}.weight"
                for expert in range(config.switch.num_experts)
            )
        return names
    matrices = {"w_in_DF": "wi", "w_out_FD": "wo"}
    if config.is_gated:
        matrices = {"w_in_DF": "wi_0", "w_gate_DF": "wi_1", "w_out_FD": "wo"}
    return names | {
        f"{ours}/ffn/{parameter}": (f"{ffn}.{letters}.weight",)
        for parameter, letters in matrices.items()
    }


def is_linear(parameter: str) -> bool:
    """Whether a parameter is a linear map, which PyTorch keeps as `[out, in]`."""
    return parameter.rpartition("/")[2].startswith("w_")
