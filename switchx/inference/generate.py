# SPDX-License-Identifier: Apache-2.0
"""From token lists to token lists: batches by length, decoded and pruned, in input order."""

import dataclasses
from collections.abc import Iterator, Sequence

from switchx.inference.chosen_experts import ChosenExperts
from switchx.inference.config import BATCHES, LENGTHS, DecodingConfig
from switchx.inference.expert_slots import slotted
from switchx.inference.model_mesh import ONE_DEVICE, ModelMesh
from switchx.inference.quantize import separate_experts
from switchx.inference.running_batch import Hypothesis, RunningBatch
from switchx.models.config import ModelConfig, require_one_task, require_our_blocks


def for_decoding(config: ModelConfig, *, is_dropless: bool = True) -> ModelConfig:
    """The configuration that a model is decoded with.

    Args:
        is_dropless: no token is dropped, so that a sentence's result does not depend on the
            others of its batch; False keeps the capacity of evaluation, and it may.

    Raises:
        ValueError: the model cannot be decoded step by step.
    """
    require_our_blocks(config, "decoding")
    require_one_task(config)
    switch = config.switch
    if switch is not None and switch.has_attention:
        raise ValueError(
            f"SwitchConfig.sublayers={switch.sublayers!r}: experts in self-attention have no "
            "cache; decode a model with sublayers='ffn', or score whole texts"
        )
    return without_capacity(config) if is_dropless else with_capacity(config)


def without_capacity(config: ModelConfig) -> ModelConfig:
    """The same model, where no expert is ever full.

    Experts that choose their tokens (`expert_choice`) have no capacity to do without: there
    a text's result depends on the others of its group.
    """
    switch = config.switch
    if switch is None or switch.router.kind == "expert_choice":
        return with_capacity(config)
    # Without capacity, padding takes no token's place: nothing needs to count it.
    router = dataclasses.replace(
        switch.router, overflow="dropless", balance_counts="first_choice", padding="ignored"
    )
    # Where nothing is dropped, groups decide nothing: with any `expert_capacity` a row is one,
    # so that the devices of a mesh have whole groups.
    switch = dataclasses.replace(
        switch,
        router=router,
        expert_capacity=1,
        dispatcher=switch.dispatcher if switch.has_attention else "dropless",
    )
    return dataclasses.replace(config, switch=switch)


def with_capacity(config: ModelConfig) -> ModelConfig:
    """The same model with the groups that it has on one device; the compiler splits them."""
    if config.switch is None or config.switch.has_attention:
        return config
    switch = dataclasses.replace(config.switch, dispatcher="gather")
    return dataclasses.replace(config, switch=switch)


class Generator:
    """`for number, hypotheses in generator(inputs): ...`, longest inputs first.

    Attributes:
        config, params: from `for_decoding`.
        decoding: how text is generated.
        batch_size: most sentences at once.
        devices: where `params` are.
        experts: whose `params` these are, where experts come to the device when they are
            chosen; None where `params` has all.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        decoding: DecodingConfig,
        batch_size: int = 32,
        devices: ModelMesh = ONE_DEVICE,
        experts: ChosenExperts | None = None,
    ):
        if not 1 <= batch_size <= BATCHES[-1]:
            raise ValueError(f"batch_size={batch_size}; use 1 to {BATCHES[-1]}")
        if not decoding.beam_size <= config.vocab_size:
            raise ValueError(
                f"beam_size={decoding.beam_size} with a vocabulary of {config.vocab_size}: a "
                f"beam begins with a token of its own; use 1 to {config.vocab_size}"
            )
        devices.check(config, params)
        self.config = config if experts is None else slotted(config)
        self.params = separate_experts(params) if devices is ONE_DEVICE else params
        self.decoding, self.batch_size, self.devices = decoding, batch_size, devices
        self.experts = experts

    def __call__(
        self,
        inputs: Sequence[Sequence[int]],
        token_limits: Sequence[int] | None = None,
        *,
        first_number: int = 0,
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """Yields an input's number and its hypotheses, the best first.

        Args:
            inputs: what the encoder reads, or what a decoder-only model goes on from.
            token_limits: most new tokens of each, up to `max_new_tokens`; None is that for all.
            first_number: of the first input, where they are part of more; samples depend on
                the number.

        Raises:
            ValueError: an input is empty, has ids outside of the vocabulary, or is longer
                than the model's positions; a limit is not 1 to `max_new_tokens`. Nothing
                has been generated.
        """
        most = self.decoding.max_new_tokens
        token_limits = [most] * len(inputs) if token_limits is None else token_limits
        for index, (tokens, limit) in enumerate(zip(inputs, token_limits, strict=True)):
            if fault := self.fault(tokens):
                raise ValueError(f"input {first_number + index} {fault}")
            if not 1 <= limit <= most:
                raise ValueError(
                    f"input {first_number + index} may have {limit} new tokens; use 1 to "
                    f"{most}, or a larger max_new_tokens"
                )
        order = sorted(range(len(inputs)), key=lambda index: -len(inputs[index]))
        for first in range(0, len(order), self.batch_size):
            indices = order[first : first + self.batch_size]
            numbers = [first_number + index for index in indices]
            batch = RunningBatch(
                self.config,
                self.params,
                self.decoding,
                devices=self.devices,
                experts=self.experts,
            )
            batch.admit(
                [inputs[index] for index in indices],
                numbers=numbers,
                token_limits=[token_limits[index] for index in indices],
            )
            while batch.waiting:
                for index, hypotheses in batch.advance().items():
                    yield numbers[index], hypotheses

    def fault(self, tokens: Sequence[int]) -> str | None:
        """Why an input cannot be read, to be said after its name; or None."""
        if not len(tokens):
            return "is empty; give at least one token"
        if wrong := token_fault(self.config, tokens):
            return wrong
        needed = positions_needed(self.config, len(tokens), self.decoding.max_new_tokens)
        if needed is not None and needed > self.config.max_length:
            return (
                f"needs {needed} positions, the model has {self.config.max_length}; "
                "shorten it, or lower max_new_tokens"
            )
        return None


def positions_needed(config: ModelConfig, input_length: int, new_tokens: int) -> int | None:
    """Rows of a position table that decoding reads, or None where the model has no table."""
    if not config.has_position_table:
        return None
    if config.is_encoder_decoder:
        return max(input_length, 1 + new_tokens)
    return input_length + new_tokens


def token_fault(config: ModelConfig, tokens: Sequence[int]) -> str | None:
    """What is wrong with token ids for any use, to be said after their name; or None."""
    if len(tokens) > LENGTHS[-1]:
        return f"has {len(tokens)} tokens; shorten it to {LENGTHS[-1]} at most"
    V, low, high = config.vocab_size, min(tokens, default=0), max(tokens, default=0)
    if low < 0 or high >= V:
        wrong = low if low < 0 else high
        return (
            f"has token id {wrong}, the vocabulary has 0 to {V - 1}; is it this model's "
            "vocabulary?"
        )
    return None
