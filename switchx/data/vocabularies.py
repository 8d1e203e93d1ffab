# SPDX-License-Identifier: Apache-2.0
"""Vocabularies that are trained, that come from a corpus, and that a run folder holds.

Training: the unigram model (Kudo 2018, arXiv:1804.10959) with bytes for what has no piece.
Spaces are kept as they are, runs of them may be pieces (source code is full of these), and a
line break is a piece. The one thing lost: U+2581, SentencePiece's own sign for a space, comes
back as a space.

A run folder: `vocabulary.json`, and `vocabulary.model` for SentencePiece. The folder alone
says what its token ids mean; nothing in it names a path.
"""

import abc
import dataclasses
import functools
import io
import itertools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import sentencepiece

from switchx.data.corpora.corpus import Corpus, CorpusSource, fingerprint_of
from switchx.data.corpora.text_files import fields_of, find_files, read_examples
from switchx.data.data_dir import find_or_place, write_atomically
from switchx.data.tokenizers import (
    EOS_ID,
    PAD_ID,
    UNK_ID,
    ByteVocabulary,
    Piece,
    SentencePieceVocabulary,
    TokenIdVocabulary,
    Vocabulary,
)
from switchx.fields import describe, from_description, require

SAMPLE_CHARACTERS = 1_500_000
MODEL_FILE = "vocabulary.model"
VOCAB_FILE = "vocabulary.vocab"
DESCRIPTION_FILE = "vocabulary.json"

# Kind in a description -> its class, and the numbers that describe it. A user's own class is
# of the kind of its dotted name, and is described by its `fields`.
_KINDS = {
    "sentencepiece": (SentencePieceVocabulary, ("num_sentinels", "pad_to_multiple_of")),
    "bytes": (ByteVocabulary, ("num_sentinels",)),
    "token_ids": (TokenIdVocabulary, ("size",)),
}

# SentencePiece's model depends on the number of threads that it sums in.
_NUM_THREADS = 4
_DOCUMENT_CHARACTERS = 8000
# Examples of a corpus that are looked at, of one that has more.
_MAX_EXAMPLES = 100_000
_LINE_ENDS = re.compile(r"[\n\t]")
_TOO_LARGE = re.compile(r"Vocabulary size too high .* value <= (\d+)")
_TOO_SMALL = re.compile(r"smaller than required_chars. \d+ vs (\d+)")

_log = logging.getLogger(__name__)


class VocabularySummary(NamedTuple):
    """The `.model` file that training wrote, its pieces (sentinels come on top), how many
    characters it was trained on, and how many of these a token stands for."""

    path: Path
    num_pieces: int
    num_characters: int
    characters_per_token: float


def train_sentencepiece(
    inputs: str | Sequence[str],
    size: int,
    output_dir: str,
    sample_characters: int = SAMPLE_CHARACTERS,
) -> VocabularySummary:
    """Trains on text files and writes `vocabulary.model` and `vocabulary.vocab`, a piece and
    its log probability a line.

    Args:
        inputs: files and folders as the corpus TextFiles takes them.
        size: pieces of the model, T5's 32,000 say.
        output_dir: made when it is not there.
        sample_characters: trained on, up to twice as many, drawn evenly from all inputs.

    Raises:
        ValueError: inputs that are missing, unreadable or empty, a size that does not fit
            the text, a folder that cannot be written.
    """
    require(
        sample_characters >= 1,
        f"sample_characters={sample_characters}; use at least 1, usually {SAMPLE_CHARACTERS:,}",
    )
    output = Path(output_dir).expanduser()
    try:
        output.mkdir(parents=True, exist_ok=True)
        _log.info("reading the text")
        texts = sample_evenly(_texts_of(inputs), sample_characters)
        _log.info("training %d pieces on %d characters", size, sum(map(len, texts)))
        model = train_model(texts, size)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces = [
            f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}".replace("\n", r"\n")
            for i in range(processor.get_piece_size())
        ]
        write_atomically(output / VOCAB_FILE, ("\n".join(pieces) + "\n").encode())
        write_atomically(output / MODEL_FILE, model)
    except OSError as error:
        raise ValueError(
            f"the vocabulary cannot be written to {output}: {error}; name a folder that can"
        ) from error
    num_characters = sum(map(len, texts))
    num_tokens = sum(len(processor.encode(text)) for text in texts)
    ratio = num_characters / num_tokens
    return VocabularySummary(output / MODEL_FILE, len(pieces), num_characters, ratio)


