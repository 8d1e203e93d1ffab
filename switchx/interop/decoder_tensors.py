# SPDX-License-Identifier: Apache-2.0
"""Tensors of decoder-only models of transformers: their names and how they are read.

Dims: V vocabulary, D model, E experts, F ffn, H heads, K head size, Z heads of keys and values
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Collection

import numpy as np

from switchx.fields import require
from switchx.interop.decoder_families import Decoder, sparse_layers
from switchx.interop.huggingface_config import Fields, shown
from switchx.interop.tensor_folder import (
    WAY_OUT,
    TensorFolder,
    read_parameters,
    require_whole_model,
    torch_shapes,
)
from switchx.models.config import ModelConfig

TABLE, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PROJECTIONS = {"query": "q", "key": "k", "value": "v"}


def tensor_names(kin: Decoder, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The name of each of our parameters -> theirs: one, or one per expert."""
    names = {"embedding/embedding_VD": (TABLE,), "decoder/norm/scale_D": ("model.norm.weight",)}
    if not config.tie_embeddings:
        names["embedding/w_logits_DV"] = (LM_HEAD,)
    norms = ("input_layernorm", "post_attention_layernorm")
    if kin.norm_place == "after":
        norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    shared = "HK" if config.kv_heads == config.num_heads else "ZK"
    for layer in range(config.num_decoder_layers):
        ours, theirs = f"decoder/blocks/layer_{layer}", f"model.layers.{layer}"
        for our, their in zip(("self_attention_norm", "ffn_norm"), norms, strict=True):
            names[f"{ours}/{our}/scale_D"] = (f"{theirs}.{their}.weight",)
        attention, their = f"{ours}/self_attention", f"{theirs}.self_attn"
        for name, letter in _PROJECTIONS.items():
            dims = "HK" if name == "query" else shared
            names[f"{attention}/w_{name}_D{dims}"] = (f"{their}.{letter}_proj.weight",)
            if config.biases_of_attention != "none":
                names[f"{attention}/b_{name}_{dims}"] = (f"{their}.{letter}_proj.bias",)
            if config.qk_norm != "none" and name != "value":
                dims = dims if config.qk_norm == "all" else "K"
                names[f"{attention}/scale_{name}_{dims}"] = (f"{their}.{letter}_norm.weight",)
        names[f"{attention}/w_out_HKD"] = (f"{their}.o_proj.weight",)
        if config.biases_of_attention == "all":
            names[f"{attention}/b_out_D"] = (f"{their}.o_proj.bias",)
        if not config.is_sparse(layer, "decoder"):
            names |= _ffn_names(f"{ours}/ffn", f"{theirs}.mlp", Decoder.matrices)
            continue
        ffn = f"{theirs}.{kin.ffn}"
        names[f"{ours}/ffn/w_router_DE"] = (f"{ffn}.{kin.router}.weight",)
        if config.switch.router.has_bias:
            names[f"{ours}/ffn/router_bias_E"] = (f"{ffn}.{kin.router_bias}",)
        for parameter, matrix in zip(
            ("in_EDF", "gate_EDF", "out_EFD"), kin.matrices, strict=True
        ):
            names[f"{ours}/ffn/experts/w_{parameter}"] = tuple(
                f"{ffn}.experts.{expert}.{matrix}.weight"
                for expert in range(config.switch.num_experts)
            )
        if config.switch.shared_d_ff is not None:
            module = f"{ffn}.shared_expert{'s' * bool(kin.shared_count)}"
            names |= _ffn_names(f"{ours}/ffn/shared_expert", module, kin.matrices)
            if config.switch.shared_gate:
                names[f"{ours}/ffn/shared_gate_D"] = (f"{ffn}.shared_expert_gate.weight",)
    return names


def _ffn_names(ours: str, theirs: str, matrices) -> dict[str, tuple[str, ...]]:
    parameters = zip(("w_in_DF", "w_gate_DF", "w_out_FD"), matrices, strict=True)
    return {f"{ours}/{our}": (f"{theirs}.{their}.weight",) for our, their in parameters}


# The frequencies, which releases before transformers 4.32 saved beside the weights.
_UNREAD = ".rotary_emb.inv_freq"


