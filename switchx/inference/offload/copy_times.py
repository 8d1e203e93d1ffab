# SPDX-License-Identifier: Apache-2.0
"""Decoding with experts in host memory: when copies hide, and what a call takes where not.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 3.2, streams all experts of a layer to the
device while the layer before it is computed. m tokens of an expert are 2 m FLOPs a weight, and
the weight is b bytes over the link, so that with F FLOPs/s and B bytes/s copies hide where

    2 m / F >= b / B,  or  m >= (b / 2) F / B

A decode step has a few tokens: there only the experts that are chosen are moved. T tokens of k
choices, all alike, are expected to choose E (1 - (1 - 1/E)^(T k)) of a layer. A call takes the
longer of its computing and its copies.
Symbols: E experts of a layer, T tokens, k choices of a token, D model, H heads, K head size
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp

from switchx.hardware.spec import Hardware
from switchx.models.config import ModelConfig
from switchx.models.flops import attention_weights, experts_per_token


@dataclasses.dataclass(frozen=True)
class Streaming:
    """What the formula predicts for one call: a prompt's, or a decode step.

    Attributes:
        stack: `encoder` or `decoder`.
        num_tokens: tokens of the call, all rows together.
        tokens_per_expert: mean number of tokens of an expert.
        least_tokens: tokens that an expert needs for its copy to be hidden by computation.
        compute_s: seconds of computation of all layers of the stack, and of a decoder's logits.
        ring_bytes, chosen_bytes: bytes that are copied for all of the stack's Switch layers,
            when whole layers stream, and when the chosen experts that are in no slot are moved.
        link_bytes_per_s: B, the bandwidth from host to device.
    """

    stack: Literal["encoder", "decoder"]
    num_tokens: int
    tokens_per_expert: float
    least_tokens: float
    compute_s: float
    ring_bytes: float
    chosen_bytes: float
    link_bytes_per_s: float

    @property
    def mode(self) -> Literal["ring", "chosen"]:
        """`ring` where streaming whole layers hides, else `chosen`."""
        return "ring" if self.tokens_per_expert >= self.least_tokens else "chosen"

    @property
    def moved_s(self) -> float:
        """Seconds of the copies of `mode`."""
        moved = self.ring_bytes if self.mode == "ring" else self.chosen_bytes
        return moved / self.link_bytes_per_s

    def __str__(self) -> str:
        has = "reach" if self.mode == "ring" else "are below"
        return (
            f"{self.stack}, {self.num_tokens:,} tokens: {self.tokens_per_expert:,.2f} an "
            f"expert {has} the {self.least_tokens:,.0f} that hide a copy: {self.mode}; "
            f"max({1e3 * self.compute_s:,.3g} ms of computing, {1e3 * self.moved_s:,.3g} ms of "
            "copies)"
        )


@dataclasses.dataclass(frozen=True)
class CallKind:
    """Calls of one kind that were run.

    Attributes:
        count: number of calls.
        ran: whether the calls streamed whole layers (`ring`) or moved chosen experts.
        streaming: what the formula predicts for each call.
    """

    count: int
    ran: Literal["ring", "chosen"]
    streaming: Streaming

    def __str__(self) -> str:
        how = "streamed whole layers" if self.ran == "ring" else "moved chosen experts"
        return f"{self.count:,} calls {how}; {self.streaming}"


def streaming(
    config: ModelConfig,
    hardware: Hardware,
    stack: Literal["encoder", "decoder"],
    num_tokens: int,
    expert_bytes: float,
    hits: float = 0.0,
) -> Streaming:
    """Evaluates the formula for one call on one device.

    Args:
        num_tokens: tokens that the stack reads in the call: all tokens of a batch's prompts, or
            one for each row in a decode step.
        expert_bytes: bytes of one expert as it is copied, scales of quantized ones included.
        hits: share of the chosen experts that are in slots already.

    Raises:
        ValueError: a stack without Switch layers, or hardware without `[host]`.
    """
    layers = config.num_sparse_layers_of(stack) if config.switch is not None else 0
    if not layers:
        raise ValueError(f"the {stack} has no Switch layers, and so no experts to stream")
    if hardware.host is None:
        raise ValueError(
            f"the spec of {hardware.name} has no [host]: nothing says how fast experts come "
            "to a device; add the table, specs/h200.toml is an example"
        )
    link = hardware.host.achieved_bytes_per_s
    E, choices = config.switch.num_experts, num_tokens * experts_per_token(config.switch)
    weights = _expert_weights(config)
    dense = _dense_weights(config, stack)
    touched = touched_experts(E, choices)
    flops = 2 * num_tokens * dense + 2 * choices * weights * layers
    itemsize = jnp.dtype(config.precision.compute).itemsize
    read = dense * itemsize + layers * touched * expert_bytes
    return Streaming(
        stack=stack,
        num_tokens=num_tokens,
        tokens_per_expert=choices / E,
        least_tokens=expert_bytes / weights / 2 * hardware.compute.flops_per_s / link,
        compute_s=max(
            flops / hardware.compute.flops_per_s, read / hardware.memory.achieved_bytes_per_s
        ),
        ring_bytes=layers * E * expert_bytes,
        chosen_bytes=layers * touched * (1 - hits) * expert_bytes,
        link_bytes_per_s=link,
    )


def kinds_of_call(
    config: ModelConfig,
    hardware: Hardware,
    calls: Mapping[tuple[tuple[int, int], ...], int],
    expert_bytes: float,
    ran: Literal["ring", "chosen"],
    hits: float = 0.0,
) -> list[CallKind]:
    """The kinds of calls by stack and tokens, those with the most tokens first.

    Args:
        calls: number of calls by the Switch layers of each, and R; each token has a row for
            each of its choices.
    """
    names, kinds = config.sparse_layer_names, collections.Counter()
    for rows, count in calls.items():
        sizes = {(names[layer].split()[0], R) for layer, R in rows}
        kinds.update({kind: count for kind in sizes})
    choices = config.switch.router.num_selected
    return [
        CallKind(
            count, ran, streaming(config, hardware, stack, R // choices, expert_bytes, hits)
        )
        for (stack, R), count in sorted(kinds.items(), key=lambda kind: -kind[0][1])
    ]


def streamed_layers(config: ModelConfig, slots: int) -> tuple[int, ...]:
    """Numbers of the Switch layers that a ring with K = `slots` of each stack streams: in each
    stack all but the first K - 2, whose experts stay on the device."""
    stacks = [layer.split()[0] for layer in config.sparse_layer_names]
    return tuple(
        number
        for number, stack in enumerate(stacks)
        if stacks[:number].count(stack) >= slots - 2
    )


def most_slots(config: ModelConfig) -> int:
    """The most slots of each stack that a ring of this model has; below 2 it takes none."""
    if config.switch is None or not config.switch.has_ffn or config.switch.has_attention:
        return 0
    layers = [config.num_sparse_layers_of(stack) for stack in ("encoder", "decoder")]
    return min(number for number in layers if number)


def touched_experts(num_experts: int, choices: float) -> float:
    """E (1 - (1 - 1/E)^c): the experts that c choices are expected to touch, all alike."""
    return num_experts * (1 - (1 - 1 / num_experts) ** choices)


def _expert_weights(config: ModelConfig) -> int:
    matrices = 3 if config.is_gated else 2
    return matrices * config.d_model * (config.switch.d_ff or config.d_ff)


def _dense_weights(config: ModelConfig, stack: str) -> int:
    """Weights that each token of a stack meets outside of experts."""
    D, layers = config.d_model, getattr(config, f"num_{stack}_layers")
    has_cross = stack == "decoder" and config.is_encoder_decoder
    matrices = 3 if config.is_gated else 2
    ffn = matrices * D * (layers - config.num_sparse_layers_of(stack)) * config.d_ff
    ffn += matrices * D * config.num_sparse_layers_of(stack) * (config.switch.shared_d_ff or 0)
    logits = D * config.vocab_size if stack == "decoder" else 0
    return attention_weights(config) * layers * (2 if has_cross else 1) + ffn + logits
