# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of transformers: T5's family, Switch Transformers, NLLB-MoE, decoder-only models.

A checkpoint is a local folder with `config.json`, weights (tensor_folder.py) and, if it has
one, the vocabulary `spiece.model`. Tensors are PyTorch's: a linear map is `[out, in]`, with
heads joined; every expert has its own.

Dims: V vocabulary, D model, E experts, F ffn, H heads, K head size, U buckets of positions
"""

import dataclasses
import math
import os
import pathlib
import shutil
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from switchx.data.added_tokens import AddedToken
from switchx.data.bpe import CARRIED, TOKENIZER_FILE, BpeVocabulary, read_bpe
from switchx.data.special_ids import EOS_ID, OURS, in_their_order, their_ids
from switchx.data.tokenizers import TokenIdVocabulary, Vocabulary
from switchx.fields import require
from switchx.interop import decoder_descriptions, decoder_families, decoder_tensors
from switchx.interop.families import FAMILIES, family_of
from switchx.interop.folder_tokenizer import (
    PIECES,
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
from switchx.interop.huggingface_config import Fields, describe, shown
from switchx.interop.t5_tensors import EMBEDDINGS, LM_HEAD, SHARED
from switchx.interop.tensor_folder import (
    TensorFolder,
    dtype_of,
    in_dtype,
    letters_of,
    read_json,
    to_torch,
    torch_shapes,
    write_json,
    write_safetensors,
)
from switchx.models.config import ModelConfig, Precision
from switchx.models.unroll import unrolled
from switchx.tree import named_leaves

MOST_SHARD_BYTES = 5 * 10**9  # transformers' own
_IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")

# What a decoder's config.json has and a ModelConfig lacks.
_ADAPTER = "adapter_config.json"
_OF_TRAINING = (
    *("router_aux_loss_coef", "router_z_loss_coef", "router_jitter_noise", "attention_dropout"),
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model that another library trained.

    Attributes:
        params: NumPy arrays in the dtype of `config.precision.params`.
        vocabulary: a SentencePiece model, or the `tokenizer.json` to make one from
            (tokenizer_json.py); None if the checkpoint has neither.
        is_of_bytes: whether texts are bytes (ByT5), for which no file is needed.
        special_ids: ids of padding, end and unknown in the files; `params` have ours.
        decoding: fields of `DecodingConfig` that are the model's defaults.
        notes: sentences that a user should know.
        ids: the vocabulary if ids stay as they are in the files (decoder-only models).
        rescaled: family whose factors were multiplied into `params`; None for all others.
    """

    config: ModelConfig
    params: dict
    vocabulary: pathlib.Path | None
    is_of_bytes: bool = False
    notes: tuple[str, ...] = ()
    special_ids: tuple[int, ...] = OURS
    decoding: dict[str, Any] = dataclasses.field(default_factory=dict)
    ids: Vocabulary | None = None
    rescaled: str | None = None


