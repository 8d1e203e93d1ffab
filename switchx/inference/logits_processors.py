# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch in decoding: their settings, and which tokens each may choose next.

Logits are changed as Hugging Face's processors change them: a repetition penalty (Keskar et al.
2019, arXiv:1909.05858, section 4.1), n-grams that must not repeat (Paulus et al. 2017,
arXiv:1705.04304, section 2.5), a least length, and forced tokens, in this order.
Dims: B batch, L hypotheses of a sentence, P prompt, T new tokens, M places of both,
V vocabulary
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from switchx.inference.config import MAX_INT32, DecodingConfig, DecodingProgram

# Codes of `early_stopping`.
EARLY_STOPPING = (False, True, "never")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSettings:
    """The settings that each sentence has for itself, which are data of the compiled program.

    They are fields of `DecodingConfig`; sentences of one batch may be different people's.

    Attributes:
        seed_B: int32.
        temperature_B: float32, above 0; read where the program samples.
        top_k_B: int32; the vocabulary's size, or more, for all tokens.
        top_p_B: float32; 1 for all tokens.
        length_penalty_B: float32.
        early_stopping_B: int32, a place in `EARLY_STOPPING`; read where the program searches.
        min_new_tokens_B: int32.
        repetition_penalty_B: float32; this and the following ones are read where the program
            has processors.
        no_repeat_ngram_size_B: int32; 0 for none.
        forced_BT: int32, the tokens that each output begins with, -1 behind them.
    """

    seed_B: jax.Array
    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    length_penalty_B: jax.Array
    early_stopping_B: jax.Array
    min_new_tokens_B: jax.Array
    repetition_penalty_B: jax.Array
    no_repeat_ngram_size_B: jax.Array
    forced_BT: jax.Array

    @classmethod
    def of(cls, decodings: Sequence[DecodingConfig]) -> "RowSettings":
        """Makes NumPy arrays with an entry for each of the configurations."""

        def column(dtype, values):
            return np.array(list(values), dtype)

        prefixes = [each.forced_prefix for each in decodings]
        forced_BT = np.full((len(prefixes), max(map(len, prefixes), default=0)), -1, np.int32)
        for row, prefix in enumerate(prefixes):
            forced_BT[row, : len(prefix)] = prefix
        return cls(
            column(np.int32, (each.seed for each in decodings)),
            column(np.float32, (each.temperature or 1.0 for each in decodings)),
            column(np.int32, (each.top_k or MAX_INT32 for each in decodings)),
            column(np.float32, (1 if each.top_p is None else each.top_p for each in decodings)),
            column(np.float32, (each.length_penalty for each in decodings)),
            column(np.int32, (EARLY_STOPPING.index(each.early_stopping) for each in decodings)),
            column(np.int32, (each.min_new_tokens for each in decodings)),
            column(np.float32, (each.repetition_penalty for each in decodings)),
            column(np.int32, (each.no_repeat_ngram_size for each in decodings)),
            forced_BT,
        )

    def fitted(self, program: DecodingProgram) -> "RowSettings":
        """A copy with NumPy arrays in the shapes of a program.

        Raises:
            ValueError: a row asks for something that the program was not compiled for.
        """
        if program.has_processors:
            forced_BT = lengthened(self.forced_BT, program, -1)[:, : program.max_new_tokens]
            return dataclasses.replace(self, forced_BT=np.asarray(forced_BT))
        asks_B = (self.repetition_penalty_B != 1) | (self.no_repeat_ngram_size_B > 0)
        if np.any(asks_B) or np.any(self.forced_BT >= 0):
            raise ValueError(
                "a row has a repetition penalty, n-grams that do not repeat or forced tokens, "
                "its program has none; decode it with a configuration that has some"
            )
        return dataclasses.replace(self, forced_BT=self.forced_BT[:, :0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a batch, one sentence each.

    Attributes:
        sentence_B: the sentence's number; -1 in padding rows.
        is_live_B: false for finished sentences and for padding rows.
        max_new_tokens_B: most new tokens of each sentence.
        settings: decoding settings of each sentence.
        read_BP: token ids that the decoder read before the first new token, padded with -1 in
            front; None where the program has no processors.
    """

    sentence_B: jax.Array
    is_live_B: jax.Array
    max_new_tokens_B: jax.Array
    settings: RowSettings
    read_BP: jax.Array | None = None

    def allowed(self, x_BLV, token_BLT, number_B, program: DecodingProgram):
        """Logits or log-probabilities to choose from: -inf where a token must not come next.

        Args:
            token_BLT: the new tokens of each hypothesis so far.
            number_B: number of new tokens so far.
        """
        if program.suppressed_ids:
            x_BLV = x_BLV.at[:, :, jnp.array(program.suppressed_ids)].set(-jnp.inf)
        if program.num_ids is not None and program.num_ids < x_BLV.shape[-1]:
            x_BLV = x_BLV.at[:, :, program.num_ids :].set(-jnp.inf)
        if not program.has_processors:
            return self._without_early_end(x_BLV, number_B, program)
        read_BLP = jnp.broadcast_to(
            self.read_BP[:, None], (*token_BLT.shape[:2], self.read_BP.shape[1])
        )
        is_there_BT = jnp.arange(token_BLT.shape[2])[None] < number_B[:, None]
        new_BLT = jnp.where(is_there_BT[:, None], token_BLT, -1)
        text_BLM = jnp.concatenate([read_BLP, new_BLT], axis=2)

        x_BLV = _penalized(x_BLV, text_BLM, self.settings.repetition_penalty_B)
        x_BLV = self._without_early_end(x_BLV, number_B, program)
        is_banned_BLM = self._ends_ngram(text_BLM, number_B)
        left_BLV = _put(x_BLV, text_BLM, is_banned_BLM, -jnp.inf)
        # In a small vocabulary, all tokens may be banned.
        is_any_BL1 = jnp.any(left_BLV > -jnp.inf, axis=2, keepdims=True)
        x_BLV = jnp.where(is_any_BL1, left_BLV, x_BLV)
        forced_B11 = self.forced_B(number_B)[:, None, None]
        is_forced_BLV = forced_B11 == jnp.arange(x_BLV.shape[2])[None, None]
        return jnp.where(forced_B11 < 0, x_BLV, jnp.where(is_forced_BLV, 0.0, -jnp.inf))

    def forced_B(self, number_B):
        """The token that is forced to be each sentence's new one; -1 where none is."""
        forced_BT = self.settings.forced_BT
        if not forced_BT.shape[1]:
            return jnp.full_like(number_B, -1)
        token_B1 = jnp.take_along_axis(forced_BT, number_B[:, None], axis=1, mode="clip")
        return jnp.where(number_B < forced_BT.shape[1], token_B1[:, 0], -1)

    def _without_early_end(self, x_BLV, number_B, program: DecodingProgram):
        is_early_B1 = (number_B < self.settings.min_new_tokens_B)[:, None]
        for eos_id in program.eos_ids:
            if 0 <= eos_id < x_BLV.shape[-1]:  # otherwise no token ends a text
                end_BL = jnp.where(is_early_B1, -jnp.inf, x_BLV[:, :, eos_id])
                x_BLV = x_BLV.at[:, :, eos_id].set(end_BL)
        return x_BLV

    def _ends_ngram(self, text_BLM, number_B):
        """Whether a place's token ends an n-gram whose other tokens are the text's last ones.

        The whole text is compared with itself once for each of the n - 1 other tokens, shifted
        by one more place each time, as long as any n-gram still matches.
        """
        size_B, place_M = self.settings.no_repeat_ngram_size_B, jnp.arange(text_BLM.shape[2])
        first_B = jnp.sum(self.read_BP < 0, axis=1)
        end_B = self.read_BP.shape[1] + number_B
        is_after_BM = place_M[None] >= (first_B + size_B - 1)[:, None]
        is_place_BM = is_after_BM & (place_M[None] < end_B[:, None]) & (size_B > 0)[:, None]

        def goes_on(compared):
            number, is_alike_BLM = compared
            return (number < jnp.max(size_B) - 1) & jnp.any(is_alike_BLM)

        def compare_one_more(compared):
            number, is_alike_BLM = compared
            last_B11 = jnp.maximum(end_B - 1 - number, 0)[:, None, None]
            last_BL1 = jnp.take_along_axis(text_BLM, last_B11, axis=2)
            is_same_BLM = jnp.roll(text_BLM, number + 1, axis=2) == last_BL1
            is_whole_B11 = (number >= size_B - 1)[:, None, None]
            return number + 1, is_alike_BLM & (is_same_BLM | is_whole_B11)

        is_alike_BLM = jnp.broadcast_to(is_place_BM[:, None], text_BLM.shape)
        start = jnp.int32(0), is_alike_BLM
        return jax.lax.while_loop(goes_on, compare_one_more, start)[1]


def _penalized(x_BLV, text_BLM, penalty_B):
    """Penalizes tokens that occur: x * penalty where x is negative, x / penalty elsewhere."""
    old_BLM = jnp.take_along_axis(x_BLV, jnp.maximum(text_BLM, 0), axis=2)
    penalty_B11 = penalty_B[:, None, None]
    new_BLM = jnp.where(old_BLM < 0, old_BLM * penalty_B11, old_BLM / penalty_B11)
    # A token that occurs twice gets the same new value each time.
    return _put(x_BLV, text_BLM, text_BLM >= 0, new_BLM)


def _put(x_BLV, text_BLM, is_put_BLM, value):
    """Sets the numbers of the tokens where `is_put_BLM` to a value."""
    B, L, V = x_BLV.shape
    token_BLM = jnp.where(is_put_BLM, text_BLM, V)  # which is no token, and dropped
    row_B11, beam_1L1 = jnp.arange(B)[:, None, None], jnp.arange(L)[None, :, None]
    return x_BLV.at[row_B11, beam_1L1, token_BLM].set(value, mode="drop")


def lengthened(token_BT, program: DecodingProgram, fill):
    """Texts `[..., T]` with places for `max_new_tokens`, unless they have more already."""
    more = max(0, program.max_new_tokens - token_BT.shape[-1])
    widths = [(0, 0)] * (token_BT.ndim - 1) + [(0, more)]
    xp = np if isinstance(token_BT, np.ndarray) else jnp
    return xp.pad(token_BT, widths, constant_values=fill)
