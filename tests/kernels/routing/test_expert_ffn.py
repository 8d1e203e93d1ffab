# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer against a loop over tokens; pruned rows are never touched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dequantize, expert_ffn, quantize

T, S, E, D, F = 11, 2, 4, 6, 10


def layer(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
        "x_TD": (T, D), "gate_TS": (T, S), "w_in": (E, D, F), "w_out": (E, F, D),
        "bias_in_EF": (E, F), "bias_out_ED": (E, D),
    }  # fmt: skip
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return arrays | {"expert_TS": rng.integers(0, E + 1, (T, S)).astype(np.int32)}


def looped(x_TD, expert_TS, gate_TS, w_in, w_out, bias_in_EF=None, bias_out_ED=None):
    y_TD = np.zeros((T, D))
    bias_in_EF = np.zeros((E, F)) if bias_in_EF is None else bias_in_EF
    bias_out_ED = np.zeros((E, D)) if bias_out_ED is None else bias_out_ED
    for t in range(T):
        for s in range(S):
            if (e := expert_TS[t, s]) < E:
                h_F = np.maximum(x_TD[t].astype(np.float64) @ w_in[e] + bias_in_EF[e], 0)
                y_TD[t] += gate_TS[t, s] * (h_F @ w_out[e] + bias_out_ED[e])
    return y_TD


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_against_a_loop_over_tokens(bits, with_bias):
    arrays = layer()
    if not with_bias:
        del arrays["bias_in_EF"], arrays["bias_out_ED"]
    ours, expected = dict(arrays), dict(arrays)
    if bits:
        for name in ("w_in", "w_out"):
            ours[name] = quantize(arrays[name], bits)
            expected[name] = np.asarray(dequantize(ours[name]))
    y_TD = jax.jit(expert_ffn)(**ours)
    np.testing.assert_allclose(np.asarray(y_TD), looped(**expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [None, 8])
def test_finished_tokens_and_unused_experts_are_not_read(bits):
    """Poison in both does not show, in gates neither; what is left is as it was."""
    arrays = layer(1)
    is_finished_T = np.arange(T) % 2 == 0
    arrays["expert_TS"] = np.where(arrays["expert_TS"] == 1, 0, arrays["expert_TS"])
    pruned_TS = np.where(is_finished_T[:, None], E, arrays["expert_TS"])
    ours = dict(arrays)
    if bits:
        for name in ("w_in", "w_out"):
            ours[name] = quantize(arrays[name], bits)
            arrays[name] = np.asarray(dequantize(ours[name]))
    else:
        for name in ("w_in", "w_out"):
            ours[name] = arrays[name].copy()
            ours[name][1] = np.nan
    expected_TD = looped(**arrays | {"expert_TS": pruned_TS})
    ours["x_TD"] = np.where(is_finished_T[:, None], np.nan, arrays["x_TD"])
    ours["gate_TS"] = np.where(pruned_TS == E, np.nan, arrays["gate_TS"])
    y_TD = expert_ffn(**ours, is_finished_T=jnp.array(is_finished_T))
    np.testing.assert_allclose(np.asarray(y_TD), expected_TD, rtol=1e-4, atol=1e-5)
    assert np.all(np.asarray(y_TD)[is_finished_T] == 0)


def test_gradients_against_finite_differences():
    arrays = layer(2)
    names = ("x_TD", "gate_TS", "w_in", "w_out", "bias_in_EF", "bias_out_ED")
    rng = np.random.default_rng(9)
    weight_TD = rng.normal(size=(T, D)).astype(np.float32)

    def loss(values):
        return jnp.sum(expert_ffn(**arrays | values) * weight_TD)

    def exact(values):
        return np.sum(looped(**arrays | values) * weight_TD)

    values = {name: arrays[name] for name in names}
    gradients = jax.jit(jax.grad(loss))(values)
    for name in names:
        direction = rng.normal(size=values[name].shape)
        # So small that no ReLU changes sides.
        ends = [values | {name: values[name] + step * direction} for step in (1e-6, -1e-6)]
        slope = (exact(ends[0]) - exact(ends[1])) / 2e-6
        assert slope == pytest.approx(float(np.vdot(gradients[name], direction)), rel=1e-3)


def test_experts_that_do_not_agree_are_refused():
    arrays = layer()
    with pytest.raises(ValueError, match="w_in has 4 experts, and w_out 3; expected the same"):
        expert_ffn(**arrays | {"w_out": arrays["w_out"][:3]})