def read_checkpoint(
    folder: str | os.PathLike,
    *,
    overflow: str | None = None,
    dtype: str = "float32",
    scratch: pathlib.Path | None = None,
    vocabulary: str | os.PathLike | None = None,
) -> Checkpoint:
    """Reads a folder that `save_pretrained` wrote; never runs code from it.

    Args:
        overflow: what a layer of Switch Transformers gives for a token whose expert is full.
            `drop`, the default: the residual connection alone, as in transformers 4.52 to 4.57
            and from 5.19 on; `dropless`: no expert is ever full, as in 5.0 to 5.17; `identity`:
            its normed input times its probability, as up to 4.51. Other families have only
            `dropless`.
        dtype: dtype of the parameters; each is converted as it is read.
        scratch: folder for files from which parameters are memory-mapped; only the largest one
            is in memory at a time. The parameters are valid as long as the folder exists.
        vocabulary: a file that replaces the folder's own; `none` and `bytes` use no file.

    Raises:
        ValueError: a file is missing or damaged; we do not support the configuration; tensors
            are missing, unexpected or of another shape (the message names all).
    """
    folder = pathlib.Path(folder).expanduser()
    require(
        folder.is_dir(),
        f"{folder} is no folder; download the checkpoint first, such as with `hf download "
        "google/switch-base-8 --local-dir DIR`, and give that folder",
    )
    values = _description(folder)
    require(
        not (folder / _ADAPTER).is_file(),
        f"{folder} has an adapter beside its model ({_ADAPTER}), which transformers adds where "
        "it opens the folder; move adapter_config.json and adapter_model.* into a folder of "
        "their own, convert the model, then these with --from=peft",
    )
    tensors = TensorFolder(folder)
    fields = Fields(values, str(folder / "config.json"))
    family = family_of(fields)
    overflow = family.overflows[0] if overflow is None else overflow
    require(
        overflow in family.overflows,
        f"overflow={overflow!r} of a {fields.text('model_type', '')}: expected "
        f"{' or '.join(family.overflows)}, as transformers has it; leave it out, and for "
        "training give RouterConfig.overflow",
    )
    if vocabulary is None:
        files = (folder / name for name in family.vocabularies)
        vocabulary = next((each for each in files if each.is_file()), None)
    elif vocabulary == "none" or vocabulary == "bytes" and not family.keeps_ids:
        vocabulary = None
    vocabulary = vocabulary and pathlib.Path(vocabulary)
    generation = read_generation(folder, values)
    if family.keeps_ids:
        return _read_decoder(fields, tensors, generation, vocabulary, dtype, scratch)
    own = values | {name: generation[name] for name in _IDS if name in generation}
    if ends := end_ids(own):  # that of config.json comes after texts, if it is one of several
        own["eos_token_id"] = next((i for i in end_ids(values) if i in ends), ends[0])
    unknown = vocabulary and unknown_id(vocabulary)
    special_ids, start = family.read_ids(Fields(own, str(folder)), unknown)
    stated = family.read_config(fields, overflow=overflow)
    config = family.read_config(fields, tensors.shapes, overflow)
    config = dataclasses.replace(config, precision=Precision(params=dtype))
    ids = special_ids, start
    params, config = family.read_params(fields, tensors, config, ids, scratch)
    where, own_ends = str(folder / GENERATION), end_ids(values)
    decoding, unused = decoding_defaults(generation, special_ids, config.vocab_size, where)
    if own_ends and special_ids[EOS_ID] not in own_ends:
        ignored = f"config.json ends a text with {own_ends[0]}, which is not used"
        unused.append(f"{where}: inputs and outputs end with {special_ids[EOS_ID]}; {ignored}")
    notes = (*_differences(stated, config), *_unread(tensors), *unused)
    is_of_bytes = _is_of_bytes(folder)
    return Checkpoint(config, params, vocabulary, is_of_bytes, notes, special_ids, decoding)


def _description(folder: pathlib.Path) -> dict[str, Any]:
    """`config.json` of a transformers model; refuses other kinds of folders by name."""
    file = folder / "config.json"
    require(
        file.is_file() or not (folder / _ADAPTER).is_file(),
        f"{folder} is an adapter ({_ADAPTER}) without a model; convert the model that it was "
        f"made for, then `switchx convert --from=peft {folder} DST --base=DIR`, DIR that model",
    )
    is_packed = not file.is_file() and (folder / "artifact.json").is_file()
    values = {} if is_packed else read_json(file)
    require(
        not is_packed and ("model_type" in values or not isinstance(values.get("model"), dict)),
        f"{folder} is a folder of switchx, expected one of transformers; commands open it as "
        f"it is, such as `switchx generate --model_dir={folder}`; a run of switchx is written "
        "for transformers with --to=huggingface",
    )
    return values


