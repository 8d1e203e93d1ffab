# SPDX-License-Identifier: Apache-2.0
"""Families of transformers checkpoints, one row each: config keys, tensor names, special ids.

A family is what one `model_type` of `config.json` means. A new one is a row of `FAMILIES`; for
T5's relatives, with a `T5Kin` that says how it differs from T5.
"""

import dataclasses
import functools
from collections.abc import Callable

from switchx.fields import require
from switchx.interop import (
    decoder_families,
    decoder_tensors,
    huggingface_config,
    nllb_moe,
    t5_tensors,
)
from switchx.interop.decoder_families import DECODERS, Decoder
from switchx.interop.folder_tokenizer import PIECES, TOKENIZER
from switchx.interop.huggingface_config import MT5, SWITCH, T5, UMT5, Fields, T5Kin, shown
from switchx.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """How checkpoints of one `model_type` are read, and written if they can be.

    Attributes:
        read_config: function (config.json's `Fields`, the names of tensors, empty for what the
            file says, `overflow`) -> the model.
        tensor_names: function (an unrolled model) -> our parameters' names -> theirs: one, or
            one per expert.
        read_params: function (`Fields`, a `TensorFolder`, the model, `read_ids`, a folder for
            large arrays) -> parameters, and the model as the tensors have it.
        special_ids: ids of padding, end, unknown and a decoder's start if config.json has none.
            That file never has unknown: if a tokenizer has another one, that is used.
        vocabularies: files of a vocabulary, of which the first that exists is read.
        keeps_ids: whether ids stay as they are in the files (bpe.py).
        overflows: what happens to a token whose expert is full, by release of transformers,
            the default first; families with a single one drop none or have no experts.
    """

    read_config: Callable[..., ModelConfig]
    tensor_names: Callable[[ModelConfig], dict[str, tuple[str, ...]]]
    read_params: Callable[..., tuple[dict, ModelConfig]]
    special_ids: tuple[int, int, int, int] = (0, 1, 2, 0)
    vocabularies: tuple[str, ...] = (PIECES, "tokenizer.model", TOKENIZER)
    keeps_ids: bool = False
    overflows: tuple[str, ...] = ("dropless",)

    @classmethod
    def of_decoder(cls, kin: Decoder) -> "Family":
        """A family of decoder-only models."""
        return cls(
            functools.partial(decoder_families.read_config, kin),
            functools.partial(decoder_tensors.tensor_names, kin),
            functools.partial(decoder_tensors.read_params, kin),
            vocabularies=(TOKENIZER,),
            keeps_ids=True,
        )

    @classmethod
    def of_t5(cls, kin: T5Kin) -> "Family":
        """A family of T5's relatives."""
        return cls(
            functools.partial(huggingface_config.read_config, kin),
            functools.partial(t5_tensors.tensor_names, kin),
            functools.partial(t5_tensors.read_params, kin),
            overflows=("drop", "dropless", "identity") if kin.has_experts else ("dropless",),
        )

    def read_ids(
        self, fields: Fields, unknown: int | None = None
    ) -> tuple[tuple[int, int, int], int]:
        """A model's ids of padding, end and unknown, and the id that begins a decoder's input.

        Args:
            fields: values of `config.json`, overridden by those of `generation_config.json`.
            unknown: the tokenizer's id of unknown pieces.

        Raises:
            ValueError: a value is not an id, or padding is the end.
        """
        most = fields.whole("vocab_size") - 1
        pad, end, start = (
            fields.whole(f"{name}_token_id", self.special_ids[place], most, 0)
            for place, name in ((0, "pad"), (1, "eos"), (3, "decoder_start"))
        )
        require(
            pad != end,
            f"{fields.where}: pad_token_id and eos_token_id are both {pad}; expected two ids, "
            "those that the model was trained with",
        )
        return (pad, end, self.special_ids[2] if unknown is None else unknown), start


_OF_DECODERS = {name: Family.of_decoder(kin) for name, kin in DECODERS.items()}
FAMILIES = {kin.model_type: Family.of_t5(kin) for kin in (T5, MT5, UMT5, SWITCH)} | {
    **_OF_DECODERS,
    "nllb-moe": Family(
        nllb_moe.read_config,
        nllb_moe.tensor_names,
        nllb_moe.read_params,
        special_ids=(1, 2, 3, 2),
        vocabularies=(),  # its own is BPE, which is not read
    ),
}


# What other families have that switchx lacks.
_MISSING = {
    "deepseek_v2": "latent attention (MLA)",
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2"), "latent attention (MLA)"),
    "gpt_oss": "attention sinks, windows in every other block and MXFP4 weights",
    "granitemoehybrid": "state-space layers",
    "granitemoeshared": "shared experts beside multipliers",
    "hunyuan_v1_moe": "norms of queries and keys behind rotary positions",
    "jetmoe": "experts in attention of this kind",
    "minimax": "linear attention",
    "phimoe": "routing by SparseMixer",
    "qwen3_next": "linear attention",
}


def family_of(fields: Fields) -> Family:
    """The family that a `config.json` names.

    Raises:
        ValueError: it names none of ours; the message lists these.
    """
    name = fields.text("model_type", "")
    missing = f": switchx has no {_MISSING[name]}" if name in _MISSING else ""
    require(
        name in FAMILIES,
        f"{fields.where}: model_type={shown(name)} cannot be converted{missing}; expected one "
        f"of {', '.join(FAMILIES)}",
    )
    return FAMILIES[name]
