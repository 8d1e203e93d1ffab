# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a transformers folder: its pieces, and the tokens beside them.

`spiece.model` has the pieces. The ids beyond these, their texts, and the number and order of
sentinels are in `tokenizer.json`, `added_tokens_decoder` and `extra_ids` in
`tokenizer_config.json`, and `added_tokens.json`; which of them are special, and which are
padding, end and unknown, is also in `special_tokens_map.json`. Files that contradict each other
are refused.
"""

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from switchx.data.added_tokens import AddedToken, added_token
from switchx.data.special_ids import OURS, UNK_ID, their_ids
from switchx.data.tokenizers import SentencePieceVocabulary, read_sentencepiece
from switchx.fields import require
from switchx.interop.tensor_folder import read_json, write_json

PIECES = "spiece.model"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
ADDED, SPECIAL = "added_tokens.json", "special_tokens_map.json"
_SENTINEL = re.compile(r"<extra_id_([0-9]{1,6})>")
_NAMES = "pad_token", "eos_token", "unk_token"
_MOST_BYTES = 1 << 28
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
T5_SENTINELS = 100  # if no file says how many there are


def folder_vocabulary(
    model: pathlib.Path,
    folder: pathlib.Path | None,
    vocab_size: int,
    special_ids: Sequence[int] = OURS,
) -> SentencePieceVocabulary:
    """The vocabulary of a SentencePiece model and the files beside it in a folder.

    Args:
        folder: folder with the tokenizer's files, or only a `tokenizer.json`; None has
            neither.
        vocab_size: number of rows of the model's embedding.
        special_ids: ids of padding, end and unknown in the files.

    Raises:
        ValueError: there are more ids than rows, an id has two texts, or sentinels are
            missing; the message names them.
    """
    plain = SentencePieceVocabulary(str(model), 0, vocab_size, special_ids=special_ids)
    num_pieces = plain.num_pieces
    require(
        num_pieces <= vocab_size,
        f"vocabulary {model} has {num_pieces} pieces, the model's embedding {vocab_size} rows; "
        "give the vocabulary that the model was trained with",
    )
    ours = {their: our for our, their in their_ids(special_ids).items()}
    named = [] if folder is None else read_added_tokens(folder)
    named = [dataclasses.replace(each, id=ours.get(each.id, each.id)) for each in named]
    tokens = _beside(plain, named, vocab_size, str(folder))
    own = sum(_SENTINEL.fullmatch(plain.piece(i).text) is not None for i in range(num_pieces))
    numbers = sorted(
        int(match[1]) for token in tokens if (match := _SENTINEL.fullmatch(token.text))
    )
    require(
        numbers == list(range(len(numbers))),
        f"{folder} has the sentinels {numbers[:8]}; expected 0 and those that follow: restore "
        f"{ADDED}",
    )
    stated = None if folder is None else _extra_ids(folder)
    count = len(numbers) or own or (T5_SENTINELS if stated is None else stated)
    if not numbers and not own and stated is None and _is_taken(tokens, num_pieces, count):
        count = 0
    require(
        numbers or own or not _is_taken(tokens, num_pieces, count),
        f"{folder}: extra_ids={count} sentinels beside {num_pieces} pieces have ids that added "
        f"tokens have, too; correct extra_ids in {TOKENIZER_CONFIG}",
    )
    if not numbers and not own and num_pieces + count > vocab_size:
        # mT5's 100 are pieces with other names, and T5's tokenizer_config.json says 100.
        require(
            stated in (None, 0, T5_SENTINELS),
            f"{folder}: extra_ids={stated} sentinels beside {num_pieces} pieces need "
            f"{num_pieces + count} rows, the embedding has {vocab_size}; correct extra_ids in "
            f"{TOKENIZER_CONFIG}",
        )
        count = 0
    as_t5 = {f"<extra_id_{i}>": num_pieces + count - 1 - i for i in range(count)}
    if folder is not None and not folder.is_file():
        found = {token.text: token.id for token in named} | ({} if own or numbers else as_t5)
        _check_special(folder, plain, found)
    if {token.text: token.id for token in tokens} == as_t5:
        tokens = []
    return dataclasses.replace(plain, num_sentinels=count, added_tokens=tuple(tokens))


def unknown_id(file: pathlib.Path) -> int | None:
    """The unknown id of a SentencePiece model or a `tokenizer.json`."""
    if file.suffix != ".json":
        return read_sentencepiece(str(file)).unk_id()
    model = read_json(file, _MOST_BYTES).get("model")
    unknown = model.get("unk_id") if isinstance(model, dict) else None
    return unknown if type(unknown) is int and unknown >= 0 else None


def _check_special(
    folder: pathlib.Path, plain: SentencePieceVocabulary, found: dict[str, int]
) -> None:
    """Requires that tokens named without an id have one, namely the one they stand for.

    Args:
        found: our ids of added tokens and sentinels.
    """
    ids = {plain.piece(i).text: i for i in range(plain.num_pieces)} | found
    for file in (folder / TOKENIZER_CONFIG, folder / SPECIAL):
        values = read_json(file) if file.is_file() else {}
        for our, name in enumerate(_NAMES):
            text = _content(values.get(name))
            is_own = plain.special_ids.index(plain.special_ids[our]) == our
            require(
                not is_own or ids.get(text, our) == our,
                f"{file}: {name} is {text!r}, of another id than {plain.special_ids[our]}, "
                "which the model has; restore the files of one model",
            )
        for text in map(_content, _listed(values.get("additional_special_tokens"))):
            require(
                text in ids,
                f"{file}: no file says which id {text!r:.80} has; restore {ADDED}",
            )


def _listed(value) -> list:
    return value if isinstance(value, list) else []


def _content(token) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _is_taken(tokens: Sequence[AddedToken], first: int, count: int) -> bool:
    return any(first <= token.id < first + count for token in tokens)


def read_added_tokens(folder: pathlib.Path) -> list[AddedToken]:
    """All tokens that a folder's files name besides pieces, in the order of their ids.

    Raises:
        ValueError: a file is damaged, or two files give an id different texts.
    """
    found: dict[int, AddedToken] = {}
    for file, token in _named(folder):
        known = found.setdefault(token.id, token)
        require(
            known.text == token.text,
            f"{file}: id {token.id} is {token.text!r}, and {known.text!r} in another "
            "file of the folder; restore the files of one tokenizer",
        )
    return [found[token_id] for token_id in sorted(found)]


def _named(folder: pathlib.Path):
    """Files and tokens, those with flags first."""
    file = folder if folder.is_file() else folder / TOKENIZER
    if file.is_file():
        tokens = read_json(file, _MOST_BYTES).get("added_tokens") or []
        require(
            isinstance(tokens, list) and all(isinstance(each, dict) for each in tokens),
            f"{file}: added_tokens is no list of ids and contents; restore the file",
        )
        for each in tokens:
            yield file, _token(each, each.get("id"), file)
    file = folder / TOKENIZER_CONFIG
    if file.is_file():
        tokens = read_json(file).get("added_tokens_decoder") or {}
        is_by_id = isinstance(tokens, dict) and all(
            number.isdecimal() and isinstance(each, dict) for number, each in tokens.items()
        )
        require(is_by_id, f"{file}: added_tokens_decoder has no tokens by id; restore the file")
        for number, each in tokens.items():
            yield file, _token(each, int(number), file)
    file = folder / ADDED
    if file.is_file():
        special = folder / SPECIAL
        special = read_json(special) if special.is_file() else {}
        special = [*special.values(), *_listed(special.get("additional_special_tokens"))]
        for text, token_id in read_json(file).items():
            # The file has only names: flags are those of a text that transformers adds.
            is_special = _SENTINEL.fullmatch(text) or text in map(_content, special)
            fields = {"content": text, "special": bool(is_special)}
            fields["normalized"] = not is_special
            yield file, _token(fields, token_id, file)


def _token(fields: dict[str, Any], token_id, file: pathlib.Path) -> AddedToken:
    flags = {name: fields[name] for name in _FLAGS if name in fields}
    return added_token({"id": token_id, "text": fields.get("content"), **flags}, str(file))


def _beside(
    plain: SentencePieceVocabulary, tokens: Sequence[AddedToken], vocab_size: int, where: str
) -> list[AddedToken]:
    """The tokens that are not pieces, each checked."""
    beside = []
    for token in tokens:
        require(
            token.id < vocab_size,
            f"{where}: the added token {token.text!r} has the id {token.id}, the embedding "
            f"{vocab_size} rows; resize the embedding, or take the token out",
        )
        if token.id >= plain.num_pieces:
            beside.append(token)
            continue
        # Padding, end and unknown have texts in transformers, which stay texts here.
        piece = plain.piece(token.id)
        require(
            token.id <= UNK_ID or piece.text == token.text.replace("\u2581", " "),
            f"{where}: the added token {token.text!r} has the id {token.id}, of the piece "
            f"{piece.text!r}; give the SentencePiece model that belongs to these files",
        )
        if token.id > UNK_ID and not _SENTINEL.fullmatch(token.text):
            beside.append(token)
    return beside


def _extra_ids(folder: pathlib.Path) -> int | None:
    """The number of sentinels in `tokenizer_config.json`; None if it does not say."""
    file = folder / TOKENIZER_CONFIG
    count = read_json(file).get("extra_ids") if file.is_file() else None
    require(
        count is None or (type(count) is int and 0 <= count <= 1 << 20),
        f"{file}: extra_ids={count!r}; expected a number of sentinels",
    )
    return count


def write_tokenizer(
    folder: pathlib.Path,
    num_sentinels: int,
    tokens: Sequence[AddedToken],
    special_ids: Sequence[int] = OURS,
) -> None:
    """Writes what T5Tokenizer reads beside `spiece.model`, which exists already.

    Sentinels that are pieces are named with their ids: otherwise it would append others.
    """
    pieces = read_sentencepiece(str(folder / PIECES))
    theirs = their_ids(special_ids)
    texts = map(pieces.id_to_piece, range(pieces.get_piece_size()))
    own = [AddedToken(i, text) for i, text in enumerate(texts) if _SENTINEL.fullmatch(text)]
    tokens = [dataclasses.replace(each, id=theirs.get(each.id, each.id)) for each in tokens]
    tokens += own
    content: dict[str, Any] = {
        "tokenizer_class": "T5Tokenizer",
        "extra_ids": 0 if tokens else num_sentinels,
    }
    content |= dict(zip(_NAMES, map(pieces.id_to_piece, special_ids), strict=True))
    if tokens:
        write_json(folder / ADDED, {token.text: token.id for token in tokens})
        content["added_tokens_decoder"] = {
            str(token.id): {"content": token.text}
            | {name: getattr(token, name) for name in _FLAGS}
            for token in tokens
        }
    write_json(folder / TOKENIZER_CONFIG, content)
