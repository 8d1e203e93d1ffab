# SPDX-License-Identifier: Apache-2.0
"""SentencePiece vocabularies, trained on text of one kind, or of several at given rates.

They use the unigram model (Kudo 2018, arXiv:1804.10959) with byte fallback. Spaces are kept as
they are, runs of them may be pieces (source code is full of these), and a line break is a
piece. Only one thing is lost: U+2581, SentencePiece's own sign for a space, comes back as a
space.

For several languages, text is sampled at the rates at which training draws them, with a
temperature (mT5, Xue et al. 2021, arXiv:2010.11934, section 3.1).
"""

import contextlib
import io
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import sentencepiece

from switchx.data.corpora.corpus import Account
from switchx.data.corpora.text_files import Texts, find_texts, has_records
from switchx.data.mixtures import ProportionalRates
from switchx.data.tokenizers import EOS_ID, PAD_ID, UNK_ID
from switchx.fields import require
from switchx.files import write_atomically

SAMPLE_CHARACTERS = 1_500_000
MODEL_FILE = "vocabulary.model"
VOCAB_FILE = "vocabulary.vocab"

# SentencePiece's model depends on the number of threads that compute its sums.
_NUM_THREADS = 4
_DOCUMENT_CHARACTERS = 8000
_LONGEST_LINE = 1 << 20  # bytes
_LINE_ENDS = re.compile(r"[\n\t]")
_TOO_LARGE = re.compile(r"Vocabulary size too high .* value <= (\d+)")
_TOO_SMALL = re.compile(r"smaller than required_chars. \d+ vs (\d+)")

_log = logging.getLogger(__name__)

Rates = tuple[float, ...] | ProportionalRates


class VocabularySummary(NamedTuple):
    """The `.model` file that training wrote, its number of pieces (sentinels not included),
    the number of characters it was trained on, and how many of these a token stands for."""

    path: Path
    num_pieces: int
    num_characters: int
    characters_per_token: float


def train_sentencepiece(
    inputs: str | Sequence[str] | Sequence[Sequence[str]],
    size: int,
    output_dir: str,
    sample_characters: int = SAMPLE_CHARACTERS,
    rates: Rates | None = None,
    columns: Sequence[str] | None = None,
) -> VocabularySummary:
    """Trains on text files and writes `vocabulary.model` and `vocabulary.vocab`, with a piece
    and its log probability per line.

    Args:
        inputs: files and folders as the corpus TextFiles takes them; with `rates` one item,
            or list of items, for each language.
        size: number of the model's pieces, such as T5's 32,000.
        output_dir: folder for the files, created if it does not exist.
        sample_characters: most characters to train on, with line breaks, in documents drawn
            evenly from all inputs. No document is cut: one per language is read whole.
        rates: rates of the languages, in their order, or proportional to their sizes in
            characters. None draws from all as if they were one.
        columns: columns, as in `TextFiles.columns`.

    Raises:
        ValueError: inputs are missing, unreadable or empty, the size does not fit the text,
            numbers of rates and of inputs differ, or the folder cannot be written.
    """
    require(
        sample_characters >= 1,
        f"sample_characters={sample_characters}; use at least 1, usually {SAMPLE_CHARACTERS:,}",
    )
    require(size >= 1, f"size={size}; use some thousands of pieces, such as 32000")
    output = Path(output_dir).expanduser()
    _log.info("reading the text")
    if rates is None:
        found = sample_evenly(_texts_of(inputs, columns), sample_characters)
        texts = _thinned(found, sample_characters, is_strict=True)
    else:
        readers = [lambda files=files: _texts_of(files, columns) for files in inputs]
        texts = sample_at_rates(readers, rates, sample_characters, is_strict=True)
    with _written_to(output):
        _log.info("training %d pieces on %d characters", size, sum(map(len, texts)))
        model = train_model(texts, size)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces = [
            f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}".replace("\n", r"\n")
            for i in range(processor.get_piece_size())
        ]
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / VOCAB_FILE, ("\n".join(pieces) + "\n").encode())
        write_atomically(output / MODEL_FILE, model)
    num_characters = sum(map(len, texts))
    num_tokens = sum(len(processor.encode(text)) for text in texts)
    ratio = num_characters / num_tokens
    return VocabularySummary(output / MODEL_FILE, len(pieces), num_characters, ratio)


@contextlib.contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the vocabulary cannot be written to {folder}: {error}; name a folder that can"
        ) from error


