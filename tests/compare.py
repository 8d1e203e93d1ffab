# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays that have to hold the same numbers."""

import jax
import numpy as np


def assert_close(got, want, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Trees of one structure whose arrays are close; an error names the array."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    mine, right = jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)
    for (path, array), expected in zip(mine, right, strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(array, expected, rtol=rtol, atol=atol, err_msg=name)


def assert_close_to_largest(got, want, share: float, least: float = 0.0) -> None:
    """Trees whose arrays differ by at most this share of each array's largest number.

    Args:
        least: The smallest number that counts as an array's largest one.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    mine, right = jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)
    for (path, array), expected in zip(mine, right, strict=True):
        atol = share * max(float(np.max(np.abs(expected), initial=0)), least)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(array, expected, rtol=0, atol=atol, err_msg=name)


def assert_slope(function, point, gradients, rtol: float, atol: float = 0.0) -> None:
    """Gradients along a direction that is drawn are central differences of a function.

    Args:
        function: What `gradients` are of: of a tree like `point`, in float64, to a number.
    """
    rng = np.random.default_rng(3)
    direction = jax.tree.map(lambda a: rng.normal(size=np.shape(a)), point)

    def moved(step: float):
        return function(
            jax.tree.map(lambda a, d: np.asarray(a, np.float64) + step * d, point, direction)
        )

    slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
    dot = sum(map(np.vdot, jax.tree.leaves(gradients), jax.tree.leaves(direction)))
    np.testing.assert_allclose(dot, slope, rtol=rtol, atol=atol)


def slopes(function, point, step: float = 1e-5) -> np.ndarray:
    """Central differences of a function by each number of an array."""
    found = np.zeros(np.shape(point))
    for place in np.ndindex(found.shape):
        moved = np.zeros_like(found)
        moved[place] = step
        found[place] = (function(point + moved) - function(point - moved)) / (2 * step)
    return found
