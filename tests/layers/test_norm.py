# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm against NumPy in float64, numbers by hand, finite differences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.layers.dense import Norm, layer_norm, rms_norm
from switchx.models.config import ModelConfig, Precision

D = 12


def rms_oracle(x, scale_D, bias_D=None):
    del bias_D
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale_D


def layer_oracle(x, scale_D, bias_D):
    variance = np.var(x, axis=-1, keepdims=True)
    return (x - np.mean(x, axis=-1, keepdims=True)) / np.sqrt(
        variance + 1e-6
    ) * scale_D + bias_D


def rms(x, scale_D, bias_D):
    del bias_D
    return rms_norm(x, scale_D)


BOTH = pytest.mark.parametrize(
    ("norm", "oracle"), [(rms, rms_oracle), (layer_norm, layer_oracle)], ids=["rms", "layer"]
)


def inputs():
    rng = np.random.default_rng(0)
    x_BLD = rng.normal(size=(2, 5, D)) * rng.uniform(0.01, 100, (2, 5, 1)) + 0.3
    return x_BLD, rng.normal(size=D), rng.normal(size=D)


@BOTH
def test_against_float64(norm, oracle):
    arguments = inputs()
    got = norm(*(jnp.asarray(a, jnp.float32) for a in arguments))
    np.testing.assert_allclose(got, oracle(*arguments), rtol=2e-5, atol=2e-5)


def test_by_hand():
    ones, zeros = jnp.ones(2), jnp.zeros(2)
    # rms of (3, 4) is sqrt(25 / 2) = 3.53553; 3 / 3.53553 = 0.848528, 4 / ... = 1.131371
    got = rms_norm(jnp.array([[3.0, 4.0]]), ones)
    np.testing.assert_allclose(got, [[0.848528, 1.131371]], rtol=1e-5)
    # (10, 14) has mean 12 and standard deviation 2.
    got = layer_norm(jnp.array([[10.0, 14.0]]), ones, zeros)
    np.testing.assert_allclose(got, [[-1.0, 1.0]], rtol=1e-5)
    got = layer_norm(jnp.array([[10.0, 14.0]]), jnp.array([3.0, 5.0]), jnp.array([0.5, -0.5]))
    np.testing.assert_allclose(got, [[-2.5, 4.5]], rtol=1e-5)


@BOTH
def test_gradients_equal_finite_differences(norm, oracle):
    arguments = inputs()
    target = np.random.default_rng(1).normal(size=arguments[0].shape)

    def loss(*arguments):
        return jnp.sum(norm(*arguments) * target)

    grads = jax.grad(loss, (0, 1, 2))(*(jnp.asarray(a, jnp.float32) for a in arguments))
    rng = np.random.default_rng(2)
    for i, grad in enumerate(grads):
        direction = rng.normal(size=grad.shape)

        def moved(step, i=i, direction=direction):
            changed = [a + step * direction * (j == i) for j, a in enumerate(arguments)]
            return np.sum(oracle(*changed) * target)

        slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
        np.testing.assert_allclose(np.vdot(grad, direction), slope, rtol=1e-3, atol=1e-6)


@BOTH
def test_float16_keeps_its_statistics_in_float32(norm, oracle):
    # 300^2 = 90000 is beyond float16's 65504: squares taken in float16 would be infinite.
    x = np.array([[300.0, -300.0, 150.0, 0.0]])
    parameters = np.ones(4), np.zeros(4)
    got = norm(*(jnp.asarray(a, jnp.float16) for a in (x, *parameters)))
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(got, np.float64), oracle(x, *parameters), rtol=2e-3)


@BOTH
def test_a_constant_row_stays_finite(norm, oracle):
    for value in (0.0, 7.0):
        x = np.full((1, D), value)
        arguments = x, np.ones(D), np.zeros(D)
        out, grad = jax.value_and_grad(lambda x, *a: jnp.sum(norm(x, *a)))(
            *(jnp.asarray(a, jnp.float32) for a in arguments)
        )
        np.testing.assert_allclose(out, np.sum(oracle(*arguments)), rtol=1e-5, atol=1e-5)
        assert np.all(np.isfinite(grad))


def test_the_module_starts_as_the_plain_norm():
    x = jnp.asarray(inputs()[0], jnp.float32)
    sizes = dict(vocab_size=8, d_model=D, d_ff=8, num_heads=1, d_head=8, num_decoder_layers=1)
    config = ModelConfig("decoder_only", **sizes)
    module = Norm(config)
    assert not hasattr(module, "bias_D")
    np.testing.assert_array_equal(module(x), rms_norm(x, jnp.ones(D)))
    config = dataclasses.replace(config, norm="layer", precision=Precision("bfloat16"))
    module = Norm(config)
    np.testing.assert_array_equal(module(x), layer_norm(x, jnp.ones(D), jnp.zeros(D)))
    assert module.scale_D[...].dtype == jnp.bfloat16
