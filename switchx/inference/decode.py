# SPDX-License-Identifier: Apache-2.0
"""Decoding of one batch: prefill, then a compiled loop of steps until few are unfinished.

A step runs all beams of a sentence as L tokens side by side, whose keys and values share the
sentence's row of the cache: the prompt's P places, then a place for every beam at every step.
Which of them a beam may see is a mask (its ancestors), so beams are never moved or copied.
Pruning has two levels (Kim et al. 2022, arXiv:2211.10017, section 3.5): finished sentences take
part in no Switch layer, and the loop ends as soon as the unfinished ones fit the next smaller
batch.
Dims: B batch, L beams, M places that attention reads, P prompt, T new tokens, H heads,
K head size, D model, V vocabulary
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from switchx import tree
from switchx.axes import dims_of
from switchx.inference.beam_search import Beams
from switchx.inference.config import DecodingProgram
from switchx.inference.sampling import Greedy, Rows
from switchx.models.block import BlockCache, BlockInputs
from switchx.models.config import ModelConfig
from switchx.models.params import bind
from switchx.partitioning.constrain import constrain, constrain_named


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoding:
    """The state of a batch between two steps.

    Attributes:
        cache: of the decoder.
        step: new tokens so far.
        token_BL: the newest ones, not yet in the cache.
        hypotheses: `Greedy` or `Beams`.
        is_prompt_BP: which places of the prompt are text: it ends at the last place.
        is_source_BM: which of the encoder's output is text; None without an encoder.
    """

    cache: tuple[BlockCache, ...]
    step: jax.Array
    token_BL: jax.Array
    rows: Rows
    hypotheses: Any
    is_prompt_BP: jax.Array
    is_source_BM: jax.Array | None


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
    """Reads sources and prompts, and chooses the first token of every sentence.

    Args:
        prompt_BP, is_prompt_BP: what a decoder-only model goes on from, padded on the left;
            for others the start token, `[B, 1]`.
        source_BM, is_source_BM: what the encoder reads, padded on the right.
    """
    model = bind(config, params)
    B, P = prompt_BP.shape
    L, T = decoding.beam_size, decoding.max_new_tokens
    memory_BMD = None
    if source_BM is not None:
        position_BM = jnp.broadcast_to(jnp.arange(source_BM.shape[1]), source_BM.shape)
        memory_BMD, _ = model.encode(source_BM, is_source_BM.astype(jnp.int32), position_BM)
    cache = model.decoder.new_cache(B, P + T * L, memory_BMD)
    sees_PP = jnp.tril(jnp.ones((P, P), bool))
    if decoding.is_prompt_bidirectional:
        sees_PP = jnp.ones((P, P), bool)
    position_BP = jnp.maximum(jnp.cumsum(is_prompt_BP, axis=1) - 1, 0)
    inputs = BlockInputs(
        is_token_BL=is_prompt_BP & rows.is_live_B[:, None],
        mask_BLM=sees_PP[None] & is_prompt_BP[:, None],
        bias_HLM=model.decoder.position_bias(P, P),
        memory_mask_BLM=None if is_source_BM is None else is_source_BM[:, None],
        token_BL=prompt_BP,
        row_bias_BHLM=model.decoder.row_bias(position_BP, position_BP),
        place=jnp.int32(0),
    )
    x_BPD, cache = _extend(model, cache, prompt_BP, position_BP, inputs)
    start = (Beams if L > 1 else Greedy).start(B, decoding)
    # Of the last place alone: those of all would be the largest array of all.
    logits_B1V = _logits(model, x_BPD[:, -1:])
    logits_BLV = jnp.broadcast_to(logits_B1V, (B, L, logits_B1V.shape[-1]))
    hypotheses, token_BL, is_live_B = start.advance(logits_BLV, jnp.int32(0), rows, decoding)
    rows = dataclasses.replace(rows, is_live_B=is_live_B)
    return constrain_named(
        Decoding(cache, jnp.int32(1), token_BL, rows, hypotheses, is_prompt_BP, is_source_BM)
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
    """Steps until no more than `num_live` sentences live, or until `last_step` new tokens."""
    model = bind(config, params)
    positions = position_terms(model, decoding, state.is_prompt_BP.shape[1])

    return jax.lax.while_loop(
        lambda state: goes_on(state, num_live, last_step),
        lambda state: _advance(model, decoding, state, positions),
        state,
    )


def run_until_by(run, config: ModelConfig, decoding, params, state, num_live, last_step):
    """`run_until`, its loop on the host; `run` runs each step's program."""
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
    logits_BLV, cache = step_logits(model, decoding, state, positions)
    hypotheses, token_BL, is_live_B = state.hypotheses.advance(
        logits_BLV, state.step, state.rows, decoding
    )
    return constrain_named(
        dataclasses.replace(
            state,
            cache=cache,
            step=state.step + 1,
            token_BL=token_BL,
            rows=dataclasses.replace(state.rows, is_live_B=is_live_B),
            hypotheses=hypotheses,
        )
    )


