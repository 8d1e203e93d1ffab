# SPDX-License-Identifier: Apache-2.0
"""The bench's contenders do equal work, and train."""

import dataclasses

import pytest

from switchx.bench import train as bench
from switchx.models.flops import count_parameters, flops_per_sequence


def test_switch_and_dense_do_equal_work():
    """At capacity factor 1.0: the dense model's FLOPs, and E times its FFNs."""
    lengths = bench.INPUTS, bench.TARGETS
    dense = flops_per_sequence(bench.DENSE, *lengths)
    switch = flops_per_sequence(bench.switch_model(64), *lengths)
    assert switch.total == dense.total
    added = count_parameters(bench.switch_model(64)).total - count_parameters(bench.DENSE).total
    router = 4 * 256 * 64
    assert added == 4 * 63 * 2 * 256 * 1024 + router


@pytest.mark.slow
def test_a_contender_trains(monkeypatch):
    switch = dataclasses.replace(bench.switch_model(4).switch, every=1)
    small = dataclasses.replace(
        bench.DENSE, d_model=16, d_ff=32, num_heads=2, d_head=8, num_encoder_layers=1,
        num_decoder_layers=1, switch=switch,
    )  # fmt: skip
    each = bench.contender("small", small)
    losses = [float(each.step().loss) for _ in range(3)]
    assert losses[-1] < losses[0]
    assert each.peak_bytes > count_parameters(small).total * 4


@pytest.mark.slow
def test_growing_experts_cost_memory_in_proportion():
    few, many = (bench.contender(str(n), bench.switch_model(n)) for n in (8, 16))
    added = 4 * 8 * 2 * 256 * 1024 * 4  # bytes of the added experts
    assert many.peak_bytes - few.peak_bytes == pytest.approx(added, rel=1.5)
