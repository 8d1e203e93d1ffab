# SPDX-License-Identifier: Apache-2.0
"""Adafactor of one matrix or vector in float64 NumPy, from the paper's algorithms 4 to 6.

Also the step of an optimizer as the training step takes it.
"""

import jax
import numpy as np
import optax


def donating_step(transformation):
    """The jitted `(params, state, gradient, is_finite) -> params, state`, in place."""

    def step(params, state, gradient, is_finite):
        def update(params, state):
            updates, state = transformation.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.cond(is_finite, update, lambda *kept: kept, params, state)

    return jax.jit(step, donate_argnums=(0, 1))


class MatrixAdafactor:
    """One independent parameter; nothing batched, nothing shared.

    Args:
        is_factored: a matrix with row and column statistics; a full second moment otherwise.
    """

    def __init__(self, shape, *, is_factored, learning_rate=0.01, threshold=1.0):
        self.is_factored, self.rate, self.threshold = is_factored, learning_rate, threshold
        self.v = np.zeros(shape)
        self.v_row, self.v_col = np.zeros(shape[:1]), np.zeros(shape[1:])
        self.step = 0

    def update(self, w, g):
        w, g = np.asarray(w, np.float64), np.asarray(g, np.float64)
        self.step += 1
        beta2 = 1.0 - self.step**-0.8
        squares = g * g + 1e-30
        if self.is_factored:
            rows, columns = g.shape
            for i in range(rows):
                self.v_row[i] = beta2 * self.v_row[i] + (1 - beta2) * squares[i].mean()
            for j in range(columns):
                self.v_col[j] = beta2 * self.v_col[j] + (1 - beta2) * squares[:, j].mean()
            y = np.empty_like(g)
            for i in range(rows):
                for j in range(columns):
                    v = self.v_row[i] * self.v_col[j] / self.v_row.mean()
                    y[i, j] = g[i, j] / np.sqrt(v)
        else:
            self.v = beta2 * self.v + (1 - beta2) * squares
            y = g / np.sqrt(self.v)
        y = y / max(1.0, np.sqrt((y * y).mean()) / self.threshold)
        return -self.rate * max(1e-3, np.sqrt((w * w).mean())) * y
