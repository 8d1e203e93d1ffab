# SPDX-License-Identifier: Apache-2.0
"""From token lists to token lists: batches by length, decoded and pruned, in input order.

Sizes are few, so that few programs are compiled: lengths and batches are rounded up to the
next of a fixed list. Dims: B M P
"""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from switchx.inference.decode import Decoding, prefill, run_until, take_rows
from switchx.inference.decoding_config import DecodingConfig
from switchx.inference.model_mesh import ONE_DEVICE, ModelMesh
from switchx.inference.rows import Rows
from switchx.models.config import ModelConfig
from switchx.models.unroll import unrolled

# Of texts: each at most 1.5 times the one before, so at most a third is padding.
LENGTHS = tuple(sorted({base << shift for base in (2, 3) for shift in range(16)} | {1}))
# Of batches: a program is compiled for each that a shrinking batch passes.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """What a model says to one input.

    Attributes:
        tokens: new ones, without the end.
        score: log-probability over length ** length_penalty, the end included.
        is_finished: it came to an end; otherwise it was cut off.
    """

    tokens: list[int]
    score: float
    is_finished: bool


def for_decoding(
    config: ModelConfig, params: dict, *, is_dropless: bool = True
) -> tuple[ModelConfig, dict]:
    """A model as decoding runs it: unrolled, and without capacity.

    Args:
        is_dropless: no token is dropped, so that a sentence's result does not depend on the
            others of its batch; False keeps the capacity of evaluation, and it may.

    Raises:
        ValueError: the model cannot be decoded step by step.
    """
    config, params = unrolled(config, params)
    switch = config.switch
    if switch is not None and switch.has_attention:
        raise ValueError(
            f"SwitchConfig.sublayers={switch.sublayers!r}: experts in self-attention have no "
            "cache; decode a model with sublayers='ffn', or score whole texts"
        )
    return without_capacity(config) if is_dropless else config, params


def without_capacity(config: ModelConfig) -> ModelConfig:
    """The same model, where no expert is ever full.

    Experts that choose their tokens (`expert_choice`) have no capacity to do without: there
    a text's result depends on the others of its group.
    """
    switch = config.switch
    if switch is None or switch.router.kind == "expert_choice":
        return config
    # Without capacity, padding takes no token's place: nothing needs to count it.
    router = dataclasses.replace(
        switch.router, overflow="dropless", balance_counts="first_choice", padding="ignored"
    )
    dispatcher = switch.dispatcher
    if dispatcher in ("sort", "einsum") and not switch.has_attention:
        dispatcher = "dropless"
    switch = dataclasses.replace(switch, router=router, dispatcher=dispatcher)
    return dataclasses.replace(config, switch=switch)


class Generator:
    """`for number, hypotheses in generator(inputs): ...`, longest inputs first.

    Attributes:
        config, params: from `for_decoding`.
        decoding: how text is generated.
        batch_size: most sentences at once.
        devices: where `params` are.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        decoding: DecodingConfig,
        batch_size: int = 32,
        devices: ModelMesh = ONE_DEVICE,
    ):
        if not 1 <= batch_size <= BATCHES[-1]:
            raise ValueError(f"batch_size={batch_size}; use 1 to {BATCHES[-1]}")
        self.config, self.params = devices.config(config, params), params
        self.decoding, self.batch_size, self.devices = decoding, batch_size, devices
        self.batches = devices.batches(config, BATCHES)

    def __call__(
        self,
        inputs: Sequence[Sequence[int]],
        rooms: Sequence[int] | None = None,
        *,
        first_number: int = 0,
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """Yields an input's number and its hypotheses, the best first.

        Args:
            inputs: what the encoder reads, or what a decoder-only model goes on from.
            rooms: most new tokens of each, up to `max_new_tokens`; None is that for all.
            first_number: of the first input, where they are part of more; samples depend on
                the number.

        Raises:
            ValueError: an input is empty, has ids outside of the vocabulary, or is longer
                than the model's positions; a room is not 1 to `max_new_tokens`. Nothing
                has been generated.
        """
        most = self.decoding.max_new_tokens
        rooms = [most] * len(inputs) if rooms is None else rooms
        for index, (tokens, room) in enumerate(zip(inputs, rooms, strict=True)):
            if fault := self.fault(tokens):
                raise ValueError(f"input {first_number + index} {fault}")
            if not 1 <= room <= most:
                raise ValueError(
                    f"input {first_number + index} has room for {room} new tokens; use 1 to "
                    f"{most}, or a larger max_new_tokens"
                )
        order = sorted(range(len(inputs)), key=lambda index: -len(inputs[index]))
        for first in range(0, len(order), self.batch_size):
            indices = order[first : first + self.batch_size]
            yield from self._decode(
                [first_number + index for index in indices],
                [inputs[index] for index in indices],
                [rooms[index] for index in indices],
            )

    def fault(self, tokens: Sequence[int]) -> str | None:
        """Why an input cannot be read, to be said after its name; or None."""
        if not len(tokens):
            return "is empty; give at least one token"
        if wrong := token_fault(self.config, tokens):
            return wrong
        if self.config.has_position_table:
            needed = len(tokens) + self.decoding.max_new_tokens
            if self.config.is_encoder_decoder:
                needed = max(len(tokens), 1 + self.decoding.max_new_tokens)
            if needed > self.config.max_length:
                return (
                    f"needs {needed} positions, the model has {self.config.max_length}; "
                    "shorten it, or lower max_new_tokens"
                )
        return None

    def _decode(
        self, numbers: list[int], inputs, rooms: list[int]
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        B = rounded_up(len(inputs), self.batches)
        room_B = np.ones(B, np.int32)
        room_B[: len(rooms)] = rooms
        state = self._prefill(numbers, inputs, room_B)
        while True:
            smaller = 0
            if self.decoding.pruning == "compact" and self.batches[0] < B:
                smaller = self.batches[self.batches.index(B) - 1]
            with self.devices.use():
                state = run_until(self.config, self.decoding, self.params, state, smaller)
            is_live_B = np.asarray(state.rows.is_live_B)
            yield from self._results(state, ~is_live_B)
            live = np.flatnonzero(is_live_B)
            if not len(live):
                return
            B = rounded_up(len(live), self.batches)
            # Some finished row fills up: it stays finished, and has no number any more.
            fill = np.flatnonzero(~is_live_B)[:1].repeat(B - len(live))
            with self.devices.use():
                state = take_rows(state, jnp.asarray(np.concatenate([live, fill])))
            number_B = jnp.where(jnp.arange(B) < len(live), state.rows.sentence_B, -1)
            rows = dataclasses.replace(state.rows, sentence_B=number_B)
            state = dataclasses.replace(state, rows=rows)

    def _prefill(self, numbers: list[int], inputs, room_B) -> Decoding:
        B, length = len(room_B), rounded_up(max(map(len, inputs)), LENGTHS)
        is_decoder_only = not self.config.is_encoder_decoder
        token_BM, is_token_BM = _padded(
            inputs, B, length, self.decoding.pad_id, on_the_left=is_decoder_only
        )
        number_B = np.full(B, -1, np.int32)
        number_B[: len(numbers)] = numbers
        texts = {"prompt_BP": token_BM, "is_prompt_BP": is_token_BM}
        if not is_decoder_only:
            texts = {
                "source_BM": token_BM,
                "is_source_BM": is_token_BM,
                "prompt_BP": np.full((B, 1), self.decoding.start_id, np.int32),
                "is_prompt_BP": np.ones((B, 1), bool),
            }
        with self.devices.use():
            return prefill(
                self.config,
                self.decoding,
                self.params,
                rows=Rows(jnp.array(number_B), jnp.array(number_B >= 0), jnp.array(room_B)),
                **{name: jnp.array(value) for name, value in texts.items()},
            )

    def _results(self, state: Decoding, is_ended_B) -> Iterator[tuple[int, list[Hypothesis]]]:
        token_BLT, score_BL, sentence_B, room_B = jax.device_get(
            (*state.hypotheses.results(self.decoding), state.rows.sentence_B, state.rows.room_B)
        )
        for row in np.flatnonzero(is_ended_B & (sentence_B >= 0)):
            yield (
                int(sentence_B[row]),
                [
                    self._hypothesis(tokens[: room_B[row]], float(score))
                    for tokens, score in zip(token_BLT[row], score_BL[row], strict=True)
                ],
            )

    def _hypothesis(self, token_T, score: float) -> Hypothesis:
        ends = np.flatnonzero(token_T == self.decoding.eos_id)
        length = int(ends[0]) if len(ends) else len(token_T)
        return Hypothesis(token_T[:length].tolist(), score, bool(len(ends)))


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


def rounded_up(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest of the sizes that is enough."""
    return sizes[bisect.bisect_left(sizes, size)]


def _padded(inputs, B: int, length: int, pad_id: int, *, on_the_left: bool):
    token_BM = np.full((B, length), pad_id, np.int32)
    is_token_BM = np.zeros((B, length), bool)
    for row, tokens in enumerate(inputs):
        places = slice(length - len(tokens), None) if on_the_left else slice(len(tokens))
        token_BM[row, places], is_token_BM[row, places] = tokens, True
    # A row that fills up attends to something: softmax over nothing is an average of all.
    is_token_BM[len(inputs) :, -1 if on_the_left else 0] = True
    return token_BM, is_token_BM
