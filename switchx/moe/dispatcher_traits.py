# SPDX-License-Identifier: Apache-2.0
"""Dispatchers by name, with the properties that configurations and the planner ask for."""

from typing import NamedTuple


class DispatcherTraits(NamedTuple):
    """Properties of a dispatcher besides its function.

    Attributes:
        has_equal_blocks: whether every expert gets a block of equally many rows in training.
        is_automatic: whether the compiler decides what is sent between devices.
        is_sliced: whether experts are split over devices that have the same tokens.
        shares_groups: whether devices may share a routing group.
        exchanges_slots: whether slots travel to the experts' devices and back.
    """

    has_equal_blocks: bool
    is_automatic: bool = False
    is_sliced: bool = False
    shares_groups: bool = False
    exchanges_slots: bool = False


DISPATCHERS = {
    "gather": DispatcherTraits(has_equal_blocks=True, is_automatic=True),
    "einsum": DispatcherTraits(has_equal_blocks=True, is_automatic=True),
    "dropless": DispatcherTraits(has_equal_blocks=False),
    "all_to_all": DispatcherTraits(
        has_equal_blocks=True, shares_groups=True, exchanges_slots=True
    ),
    "hierarchical": DispatcherTraits(has_equal_blocks=True, exchanges_slots=True),
    "ragged_all_to_all": DispatcherTraits(has_equal_blocks=False),
    "sliced": DispatcherTraits(has_equal_blocks=False, is_sliced=True),
    "sliced_scatter": DispatcherTraits(has_equal_blocks=False, is_sliced=True),
}