def _read_decoder(
    fields: Fields,
    tensors: TensorFolder,
    generation: dict[str, Any],
    vocabulary: pathlib.Path | None,
    dtype: str,
    scratch: pathlib.Path | None,
) -> Checkpoint:
    """A decoder-only model, whose ids stay as they are."""
    family, folder = family_of(fields), tensors.folder
    config = family.read_config(fields)
    config = dataclasses.replace(config, precision=Precision(params=dtype))
    params, config = family.read_params(fields, tensors, config, (OURS, 0), scratch)
    where = str(folder / GENERATION)
    decoding, unused = decoding_defaults(
        generation, OURS, config.vocab_size, where, has_encoder=False
    )
    decoding.pop("other_eos_ids", None)  # the vocabulary has all ends
    if (stored := fields.values.get("quantization_config")) is not None:
        unused.append(
            f"{fields.where}: quantization_config={shown(stored)} is not kept: tensors are "
            "read as the numbers that they are"
        )
    lost = [f"{name}={fields.values[name]}" for name in _OF_TRAINING if fields.values.get(name)]
    if lost:
        unused.append(
            f"{fields.where}: settings of training are not kept, nor written back: "
            f"{', '.join(lost)}; give LossConfig and ModelConfig.dropout_rate"
        )
    rotary, most = config.rotary, config.max_length or math.inf
    if rotary.original_length and (longest := rotary.factor * rotary.original_length) > most:
        unused.append(
            f"{fields.where}: positions go up to max_position_embeddings={most}, and the "
            f"rope's scaling is for {longest:.0f}: set it so for longer texts"
        )
    notes = (*_unread(tensors), *unused)
    kin = decoder_families.DECODERS[fields.text("model_type", "")]
    rescaled = kin.model_type if kin.has_multipliers else None
    rest = {"notes": notes, "decoding": decoding, "rescaled": rescaled}
    if vocabulary is not None:
        require(
            vocabulary.name == TOKENIZER_FILE,
            f"{vocabulary}: ids of a decoder-only model stay as they are, and {TOKENIZER_FILE} "
            f"says which; give that file, or --vocabulary=none",
        )
        # What the model says about its ids takes precedence over files of another tokenizer.
        ids = read_bpe(vocabulary.parent, generation, fields.values)
        require(
            ids.size <= config.vocab_size,
            f"{vocabulary} has ids up to {ids.size - 1}, the model has {config.vocab_size}; "
            "give the tokenizer.json that belongs to the model",
        )
        if ids.size < config.vocab_size:
            own = range(ids.size, config.vocab_size)
            told = f"{vocabulary} has no texts for ids {own[0]} to {own[-1]}, which are never"
            rest["notes"] += (f"{told} generated; transformers may write them",)
        return Checkpoint(config, params, None, ids=ids, **rest)
    given = fields.values | generation
    ends = end_ids(given)
    pad = given.get("pad_token_id")
    bos = given.get("bos_token_id")
    pad, bos = (None if i == -1 else i for i in (pad, bos))  # Llama's files use -1 for none
    require(
        bool(ends) and all(type(i) is int for i in [*ends, pad or 0, bos or 0]),
        f"{fields.where}: eos_token_id={ends!r:.80}, pad_token_id={pad!r:.80}, bos_token_id="
        f"{bos!r:.80}; expected ids of tokens: correct the file",
    )
    ids = TokenIdVocabulary(
        config.vocab_size,
        pad_id=None if pad in ends else pad,
        eos_ids=tuple(dict.fromkeys(ends)),
        start_id=None,
        named_bos=bos,
        named_pad=pad,
    )
    return Checkpoint(config, params, None, ids=ids, **rest)


