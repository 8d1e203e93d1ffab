# SPDX-License-Identifier: Apache-2.0
"""Gradients of replicas in compiled steps, and what counts as theirs."""

import jax
import pytest

from switchx.bench.gradient_bytes import (
    MICROBATCHES,
    MOST,
    Case,
    check,
    compare,
    crossed_axes,
    mesh_names,
)
from switchx.partitioning.hlo_collectives import HloCollective

SIZES = {"pipe": 2, "data": 2, "model": 2}


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7)), {"model"}),
        (((0, 2), (1, 3), (4, 6), (5, 7)), {"data"}),
        # A permute to the next stage.
        (((0, 4), (1, 5)), {"pipe"}),
        ((tuple(range(8)),), {"pipe", "data", "model"}),
    ],
)
def test_axes_are_those_along_which_a_group_differs(groups, axes):
    assert crossed_axes(HloCollective("all-reduce", (), groups, 4), SIZES) == axes


def test_every_mesh_with_replicas_is_measured():
    names = mesh_names(jax.devices()[:8])
    assert {"data", "fsdp", "all_to_all", "pipeline", "pipeline_moe_stages", "pod"} <= set(
        names
    )
    # V is split over data there, and model.gin has no replicas.
    assert not {"vocab_rows", "model", "one_device"} & set(names)


def test_more_than_one_reduction_does_not_hold():
    assert check([{"ratio": 1.0}, {"ratio": MOST}]).holds
    assert not check([{"ratio": 1.0}, {"ratio": 4.65}, {"ratio": 1.0}]).holds


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", MICROBATCHES)
@pytest.mark.parametrize("mesh", ["data", "pipeline", "pod", "fsdp_fused"])
def test_gradients_cross_replicas_once_a_step(mesh, num_microbatches):
    row = compare(Case(mesh, num_microbatches), jax.devices()[:8])
    assert 0.98 <= row["ratio"] <= MOST
