# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of transformers: T5, T5 1.1, mT5, UMT5, ByT5, Switch Transformers, NLLB-MoE.

A local folder with `config.json`, weights (tensor_folder.py) and, where it has one, the
vocabulary `spiece.model`. Tensors are PyTorch's: a linear map is `[out, in]`, heads joined;
every expert has its own.

Dims: V vocabulary, D model, E experts, F ffn, H heads, K head size, U buckets of positions
"""

import dataclasses
import os
import pathlib
import shutil
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from switchx.data.added_tokens import AddedToken
from switchx.data.special_ids import EOS_ID, OURS, in_our_order, in_their_order, their_ids
from switchx.fields import require, require_choice
from switchx.interop import nllb_moe
from switchx.interop.folder_tokenizer import (
    PIECES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    unknown_id,
    write_tokenizer,
)
from switchx.interop.generation_config import (
    GENERATION,
    decoding_defaults,
    end_ids,
    read_generation,
    write_generation,
)
from switchx.interop.huggingface_config import (
    NLLB,
    SWITCH,
    UMT5,
    describe,
    read_config,
    read_special_ids,
)
from switchx.interop.tensor_folder import (
    TensorFolder,
    from_torch,
    in_dtype,
    letters_of,
    on_disk,
    read_json,
    require_same_tensors,
    to_torch,
    torch_shape,
    write_json,
    write_safetensors,
)
from switchx.models.config import ModelConfig, Precision
from switchx.models.unroll import unrolled
from switchx.tree import named_leaves, nested

_PROJECTIONS = {"w_query_DHK": "q", "w_key_DHK": "k", "w_value_DHK": "v", "w_out_HKD": "o"}
SHARED = "shared.weight"
LM_HEAD = "lm_head.weight"
DECODER_LM_HEAD = "decoder.lm_head.weight"  # in switch-xxl-128
# Further names of the embedding table, which may be there beside it or instead of it.
EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# T5's first checkpoints have it; no model ever read it.
UNREAD = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
_VOCABULARIES = (PIECES, "tokenizer.model", TOKENIZER)  # the first that is there
MOST_SHARD_BYTES = 5 * 10**9  # transformers' own
_IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
_WAY_OUT = (
    "use the config.json that belongs to these files, and all of the files; what other "
    "classes of transformers add (classifiers, adapters) cannot be converted"
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model from elsewhere.

    Attributes:
        params: NumPy arrays in the dtype of `config.precision.params`.
        vocabulary: a SentencePiece model, or the `tokenizer.json` to make one of
            (tokenizer_json.py); None where the checkpoint has neither.
        is_of_bytes: whether texts are bytes (ByT5), for which no file is needed.
        special_ids: of padding, end and unknown in the files; in `params` they are ours.
        decoding: fields of `DecodingConfig` that are its defaults.
        notes: what a reader should know, a sentence each.
    """

    config: ModelConfig
    params: dict
    vocabulary: pathlib.Path | None
    is_of_bytes: bool = False
    notes: tuple[str, ...] = ()
    special_ids: tuple[int, ...] = OURS
    decoding: dict[str, Any] = dataclasses.field(default_factory=dict)


def read_checkpoint(
    folder: str | os.PathLike,
    *,
    overflow: str = "drop",
    dtype: str = "float32",
    scratch: pathlib.Path | None = None,
    vocabulary: str | os.PathLike | None = None,
) -> Checkpoint:
    """Reads a folder that `save_pretrained` wrote; never runs anything in it.

    Args:
        overflow: of Switch layers, what becomes of a token whose expert is full. `drop`: the
            residual connection alone, as in transformers 4.52 to 4.57 and from 5.19 on;
            `dropless`: nothing is ever full, as in 5.0 to 5.17; `identity`: its normed input
            times its probability, as up to 4.51.
        dtype: of the parameters; each is converted as it is read.
        scratch: a folder, for parameters that are mapped from files there instead of held in
            memory, where the largest one is at a time. They are valid as long as it is there.
        vocabulary: a file instead of the folder's own; `none` and `bytes` for none.

    Raises:
        ValueError: a file is missing or damaged; the configuration is none that we
            have; tensors are missing, unexpected or of another shape (all are named).
    """
    require_choice("overflow", overflow, ("drop", "dropless", "identity"))
    folder = pathlib.Path(folder).expanduser()
    require(
        folder.is_dir(),
        f"{folder} is no folder; download the checkpoint first, such as with `hf download "
        "google/switch-base-8 --local-dir DIR`, and give that folder",
    )
    file = folder / "config.json"
    values, tensors = read_json(file), TensorFolder(folder)
    is_nllb = values.get("model_type") == NLLB  # whose vocabulary, of BPE, is not read
    if vocabulary is None and not is_nllb:
        files = [folder / name for name in _VOCABULARIES if (folder / name).is_file()]
        vocabulary = files[0] if files else None
    elif vocabulary in ("none", "bytes", None):
        vocabulary = None
    vocabulary = vocabulary and pathlib.Path(vocabulary)
    generation = read_generation(folder, values)
    of = values | {name: generation[name] for name in _IDS if name in generation}
    if ends := end_ids(of):  # that of config.json comes after texts, if it is one of several
        of["eos_token_id"] = next((i for i in end_ids(values) if i in ends), ends[0])
    ids = read_special_ids(of, str(folder), vocabulary and unknown_id(vocabulary))
    if is_nllb:
        config, params = nllb_moe.read(values, file, tensors, dtype, scratch, ids)
        differences, is_of_bytes = (), False
    else:
        config, params, differences = _read(
            values, file, tensors, dtype, scratch, ids, overflow
        )
        is_of_bytes = _is_of_bytes(folder)
    where, own_ends = str(folder / GENERATION), end_ids(values)
    decoding, unused = decoding_defaults(generation, ids[0], config.vocab_size, where)
    if own_ends and ids[0][EOS_ID] not in own_ends:
        said = f"config.json ends a text with {own_ends[0]}, which is not used"
        unused.append(f"{where}: inputs and outputs end with {ids[0][EOS_ID]}; {said}")
    notes = (*differences, *_unread(tensors), *unused)
    return Checkpoint(config, params, vocabulary, is_of_bytes, notes, ids[0], decoding)