def train_model(texts: Iterable[str], size: int) -> bytes:
    """Content of the `.model` file of `size` pieces; the same for the same texts.

    Raises:
        ValueError: no text, or a size that does not fit it.
    """
    lines = [line for text in texts for line in _LINE_ENDS.split(text) if line]
    require(lines, "a vocabulary cannot be trained on no text; expected some, got none")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            pad_id=PAD_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            bos_id=-1,
            user_defined_symbols=["\n"],
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 20,
            num_threads=_NUM_THREADS,
            minloglevel=3,
        )
    except RuntimeError as error:
        raise ValueError(_explain(size, sum(map(len, lines)), str(error))) from error
    return model.getvalue()


def sample_evenly(texts: Iterable[str], num_characters: int) -> list[str]:
    """Every n-th text, n the power of two for which 1 to 2 times `num_characters` remain.

    All texts where they are fewer. Reads the texts once and keeps no more in memory.
    """
    kept, size, step = [], 0, 1
    for index, text in enumerate(texts):
        if index % step:
            continue
        kept.append(text)
        size += len(text)
        while size > 2 * num_characters and len(kept) > 1:
            kept, step = kept[::2], 2 * step
            size = sum(map(len, kept))
    return kept


def _texts_of(inputs: str | Sequence[str]) -> Iterator[str]:
    for file in find_files(inputs):
        for example in read_examples([file], fields_of([file]), _DOCUMENT_CHARACTERS):
            yield from example.values()


def _explain(size: int, num_characters: int, message: str) -> str:
    what = f"a vocabulary of {size} pieces cannot be trained on {num_characters} characters"
    if match := _TOO_LARGE.search(message):
        return f"{what}: use at most {match[1]} (sentinels come on top), or more text"
    if match := _TOO_SMALL.search(message):
        return f"{what}: use more than {match[1]}, the bytes and single characters alone"
    return f"{what}: {message.strip()}; use some thousands, and text to match"


