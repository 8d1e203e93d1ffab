# SPDX-License-Identifier: Apache-2.0
"""Load per expert: which row is which layer, and what stands in it."""

import dataclasses

from rich.console import Console

from switchx.cli.report import load_table
from switchx.models.config import ModelConfig, SwitchConfig

MODEL = ModelConfig(
    "encoder_decoder", 64, 8, 16, 2, 4, num_decoder_layers=2, num_encoder_layers=4,
    switch=SwitchConfig(num_experts=4, every=2),
)  # fmt: skip


def shown(model, load) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(load_table(model, load))
    return [line.split() for line in capture.get().splitlines()]


def test_rows_are_named_by_stack_and_block():
    assert MODEL.sparse_layer_names == ["encoder 1", "encoder 3", "decoder 1"]
    every_block = dataclasses.replace(MODEL, switch=SwitchConfig(4, every=1))
    assert every_block.sparse_layer_names[3:] == ["encoder 3", "decoder 0", "decoder 1"]
    encoder = dataclasses.replace(MODEL, switch=SwitchConfig(4, stacks="encoder"))
    assert encoder.sparse_layer_names == ["encoder 1", "encoder 3"]
    both = dataclasses.replace(MODEL, switch=SwitchConfig(4, sublayers="both"))
    assert both.sparse_layer_names[:2] == ["encoder 1 attention", "encoder 1 ffn"]


def test_even_share_is_one():
    load = [[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]]
    assert shown(MODEL, load) == [
        "load per expert (1.00 is an even share)".split(),
        ["layer", "0", "1", "2", "3"],
        ["encoder", "1", "1.00", "1.00", "1.00", "1.00"],
        ["encoder", "3", "2.00", "2.00", "0.00", "0.00"],
        ["decoder", "1", "0.40", "0.80", "1.20", "1.60"],
    ]


def test_even_share_is_one_for_two_choices_a_token_and_for_none():
    load = [[0.5, 0.5, 0.5, 0.5], [1.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]
    rows = shown(MODEL, load)[2:]
    assert [row[2:] for row in rows] == [
        ["1.00", "1.00", "1.00", "1.00"],
        ["2.00", "1.00", "1.00", "0.00"],
        ["0.00", "0.00", "0.00", "0.00"],
    ]


def test_many_experts_are_shown_by_their_extremes():
    model = dataclasses.replace(MODEL, switch=SwitchConfig(num_experts=32, every=2))
    shares = [0.5] + [0.5 / 30] * 30 + [0.0]
    rows = shown(model, [shares] * 3)
    assert rows[1] == ["layer", "least", "median", "most"]
    assert rows[2] == ["encoder", "1", "0.00", "0.53", "16.00"]
