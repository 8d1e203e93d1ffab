# SPDX-License-Identifier: Apache-2.0
"""`tokenizer.json` of the tokenizers library as the SentencePiece model that it was made from.

transformers 5 writes no `spiece.model`. The file has everything in such a model: the pieces of
a Unigram model (Kudo 2018, arXiv:1804.10959) and their scores, the compiled character map
(`precompiled_charsmap`), and the added tokens. The result encodes texts in composed form (NFC)
as the tokenizer does, except for the texts of padding, end and unknown, which stay texts, and
U+0085, which is no space in T5's character map. Other texts may have other ids: the tokenizers
library applies the map by grapheme, SentencePiece by code point. What the latter cannot do is
refused with the reason.
"""

import base64
import binascii
import io
import math
import pathlib
import re
import tempfile
from collections.abc import Sequence
from typing import Any

from switchx.data.special_ids import OURS
from switchx.fields import require
from switchx.interop.tensor_folder import read_json

_MOST_BYTES = 1 << 28
_MOST_PIECES = 1 << 21
_SENTINEL = re.compile(r"<extra_id_[0-9]{1,6}>")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Runs of spaces, which SentencePiece merges into one.
_RUNS = ({"Regex": " {2,}"}, {"String": "  "})
_WHITE_SPACE = "\t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_WAY_OUT = "give the SentencePiece model itself, --vocabulary=FILE, or none"


def sentencepiece_model(path: pathlib.Path, special_ids: Sequence[int] = OURS) -> bytes:
    """The content of a `.model` file; `special_ids` are those of padding, end and unknown.

    Raises:
        ValueError: the file has no Unigram model, or asks for what SentencePiece lacks.
    """
    tokenizer = _Tokenizer(path, special_ids)
    return tokenizer.model().SerializeToString()


