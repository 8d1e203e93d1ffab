# SPDX-License-Identifier: Apache-2.0
"""Expert banks with fixed numbers, and what a dispatcher must compute with them, in loops."""

import jax.numpy as jnp
import numpy as np

from switchx.moe.experts import ExpertFFN
from tests.moe.oracle import activated

NAMES = ("w_in_EDF", "w_out_EFD", "w_gate_EDF", "b_in_EF", "b_out_ED")


def ffn_numbers(E: int, D: int, F: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = {"E": E, "D": D, "F": F}
    return {
        name: (rng.normal(size=[sizes[d] for d in name.rsplit("_", 1)[1]]) * 0.5).astype(
            np.float32
        )
        for name in NAMES
    }


def ffn_bank(numbers: dict) -> ExpertFFN:
    """Gated experts with biases."""
    arrays = {name: jnp.asarray(numbers[name]) for name in NAMES}
    return ExpertFFN(**arrays, activation="geglu")


def run_expert(numbers: dict, e: int, x_D):
    """One row through expert `e`, in float64."""
    w = {name: numbers[name][e].astype(np.float64) for name in NAMES}
    h_F = activated("geglu", x_D @ w["w_in_EDF"] + w["b_in_EF"], x_D @ w["w_gate_EDF"])
    return h_F @ w["w_out_EFD"] + w["b_out_ED"]


def dispatch_loop(x_GTD, plan, numbers: dict):
    """sum over a token's kept choices of gate * expert(x), in float64."""
    expert_GTS, slot_GTS, gate_GTS = map(
        np.asarray, (plan.expert_GTS, plan.slot_GTS, plan.gate_GTS)
    )
    y_GTD = np.zeros(x_GTD.shape)
    for g, t, s in np.ndindex(*expert_GTS.shape):
        e = int(expert_GTS[g, t, s])
        if e < plan.num_experts and slot_GTS[g, t, s] < plan.capacity:
            y_D = run_expert(numbers, e, np.asarray(x_GTD)[g, t].astype(np.float64))
            y_GTD[g, t] += float(gate_GTS[g, t, s]) * y_D
    return y_GTD
