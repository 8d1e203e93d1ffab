# SPDX-License-Identifier: Apache-2.0
"""Parameters and FLOPs against the papers' tables, published checkpoints and real models."""

import dataclasses
import functools
import math
import re

import jax
import pytest

from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.flops import (
    count_parameters,
    experts_per_token,
    flops_per_sequence,
    slots_per_token,
    train_flops,
)
from switchx.models.params import abstract_params, forward
from switchx.tree import num_elements
from tests.jaxprs import equations
from tests.planner.workloads import shipped_model as load
from tests.processes import ROOT
from tests.training.jobs import MODERN, with_switch

MODELS = sorted(path.stem for path in (ROOT / "configs/models").glob("*.gin"))


def active(config: ModelConfig) -> int:
    """Parameters that one token meets: all but the experts that it is not sent to."""
    count, switch = count_parameters(config), config.switch
    if switch is None:
        return count.total
    return count.dense + round(count.experts * experts_per_token(switch) / switch.num_experts)


def lengths(config: ModelConfig) -> tuple[int, int]:
    """Switch Transformers' 512 and 114 tokens; Pipeline MoE's 2048."""
    return (512, 114) if config.is_encoder_decoder else (0, 2048)


# What `transformers` 5 counts for the same shapes, on its meta device; tied weights once.
@pytest.mark.parametrize(
    ("model", "experts", "parameters"),
    [
        ("t5_1_0_base", None, 222_903_552),
        ("t5_1_0_large", None, 737_668_096),
        ("t5_1_1_base", None, 247_577_856),
        ("t5_1_1_large", None, 783_150_080),
        ("t5_1_1_xxl", None, 11_135_332_352),
        ("switch_base_released", 2, 279_545_088),
        ("switch_base_released", 8, 619_339_008),
        ("switch_base_released", 128, 7_415_217_408),
        ("switch_base_released", 256, 14_664_154_368),
        ("switch_large_released", 128, 26_309_291_008),
        ("gpt3_medium", None, 356_837_376),
        ("gpt3_6_7b", None, 6_662_266_880),
    ],
)
def test_parameters_equal_hugging_face(model, experts, parameters):
    bindings = [] if experts is None else [f"NUM_EXPERTS = {experts}"]
    assert count_parameters(load(model, *bindings)).total == parameters


# In billions, with the digits printed.
@pytest.mark.parametrize(
    ("model", "experts", "printed"),
    [
        ("t5_base_paper", None, "0.223"),  # Switch Transformers, section 2.4
        ("t5_1_1_xxl", None, "11"),  # Table 9
        ("switch_base_paper", 16, "1.1"),  # Table 7
        ("switch_base_paper", 32, "2.0"),
        ("switch_base_paper", 64, "3.8"),
        ("switch_base_paper", 128, "7.4"),
        ("switch_base_paper", 256, "14.7"),
        ("switch_large_released", 128, "26"),  # Table 9
        ("switch_xxl_released", 128, "395"),
        ("switch_c_paper", 2048, "1571"),
        ("switch_c_released", 2048, "1571"),
        ("gpt3_medium_moe", 64, "6.7"),  # Pipeline MoE, section 4.1
        ("se_moe", 8, "13.9"),  # SE-MoE, Table 1
        ("se_moe", 16, "26.8"),
        ("se_moe", 32, "52.6"),
        ("se_moe", 64, "104.1"),
        ("se_moe", 128, "207.2"),
    ],
)
def test_parameters_round_to_the_papers(model, experts, printed):
    bindings = [] if experts is None else [f"NUM_EXPERTS = {experts}"]
    billions = count_parameters(load(model, *bindings)).total / 1e9
    assert f"{billions:.{len(printed.partition('.')[2])}f}" == printed


