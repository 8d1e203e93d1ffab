# SPDX-License-Identifier: Apache-2.0
"""Beam search over models that are tables: ours, and a loop over Python lists."""

import jax
import numpy as np

from switchx.inference.beam_search import Beams
from switchx.inference.config import DecodingConfig
from switchx.inference.logits_processors import Rows, RowSettings

EOS, V = 1, 6


def tables(seed: int, steps: int, sharpness=1.5):
    """Log-probabilities of the next token by step and by the last one, `[T, V, V]`."""
    logits_TVV = np.random.default_rng(seed).normal(size=(steps, V, V)) * sharpness
    return logits_TVV - np.log(np.exp(logits_TVV).sum(-1, keepdims=True))


start = jax.jit(Beams.start, static_argnums=(0, 1))
_advance = jax.jit(Beams.advance, static_argnames="program")


def advance(beams, logits_BLV, step, rows, *, program):
    """Token number `step` of every sentence, all of which began at place 0 of the ring."""
    number_B = np.full(rows.sentence_B.shape, step, np.int32)
    place = np.int32((step + 1) % program.max_new_tokens)
    return _advance(beams, logits_BLV, number_B, place, rows, program=program)


def search(log_prob_BTVV, config: DecodingConfig):
    """Our search over models that are tables, a row each: the hypotheses of every row."""
    batch = len(log_prob_BTVV)
    beams, step = start(batch, config.program_of(config.max_new_tokens)), 0
    last_BL = np.zeros((batch, config.beam_size), np.int32)
    is_live_B = np.ones(batch, bool)
    while is_live_B.any():
        logits_BLV = np.take_along_axis(log_prob_BTVV[:, step], last_BL[..., None], axis=1)
        beams, last_BL, is_live_B = advance(
            beams,
            logits_BLV.astype(np.float32),
            step,
            rows_of(is_live_B, config),
            program=config.program_of(config.max_new_tokens),
        )
        last_BL, is_live_B = np.asarray(last_BL), np.asarray(is_live_B)
        step += 1
    token_BLT, score_BL = map(np.asarray, beams.results(rows_of(is_live_B, config)))
    return [
        [(text(tokens), float(score)) for tokens, score in zip(*row, strict=True)]
        for row in zip(token_BLT, score_BL, strict=True)
    ]


def rows_of(is_live_B, config) -> Rows:
    B, program = len(is_live_B), config.program_of(config.max_new_tokens)
    return Rows(
        np.arange(B),
        np.asarray(is_live_B),
        np.full(B, config.max_new_tokens),
        RowSettings.of([config] * B).fitted(program),
        np.zeros((B, 1), np.int32) if program.has_processors else None,
    )


def text(tokens) -> tuple[int, ...]:
    tokens = tuple(int(token) for token in tokens)
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def search_by_lists(log_prob_TVV, config: DecodingConfig, processed=None):
    """The rules of `generate`, one sentence, one list of (score, tokens) at a time.

    Args:
        processed: changes the log-probabilities of the tokens after a text, [V].
    """
    L, T = config.beam_size, config.max_new_tokens
    running, finished = [(0.0, ())], []

    def next_V(tokens):
        own_V = log_prob_TVV[len(tokens), tokens[-1] if tokens else 0]
        return own_V if processed is None else processed(own_V, tokens)

    for step in range(T):
        candidates = [
            (score + log_prob, (*tokens, token))
            for score, tokens in running
            for token, log_prob in enumerate(next_V(tokens))
            if log_prob > -np.inf
        ]
        candidates = sorted(candidates, key=lambda each: -each[0])[: 2 * L]
        length = step + 1

        def ends(tokens, length=length):
            return tokens[-1] == EOS or length == T

        new = [
            (score / length**config.length_penalty, tokens)
            for score, tokens in candidates[:L]
            if ends(tokens)
        ]
        finished = sorted(finished + new, key=lambda each: -each[0])[:L]
        running = [each for each in candidates if not ends(each[1])][:L]
        if not running:
            break
        counted = (
            T if config.early_stopping == "never" and config.length_penalty > 0 else length
        )
        best = running[0][0] / counted**config.length_penalty
        if len(finished) == L and (
            config.early_stopping is True or best <= min(score for score, _ in finished)
        ):
            break
    return [(tokens, score) for score, tokens in finished]
