# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of a `tokenizer.json`: the BPE of Llama, Mixtral, OLMoE, Qwen and others.

The `tokenizers` library (extra `bpe`) reads the file, which is kept byte for byte: ids depend
only on that file, and on the special ids that the files beside it name. Ids stay as they are:
id 0 is a word in Qwen. Chat templates and the tokenizer's other files are carried along. None
of them is run except a chat template, in Jinja's sandbox (`serving/chat.py`).
"""

import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from switchx.characters import require_characters
from switchx.data.tokenizers import UNKNOWN, OwnIds, Piece
from switchx.fields import require
from switchx.object_store import read_json_object, require_no_lfs_pointer

TOKENIZER_FILE = "tokenizer.json"
_CONFIG, _ADDED = "tokenizer_config.json", "added_tokens.json"
_SPECIAL = "special_tokens_map.json"
# Files beside it, copied as they are.
CHAT_TEMPLATE = "chat_template.jinja"
CARRIED = (_CONFIG, _SPECIAL, CHAT_TEMPLATE)
_MOST_BYTES = 1 << 27
_HALF = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x[0-9A-F]{2}>")


@dataclasses.dataclass(frozen=True)
class BpeVocabulary(OwnIds):
    """A `tokenizer.json` of BPE (Sennrich et al. 2016, arXiv:1508.07909), on bytes or on pieces
    with byte fallback.

    Ids are those of `transformers` without special tokens around a text and with special tokens
    split (`add_special_tokens=False, split_special_tokens=True`): a text that reads
    `<|im_end|>` stays a text.

    Attributes:
        path: the `tokenizer.json`.
    """

    num_sentinels: ClassVar[int] = 0

    path: str

    @functools.cached_property
    def size(self) -> int:
        # By the largest id: there may be gaps, and a count would miss the ids after them.
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        """Raises ValueError if the text has half a surrogate pair."""
        require_characters(text, "a text")
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_special(self, text: str) -> list[int]:
        """Token ids of a text whose special tokens are ids, such as a rendered chat template.

        Raises:
            ValueError: as `encode`.
        """
        require_characters(text, "a text")
        return self._special_tokenizer.encode(text, add_special_tokens=False).ids

    @property
    def chat_template(self) -> str:
        """The Jinja template of a chat, which `/v1/chat/completions` renders; of several named
        ones, `default`.

        Raises:
            ValueError: there is none.
        """
        folder = Path(self.path).expanduser().parent
        file = folder / CHAT_TEMPLATE
        template = None if file.is_file() else _values(folder / _CONFIG).get("chat_template")
        if isinstance(template, list):
            named = (each for each in template if isinstance(each, dict))
            template = next(
                (t.get("template") for t in named if t.get("name") == "default"), ""
            )
        require(
            file.is_file() or bool(template) and isinstance(template, str),
            f"{folder} has no chat template, neither {CHAT_TEMPLATE} nor a chat_template in "
            f"{_CONFIG}, of several the one named default; copy it from the chat model's "
            "folder, or write prompts out and encode them by encode_special",
        )
        return file.read_text(encoding="utf-8") if template is None else template

    @property
    def special_texts(self) -> dict[str, str]:
        """Texts of special tokens by role (`bos_token`), which chat templates write."""
        texts = {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in _named(Path(self.path).expanduser().parent).items()
            if name.endswith("_token")
        }
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def decode(self, ids: Iterable[int]) -> str:
        """The text; half a character gives U+FFFD, a special token (not an end) its name."""
        silent = self.silent_ids
        shown = (i for i in map(int, ids) if i not in silent)
        parts = itertools.groupby(shown, lambda i: self._name(i) is not None)
        return "".join(
            self._text(list(run)) if is_there else UNKNOWN * len(list(run))
            for is_there, run in parts
        )

    def _text(self, ids: list[int]) -> str:
        """The text of tokens that exist.

        The library turns every byte of a run of byte tokens (`<0xE2>`) into U+FFFD if one
        character in it is incomplete. Here complete characters stay, so that a longer answer
        begins with the text of a shorter one, except for its last character.
        """
        tokenizer = self._tokenizer
        if not tokenizer.model.byte_fallback or tokenizer.decoder is None:
            return tokenizer.decode(ids, skip_special_tokens=False)
        parts = []
        for is_byte, names in itertools.groupby(map(tokenizer.id_to_token, ids), _is_byte):
            if is_byte:
                names = [bytes(int(name[1:-1], 16) for name in names).decode(errors="replace")]
            parts += names
        return tokenizer.decoder.decode(parts)

    def piece(self, token_id: int) -> Piece:
        name = self._name(token_id)
        if name is None or token_id in self.silent_ids or token_id in self._special:
            return Piece(UNKNOWN if name is None else name, "control")
        # After a letter, as decoders strip the space at the beginning of a text.
        context = self.encode("a")
        text = self.decode([*context, token_id])[len(self.decode(context)) :]
        return Piece(name, "byte") if _HALF in text else Piece(text, "text")

    def fingerprint(self) -> str:
        return hashlib.sha256(self.content + self.special_ids_text.encode()).hexdigest()

    @property
    def content(self) -> bytes:
        """The file's bytes.

        Raises:
            ValueError: there is none, or it is too large or a pointer of Git LFS.
        """
        file = Path(self.path).expanduser()
        try:
            require_no_lfs_pointer(file)
            size = file.stat().st_size
            require(
                size <= _MOST_BYTES,
                f"{file} has {size:,} bytes, expected {_MOST_BYTES:,} at most; name the "
                f"model's own {TOKENIZER_FILE}",
            )
            return file.read_bytes()
        except OSError as error:
            raise ValueError(
                f"vocabulary {file} cannot be read: {error}; name a {TOKENIZER_FILE} that can"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        # Without the tokenizer: pickled, it would forget that texts are no special ids.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _name(self, token_id: int) -> str | None:
        """The token as the file writes it; None if no token has this id."""
        return self._tokenizer.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    @functools.cached_property
    def _special_tokenizer(self):
        tokenizer = read_tokenizer(self.content, self.path)
        tokenizer.encode_special_tokens = False
        return tokenizer

    @functools.cached_property
    def _special(self) -> set[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {i for i, token in added.items() if token.special}

    @functools.cached_property
    def _tokenizer(self):
        tokenizer = read_tokenizer(self.content, self.path)
        for token_id in self.silent_ids - {None}:
            require(
                tokenizer.id_to_token(token_id) is not None,
                f"{self.path}: no token has the special id {token_id}; correct the id, or give "
                f"the {TOKENIZER_FILE} that belongs to it",
            )
        return tokenizer


def _is_byte(name: str) -> bool:
    """Whether a token is a byte to fall back on, `<0xE2>`."""
    return _BYTE.fullmatch(name) is not None


def read_tokenizer(content: bytes, where: str):
    """The library's tokenizer of a file; it makes no text a special id, and truncates none.

    Raises:
        ValueError: the library is missing, cannot read the file, or the file is not of BPE or
            draws its merges at random.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(
            f"{where} needs the library `tokenizers` ({error}): pip install 'switchx[bpe]'"
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain ones
        raise ValueError(
            f"{where} is no {TOKENIZER_FILE} that tokenizers {tokenizers.__version__} reads: "
            f"{error!s:.200}; restore the file, or install a later version"
        ) from error
    model = tokenizer.model
    require(
        isinstance(model, tokenizers.models.BPE),
        f"{where}: model.type is {type(model).__name__}, expected BPE; a Unigram model is read "
        "as a SentencePiece model, with the encoder-decoder that it belongs to (`switchx "
        "convert`): a decoder-only model is converted without it, by --vocabulary=none",
    )
    require(
        not model.dropout,
        f"{where}: model.dropout={model.dropout} merges at random; set it to null",
    )
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_bpe(
    folder: str | Path,
    generation: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> BpeVocabulary:
    """The vocabulary of a folder of transformers, with the special ids that its files name.

    Ends are those of `generation_config.json`, else of `config.json`, else of
    `tokenizer_config.json` or `special_tokens_map.json`; the end in `config.json` comes first,
    and ends training texts. Padding that is also an end does not count as padding. The start is
    what the tokenizer puts before a text.

    Args:
        generation, config: content of the model's `generation_config.json` and `config.json`;
            None reads those of the folder.

    Raises:
        ValueError: a file is missing or damaged, no file names an end, or an id or a token is
            not in the tokenizer.
    """
    folder = Path(folder).expanduser()
    file = folder / TOKENIZER_FILE
    content = BpeVocabulary(path=str(file)).content
    tokenizer = read_tokenizer(content, str(file))
    own = _named(folder)
    _require_added(folder, own, tokenizer)
    if generation is None:
        generation = _values(folder / "generation_config.json")
    if config is None:
        config = _values(folder / "config.json")

    def ids(values: Mapping[str, Any], name: str) -> list[int]:
        """The ids of a kind of token that a file names, by number or by text."""
        found = values.get(f"{name}_token_id")
        if found is None and (text := values.get(f"{name}_token")) is not None:
            text = text.get("content") if isinstance(text, dict) else text
            found = tokenizer.token_to_id(text) if isinstance(text, str) else None
            require(
                found is not None,
                f"{folder}: {name}_token={text!r:.60} is no token of {TOKENIZER_FILE}; restore "
                "the files of one tokenizer",
            )
        # Llama's files have -1 for none.
        found = found if isinstance(found, list) else [] if found in (None, -1) else [found]
        are_ids = all(type(each) is int and 0 <= each < 1 << 31 for each in found)
        require(are_ids, f"{folder}: {name}_token_id={found!r:.80}; expected ids of tokens")
        return found

    ends = next(filter(None, (ids(each, "eos") for each in (generation, config, own))), [])
    require(
        bool(ends),
        f"{folder}: no file beside {TOKENIZER_FILE} names the end of a text; expected "
        f"eos_token_id in generation_config.json or config.json, or eos_token in {_CONFIG}",
    )
    first = next((end for end in ids(config, "eos") if end in ends), ends[0])
    pads = next(filter(None, (ids(each, "pad") for each in (generation, config, own))), [])
    starts = next(filter(None, (ids(each, "bos") for each in (generation, config))), [])
    return BpeVocabulary(
        path=str(file),
        pad_id=next((pad for pad in pads if pad not in ends), None),
        eos_ids=(first, *(end for end in dict.fromkeys(ends) if end != first)),
        start_id=_start_id(tokenizer, str(folder)),
        named_bos=starts[0] if starts else None,
        named_pad=pads[0] if pads else None,
    )


def _named(folder: Path) -> dict[str, Any]:
    """What the files beside a tokenizer say about it and its special tokens."""
    return _values(folder / _SPECIAL) | _values(folder / _CONFIG)


def _require_added(folder: Path, own: Mapping[str, Any], tokenizer) -> None:
    """Checks that the tokens added by files beside a tokenizer are in it: transformers adds
    those that are missing, and so gives a text other ids.

    Raises:
        ValueError: one is missing, or has another id; or the files are damaged.
    """
    added = own.get("added_tokens_decoder") or {}
    try:
        found = {each["content"]: int(number) for number, each in added.items()}
        found |= _values(folder / _ADDED)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder}: added_tokens_decoder in {_CONFIG} or {_ADDED} is damaged "
            f"({error!r:.80}); restore the file"
        ) from error
    wrong = [
        f"{text!r:.60} ({number})"
        for text, number in found.items()
        if tokenizer.token_to_id(text) != number
    ]
    require(
        not wrong,
        f"{folder}: {TOKENIZER_FILE} has not the added tokens {', '.join(wrong[:5])} of the "
        "files beside it, or by other ids; let transformers write them into it: "
        "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
    )


def _start_id(tokenizer, where: str) -> int | None:
    """The id that stands before a text, by the post-processor: transformers 5 does not read
    `add_bos_token` in a folder with a `tokenizer.json`."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    leading = next(
        (whole[:i] for i in range(len(whole)) if whole[i : i + len(plain)] == plain), []
    )
    require(
        len(leading) <= 1,
        f"{where}: {TOKENIZER_FILE} puts the tokens {leading[:8]} before a text, expected one "
        "at most; change its post_processor",
    )
    return leading[0] if leading else None


def _values(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return read_json_object(file, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}; restore the file") from error
