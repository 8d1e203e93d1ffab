# SPDX-License-Identifier: Apache-2.0
"""Which experts get copies and where, against EPLB's example and exhaustive search."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from switchx.moe.copy_placement import imbalance, loads_of_devices, place_copies

# README of deepseek-ai/EPLB: loads of two layers, 12 experts in 4 groups, 16 slots on 2 nodes
# of 4 devices each; and the slots that it prints.
EPLB_LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
EPLB_SLOTS = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def on_two_nodes(load_E, num_slots: int):
    """EPLB's policy for nodes, its first step by hand: groups of 3 experts, 2 to a node."""
    groups = np.argsort(-np.array(load_E).reshape(4, 3).sum(axis=1), kind="stable")
    nodes = [[], []]
    loads = [0, 0]
    for group in groups:
        node = min((n for n in (0, 1) if len(nodes[n]) < 2), key=loads.__getitem__)
        nodes[node].append(group)
        loads[node] += sum(load_E[3 * group : 3 * group + 3])
    for node in nodes:
        experts = [3 * group + i for group in node for i in range(3)]
        yield experts, place_copies(np.array(load_E)[None, experts], num_slots // 2 - 6, 4)[0]


@pytest.mark.parametrize("layer", [0, 1])
def test_equals_the_published_example(layer):
    """Devices hold the same experts; within a device the order is of no matter."""
    got = [
        sorted(experts[slot] for slot in device)
        for experts, slots in on_two_nodes(EPLB_LOADS[layer], 16)
        for device in slots.reshape(4, 2)
    ]
    want = [sorted(device) for device in np.array(EPLB_SLOTS[layer]).reshape(8, 2).tolist()]
    assert sorted(got) == sorted(want)


def test_equals_what_the_published_program_gives_without_nodes():
    """`eplb.rebalance_experts(weight, 16, 1, 1, 8)`, run on the loads of its README."""
    got = place_copies(EPLB_LOADS, 4, 8)
    assert got.tolist() == [
        [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
    ]
    # Device loads of layer 0 by hand: expert 10's half and 6 are 91.5 + 39, ..., of 1036 / 8.
    measured = imbalance(loads_of_devices(EPLB_LOADS, got, 8))
    np.testing.assert_allclose(measured, [138.9 / 129.5, 1.19], atol=0.001)


@settings(max_examples=50, derandomize=True)
@given(
    load_E=st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    devices=st.integers(1, 4),
    extra=st.integers(0, 3),
)
def test_every_expert_has_a_slot_and_no_copy_could_have_gone_to_a_heavier_expert(
    load_E, devices, extra
):
    num_copies = -len(load_E) % devices + extra * devices
    table_R = place_copies([load_E], num_copies, devices)[0]
    copies_E = np.bincount(table_R, minlength=len(load_E))
    assert len(table_R) == len(load_E) + num_copies
    assert copies_E.min() >= 1
    # Greedy: what an expert had before its last copy was the largest share.
    share_E = np.array(load_E) / copies_E
    before = [load / (n - 1) for load, n in zip(load_E, copies_E, strict=True) if n > 1]
    assert not before or min(before) >= share_E.max() - 1e-9


def test_is_close_to_the_best_of_all_placements():
    """Every way to give 6 experts 8 slots on 2 devices; 4/3 is the bound of LPT scheduling."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        load_E = rng.zipf(1.5, size=6).clip(max=60)
        best = np.inf
        for more in itertools.combinations_with_replacement(range(6), 2):
            experts = [*range(6), *more]
            for first in itertools.combinations(range(8), 4):
                rest = [i for i in range(8) if i not in first]
                table = [[experts[i] for i in (*first, *rest)]]
                best = min(best, imbalance(loads_of_devices([load_E], table, 2))[0])
        got = imbalance(loads_of_devices([load_E], place_copies([load_E], 2, 2), 2))[0]
        assert best - 1e-9 <= got <= 4 / 3 * best


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0] * 12], 3, 8), "15 slots do not divide over the 8 devices .* num_replicas=4"),
        (([[1.0] * 12], 5, 8), "use num_replicas=4 or 12"),
        (([[1.0, -1.0]], 0, 1), "finite numbers of 0 or more"),
        (([[1.0, np.nan]], 0, 1), "finite numbers of 0 or more"),
        (([1.0, 2.0], 0, 1), r"loads \(2,\)"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        place_copies(*arguments)
