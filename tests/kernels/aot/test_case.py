# SPDX-License-Identifier: Apache-2.0
"""Cases: what travels to the compiler comes back the same, and nonsense is refused."""

import pytest

from pallas_kernels.aot.case import Case


def test_a_case_survives_json():
    case = Case(
        "quantized_grouped_matmul", 8, 64, 32, 4, bits=4, group_size=32, tiling={"rows": 8}
    )
    assert Case.from_json(case.to_json()) == case


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "matmul"}, "is not one of grouped_matmul"),
        ({"direction": "sideways"}, "is not one of forward"),
        ({"bits": 4}, "others None"),
        ({"op": "quantized_grouped_matmul"}, "4 or 8 bits"),
        (
            {"op": "quantized_grouped_matmul", "bits": 8, "direction": "weight_gradient"},
            "have no gradient",
        ),
    ],
)
def test_nonsense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Case(**{"op": "grouped_matmul", "R": 8, "D": 64, "F": 32, "E": 4, **changes})