def train_model(texts: Iterable[str], size: int, num_sentinels: int = 0) -> bytes:
    """Content of the `.model` file of `size` pieces; the same for the same texts.

    Args:
        num_sentinels: number of sentinels to be added, for errors in the user's numbers.

    Raises:
        ValueError: there is no text, or the size does not fit it.
    """
    texts = list(texts)
    lines = [
        part
        for text in texts
        for line in _LINE_ENDS.split(text)
        for part in _short_enough(line)
    ]
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
            max_sentence_length=_LONGEST_LINE,
            num_threads=_NUM_THREADS,
            minloglevel=3,
        )
    except RuntimeError as error:
        raise ValueError(
            _explain(size, num_sentinels, sum(map(len, texts)), str(error))
        ) from error
    return model.getvalue()


def _short_enough(line: str) -> Iterator[str]:
    """A line in parts that SentencePiece reads: it silently skips longer lines."""
    if len(line.encode()) <= _LONGEST_LINE:
        parts = [line]
    else:
        size = _LONGEST_LINE // 4  # characters, of 4 bytes at most
        parts = (line[i : i + size] for i in range(0, len(line), size))
    return filter(None, parts)


def sample_evenly(texts: Iterable[str], num_characters: int) -> list[str]:
    """Every n-th text, n the power of two for which 1 to 2 times `num_characters` remain.

    All texts if they have fewer. Reads the texts once and keeps no more in memory.
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


def sample_at_rates(
    readers: Sequence[Callable[[], Iterable[str]]],
    rates: Rates,
    num_characters: int,
    sizes: Sequence[int] | None = None,
    *,
    is_strict: bool = False,
) -> list[str]:
    """Texts of several languages, with each language's share of the characters.

    A language that has less text than its share gives all of it, once.

    Args:
        readers: functions that return the texts of each language, each time they are called.
        sizes: sizes of the languages, for proportional rates; None counts characters.
        is_strict: whether no language may exceed its share by more than its first text;
            otherwise it may, if texts differ in length.

    Raises:
        ValueError: numbers of rates and of languages differ, or a language has no text.
    """
    if isinstance(rates, ProportionalRates):
        sizes = sizes or [sum(map(len, read())) for read in readers]
        require(all(sizes), f"languages of the sizes {list(sizes)}; give each some text")
        rates = rates.of_sizes(sizes)
    require(
        len(rates) == len(readers) and min(rates, default=0) > 0,
        f"rates={tuple(rates)} for {len(readers)} languages; use a number above 0 for each",
    )
    texts = []
    for read, rate in zip(readers, rates, strict=True):
        share = max(int(num_characters * rate / sum(rates)), 1)
        kept = sample_evenly(read(), share)
        require(kept, "a language has no text; give each some")
        texts += _thinned(kept, share, is_strict=is_strict)
    return texts


def _thinned(texts: list[str], num_characters: int, *, is_strict: bool) -> list[str]:
    """Evenly spaced texts with about so many characters in all; if `is_strict`, no more,
    except for one text."""
    size = sum(map(len, texts))
    number = max(len(texts) * num_characters // max(size, num_characters), 1)
    while True:
        kept = [texts[i * len(texts) // number] for i in range(number)] if texts else []
        size = sum(map(len, kept))
        if not is_strict or size <= num_characters or number == 1:
            return kept
        number = max(min(number - 1, number * num_characters // size), 1)


def _texts_of(inputs: str | Sequence[str], columns: Sequence[str] | None) -> Iterator[str]:
    found = find_texts(inputs, columns)
    if any(found.left_out.values()):
        _log.info("%s", Account.of("text", found.files, found.left_out))
    for file in found.files:
        if not has_records(file):
            continue  # as in training, which skips empty shards
        for example in Texts.of([file], columns).examples(_DOCUMENT_CHARACTERS, Counter()):
            yield from example.values()


def _explain(size: int, num_sentinels: int, num_characters: int, message: str) -> str:
    kind = f"ids, {num_sentinels} of them sentinels," if num_sentinels else "pieces"
    what = (
        f"a vocabulary of {size + num_sentinels} {kind} cannot be trained on {num_characters} "
        "characters"
    )
    if match := _TOO_LARGE.search(message):
        top = "" if num_sentinels else " (sentinels come on top)"
        return f"{what}: use at most {int(match[1]) + num_sentinels}{top}, or more text"
    if match := _TOO_SMALL.search(message):
        least = int(match[1]) + num_sentinels
        return f"{what}: use at least {least}: bytes and single characters alone need as many"
    return f"{what}: {message.strip()}; use some thousands, and text to match"
