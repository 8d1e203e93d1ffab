# SPDX-License-Identifier: Apache-2.0
"""What a server accepts, how long it waits, and the sizes that it has compiled programs for."""

import dataclasses

from switchx.inference.running_batch import BATCHES, LENGTHS, rounded_up

# Prompts are padded to one of these, answers have room for one of those: a program is
# compiled for each pair that occurs. A prompt is at most half padding, or short.
PROMPT_LENGTHS = tuple(length for length in LENGTHS if length >= 16 and length.bit_count() == 1)
ROOMS = (16, 64, 256, 1024, 4096)
DEFAULT_NEW_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Limits:
    """Whatever a client may ask of a server; times in seconds.

    Attributes:
        batch_size: most inputs that are decoded together.
        batch_wait_s: how long an input waits for others to be decoded with.
        max_waiting: inputs in the queue; a request that does not fit any more is refused.
        max_inputs: of a request.
        max_input_tokens, max_new_tokens: of an input and of its answer.
        max_beam_size: a program is compiled for each size that occurs.
        max_body_bytes: of a request.
        max_connections: open at once.
        body_timeout_s: for a request to arrive whole; also for its head.
        request_timeout_s: from there to its answer.
        drain_timeout_s: for all that runs, once the server is told to stop.
        warm_up_tokens: programs for prompts of up to so many tokens are compiled first.
    """

    batch_size: int = 8
    batch_wait_s: float = 0.005
    max_waiting: int = 256
    max_inputs: int = 64
    max_input_tokens: int = 1024
    max_new_tokens: int = 256
    max_beam_size: int = 4
    max_body_bytes: int = 1 << 20
    max_connections: int = 512
    body_timeout_s: float = 10.0
    request_timeout_s: float = 60.0
    drain_timeout_s: float = 60.0
    warm_up_tokens: int = 64

    def __post_init__(self):
        """Raises ValueError: a value is not above its least."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("batch_wait_s", "warm_up_tokens") else 1
            if field.name.endswith("_s") and field.name != "batch_wait_s":
                least = 0.01
            if value < least:
                raise ValueError(f"{field.name}={value}; use at least {least}")
        for name, most in (
            ("batch_size", BATCHES[-1]),
            ("max_input_tokens", PROMPT_LENGTHS[-1]),
            ("max_new_tokens", ROOMS[-1]),
            ("max_inputs", self.max_waiting),
        ):
            if getattr(self, name) > most:
                why = " (max_waiting)" if name == "max_inputs" else ""
                raise ValueError(f"{name}={getattr(self, name)}; use at most {most}{why}")

    @property
    def default_new_tokens(self) -> int:
        """Of a request that does not say how many."""
        return min(DEFAULT_NEW_TOKENS, self.max_new_tokens)

    def room(self, new_tokens: int) -> int:
        """Room of the compiled program for answers of so many tokens."""
        return min(rounded_up(new_tokens, ROOMS), self.max_new_tokens)

    def prompt_length(self, tokens: int) -> int:
        """Length of the compiled program for prompts of so many tokens."""
        return rounded_up(tokens, PROMPT_LENGTHS)
