# SPDX-License-Identifier: Apache-2.0
"""Exploration: how a router tries experts that it does not think best.

Fedus et al. 2021 (arXiv:2101.03961), appendix C: argmax, sampling from the softmax, input
dropout, input jitter (the paper's choice). Dims: G T D E
"""

import jax

from switchx.layers.dropout import dropout


def jitter_inputs(x, jitter: float, *, key: jax.Array | None):
    """Multiplies by U[1-jitter, 1+jitter]; a key of None (evaluation) changes nothing."""
    if key is None or jitter == 0.0:
        return x
    return x * jax.random.uniform(key, x.shape, x.dtype, 1.0 - jitter, 1.0 + jitter)


def explored_inputs(router, x_GTD, *, key: jax.Array | None):
    """The router's inputs with the noise that a `RouterConfig` asks for.

    Local to the router: the experts never see it.
    """
    if router.exploration == "jitter":
        return jitter_inputs(x_GTD, router.jitter, key=key)
    if router.exploration == "dropout":
        return dropout(x_GTD, router.input_dropout_rate, key=key)
    return x_GTD


def sampling_scores(logits_GTE, temperature: float, *, key: jax.Array):
    """Scores whose largest are a sample from softmax(logits / temperature).

    Logits plus Gumbel noise: the largest is one draw, the k largest are k draws without
    replacement (Kool et al. 2019, arXiv:1903.06059).
    """
    noise_GTE = jax.random.gumbel(key, logits_GTE.shape, logits_GTE.dtype)
    return logits_GTE / temperature + noise_GTE
