# SPDX-License-Identifier: Apache-2.0
"""Beam search with the rules of Hugging Face's `generate`: the same tokens, the same scores.

Graves 2012 (arXiv:1211.3711); Wu et al. 2016 (arXiv:1609.08144), section 7, for length
penalties. For each sentence 2 L continuations are considered, so that L remain when L of them
end, and L more for each further token that ends a text. Each search stops by itself, whatever
the rest of its batch does. Dims: B batch, L beams, T new tokens, V vocabulary, J candidates;
C blocks of the vocabulary, X numbers of one
"""

import dataclasses

import jax
import jax.numpy as jnp

from switchx.inference.config import DecodingProgram
from switchx.inference.logits_processors import EARLY_STOPPING, Rows, lengthened
from switchx.inference.sampling import (
    BLOCK,
    Greedy,
    LogProbs,
    ancestors_seen,
    largest,
    likeliest_tokens,
    scores,
    top_k,
)

NEVER = -jnp.inf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beams:
    """The beams of a batch: for each sentence L running hypotheses and the L best finished
    ones.

    Attributes:
        token_BLT, log_prob_BL: tokens and log-probabilities of the running hypotheses; `pad_id`
            after the last token.
        ancestor_BLT: number of the beam that held a hypothesis' ancestor at each place of the
            ring.
        finished_BLT, score_BL, is_finished_BL: tokens and scores of the finished hypotheses,
            the best first, and whether each place holds one.
        log_probs, finished_log_probs: log-probabilities of the running and the finished
            hypotheses' tokens; None where they are not kept.
        finished_ancestor_BLT: `ancestor_BLT` of the finished hypotheses where the program
            `is_recorded`; else None.
    """

    token_BLT: jax.Array
    log_prob_BL: jax.Array
    ancestor_BLT: jax.Array
    finished_BLT: jax.Array
    score_BL: jax.Array
    is_finished_BL: jax.Array
    log_probs: LogProbs | None
    finished_log_probs: LogProbs | None
    finished_ancestor_BLT: jax.Array | None = None

    @classmethod
    def start(cls, batch: int, program: DecodingProgram) -> "Beams":
        L, T = program.beam_size, program.max_new_tokens
        pads_BLT = jnp.full((batch, L, T), program.pad_id, jnp.int32)
        # All beams begin with the same prompt: only the first may be continued.
        first_L = jnp.where(jnp.arange(L) == 0, 0.0, NEVER)
        return cls(
            pads_BLT,
            jnp.broadcast_to(first_L, (batch, L)),
            jnp.zeros((batch, L, T), jnp.int32).at[:, :, 0].set(jnp.arange(L)[None]),
            pads_BLT,
            jnp.full((batch, L), NEVER),
            jnp.zeros((batch, L), bool),
            LogProbs.start(batch, program),
            LogProbs.start(batch, program),
            jnp.zeros((batch, L, T), jnp.int32) if program.is_recorded else None,
        )

    @property
    def num_places(self) -> int:
        """T, which is also the number of places of the ring."""
        return self.ancestor_BLT.shape[2]

    # Each step decodes one token, as in `Greedy`.
    number_B = Greedy.number_B
    number_BTL = Greedy.number_BTL

    def lanes_of(self, position_B):
        """Positions `[B, L]` of the tokens that a step reads, the same for all of a row."""
        return jnp.broadcast_to(position_B[:, None], self.log_prob_BL.shape)

    def sees_BLTL(self, behind_T):
        """Which lanes of each step in the ring a lane attends to; see `ancestors_seen`."""
        return ancestors_seen(self.ancestor_BLT)

    def begun_at(self, place) -> "Beams":
        """A copy whose first token is written at another place of the ring."""
        ancestor_BLT = jnp.roll(self.ancestor_BLT, place, axis=2)
        return dataclasses.replace(self, ancestor_BLT=ancestor_BLT)

    def with_places(self, program: DecodingProgram) -> "Beams":
        """A copy with places for `max_new_tokens`; copies of the ring are laid end to end."""
        times = program.max_new_tokens // self.num_places
        running, finished = self.log_probs, self.finished_log_probs
        ancestor_BLT, finished_ancestor_BLT = jax.tree.map(
            lambda ring_BLT: jnp.concatenate([ring_BLT] * times, axis=2),
            (self.ancestor_BLT, self.finished_ancestor_BLT),
        )
        return dataclasses.replace(
            self,
            token_BLT=lengthened(self.token_BLT, program, program.pad_id),
            ancestor_BLT=ancestor_BLT,
            finished_ancestor_BLT=finished_ancestor_BLT,
            finished_BLT=lengthened(self.finished_BLT, program, program.pad_id),
            log_probs=running and running.with_places(program),
            finished_log_probs=finished and finished.with_places(program),
        )

    def advance(self, logits_BLV, number_B, place, rows: Rows, program: DecodingProgram):
        """Chooses token number `number_B` of every beam.

        Args:
            place: number of the ring's place where the chosen tokens will be written.

        Returns:
            the hypotheses, token_BL, is_live_B.
        """
        B, L, V = logits_BLV.shape
        if program.has_processors or self.log_probs is not None:
            model_BLV = jax.nn.log_softmax(logits_BLV, axis=-1)
            log_prob_BLV = rows.allowed(model_BLV, self.token_BLT, number_B, program)
            log_prob_BLV = self.log_prob_BL[..., None] + log_prob_BLV
            num = program.num_candidates
            log_prob_BJ, place_BJ = top_k(log_prob_BLV.reshape(B, L * V), num)
            parent_BJ, token_BJ = place_BJ // V, place_BJ % V
        else:
            allowed_BLV = rows.allowed(logits_BLV, self.token_BLT, number_B, program)
            log_prob_BJ, parent_BJ, token_BJ = continuations(
                logits_BLV, allowed_BLV, self.log_prob_BL, program.num_candidates
            )
        is_here_BT = jnp.arange(program.max_new_tokens)[None] == number_B[:, None]
        text_BJT = _of(self.token_BLT, parent_BJ)
        text_BJT = jnp.where(is_here_BT[:, None], token_BJ[..., None], text_BJT)
        log_probs = self.log_probs
        if log_probs is not None:
            chosen_BJ = jnp.take_along_axis(model_BLV.reshape(B, L * V), place_BJ, axis=1)
            likeliest = _of(likeliest_tokens(model_BLV, program.num_kept), parent_BJ)
            log_probs = _of(log_probs, parent_BJ).put(is_here_BT[:, None], chosen_BJ, likeliest)
        length_B = number_B + 1
        ends_BJ = program.ends(token_BJ) | (length_B >= rows.max_new_tokens_B)[:, None]

        ancestor_BJT = None
        if self.finished_ancestor_BLT is not None:
            ancestor_BJT = _of(self.ancestor_BLT, parent_BJ)
        texts = text_BJT, log_probs, ancestor_BJT
        finished = self._with_finished(texts, log_prob_BJ, ends_BJ, length_B, rows, program)
        going_BJ = jnp.where(ends_BJ, NEVER, log_prob_BJ)
        log_prob_BL, chosen_BL = jax.lax.top_k(going_BJ, L)
        parent_BL = jnp.take_along_axis(parent_BJ, chosen_BL, axis=1)
        own_1L = jnp.arange(L)[None]
        ancestor_BLT = _of(self.ancestor_BLT, parent_BL).at[:, :, place].set(own_1L)
        beams = dataclasses.replace(
            finished,
            token_BLT=_of(text_BJT, chosen_BL),
            log_prob_BL=log_prob_BL,
            ancestor_BLT=ancestor_BLT,
            log_probs=_of(log_probs, chosen_BL),
        )
        is_live_B = rows.is_live_B & beams._can_improve(length_B, rows, program)
        return beams, jnp.take_along_axis(token_BJ, chosen_BL, axis=1), is_live_B

    def _with_finished(self, texts, log_prob_BJ, ends_BJ, length_B, rows: Rows, program):
        """Adds the candidates among the first L that end and are good enough."""
        L = program.beam_size
        is_first_1J = jnp.arange(program.num_candidates)[None] < L
        is_new_BJ = ends_BJ & is_first_1J & rows.is_live_B[:, None]
        is_new_BJ &= log_prob_BJ > NEVER
        score_BJ = jnp.where(is_new_BJ, scores(log_prob_BJ, length_B, rows), NEVER)
        score_BL, best_BL = jax.lax.top_k(jnp.concatenate([self.score_BL, score_BJ], 1), L)
        all_texts = jax.tree.map(
            lambda *both: jnp.concatenate(both, axis=1),
            (self.finished_BLT, self.finished_log_probs, self.finished_ancestor_BLT),
            texts,
        )
        finished_BLT, log_probs, ancestor_BLT = _of(all_texts, best_BL)
        all_finished = jnp.concatenate([self.is_finished_BL, is_new_BJ], axis=1)
        return dataclasses.replace(
            self,
            finished_BLT=finished_BLT,
            score_BL=score_BL,
            is_finished_BL=jnp.take_along_axis(all_finished, best_BL, axis=1),
            finished_log_probs=log_probs,
            finished_ancestor_BLT=ancestor_BLT,
        )

    def _can_improve(self, length_B, rows: Rows, program: DecodingProgram):
        """Whether each sentence's search goes on after `length_B` new tokens."""
        settings, log_prob_BL = rows.settings, self.log_prob_BL[:, :1]
        rule_B = settings.early_stopping_B
        is_looking_ahead_B = rule_B == EARLY_STOPPING.index("never")
        is_looking_ahead_B &= settings.length_penalty_B > 0
        most_B = jnp.where(is_looking_ahead_B, rows.max_new_tokens_B, length_B)
        best_BL = jnp.where(log_prob_BL > NEVER, scores(log_prob_BL, most_B, rows), NEVER)
        # Until all beams are finished, the last score is NEVER.
        goes_on_B = best_BL[:, 0] > self.score_BL[:, -1]
        are_enough_B = (rule_B == EARLY_STOPPING.index(True)) & self.is_finished_BL[:, -1]
        return goes_on_B & ~are_enough_B & (length_B < rows.max_new_tokens_B)

    def results(self, rows: Rows):
        """The hypotheses of each sentence, the best first: token_BLT, score_BL."""
        return self.finished_BLT, self.score_BL

    @property
    def result_log_probs(self) -> LogProbs | None:
        return self.finished_log_probs

    @property
    def result_lane_BLT(self):
        """The lane that each result's token has at each place of the ring."""
        return self.finished_ancestor_BLT


