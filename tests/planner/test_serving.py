# SPDX-License-Identifier: Apache-2.0
"""Splits of a model in use: bytes are those of the exported programs, the best one is taken."""

import dataclasses
import math

import jax.numpy as jnp
import pytest

from switchx.hardware.spec import load_hardware
from switchx.models.params import abstract_params
from switchx.partitioning.mesh import MeshSpec
from switchx.planner.serving import ServedModel, choose_split, splits, weights_of
from tests.cases import slow
from tests.data.refusals import refused
from tests.inference import exports
from tests.inference.exports import SHAPES, export
from tests.inference.tiny import CONFIG, trained

GROUPED = dict(positions="rotary", num_kv_heads=2, qk_norm="all", scale_attention=True)
NEW_TOKENS = 5  # of `exports.export`


def served(config=CONFIG, bits=None, **changes) -> ServedModel:
    weights = weights_of(abstract_params(config), bits)
    sizes = dict(batch_size=SHAPES.batch_size, input_length=SHAPES.input_length)
    return ServedModel(config, weights, max_new_tokens=NEW_TOKENS, **(sizes | changes))


def bytes_on_a_device(described: dict, mesh: dict) -> float:
    """Of arrays as a manifest of an export describes them."""
    total = 0.0
    for each in described.values():
        parts = math.prod(mesh[axis] for axes in each["axes"] for axis in axes)
        width = 0.5 if each["dtype"] == "int4" else jnp.dtype(each["dtype"]).itemsize
        total += math.prod(each["shape"]) / parts * width
    return total


@pytest.mark.parametrize(
    ("bits", "config"),
    [
        (None, CONFIG),
        slow(4, exports.DECODER),
        slow(None, dataclasses.replace(exports.DECODER, **GROUPED)),
        slow(None, dataclasses.replace(exports.DECODER, **GROUPED | {"num_kv_heads": 1})),
    ],
)
def test_weights_and_cache_are_those_of_the_exported_programs(tmp_path, bits, config):
    (split,) = (
        each
        for each in splits(served(config, bits), 4, None)
        if each.sizes == {"expert": 2, "model": 2}
    )
    mesh = MeshSpec(data=1, **split.sizes)
    manifest = export(tmp_path / "e", trained(bits, config), ("tpu",), mesh=mesh)
    programs = manifest["programs"]["tpu"]
    assert split.weights == bytes_on_a_device(programs["weights"], manifest["mesh"])
    cache = {name: x for name, x in programs["step"]["in"].items() if name.startswith("cache/")}
    assert split.cache == bytes_on_a_device(cache, manifest["mesh"])


def test_every_split_divides_and_bits_make_experts_smaller():
    # E=4, 4 heads, F=32, 4 rows: experts and rows over `expert`, heads and F over `model`.
    found = {
        (each.layout.data, each.layout.expert, each.layout.model)
        for each in splits(served(), 8, None)
    }
    assert found == {(4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4)}
    assert splits(served(batch_size=3), 8, None) == []
    whole, int4 = (sum(_bytes(served(bits=bits))) for bits in (None, 4))
    assert int4 < whole
    experts = [array for array in served(bits=4).weights if "/experts/w_" in array.name]
    assert {array.itemsize for array in experts} == {0.5, 4}


def test_splits_are_chosen_by_bytes_or_steps_and_memory_is_asked_for():
    by_bytes = splits(served(), 4, None)
    assert by_bytes[0].total == min(each.total for each in by_bytes)
    # All of a tiny model is read in less time than a message takes.
    assert choose_split(served(), 4, hardware=load_hardware("v5e")).name == "data=4"
    assert choose_split(served(), 4, sizes={"model": 4}).name == "model=4"
    large = dataclasses.replace(CONFIG, d_model=1024, d_ff=4096, num_heads=16, d_head=64)
    assert choose_split(served(large), 4, hardware=load_hardware("v5e")).name != "data=4"
    one = splits(served(), 1, None)[0]
    gib = 2**30
    assert choose_split(served(), 1, one.total).name == "data=1"
    with refused(
        f"a device of {one.total * 0.9 / gib:,.3g} GiB is too small: split over 1 (data=1) the "
        f"model needs {one.total / gib:,.3g} GiB a device<any>use 2 devices, more memory"
    ):
        choose_split(served(), 1, one.total * 0.9)
    with refused("use more memory, fewer experts, fewer bits, or a smaller batch"):
        choose_split(served(), 4, 1.0)
    for sizes, message in (
        ({"expert": 3}, "num_experts=4 is not divisible by mesh axis 'expert' of size 3<any>"),
        (
            {"data": 3},
            "batch_size=4 is not <any>'data x expert' of size 3; use a size of 1, 2, 4<any>",
        ),
        ({"model": 3}, "num_heads=4 is not <any>'model' of size 3; use a size of 1, 2, 4<any>"),
        (
            {"fsdp": 3},
            "mesh axis 'fsdp' of size 3<any>split over data, expert, model; use<any>",
        ),
    ):
        with refused(message):
            choose_split(served(), 3, sizes=sizes)
    with refused("devices=3: no split divides 4 rows, 4 heads, F=32 and 4 experts; <any>"):
        choose_split(served(), 3)


def test_sums_over_two_nodes_go_through_the_network_between_them():
    large = dataclasses.replace(
        CONFIG, d_model=4096, d_ff=16384, num_heads=16, d_head=256, num_decoder_layers=16
    )
    model, hardware = served(large, batch_size=16), load_hardware("h200")
    assert choose_split(model, 16, hardware=hardware).layout.model <= 8
    inside, between = hardware.inside, hardware.between
    fast = inside.achieved_bytes_per_s
    sums, row = 3 * 16, 4096 * 4  # of self-attention, cross-attention and FFN
    # A ring is gone around twice: 7 messages in a node, or 14 in nodes and 2 between them.
    by_hand = {
        "data=2,model=8": 2 * (7 / 8 * 8 * row / fast + 7 * inside.latency_s),
        "model=16": 2 * 15 / 16 * 16 * row / min(fast, 8 * between.achieved_bytes_per_s)
        + 2 * (14 * inside.latency_s + 2 * between.latency_s),
    }
    for split in splits(model, 16, hardware):
        read = (split.weights + split.cache) / hardware.memory.achieved_bytes_per_s
        if split.name in by_hand:
            spent = sums * by_hand.pop(split.name)
            assert split.step_s - read == pytest.approx(spent)
    assert not by_hand


def test_buffers_are_those_of_the_widest_block():
    def working(**changes) -> float:
        switch = dataclasses.replace(CONFIG.switch, d_ff=8, **changes)
        config = dataclasses.replace(
            CONFIG, switch=switch, num_encoder_layers=2, num_decoder_layers=2
        )
        (split,) = splits(served(config), 1, None)
        return split.working

    # A token passes F=32 of a dense block, or 8 of its expert and what is shared; float32.
    values = SHAPES.batch_size * SHAPES.input_length * (3 if CONFIG.is_gated else 2) * 4
    dense, sparse = working(every=2), working(every=1)
    assert dense - sparse == (32 - 8) * values
    assert working(every=2, shared_d_ff=64) - dense == (64 + 8 - 32) * values


def _bytes(model: ServedModel):
    return (math.prod(array.shape) * array.itemsize for array in model.weights)
