# SPDX-License-Identifier: Apache-2.0
"""A batch of sentences that are decoded together: advanced, read while it runs, left early.

Lengths and batches are rounded up to the next of a few buckets, so that few programs are
compiled.

Dims: B batch, L beams, M input length, P prompt, T new tokens
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from switchx.inference.chosen_experts import ChosenExperts
from switchx.inference.config import BATCHES, LENGTHS, DecodingConfig, rounded_up
from switchx.inference.decode import Decoding, prefill, run_until, run_until_by, take_rows
from switchx.inference.model_mesh import ONE_DEVICE, ModelMesh
from switchx.inference.programs import PROGRAMS
from switchx.inference.sampling import Rows, RowSettings
from switchx.models.config import ModelConfig


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


class RunningBatch:
    """Sentences that are decoded together; the first token of each is there from the start.

    A sentence is named by its place in `inputs`.

    Attributes:
        waiting: those whose hypotheses `advance` has not given yet, and that were not
            abandoned.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        decoding: DecodingConfig,
        inputs: Sequence[Sequence[int]],
        *,
        numbers: Sequence[int],
        token_limits: Sequence[int],
        settings: RowSettings | None = None,
        length: int | None = None,
        devices: ModelMesh = ONE_DEVICE,
        experts: ChosenExperts | None = None,
    ):
        """Reads the inputs.

        Args:
            config, params: from `for_decoding`.
            numbers: of the sentences: samples depend on them. They may occur twice.
            token_limits: most new tokens of each, up to `max_new_tokens`.
            settings: NumPy arrays with an entry a sentence; None is those of `decoding`.
            length: that inputs are padded to; None is the next of `LENGTHS`.
            devices: where `params` are; `config` is the one for them.
            experts: that come to the device when they are chosen, whose `params` these are;
                None where `params` has all.
        """
        self._experts = experts
        self._config, self._params, self._decoding = config, params, decoding
        self._program = decoding.program
        self._devices, self._batches = devices, devices.batches(config, BATCHES)
        self.waiting = set(range(len(inputs)))
        # The sentence of each row; the others fill the batch up.
        self._sentence_B = np.full(rounded_up(len(inputs), self._batches), -1)
        self._sentence_B[: len(inputs)] = np.arange(len(inputs))
        self._length = length or rounded_up(max(map(len, inputs)), LENGTHS)
        settings = settings or RowSettings.of([decoding] * len(inputs))
        self._state = self._prefilled(inputs, self._rows(numbers, token_limits, settings))

    def advance(self, most_steps: int | None = None) -> dict[int, list[Hypothesis]]:
        """Decodes until sentences enough have ended for a smaller batch, or all have.

        Args:
            most_steps: no longer than so many steps; None sets no limit.

        Returns:
            The hypotheses of those that ended, the best first.
        """
        B = len(self._sentence_B)
        is_compacting = self._decoding.pruning == "compact" and self._batches[0] < B
        smaller = self._batches[self._batches.index(B) - 1] if is_compacting else 0
        last_step = self._program.max_new_tokens
        if most_steps is not None:
            last_step = int(self._state.step) + most_steps
        self._state = self._until(smaller, last_step)
        is_live_B = self._devices.fetch(self._state.rows.is_live_B)
        ended = self._results(~is_live_B)
        self.waiting -= ended.keys()
        if self.waiting and is_compacting:
            self._compact(is_live_B)
        return ended

    def abandon(self, sentences: Iterable[int]) -> None:
        """Decodes these no further."""
        gone = self.waiting & set(sentences)
        if not gone:
            return
        self.waiting -= gone
        rows = self._state.rows
        is_wanted_B = jnp.array(~np.isin(self._sentence_B, list(gone)))
        rows = dataclasses.replace(rows, is_live_B=rows.is_live_B & is_wanted_B)
        self._state = dataclasses.replace(self._state, rows=rows)

    def tokens_so_far(self) -> dict[int, list[int]]:
        """New tokens, without the end, of those who wait; for greedy decoding and samples."""
        token_BT, length_B = self._devices.fetch(
            (self._state.hypotheses.token_BT, self._state.hypotheses.length_B)
        )
        return {
            int(sentence): self._hypothesis(token_BT[row, : length_B[row]], 0.0).tokens
            for row, sentence in enumerate(self._sentence_B)
            if sentence in self.waiting
        }

    def _rows(self, numbers, token_limits, settings) -> Rows:
        B, size = len(self._sentence_B), len(numbers)
        number_B, max_new_tokens_B = np.full(B, -1, np.int32), np.ones(B, np.int32)
        number_B[:size], max_new_tokens_B[:size] = numbers, token_limits
        # A row that fills up has the settings of the last one, whatever they are.
        settings = jax.tree.map(lambda leaf: np.pad(leaf, (0, B - size), mode="edge"), settings)
        return Rows(number_B, self._sentence_B >= 0, max_new_tokens_B, settings)

    def _prefilled(self, inputs, rows: Rows) -> Decoding:
        B, decoding = len(self._sentence_B), self._decoding
        has_encoder = self._config.is_encoder_decoder
        token_BM, is_token_BM = padded(
            inputs, B, self._length, decoding.pad_id, on_the_left=not has_encoder
        )
        # A row that fills up attends to something: softmax over nothing is an average of all.
        is_token_BM[len(inputs) :, 0 if has_encoder else -1] = True
        texts = {"prompt_BP": token_BM, "is_prompt_BP": is_token_BM}
        if has_encoder:
            texts = {
                "source_BM": token_BM,
                "is_source_BM": is_token_BM,
                "prompt_BP": np.full((B, 1), decoding.start_id, np.int32),
                "is_prompt_BP": np.ones((B, 1), bool),
            }
        arrays = {"params": self._params, "rows": rows, **texts}
        settings = self._config, self._program
        if self._experts is not None:
            return self._experts.run(prefill, *settings, **arrays)
        with self._devices.use():
            return PROGRAMS.run(prefill, settings, (B, self._length), **arrays)

    def _until(self, num_live: int, last_step: int) -> Decoding:
        settings, params, state = (self._config, self._program), self._params, self._state
        limits = {"num_live": np.int32(num_live), "last_step": np.int32(last_step)}
        arrays = {"params": params, "state": state, **limits}
        if self._experts is not None:
            return run_until_by(self._experts.run, *settings, **arrays)
        shape = len(self._sentence_B), self._length
        with self._devices.use():
            return PROGRAMS.run(run_until, settings, shape, **arrays)

    def _compact(self, is_live_B) -> None:
        """Gathers the live rows into the smallest batch that holds them.

        Size by size: a program for each two sizes that follow each other, not for any two.
        """
        size = rounded_up(np.count_nonzero(is_live_B), self._batches)
        while (B := len(is_live_B)) > size:
            smaller = self._batches[self._batches.index(B) - 1]
            live = np.flatnonzero(is_live_B)
            # Some finished row fills the batch up: it stays finished, and has no sentence.
            fill = np.flatnonzero(~is_live_B)[:1].repeat(max(0, smaller - len(live)))
            settings, row_B = (self._config, self._program), np.concatenate([live, fill])
            arrays = {"batch": self._state, "row_B": row_B.astype(np.int32)}
            with self._devices.use():
                self._state = PROGRAMS.run(_smaller, settings, (B, self._length), **arrays)
            self._sentence_B = np.concatenate([self._sentence_B[live], np.full_like(fill, -1)])
            is_live_B = np.arange(smaller) < len(live)

    def _results(self, is_ended_B) -> dict[int, list[Hypothesis]]:
        ended = {
            int(sentence): row
            for row, sentence in enumerate(self._sentence_B)
            if is_ended_B[row] and sentence in self.waiting
        }
        if not ended:
            return {}
        rows = self._state.rows
        token_BLT, score_BL, max_new_tokens_B = self._devices.fetch(
            (*self._state.hypotheses.results(rows), rows.max_new_tokens_B)
        )
        return {
            sentence: [
                self._hypothesis(tokens[: max_new_tokens_B[row]], float(score))
                for tokens, score in zip(token_BLT[row], score_BL[row], strict=True)
                if np.isfinite(score)  # a search may have found fewer texts than beams
            ]
            for sentence, row in ended.items()
        }

    def _hypothesis(self, token_T, score: float) -> Hypothesis:
        ends = np.flatnonzero(token_T == self._decoding.eos_id)
        length = int(ends[0]) if len(ends) else len(token_T)
        return Hypothesis(token_T[:length].tolist(), score, bool(len(ends)))


