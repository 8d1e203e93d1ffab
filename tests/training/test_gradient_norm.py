# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from switchx.optim.protocol import clip_scale, global_norm


def test_norm_by_hand():
    # 1 + 4 + 4 + 16 = 25.
    gradients = {"scale_D": jnp.array([1.0, 2.0]), "w_in_DF": jnp.array([[2.0, 4.0]])}
    assert global_norm(gradients) == 5
    half = jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradients)
    assert global_norm(half) == 5
    assert global_norm(half).dtype == jnp.float32


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_norm_shows_what_is_not_finite(bad):
    x = jnp.ones((2, 3, 4)).at[1, 0, 0].set(bad)
    assert not jnp.isfinite(global_norm({"w_in_EDF": x}))


def test_clip_scale_as_optax(key):
    gradients = {"scale_D": jax.random.normal(key, (8,))}
    norm = global_norm(gradients)
    for max_norm in (0.1, 100.0):
        clip = optax.clip_by_global_norm(max_norm)
        expected, _ = clip.update(gradients, clip.init(gradients))
        scaled = gradients["scale_D"] * clip_scale(norm, max_norm)
        np.testing.assert_allclose(scaled, expected["scale_D"], rtol=1e-6)
    assert clip_scale(jnp.float32(5), 2.0) == jnp.float32(0.4)
    assert clip_scale(jnp.float32(0), 2.0) == 1


def test_bad_max_norm():
    with pytest.raises(ValueError, match="max_norm=0; use a norm above 0, usually 1.0"):
        clip_scale(jnp.float32(1), 0)