@pytest.mark.parametrize(
    ("model", "billions"),
    [("switch_xxl_paper", 201.4), ("switch_large_paper", 27.1), ("gpt3_6_7b_moe", 142.0)],
)
def test_misprinted_shapes_count_what_docs_models_says(model, billions):
    # Printed: 395 (Table 9), 26 (Table 9), 143 (Pipeline MoE, section 4.1).
    assert round(count_parameters(load(model)).total / 1e9, 1) == billions


def test_the_reconstructed_elephant_has_the_size_that_its_paper_prints():
    """Sizes without positions and biases give 5.31B, the whole 5.32B; experts are 91%."""
    count = count_parameters(load("elephants_5b"))
    assert count.total == pytest.approx(5.31e9, rel=5e-3)
    assert f"{count.total / 1e9:.2f}" == "5.32"
    assert count.experts == 18 * 32 * (2 * 1024 * 4096 + 4096 + 1024)
    assert count.positions == 2 * (512 * 1024 + 2 * 1024 * 1024)


# Table 9, within one of its last digit: 124.57 is printed as 124, 424.94 as 425.
@pytest.mark.parametrize(
    ("model", "gflops", "last_digit"),
    [
        ("t5_base_paper", 124, 1),
        ("t5_1_0_base", 124, 1),
        ("switch_base_paper", 124, 1),
        ("switch_base_released", 124, 1),
        ("t5_1_0_large", 425, 1),
        ("switch_large_released", 425, 1),
        ("t5_1_1_xxl", 6300, 100),
        ("switch_xxl_released", 6300, 100),
        ("switch_c_paper", 890, 10),
    ],
)
def test_flops_per_sequence_reproduce_table_9(model, gflops, last_digit):
    flops = flops_per_sequence(load(model), 512, 114)
    assert abs(flops.total / 1e9 - gflops) < last_digit
    assert train_flops(load(model), 512, 114) == 3 * flops.total


def test_misprinted_large_costs_433_gflops():
    assert round(flops_per_sequence(load("switch_large_paper"), 512, 114).total / 1e9) == 433


def test_flops_by_hand():
    """One encoder and one decoder block, 3 and 2 tokens, every FFN sparse."""
    config = ModelConfig(
        architecture="encoder_decoder",
        vocab_size=11,
        d_model=4,
        d_ff=6,
        num_heads=2,
        d_head=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
        activation="relu",
        switch=SwitchConfig(
            num_experts=5, every=1, d_ff=7, capacity_factor=2.0, min_capacity=1, group_size=10
        ),
    )
    flops = flops_per_sequence(config, 3, 2)
    # Four matrices of 4 x 4 at 3 tokens, then twice (self, cross) at 2 tokens.
    assert flops.attention == 2 * 4 * 16 * (3 + 2 + 2)
    assert flops.scores == flops.weighted_values == 2 * 4 * (3 * 3 + 2 * 2 + 2 * 3)
    assert flops.dense_ffn == 0
    assert flops.experts == 2 * (2 * 4 * 7) * (3 + 2)
    assert flops.expert_slots == 2 * flops.experts
    assert flops.router == 2 * 4 * 5 * (3 + 2)
    assert flops.logits == 2 * 4 * 11 * 2
    # Keys and values of cross-attention run at 3 tokens, not at 2.
    assert flops.cross_memory == 2 * 2 * 16 * (3 - 2)


def matrix_flops(jaxpr) -> int:
    """2 a multiply-add of every matrix product, in calls inside of the program too.

    A product that contracts nothing is a broadcast (the relative bias over rows).
    """
    total = 0
    for equation in equations(jaxpr):
        if equation.primitive.name == "dot_general":
            (contracting, _), _ = equation.params["dimension_numbers"]
            summed = [equation.invars[0].aval.shape[dim] for dim in contracting]
            if summed:
                total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(summed)
    return total


def traced_flops(config: ModelConfig, batch: dict, *, is_training: bool = False) -> float:
    """Those of a forward pass of one of the batch's rows."""
    model = functools.partial(forward, config, is_training=is_training)
    program = jax.make_jaxpr(model)(abstract_params(config), batch)
    return matrix_flops(program.jaxpr) / len(batch["decoder_positions"])


