# SPDX-License-Identifier: Apache-2.0
"""The dense FFN against NumPy loops, its activations against numbers by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.layers.ffn import DenseFFN, activate
from switchx.models.config import ModelConfig
from tests.layers.weights import numbers_for, with_params

B, L, D, F = 2, 5, 6, 9
CONFIG = ModelConfig("decoder_only", 8, D, F, 2, 3, 1, activation="relu")


def gelu(h):
    """The tanh form (Hendrycks & Gimpel 2016): within 5e-4 of the exact one, not equal."""
    return 0.5 * h * (1 + math.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))


ACTIVATIONS = {
    "relu": lambda h, g: max(h, 0.0),
    "gelu": lambda h, g: gelu(h),
    "geglu": lambda h, g: gelu(h) * g,
    "gelu_exact": lambda h, g: h * (1 + math.erf(h / math.sqrt(2))) / 2,
    "geglu_exact": lambda h, g: h * (1 + math.erf(h / math.sqrt(2))) / 2 * g,
    "swiglu": lambda h, g: h / (1 + math.exp(-h)) * g,
}


def test_unknown_activation():
    with pytest.raises(ValueError) as error:
        activate("tanh", jnp.ones(2))
    assert str(error.value) == (
        "activation='tanh'; use relu, gelu, gelu_exact, geglu, geglu_exact or swiglu"
    )


def loop(x_BLD, w, activation):
    act = np.vectorize(ACTIVATIONS[activation])
    y_BLD = np.zeros_like(x_BLD, np.float64)
    for b in range(len(x_BLD)):
        for i in range(len(x_BLD[b])):
            h_F = w["w_in_DF"].T.astype(np.float64) @ x_BLD[b, i] + w.get("b_in_F", 0)
            gate_F = w["w_gate_DF"].T @ x_BLD[b, i] if "w_gate_DF" in w else h_F
            y_BLD[b, i] = act(h_F, gate_F) @ w["w_out_FD"] + w.get("b_out_D", 0)
    return y_BLD


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_a_loop(activation, key):
    # GPT's GELU comes with biases; give them to SwiGLU too.
    config = dataclasses.replace(
        CONFIG, activation=activation, use_bias=activation in ("gelu", "swiglu")
    )
    ffn = DenseFFN(config, key=key)
    w = numbers_for(ffn)
    assert ("w_gate_DF" in w) == (activation in ("geglu", "geglu_exact", "swiglu"))
    assert ("b_in_F" in w) == ("b_out_D" in w) == config.use_bias
    x_BLD = np.random.default_rng(1).normal(size=(B, L, D)).astype(np.float32)
    y_BLD = with_params(ffn, w)(jnp.asarray(x_BLD))
    np.testing.assert_allclose(y_BLD, loop(x_BLD, w, activation), rtol=2e-5, atol=2e-5)


def test_initial_deviation_follows_each_fan_in(key):
    config = dataclasses.replace(
        CONFIG, d_model=64, d_ff=256, init_scale=0.1, activation="geglu", use_bias=True
    )
    ffn = DenseFFN(config, key=key)
    for name, fan_in in [("w_in_DF", 64), ("w_gate_DF", 64), ("w_out_FD", 256)]:
        w = np.asarray(getattr(ffn, name)[...])
        np.testing.assert_allclose(w.std(), math.sqrt(0.1 / fan_in), rtol=0.03)
    assert np.any(ffn.w_in_DF[...] != ffn.w_gate_DF[...])
    assert not np.any(ffn.b_in_F[...]) and not np.any(ffn.b_out_D[...])


def test_dropout_is_shared_over_the_length_and_not_over_the_batch(key):
    """T5's: a hidden feature is dropped for a whole row of the batch."""
    ffn = DenseFFN(dataclasses.replace(CONFIG, dropout_rate=0.5), key=key)
    ffn = with_params(ffn, numbers_for(ffn))
    x_BLD = jnp.broadcast_to(jnp.linspace(-1.0, 1.0, D), (8, L, D))
    run = jax.jit(lambda key: ffn(x_BLD, key=key))
    y_BLD, plain_BLD = np.asarray(run(key)), np.asarray(ffn(x_BLD))
    assert np.ptp(y_BLD, axis=1).max() == 0
    assert np.ptp(y_BLD, axis=0).min() > 0
    # Averaged over many masks, dropout leaves the output as it is.
    y_KBLD = jax.jit(jax.vmap(run))(jax.random.split(key, 400))
    deviation = np.asarray(y_KBLD).std() / math.sqrt(400 * 8)
    assert np.abs(np.mean(y_KBLD, axis=(0, 1, 2)) - plain_BLD[0, 0]).max() < 6 * deviation


def test_activations_decide_the_dtype(key):
    x_BLD = jnp.ones((B, L, D), jnp.bfloat16)
    assert DenseFFN(CONFIG, key=key)(x_BLD).dtype == jnp.bfloat16
