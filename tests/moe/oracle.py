# SPDX-License-Identifier: Apache-2.0
"""A Switch layer as plain loops over tokens, in float64: the oracle of the moe tests."""

import math

import numpy as np


def softmax(logits):
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def activated(name: str, h, gate=None):
    """What an activation makes of hidden units, and of their gate where it has one."""
    if name == "relu":
        return np.maximum(h, 0)
    if name == "swiglu":
        return h / (1 + np.exp(-h)) * gate
    gelu = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return gelu * gate if name == "geglu" else gelu


def switch_layer(x_TD, is_token_T, w_router_DE, w_in_EDF, w_out_EFD, *, factor, minimum):
    """One group through one ReLU Switch layer.

    Returns:
        output, experts (E where not routed), gates, kept flags, balance loss.
    """
    x_TD = x_TD.astype(np.float64)
    T, E = len(x_TD), w_router_DE.shape[1]
    capacity = min(T, max(minimum, math.ceil(T * factor / E)))
    queue = [0] * E
    y_TD, experts, gates, kept = np.zeros_like(x_TD), [], [], []
    prob_sum, count = np.zeros(E), np.zeros(E)
    for t in range(T):
        prob_E = softmax(x_TD[t] @ w_router_DE.astype(np.float64))
        if not is_token_T[t]:
            experts.append(E), gates.append(prob_E.max()), kept.append(False)
            continue
        e = int(np.argmax(prob_E))
        has_slot = queue[e] < capacity
        queue[e] += 1
        prob_sum += prob_E
        count[e] += 1
        experts.append(e), gates.append(prob_E[e]), kept.append(has_slot)
        if has_slot:
            hidden_F = np.maximum(x_TD[t] @ w_in_EDF[e].astype(np.float64), 0)
            y_TD[t] = prob_E[e] * (hidden_F @ w_out_EFD[e].astype(np.float64))
    tokens = max(sum(map(bool, is_token_T)), 1)
    balance = E * np.sum(count / tokens * prob_sum / tokens)
    return y_TD, np.array(experts), np.array(gates), np.array(kept), balance