def batch_of(rows: int, encoder_length: int, decoder_length: int) -> dict:
    return {
        f"{stack}_{feature}": jax.ShapeDtypeStruct((rows, length), "int32")
        for stack, length in (("encoder", encoder_length), ("decoder", decoder_length))
        for feature in ("input_tokens", "segment_ids", "positions", "prefix_mask")
    }


@pytest.mark.parametrize(
    ("model", "encoder_length", "decoder_length"),
    [("dense_tiny", 128, 32), ("switch_tiny", 128, 32), ("gpt3_medium_moe", 0, 256)],
)
def test_executed_flops_are_the_real_forward_pass_s(model, encoder_length, decoder_length):
    config = dataclasses.replace(
        load(model), num_decoder_layers=4, scan_layers=False, remat="none"
    )
    # 16 rows: 4096, 2048 and 512 tokens a group, where the capacity has no remainder.
    batch = batch_of(16, encoder_length, decoder_length)
    traced = traced_flops(config, batch, is_training=True)
    flops = flops_per_sequence(config, encoder_length, decoder_length)
    # 0.02% are the relative bias and the balance loss, which are not counted.
    assert flops.executed == pytest.approx(traced, rel=1e-3)


@pytest.mark.parametrize("positions", ["tupe", "tupe_relative"])
def test_the_correlations_of_positions_are_counted_as_they_are_built(positions):
    config = ModelConfig(
        "encoder_decoder", 11, 16, 24, 2, 8, 2, 4, positions=positions, max_length=40,
        scale_attention=True,
    )  # fmt: skip
    assert count_parameters(config).total == num_elements(abstract_params(config))
    # One row: positions are projected once for all rows of a batch.
    traced = traced_flops(config, batch_of(1, 32, 16))
    relative = 2 * 32 * 2 * (32**2 + 16**2) * config.has_relative_bias
    assert flops_per_sequence(config, 32, 16).executed == traced - relative


@pytest.mark.parametrize(
    "changes",
    [
        dict(qk_norm="head", attention_bias="qkv"),
        dict(qk_norm="all", attention_bias="all", norm_place="after", num_kv_heads=1),
    ],
)
def test_grouped_heads_norms_and_biases_are_counted_as_they_are_built(changes):
    config = dataclasses.replace(MODERN, switch=None, **changes)
    assert count_parameters(config).total == num_elements(abstract_params(config))
    traced = traced_flops(config, batch_of(1, 0, 16))
    assert flops_per_sequence(config, 0, 16).executed == traced


