# SPDX-License-Identifier: Apache-2.0
"""Groups, capacity and slots against eq. 3 and against a loop."""

import dataclasses

import pytest

from switchx.models.config import RouterConfig, SwitchConfig
from switchx.moe.capacity import group_shape, layer_capacity, layer_groups


@pytest.mark.parametrize(
    "tokens, experts, factor, minimum, expected",
    [
        (2048, 64, 1.0, 4, 32),  # an even share each
        (100, 8, 1.1, 1, 14),  # 13.75 rounded up
        (100, 1, 1.1, 1, 100),  # never more than the group has
        (10, 100, 1.0, 4, 4),  # the minimum
        (2, 100, 1.0, 4, 2),  # the minimum, but the group is smaller
        (1000, 10, 1.1, 1, 110),  # 110.00000000000001 in binary
    ],
)
def test_capacity(tokens, experts, factor, minimum, expected):
    switch = SwitchConfig(experts, capacity_factor=factor, min_capacity=minimum)
    assert layer_capacity(switch, tokens, is_training=True) == expected


@pytest.mark.parametrize(
    "rounding, shares",
    [
        # 20 * 1.25 / 8 = 3.125, 20 / 8 = 2.5, 28 / 8 = 3.5
        ("up", (4, 3, 4)),
        ("down", (3, 2, 3)),  # Mesh-TensorFlow's int()
        ("nearest", (3, 2, 4)),  # flaxformer's round(): halves to the even
    ],
)
def test_rounding(rounding, shares):
    cases = [(20, 1.25), (20, 1.0), (28, 1.0)]
    for (tokens, factor), expected in zip(cases, shares, strict=True):
        switch = SwitchConfig(
            8, capacity_factor=factor, min_capacity=1, capacity_rounding=rounding
        )
        assert layer_capacity(switch, tokens, is_training=True) == expected


def test_capacity_counts_choices():
    """GShard: 2 N / E times the factor. Never more than the tokens."""
    for num_selected, expected in ((2, 20), (8, 64)):
        router = RouterConfig(num_selected=num_selected)
        switch = SwitchConfig(8, capacity_factor=1.25, min_capacity=1, router=router)
        assert layer_capacity(switch, 64, is_training=True) == expected


def test_factors_of_training_and_evaluation_and_no_drop():
    switch = SwitchConfig(8, capacity_factor=1.0, eval_capacity_factor=3.0, group_size=64)
    assert layer_capacity(switch, 64, is_training=True) == 8
    assert layer_capacity(switch, 64, is_training=False) == 24
    two = dataclasses.replace(switch, router=RouterConfig(num_selected=2))
    assert layer_capacity(two, 64, is_training=True) == 16
    dropless = dataclasses.replace(switch, router=RouterConfig(overflow="dropless"))
    assert layer_capacity(dropless, 64, is_training=True) == 64
    down = dataclasses.replace(switch, capacity_factor=1.99, capacity_rounding="down")
    assert layer_capacity(down, 64, is_training=True) == 15


def test_a_capacity_of_rows_counts_no_factor():
    switch = SwitchConfig(8, expert_capacity=5, min_capacity=7, group_size=16)
    assert layer_groups(switch, 3, 32) == (3, 32)
    for is_training in (True, False):
        assert layer_capacity(switch, 32, is_training=is_training) == 5
        assert layer_capacity(switch, 4, is_training=is_training) == 4
    in_groups = dataclasses.replace(switch, expert_capacity=None)
    assert layer_groups(in_groups, 3, 32) == (6, 16)


@pytest.mark.parametrize(
    "tokens, size, expected", [(2048, 8192, (1, 2048)), (60, 30, (2, 30)), (61, 30, (3, 21))]
)
def test_groups_are_few_and_even(tokens, size, expected):
    assert group_shape(tokens, size) == expected
