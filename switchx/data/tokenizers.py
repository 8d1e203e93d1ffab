# SPDX-License-Identifier: Apache-2.0
"""Vocabularies: text to token ids and back, with T5's special ids and sentinels.

Pad is 0, the end of a sequence 1, the unknown token 2, and a decoder's input starts with 0,
unless a vocabulary says otherwise. Sentinel i stands for the i-th span that span
corruption removed (Raffel et al. 2020, arXiv:1910.10683, section 3.1.4). There are
SentencePiece models, bytes, and plain token ids for a model that came without a vocabulary;
`bpe.py` reads a `tokenizer.json`. `token_classes.py` says what kind of piece an id stands for.

Dims: V ids of a vocabulary
"""

import abc
import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import sentencepiece

from switchx.characters import require_characters
from switchx.data.added_tokens import AddedToken, cutter
from switchx.data.special_ids import EOS_ID, OURS, PAD_ID, UNK_ID, renumbered, their_ids
from switchx.fields import describe, require, require_at_least
from switchx.object_store import require_no_lfs_pointer

# Text of an unknown token, as SentencePiece shows it.
UNKNOWN = " \u2047 "

_FIRST_BYTE_ID = 3
_LAST_BYTE_ID = 258
_NUM_BYTES_NOT_IN_UTF8 = 11  # 0xF5 to 0xFF
_SPACE = "\u2581"  # SentencePiece's sign for a space
_SENTINEL = "<extra_id_"
_SENTINEL_TEXT = re.compile(rf"{_SENTINEL}[0-9]+>")
_NUMBER = re.compile(r"[0-9]{1,10}")


class Piece(NamedTuple):
    """The text, byte or control code of one token id.

    Attributes:
        text: the text, with spaces as spaces; a name for a byte or a control code.
        kind: `text`, `byte` (part of a character) or `control` (not text).
    """

    text: str
    kind: Literal["text", "byte", "control"]


_CONTROLS = {PAD_ID: Piece("<pad>", "control"), EOS_ID: Piece("</s>", "control")}