class LateVocabulary(Vocabulary):
    """A vocabulary that is trained or read when it is first needed, and not before."""

    @property
    @abc.abstractmethod
    def resolved(self) -> Vocabulary:
        """The vocabulary itself.

        Raises:
            ValueError: it cannot be made or read.
        """

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

    Kept in `vocabularies` below the data folder, under a name that changes with whatever
    determines it.

    Attributes:
        corpus: what to train on, or several, such as one for each pair of languages.
        size: rows of the embedding, sentinels included; a multiple of 128 suits accelerators.
        num_sentinels: of them.
        sample_characters: trained on, up to twice as many, drawn evenly from the split.
        data_dir: of the corpora and of the vocabulary, as `Corpus.open` takes it.
    """

    corpus: Corpus | tuple[Corpus, ...]
    size: int
    num_sentinels: int = 100
    sample_characters: int = SAMPLE_CHARACTERS
    data_dir: str | None = None

    def __post_init__(self):
        require(
            self.size > self.num_sentinels,
            f"CorpusVocabulary.size={self.size} leaves no piece beside {self.num_sentinels} "
            "sentinels; use some thousands, such as 8192",
        )

    @functools.cached_property
    def resolved(self) -> SentencePieceVocabulary:
        """The trained vocabulary; seconds at first.

        Raises:
            ValueError: what opening the corpus raises; a size that does not fit its text.
        """
        corpora = self.corpus if isinstance(self.corpus, tuple | list) else (self.corpus,)
        sources = [corpus.open("train", self.data_dir) for corpus in corpora]
        key = fingerprint_of(
            "vocabulary 1",
            sentencepiece.__version__,
            *(source.fingerprint for source in sources),
            self.size,
            self.num_sentinels,
            self.sample_characters,
        )
        joined = "+".join(corpus.name.replace("/", "_") for corpus in corpora)
        name = f"vocabularies/{joined}_{self.size}_{key}.model"
        path = find_or_place(name, self.data_dir)
        if not path.exists():
            _log.info("training a vocabulary of %d ids on %s", self.size, joined)
            texts = itertools.chain.from_iterable(map(_texts, sources))
            sample = sample_evenly(texts, self.sample_characters)
            write_atomically(path, train_model(sample, self.size - self.num_sentinels))
        return SentencePieceVocabulary(str(path), self.num_sentinels)


def _texts(source: CorpusSource) -> Iterator[str]:
    """All fields of examples that are spread evenly over a split."""
    step = -(-len(source) // _MAX_EXAMPLES)
    return (text for i in range(0, len(source), step) for text in source[i].values())


@dataclasses.dataclass(frozen=True)
class SavedVocabulary(LateVocabulary):
    """The vocabulary in a run folder, such as that of the run that fine-tuning starts from.

    Attributes:
        directory: of a run, a quantized model or a conversion.
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


def save_vocabulary(vocabulary: Vocabulary, directory: str | Path) -> None:
    """Writes what `load_vocabulary` needs, the description last, each file whole or not.

    Raises:
        ValueError: a user's own class that cannot be read again from its name and fields.
    """
    directory = Path(directory)
    if isinstance(vocabulary, LateVocabulary):
        vocabulary = vocabulary.resolved
    if isinstance(vocabulary, SentencePieceVocabulary):
        model = Path(vocabulary.path).expanduser().read_bytes()
        write_atomically(directory / MODEL_FILE, model)
    description = json.dumps(_describe(vocabulary), indent=2)
    write_atomically(directory / DESCRIPTION_FILE, description.encode())


def load_vocabulary(directory: str | Path) -> Vocabulary:
    """Reads what `save_vocabulary` wrote.

    Raises:
        ValueError: there is none, it is not of the form that is written (a path in it, say),
            the model lies outside the folder, a user's class cannot be imported, or the
            fingerprint is another one.
    """
    file = Path(directory) / DESCRIPTION_FILE
    try:
        description = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no vocabulary can be read from {directory}: {error}; name a run folder, or save "
            "one there"
        ) from error
    vocabulary = _from_description(description, file)
    found, written = vocabulary.fingerprint(), description["fingerprint"]
    require(
        found == written,
        f"the vocabulary in {directory} has the fingerprint {found}, its description says "
        f"{written}; restore {MODEL_FILE} from where the run was trained",
    )
    return vocabulary


def _describe(vocabulary: Vocabulary) -> dict:
    fingerprint = vocabulary.fingerprint()
    for kind, (cls, names) in _KINDS.items():
        if type(vocabulary) is cls:
            numbers = {name: getattr(vocabulary, name) for name in names}
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
    is_known = names and set(description) == {"kind", "fingerprint", *names}
    require(
        is_known and all(type(number) is int for number in numbers.values()),
        f"{file} does not describe a vocabulary: expected the kind {', '.join(_KINDS)} with a "
        "fingerprint and whole numbers, or a user's class with its fields, got "
        f"{description!r}; restore the file",
    )
    if cls is not SentencePieceVocabulary:
        return cls(**numbers)
    model = file.with_name(MODEL_FILE)
    require(
        model.resolve().parent == file.parent.resolve(),
        f"{model} leads out of the folder, to {model.resolve()}; put the file itself there",
    )
    return SentencePieceVocabulary(str(model), **numbers)
