# SPDX-License-Identifier: Apache-2.0
"""A layer's collectives: four all-to-alls in data parallelism, two sums in Pipeline MoE."""

from switchx.bench import layer_collectives


def test_collectives_are_those_of_the_paper():
    rows = layer_collectives.measured_rows()
    by_name = dict(zip(layer_collectives.MESHES, rows, strict=True))
    kinds = {
        name: {key: row[key] for key in row if key.endswith("s") and "bytes" not in key}
        for name, row in by_name.items()
    }
    assert kinds == {
        "dense": {"collectives": 2, "all-reduces": 2},
        "sliced": {"collectives": 2, "all-reduces": 2},
        "all_to_all": {"collectives": 4, "all-to-alls": 4},
        "hierarchical": {"collectives": 8, "all-to-alls": 8},
    }
    assert layer_collectives.check(rows).holds


def test_one_more_does_not_pass():
    rows = [{"collectives": 2}, {"collectives": 3}]
    assert not layer_collectives.check(rows).holds
