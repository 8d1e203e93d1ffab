# SPDX-License-Identifier: Apache-2.0
"""Batch features: examples of (inputs, targets) laid out as the arrays a model reads.

The names and meanings are T5X's and seqio's, so its converters are the reference (Roberts et
al. 2022, arXiv:2203.17189). A row holds one example or several packed ones: segment ids count
them from 1, positions restart at 0 in each. A position is padding if and only if its segment
id is 0: its token id, 0, may be that of a word.

Dims: B rows of a batch, L length of a row in tokens
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from switchx.data.special_ids import PAD_ID
from switchx.fields import require, require_at_least

Batch = dict[str, np.ndarray]


class Example(NamedTuple):
    """Token ids of one example; `inputs` is empty for a causal language model.

    Attributes:
        is_prefix_bidirectional: whether the inputs attend to all inputs in a decoder-only row.
    """

    inputs: np.ndarray
    targets: np.ndarray
    is_prefix_bidirectional: bool = True


Rows = Sequence[Sequence[Example]]


@dataclasses.dataclass(frozen=True)
class EncoderDecoderFeatures:
    """Rows of tokens for the encoder, and for the decoder.

    Attributes:
        inputs_length, targets_length: number of tokens in a row of each.
    """

    inputs_length: int
    targets_length: int

    def __post_init__(self):
        require_at_least(self, 1, "inputs_length", "targets_length")

    @property
    def capacity(self) -> tuple[int, ...]:
        """The size of a row, in the units of `size`; an example must fit on both sides."""
        return (self.inputs_length, self.targets_length)

    def size(self, example: Example) -> tuple[int, ...]:
        return (len(example.inputs), len(example.targets))

    def truncate(self, example: Example, eos_id: int) -> Example:
        """Truncates each side at its end to what a row holds; the last token becomes EOS."""
        return example._replace(
            inputs=_cut(example.inputs, self.inputs_length, eos_id),
            targets=_cut(example.targets, self.targets_length, eos_id),
        )

    def batch(self, rows: Rows, start_id: int | None = PAD_ID) -> Batch:
        """Lays out rows of examples that fit, in order; an empty row is all padding.

        Args:
            start_id: id that the decoder reads before each text.

        Returns:
            `encoder_input_tokens`, `encoder_segment_ids`, `encoder_positions` [B, inputs
            length]; `decoder_target_tokens`, `decoder_input_tokens` (targets shifted right
            in each segment, after the start), `decoder_segment_ids`, `decoder_positions`,
            `decoder_loss_weights` [B, targets length]; int32, the weights float32.

        Raises:
            ValueError: there is no start id.
        """
        require(
            start_id is not None,
            "this vocabulary has no start_id, and the decoder of an encoder-decoder begins "
            "with a token; give it one, or train a decoder-only model",
        )
        inputs = [[example.inputs for example in row] for row in rows]
        targets = [[example.targets for example in row] for row in rows]
        tokens_BL, segments_BL, positions_BL = _lay_out(inputs, self.inputs_length)
        return {
            "encoder_input_tokens": tokens_BL,
            "encoder_segment_ids": segments_BL,
            "encoder_positions": positions_BL,
        } | _decoder_features(targets, self.targets_length, start_id)


@dataclasses.dataclass(frozen=True)
class DecoderOnlyFeatures:
    """Rows of `length` tokens in which an example is its inputs and then its targets.

    Attributes:
        length: number of tokens in a row.
        has_prefix: whether batches have `decoder_prefix_mask`; without it no inputs are
            bidirectional.
    """

    length: int
    # Not in a saved reader's description: a run may resume with another attention.
    has_prefix: bool = dataclasses.field(default=True, repr=False)

    def __post_init__(self):
        require_at_least(self, 2, "length")

    @property
    def capacity(self) -> tuple[int, ...]:
        """The size of a row, in the units of `size`."""
        return (self.length,)

    def size(self, example: Example) -> tuple[int, ...]:
        return (len(example.inputs) + len(example.targets),)

    def truncate(self, example: Example, eos_id: int) -> Example:
        """Cuts the inputs at their end, and the targets only if they alone do not fit.

        One token of the inputs stays when there are any; a cut side ends in EOS.
        """
        num_kept_inputs = min(len(example.inputs), 1)
        targets = _cut(example.targets, self.length - num_kept_inputs, eos_id)
        inputs = _cut(example.inputs, self.length - len(targets), eos_id)
        return example._replace(inputs=inputs, targets=targets)

    def batch(self, rows: Rows, start_id: int | None = PAD_ID) -> Batch:
        """Lays out rows of examples that fit, in order; an empty row is all padding.

        Args:
            start_id: id that stands before each example; with None there is no start, all
                tokens are read, as by transformers' decoders, and the first is not predicted.

        Returns:
            [B, length] each: the `decoder_` features of an encoder-decoder, where only
            targets have loss weight, and with `has_prefix` `decoder_prefix_mask`, 1 where the
            token read is part of bidirectional inputs (or the start before them), else 0.
        """
        joined = [[np.concatenate([e.inputs, e.targets]) for e in row] for row in rows]
        batch = _decoder_features(joined, self.length, start_id)
        positions_BL = batch["decoder_positions"]
        num_inputs_BL = self._per_token(rows, lambda example: len(example.inputs))
        # The last input is at position `num_inputs` after a start, else one earlier.
        last_BL = num_inputs_BL - (start_id is None)
        batch["decoder_loss_weights"] *= positions_BL >= last_BL
        if not self.has_prefix:
            return batch
        is_seen_BL = (num_inputs_BL > 0) & (positions_BL <= last_BL)
        is_seen_BL &= self._per_token(rows, lambda example: example.is_prefix_bidirectional) > 0
        batch["decoder_prefix_mask"] = is_seen_BL.astype(np.int32)
        return batch

    def _per_token(self, rows: Rows, value: Callable[[Example], int]) -> np.ndarray:
        """A value per example, repeated at all of its positions, [B, length]."""
        numbers = [[np.full(sum(self.size(each)), value(each)) for each in row] for row in rows]
        return _lay_out(numbers, self.length)[0]


Features = EncoderDecoderFeatures | DecoderOnlyFeatures


def batch_digest(batch: Batch) -> str:
    """12 hex digits that identify a batch in a log: a hash of names, shapes and values."""
    digest = hashlib.blake2b(digest_size=6)
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        digest.update(f"{name} {array.shape} {array.dtype} ".encode())
        digest.update(array)
    return digest.hexdigest()


def _decoder_features(rows: Sequence[Sequence[np.ndarray]], length: int, start_id) -> Batch:
    tokens_BL, segments_BL, positions_BL = _lay_out(rows, length)
    read_BL, target_BL, is_predicted_BL = read_and_predicted(tokens_BL, segments_BL, start_id)
    return {
        "decoder_target_tokens": target_BL,
        "decoder_input_tokens": read_BL,
        "decoder_segment_ids": segments_BL,
        "decoder_positions": positions_BL,
        "decoder_loss_weights": is_predicted_BL.astype(np.float32),
    }


def read_and_predicted(tokens_BL: np.ndarray, segments_BL: np.ndarray, start_id: int | None):
    """The tokens of packed texts that a decoder reads, and those that it predicts.

    With a start, a text's positions read the start and all tokens but the last, and predict all
    tokens. Without one, they read all tokens and predict the next, the last position none.

    Args:
        segments_BL: number of the text at each position; 0 is padding.
        start_id: id that is read before each text, or None.

    Returns:
        read_BL, target_BL, and whether a position predicts its target, [B, L] each.
    """
    is_token_BL = segments_BL > 0
    pad = functools.partial(np.pad, constant_values=0)
    if start_id is None:
        goes_on_BL = pad(segments_BL[:, 1:] == segments_BL[:, :-1], ((0, 0), (0, 1)))
        is_predicted_BL = is_token_BL & goes_on_BL
        target_BL = pad(tokens_BL[:, 1:], ((0, 0), (0, 1))) * is_predicted_BL
        return tokens_BL, target_BL, is_predicted_BL
    before_BL, segment_before_BL = (
        pad(x_BL[:, :-1], ((0, 0), (1, 0))) for x_BL in (tokens_BL, segments_BL)
    )
    read_BL = np.where(segment_before_BL == segments_BL, before_BL, start_id) * is_token_BL
    return read_BL.astype(tokens_BL.dtype), tokens_BL, is_token_BL


def _lay_out(rows: Sequence[Sequence[np.ndarray]], length: int):
    """Token ids, segment ids and positions [B, length] of sequences laid end to end."""
    tokens_BL, segments_BL, positions_BL = np.zeros((3, len(rows), length), np.int32)
    for b, row in enumerate(rows):
        start = 0
        for segment, tokens in enumerate(row, 1):
            end = start + len(tokens)
            tokens_BL[b, start:end] = tokens
            segments_BL[b, start:end] = segment
            positions_BL[b, start:end] = np.arange(len(tokens))
            start = end
    return tokens_BL, segments_BL, positions_BL


def _cut(tokens_L: np.ndarray, length: int, eos_id: int) -> np.ndarray:
    if len(tokens_L) <= length:
        return tokens_L
    cut_L = tokens_L[:length].copy()
    cut_L[-1] = eos_id
    return cut_L
