# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding of several tokens a step, with drafts looked up in the text itself.

Where a text repeats its prompt, its source or itself, the tokens that followed the last
occurrence of its last two tokens (or of the last one) come next. These tokens are drafts: a
step reads them beside the newest token and keeps them while each is the model's likeliest token
in its place, then adds the token after those. Saxena 2023 (prompt lookup decoding),
`prompt_lookup_num_tokens` in `transformers`; drafts in general: Leviathan et al. 2023
(arXiv:2211.17192).
Dims: B batch, S drafts of a step, L = S + 1 lanes (the newest token, then drafts), M places of
the text, T new tokens, V vocabulary, R = B * L
"""

import dataclasses

import jax
import jax.numpy as jnp

from switchx.inference.config import DecodingProgram
from switchx.inference.logits_processors import Rows
from switchx.inference.sampling import Greedy, next_token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafted(Greedy):
    """The new tokens of each sentence so far, and drafts of its next tokens.

    A step in the ring has one lane of keys and values for the token that was newest at the
    time, and one lane for each draft; lanes of wrong drafts are never attended to.

    Attributes:
        read_BM: token ids that were read before the first new token, the last one in the last
            place; -1 where there is no token.
        first_BT: number of new tokens before each step in the ring, the next one included.
        draft_BS: drafts of the tokens after the newest one.
    """

    read_BM: jax.Array
    first_BT: jax.Array
    draft_BS: jax.Array

    @classmethod
    def of_texts(cls, texts, program: DecodingProgram) -> "Drafted":
        """Returns the state before the first new token.

        Args:
            texts: pairs of what was read: ids, and whether they are tokens; first the source,
                which may be None, then the prompt.
        """
        read_BM = jnp.concatenate(
            [jnp.where(is_token, ids, -1) for ids, is_token in texts if ids is not None], axis=1
        )
        B, M = read_BM.shape
        base = Greedy.start(B, program)
        length_B = jnp.full(B, M)
        draft_BS = drafts(read_BM, length_B, program.num_drafts, program.pad_id)
        return cls(**vars(base), read_BM=read_BM, first_BT=base.token_BT * 0, draft_BS=draft_BS)

    def with_drafts(self, token_B):
        """Tokens that the next step reads, `[B, L]`: each row's newest one, then its drafts."""
        return jnp.concatenate([token_B[:, None], self.draft_BS], axis=1)

    def number_B(self, num_steps_B):
        return self.length_B

    def lanes_of(self, position_B):
        return position_B[:, None] + jnp.arange(self.draft_BS.shape[1] + 1)[None]

    def sees_BLTL(self, behind_T):
        """A lane attends to lanes of past steps that became text, and to no later lane."""
        lane_L = jnp.arange(self.draft_BS.shape[1] + 1)
        num_kept_BT = jnp.roll(self.first_BT, -1, axis=1) - self.first_BT
        is_text_BTL = lane_L[None, None] < num_kept_BT[..., None]
        is_not_ahead_LL = lane_L[None] <= lane_L[:, None]
        return jnp.where(
            (behind_T == 0)[None, None, :, None],
            is_not_ahead_LL[None, :, None],
            is_text_BTL[:, None],
        )

    @property
    def number_BTL(self):
        return self.first_BT[..., None] + jnp.arange(self.draft_BS.shape[1] + 1)[None, None]

    def with_places(self, program: DecodingProgram) -> "Drafted":
        """A copy with places for `max_new_tokens`; copies of the ring are laid end to end."""
        longer, times = super().with_places(program), program.max_new_tokens // self.num_places
        return dataclasses.replace(
            longer, first_BT=jnp.concatenate([self.first_BT] * times, axis=1)
        )

    def advance(self, logits_BLV, number_B, place, rows: Rows, program: DecodingProgram):
        """Chooses a token after each lane; keeps the tokens up to the first wrong draft.

        Args:
            place: number of the ring's place where the next step will write.

        Returns:
            the hypotheses, token_BL, is_live_B.
        """
        B, L, V = logits_BLV.shape
        number_BL = self.lanes_of(number_B)
        token_BL, log_prob_BL = _likeliest(logits_BLV, number_BL, rows, program)
        is_right_BS = self.draft_BS == token_BL[:, :-1]
        is_right_BS &= ~program.ends(token_BL[:, :-1])
        is_right_BS &= number_BL[:, 1:] < rows.max_new_tokens_B[:, None]
        # The first is new, and so is each further one as long as the drafts before are right.
        is_new_BL = jnp.concatenate([rows.is_live_B[:, None], is_right_BS], axis=1)
        is_new_BL = jnp.cumprod(is_new_BL, axis=1) > 0
        num_new_B = jnp.sum(is_new_BL, axis=1)

        lane_BT = jnp.arange(self.num_places)[None] - number_B[:, None]
        is_here_BT = (lane_BT >= 0) & (lane_BT < num_new_B[:, None])
        new_BT = jnp.take_along_axis(token_BL, lane_BT, axis=1, mode="clip")
        token_BT = jnp.where(is_here_BT, new_BT, self.token_BT)
        length_B = number_B + num_new_B
        last_B1 = jnp.take_along_axis(token_BL, num_new_B[:, None] - 1, axis=1, mode="clip")
        last_B = jnp.where(rows.is_live_B, last_B1[:, 0], program.pad_id)

        is_there_BT = jnp.arange(self.num_places)[None] < length_B[:, None]
        text_BM = [self.read_BM, jnp.where(is_there_BT, token_BT, -1)]
        text_length_B = self.read_BM.shape[1] + length_B
        draft_BS = drafts(
            jnp.concatenate(text_BM, axis=1), text_length_B, L - 1, program.pad_id
        )
        chosen = dataclasses.replace(
            self,
            token_BT=token_BT,
            log_prob_B=self.log_prob_B + jnp.sum(jnp.where(is_new_BL, log_prob_BL, 0), axis=1),
            length_B=length_B,
            first_BT=self.first_BT.at[:, place].set(length_B),
            draft_BS=draft_BS,
        )
        is_live_B = rows.is_live_B & ~program.ends(last_B)
        is_live_B &= length_B < rows.max_new_tokens_B
        return chosen, chosen.with_drafts(last_B), is_live_B


