# SPDX-License-Identifier: Apache-2.0
"""How alike layers route, and how alike the tokens of experts are.

Dims: N T S E
"""

import numpy as np

from switchx.analysis.routing import class_counts


def layer_similarity(expert_NTS: np.ndarray, num_experts: int) -> np.ndarray:
    """Normalised mutual information of the layers' first choices, `[N, N]`.

    I(A; B) / sqrt(H(A) H(B)): 1 where one layer's expert tells the other's, whatever the
    experts are called; 0 where it tells nothing. A layer that sends all tokens to one expert
    tells nothing: its row is 0.
    """
    first_NT = expert_NTS[..., 0]
    num_layers = len(first_NT)
    similarity_NN = np.zeros((num_layers, num_layers))
    for a in range(num_layers):
        for b in range(num_layers):
            is_both_T = (first_NT[a] < num_experts) & (first_NT[b] < num_experts)
            counts_EE = np.zeros((num_experts, num_experts))
            np.add.at(counts_EE, (first_NT[a][is_both_T], first_NT[b][is_both_T]), 1)
            similarity_NN[a, b] = _normalised_information(counts_EE)
    return similarity_NN


def expert_similarity(
    expert_TS: np.ndarray, token_T: np.ndarray, num_experts: int
) -> np.ndarray:
    """Cosine of how often each token id goes to two experts of a layer, `[E, E]`.

    0 where they share no token id, and for an expert without tokens.
    """
    ids, class_T = np.unique(token_T, return_inverse=True)
    counts = class_counts(expert_TS, class_T, num_experts, len(ids)).astype(np.float64)
    norm_E = np.linalg.norm(counts, axis=1)
    counts /= np.maximum(norm_E, 1e-12)[:, None]
    return counts @ counts.T


def _normalised_information(counts: np.ndarray) -> float:
    joint = counts / max(counts.sum(), 1)
    p, q = joint.sum(axis=1), joint.sum(axis=0)
    is_there = joint > 0
    information = np.sum(joint[is_there] * np.log((joint / _outer(p, q))[is_there]))
    entropies = _entropy(p), _entropy(q)
    if min(entropies) < 1e-9:  # one expert, up to rounding
        return 0.0
    return float(information / np.sqrt(np.prod(entropies)))


def _outer(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """p q^T, with 1 in place of 0, where nothing is ever divided by it."""
    product = np.outer(p, q)
    return np.where(product > 0, product, 1.0)


def _entropy(p: np.ndarray) -> float:
    return float(-np.sum(p[p > 0] * np.log(p[p > 0])))
