# SPDX-License-Identifier: Apache-2.0
"""What users give a model, texts or token ids, as checked token ids.

The vocabulary says which ids are padding and start tokens; in T5's, both are 0.
Dims: B batch, L length
"""

import operator
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from switchx.characters import require_characters
from switchx.data.tasks import TextFormat
from switchx.data.tokenizers import PAD_ID, OwnIds, Vocabulary
from switchx.models.config import ModelConfig

Texts = Sequence[str] | Sequence[Sequence[int]]


def token_lists(
    texts: Texts,
    role: Literal["inputs", "targets"],
    config: ModelConfig,
    vocabulary: Vocabulary | None,
    text_format: TextFormat,
    ids: Vocabulary,
) -> tuple[list[list[int]], bool]:
    """Returns token lists, and whether the inputs were texts, which are encoded as in training.

    Token ids are read as they are, without trailing padding, and without the start token that
    may precede the inputs of a decoder-only model.

    Args:
        ids: the vocabulary, or where there is none, a stand-in with padding and start ids.

    Raises:
        ValueError: the inputs are a single text, a text with half a surrogate pair, texts for
            a model without a vocabulary, no lists of token ids, or have padding before an end.
    """
    if isinstance(texts, str):
        raise ValueError(f"{role} is one text, {texts!r:.40}; give a list, [text]")
    texts = list(texts)
    if not texts or not all(isinstance(text, str) for text in texts):
        may_start = role == "inputs" and not config.is_encoder_decoder
        lists = [_token_list(each, f"{role}[{i}]", ids) for i, each in enumerate(texts)]
        for i, tokens in enumerate(lists):
            if may_start and tokens[:1] == [ids.start_id]:
                del tokens[0]
            if ids.pad_id in tokens:
                raise ValueError(f"{role}[{i}] has padding, id {ids.pad_id}, before its end")
        return lists, False
    if vocabulary is None:
        raise ValueError(
            "this model came without a vocabulary, so it cannot read texts; give lists of "
            "token ids"
        )
    require_characters(texts, role)
    encode = getattr(text_format, role)
    return [encode(vocabulary, text) for text in texts], True


def decoding_ids(vocabulary: Vocabulary) -> dict:
    """The `DecodingConfig` fields that a vocabulary determines: special ids, number of ids.

    T5 models choose among all rows of their embedding table, as in T5X and transformers.
    """
    vocabulary = getattr(vocabulary, "resolved", vocabulary)
    first, *others = vocabulary.eos_ids
    return {
        "eos_id": first,
        "other_eos_ids": tuple(others),
        "pad_id": PAD_ID if vocabulary.pad_id is None else vocabulary.pad_id,
        "start_id": vocabulary.start_id,
        "num_ids": vocabulary.size if isinstance(vocabulary, OwnIds) else None,
    }


def _token_list(tokens, name: str, vocabulary: Vocabulary) -> list[int]:
    """Token ids as integers, without trailing padding."""
    try:
        ids = [operator.index(None if isinstance(x, bool) else x) for x in tokens]
    except TypeError:
        raise ValueError(
            f"{name} is {tokens!r:.40}; expected a list of token ids, or texts alone"
        ) from None
    while ids and ids[-1] == vocabulary.pad_id:
        ids.pop()
    return ids


def token_array(tokens, name: str, config: ModelConfig) -> jax.Array:
    """Integers `[B, L]` as an int32 array that a model can read.

    Raises:
        ValueError: the tokens have another type or shape, are not ids of the vocabulary, or
            exceed the model's positions.
    """
    array = np.asarray(tokens)
    if array.ndim != 2 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name} is {array.dtype}{list(array.shape)}; expected whole numbers [B, L]"
        )
    V = config.vocab_size
    low = array.min()
    high = array.max()
    if low < 0 or high >= V:
        raise ValueError(
            f"{name} has ids from {low} to {high}, the vocabulary has 0 to {V - 1}"
        )
    if config.has_length_limit and array.shape[1] > config.max_length:
        raise ValueError(
            f"{name} has {array.shape[1]} positions, the model has {config.max_length}"
        )
    return jnp.array(array, jnp.int32)