def write_decoder(
    folder: pathlib.Path,
    config: ModelConfig,
    params: dict,
    vocabulary: Vocabulary,
    decoding: Mapping[str, Any] = types.MappingProxyType({}),
) -> list[str]:
    """Writes a decoder-only model for `from_pretrained` into an existing folder.

    Args:
        params: parameters, as in `write_checkpoint`.
        vocabulary: the model's; the files of a `tokenizer.json` are copied as they are.
        decoding: fields of `DecodingConfig` that are defaults.

    Returns:
        Sentences on where the export is not the same model.

    Raises:
        ValueError: transformers has no such model (all reasons are given).
    """
    own, params = unrolled(config, params)
    config, params = decoder_descriptions.with_shared_expert(own, params)
    kin, description, notes = decoder_descriptions.describe(config)
    if config != own:
        notes.append(f"{kin.architecture} has a shared expert: one of zeros is written")
    leaves = named_leaves(params)
    names = decoder_tensors.tensor_names(kin, config)
    router = None if config.switch is None else config.switch.router
    if (
        router is not None
        and router.expert_groups_per_token < router.num_expert_groups
        and any(
            np.min(leaf) <= 0 for name, leaf in leaves.items() if name.endswith("router_bias_E")
        )
    ):
        notes.append(
            "some biases of the router are not above 0: transformers 4 gives experts of groups "
            "that are left out the score 0, and may choose them; read the folder by 5"
        )
    tensors = _tensors(names, leaves, config, orders=decoder_tensors.orders(kin, config))
    write_safetensors(folder, tensors, MOST_SHARD_BYTES)
    ends = list(vocabulary.eos_ids)
    bos, pad = (getattr(vocabulary, f"named_{name}", None) for name in ("bos", "pad"))
    ids = {
        "bos_token_id": vocabulary.start_id if bos is None else bos,
        "eos_token_id": ends if len(ends) > 1 else ends[0],
        "pad_token_id": vocabulary.pad_id if pad is None else pad,
    }
    generation = write_generation(decoding, OURS, 0) | ids
    del generation["decoder_start_token_id"]
    write_json(folder / "config.json", description | ids)
    write_json(folder / GENERATION, generation)
    if isinstance(vocabulary, BpeVocabulary):
        own = pathlib.Path(vocabulary.path).expanduser()
        for file in filter(pathlib.Path.is_file, map(own.with_name, (own.name, *CARRIED))):
            shutil.copyfile(file, folder / file.name)
    else:
        notes.append("the model's ids have no tokenizer.json: the folder has no tokenizer")
    return notes


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of the files, made from its parameter when NumPy asks for it.

    Attributes:
        leaf: the parameter, or what NumPy makes it from.
        part: number of the expert or layer whose tensor it is; None for a whole parameter.
        order: order of the parameter's last dimension; None leaves it.
    """

    name: str
    parameter: str
    config: ModelConfig
    leaf: Any
    part: int | None
    order: np.ndarray | None
    special_ids: Sequence[int]

    @property
    def shape(self) -> tuple[int, ...]:
        return torch_shapes({self.parameter: (self.name,)}, self.config)[self.name]

    @property
    def dtype(self) -> np.dtype:
        return dtype_of(self.parameter, self.config.precision.params)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        leaf, letters = np.asarray(self.leaf), letters_of(self.parameter)
        leaf = leaf if self.part is None else leaf[self.part : self.part + 1]
        leaf = leaf if self.order is None else leaf[..., self.order]
        leaf = in_dtype(self.parameter, leaf, self.config.precision.params)
        if "V" in letters:
            leaf = in_their_order(leaf, letters.index("V"), self.special_ids)
        (tensor,) = to_torch(self.parameter, leaf)
        return tensor.reshape(self.shape)


def _tensors(
    names: Mapping[str, tuple[str, ...]],
    leaves: Mapping[str, Any],
    config: ModelConfig,
    special_ids: Sequence[int] = OURS,
    orders: Mapping[str, np.ndarray] = types.MappingProxyType({}),
) -> Iterator[tuple[str, _Tensor]]:
    """Names and tensors of a model, in the order in which the parameters are stored."""
    stored = sorted(names, key=lambda name: getattr(leaves[name], "place", ()))
    for parameter in stored:
        theirs = names[parameter]
        order = orders.get(parameter.rpartition("/")[2])
        inverse = None if order is None else np.argsort(order)
        # The embedding has the same tensor under several names.
        is_in_parts = len(theirs) > 1 and parameter != "embedding/embedding_VD"
        for number, name in enumerate(theirs):
            part = number if is_in_parts else None
            leaf = leaves[parameter]
            tensor = _Tensor(name, parameter, config, leaf, part, inverse, special_ids)
            yield name, tensor


def _unread(tensors: TensorFolder) -> tuple[str, ...]:
    if not tensors.unread:
        return ()
    return (f"not read: {', '.join(tensors.unread)}, beside the weights in safetensors",)


def _is_of_bytes(folder: pathlib.Path) -> bool:
    file = folder / TOKENIZER_CONFIG
    return file.is_file() and read_json(file).get("tokenizer_class") == "ByT5Tokenizer"


def _differences(stated: ModelConfig, config: ModelConfig) -> tuple[str, ...]:
    """Where the tensors of a Switch Transformer are not what its config.json describes."""

    def blocks(config: ModelConfig) -> str:
        stacks = [
            f"{config.num_sparse_layers_of(stack)} of {getattr(config, f'num_{stack}_layers')}"
            for stack in ("encoder", "decoder")
        ]
        gated = f" and activation={config.activation!r}"
        return f"{stacks[0]} sparse blocks in the encoder, {stacks[1]} in the decoder{gated}"

    if blocks(stated) == blocks(config):
        return ()
    return (f"config.json describes {blocks(stated)}; the tensors are {blocks(config)}",)


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
    """Writes a checkpoint for `from_pretrained` into an existing folder.

    Args:
        config: the model's configuration; its `precision.params` is the dtype that is written.
        params: arrays on the host or on a device, or what NumPy makes them from, one by one
            (restore.py, `stored_params`).
        vocabulary: a SentencePiece model, copied to `spiece.model`.
        num_sentinels: number of sentinels that are added to its pieces.
        added_tokens: other tokens that are added, with the sentinels if they are not T5's.
        special_ids: ids of padding, end and unknown in the files.
        decoding: fields of `DecodingConfig` that are defaults.

    Returns:
        Sentences on where the export is not the same model.

    Raises:
        ValueError: transformers has no such model (all reasons are given).
    """
    config, params = unrolled(config, params)
    description, notes = describe(config)
    family = FAMILIES[description["model_type"]]
    leaves = named_leaves(params)
    start = _start(np.asarray(leaves["embedding/embedding_VD"]), special_ids)
    generation = write_generation(decoding, special_ids, start)
    description |= {name: generation[name] for name in _IDS} | {"eos_token_id": special_ids[1]}
    names = family.tensor_names(config)
    if not description["tie_word_embeddings"]:
        # A matrix that is not tied is looked up by each of its names.
        copies = [LM_HEAD] if config.tie_embeddings else []
        copies += EMBEDDINGS if config.switch else ()
        names["embedding/embedding_VD"] = (SHARED, *copies)

    tensors = _tensors(names, leaves, config, special_ids)
    write_safetensors(folder, tensors, MOST_SHARD_BYTES)
    write_json(folder / "config.json", description)
    write_json(folder / GENERATION, generation)
    if vocabulary is not None:
        shutil.copyfile(vocabulary, folder / PIECES)
        write_tokenizer(folder, num_sentinels, added_tokens, special_ids)
    return notes


def _start(table_VD, special_ids: Sequence[int]) -> int:
    """Their token whose row begins a decoder's input: row 0 here.

    The first other token whose row equals padding's, as in a model that began with it;
    otherwise padding.
    """
    theirs = their_ids(special_ids)
    equal = (i for i in sorted(theirs) if i and np.array_equal(table_VD[i], table_VD[0]))
    return theirs[0] if tuple(special_ids) == OURS else theirs[next(equal, 0)]
