# SPDX-License-Identifier: Apache-2.0
"""Decoding of a batch whose rows start and end independently: prefill, insert, compiled steps.

A step runs all beams of a sentence as L tokens side by side, whose keys and values share the
sentence's row of the cache: the prompt's P places, then a ring of T places per beam, in which
all rows write to the same place, the step number modulo T. A write is thus one contiguous
update, and a place lies equally far behind in all rows. Only the step in which a row began
differs between rows; masks, positions and samples depend on it. A mask (a beam's ancestors)
says whose places a beam may see, so beams are never moved or copied. Drafts (prompt_lookup.py)
are read beside the newest token, as beams are; rows then have positions of their own, since
they advance by different numbers of tokens. Iteration-level scheduling is Yu et al.'s (Orca,
OSDI 2022). Pruning has two levels (Kim et al. 2022, arXiv:2211.10017, section 3.5): finished
sentences take part in no Switch layer, and the loop ends as soon as the unfinished ones fit the
next smaller batch.
Dims: B batch, L lanes (beams, or the newest token and its drafts), M places that attention
reads, P prompt, T new tokens, H heads, K head size, D model, V vocabulary
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from switchx import tree
from switchx.axes import dims_of
from switchx.inference.beam_search import Beams
from switchx.inference.chunked_prefill import chunk_size, read_in_chunks
from switchx.inference.config import DecodingProgram
from switchx.inference.logits_processors import Rows
from switchx.inference.prompt_lookup import Drafted
from switchx.inference.read_routing import ReadRouting, prompt_numbers, with_numbers
from switchx.inference.sampling import Greedy
from switchx.models.block import BlockCache, BlockInputs
from switchx.models.config import ModelConfig
from switchx.models.params import bind
from switchx.partitioning.constrain import constrain, constrain_named


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoding:
    """The state of a batch between two decode steps.

    Attributes:
        cache: the decoder's KV cache: the prompt without its last token, then the ring.
        step: number of decode steps of the batch so far; the next one writes at the ring's
            place `step % T`.
        begin_B: number of the step in which each sentence began, with its prompt's last token.
        token_BL: the newest tokens, not yet in the cache.
        rows: settings of each row, and whether it is still being decoded.
        hypotheses: `Greedy`, `Beams` or `Drafted`.
        is_prompt_BP: which places of the prompt a step reads: all of the text but its last
            token, which is in the ring. P is 0 where prompts are one token.
        is_source_BM: which places of the encoder's output are text; None without an encoder.
        routing: `ReadRouting` if the program `is_recorded`; else None.
    """

    cache: tuple[BlockCache, ...]
    step: jax.Array
    begin_B: jax.Array
    token_BL: jax.Array
    rows: Rows
    hypotheses: Any
    is_prompt_BP: jax.Array
    is_source_BM: jax.Array | None
    routing: ReadRouting | None = None

    @property
    def num_steps_B(self) -> jax.Array:
        """Number of steps since each sentence began."""
        return self.step - self.begin_B


@functools.partial(jax.jit, static_argnames=("config", "decoding"))
def prefill(
    config: ModelConfig,
    decoding: DecodingProgram,
    params,
    *,
    prompt_BP,
    is_prompt_BP,
    rows: Rows,
    source_BM=None,
    is_source_BM=None,
) -> Decoding:
    """Reads sources and prompts; the first decode step reads each prompt's last token.

    Args:
        prompt_BP, is_prompt_BP: the prompts of a decoder-only model, padded on the left; for
            others the start token, `[B, 1]`.
        source_BM, is_source_BM: the encoder's inputs, padded on the right.
    """
    model = bind(config, params)
    B = prompt_BP.shape[0]
    P = 0 if prompt_BP.shape[1] == 1 else prompt_BP.shape[1]
    L, T = decoding.num_lanes, decoding.max_new_tokens
    if decoding.has_processors:
        rows = dataclasses.replace(rows, read_BP=jnp.where(is_prompt_BP, prompt_BP, -1))
    memory_BMD = source_stats = prompt_routing = None
    if source_BM is not None:
        position_BM = jnp.broadcast_to(jnp.arange(source_BM.shape[1]), source_BM.shape)
        segment_BM = is_source_BM.astype(jnp.int32)
        memory_BMD, source_stats = model.encode(source_BM, segment_BM, position_BM)
    cache = model.decoder.new_cache(B, P + T * L, memory_BMD)
    if P:
        position_BP = jnp.maximum(jnp.cumsum(is_prompt_BP, axis=1) - 1, 0)
        is_bidirectional = decoding.is_prompt_bidirectional
        if decoding.is_recorded:
            prompt_routing = prompt_numbers(config, B, P)
        cache, prompt_routing = read_in_chunks(
            model,
            (prompt_BP, position_BP, is_prompt_BP),
            cache,
            prompt_routing,
            with_numbers,
            size=chunk_size(config, params, P, is_bidirectional=is_bidirectional),
            is_routed_BP=is_prompt_BP & rows.is_live_B[:, None],
            is_bidirectional=is_bidirectional,
        )
    token_BL = jnp.broadcast_to(prompt_BP[:, -1:], (B, L))
    if decoding.num_drafts:
        texts = (source_BM, is_source_BM), (prompt_BP, is_prompt_BP)
        hypotheses = Drafted.of_texts(texts, decoding)
        token_BL = hypotheses.with_drafts(prompt_BP[:, -1])
    else:
        hypotheses = (Beams if L > 1 else Greedy).start(B, decoding)
    routing = None
    if decoding.is_recorded:
        routing = ReadRouting.start(config, decoding, B, source_stats, prompt_routing)
    return constrain_named(
        Decoding(
            cache,
            step=jnp.int32(0),
            begin_B=jnp.zeros(B, jnp.int32),
            token_BL=token_BL,
            rows=rows,
            hypotheses=hypotheses,
            is_prompt_BP=is_prompt_BP[:, :P] & (jnp.arange(P) < P - 1)[None],
            is_source_BM=is_source_BM,
            routing=routing,
        )
    )


@functools.partial(jax.jit, static_argnames=("config", "decoding"), donate_argnames="state")
def run_until(
    config: ModelConfig,
    decoding: DecodingProgram,
    params,
    state: Decoding,
    num_live,
    last_step,
) -> Decoding:
    """Steps until at most `num_live` sentences are live, or until step `last_step`."""
    model = bind(config, params)
    positions = position_terms(model, decoding, state.is_prompt_BP.shape[1])

    return jax.lax.while_loop(
        lambda state: goes_on(state, num_live, last_step),
        lambda state: _advance(model, decoding, state, positions),
        state,
    )


def run_until_by(run, config: ModelConfig, decoding, params, state, num_live, last_step):
    """`run_until` with its loop on the host; `run` executes one step's program."""
    while goes_on(state, num_live, last_step):
        state = run(run_step, config, decoding, params=params, state=state)
    return state


