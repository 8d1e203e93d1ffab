# SPDX-License-Identifier: Apache-2.0
"""The routing of the tokens that decoding reads: kept on the device, cut out by text, recorded.

Prefill and steps route each token that they read; the results stay beside the KV cache, in the
same places. A search's text is looked up in the lanes that its ancestors had
(`beam_search.py`), so rows are never moved or copied.
Dims: B batch, L lanes or length, M source, P prompt, T steps in the ring, Q places of a
chunk, N Switch layers, S numbers of a token in a layer: R ranked experts, their R
probabilities, the margin
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from switchx.inference.config import DecodingProgram
from switchx.models.config import ModelConfig
from switchx.routing_record import StackRecord


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReadRouting:
    """The routing of all tokens that a batch has read, in float32: exact for ids up to 2^24.

    Attributes:
        source_NBMS: numbers of the encoder's tokens; None where it has no Switch layers.
        prompt_NBPS: numbers of the prompt, whose last token the first step reads again; None
            where the decoder has no Switch layers, like the next one.
        step_NBTLS: numbers of the tokens that each step in the ring has read.
    """

    source_NBMS: jax.Array | None
    prompt_NBPS: jax.Array | None
    step_NBTLS: jax.Array | None

    @classmethod
    def start(cls, config: ModelConfig, program: DecodingProgram, batch: int, source, prompt):
        """Returns the routing before the first step.

        Args:
            source: `RoutingStats` of the encoder; None where there are none.
            prompt: numbers of the decoder's prompt; None without a prompt.
        """
        step_NBTLS = None
        if config.num_sparse_layers_of("decoder"):
            T, L = program.max_new_tokens, program.num_lanes
            prompt = prompt_numbers(config, batch, 0) if prompt is None else prompt
            step_NBTLS = jnp.zeros((*prompt.shape[:2], T, L, prompt.shape[3]))
        return cls(None if source is None else _numbers(source), prompt, step_NBTLS)

    def with_step(self, stats, place, is_live_B) -> "ReadRouting":
        """A copy with the tokens that a step read, if live; others keep all of their ring."""
        if self.step_NBTLS is None:
            return self
        new_NBTLS = _numbers(stats)[:, :, None]
        old_NBTLS = jax.lax.dynamic_slice_in_dim(self.step_NBTLS, place, 1, axis=2)
        new_NBTLS = jnp.where(is_live_B[:, None, None, None], new_NBTLS, old_NBTLS)
        step_NBTLS = jax.lax.dynamic_update_slice_in_dim(
            self.step_NBTLS, new_NBTLS, place, axis=2
        )
        return dataclasses.replace(self, step_NBTLS=step_NBTLS)

    def of_text(
        self, place, num_steps: int, begin_B, lane_BLT, is_source_BM, is_prompt_BP
    ) -> dict[str, np.ndarray]:
        """The numbers of one text, NumPy arrays `[N, L, S]` by stack.

        Args:
            place: indices of the text's row and hypothesis.
            num_steps: number of the text's tokens that steps have read.
            lane_BLT: `result_lane_BLT` of the hypotheses; the other arrays are `Decoding`'s.
        """
        row, _ = place
        lane_T = lane_BLT[place]
        found = {}
        place_T = (begin_B[row] + np.arange(num_steps)) % len(lane_T)
        if self.source_NBMS is not None:
            found["encoder"] = self.source_NBMS[:, row, is_source_BM[row]]
        if self.step_NBTLS is not None:
            prompt_NPS = self.prompt_NBPS[:, row, is_prompt_BP[row]]
            new_NTS = self.step_NBTLS[:, row][:, place_T, lane_T[place_T]]
            found["decoder"] = np.concatenate([prompt_NPS, new_NTS], axis=1)
        return found


def prompt_numbers(config: ModelConfig, batch: int, length: int) -> jax.Array | None:
    """Zeros for prompts' numbers `[N, B, P, S]`; None without Switch layers in the decoder."""
    N = config.num_sparse_layers_of("decoder")
    return jnp.zeros((N, batch, length, 2 * config.switch.num_ranks + 1)) if N else None


def with_numbers(number_NBPS, first, y_BQD, stats):
    """A copy with the numbers of Q places from `first` on; None stays None."""
    if number_NBPS is None:
        return None
    new_NBQS = _numbers(stats)
    return jax.lax.dynamic_update_slice_in_dim(number_NBPS, new_NBQS, first, axis=2)


def _numbers(stats) -> jax.Array:
    """The numbers `[N, B, L, S]` in the `RoutingStats` of one stack."""
    (choices,) = stats.choices
    parts = choices.rank_BLR, choices.prob_BLR, choices.margin_BL[..., None]
    return jnp.concatenate([each.astype(jnp.float32) for each in parts], axis=-1)


def stack_record(
    config: ModelConfig, texts: Sequence[Sequence[int]], numbers: Sequence[np.ndarray]
) -> StackRecord:
    """The record of texts that one stack has read, of a model that drops no token.

    Args:
        texts: token ids; the last token of a text that was cut off was not read.
        numbers: `[N, L, S]` of each text, as `ReadRouting.of_text` returns them; they go on
            beyond the end of a text that was stopped.
    """
    R, E = config.switch.num_ranks, config.switch.num_experts
    both = list(zip(texts, numbers, strict=True))
    length_B = [min(len(tokens), number_NLS.shape[1]) for tokens, number_NLS in both]
    N, _, S = numbers[0].shape
    B = len(texts)
    L = max(length_B)
    token_BL, segment_BL = np.zeros((2, B, L), np.int32)
    # Padding is routed nowhere; its ranks are distinct experts, as in any other place.
    number_NBLS = np.tile(np.pad(np.arange(R, dtype=np.float32), (0, S - R)), (N, B, L, 1))
    for row, ((tokens, number_NLS), length) in enumerate(zip(both, length_B, strict=True)):
        token_BL[row, :length], segment_BL[row, :length] = tokens[:length], 1
        number_NBLS[:, row, :length] = number_NLS[:, :length]
    rank_NBLR = number_NBLS[..., :R].astype(np.int16)
    chosen_NBLS = rank_NBLR[..., : config.switch.router.num_selected]
    return StackRecord(
        token_BL,
        segment_BL,
        rank_NBLR,
        prob_NBLR=number_NBLS[..., R : 2 * R],
        margin_NBL=number_NBLS[..., -1],
        is_dropped_NBLS=np.zeros(chosen_NBLS.shape, bool),
        expert_NBLS=np.where(segment_BL[..., None] > 0, chosen_NBLS, np.int16(E)),
    )
