# SPDX-License-Identifier: Apache-2.0
"""How a row chooses its next token, greedily or by sampling; the log-probabilities kept.

Top-k: Fan et al. 2018 (arXiv:1805.04833); top-p: Holtzman et al. 2020 (arXiv:1904.09751).
Nothing of the size of the vocabulary is sorted. Dims: B batch, L hypotheses of a sentence (1
in `Greedy`), T new tokens, V vocabulary, J candidates, S likeliest tokens that are kept;
C blocks of the vocabulary, X numbers of one
"""

import dataclasses

import jax
import jax.numpy as jnp

from switchx.inference.config import MAX_INT32, DecodingProgram
from switchx.inference.logits_processors import Rows, RowSettings, lengthened

BLOCK = 128  # numbers in a block of the vocabulary
CANDIDATES = 128  # the largest logits of a row, in which most thresholds are found


def next_token(logits_BV, allowed_BV, uniform_B, settings: RowSettings):
    """The chosen token of each row and its log-probability under the model.

    Args:
        logits_BV: float32.
        allowed_BV: these logits, with -inf for tokens that must not be chosen.
        uniform_B: one number in [0, 1) per row to sample with; None takes the likeliest
            token.

    Returns:
        token_B (int32), log_prob_B (from the softmax without temperature or exclusions).
    """
    if uniform_B is None:
        token_B = top_k(allowed_BV, 1)[1][:, 0].astype(jnp.int32)
    else:
        warm_BV = allowed_BV / settings.temperature_B[:, None]
        least_B = least_likely(warm_BV, settings.top_k_B, settings.top_p_B)
        token_B = drawn(warm_BV, least_B, uniform_B)
    # One token's logit: no array of the vocabulary's size is written.
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B, chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)