def goes_on(state: Decoding, num_live, last_step):
    """Whether `run_until` takes another step."""
    return (jnp.sum(state.rows.is_live_B) > num_live) & (state.step < last_step)


@functools.partial(jax.jit, static_argnames=("config", "decoding"))
def run_step(config: ModelConfig, decoding: DecodingProgram, params, state: Decoding):
    """One step, for a loop that runs elsewhere."""
    model = bind(config, params)
    positions = position_terms(model, decoding, state.is_prompt_BP.shape[1])
    return _advance(model, decoding, state, positions)


def _advance(model, decoding: DecodingProgram, state: Decoding, positions: tuple) -> Decoding:
    logits_BLV, stats, cache = step_logits(model, decoding, state, positions)
    place = (state.step + 1) % decoding.max_new_tokens  # of the tokens that are chosen now
    number_B = state.hypotheses.number_B(state.num_steps_B)
    routing = state.routing
    if routing is not None:
        read = state.step % decoding.max_new_tokens
        routing = routing.with_step(stats, read, state.rows.is_live_B)
    hypotheses, token_BL, is_live_B = state.hypotheses.advance(
        logits_BLV, number_B, place, state.rows, decoding
    )
    return constrain_named(
        dataclasses.replace(
            state,
            cache=cache,
            step=state.step + 1,
            token_BL=token_BL,
            rows=dataclasses.replace(state.rows, is_live_B=is_live_B),
            hypotheses=hypotheses,
            routing=routing,
        )
    )


