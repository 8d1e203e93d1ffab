# SPDX-License-Identifier: Apache-2.0
"""Placement of experts on devices: copies by load, or the experts of a device's tasks.

Copies are placed greedily, by the two steps of DeepSeek's EPLB (DeepSeek-V3, arXiv:2412.19437,
section 3.4): each further copy goes to the expert with the largest load per copy; then the
copies go, heaviest first, each to the least loaded device that has a slot left.
Dims: N layers, E experts, R slots for experts, P devices
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from switchx.fields import require


def place_copies(load_NE, num_copies: int, num_devices: int = 1) -> np.ndarray:
    """The expert in each slot, int32 `[N, R]`, R = E + `num_copies`; R / P slots per device.

    Every expert has at least one slot. A layer's table depends only on its own load, and ties
    go to the lower number: all processes compute the same.

    Args:
        load_NE: tokens, or shares of them, that asked for each expert.

    Raises:
        ValueError: the slots do not divide over the devices, or a load is below 0 or not
            finite.
    """
    load_NE = np.asarray(load_NE, np.float64)
    require(
        load_NE.ndim == 2 and np.all(np.isfinite(load_NE)) and np.all(load_NE >= 0),
        f"loads {load_NE.shape}; use finite numbers of 0 or more, [layers, experts]",
    )
    reason = slots_refusal(load_NE.shape[1], num_copies, num_devices)
    require(reason is None, reason)
    tables = [_place_layer(load_E, num_copies, num_devices) for load_E in load_NE]
    return np.array(tables, np.int32).reshape(len(tables), -1)


def tasks_of_parts(rows: Sequence[int], num_parts: int) -> list[range]:
    """The tasks of the rows in each part of a batch that is divided into equal parts.

    Rows are in the order of their tasks, so an even division gives a heavy task several parts
    and joins light ones: no part has more rows than another (SE-MoE, section 4.1, Figure 6).

    Args:
        rows: number of rows of each task.
    """
    begins = np.cumsum([0, *rows])
    size = begins[-1] // num_parts
    ends = np.searchsorted(begins[1:], np.arange(num_parts) * size, side="right")
    lasts = np.searchsorted(begins[1:], (np.arange(num_parts) + 1) * size - 1, side="right")
    return [range(int(a), int(b) + 1) for a, b in zip(ends, lasts, strict=True)]


def place_tasks(
    rows: Sequence[int], num_experts: int, num_parts: int, num_devices: int
) -> np.ndarray:
    """The expert in each slot, int32 `[R]`, by the tasks of each device's rows.

    Args:
        rows: number of rows of each task; the experts are divided evenly among the tasks.
        num_parts: number of parts of the batch.
        num_devices: P, the number of devices that the experts are split over; part i is on
            device i modulo P.
    """
    own = num_experts // len(rows)
    tasks = tasks_of_parts(rows, num_parts)
    held = [
        sorted({t for part in tasks[p::num_devices] for t in part}) for p in range(num_devices)
    ]
    most = max(map(len, held))
    table = []
    for each in held:
        each = each + each[:1] * (most - len(each))  # slots that nothing is sent to
        table += [t * own + e for t in each for e in range(own)]
    return np.array(table, np.int32)


def loads_of_devices(load_NE, expert_of_slot_NR, num_devices: int) -> np.ndarray:
    """The load of each device `[N, P]`; an expert's is divided evenly among its copies."""
    load_NE = np.asarray(load_NE, np.float64)
    table_NR = np.asarray(expert_of_slot_NR)
    E = load_NE.shape[1]
    copies_NE = np.stack([np.bincount(table_R, minlength=E) for table_R in table_NR])
    share_NE = load_NE / np.maximum(copies_NE, 1)
    share_NR = np.take_along_axis(share_NE, table_NR, axis=1)
    return share_NR.reshape(len(table_NR), num_devices, -1).sum(axis=-1)


def imbalance(load_NP) -> np.ndarray:
    """The largest load of a layer's devices over their mean, `[N]`; 1 is even."""
    load_NP = np.asarray(load_NP, np.float64)
    return load_NP.max(axis=-1) / np.maximum(load_NP.mean(axis=-1), 1e-30)


def measured_imbalance(load_NE, num_copies: int = 0) -> Callable[[int], float]:
    """The load of the busiest device over the mean load, by the number of devices.

    It is averaged over layers. The experts are on the devices in order; with copies, in the
    slots that `place_copies` gives them.

    Args:
        load_NE: load of each layer's experts, as a run measured it.
    """
    load_NE = np.asarray(load_NE, np.float64)

    @functools.cache
    def of(parts: int) -> float:
        tables = np.tile(np.arange(load_NE.shape[1]), (len(load_NE), 1))
        if num_copies:
            tables = place_copies(load_NE, num_copies, parts)
        return float(np.mean(imbalance(loads_of_devices(load_NE, tables, parts))))

    return of


def _place_layer(load_E: np.ndarray, num_copies: int, num_devices: int) -> np.ndarray:
    copies_E = np.ones(len(load_E), np.int64)
    experts = list(range(len(load_E)))
    for _ in range(num_copies):
        expert = int(np.argmax(load_E / copies_E))
        copies_E[expert] += 1
        experts.append(expert)
    share_R = (load_E / copies_E)[experts]
    slots = len(experts) // num_devices
    load_P = np.zeros(num_devices)
    held = [[] for _ in range(num_devices)]
    for r in np.argsort(-share_R, kind="stable"):
        free = [p for p in range(num_devices) if len(held[p]) < slots]
        device = min(free, key=load_P.__getitem__)
        held[device].append(experts[r])
        load_P[device] += share_R[r]
    return np.array(held).reshape(-1)


def slots_refusal(num_experts: int, num_copies: int, devices: int) -> str | None:
    """Why the slots of experts and copies cannot be split over so many devices; or None."""
    over = (num_experts + num_copies) % devices
    if not over:
        return None
    fewer, more = num_copies - over, num_copies + devices - over
    return (
        f"SwitchConfig.num_replicas={num_copies} with num_experts={num_experts}: "
        f"{num_experts + num_copies} slots do not divide over the {devices} devices that "
        f"have experts; use num_replicas={f'{fewer} or {more}' if fewer >= 0 else more}"
    )