def top_k(x_BV, k: int):
    """Like `jax.lax.top_k`: values and int32 places, equal values in the order of places.

    The k largest are in the k blocks with the largest maxima, so other blocks are not sorted.
    That saves 7% of a greedy decode step and 10% of one with 4 beams on a CPU, whose sort takes
    a row's numbers one after the other; the code is the same everywhere.
    """
    B, V = x_BV.shape
    num_blocks = V // BLOCK
    if V % BLOCK or num_blocks <= 2 * k:
        return largest(x_BV, k)
    x_BCX = x_BV.reshape(B, num_blocks, BLOCK)
    block_BC = jnp.sort(largest(jnp.max(x_BCX, axis=2), k)[1], axis=1)
    candidate_BCX = jnp.take_along_axis(x_BCX, block_BC[:, :, None], axis=1)
    value_BJ, index_BJ = largest(candidate_BCX.reshape(B, k * BLOCK), k)
    block_BJ = jnp.take_along_axis(block_BC, index_BJ // BLOCK, axis=1)
    return value_BJ, block_BJ * BLOCK + index_BJ % BLOCK


def largest(x_BV, k: int):
    """`jax.lax.top_k`, hidden from the compiler, which would otherwise sort whole rows."""
    # Do not simplify: a slice of the result would be merged with top-k's own, and XLA's CPU
    # compiler then sorts whole rows, 160 ms for 8 of 32,128 instead of 1.
    # One barrier each: a joint one is of a tuple, on which XLA's partitioner, which reads a
    # split top_k's results by element, ends the process.
    return tuple(map(jax.lax.optimization_barrier, jax.lax.top_k(x_BV, k)))


def drawn(logits_BV, least_B, uniform_B):
    """Draws a token for each row from the softmax of its logits that are at least `least_B`.

    It inverts the distribution function at one uniform number per row, to find the block of
    tokens in which it falls, then the token within. float32 sums may assign a share of 1e-7 to
    a neighbour; an excluded token is never drawn.
    """
    B, V = logits_BV.shape
    padding = ((0, 0), (0, -V % BLOCK))
    logits_BV = jnp.pad(logits_BV, padding, constant_values=-jnp.inf)
    weight_BV = _weights(logits_BV, jnp.max(logits_BV, axis=1), least_B)
    weight_BCX = weight_BV.reshape(B, -1, BLOCK)
    sum_BC = jnp.sum(weight_BCX, axis=2)
    end_BC = jnp.cumsum(sum_BC, axis=1)
    point_B = uniform_B * end_BC[:, -1]
    block_B = _place_of(point_B, sum_BC, end_BC)
    weight_BX = jnp.take_along_axis(weight_BCX, block_B[:, None, None], axis=1)[:, 0]
    begin_B = jnp.take_along_axis(jnp.pad(end_BC, ((0, 0), (1, 0))), block_B[:, None], axis=1)
    point_B = point_B - begin_B[:, 0]
    return block_B * BLOCK + _place_of(point_B, weight_BX, jnp.cumsum(weight_BX, axis=1))


def _place_of(point_B, weight_BX, end_BX):
    """The first place with weight that ends behind the point, else the last one with weight.

    Compilers fuse products into sums: the point may lie before its block, or behind it.
    """
    has_weight_BX = weight_BX > 0
    is_behind_BX = has_weight_BX & (end_BX > point_B[:, None])
    last_B = weight_BX.shape[1] - 1 - jnp.argmax(has_weight_BX[:, ::-1], axis=1)
    first_B = jnp.argmax(is_behind_BX, axis=1)
    return jnp.where(jnp.any(is_behind_BX, axis=1), first_B, last_B).astype(jnp.int32)


def least_likely(logits_BV, top_k_B, top_p_B):
    """The threshold of each row: tokens with smaller logits are excluded.

    Top-k applies first, then top-p among the tokens left. A token stays in top-k if fewer than
    k have larger logits, and in top-p if those with larger logits have less than p together:
    the likeliest always stays, whatever p is, and of equal ones all stay or none.
    `transformers` keeps the same tokens, except that of equal ones at the edge of top-p it
    keeps those that its sort puts last.

    Returns:
        least_B: float32; -inf where a row excludes nothing.
    """
    V = logits_BV.shape[1]
    has_k_B, has_p_B = top_k_B < V, top_p_B < 1

    def found(_):
        candidate_BJ = top_k(logits_BV, min(CANDIDATES, V))[0]
        ones_BV, ones_BJ = jnp.ones_like(logits_BV), jnp.ones_like(candidate_BJ)
        target_B = jnp.minimum(top_k_B, V).astype(jnp.float32)
        least_B = _threshold(logits_BV, ones_BV, candidate_BJ, ones_BJ, target_B, has_k_B)
        most_B = candidate_BJ[:, 0]
        weight_BV = _weights(logits_BV, most_B, least_B)
        weight_BJ = _weights(candidate_BJ, most_B, least_B)
        target_B = top_p_B * jnp.sum(weight_BV, axis=1)
        return jnp.maximum(
            least_B,
            _threshold(logits_BV, weight_BV, candidate_BJ, weight_BJ, target_B, has_p_B),
        )

    nothing_B = jnp.full(logits_BV.shape[:1], -jnp.inf)
    return jax.lax.cond(jnp.any(has_k_B | has_p_B), found, lambda _: nothing_B, None)


def _weights(logits_BV, most_B, least_B):
    """Softmax weights, scaled: the largest is 1; those of logits below `least_B` are 0."""
    weight_BV = jnp.exp(logits_BV - most_B[:, None])
    return jnp.where(logits_BV < least_B[:, None], 0.0, weight_BV)


def _threshold(logits_BV, weight_BV, candidate_BJ, weight_BJ, target_B, is_wanted_B):
    """The least number of each row above which weights are less than `target_B`.

    Most rows have it among their largest logits, which are in order. Where these do not reach
    the target, the numbers below them are bisected, one bit of float32 at a time: at most 32
    sums over the vocabulary for the whole batch.

    Args:
        candidate_BJ, weight_BJ: the largest logits, the largest first, and their weights.

    Returns:
        float32; -inf where it is not wanted.
    """
    # For the first of equal logits this is the weight above all of them.
    above_BJ = jnp.cumsum(weight_BJ, axis=1) - weight_BJ
    is_first_BJ = candidate_BJ != jnp.pad(
        candidate_BJ[:, :-1], ((0, 0), (1, 0)), constant_values=jnp.inf
    )
    is_kept_BJ = is_first_BJ & (above_BJ < target_B[:, None])
    kept_BJ = jnp.where(is_kept_BJ, candidate_BJ, candidate_BJ[:, :1])
    is_found_B = jnp.any(is_first_BJ & ~is_kept_BJ, axis=1) | ~is_wanted_B
    least_B = jnp.where(is_wanted_B, jnp.min(kept_BJ, axis=1), -jnp.inf)
    ordered_BV = _ordered(logits_BV)
    low_B = jnp.where(is_found_B, 0, jnp.min(ordered_BV, axis=1))
    high_B = jnp.where(is_found_B, 0, _ordered(jnp.min(kept_BJ, axis=1)))

    def halve(bounds):
        low_B, high_B = bounds
        middle_B = (low_B & high_B) + ((low_B ^ high_B) >> 1)  # a sum of the two would overflow
        above_B = jnp.sum(jnp.where(ordered_BV > middle_B[:, None], weight_BV, 0), axis=1)
        is_enough_B = above_B >= target_B
        return jnp.where(is_enough_B, middle_B + 1, low_B), jnp.where(
            is_enough_B, high_B, middle_B
        )

    low_B, _ = jax.lax.while_loop(
        lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low_B, high_B)
    )
    return jnp.where(is_found_B, least_B, _from_ordered(low_B))