def _likeliest(logits_BLV, number_BL, rows: Rows, program: DecodingProgram):
    """The token that greedy decoding chooses after each lane, and its log-probability."""
    B, L, V = logits_BLV.shape
    lanes = jax.tree.map(lambda leaf: jnp.repeat(leaf, L, axis=0), rows)
    logits_RV, number_R = logits_BLV.reshape(B * L, V), number_BL.reshape(-1)
    allowed_RLV = lanes.allowed(logits_RV[:, None], None, number_R, program)
    found = next_token(logits_RV, allowed_RLV[:, 0], None, lanes.settings)
    return tuple(x_R.reshape(B, L) for x_R in found)


def drafts(text_BM, length_B, number: int, fill: int):
    """The tokens after the last earlier occurrence of each text's last two tokens, `[B, S]`.

    Where the two did not occur before, those after the last token's; where that did not either,
    `fill`. A text that ends too soon for S tokens is taken to repeat itself since then.

    Args:
        text_BM: ids, below 0 where there is no token.
        length_B: number of places of each text; the places after them are not read.
    """
    place_M = jnp.arange(text_BM.shape[1])
    last_B1, before_B1 = (
        jnp.take_along_axis(text_BM, length_B[:, None] - back, axis=1, mode="clip")
        for back in (1, 2)
    )
    is_one_BM = (text_BM == last_B1) & (place_M[None] < length_B[:, None] - 1) & (last_B1 >= 0)
    previous_BM = jnp.pad(text_BM[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    is_two_BM = is_one_BM & (previous_BM == before_B1) & (before_B1 >= 0)
    # Any occurrence of two tokens is preferred to all occurrences of one.
    found_BM = jnp.where(is_two_BM, place_M + len(place_M), jnp.where(is_one_BM, place_M, -1))
    best_B1 = jnp.max(found_BM, axis=1, keepdims=True)
    at_B1 = best_B1 % len(place_M)
    period_B1 = jnp.maximum(length_B[:, None] - 1 - at_B1, 1)
    index_BS = at_B1 + 1 + jnp.arange(number)[None] % period_B1
    draft_BS = jnp.take_along_axis(text_BM, index_BS, axis=1, mode="clip")
    return jnp.where((best_B1 >= 0) & (draft_BS >= 0), draft_BS, fill)