class Vocabulary(abc.ABC):
    """The base of all vocabularies, including users' own: frozen dataclasses.

    Grain's worker processes receive them by pickle. No id by itself marks a position without a
    token: what is a token follows from lengths (segment ids, masks).

    Attributes:
        size: number of rows that an embedding needs: one more than the largest id, padding
            included.
        num_sentinels: number of sentinels.
        pad_id: id that may follow given token ids and is no token; None if every id may be one.
        eos_ids: ids that end a text; the first one ends training texts.
        start_id: id that a decoder reads before a text; None if there is no start, and a
            text's first token is not predicted.
    """

    pad_id: int | None = PAD_ID
    eos_ids: tuple[int, ...] = (EOS_ID,)
    start_id: int | None = PAD_ID
    unk_id: ClassVar[int] = UNK_ID

    size: int
    num_sentinels: int

    @property
    def eos_id(self) -> int:
        """The id that ends training texts, the first of `eos_ids`."""
        return self.eos_ids[0]

    @property
    def silent_ids(self) -> set[int | None]:
        """Ids that give no text: padding, start and ends."""
        return {self.pad_id, self.start_id, *self.eos_ids}

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids without eos; no text becomes a special id or a sentinel."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of all ids, including those after an eos.

        Pad and eos give nothing, sentinels `<extra_id_0>`, unknown and unused ids ` ⁇ `.
        """

    def sentinel_id(self, index: int) -> int:
        """Id of sentinel `index`, from 0; by default the last ids in reverse, as in T5.

        Raises:
            ValueError: there are not that many (`require_sentinel`).
        """
        self.require_sentinel(index)
        return self.size - 1 - index

    def piece(self, token_id: int) -> Piece:
        """The piece of a token id below `size`."""
        if token_id in self.silent_ids:
            return _CONTROLS[EOS_ID if token_id in self.eos_ids else PAD_ID]
        return Piece(self.decode([token_id]), "text")

    def fingerprint(self) -> str:
        """Hex digits; equal for two vocabularies exactly if they give the same ids.

        By default a hash of the class's name and all fields.
        """
        description = json.dumps(describe(self, "vocabulary"), sort_keys=True)
        return hashlib.sha256(description.encode()).hexdigest()

    def require_sentinel(self, index: int) -> None:
        """Raises ValueError unless there is a sentinel `index`."""
        require(
            0 <= index < self.num_sentinels,
            f"sentinel {index} of {self.num_sentinels}; raise num_sentinels, or mask fewer "
            "spans: a lower noise density, longer spans or a shorter input",
        )


@dataclasses.dataclass(frozen=True)
class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model (Kudo and Richardson 2018, arXiv:1808.06226) and sentinels.

    Sentinels follow the model's pieces as in T5, the first one last: with T5's 32,000 pieces
    and 100 sentinels they are 32,099 down to 32,000. A model with pieces named `<extra_id_0>`,
    ... keeps these; in that case such text does become a sentinel.

    Attributes:
        path: the `.model` file.
        num_sentinels: number of sentinels.
        pad_to_multiple_of: number to a multiple of which unused ids round `size` up; T5's
            released checkpoints have 32,128 rows, 32,100 rounded up to a multiple of 128.
        added_tokens: tokens that a converted model has besides its pieces, including
            sentinels if these are not T5's.
        special_ids: ids of padding, end and unknown in the file; here they are 0, 1 and 2
            (special_ids.py).
    """

    path: str
    num_sentinels: int = 100
    pad_to_multiple_of: int = 1
    added_tokens: tuple[AddedToken, ...] = ()
    special_ids: tuple[int, ...] = OURS

    def __post_init__(self):
        object.__setattr__(self, "special_ids", tuple(self.special_ids))
        require_at_least(self, 0, "num_sentinels")
        require_at_least(self, 1, "pad_to_multiple_of")

    @property
    def num_pieces(self) -> int:
        """Number of pieces of the model itself."""
        return self._processor.get_piece_size()

    @property
    def size(self) -> int:
        num_used = self.num_pieces + (0 if self._own_sentinels else self.num_sentinels)
        num_used = max([num_used, *(token.id + 1 for token in self.added_tokens)])
        return -(-num_used // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def sentinel_id(self, index: int) -> int:
        self.require_sentinel(index)
        if self._own_sentinels:
            return self._own_sentinels[index]
        return self.num_pieces + self.num_sentinels - 1 - index

    def encode(self, text: str) -> list[int]:
        """Raises ValueError where the text has half a surrogate pair."""
        require_characters(text, "a text")
        if self.added_tokens:
            parts = self._cut(text)
            ids = [[part] if isinstance(part, int) else self._encode(part) for part in parts]
            return list(itertools.chain.from_iterable(ids))
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if not self._own_sentinels or _SENTINEL not in text:
            return self._processor.encode(text)
        # Cut at sentinels, as T5's tokenizers do: what follows one is encoded as a text.
        ids, begin = [], 0
        for match in _SENTINEL_TEXT.finditer(text):
            piece = self._processor.piece_to_id(match[0])
            if piece in self._sentinels:
                ids += [*self._processor.encode(text[begin : match.start()]), piece]
                begin = match.end()
        return ids + self._processor.encode(text[begin:])

    def piece(self, token_id: int) -> Piece:
        if not self._is_plain_piece(token_id):
            is_word = token_id in self._added and token_id not in self._sentinels
            return Piece(self._name(token_id), "text" if is_word else "control")
        processor, text = self._processor, self._processor.id_to_piece(token_id)
        if processor.is_control(token_id) or processor.is_unknown(token_id):
            return Piece(text, "control")
        if processor.is_byte(token_id):
            return _byte_piece(int(text.strip("<>"), 16))
        return Piece(text.replace(_SPACE, " "), "text")

    def decode(self, ids: Iterable[int]) -> str:
        texts = []
        for is_piece, run in itertools.groupby(map(int, ids), self._is_plain_piece):
            if is_piece:
                shown = [i for i in run if i not in (PAD_ID, EOS_ID)]
                text = self._processor.decode(shown)
                # SentencePiece drops leading spaces of a text, which here is a part of one.
                texts.append(self._spaces_before(shown) + text.lstrip(" ") if texts else text)
            else:
                texts += map(self._name, run)
        return "".join(texts)

    def _name(self, token_id: int) -> str:
        """The text of an id that is not a piece of the model."""
        token = self._added.get(token_id)
        return token.text if token else _sentinel_text(self._sentinels.get(token_id))

    def _spaces_before(self, ids: list[int]) -> str:
        """The spaces that pieces begin with."""
        pieces = "".join(map(self._processor.id_to_piece, ids))
        return " " * (len(pieces) - len(pieces.lstrip(_SPACE)))

    def fingerprint(self) -> str:
        model = self._processor.serialized_model_proto()
        layout = f"{self.num_sentinels} {self.size}{self.added_tokens or ''}".encode()
        return hashlib.sha256(model + layout).hexdigest()

    def _is_plain_piece(self, token_id: int) -> bool:
        is_other = token_id in self._own_sentinels or token_id in self._added
        return 0 <= token_id < self.num_pieces and not is_other

    @functools.cached_property
    def _added(self) -> dict[int, AddedToken]:
        return {token.id: token for token in self.added_tokens}

    @functools.cached_property
    def _cut(self):
        """The function that cuts a text at added tokens, in the tokenizers library's order:
        first the unnormalized tokens, then, in the rest, those of normalized text."""
        cut = cutter([token for token in self.added_tokens if not token.normalized])
        later = [token for token in self.added_tokens if token.normalized]
        if not later:
            return cut
        normalizer = sentencepiece.SentencePieceNormalizer(
            model_proto=self._processor.serialized_model_proto(),
            add_dummy_prefix=False,
            escape_whitespaces=False,
            remove_extra_whitespaces=False,
        )
        cut_normalized = cutter(
            [dataclasses.replace(each, text=normalizer.normalize(each.text)) for each in later]
        )

        def cut_twice(text: str) -> list[str | int]:
            parts = [
                [part] if isinstance(part, int) else cut_normalized(normalizer.normalize(part))
                for part in cut(text)
            ]
            return list(itertools.chain.from_iterable(parts))

        return cut_twice

    @functools.cached_property
    def _processor(self) -> sentencepiece.SentencePieceProcessor:
        processor = read_sentencepiece(self.path)
        if self.special_ids != OURS:
            model = renumbered(processor.serialized_model_proto(), self.special_ids, self.path)
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        ids = processor.pad_id(), processor.eos_id(), processor.unk_id()
        require(
            ids == (PAD_ID, EOS_ID, UNK_ID),
            f"vocabulary {self.path} has pad, eos, unk at {ids}, expected (0, 1, 2); train it "
            "with `switchx vocab`, or SentencePiece's --pad_id=0 --eos_id=1 --unk_id=2",
        )
        return processor

    @functools.cached_property
    def _sentinels(self) -> dict[int, int]:
        """Sentinels by their ids."""
        return {self.sentinel_id(i): i for i in range(self.num_sentinels)}

    @functools.cached_property
    def _own_sentinels(self) -> list[int]:
        """Ids of the model's own sentinels in order; empty if it has none."""
        ids = {token.text: token.id for token in self.added_tokens}
        texts = map(_sentinel_text, range(self.num_sentinels))
        found = [ids.get(text) or self._processor.piece_to_id(text) for text in texts]
        missing = found.count(UNK_ID)
        if missing and missing < len(found):
            raise ValueError(
                f"vocabulary {self.path} has {len(found) - missing} pieces <extra_id_*> and "
                f"num_sentinels={self.num_sentinels}; use {len(found) - missing}"
            )
        return [] if missing else found


def read_sentencepiece(path: str) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece model with the ids of its file.

    Raises:
        ValueError: the file does not exist, or cannot be read.
    """
    file = Path(path).expanduser()
    try:
        require_no_lfs_pointer(file)
        return sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(
            f"vocabulary {path} does not exist; train one with `switchx vocab "
            "--input=FILES --size=8000 --output=DIR`, or name a SentencePiece .model file"
        ) from error
    except OSError as error:
        raise ValueError(
            f"vocabulary {path} cannot be read: {error}; name a .model file that can"
        ) from error
    except RuntimeError as error:
        raise ValueError(
            f"vocabulary {path} is no SentencePiece model that can be read: {error}; "
            "name a .model file (not the .vocab beside it), a tokenizer.json of that name, or "
            "a folder of a run or of `switchx vocab`"
        ) from error


@dataclasses.dataclass(frozen=True)
class ByteVocabulary(Vocabulary):
    """UTF-8 bytes as ByT5 numbers them (Xue et al. 2022, arXiv:2105.13626, section 3.1).

    Byte b is id b + 3. Sentinels reuse the last byte ids, from 258 downwards, and the ids 259
    to 383 are unused and only make the table a multiple of 128. The first 11 sentinels, bytes
    0xFF to 0xF5, occur in no UTF-8 text; the others are also ordinary bytes and decode as
    such, which is ByT5's choice.
    """

    size = 384

    num_sentinels: int = 100

    def __post_init__(self):
        require(
            0 <= self.num_sentinels <= 256,
            f"ByteVocabulary.num_sentinels={self.num_sentinels}; use 0 to 256, ByT5 has 100",
        )

    def sentinel_id(self, index: int) -> int:
        self.require_sentinel(index)
        return _LAST_BYTE_ID - index

    def encode(self, text: str) -> list[int]:
        """Raises ValueError where the text has half a surrogate pair."""
        require_characters(text, "a text")
        return [byte + _FIRST_BYTE_ID for byte in text.encode()]

    def piece(self, token_id: int) -> Piece:
        if token_id in _CONTROLS:
            return _CONTROLS[token_id]
        byte = self._bytes_of(token_id)
        return _byte_piece(byte[0]) if len(byte) == 1 else Piece(byte.decode(), "control")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids; bytes that are not UTF-8 give U+FFFD."""
        return b"".join(map(self._bytes_of, ids)).decode(errors="replace")

    def fingerprint(self) -> str:
        return hashlib.sha256(f"bytes {self.num_sentinels} {self.size}".encode()).hexdigest()

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in (PAD_ID, EOS_ID):
            return b""
        sentinel = _LAST_BYTE_ID - token_id
        if 0 <= sentinel < min(self.num_sentinels, _NUM_BYTES_NOT_IN_UTF8):
            return _sentinel_text(sentinel).encode()
        if not _FIRST_BYTE_ID <= token_id <= _LAST_BYTE_ID:
            return UNKNOWN.encode()
        return bytes([token_id - _FIRST_BYTE_ID])


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnIds(Vocabulary):
    """The base of vocabularies whose special ids are fields; by default they are T5's.

    Attributes:
        named_bos, named_pad: `bos_token_id` and `pad_token_id` of a model's files, which are
            written back; None if they name none. A start may be named and not used, and
            padding that is also an end does not count here. They change no text's ids.
    """

    pad_id: int | None = PAD_ID
    eos_ids: tuple[int, ...] = (EOS_ID,)
    start_id: int | None = PAD_ID
    named_bos: int | None = dataclasses.field(default=None, compare=False)
    named_pad: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        ends = self.eos_ids
        others = [self.pad_id, self.start_id, self.named_bos, self.named_pad]
        others = [i for i in others if i is not None]
        require(
            isinstance(ends, list | tuple)
            and len(ends) > 0
            and all(type(i) is int and 0 <= i < 1 << 31 for i in (*ends, *others)),
            f"eos_ids={ends}, pad_id={self.pad_id}, start_id={self.start_id}, named_bos="
            f"{self.named_bos}, named_pad={self.named_pad}; expected one end at least, and ids "
            "from 0 on, or None for no padding or no start",
        )
        object.__setattr__(self, "eos_ids", tuple(ends))
        require(
            self.pad_id not in self.eos_ids,
            f"pad_id={self.pad_id} is one of eos_ids={self.eos_ids}: an end would be cut off "
            "as padding; use pad_id=None",
        )

    @property
    def special_ids_text(self) -> str:
        """A part of fingerprints; empty if the ids are T5's."""
        ids = self.pad_id, self.eos_ids, self.start_id
        return "" if ids == (PAD_ID, (EOS_ID,), PAD_ID) else f" {ids}"


@dataclasses.dataclass(frozen=True)
class TokenIdVocabulary(OwnIds):
    """Ids 0 to `size` - 1, each written as its number in the files of the model.

    Attributes:
        special_ids: ids of padding, end and unknown in the model's files, where ids are
            permuted as they are read (special_ids.py): here they are 0, 1 and 2.
    """

    num_sentinels: ClassVar[int] = 0

    size: int
    special_ids: tuple[int, ...] = OURS

    def __post_init__(self):
        super().__post_init__()
        require_at_least(self, 1, "size")
        most = max(each or 0 for each in self.silent_ids)
        require(
            not self.special_ids_text or most < self.size,
            f"special id {most} of a vocabulary of 0 to {self.size - 1}; use one of these",
        )
        object.__setattr__(self, "special_ids", tuple(self.special_ids))

    def encode(self, text: str) -> list[int]:
        """The numbers in a text.

        Raises:
            ValueError: the text has anything else, or a number that is not an id.
        """
        words = text.split()
        for word in words:
            require(
                _NUMBER.fullmatch(word) and int(word) < self.size,
                f"{word[:40]!r} is no token id: this model came without a vocabulary, and its "
                f"texts are ids from 0 to {self.size - 1} such as '12 5 7'; convert it again "
                "with its SentencePiece model, --vocabulary=FILE",
            )
        ours = {their: our for our, their in their_ids(self.special_ids).items()}
        return [ours.get(int(word), int(word)) for word in words]

    def piece(self, token_id: int) -> Piece:
        is_text = token_id not in self.silent_ids
        their = their_ids(self.special_ids).get(token_id, token_id)
        return Piece(f"{their} ", "text") if is_text else Piece(str(their), "control")

    def decode(self, ids: Iterable[int]) -> str:
        """The ids as numbers, without padding, start and ends."""
        silent, theirs = self.silent_ids, their_ids(self.special_ids)
        return " ".join(str(theirs.get(i, i)) for i in map(int, ids) if i not in silent)

    def fingerprint(self) -> str:
        others = "" if self.special_ids == OURS else self.special_ids
        others = f"{others}{self.special_ids_text}"
        return hashlib.sha256(f"token ids {self.size}{others}".encode()).hexdigest()


def _byte_piece(byte: int) -> Piece:
    return Piece(chr(byte), "text") if byte < 0x80 else Piece(f"0x{byte:02X}", "byte")


def _sentinel_text(index: int | None) -> str:
    return UNKNOWN if index is None else f"<extra_id_{index}>"