BASE = ModelConfig(
    "encoder_decoder", 11, 64, 96, 4, 24, 2, 2, use_bias=True, switch=SwitchConfig(4, every=2)
)
VARIANTS = {
    "top2": dict(router=RouterConfig(num_selected=2)),
    "bias": dict(router=RouterConfig(bias_update_rate=0.1)),
    "load": dict(router=RouterConfig(balance_scope="batch", balance_load="previous_step")),
    "logit_bias": dict(router=RouterConfig(has_logit_bias=True)),
    "merged": dict(router=RouterConfig(counts_merged=True)),
    "hash": dict(router=RouterConfig(kind="hash", exploration="none")),
    "dropless": dict(router=RouterConfig(overflow="dropless")),
    "tasks": dict(router=RouterConfig("task", num_tasks=2)),
    "expert_choice": dict(stacks="encoder", router=RouterConfig(kind="expert_choice")),
    "shared": dict(shared_d_ff=40),
    "attention": dict(sublayers="attention"),
    "both": dict(sublayers="both", d_ff=56),
    "ffn_experts": dict(sublayers="attention", attention_experts="ffn", stacks="encoder"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_switch_layer_is_counted_as_it_is_built(name):
    config = with_switch(BASE, min_capacity=1, **VARIANTS[name])
    assert count_parameters(config).total == num_elements(abstract_params(config))
    # 512 and 256 tokens a group, where the capacity has no remainder.
    batch = batch_of(16, 32, 16) | {"task_ids": jax.ShapeDtypeStruct((16,), "int32")}
    traced = traced_flops(config, batch, is_training=True)
    # The relative bias and the balance loss are not counted.
    flops = flops_per_sequence(config, 32, 16)
    assert flops.executed == pytest.approx(traced, rel=5e-3)
    assert flops.executed <= traced


def test_two_experts_a_token_are_two_active_ones():
    two = dataclasses.replace(
        BASE, switch=SwitchConfig(4, every=2, router=RouterConfig(num_selected=2))
    )
    one, both = count_parameters(BASE), count_parameters(two)
    assert active(two) - both.dense == 2 * (active(BASE) - one.dense)
    assert both.total == one.total
    once, twice = (flops_per_sequence(config, 4, 3) for config in (BASE, two))
    assert twice.experts == 2 * once.experts and twice.expert_slots == 2 * once.expert_slots


def test_where_experts_choose_every_slot_is_a_token_s():
    config = load("expert_choice_tiny")
    flops = flops_per_sequence(config, 128, 32)
    assert experts_per_token(config.switch) == 2.0 and flops.experts == flops.expert_slots


def test_one_expert_makes_every_parameter_active():
    config = load("se_moe", "NUM_EXPERTS = 1")
    assert active(config) == count_parameters(config).total


@pytest.mark.parametrize(
    ("experts", "group", "factor", "slots"),
    [(128, 8192, 1.25, 1.25), (2048, 2048, 1.0, 2.0), (8, 4, 9.0, 8.0)],
)
def test_slots_per_token(experts, group, factor, slots):
    """The factor; `min_capacity` 2 in Switch-C's groups; no more than the group's tokens."""
    switch = SwitchConfig(num_experts=experts, group_size=group, min_capacity=2)
    assert slots_per_token(switch, factor) == slots


def test_encoder_length_must_fit_the_architecture():
    with pytest.raises(ValueError, match="encoder_length=512 does not fit.*'decoder_only'"):
        flops_per_sequence(load("gpt3_medium"), 512, 114)
    with pytest.raises(ValueError, match="encoder_length=0 does not fit.*'encoder_decoder'"):
        flops_per_sequence(load("switch_tiny"), 0, 114)


@pytest.mark.parametrize("model", MODELS)
def test_docs_models_table_is_true(model):
    config = load(model)
    count = count_parameters(config)
    flops = flops_per_sequence(config, *lengths(config)).total
    table = (ROOT / "docs/models.md").read_text()
    row = re.search(rf"^\| `{model}\.gin` \| (.*?) \| (.*?) \| (.*?) \|", table, re.MULTILINE)
    assert row, f"docs/models.md has no row for {model}.gin"
    assert row.groups() == (
        _short(count.total, "B"),
        _short(active(config), "B"),
        _short(flops, "G"),
    )


def _short(number: int, billions: str) -> str:
    """Four digits: 222.9M, 7.415B, 1571B; 124.6G, 6.260T for FLOPs."""
    if billions == "G" and number >= 1e12:
        number, unit = number / 1e12, "T"
    elif number >= 1e9:
        number, unit = number / 1e9, billions
    else:
        number, unit = number / 1e6, "M"
    return f"{number:.{4 - len(str(int(number)))}f}{unit}"


def test_slots_by_row_are_counted_by_length():
    """12 of 24 tokens' slots in the encoder, all 6 in the decoder, of each of 4 experts."""
    switch = SwitchConfig(4, expert_capacity=12)
    model = ModelConfig("encoder_decoder", 9, 8, 16, 1, 8, 2, 2, activation="relu")
    flops = flops_per_sequence(dataclasses.replace(model, switch=switch), 24, 6)
    assert flops.expert_slots == 2 * (2 * 8 * 16) * 4 * (12 + 6)
