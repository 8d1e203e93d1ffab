# SPDX-License-Identifier: Apache-2.0
"""Running the TPU kernels without a TPU, with race detection, and what they should give.

Dims: R D F E G
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

# Of 40 rows in blocks of 16 and four experts.
ROWS = 40
EDGES = {
    "straddling": (10, 0, 20, 10),
    "whole_blocks": (16, 16, 0, 8),
    "all_in_one": (0, 0, 40, 0),
    "single_rows": (1, 1, 1, 1),
    "pruned_tail": (5, 0, 6, 9),
    "last_alone": (0, 0, 0, 7),
    "no_rows": (0, 0, 0, 0),
    "too_many": (12, 0, 20, 16),
}
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3}


def racing_params(**options) -> pltpu.InterpretParams:
    return pltpu.InterpretParams(detect_races=True, **options)


@functools.cache
def compiled(kernel, num_cores: int = 1, **settings):
    """A kernel, interpreted, compiled once for all that ask for the same settings."""
    interpret = racing_params(num_cores_or_threads=num_cores)
    return jax.jit(functools.partial(kernel, interpret=interpret, **settings))


@contextlib.contextmanager
def without_races():
    """Fails if the kernel that ran within raced; after an exception the next one can run."""
    try:
        yield
        assert not interpret_pallas_call.races.races_found, "race found; see the output"
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def run_without_races(function, *arrays) -> np.ndarray:
    with without_races():
        return np.asarray(jax.block_until_ready(function(*arrays)))


def rows_of(seed: int, R: int, D: int, group_sizes, dtype) -> np.ndarray:
    """Rows sorted by expert; NaN in those that belong to none."""
    x_RD = np.random.default_rng(seed).normal(size=(R, D)).astype(jnp.dtype(dtype))
    x_RD[sum(group_sizes) :] = np.nan
    return x_RD


def matrices_of(seed: int, shape, group_sizes, dtype) -> np.ndarray:
    """A matrix an expert; NaN in those of experts without rows."""
    w_EXX = np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))
    w_EXX[np.array(group_sizes) == 0] = np.nan
    return w_EXX


def assert_close(got, expected, dtype) -> None:
    """To rounding of the result, relative to the largest of it."""
    assert np.isfinite(got.astype(np.float64)).all()
    scale = max(np.abs(expected).max(), 1)
    np.testing.assert_allclose(
        got.astype(np.float64) / scale, expected / scale, atol=TOLERANCE[str(jnp.dtype(dtype))]
    )
