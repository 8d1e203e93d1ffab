# SPDX-License-Identifier: Apache-2.0
"""Arrays and lengths of a step."""

from switchx.planner.model_cost import StateArray
from tests.planner.workloads import make_workload


def test_what_an_array_is():
    expert = StateArray(
        "decoder/blocks/ffn/experts/w_in_NEDF", "NEDF", (2, 8, 4, 4), 4, "params"
    )
    router = StateArray("decoder/blocks/ffn/w_router_NDE", "NDE", (2, 4, 8), 4, "params")
    table = StateArray("embedding/embedding_VD", "VD", (96, 64), 4, "params")
    assert (expert.table, router.table) == ("expert_params", "params")
    assert expert.is_in_blocks and not table.is_in_blocks


def test_a_step():
    workload = make_workload()
    assert workload.tokens == 16 * 16
    assert (workload.length("encoder"), workload.length("decoder")) == (0, 16)
    assert workload.num_layers("decoder") == 4
    assert (workload.activation_bytes, workload.param_bytes) == (4, 4)