def step_logits(model, decoding: DecodingProgram, state: Decoding, positions: tuple):
    """Logits `[B, L, V]` after the newest tokens, their `RoutingStats`, and the cache.

    Args:
        positions: the terms that `position_terms` returns.
    """
    B, P = state.is_prompt_BP.shape
    L, T = decoding.num_lanes, decoding.max_new_tokens
    place, num_steps_B = state.step % T, state.num_steps_B
    behind_T = (place - jnp.arange(T)) % T
    is_past_BT = behind_T[None] <= num_steps_B[:, None]
    sees_BLTL = state.hypotheses.sees_BLTL(behind_T)
    is_seen_BLM = (sees_BLTL & is_past_BT[:, None, :, None]).reshape(B, L, T * L)
    is_prompt_BLP = jnp.broadcast_to(state.is_prompt_BP[:, None], (B, L, P))
    is_live_B1 = jnp.ones((B, 1), bool)
    if decoding.is_pruning:
        is_live_B1 = state.rows.is_live_B[:, None]
    # The prompt's last token is in the ring: it is at the position after those of the others.
    number_B = state.hypotheses.number_B(num_steps_B)
    position_B = jnp.sum(state.is_prompt_BP, axis=1) + number_B
    position_BL = state.hypotheses.lanes_of(position_B)
    if state.hypotheses.number_BTL is None:
        bias_HLM, row_bias_BHLM = _biases_of_step(positions, state, behind_T, L)
    else:
        bias_HLM, row_bias_BHLM = None, _biases_of_rows(positions, state, position_BL)
    is_source_BM = state.is_source_BM
    inputs = BlockInputs(
        is_token_BL=jnp.broadcast_to(is_live_B1, (B, L)),
        mask_BLM=jnp.concatenate([is_prompt_BLP, is_seen_BLM], axis=2),
        bias_HLM=bias_HLM,
        memory_mask_BLM=None if is_source_BM is None else is_source_BM[:, None],
        token_BL=state.token_BL,
        row_bias_BHLM=row_bias_BHLM,
        rotation=model.decoder.rotation(position_BL),
        cache_index=P + place * L,
    )
    x_BLD = constrain(model.embedding.embed(state.token_BL, position_BL), "BLD")
    x_BLD, stats, cache = model.decoder.extend(x_BLD, inputs, state.cache)
    logits_BLV = constrain(model.embedding.logits(x_BLD), "BLV")
    return logits_BLV.astype(jnp.float32), stats, cache  # as `score` has them


def position_terms(model, decoding: DecodingProgram, prompt_length: int) -> tuple:
    """Terms that the model's positions add to scores: those that all steps share.

    Returns:
        The relative bias `[H, N]` of a key that is N - 1 - n behind the query, N places in
        all, or None; and TUPE's projected positions, or None.
    """
    num_places = prompt_length + decoding.max_new_tokens
    bias_HLM = model.decoder.position_bias(1, num_places, first_query=num_places - 1)
    untied = None
    if model.decoder.config.has_untied_positions:
        # A padded prompt has more places than the text has positions.
        untied = model.decoder.untied_positions.projected(num_places)
    return None if bias_HLM is None else bias_HLM[:, 0], untied


def _biases_of_step(positions: tuple, state: Decoding, behind_T, L: int) -> tuple:
    """Terms that positions add to a step's scores: `bias_HLM` of all rows, and each row's own.

    A place of the ring is equally far behind in every row; for a prompt's place, rows differ.

    Args:
        behind_T: number of steps since each place of the ring was written.
    """
    bias_HN, untied = positions
    P, T = state.is_prompt_BP.shape[1], behind_T.shape[0]
    bias_HLM, own_BHM = None, []
    if bias_HN is not None:
        N = bias_HN.shape[1]
        new_HM = jnp.repeat(jnp.take(bias_HN, N - 1 - behind_T, axis=1), L, axis=1)
        bias_HLM = jnp.pad(new_HM, ((0, 0), (P, 0)))[:, None]
        if P:
            # A row's ring goes on from the prompt's last place.
            behind_BP = P - 1 + state.num_steps_B[:, None] - jnp.arange(P)[None]
            old_HBP = jnp.take(bias_HN, jnp.maximum(N - 1 - behind_BP, 0), axis=1)
            old_BHP = jnp.moveaxis(old_HBP, 0, 1)
            own_BHM.append(jnp.pad(old_BHP, ((0, 0), (0, 0), (0, T * L))))
    if untied is not None:
        before_B = jnp.sum(state.is_prompt_BP, axis=1)
        position_B = before_B + state.num_steps_B
        new_BM = jnp.repeat(position_B[:, None] - behind_T[None], L, axis=1)
        own_BHM.append(_untied_bias(untied, position_B, _position_BM(P, before_B, new_BM)))
    return bias_HLM, sum(own_BHM)[:, :, None] if own_BHM else None


def _biases_of_rows(positions: tuple, state: Decoding, position_BL):
    """`row_bias_BHLM` of a step that reads tokens at these positions, where rows have positions
    of their own in the ring, too."""
    bias_HN, untied = positions
    (B, P), before_B = state.is_prompt_BP.shape, jnp.sum(state.is_prompt_BP, axis=1)
    new_BM = before_B[:, None] + state.hypotheses.number_BTL.reshape(B, -1)
    position_BM, terms = _position_BM(P, before_B, new_BM), []
    if bias_HN is not None:
        # Places that are not attended to may have any number.
        behind_BLM = position_BL[:, :, None] - position_BM[:, None]
        bias_HBLM = jnp.take(bias_HN, bias_HN.shape[1] - 1 - behind_BLM, axis=1, mode="clip")
        terms.append(jnp.moveaxis(bias_HBLM, 0, 1))
    if untied is not None:
        of_lanes = jax.vmap(_untied_bias, in_axes=(None, 1, None), out_axes=2)
        terms.append(of_lanes(untied, position_BL, position_BM))
    return sum(terms) if terms else None


