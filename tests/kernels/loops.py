# SPDX-License-Identifier: Apache-2.0
"""Loops in NumPy float64 that products are held against, and the groups that break kernels."""

import math

import jax
import numpy as np

# Sizes of groups, and rows past the last one: 23 rows of 5 experts.
R, E = 23, 5
GROUPS = {
    "uneven": [7, 1, 9, 2, 4],
    "empty_groups": [0, 12, 0, 11, 0],
    "one_has_everything": [0, 0, 23, 0, 0],
    "single_rows": [1, 1, 1, 1, 1],
    "pruned_tail": [3, 0, 8, 1, 2],
    "last_only": [0, 0, 0, 0, 1],
    "nothing": [0, 0, 0, 0, 0],
    # More rows than there are, which only traced sizes can say: cut at the last row.
    "too_many": [7, 0, 9, 30, 4],
}


def interprets(kernel: str) -> bool:
    """Whether tests interpret a kernel: on a GPU they run Triton's as it is compiled."""
    return kernel != "triton" or jax.default_backend() != "gpu"


def operands(sizes_E, D: int, F: int, seed: int = 0, tail=np.nan):
    """x, w, dy in float32; rows past the groups hold `tail`, as matrices of empty groups do."""
    rng = np.random.default_rng(seed)
    x_RD, w_EDF, dy_RF = (
        rng.normal(size=shape).astype(np.float32) for shape in ((R, D), (E, D, F), (R, F))
    )
    used = sum(sizes_E)
    x_RD[used:] = dy_RF[used:] = tail
    w_EDF[np.asarray(sizes_E) == 0] = tail
    return x_RD, w_EDF, dy_RF


def expert_of_rows(sizes_E, R: int) -> np.ndarray:
    return np.repeat(np.arange(len(sizes_E)), sizes_E)[:R]


def product(x_RD, w_EDF, sizes_E) -> np.ndarray:
    y_RF = np.zeros((x_RD.shape[0], w_EDF.shape[2]))
    for r, e in enumerate(expert_of_rows(sizes_E, len(x_RD))):
        y_RF[r] = x_RD[r].astype(np.float64) @ w_EDF[e].astype(np.float64)
    return y_RF


def weight_gradient(x_RD, dy_RF, sizes_E) -> np.ndarray:
    dw_EDF = np.zeros((len(sizes_E), x_RD.shape[1], dy_RF.shape[1]))
    for r, e in enumerate(expert_of_rows(sizes_E, len(x_RD))):
        dw_EDF[e] += np.outer(x_RD[r].astype(np.float64), dy_RF[r].astype(np.float64))
    return dw_EDF


# In float64, by their definitions.
ACTIVATIONS = {
    None: lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "gelu": lambda z: z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "gelu_exact": lambda z: z / 2 * (1 + np.vectorize(math.erf)(z / math.sqrt(2))),
    "silu": lambda z: z / (1 + np.exp(-z)),
}


def with_epilogue(sums, sizes_E, bias_EF, activation, gate_R):
    """(y_RF, residual) of `pallas_kernels/epilogue.py`, of one or two `product`s."""
    y_RF, residual = np.zeros(sums[0].shape), [np.zeros(each.shape) for each in sums]
    for r, e in enumerate(expert_of_rows(sizes_E, len(y_RF))):
        z_F = sums[0][r] + (0 if bias_EF is None else bias_EF[e])
        y_RF[r] = ACTIVATIONS[activation](z_F) * (1 if gate_R is None else gate_R[r])
        residual[0][r] = z_F
        for own, other in zip(residual[1:], sums[1:], strict=True):
            own[r] = other[r]
            y_RF[r] *= other[r]
    return y_RF, residual


def gradients(parts: dict, sizes_E, dy_RF, activation) -> dict[str, np.ndarray]:
    """Of sum(y dy) with y of `with_epilogue`, for x_RD, w_EDF and the parts that there are.

    The derivative of the activation is a central difference, so that none is written here.
    """
    x_RD, w_EDF = parts["x_RD"], parts["w_EDF"]
    w_gate_EDF, bias_EF, gate_R = map(parts.get, ("w_gate_EDF", "bias_EF", "gate_R"))
    found = {name: np.zeros(each.shape) for name, each in parts.items()}
    act, step = ACTIVATIONS[activation], 1e-6
    for r, e in enumerate(expert_of_rows(sizes_E, len(x_RD))):
        z_F = x_RD[r] @ w_EDF[e] + (0 if bias_EF is None else bias_EF[e])
        b_F = 1 if w_gate_EDF is None else x_RD[r] @ w_gate_EDF[e]
        weight = 1 if gate_R is None else gate_R[r]
        slope_F = (act(z_F + step) - act(z_F - step)) / (2 * step)
        dz_F, db_F = weight * dy_RF[r] * b_F * slope_F, weight * dy_RF[r] * act(z_F)
        found["x_RD"][r] = w_EDF[e] @ dz_F
        found["w_EDF"][e] += np.outer(x_RD[r], dz_F)
        if w_gate_EDF is not None:
            found["x_RD"][r] += w_gate_EDF[e] @ db_F
            found["w_gate_EDF"][e] += np.outer(x_RD[r], db_F)
        if bias_EF is not None:
            found["bias_EF"][e] += dz_F
        if gate_R is not None:
            found["gate_R"][r] = np.sum(dy_RF[r] * act(z_F) * b_F)
    return found
