# SPDX-License-Identifier: Apache-2.0
"""Foreign special ids: the ids of padding, end and unknown in files from elsewhere.

Vocabularies of T5's family and of SentencePiece have padding at 0, end at 1 and unknown at 2
here. If their files have other ids, ids are permuted when files are read, and back when they
are written. Other vocabularies keep their ids (`Vocabulary.pad_id`, `eos_ids`, `start_id`).

Dims: V vocabulary
"""

from collections.abc import Sequence

import numpy as np

from switchx.fields import require

PAD_ID, EOS_ID, UNK_ID = OURS = 0, 1, 2


def their_ids(special_ids: Sequence[int]) -> dict[int, int]:
    """A model's ids by our ids where they may differ, given its ids of padding, end, unknown.

    The mapping is a permutation: tokens whose ids are taken get the ids that become free, in
    order. An unknown token that is also padding or the end has no id of its own.
    """
    theirs: dict[int, int] = {}
    for our, their in enumerate(special_ids):
        if their not in theirs.values():
            theirs[our] = their
    places = {*OURS, *special_ids}
    left, free = sorted(places - theirs.keys()), sorted(places - {*theirs.values()})
    return theirs | dict(zip(left, free, strict=True))


def in_our_order(value, axis: int, special_ids: Sequence[int], start: int | None = None):
    """An array whose axis V follows a model's ids, with its entries in the order of our ids.

    Args:
        start: the model's id that begins a decoder's input, whose entry our id 0 gets; with
            None, our id 0 gets the entry of the model's padding.
    """
    order_V = _order_V(value.shape[axis], special_ids)
    if start is not None:
        order_V[0] = start
    return np.take(value, order_V, axis) if np.any(np.diff(order_V) != 1) else value


def in_their_order(value, axis: int, special_ids: Sequence[int]):
    """The inverse of `in_our_order` without `start`."""
    order_V = np.argsort(_order_V(value.shape[axis], special_ids))
    return np.take(value, order_V, axis) if np.any(np.diff(order_V) != 1) else value


def _order_V(size: int, special_ids: Sequence[int]) -> np.ndarray:
    order_V = np.arange(size)
    for our, their in their_ids(special_ids).items():
        order_V[our] = their
    return order_V


def renumbered(model: bytes, special_ids: Sequence[int], where: str) -> bytes:
    """A SentencePiece model with its pieces by our ids; it splits texts as before.

    Raises:
        ValueError: an id belongs to no piece, the model's own ids contradict it, or unknown
            characters become padding.
    """
    # The library's own description of its files; it needs protobuf.
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    read = ModelProto.FromString(model)
    kinds, theirs = ModelProto.SentencePiece.Type, their_ids(special_ids)
    require(
        max(theirs.values()) < len(read.pieces),
        f"{where}: padding, end and unknown are {tuple(special_ids)}, and there are "
        f"{len(read.pieces)} pieces; give the SentencePiece model that belongs to the ids",
    )
    spec, end = read.trainer_spec, special_ids[EOS_ID]
    own_end = next((i for i, p in enumerate(read.pieces) if p.piece == spec.eos_piece), end)
    require(
        own_end == end,
        f"{where}: the end is {own_end}, and {end} in the model's config.json; give the "
        "SentencePiece model that belongs to it",
    )
    unknown = next(i for i, piece in enumerate(read.pieces) if piece.type == kinds.UNKNOWN)
    require(
        unknown == theirs[UNK_ID] or spec.byte_fallback,
        f"{where}: unknown is {unknown}, padding and end are {tuple(special_ids[:2])}: unknown "
        "text would be one of these; give a model with pieces for bytes, or other ids",
    )
    pieces = [ModelProto.SentencePiece.FromString(p.SerializeToString()) for p in read.pieces]
    pieces[unknown].type = kinds.CONTROL
    order_V = _order_V(len(pieces), special_ids)
    del read.pieces[:]
    read.pieces.extend(pieces[their] for their in order_V)
    for our, kind in zip(OURS, (kinds.CONTROL, kinds.CONTROL, kinds.UNKNOWN), strict=True):
        read.pieces[our].type = kind
    spec.pad_id, spec.eos_id, spec.unk_id = OURS
    spec.pad_piece, spec.eos_piece, spec.unk_piece = (read.pieces[i].piece for i in OURS)
    return read.SerializeToString()