class _Tokenizer:
    """The parts of one file, each checked before it is used."""

    def __init__(self, path: pathlib.Path, special_ids: Sequence[int]):
        self.path = path
        self.pad_id, self.eos_id, self.unk_id = special_ids
        self.content = read_json(path, _MOST_BYTES)

    def require(self, condition: bool, reason: str) -> None:
        require(condition, f"{self.path}: {reason}; {_WAY_OUT}")

    def model(self):
        from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec

        pieces, has_bytes = self._pieces()
        self._check_words()
        kinds = ModelProto.SentencePiece.Type
        model = ModelProto()
        for token_id, (text, score) in enumerate(pieces):
            if token_id == self.unk_id:
                kind = kinds.UNKNOWN
            elif _SENTINEL.fullmatch(text):
                kind = kinds.USER_DEFINED
            elif token_id in (self.pad_id, self.eos_id) or token_id in self._controls:
                kind = kinds.CONTROL
            else:
                kind = kinds.BYTE if has_bytes and _BYTE.fullmatch(text) else kinds.NORMAL
            model.pieces.add(piece=text, score=score, type=kind)
        spec = model.trainer_spec
        spec.model_type, spec.vocab_size = TrainerSpec.UNIGRAM, len(pieces)
        ids = self.pad_id, self.eos_id, self.unk_id
        self.require(
            max(ids) < len(pieces), f"there are {len(pieces)} pieces, and none of {ids}"
        )
        spec.pad_id, spec.eos_id, spec.unk_id, spec.bos_id = *ids, -1
        spec.pad_piece, spec.eos_piece, spec.unk_piece = (pieces[i][0] for i in ids)
        spec.byte_fallback = has_bytes
        model.normalizer_spec.precompiled_charsmap = self._character_map()
        model.normalizer_spec.add_dummy_prefix = True
        model.normalizer_spec.remove_extra_whitespaces = True
        model.normalizer_spec.escape_whitespaces = True
        return model

    def _pieces(self) -> tuple[list[tuple[str, float]], bool]:
        """Texts and scores of all ids, and whether unknown characters become bytes."""
        model = self.content.get("model")
        model = model if isinstance(model, dict) else {}
        kind, vocab = model.get("type"), model.get("vocab")
        self.require(
            kind == "Unigram",
            f"model.type={_shown(kind)}; expected 'Unigram', of which a SentencePiece model "
            "can be made",
        )
        self.require(
            isinstance(vocab, list)
            and 3 < len(vocab) <= _MOST_PIECES
            and all(map(_is_piece, vocab)),
            "model.vocab is no list of pieces and scores",
        )
        pieces = [(text, float(score)) for text, score in vocab]
        unk_id = model.get("unk_id")
        expected = f"model.unk_id={_shown(unk_id)}; expected {self.unk_id}"
        self.require(unk_id == self.unk_id, expected)
        self._controls = self._add_tokens(pieces)
        texts = {text for text, _ in pieces}
        self.require(len(texts) == len(pieces), "a piece is there twice")
        return pieces, bool(model.get("byte_fallback"))

    def _add_tokens(self, pieces: list[tuple[str, float]]) -> set[int]:
        """Adds the added tokens that are not pieces; returns ids that no text becomes."""
        tokens = self.content.get("added_tokens") or []
        are_tokens = isinstance(tokens, list) and all(
            isinstance(token, dict)
            and type(token.get("id")) is int
            and isinstance(token.get("content"), str)
            for token in tokens
        )
        self.require(are_tokens, "added_tokens is no list of ids and contents")
        controls = set()
        for token in sorted(tokens, key=lambda token: token["id"]):
            token_id, text = token["id"], token["content"]
            if token_id == len(pieces):
                pieces.append((text, 0.0))
            is_there = 0 <= token_id < len(pieces) and pieces[token_id][0] == text
            self.require(
                is_there, f"the added token {_shown(text)} has the id {token_id}, of another"
            )
            controls.add(token_id)
        return controls

    def _parts(self, name: str, inner: str) -> list[dict[str, Any]]:
        """The steps of a normalizer or pre-tokenizer, one by one."""
        part = self.content.get(name)
        if part is None:
            return []
        steps = part.get(inner) if isinstance(part, dict) else None
        steps = steps if isinstance(steps, list) else [part]
        self.require(all(isinstance(step, dict) for step in steps), f"{name} has no steps")
        return steps

    def _character_map(self) -> bytes:
        maps = []
        for step in self._parts("normalizer", "normalizers"):
            match step:
                case {"type": "Precompiled", "precompiled_charsmap": str(text)}:
                    try:
                        maps.append(base64.b64decode(text, validate=True))
                    except binascii.Error:
                        self.require(False, "precompiled_charsmap is no base64")
                case {"type": "Replace", "pattern": pattern, "content": " " | "▁"} if (
                    pattern in _RUNS
                ):
                    pass
                case {"type": "Strip"}:  # strips spaces, as remove_extra_whitespaces does
                    pass
                case _:
                    self.require(
                        False, f"the normalizer {_shown(step.get('type'))} is none of its own"
                    )
        self.require(len(maps) < 2, "the normalizer has two character maps")
        return maps[0] if maps else _whitespace_map()

    def _check_words(self) -> None:
        """Requires words as SentencePiece splits them: a space before each, and no others."""
        steps = self._parts("pre_tokenizer", "pretokenizers")
        kinds = [step.get("type") for step in steps]
        self.require(
            kinds in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]),
            f"the pre_tokenizer {_shown(kinds)} cuts words; expected Metaspace",
        )
        space, sign = steps[-1], steps[-1].get("replacement")
        scheme = space.get("prepend_scheme", "always")
        self.require(
            sign == "▁" and scheme == "always" and space.get("add_prefix_space", True) is True,
            f"the pre_tokenizer Metaspace has replacement={_shown(sign)} and prepend_scheme="
            f"{_shown(scheme)}; expected '▁' and 'always'",
        )


def _is_piece(item) -> bool:
    is_pair = isinstance(item, list) and len(item) == 2
    return (
        is_pair
        and isinstance(item[0], str)
        and bool(item[0])
        and type(item[1]) in (int, float)
        and math.isfinite(item[1])
    )


def _whitespace_map() -> bytes:
    """A character map of only white space, for a tokenizer that splits there and has no map.

    SentencePiece compiles maps only when it trains a model: here, a model of two characters.
    """
    import sentencepiece
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        rules.writelines(f"{ord(each):X}\t20\n" for each in _WHITE_SPACE)
        rules.flush()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b"]),
            model_writer=model,
            model_type="char",
            vocab_size=5,
            hard_vocab_limit=False,
            normalization_rule_tsv=rules.name,
            minloglevel=2,
        )
    return ModelProto.FromString(model.getvalue()).normalizer_spec.precompiled_charsmap


def _shown(value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