def _read(values, file, tensors, dtype, scratch, ids, overflow) -> tuple:
    """The configuration, the parameters, and how the tensors differ from config.json."""
    config, family = read_config(values, str(file), overflow=overflow, tensors=tensors.shapes)
    said, _ = read_config(values, str(file), overflow=overflow)
    config = dataclasses.replace(config, precision=Precision(params=dtype))
    # Before it had this field, transformers 5 said that UMT5's heads are tied; none is.
    own_head = family == UMT5 and "scale_decoder_outputs" not in values
    folder = file.parent
    params, config = _read_params(folder, tensors, config, family, scratch, own_head, ids)
    return config, params, _differences(said, config)


def _read_params(
    folder,
    tensors: TensorFolder,
    config: ModelConfig,
    family: str,
    scratch,
    own_head: bool,
    ids: tuple[tuple[int, ...], int],
):
    """The parameters, and the configuration as the tensors have it.

    Args:
        ids: of `read_special_ids`.
        own_head: whether an lm_head that is no copy is one of its own, whatever the file says.
    """
    found = {name: shape for name, shape in tensors.shapes.items() if name not in UNREAD}
    head = DECODER_LM_HEAD if DECODER_LM_HEAD in found and LM_HEAD not in found else LM_HEAD
    if head == DECODER_LM_HEAD:
        config = dataclasses.replace(config, tie_embeddings=False)
    tables = [name for name in (SHARED, *EMBEDDINGS) if name in found] or [SHARED]
    head_is_copy = head in found and config.tie_embeddings
    if family != SWITCH and head not in found:
        config = dataclasses.replace(config, tie_embeddings=True)  # as transformers 5 does

    names = tensor_names(config, family) | {"embedding/embedding_VD": (tables[0],)}
    if not config.tie_embeddings:
        names["embedding/w_logits_DV"] = (head,)
    expected = {
        name: torch_shape(parameter, config)
        for parameter, theirs in names.items()
        for name in theirs
    }
    copies = [*tables[1:], *([head] if head_is_copy else [])]
    expected |= dict.fromkeys(copies, torch_shape("embedding/embedding_VD", config))
    require_same_tensors(expected, found, str(folder), _WAY_OUT)
    different = _unlike(tensors, tables[0], copies)
    if different == [head] and (own_head or not config.scale_tied_logits):
        # T5 1.1, mT5, UMT5, saved by transformers 5: not tied, whatever the file says.
        config = dataclasses.replace(config, tie_embeddings=False)
        names["embedding/w_logits_DV"] = (head,)
        different = []
    of_encoder, of_decoder = EMBEDDINGS
    if different and not config.tie_embeddings and of_decoder in found:
        # shared.weight, where it is there, is equal to one of the two, or to none.
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
        config = dataclasses.replace(config, scale_tied_logits=True)  # means nothing there
    params = {}
    for parameter, theirs in names.items():
        value = from_torch(parameter, config, map(tensors.read, theirs))
        if "V" in letters_of(parameter):
            first = None if parameter == "embedding/w_logits_DV" else start
            axis = letters_of(parameter).index("V")
            value = in_our_order(value, axis, special_ids, first)
        value = in_dtype(parameter, value, config.precision.params)
        params[parameter] = on_disk(value, scratch)
    return nested(params), config


def _unlike(tensors: TensorFolder, table: str, copies: list[str]) -> list[str]:
    """Those of some tables that are not equal to another."""
    table_VD = tensors.read(table) if copies else None
    return [name for name in copies if not np.array_equal(tensors.read(name), table_VD)]


