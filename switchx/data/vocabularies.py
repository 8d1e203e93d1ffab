# SPDX-License-Identifier: Apache-2.0
"""Vocabularies that come from a corpus, and those that a run folder holds.

A run folder has `vocabulary.json`, and `vocabulary.model` for SentencePiece, or a
`tokenizer.json` and the files beside it, byte for byte. The folder by itself defines what its
token ids mean; nothing in it names a path.
"""

import abc
import dataclasses
import functools
import itertools
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from switchx.data.added_tokens import added_token
from switchx.data.bpe import CARRIED, TOKENIZER_FILE, BpeVocabulary, read_bpe
from switchx.data.corpora.corpus import Corpus, CorpusSource, fingerprint_of
from switchx.data.data_dir import find_or_place
from switchx.data.special_ids import OURS
from switchx.data.tokenizers import (
    ByteVocabulary,
    OwnIds,
    Piece,
    SentencePieceVocabulary,
    TokenIdVocabulary,
    Vocabulary,
)
from switchx.data.vocabulary_training import (
    MODEL_FILE,
    SAMPLE_CHARACTERS,
    Rates,
    sample_at_rates,
    sample_evenly,
    train_model,
)
from switchx.fields import describe, from_description, require
from switchx.files import write_atomically
from switchx.object_store import read_json_object, small_files, way_out

DESCRIPTION_FILE = "vocabulary.json"

# Kind in a description -> its class, and the numbers that describe it. A user's own class has
# its dotted name as its kind, and is described by its `fields`.
_KINDS = {
    "sentencepiece": (SentencePieceVocabulary, ("num_sentinels", "pad_to_multiple_of")),
    "bytes": (ByteVocabulary, ("num_sentinels",)),
    "token_ids": (TokenIdVocabulary, ("size",)),
    "bpe": (BpeVocabulary, ()),
}

# Written if there are added tokens, and if the special ids are not ours.
_ADDED, _SPECIAL = "added_tokens", "special_ids"
_OWN, _NAMED = ("pad_id", "eos_ids", "start_id"), ("named_bos", "named_pad")
# More bytes than any description of a vocabulary needs, more ids than any vocabulary has.
_MOST_BYTES, _MOST_IDS = 1 << 20, 1 << 31
_EXPECTED = (
    "name a run folder, one that `switchx vocab` made, or a file: a SentencePiece model or a "
    "tokenizer.json"
)

# Number of examples read from a corpus that has more.
_MAX_EXAMPLES = 100_000
_FACTS = "facts"  # key of a downstream example's JSON facts, which are no text of it

_log = logging.getLogger(__name__)


class LateVocabulary(Vocabulary):
    """A vocabulary that is trained or read only when it is first needed."""

    @property
    @abc.abstractmethod
    def resolved(self) -> Vocabulary:
        """The vocabulary itself.

        Raises:
            ValueError: the vocabulary cannot be made or read.
        """

    @property
    def pad_id(self) -> int | None:
        return self.resolved.pad_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.resolved.eos_ids

    @property
    def start_id(self) -> int | None:
        return self.resolved.start_id

    def encode(self, text: str) -> list[int]:
        return self.resolved.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.resolved.decode(ids)

    def sentinel_id(self, index: int) -> int:
        return self.resolved.sentinel_id(index)

    def piece(self, token_id: int) -> Piece:
        return self.resolved.piece(token_id)

    def fingerprint(self) -> str:
        return self.resolved.fingerprint()


@dataclasses.dataclass(frozen=True)
class CorpusVocabulary(LateVocabulary):
    """A SentencePieceVocabulary of training splits; the same wherever it is trained.

    It is stored in `vocabularies` in the data folder, under a name that changes with
    everything that determines it.

    Attributes:
        corpus: corpus to train on, or several, such as one for each pair of languages.
        size: number of embedding rows, with sentinels; a multiple of 128 suits accelerators.
        num_sentinels: number of sentinels among these rows.
        sample_characters: number of characters to train on, or up to twice as many, drawn
            evenly from the split.
        data_dir: folder of the corpora and of the vocabulary, as `Corpus.open` takes it.
        rates: rates of several corpora, such as one for each language, in their order, or
            proportional to their numbers of examples; None draws from all as if from one.
    """

    corpus: Corpus | tuple[Corpus, ...]
    size: int
    num_sentinels: int = 100
    sample_characters: int = SAMPLE_CHARACTERS
    data_dir: str | None = None
    rates: Rates | None = None

    def __post_init__(self):
        require(
            self.size > self.num_sentinels,
            f"CorpusVocabulary.size={self.size} leaves no piece beside {self.num_sentinels} "
            "sentinels; use some thousands, such as 8192",
        )

    @functools.cached_property
    def resolved(self) -> SentencePieceVocabulary:
        """The trained vocabulary; training it takes seconds at the first use.

        Raises:
            ValueError: a corpus cannot be opened, or the size does not fit its text.
        """
        corpora = self.corpus if isinstance(self.corpus, tuple | list) else (self.corpus,)
        sources = [corpus.open("train", self.data_dir) for corpus in corpora]
        has_facts = any(_FACTS in source.fields for source in sources)
        key = fingerprint_of(
            "vocabulary 2" if has_facts else "vocabulary 1",
            sentencepiece.__version__,
            *(source.fingerprint for source in sources),
            self.size,
            self.num_sentinels,
            self.sample_characters,
            *(() if self.rates is None else (self.rates,)),
        )
        joined = "+".join(corpus.name.replace("/", "_") for corpus in corpora)
        name = f"vocabularies/{joined}_{self.size}_{key}.model"
        path = find_or_place(name, self.data_dir)
        if not path.exists():
            _log.info("training a vocabulary of %d ids on %s", self.size, joined)
            sample = self._sample(sources)
            size, on_top = self.size - self.num_sentinels, self.num_sentinels
            write_atomically(path, train_model(sample, size, on_top))
        return SentencePieceVocabulary(str(path), self.num_sentinels)

    def _sample(self, sources: list[CorpusSource]) -> list[str]:
        if self.rates is None:
            texts = itertools.chain.from_iterable(map(_texts, sources))
            return sample_evenly(texts, self.sample_characters)
        readers = [functools.partial(_texts, source) for source in sources]
        sizes = [len(source) for source in sources]
        return sample_at_rates(readers, self.rates, self.sample_characters, sizes)


