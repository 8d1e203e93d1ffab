# SPDX-License-Identifier: Apache-2.0
"""Where tokens and experts are, for the default rules and Pipeline MoE's."""

import pytest
from jax.sharding import AbstractMesh

from switchx.partitioning.mesh import AXES
from switchx.partitioning.placement import ONE_DEVICE, Placement
from switchx.partitioning.rules import Rules

PIPELINE_MOE = Rules(expert_params=(("E", ("model",)), ("D", ("fsdp",))))


@pytest.mark.parametrize(
    ("sizes", "rules", "batch", "experts", "parts", "gathered", "summed"),
    [
        ((1, 8, 1, 1, 1, 1), Rules(), ("data",), (), (), (), ()),
        ((1, 2, 1, 1, 4, 1), Rules(), ("data", "expert"), ("expert",), (), (), ()),
        (
            (1, 1, 2, 2, 2, 2),
            Rules(),
            ("fsdp", "node", "expert"),
            ("node", "expert"),
            ("model",),
            ("fsdp",),
            ("model",),
        ),
        (
            (1, 2, 2, 1, 1, 2),
            PIPELINE_MOE,
            ("data", "fsdp"),
            ("model",),
            (),
            ("fsdp",),
            ("model",),
        ),
    ],
)
def test_follows_the_rules(sizes, rules, batch, experts, parts, gathered, summed):
    place = Placement.on(AbstractMesh(sizes, AXES), rules)
    assert (place.batch, place.experts, place.parts) == (batch, experts, parts)
    assert (place.gathered, place.summed) == (gathered, summed)
    assert set(place.varying) == {a for a, n in zip(AXES, sizes, strict=True) if n > 1}
    assert place.size(place.varying) == 2 * 2 * 2 * (2 if sizes[2] == 2 == sizes[3] else 1)


def test_one_device_has_everything():
    assert ONE_DEVICE.size(ONE_DEVICE.experts) == 1 and ONE_DEVICE.varying == ()
