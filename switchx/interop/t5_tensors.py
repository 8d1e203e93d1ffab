# SPDX-License-Identifier: Apache-2.0
"""Tensors of T5's family in transformers: their names, and which tables and heads are shared.

Dims: V vocabulary, D model, E experts, F ffn, H heads, K head size, U buckets of positions
"""

import dataclasses
import pathlib

import numpy as np

from switchx.fields import require
from switchx.interop.huggingface_config import Fields, T5Kin
from switchx.interop.tensor_folder import (
    WAY_OUT,
    TensorFolder,
    read_parameters,
    require_whole_model,
    torch_shape,
    torch_shapes,
)
from switchx.models.config import ModelConfig

_PROJECTIONS = {"w_query_DHK": "q", "w_key_DHK": "k", "w_value_DHK": "v", "w_out_HKD": "o"}
SHARED = "shared.weight"
LM_HEAD = "lm_head.weight"
DECODER_LM_HEAD = "decoder.lm_head.weight"  # in switch-xxl-128
# Further names of the embedding table, which may exist beside it or instead of it.
EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# T5's first checkpoints have it; no model ever read it.
UNREAD = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
_WAY_OUT = (
    f"{WAY_OUT}; what other classes of transformers add (classifiers, adapters) cannot be "
    "converted"
)


def read_params(
    kin: T5Kin,
    fields: Fields,
    tensors: TensorFolder,
    config: ModelConfig,
    ids: tuple[tuple[int, ...], int],
    scratch: pathlib.Path | None,
) -> tuple[dict, ModelConfig]:
    """The parameters, and the configuration as the tensors have it.

    Args:
        fields: values of `config.json`.
        ids: special ids, as `Family.read_ids` returns them.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape, or tables differ.
    """
    folder = tensors.folder
    # Before it had this field, transformers 5 said that UMT5's heads are tied; none are.
    own_head = kin.has_own_head and "scale_decoder_outputs" not in fields.values
    found = {name: shape for name, shape in tensors.shapes.items() if name not in UNREAD}
    head = DECODER_LM_HEAD if DECODER_LM_HEAD in found and LM_HEAD not in found else LM_HEAD
    if head == DECODER_LM_HEAD:
        config = dataclasses.replace(config, tie_embeddings=False)
    tables = [name for name in (SHARED, *EMBEDDINGS) if name in found] or [SHARED]
    head_is_copy = head in found and config.tie_embeddings
    if not kin.has_experts and head not in found:
        config = dataclasses.replace(config, tie_embeddings=True)  # as transformers 5 does

    names = tensor_names(kin, config) | {"embedding/embedding_VD": (tables[0],)}
    if not config.tie_embeddings:
        names["embedding/w_logits_DV"] = (head,)
    expected = torch_shapes(names, config)
    copies = [*tables[1:], *([head] if head_is_copy else [])]
    expected |= dict.fromkeys(copies, torch_shape("embedding/embedding_VD", config))
    require_whole_model(fields.values, expected, found, str(folder), _WAY_OUT)
    different = _unlike(tensors, tables[0], copies)
    if different == [head] and (own_head or not config.scale_tied_logits):
        # T5 1.1, mT5 and UMT5 saved by transformers 5: not tied, whatever the file says.
        config = dataclasses.replace(config, tie_embeddings=False)
        names["embedding/w_logits_DV"] = (head,)
        different = []
    of_encoder, of_decoder = EMBEDDINGS
    if different and not config.tie_embeddings and of_decoder in found:
        # shared.weight, if it exists, is equal to one of the two, or to neither.
        own = of_encoder if of_encoder in found else SHARED
        different = [SHARED] if len(_unlike(tensors, SHARED, copies)) == len(copies) > 1 else []
        config = dataclasses.replace(config, separate_embeddings=True)
        names |= {"embedding/embedding_VD": (of_decoder,), "embedding/encoder_VD": (own,)}
    require(
        not different,
        f"{folder}: {tables[0]} is not equal to {', '.join(different)}, which config.json says "
        "it is tied to; tied logits are those of one table for both stacks, and tied logits "
        "alone are divided: set tie_word_embeddings to false for an lm_head of its own",
    )
    special_ids, start = ids
    # Row 0 is the start's, column 0 of the logits padding's; experts count padding by its row.
    require(
        start == special_ids[0] or not (config.tie_embeddings or config.switch),
        f"{folder}: decoder_start_token_id={start} and pad_token_id={special_ids[0]} with tied "
        "embeddings, or experts; expected one id for both",
    )
    if not config.tie_embeddings:
        config = dataclasses.replace(config, scale_tied_logits=True)  # has no effect here
    return read_parameters(tensors, names, config, ids, scratch), config


def _unlike(tensors: TensorFolder, table: str, copies: list[str]) -> list[str]:
    """The copies of a table that are not equal to it."""
    table_VD = tensors.read(table) if copies else None
    return [name for name in copies if not np.array_equal(tensors.read(name), table_VD)]


def tensor_names(kin: T5Kin, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The name of each of our parameters -> theirs: one, or one per expert.

    Args:
        config: configuration of an unrolled encoder-decoder.
    """
    names = {"embedding/embedding_VD": (SHARED,)}
    if not config.tie_embeddings:
        names["embedding/w_logits_DV"] = (LM_HEAD,)
    for stack in ("encoder", "decoder"):
        with_bias = getattr(config, f"num_{stack}_layers") if kin.has_bias_per_layer else 1
        names[f"{stack}/relative_bias/bias_UH"] = tuple(
            f"{stack}.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
            for layer in range(with_bias)
        )
        names[f"{stack}/norm/scale_D"] = (f"{stack}.final_layer_norm.weight",)
        for layer in range(getattr(config, f"num_{stack}_layers")):
            names |= _block_names(kin, config, stack, layer)
    return names


def _block_names(kin: T5Kin, config, stack: str, layer: int) -> dict[str, tuple[str, ...]]:
    ours = f"{stack}/blocks/layer_{layer}"
    theirs = f"{stack}.block.{layer}.layer"
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
    ffn = f"{sublayer}.{kin.ffn}"
    if config.is_sparse(layer, stack):
        router = f"{ffn}.router.classifier.weight"
        names[f"{ours}/ffn/w_router_DE"] = (router,)
        if config.switch.router.has_logit_bias:
            names[f"{ours}/ffn/b_router_E"] = (f"{ffn}.router.classifier.bias",)
        matrices = {"w_in_EDF": "wi_0" if config.is_gated else "wi", "w_out_EFD": "wo"}
        if config.is_gated:
            matrices["w_gate_EDF"] = "wi_1"
        for parameter, letters in matrices.items():
            names[f"{ours}/ffn/experts/{parameter}"] = tuple(
                f"{ffn}.experts.expert_{expert}.{letters}.weight"
                for expert in range(config.switch.num_experts)
            )
        return names
    matrices = {"w_in_DF": "wi_0" if config.is_gated else "wi", "w_out_FD": "wo"}
    if config.is_gated:
        matrices["w_gate_DF"] = "wi_1"
    for parameter, letters in matrices.items():
        names[f"{ours}/ffn/{parameter}"] = (f"{ffn}.{letters}.weight",)
    return names