def read_params(
    kin: Decoder,
    fields: Fields,
    tensors: TensorFolder,
    config: ModelConfig,
    ids: tuple[tuple[int, ...], int],
    scratch: pathlib.Path | None,
) -> tuple[dict, ModelConfig]:
    """The parameters of a checkpoint, and the model, whose logits may turn out to be untied.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape.
    """
    where, left_out = str(tensors.folder), tensors.unread
    tensors = _SeparateExperts(kin, tensors, config)
    found = {n: shape for n, shape in tensors.shapes.items() if not n.endswith(_UNREAD)}
    unread = kin.unread
    if unread == "block":  # eh_proj distinguishes it from one that config.json omits
        block = f"model.layers.{config.num_decoder_layers}."
        unread = block if f"{block}eh_proj.weight" in found else ""
    if unread and (others := [name for name in found if unread in name]):
        left_out.append(f"{len(others)} tensors of {unread}")
        found = {name: found[name] for name in found.keys() - set(others)}
    stated, present = sparse_layers(config), _routed_blocks(kin, found, config)
    require(
        not present or present == stated,
        f"{where}: config.json says that of {config.num_decoder_layers} blocks {shown(stated)} "
        f"have experts; of the tensors {shown(present)} have: {WAY_OUT}",
    )
    if config.tie_embeddings and LM_HEAD in found:
        # Present and equal, or present and another matrix after fine-tuning.
        if np.array_equal(tensors.read(LM_HEAD), tensors.read(TABLE)):
            del found[LM_HEAD]
        else:
            config = dataclasses.replace(config, tie_embeddings=False)
    factors = _factors(kin, fields, config)
    if config.tie_embeddings and factors["embedding_VD"] != factors["w_logits_DV"]:
        config = dataclasses.replace(config, tie_embeddings=False)
        names = tensor_names(kin, config) | {"embedding/w_logits_DV": (TABLE,)}
    else:
        names = tensor_names(kin, config)
    require_whole_model(fields.values, torch_shapes(names, config), found, where)
    changes = factors, orders(kin, config)
    return read_parameters(tensors, names, config, ids, scratch, *changes), config


def _routed_blocks(kin: Decoder, found: Collection[str], config: ModelConfig) -> list[int]:
    """The blocks whose routers are among the tensors."""
    name = f"model.layers.{{}}.{kin.ffn}.{kin.router}.weight"
    return [i for i in range(config.num_decoder_layers) if name.format(i) in found]


def _factors(kin: Decoder, fields: Fields, config: ModelConfig) -> dict[str, float]:
    """Factors of parameters, by the last part of their names: those of Granite."""

    def factor(name: str) -> float:
        return fields.number(name, 1.0) if kin.has_multipliers else 1.0

    scores = config.d_head**0.5 * factor("attention_multiplier") if kin.has_multipliers else 1.0
    scores = 1.0 if abs(scores - 1) < 1e-6 else scores
    rest, logits = factor("residual_multiplier"), factor("logits_scaling")
    require(logits != 0, f"{fields.where}: logits_scaling=0; expected what divides logits")
    names = ("w_out_HKD", "b_out_D", "w_out_EFD"), ("w_query_DHK", "b_query_HK")
    found = dict.fromkeys(names[0], rest) | dict.fromkeys(names[1], scores)
    return found | {
        "embedding_VD": factor("embedding_multiplier"),
        "w_logits_DV": 1 / logits,
    }


def orders(kin: Decoder, config: ModelConfig) -> dict[str, np.ndarray]:
    """The order of K of our parameters in their tensors, by the last part of their names."""
    if not kin.has_pairs:
        return {}
    order_K = np.arange(config.d_head).reshape(-1, 2).T.reshape(-1)
    return dict.fromkeys(("w_query_DHK", "w_key_DHK", "w_key_DZK"), order_K)


# Names in transformers 5's memory, and names in files.
_FUSED = Decoder.fused
_IN_MEMORY = (
    (".gate.moe_statics.", ".moe_statics."),
    (".router.weight", ".router.layer.weight"),
)


class _SeparateExperts:
    """A folder's tensors with those of each expert separate, as in the hub's files.

    transformers 5 has them fused in memory, and in files if `save_original_format` is false:
    `mlp.experts.gate_up_proj` `[E, 2 F, D]` and `mlp.experts.down_proj` `[E, D, F]`. Those of
    blocks that are not sparse in `config` stay whole; an E other than its own is refused.
    """

    def __init__(self, kin: Decoder, tensors: TensorFolder, config: ModelConfig):
        self._tensors, self._last = tensors, ("", None)
        self.shapes, self._parts = {}, {}
        is_fused = any(name.endswith(_FUSED) for name in tensors.shapes)
        gate, up, down = kin.matrices
        ffns = {f"model.layers.{layer}.{kin.ffn}." for layer in sparse_layers(config)}
        for name, shape in tensors.shapes.items():
            own = name
            for their, our in ((".mlp.", f".{kin.ffn}."), *_IN_MEMORY) if is_fused else ():
                own = own.replace(their, our)
            kind = next((each for each in (*_FUSED, *kin.fused) if own.endswith(each)), None)
            if kind is None or len(shape) != 3 or own.removesuffix(kind) not in ffns:
                self.shapes[own], self._parts[own] = shape, (name, ...)
                continue
            E, rows, columns = shape
            require(
                config.switch.num_experts == E,
                f"{tensors.folder}: {name} has shape {list(shape)}; expected "
                f"{config.switch.num_experts} experts, as config.json says: {WAY_OUT}",
            )
            half, parts = rows // 2, {down: slice(rows)}
            if kind in (_FUSED[0], kin.fused[0]):
                parts = {gate: slice(half), up: slice(half, rows)}
            for expert, (matrix, part) in itertools.product(range(E), parts.items()):
                one = f"{own.removesuffix(kind)}experts.{expert}.{matrix}.weight"
                self.shapes[one] = part.stop - (part.start or 0), columns
                self._parts[one] = name, (expert, part)

    def read(self, name: str) -> np.ndarray:
        """As `TensorFolder.read`; one tensor is kept from one call to the next."""
        whole, part = self._parts[name]
        if self._last[0] != whole:
            self._last = whole, self._tensors.read(whole)
        return self._last[1][part]
