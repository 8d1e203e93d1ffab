# SPDX-License-Identifier: Apache-2.0
"""`switchx bench moe`: one sparse layer by dispatcher and number of experts.

It times forward and backward of a Switch layer at capacity factor 1.0 against the dense layer
of equal FLOPs, and a decoding step against the work that its tokens need. All programs live in
one process and take turns. Flaxformer's layer is measured, too, where it can be imported.
Dims: B rows of a batch, L tokens of a row, D model, F feed-forward, E experts
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.timing import Contender, speedup, take_turns
from switchx.bench.compiled_layer import in_direction
from switchx.bench.peers.layers import (
    LayerShape,
    flaxformer_forward,
    flaxformer_layer,
    has_peer,
)
from switchx.bench.train import MEBIBYTE, NUM_STEPS, in_ms, needed_bytes
from switchx.compiled.flops import matrix_flops
from switchx.layers.ffn import DenseFFN
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import params_of, with_params
from switchx.moe.layer import SwitchFFN
from switchx.results import Check, Report

# One group of half the default size; the one-hot einsum's cost grows with its square.
ROWS, LENGTH = 16, 256
DENSE = ModelConfig(
    "decoder_only",
    vocab_size=8,
    d_model=256,
    d_ff=1024,
    num_heads=4,
    d_head=64,
    num_decoder_layers=1,
    activation="relu",
)
NUM_EXPERTS = (8, 16, 32, 64, 128)
DISPATCHERS = ("gather", "dropless", "einsum")  # those for one device; the first is the default

DECODED_TOKENS, DECODING_EXPERTS = 4, 128


def switch_model(num_experts: int, dispatcher: str) -> ModelConfig:
    """`DENSE` with Switch layers of capacity factor 1.0, all tokens in one group."""
    switch = SwitchConfig(
        num_experts,
        every=1,
        capacity_factor=1.0,
        eval_capacity_factor=1.0,
        dispatcher=dispatcher,
    )
    return dataclasses.replace(DENSE, switch=switch)


def compiled_contender(name: str, function, *arguments) -> Contender:
    """A contender that makes one compiled call."""
    compiled = jax.jit(function).lower(*arguments).compile()

    def step():
        return jax.block_until_ready(compiled(*arguments))

    return Contender(name, step, peak_bytes=needed_bytes(compiled))


def training_contender(name: str, config: ModelConfig) -> Contender:
    """One of our layers; see `backward_contender`."""
    make = DenseFFN if config.switch is None else SwitchFFN
    module = make(config, key=jax.random.key(0))
    is_token_BL = jnp.ones((ROWS, LENGTH), bool)

    def forward(params, x_BLD):
        layer = with_params(module, params)
        if config.switch is None:
            return layer(x_BLD), jnp.float32(0)
        y_BLD, stats = layer(x_BLD, is_token_BL, is_training=True)
        return y_BLD, stats.balance_loss

    return backward_contender(name, forward, params_of(module))


def flaxformer_contender(num_experts: int) -> Contender:
    """Flaxformer's layer; see `backward_contender`."""
    shape = LayerShape(num_experts, DENSE.d_model, DENSE.d_ff, ROWS, LENGTH)
    layer = flaxformer_layer(shape, group_size=ROWS * LENGTH)
    forward, params = flaxformer_forward(layer, batch()[0])
    return backward_contender(f"flaxformer {num_experts}", forward, params)


def backward_contender(name: str, forward, params) -> Contender:
    """A forward and backward pass: gradients of the input and of every parameter.

    Args:
        forward: `forward(params, x_BLD)` -> outputs, balance loss.
    """
    backward, _ = in_direction(forward, params, None, "backward")
    return compiled_contender(name, backward, params, *batch())


def batch():
    """Normally distributed `x_BLD` and `dy_BLD`."""
    values = np.random.default_rng(0).normal(size=(2, ROWS, LENGTH, DENSE.d_model))
    return tuple(jnp.array(values, jnp.float32))


def run(rounds: int) -> Report:
    """Measures every dispatcher with 8 to 128 experts, and a decoding step."""
    dense = training_contender("dense", DENSE)
    switches = {
        (dispatcher, n): training_contender(f"{dispatcher} {n}", switch_model(n, dispatcher))
        for n in NUM_EXPERTS
        for dispatcher in DISPATCHERS
    }
    peers = [flaxformer_contender(n) for n in (8, 32) if has_peer("flaxformer")]
    contenders = [dense, *switches.values(), *peers]
    take_turns(contenders, rounds, NUM_STEPS)
    rows = [_row(each, dense) for each in contenders]
    decode_rows, decode_checks = decoding(rounds)
    of_einsum = speedup(switches["gather", 32], switches["einsum", 32])
    checks = [
        Check("default8_vs_dense", speedup(switches["gather", 8], dense), ">=0.8"),
        Check("default32_vs_einsum", of_einsum, ">=2"),
    ]
    if peers:
        speed = speedup(switches["gather", 32], peers[-1])
        checks.append(Check("default32_vs_flaxformer", speed, ">=1"))
    return Report("bench moe", rows + decode_rows, checks + decode_checks)


def decoding(rounds: int) -> tuple[list[dict[str, Any]], list[Check]]:
    """Measures FLOPs and time of the compiled layer against an ideal: 4 tokens, 128 experts.

    The ideal is a program that is given the four experts' matrices, one for each token, and
    multiplies by them and by the router.
    """
    D, F = DENSE.d_model, DENSE.d_ff
    config = switch_model(DECODING_EXPERTS, DISPATCHERS[0])
    module = SwitchFFN(config, key=jax.random.key(0))
    params = params_of(module)
    rng = np.random.default_rng(0)
    x_BLD = jnp.array(rng.normal(size=(DECODED_TOKENS, 1, D)), jnp.float32)
    is_token_BL = jnp.ones((DECODED_TOKENS, 1), bool)

    def decode(params, x_BLD):
        return with_params(module, params)(x_BLD, is_token_BL, is_training=False)[0]

    def ideal(w_in_BDF, w_out_BFD, w_router_DE, x_BLD):
        h_BLF = jax.nn.relu(jnp.einsum("BLD,BDF->BLF", x_BLD, w_in_BDF))
        return jnp.einsum("BLF,BFD->BLD", h_BLF, w_out_BFD), x_BLD @ w_router_DE

    ours = compiled_contender("decode 4 tokens, 128 experts", decode, params, x_BLD)
    names = ("w_in_EDF", "w_out_EFD")
    few = (jnp.array(params["experts"][name][:DECODED_TOKENS]) for name in names)
    best = compiled_contender("decode, ideal", ideal, *few, params["w_router_DE"], x_BLD)
    take_turns([best, ours], rounds, num_steps=20)
    ideal_flops = DECODED_TOKENS * (2 * 2 * D * F + 2 * D * DECODING_EXPERTS)
    hlo = jax.jit(decode).lower(params, x_BLD).compile().as_text()
    flops = matrix_flops(hlo, trips=DECODED_TOKENS)  # one for each row
    counted = ((best, ideal_flops), (ours, flops))
    rows = [_row(each, best) | {"mflops": number / 1e6} for each, number in counted]
    return rows, [
        Check("decode_flops_vs_ideal", flops / ideal_flops, "<=4"),
        Check("decode_time_vs_ideal", 1 / speedup(ours, best), "<=4"),
    ]


def _row(each: Contender, baseline: Contender) -> dict[str, Any]:
    return {
        "layer": each.name,
        **in_ms(each),
        "peak_mib": each.peak_bytes / MEBIBYTE,
        "baseline": baseline.name,
        "vs_baseline": speedup(each, baseline),
    }
