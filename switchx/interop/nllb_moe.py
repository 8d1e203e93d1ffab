# SPDX-License-Identifier: Apache-2.0
"""NLLB-MoE of transformers (Costa-jussà et al. 2022, arXiv:2207.04672): reading it.

It is a pre-norm Transformer of fairseq: LayerNorm and biases everywhere, sinusoids, an
embedding times sqrt(D), top-2 routing without drops in evaluation, gates normalized over the
two. Besides names and layouts, these are converted:

- Ids, as in every family (`special_ids.py`). Their padding is 1, end 2, unknown 3, `<s>` 0;
  a decoder's input begins with the end.
- The table is multiplied by sqrt(D) once, here, and the logits have their own matrix, which is
  the unscaled table.
- Experts' outputs are multiplied by 1 - `moe_token_dropout` in evaluation, and so are their
  output matrices and biases here.

Dims: V vocabulary, D model, E experts, F ffn, H heads, K head size
"""

import math
import pathlib
from collections.abc import Collection

import numpy as np

from switchx.fields import require
from switchx.interop.huggingface_config import MOST_BLOCKS, Fields, switch_layers
from switchx.interop.tensor_folder import (
    TensorFolder,
    read_parameters,
    require_whole_model,
    torch_shapes,
)
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig

EPSILON = 1e-5  # that of PyTorch's LayerNorm
TABLE, LM_HEAD = "model.shared.weight", "lm_head.weight"
# Other names of the table, and sinusoids that releases before 5 saved.
_COPIES = (LM_HEAD, "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
_UNREAD = ("model.encoder.embed_positions.weights", "model.decoder.embed_positions.weights")
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


def read_params(
    fields: Fields,
    tensors: TensorFolder,
    config: ModelConfig,
    ids: tuple[tuple[int, ...], int],
    scratch: pathlib.Path | None,
) -> tuple[dict, ModelConfig]:
    """The parameters of a checkpoint; `ids` are those of `Family.read_ids`.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape, or tables differ.
    """
    kept = 1.0 - fields.number("moe_token_dropout", 0.2)
    scale = math.sqrt(config.d_model) if fields.flag("scale_embedding", True) else 1.0
    names, where = tensor_names(config), str(tensors.folder)
    found = {name: shape for name, shape in tensors.shapes.items() if name not in _UNREAD}
    copies = [name for name in _COPIES if name in found]
    table = {"embedding/embedding_VD": (TABLE, *copies)}
    require_whole_model(fields.values, torch_shapes(names | table, config), found, where)
    table_VD = tensors.read(TABLE)
    different = [name for name in copies if not np.array_equal(tensors.read(name), table_VD)]
    require(
        not different,
        f"{where}: {TABLE} is not equal to {', '.join(different)}; expected one table",
    )
    factors = {"embedding_VD": scale, "w_out_EFD": kept, "b_out_ED": kept}
    params = read_parameters(tensors, names, config, ids, scratch, factors)
    names = {"embedding/embedding_VD": (TABLE,), "embedding/w_logits_DV": (TABLE,)}
    return params | read_parameters(tensors, names, config, ids, scratch, factors), config


def read_config(
    fields: Fields, tensors: Collection[str] = (), overflow: str = "dropless"
) -> ModelConfig:
    """The model that a `config.json` describes; tensors and `overflow` add nothing.

    Raises:
        ValueError: it asks for what we lack.
    """
    fields.only("is_encoder_decoder", True, "NLLB has an encoder and a decoder")
    fields.only("tie_word_embeddings", True, "NLLB's logits are those of its table")
    fields.only("router_dtype", "float32", "routers run in float32 (selective precision)")
    fields.only("router_ignore_padding_tokens", False, "padding is not routed here")
    fields.only("second_expert_policy", "all", "a token's second expert is not drawn here")
    fraction = fields.number("moe_eval_capacity_token_fraction", 1.0)
    require(
        fraction == 1.0,
        f"{fields.where}: moe_eval_capacity_token_fraction={fraction}; expected 1.0, with "
        "which no token is dropped",
    )
    sizes = {name: fields.whole(name, 1024) for name in ("d_model", "vocab_size")}
    heads, d_ff = (_of_both(fields, name) for name in ("attention_heads", "ffn_dim"))
    D = sizes["d_model"]
    require(
        D % heads == 0,
        f"{fields.where}: d_model={D} does not divide by {heads} attention heads",
    )
    blocks = []
    for stack in ("encoder", "decoder"):
        count = fields.whole(f"{stack}_layers", 12, MOST_BLOCKS)
        step = fields.values.get(f"{stack}_sparse_step")
        step = fields.whole(f"{stack}_sparse_step", 4) if step != 0 else count + 1
        blocks.append((count, tuple(range(step - 1, count, step))))
    (num_encoder, in_encoder), (num_decoder, in_decoder) = blocks

    def model(**switch) -> ModelConfig:
        return ModelConfig(
            architecture="encoder_decoder",
            vocab_size=sizes["vocab_size"],
            d_model=D,
            d_ff=d_ff,
            num_heads=heads,
            d_head=D // heads,
            num_encoder_layers=num_encoder,
            num_decoder_layers=num_decoder,
            activation=fields.activation("activation_function", "relu"),
            norm="layer",
            norm_epsilon=EPSILON,
            positions="sinusoidal",
            use_bias=True,
            scale_attention=True,
            tie_embeddings=False,
            dropout_rate=fields.number("dropout", 0.1),
            **switch,
        )

    if not (in_encoder or in_decoder):
        return model()
    switch = SwitchConfig(
        num_experts=fields.experts("num_experts", len(in_encoder) + len(in_decoder), 128),
        expert_bias=True,
        dispatcher="dropless",
        router=RouterConfig(
            num_selected=2,
            gate="normalized",
            exploration="none",
            overflow="dropless",
            has_logit_bias=fields.flag("router_bias", False),
        ),
        **switch_layers(model(), in_encoder, in_decoder),
    )
    return model(switch=switch)


def _of_both(fields: Fields, name: str) -> int:
    """A size that both stacks have."""
    default = {"attention_heads": 16, "ffn_dim": 4096}[name]
    sizes = [fields.whole(f"{stack}_{name}", default) for stack in ("encoder", "decoder")]
    require(
        sizes[0] == sizes[1],
        f"{fields.where}: encoder_{name}={sizes[0]} and decoder_{name}={sizes[1]}; the stacks "
        "of switchx have one size",
    )
    return sizes[0]


def tensor_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The name of each of our parameters except tables -> theirs: one, or one per expert."""
    names: dict[str, tuple[str, ...]] = {}
    for stack in ("encoder", "decoder"):
        _add(names, f"{stack}/norm", "scale_D", "bias_D", f"model.{stack}.layer_norm")
        for layer in range(getattr(config, f"num_{stack}_layers")):
            ours = f"{stack}/blocks/layer_{layer}"
            theirs = f"model.{stack}.layers.{layer}"
            attentions = {"self_attention": "self_attn"}
            if stack == "decoder":
                attentions["cross_attention"] = "cross_attention"
            for our, their in attentions.items():
                norm = f"{theirs}.{their}_layer_norm"
                _add(names, f"{ours}/{our}_norm", "scale_D", "bias_D", norm)
                for letter, projection in _PROJECTIONS.items():
                    weight, bias = f"w_{letter}_DHK", f"b_{letter}_HK"
                    _add(names, f"{ours}/{our}", weight, bias, f"{theirs}.{their}.{projection}")
                out = f"{theirs}.{their}.out_proj"
                _add(names, f"{ours}/{our}", "w_out_HKD", "b_out_D", out)
            _add(names, f"{ours}/ffn_norm", "scale_D", "bias_D", f"{theirs}.ff_layer_norm")
            if not config.is_sparse(layer, stack):
                _add(names, f"{ours}/ffn", "w_in_DF", "b_in_F", f"{theirs}.ffn.fc1")
                _add(names, f"{ours}/ffn", "w_out_FD", "b_out_D", f"{theirs}.ffn.fc2")
                continue
            router = f"{theirs}.ffn.router.classifier"
            names[f"{ours}/ffn/w_router_DE"] = (f"{router}.weight",)
            if config.switch.router.has_logit_bias:
                names[f"{ours}/ffn/b_router_E"] = (f"{router}.bias",)
            experts = [
                f"{theirs}.ffn.experts.expert_{e}" for e in range(config.switch.num_experts)
            ]
            fc1, fc2 = ([f"{each}.{fc}" for each in experts] for fc in ("fc1", "fc2"))
            _add(names, f"{ours}/ffn/experts", "w_in_EDF", "b_in_EF", *fc1)
            _add(names, f"{ours}/ffn/experts", "w_out_EFD", "b_out_ED", *fc2)
    return names


def _add(names: dict, ours: str, weight: str, bias: str, *theirs: str) -> None:
    names[f"{ours}/{weight}"] = tuple(f"{each}.weight" for each in theirs)
    names[f"{ours}/{bias}"] = tuple(f"{each}.bias" for each in theirs)