def _position_BM(P: int, before_B, new_BM):
    """Positions of the prompt's places, then those of the ring's, `new_BM`: a text begins where
    its left padding ends, and its last token is in the ring."""
    old_BP = jnp.arange(P)[None] - (P - 1 - before_B)[:, None]
    return jnp.maximum(jnp.concatenate([old_BP, new_BM], axis=1), 0)


def _untied_bias(untied, position_B, position_BM):
    """The terms that TUPE's positions of queries and places add to scores, `[B, H, M]`."""
    query_MHK, key_MHK = untied
    query_BHK = jnp.take(query_MHK, position_B, axis=0, mode="clip")
    score_BHM = jnp.einsum(
        "BHK,MHK->BHM", query_BHK, key_MHK, preferred_element_type=jnp.float32
    )
    return jnp.take_along_axis(score_BHM, position_BM[:, None], axis=2, mode="clip")


@jax.jit
def take_rows(state: Decoding, row_B) -> Decoding:
    """The batch with these rows only."""

    def take(name, leaf):
        dims = _dims(name, leaf)
        return jnp.take(leaf, row_B, axis=dims.index("B")) if "B" in dims else leaf

    return constrain_named(tree.map_named(take, state))


def insert(state: Decoding, fresh: Decoding, row_B) -> Decoding:
    """Replaces rows of the batch by the rows of another one, which was just prefilled.

    Args:
        fresh: the other batch, with as many places for prompts, sources and new tokens.
        row_B: the row of `state` that each row of `fresh` replaces, all different; a row whose
            number is at least B of `state` is left out.
    """
    P, T = state.is_prompt_BP.shape[1], state.hypotheses.num_places
    fresh = dataclasses.replace(
        fresh,
        begin_B=fresh.begin_B + state.step,
        hypotheses=fresh.hypotheses.begun_at(state.step % T),
    )

    def put(name, leaf, new):
        if "B" not in (dims := _dims(name, leaf)):
            return leaf
        if "/past/" in name:
            # The ring's places are not read before the row has written them.
            new = jax.lax.slice_in_dim(new, 0, P, axis=dims.index("M"))
        places = [slice(size) for size in new.shape]
        places[dims.index("B")] = row_B
        return leaf.at[tuple(places)].set(new, mode="drop")

    return constrain_named(tree.map_named(put, state, fresh))


def enlarged(
    decoding: DecodingProgram, prompt: int, source: int | None, batch: Decoding
) -> Decoding:
    """The batch with more places for prompts, sources and new tokens.

    Args:
        decoding: the program with the new `max_new_tokens`, a multiple of the old one: copies
            of the ring are laid end to end, so that each token of the last T steps is at its
            new place, too.
        prompt, source: the new P, and the new M of the encoder.
    """
    P, T = batch.is_prompt_BP.shape[1], batch.hypotheses.num_places

    def longer(leaf, axis: int, before: int, after: int, fill=0):
        widths = [(0, 0)] * leaf.ndim
        widths[axis] = before, after
        return jnp.pad(leaf, widths, constant_values=fill)

    def enlarge(name, leaf):
        dims = _dims(name, leaf)
        if "/memory/" in name or name in ("is_source_BM", "routing/source_NBMS"):
            axis = dims.index("M")
            return longer(leaf, axis, 0, source - leaf.shape[axis])
        if name in ("is_prompt_BP", "routing/prompt_NBPS"):
            return longer(leaf, dims.index("P"), prompt - P, 0)
        if name == "routing/step_NBTLS":
            return jnp.concatenate([leaf] * (decoding.max_new_tokens // T), axis=2)
        if name == "rows/read_BP":
            return longer(leaf, 1, max(prompt, 1) - leaf.shape[1], 0, -1)
        if name == "hypotheses/read_BM":
            return longer(leaf, 1, (source or 0) + max(prompt, 1) - leaf.shape[1], 0, -1)
        if name == "rows/settings/forced_BT":
            # Without processors it has no places.
            return longer(leaf, 1, 0, decoding.max_new_tokens - T if leaf.shape[1] else 0, -1)
        if "/past/" in name:
            axis = dims.index("M")
            old, ring = jnp.split(leaf, [P], axis=axis)
            ring = jnp.concatenate([ring] * (decoding.max_new_tokens // T), axis=axis)
            return jnp.concatenate([longer(old, axis, prompt - P, 0), ring], axis=axis)
        return leaf

    batch = tree.map_named(enlarge, batch)
    texts = batch.hypotheses.with_places(decoding)
    return constrain_named(dataclasses.replace(batch, hypotheses=texts))


def _dims(name: str, leaf) -> str:
    return dims_of(name.rsplit("/", 1)[-1], leaf.ndim)
