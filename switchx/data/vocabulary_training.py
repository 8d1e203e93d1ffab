# SPDX-License-Identifier: Apache-2.0
"""Training of SentencePiece vocabularies that lose nothing of a text.

The unigram model (Kudo 2018, arXiv:1804.10959) with bytes for what has no piece. Spaces are
kept as they are, runs of them may be pieces (source code is full of these), and a line
break is a piece. The one thing lost: U+2581, SentencePiece's own sign for a space, comes
back as a space.
"""

import dataclasses
import io
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

from switchx.data.corpora.text_files import fields_of, find_files, read_examples
from switchx.data.data_dir import write_atomically
from switchx.data.tokenizers import EOS_ID, PAD_ID, UNK_ID

SAMPLE_CHARACTERS = 1_500_000
MODEL_FILE = "vocabulary.model"
VOCAB_FILE = "vocabulary.vocab"

# SentencePiece's model depends on the number of threads that it sums in.
_NUM_THREADS = 4
_DOCUMENT_CHARACTERS = 8000
_LINE_ENDS = re.compile(r"[\n\t]")
_TOO_LARGE = re.compile(r"Vocabulary size too high .* value <= (\d+)")
_TOO_SMALL = re.compile(r"smaller than required_chars. \d+ vs (\d+)")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class VocabularySummary:
    """What training made.

    Attributes:
        path: the `.model` file.
        num_pieces: of the model; sentinels come on top.
        num_characters: it was trained on.
        characters_per_token: of this text.
    """

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
    """Trains on text files and writes `vocabulary.model` and `vocabulary.vocab`.

    Args:
        inputs: files and folders as the corpus TextFiles takes them.
        size: pieces of the model, T5's 32,000 say.
        output_dir: made when it is not there.
        sample_characters: trained on, up to twice as many, drawn evenly from all inputs.

    Raises:
        ValueError: inputs that are missing, unreadable or empty, a size that does not fit
            the text, a folder that cannot be written.
    """
    if sample_characters < 1:
        raise ValueError(
            f"sample_characters={sample_characters}; use at least 1, usually "
            f"{SAMPLE_CHARACTERS:,}"
        )
    output = Path(output_dir).expanduser()
    try:
        output.mkdir(parents=True, exist_ok=True)
        _log.info("reading the text")
        texts = sample_evenly(_texts_of(inputs), sample_characters)
        _log.info("training %d pieces on %d characters", size, sum(map(len, texts)))
        model = train_model(texts, size)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        write_atomically(output / VOCAB_FILE, _list_pieces(processor).encode())
        write_atomically(output / MODEL_FILE, model)
    except OSError as error:
        raise ValueError(
            f"the vocabulary cannot be written to {output}: {error}; name a folder that can"
        ) from error
    num_characters = sum(map(len, texts))
    num_tokens = sum(len(processor.encode(text)) for text in texts)
    return VocabularySummary(
        path=output / MODEL_FILE,
        num_pieces=processor.get_piece_size(),
        num_characters=num_characters,
        characters_per_token=num_characters / num_tokens,
    )


def train_model(texts: Iterable[str], size: int) -> bytes:
    """Content of the `.model` file of `size` pieces; the same for the same texts.

    Raises:
        ValueError: no text, or a size that does not fit it.
    """
    lines = [line for text in texts for line in _LINE_ENDS.split(text) if line]
    if not lines:
        raise ValueError("a vocabulary cannot be trained on no text; expected some, got none")
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


def _texts_of(inputs: str | Sequence[str]) -> Iterable[str]:
    for file in find_files(inputs):
        for example in read_examples([file], fields_of([file]), _DOCUMENT_CHARACTERS):
            yield from example.values()


def _list_pieces(processor: sentencepiece.SentencePieceProcessor) -> str:
    r"""Piece and log probability, tab-separated, a line each; the line break as `\n`."""
    rows = (
        f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}".replace("\n", r"\n")
        for i in range(processor.get_piece_size())
    )
    return "\n".join(rows) + "\n"


def _explain(size: int, num_characters: int, message: str) -> str:
    what = f"a vocabulary of {size} pieces cannot be trained on {num_characters} characters"
    if match := _TOO_LARGE.search(message):
        return f"{what}: use at most {match[1]} (sentinels come on top), or more text"
    if match := _TOO_SMALL.search(message):
        return f"{what}: use more than {match[1]}, the bytes and single characters alone"
    return f"{what}: {message.strip()}; use some thousands, and text to match"