def are_compiled(generator, size: int, length: int) -> bool:
    """Whether a `Generator`'s programs are kept for batches of so many inputs, padded to
    `length`, and for the smaller ones that these become."""
    if generator.experts is not None:
        return True  # they have programs of their own
    settings = generator.config, generator.decoding.program
    batches = generator.devices.batches(generator.config, BATCHES)
    sizes = batches[: batches.index(rounded_up(size, batches)) + 1]
    wanted = [(prefill, sizes[-1]), (run_until, sizes[-1])]
    if generator.decoding.pruning == "compact":
        wanted += [(run_until, B) for B in sizes[:-1]] + [(_smaller, B) for B in sizes[1:]]
    return all(PROGRAMS.holds(function, settings, (B, length)) for function, B in wanted)


def _smaller(config, program, batch: Decoding, row_B) -> Decoding:
    return take_rows(batch, row_B)


def padded(inputs, B: int, length: int, pad_id: int = 0, *, on_the_left: bool = False):
    """Token lists as an array `[B, length]`, and where in it tokens are."""
    token_BM = np.full((B, length), pad_id, np.int32)
    is_token_BM = np.zeros((B, length), bool)
    for row, tokens in enumerate(inputs):
        places = slice(length - len(tokens), None) if on_the_left else slice(len(tokens))
        token_BM[row, places], is_token_BM[row, places] = tokens, True
    return token_BM, is_token_BM
