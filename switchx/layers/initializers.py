# SPDX-License-Identifier: Apache-2.0
"""Initializers: truncated normals of a chosen fan-in, as sections 2.4 and 3 of Switch need.

Fedus et al. 2021 (arXiv:2101.03961), section 2.4: a matrix is drawn from a truncated
normal with standard deviation sqrt(scale / fan_in); scale 0.1 instead of T5's 1.0 keeps
sparse models stable. Fan-in is given, not guessed from the shape: an expert's fan-in is D,
whatever E is.

Explicit broadcasting of a parameter over the leading dimensions of an activation.
"""

import math

import jax
from flax import nnx

# Standard deviation of a standard normal truncated to [-2, 2].
_TRUNCATED_STDDEV = 0.87962566103423978


def truncated_normal(key, shape, *, fan_in: float, scale: float, dtype) -> jax.Array:
    """Truncated normal at two standard deviations, standard deviation sqrt(scale/fan_in)."""
    stddev = math.sqrt(scale / fan_in) / _TRUNCATED_STDDEV
    return jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype) * stddev


def weight(config, key, shape, *, fan_in: float, scale: float | None = None) -> nnx.Param:
    """A weight of a model, at its `init_scale` unless `scale` is given."""
    return nnx.Param(
        truncated_normal(
            key,
            shape,
            fan_in=fan_in,
            scale=config.init_scale if scale is None else scale,
            dtype=config.precision.params,
        )
    )


def along_last(param, x):
    """`param` in x's dtype with leading 1s, so that it lines up with x's last dimensions."""
    return param.astype(x.dtype).reshape((1,) * (x.ndim - param.ndim) + param.shape)