def _texts(source: CorpusSource) -> Iterator[str]:
    """All texts of examples spread evenly over a split."""
    examples = map(source.__getitem__, range(0, len(source), -(-len(source) // _MAX_EXAMPLES)))
    return (text for each in examples for name, text in each.items() if name != _FACTS)


@dataclasses.dataclass(frozen=True)
class SavedVocabulary(LateVocabulary):
    """The vocabulary in a run folder, such as that of the run that fine-tuning starts from.

    Attributes:
        directory: folder of a run, a quantized model or a converted model, or one of
            transformers with a `tokenizer.json` of BPE.
    """

    directory: str

    @property
    def size(self) -> int:
        return self.resolved.size

    @property
    def num_sentinels(self) -> int:
        return self.resolved.num_sentinels

    @functools.cached_property
    def resolved(self) -> Vocabulary:
        return load_vocabulary(self.directory)


def read_or_trained(file: str | None, trained: Vocabulary | None = None) -> Vocabulary:
    """The vocabulary of VOCABULARY_FILE, or if that is None the one that a task trains.

    Args:
        file: a SentencePiece model, the folder that `switchx vocab` wrote, a run folder, or a
            `tokenizer.json` or its folder (`bpe.read_bpe`); it is read when it is first needed.

    Raises:
        ValueError: both are None.
    """
    if file is None:
        require(
            trained is not None,
            "VOCABULARY_FILE=None, and this task trains no vocabulary; give a SentencePiece "
            "model or a run folder: --gin.VOCABULARY_FILE=FILE",
        )
        return trained
    require(
        isinstance(file, str | os.PathLike),
        f"VOCABULARY_FILE={file!r} is no path; quote it if it is one: "
        f"--gin.VOCABULARY_FILE=\"'{file}'\"",
    )
    file = os.fspath(file)
    path = Path(file).expanduser()
    if (path / MODEL_FILE).is_file() and not (path / DESCRIPTION_FILE).is_file():
        return SentencePieceVocabulary(str(path / MODEL_FILE))
    if path.name == TOKENIZER_FILE:
        return SavedVocabulary(os.path.dirname(file) or ".")
    if path.suffix == ".model" or path.is_file():
        return SentencePieceVocabulary(file)
    return SavedVocabulary(file)


def save_vocabulary(vocabulary: Vocabulary, directory: str | Path) -> None:
    """Writes what `load_vocabulary` needs, the description last, each file atomically.

    Raises:
        ValueError: a user's own class cannot be read again from its name and fields.
    """
    directory = Path(directory)
    if isinstance(vocabulary, LateVocabulary):
        vocabulary = vocabulary.resolved
    if isinstance(vocabulary, SentencePieceVocabulary):
        model = Path(vocabulary.path).expanduser().read_bytes()
        write_atomically(directory / MODEL_FILE, model)
    if isinstance(vocabulary, BpeVocabulary):
        write_atomically(directory / TOKENIZER_FILE, vocabulary.content)
        beside = (Path(vocabulary.path).expanduser().with_name(name) for name in CARRIED)
        for file in filter(Path.is_file, beside):
            write_atomically(directory / file.name, file.read_bytes())
    description = json.dumps(_describe(vocabulary), indent=2)
    write_atomically(directory / DESCRIPTION_FILE, description.encode())


def load_vocabulary(directory: str | Path) -> Vocabulary:
    """Reads what `save_vocabulary` wrote, from a folder or an address in a store.

    For a transformers folder without a description, reads its `tokenizer.json`.

    Raises:
        ValueError: there is none, it does not have the written form (it has a path, say),
            the model lies outside the folder, a user's class cannot be imported, or the
            fingerprint differs.
    """
    file = small_files(directory) / DESCRIPTION_FILE
    if not file.exists() and file.with_name(TOKENIZER_FILE).exists():
        return read_bpe(file.parent)
    try:
        description = read_json_object(file, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no vocabulary can be read from {directory}: {error}; "
            f"{way_out(file.parent, _EXPECTED)}"
        ) from error
    vocabulary = _from_description(description, file)
    pieces, *_ = _files_of(type(vocabulary))
    found, written = vocabulary.fingerprint(), description["fingerprint"]
    require(
        found == written,
        f"the vocabulary in {directory} has the fingerprint {found}, its description says "
        f"{written!s:.80}; restore {pieces} from where the run was trained",
    )
    return vocabulary


def _files_of(cls: type[Vocabulary]) -> tuple[str, ...]:
    """Files that a vocabulary has besides its description, that of its pieces first."""
    return (TOKENIZER_FILE, *CARRIED) if cls is BpeVocabulary else (MODEL_FILE,)


def _describe(vocabulary: Vocabulary) -> dict:
    fingerprint = vocabulary.fingerprint()
    for kind, (cls, names) in _KINDS.items():
        if type(vocabulary) is cls:
            numbers = {name: getattr(vocabulary, name) for name in names}
            added = [dataclasses.asdict(token) for token in getattr(vocabulary, _ADDED, ())]
            numbers |= {_ADDED: added} if added else {}
            special_ids = getattr(vocabulary, _SPECIAL, OURS)
            numbers |= {} if special_ids == OURS else {_SPECIAL: list(special_ids)}
            if isinstance(vocabulary, OwnIds) and vocabulary.special_ids_text:
                numbers |= {name: getattr(vocabulary, name) for name in _OWN}
            named = {name: getattr(vocabulary, name, None) for name in _NAMED}
            numbers |= {name: value for name, value in named.items() if value is not None}
            return {"kind": kind, "fingerprint": fingerprint} | numbers
    fields = describe(vocabulary, "the vocabulary")
    kind = fields.pop("type")
    description = {"kind": kind, "fingerprint": fingerprint, "fields": fields}
    read = _from_description(json.loads(json.dumps(description)), Path(DESCRIPTION_FILE))
    again = read.fingerprint()
    require(
        again == fingerprint,
        f"the vocabulary {kind} has the fingerprint {fingerprint}, and {again} when it is read "
        "again from its fields; let its fields say all that its ids depend on",
    )
    return description


def _from_description(description, file: Path) -> Vocabulary:
    kind = description.get("kind") if isinstance(description, dict) else None
    if isinstance(kind, str) and "." in kind and isinstance(description.get("fields"), dict):
        fields = description["fields"] | {"type": kind}
        return from_description(Vocabulary, fields, str(file))
    cls, names = _KINDS.get(kind if isinstance(kind, str) else None, (None, ()))
    numbers = {name: description.get(name) for name in names}
    fields = [field.name for field in dataclasses.fields(cls)] if cls else []
    lists = {name for name in (_ADDED, _SPECIAL) if name in fields and name in description}
    has_own = _OWN[0] in fields and _OWN[0] in description
    own = {name: description.get(name) for name in _OWN} if has_own else {}
    own |= {n: description[n] for n in _NAMED if n in fields and n in description}
    is_known = cls and set(description) == {"kind", "fingerprint", *names, *lists, *own}
    special_ids = description.get(_SPECIAL, OURS) if is_known else OURS
    are_ids = isinstance(special_ids, list | tuple) and len(special_ids) == len(OURS)
    ids = [*numbers.values(), *(special_ids if are_ids else [None])]
    require(
        is_known and all(type(n) is int and abs(n) < _MOST_IDS for n in ids),
        f"{file} does not describe a vocabulary: expected the kind {', '.join(_KINDS)} with a "
        "fingerprint and whole numbers, or a user's class with its fields, got "
        f"{description!r:.300}; restore the file",
    )
    numbers |= {_SPECIAL: tuple(special_ids)} if _SPECIAL in fields else {}
    numbers |= own
    if "path" not in fields:
        return cls(**numbers)
    model, *beside = map(file.with_name, _files_of(cls))
    for each in (model, *beside):
        require(
            each.resolve().parent == file.parent.resolve(),
            f"{each} leads out of the folder, to {each.resolve()}; put the file itself there",
        )
    if cls is BpeVocabulary:
        return cls(path=str(model), **numbers)
    added = description.get(_ADDED, [])
    are_tokens = isinstance(added, list) and all(isinstance(each, dict) for each in added)
    require(are_tokens, f"{file}: {_ADDED} is no list of tokens; restore the file")
    numbers[_ADDED] = tuple(added_token(each, str(file)) for each in added)
    return SentencePieceVocabulary(str(model), **numbers)
