# SPDX-License-Identifier: Apache-2.0
"""Batch features: examples of (inputs, targets) laid out as the arrays a model reads.

The names and meanings are T5X's and seqio's, so its converters are the reference (Roberts et
al. 2022, arXiv:2203.17189). A row holds one example or several packed ones: segment ids count
them from 1 (0 is padding), positions restart at 0 in each.

Dims: B rows of a batch, L length of a row in tokens
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from switchx.fields import require_at_least

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
    """Rows of `inputs_length` tokens for the encoder and `targets_length` for the decoder."""

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
        """Cuts each side at its end to what a row holds, the last token becoming EOS."""
        return example._replace(
            inputs=_cut(example.inputs, self.inputs_length, eos_id),
            targets=_cut(example.targets, self.targets_length, eos_id),
        )

    def batch(self, rows: Rows) -> Batch:
        """Lays out rows of examples that fit, in order; an empty row is all padding.

        Returns:
            `encoder_input_tokens`, `encoder_segment_ids`, `encoder_positions` [B, inputs
            length]; `decoder_target_tokens`, `decoder_input_tokens` (targets shifted right
            in each segment, after a 0), `decoder_segment_ids`, `decoder_positions`,
            `decoder_loss_weights` [B, targets length]; int32, the weights float32.
        """
        inputs = [[example.inputs for example in row] for row in rows]
        targets = [[example.targets for example in row] for row in rows]
        tokens_BL, segments_BL, positions_BL = _lay_out(inputs, self.inputs_length)
        return {
            "encoder_input_tokens": tokens_BL,
            "encoder_segment_ids": segments_BL,
            "encoder_positions": positions_BL,
        } | _decoder_features(targets, self.targets_length)


@dataclasses.dataclass(frozen=True)
class DecoderOnlyFeatures:
    """Rows of `length` tokens in which an example is its inputs and then its targets."""

    length: int

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

    def batch(self, rows: Rows) -> Batch:
        """Lays out rows of examples that fit, in order; an empty row is all padding.

        Returns:
            [B, length] each: the `decoder_` features of an encoder-decoder, where only
            targets have loss weight, and `decoder_prefix_mask`, 1 where the token read is
            part of bidirectional inputs (or the 0 that stands before them), else 0.
        """
        joined = [[np.concatenate([e.inputs, e.targets]) for e in row] for row in rows]
        batch = _decoder_features(joined, self.length)
        positions_BL = batch["decoder_positions"]
        num_inputs_BL = self._per_token(rows, lambda example: len(example.inputs))
        batch["decoder_loss_weights"] *= positions_BL >= num_inputs_BL
        # Tokens read are shifted right: the last input stands at position `num_inputs`.
        is_seen_BL = (num_inputs_BL > 0) & (positions_BL <= num_inputs_BL)
        is_seen_BL &= self._per_token(rows, lambda example: example.is_prefix_bidirectional) > 0
        batch["decoder_prefix_mask"] = is_seen_BL.astype(np.int32)
        return batch

    def _per_token(self, rows: Rows, of: Callable[[Example], int]) -> np.ndarray:
        """A number of each example at all of its positions, [B, length]."""
        numbers = [[np.full(sum(self.size(each)), of(each)) for each in row] for row in rows]
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


def _decoder_features(rows: Sequence[Sequence[np.ndarray]], length: int) -> Batch:
    tokens_BL, segments_BL, positions_BL = _lay_out(rows, length)
    read_BL = np.zeros_like(tokens_BL)
    read_BL[:, 1:] = tokens_BL[:, :-1]
    read_BL[positions_BL == 0] = 0
    return {
        "decoder_target_tokens": tokens_BL,
        "decoder_input_tokens": read_BL,
        "decoder_segment_ids": segments_BL,
        "decoder_positions": positions_BL,
        "decoder_loss_weights": (segments_BL > 0).astype(np.float32),
    }


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