def _unread(tensors: TensorFolder) -> tuple[str, ...]:
    if not tensors.unread:
        return ()
    return (f"not read: {', '.join(tensors.unread)}, beside the weights in safetensors",)


def _is_of_bytes(folder: pathlib.Path) -> bool:
    file = folder / TOKENIZER_CONFIG
    return file.is_file() and read_json(file).get("tokenizer_class") == "ByT5Tokenizer"


def _differences(said: ModelConfig, config: ModelConfig) -> tuple[str, ...]:
    """Where the tensors of a Switch Transformer are not what its config.json describes."""

    def blocks(config: ModelConfig) -> str:
        stacks = [
            f"{config.num_sparse_layers_of(stack)} of {getattr(config, f'num_{stack}_layers')}"
            for stack in ("encoder", "decoder")
        ]
        gated = f" and activation={config.activation!r}"
        return f"{stacks[0]} sparse blocks in the encoder, {stacks[1]} in the decoder{gated}"

    if blocks(said) == blocks(config):
        return ()
    return (f"config.json describes {blocks(said)}; the tensors are {blocks(config)}",)


def write_checkpoint(
    folder: pathlib.Path,
    config: ModelConfig,
    params: dict,
    vocabulary: pathlib.Path | None = None,
    *,
    num_sentinels: int = 100,
    added_tokens: Sequence[AddedToken] = (),
    special_ids: Sequence[int] = OURS,
    decoding: Mapping[str, Any] = types.MappingProxyType({}),
) -> list[str]:
    """Writes what `from_pretrained` reads into an existing folder.

    Args:
        config: of the model; its `precision.params` is the dtype that is written.
        params: arrays on the host or on a device.
        vocabulary: a SentencePiece model, copied to `spiece.model`.
        num_sentinels: sentinels that come on top of its pieces.
        added_tokens: what else does, sentinels among them where they are not as T5's.
        special_ids: of padding, end and unknown in the files.
        decoding: fields of `DecodingConfig` that are defaults.

    Returns:
        What a reader should know, a sentence each: where the export is not the same thing.

    Raises:
        ValueError: transformers has no such model (all reasons are given).
    """
    config, params = unrolled(config, params)
    description, notes = describe(config)
    family = description["model_type"]
    leaves = named_leaves(params)
    start = _start(np.asarray(leaves["embedding/embedding_VD"]), special_ids)
    generation = write_generation(decoding, special_ids, start)
    description |= {name: generation[name] for name in _IDS} | {"eos_token_id": special_ids[1]}
    names = tensor_names(config, family)
    if not description["tie_word_embeddings"]:
        # What is not tied is looked up by every one of its names.
        copies = [LM_HEAD] if config.tie_embeddings else []
        copies += EMBEDDINGS if family == SWITCH else ()
        names["embedding/embedding_VD"] = (SHARED, *copies)

    def tensors():
        for parameter, theirs in names.items():
            leaf = in_dtype(parameter, np.asarray(leaves[parameter]), config.precision.params)
            if "V" in letters_of(parameter):
                leaf = in_their_order(leaf, letters_of(parameter).index("V"), special_ids)
            parts = to_torch(parameter, leaf)
            if parameter == "embedding/embedding_VD":
                parts = [parts[0].copy() for _ in theirs]
            yield from zip(theirs, parts, strict=True)

    write_safetensors(folder, tensors(), MOST_SHARD_BYTES)
    write_json(folder / "config.json", description)
    write_json(folder / GENERATION, generation)
    if vocabulary is not None:
        shutil.copyfile(vocabulary, folder / PIECES)
        write_tokenizer(folder, num_sentinels, added_tokens, special_ids)
    return notes


def _start(table_VD, special_ids: Sequence[int]) -> int:
    """Their token whose row a decoder's input begins with: row 0 here.

    That of another token where they are equal, as they are of a model that began with it;
    otherwise padding.
    """
    theirs = their_ids(special_ids)
    equal = (i for i in sorted(theirs) if i and np.array_equal(table_VD[i], table_VD[0]))
    return theirs[0] if tuple(special_ids) == OURS else theirs[next(equal, 0)]


def tensor_names(config: ModelConfig, family: str) -> dict[str, tuple[str, ...]]:
    """The name of each of our parameters -> theirs: one, or one an expert.

    Args:
        config: of an unrolled encoder-decoder.
        family: Hugging Face's `model_type`: one of `huggingface_config.FAMILIES`.
    """
    names = {"embedding/embedding_VD": (SHARED,)}
    if not config.tie_embeddings:
        names["embedding/w_logits_DV"] = (LM_HEAD,)
    for stack in ("encoder", "decoder"):
        with_bias = getattr(config, f"num_{stack}_layers") if family == UMT5 else 1
        names[f"{stack}/relative_bias/bias_UH"] = tuple(
            f"{stack}.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
            for layer in range(with_bias)
        )
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