def _ordered(x):
    """Maps float32 to int32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, bits ^ MAX_INT32, bits)


def _from_ordered(ordered):
    bits = jnp.where(ordered < 0, ordered ^ MAX_INT32, ordered)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogProbs:
    """Log-probabilities under the model, before temperature, penalties and bans.

    Attributes:
        chosen_BLT: log-probability of each token of a text.
        likeliest_BLTS, log_prob_BLTS: the S likeliest tokens in each place and their
            log-probabilities, the likeliest first.
    """

    chosen_BLT: jax.Array
    likeliest_BLTS: jax.Array
    log_prob_BLTS: jax.Array

    @classmethod
    def start(cls, batch: int, program: DecodingProgram) -> "LogProbs | None":
        """The log-probabilities of texts without tokens; None where the program keeps none."""
        if program.num_kept is None:
            return None
        shape = batch, program.beam_size, program.max_new_tokens
        zeros_BLTS = jnp.zeros((*shape, program.num_kept))
        return cls(jnp.zeros(shape), zeros_BLTS.astype(jnp.int32), zeros_BLTS)

    def with_places(self, program: DecodingProgram) -> "LogProbs":
        def longer(x):
            x = lengthened(jnp.moveaxis(x, 2, -1), program, 0)
            return jnp.moveaxis(x, -1, 2)

        return jax.tree.map(longer, self)

    def put(self, is_here_BLT, chosen_BL, likeliest: tuple) -> "LogProbs":
        """A copy with one more token of each text.

        Args:
            is_here_BLT: true at the token's place.
            likeliest: the likeliest tokens, as `likeliest_tokens` returns them.
        """
        token_BLS, log_prob_BLS = likeliest
        is_here_BLT1 = is_here_BLT[..., None]
        return LogProbs(
            jnp.where(is_here_BLT, chosen_BL[..., None], self.chosen_BLT),
            jnp.where(is_here_BLT1, token_BLS[:, :, None], self.likeliest_BLTS),
            jnp.where(is_here_BLT1, log_prob_BLS[:, :, None], self.log_prob_BLTS),
        )


def likeliest_tokens(logits_BLV, number: int) -> tuple:
    """The `number` likeliest tokens of each row in order, and their log-probabilities."""
    B, L, V = logits_BLV.shape
    if number == 0:
        return jnp.zeros((B, L, 0), jnp.int32), jnp.zeros((B, L, 0))
    value_RS, token_RS = top_k(logits_BLV.reshape(B * L, V), number)
    log_prob_RS = value_RS - jax.nn.logsumexp(logits_BLV, axis=-1).reshape(-1, 1)
    shape = B, L, number
    return token_RS.reshape(shape).astype(jnp.int32), log_prob_RS.reshape(shape)


def ancestors_seen(ancestor_BLT):
    """`[B, L, T, L]`: each lane sees one lane of each step, the one whose number is given."""
    return ancestor_BLT[..., None] == jnp.arange(ancestor_BLT.shape[1])[None, None, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Greedy:
    """The new tokens of each sentence so far.

    Attributes:
        token_BT: the new tokens; `pad_id` after the end.
        log_prob_B: sum of the tokens' log-probabilities, without forced tokens.
        length_B: number of new tokens, the end included.
        log_probs: log-probabilities of each token; None where they are not kept.
    """

    token_BT: jax.Array
    log_prob_B: jax.Array
    length_B: jax.Array
    log_probs: LogProbs | None

    @classmethod
    def start(cls, batch: int, program: DecodingProgram) -> "Greedy":
        shape = (batch, program.max_new_tokens)
        return cls(
            jnp.full(shape, program.pad_id, jnp.int32),
            jnp.zeros(batch, jnp.float32),
            jnp.zeros(batch, jnp.int32),
            LogProbs.start(batch, program),
        )

    @property
    def num_places(self) -> int:
        """T, which is also the number of places of the ring."""
        return self.token_BT.shape[1]

    def number_B(self, num_steps_B):
        """Number of new tokens after `num_steps_B` steps."""
        return num_steps_B

    def lanes_of(self, position_B):
        """Positions `[B, L]` of the tokens that a step reads, given the first one's."""
        return position_B[:, None]

    def sees_BLTL(self, behind_T):
        """Which lanes of each step in the ring a lane attends to; see `ancestors_seen`."""
        return ancestors_seen(jnp.zeros_like(self.token_BT)[:, None])

    @property
    def number_BTL(self):
        """Number of tokens before each lane in the ring; None where each step is one token."""
        return None

    def begun_at(self, place) -> "Greedy":
        """A copy whose first token is written at another place of the ring."""
        return self

    def with_places(self, program: DecodingProgram) -> "Greedy":
        """A copy with places for `max_new_tokens`."""
        token_BT = lengthened(self.token_BT, program, program.pad_id)
        log_probs = self.log_probs and self.log_probs.with_places(program)
        return dataclasses.replace(self, token_BT=token_BT, log_probs=log_probs)

    def advance(self, logits_BLV, number_B, place, rows: Rows, program: DecodingProgram):
        """Chooses token number `number_B` of every live sentence.

        Args:
            place: number of the ring's place where the chosen tokens will be written.

        Returns:
            the hypotheses, token_BL, is_live_B.
        """
        uniform_B = _uniform_numbers(number_B, rows) if program.is_sampling else None
        allowed_BLV = rows.allowed(logits_BLV, self.token_BT[:, None], number_B, program)
        token_B, log_prob_B = next_token(
            logits_BLV[:, 0], allowed_BLV[:, 0], uniform_B, rows.settings
        )
        token_B = jnp.where(rows.is_live_B, token_B, program.pad_id)
        is_here_BT = jnp.arange(program.max_new_tokens)[None] == number_B[:, None]
        is_here_BT = is_here_BT & rows.is_live_B[:, None]
        log_probs, is_counted_B = self.log_probs, rows.is_live_B
        if log_probs is not None:
            likeliest = likeliest_tokens(logits_BLV, program.num_kept)
            log_probs = log_probs.put(is_here_BT[:, None], log_prob_B[:, None], likeliest)
        if program.has_processors:
            is_counted_B &= rows.forced_B(number_B) < 0
        chosen = Greedy(
            jnp.where(is_here_BT, token_B[:, None], self.token_BT),
            self.log_prob_B + jnp.where(is_counted_B, log_prob_B, 0),
            self.length_B + rows.is_live_B,
            log_probs,
        )
        has_room_B = number_B + 1 < rows.max_new_tokens_B
        is_live_B = rows.is_live_B & ~program.ends(token_B) & has_room_B
        return chosen, token_B[:, None], is_live_B

    def results(self, rows: Rows):
        """The hypotheses of each sentence, the best first: token_BLT, score_BL."""
        length_B = jnp.maximum(self.length_B, 1)
        return self.token_BT[:, None], scores(self.log_prob_B[:, None], length_B, rows)

    @property
    def result_log_probs(self) -> LogProbs | None:
        return self.log_probs

    @property
    def result_lane_BLT(self):
        """The lane that each result's token has at each place of the ring: the only one."""
        return jnp.zeros_like(self.token_BT)[:, None]


def scores(log_prob_BL, length_B, rows: Rows):
    """log p / length ** penalty, kept finite unless log p is NaN: a negative exponent may make
    it huge."""
    divisor_B1 = (length_B.astype(jnp.float32) ** rows.settings.length_penalty_B)[:, None]
    return jnp.maximum(log_prob_BL / divisor_B1, jnp.finfo(jnp.float32).min)


def _uniform_numbers(number_B, rows: Rows):
    """One number in [0, 1) per row, of only the seed, the token's and the sentence's number."""

    def number_of(seed, number, sentence):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), sentence)
        return jax.random.uniform(key)

    return jax.vmap(number_of)(rows.settings.seed_B, number_B, rows.sentence_B)