def step_logits(model, decoding: DecodingProgram, state: Decoding, positions: tuple):
    """Logits `[B, L, V]` after the newest tokens, and the cache with them.

    Args:
        positions: of `position_terms`.
    """
    B, P = state.is_prompt_BP.shape
    L, T = decoding.beam_size, decoding.max_new_tokens
    step = state.step - 1  # the newest tokens' number
    is_past_T = jnp.arange(T) <= step
    ancestor_BLT = state.hypotheses.ancestor_BLT
    is_place_BLTL = ancestor_BLT[..., None] == jnp.arange(L)[None, None, None]
    is_ancestor_BLTL = is_place_BLTL & is_past_T[None, None, :, None]
    is_ancestor_BLM = is_ancestor_BLTL.reshape(B, L, T * L)
    is_prompt_BLP = jnp.broadcast_to(state.is_prompt_BP[:, None], (B, L, P))
    is_live_B1 = jnp.ones((B, 1), bool)
    if decoding.is_pruning:
        is_live_B1 = state.rows.is_live_B[:, None]
    is_source_BM, (bias_HM, untied) = state.is_source_BM, positions
    inputs = BlockInputs(
        is_token_BL=jnp.broadcast_to(is_live_B1, (B, L)),
        mask_BLM=jnp.concatenate([is_prompt_BLP, is_ancestor_BLM], axis=2),
        bias_HLM=_bias_of_step(bias_HM, P, step, decoding),
        memory_mask_BLM=None if is_source_BM is None else is_source_BM[:, None],
        token_BL=state.token_BL,
        row_bias_BHLM=_row_bias_of_step(untied, state.is_prompt_BP, step, decoding),
        place=P + step * L,
    )
    num_prompt_B1 = jnp.sum(state.is_prompt_BP, axis=1, keepdims=True)
    position_BL = jnp.broadcast_to(num_prompt_B1 + step, (B, L))
    x_BLD, cache = _extend(model, state.cache, state.token_BL, position_BL, inputs)
    return _logits(model, x_BLD), cache


def _extend(model, cache, token_BL, position_BL, inputs: BlockInputs):
    """What the decoder says of L more tokens of every row, and the cache with them."""
    x_BLD = constrain(model.embedding.embed(token_BL, position_BL), "BLD")
    return model.decoder.extend(x_BLD, inputs, cache)


def _logits(model, x_BLD):
    return constrain(model.embedding.logits(x_BLD), "BLV")


def position_terms(model, decoding: DecodingProgram, prompt_length: int) -> tuple:
    """What the model's positions add to scores, as far as all steps share it.

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


def _bias_of_step(bias_HM, P: int, step, decoding: DecodingProgram):
    """The bias of step `step`'s queries for all places of the cache, `[H, 1, P + T * L]`."""
    if bias_HM is None:
        return None
    N = bias_HM.shape[1]
    # Shifted so that the query, at place P + step, is the last; what comes after is not read.
    padded_HM = jnp.pad(bias_HM, ((0, 0), (0, N)))
    bias_HM = jax.lax.dynamic_slice_in_dim(padded_HM, N - 1 - P - step, N, axis=1)
    new_HM = jnp.repeat(bias_HM[:, P:], decoding.beam_size, axis=1)
    return jnp.concatenate([bias_HM[:, :P], new_HM], axis=1)[:, None]


def _row_bias_of_step(untied, is_prompt_BP, step, decoding: DecodingProgram):
    """What TUPE's positions add to the scores of step `step`, `[B, H, 1, P + T * L]`."""
    if untied is None:
        return None
    query_MHK, key_MHK = untied
    P = is_prompt_BP.shape[1]
    num_prompt_B = jnp.sum(is_prompt_BP, axis=1)
    query_BHK = jnp.take(query_MHK, num_prompt_B + step, axis=0, mode="clip")
    score_BHM = jnp.einsum(
        "BHK,MHK->BHM", query_BHK, key_MHK, preferred_element_type=jnp.float32
    )
    # From positions to places: the text begins where its padding on the left ends.
    place_1M = jnp.arange(P + decoding.max_new_tokens)[None]
    position_BM = jnp.maximum(place_1M - (P - num_prompt_B)[:, None], 0)
    bias_BHM = jnp.take_along_axis(score_BHM, position_BM[:, None], axis=2, mode="clip")
    new_BHM = jnp.repeat(bias_BHM[:, :, P:], decoding.beam_size, axis=2)
    return jnp.concatenate([bias_BHM[:, :, :P], new_BHM], axis=2)[:, :, None]


@jax.jit
def take_rows(state: Decoding, row_B) -> Decoding:
    """The batch of these rows alone."""

    def take(name, leaf):
        dims = dims_of(name.rsplit("/", 1)[-1], leaf.ndim)
        return jnp.take(leaf, row_B, axis=dims.index("B")) if "B" in dims else leaf

    return constrain_named(tree.map_named(take, state))
