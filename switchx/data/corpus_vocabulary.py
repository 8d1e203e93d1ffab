# SPDX-License-Identifier: Apache-2.0
"""A vocabulary trained on a corpus when it is first used, and found again afterwards."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import ClassVar

import sentencepiece

from switchx.data import data_dir as locations
from switchx.data.corpora.corpus import Corpus, CorpusSource, fingerprint_of
from switchx.data.tokenizers import EOS_ID, PAD_ID, UNK_ID, Piece, SentencePieceVocabulary
from switchx.data.vocabulary_training import SAMPLE_CHARACTERS, sample_evenly, train_model

# Examples looked at, of a corpus that has more.
_MAX_EXAMPLES = 100_000

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CorpusVocabulary:
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

    pad_id: ClassVar[int] = PAD_ID
    eos_id: ClassVar[int] = EOS_ID
    unk_id: ClassVar[int] = UNK_ID

    corpus: Corpus | tuple[Corpus, ...]
    size: int
    num_sentinels: int = 100
    sample_characters: int = SAMPLE_CHARACTERS
    data_dir: str | None = None

    def __post_init__(self):
        if self.size <= self.num_sentinels:
            raise ValueError(
                f"CorpusVocabulary.size={self.size} leaves no piece beside "
                f"{self.num_sentinels} sentinels; use some thousands, such as 8192"
            )

    def sentinel_id(self, index: int) -> int:
        return self.resolved.sentinel_id(index)

    def encode(self, text: str) -> list[int]:
        return self.resolved.encode(text)

    def piece(self, token_id: int) -> Piece:
        return self.resolved.piece(token_id)

    def decode(self, ids: Iterable[int]) -> str:
        return self.resolved.decode(ids)

    def fingerprint(self) -> str:
        return self.resolved.fingerprint()

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
        path = locations.find_or_place(name, self.data_dir)
        if not path.exists():
            _log.info("training a vocabulary of %d ids on %s", self.size, joined)
            texts = itertools.chain.from_iterable(map(_texts, sources))
            sample = sample_evenly(texts, self.sample_characters)
            locations.write_atomically(
                path, train_model(sample, self.size - self.num_sentinels)
            )
        return SentencePieceVocabulary(str(path), self.num_sentinels)


def _texts(source: CorpusSource) -> Iterator[str]:
    """All fields of examples that are spread evenly over a split."""
    step = -(-len(source) // _MAX_EXAMPLES)
    return (text for i in range(0, len(source), step) for text in source[i].values())
