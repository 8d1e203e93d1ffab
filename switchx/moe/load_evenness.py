# SPDX-License-Identifier: Apache-2.0
"""How evenly experts are loaded, and how many choices the most even router would drop.

A load is the number of choices that ask for each expert before capacity, or a share of them.
All functions take only NumPy arrays: what training logs, or what a run has recorded. If
experts are divided among tasks, the router does not decide the tasks' rows: each task's experts
are considered separately, and a task without choices does not count.
Dims: T tokens of a group, S choices of a token, E experts, C slots of an expert, U tasks,
W experts of a task
"""

import numpy as np
import scipy.special

# An expert with less than this part of an even share is called dead.
DEAD_FRACTION = 0.01


def by_task(load: np.ndarray, num_tasks: int) -> np.ndarray:
    """Load `[..., E]` as `[..., U, W]`."""
    return load.reshape(*load.shape[:-1], num_tasks, -1)


def even_shares(load: np.ndarray, num_tasks: int = 1) -> np.ndarray:
    """Load `[..., E]` in units of its task's even share: 1 everywhere when balanced."""
    load_UW = by_task(load, num_tasks)
    share_UW = load_UW / np.maximum(np.mean(load_UW, axis=-1, keepdims=True), 1e-12)
    return share_UW.reshape(load.shape)


def dead_experts(load: np.ndarray, num_tasks: int = 1) -> np.ndarray:
    """Which experts of `[..., E]` have less than `DEAD_FRACTION` of an even share."""
    is_dead = even_shares(load, num_tasks) < DEAD_FRACTION
    if num_tasks > 1:
        is_seen_U1 = by_task(load, num_tasks).any(axis=-1, keepdims=True)
        is_dead = (by_task(is_dead, num_tasks) & is_seen_U1).reshape(load.shape)
    return is_dead


def max_violation(load: np.ndarray, num_tasks: int = 1) -> np.ndarray:
    """MaxVio of loads `[..., E]`, `(max_e n_e - mean n) / mean n`: 0 when even, at most W - 1.

    Wang et al. 2024 (arXiv:2408.15664), eq. 4: for a training batch it is MaxVio_batch, for the
    whole validation set MaxVio_global. A layer without any choice has 0. With several tasks it
    is the largest.
    """
    return np.maximum(even_shares(load, num_tasks).max(axis=-1) - 1, 0.0)


def load_entropy(load: np.ndarray, num_tasks: int = 1) -> np.ndarray:
    """The entropy of loads `[..., E]`, in nats; its exponential times U is the effective number
    of experts. With several tasks it is the mean over choices.

    It is ln W when even and 0 if one expert has all. One hot expert among many hardly moves
    it: it does not replace `max_violation`.
    """
    share = load / np.maximum(np.sum(load, axis=-1, keepdims=True), 1e-12)
    share_U = by_task(share, num_tasks).sum(axis=-1)
    nats, nats_of_tasks = (scipy.special.entr(each).sum(axis=-1) for each in (share, share_U))
    return nats - nats_of_tasks if num_tasks > 1 else nats


def expected_drops(tokens, num_selected: int, num_experts: int, capacity: int) -> np.ndarray:
    """Choices of a group dropped by a balanced router that chooses for each token by itself.

    This is the least that a balance loss can reach; only larger groups or more slots lower it.
    Each token chooses S of E experts, all sets equally likely, so the choices of an expert are
    Binomial(T, p), p = S / E, and it drops those beyond its slots:

        E sum_{n > C} (n - C) P(n) = E (T p P(Bin(T - 1, p) >= C) - C P(Bin(T, p) > C))

    If E is much larger than S, the law is Poisson's with mean l = T p: with C = l, the share of
    all choices is then nearly 1 / sqrt(2 pi l), 5.0% for l = 64 and 1.2% for 1,024.

    Args:
        tokens: numbers of tokens T, an array of any shape.
        capacity: slots of an expert, at least 1.
    """
    tokens, p = np.asarray(tokens), num_selected / num_experts
    full = _at_least(capacity, tokens - 1, p)
    beyond = _at_least(capacity + 1, tokens, p)
    return num_experts * np.maximum(tokens * p * full - capacity * beyond, 0.0)


def _at_least(least: int, trials: np.ndarray, p: float) -> np.ndarray:
    """P(Binomial(trials, p) >= least), for `least` of 1 or more."""
    others = np.maximum(trials - least + 1, 1)
    return np.where(trials >= least, scipy.special.betainc(least, others, p), 0.0)