def continuations(logits_BLV, allowed_BLV, log_prob_BL, num: int):
    """Returns the `num` likeliest of all texts that are one token longer, the best first.

    Log-probabilities are computed only for candidates, the tokens in the blocks of the
    vocabulary with the largest logits: no array of the size of the logits is written.

    Args:
        allowed_BLV: the logits, with -inf for tokens that must not be chosen.
        log_prob_BL: log-probabilities of the texts so far.

    Returns:
        log_prob_BJ, parent_BJ (the beam that each continues), token_BJ.
    """
    B, L, V = logits_BLV.shape
    most_BL = jnp.max(logits_BLV, axis=-1)
    sum_BL = jnp.log(jnp.sum(jnp.exp(logits_BLV - most_BL[..., None]), axis=-1))

    def longer(x, log_prob, most, log_sum):
        return log_prob[..., None] + ((x - most[..., None]) - log_sum[..., None])

    X = BLOCK if V % BLOCK == 0 and 2 * num < L * V // BLOCK else 1
    x_BLCX = allowed_BLV.reshape(B, L, V // X, X)
    terms_BL = log_prob_BL, most_BL, sum_BL
    # A text's probability grows with the logit: a block's maximum is its likeliest token's.
    best_BLC = longer(jnp.max(x_BLCX, axis=3), *terms_BL)
    block_BJ = jnp.sort(largest(best_BLC.reshape(B, -1), num)[1], axis=1)
    beam_BJ, column_BJ = block_BJ // (V // X), block_BJ % (V // X)
    x_BJX = x_BLCX[jnp.arange(B)[:, None], beam_BJ, column_BJ]
    terms_BJ = (jnp.take_along_axis(each_BL, beam_BJ, axis=1) for each_BL in terms_BL)
    log_prob_BJ, index_BJ = largest(longer(x_BJX, *terms_BJ).reshape(B, -1), num)

    def of(x_BJ):
        return jnp.take_along_axis(x_BJ, index_BJ // X, axis=1)

    return log_prob_BJ, of(beam_BJ), of(column_BJ) * X + index_BJ % X


def _of(arrays, index_BJ):
    """Takes the beams with the given indices from each array `[B, L, ...]`."""

    def take(x):
        index = index_BJ.reshape(*index_BJ.shape, *(1,) * (x.ndim - 2))
        return jnp.take_along_axis(x, index, axis=1)

    return jax.tree.map(take, arrays)
