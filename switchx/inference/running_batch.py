# SPDX-License-Identifier: Apache-2.0
"""A batch of sentences that are decoded together, and may join and leave while it runs.

Lengths and batch sizes are rounded up to the next of a few buckets, so that few programs are
compiled.

Dims: B batch, L beams, M input length, P prompt, T new tokens
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from switchx.inference.config import (
    BATCHES,
    LENGTHS,
    NEW_TOKENS,
    DecodingConfig,
    rounded_up,
)
from switchx.inference.decode import (
    Decoding,
    enlarged,
    insert,
    prefill,
    run_step,
    run_until,
    run_until_by,
    take_rows,
)
from switchx.inference.logits_processors import Rows, RowSettings
from switchx.inference.model_mesh import ONE_DEVICE, ModelMesh
from switchx.inference.offload.chosen_experts import ChosenExperts
from switchx.inference.program_cache import PROGRAMS
from switchx.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One output of a model for one input.

    Attributes:
        tokens: the new tokens, without the end.
        score: log-probability over length ** length_penalty, the end included.
        is_finished: whether it reached its end; otherwise it was cut off.
        token_logprobs: log-probability of each token under the model, and of the end where it
            is finished; None where they were not asked for.
        top_logprobs: log-probabilities of the likeliest tokens in each of these places, by
            token id, the likeliest first.
        routing: routing numbers of each token that was read, in each Switch layer, by stack
            (`ReadRouting.of_text`); None where they were not asked for.
    """

    tokens: list[int]
    score: float
    is_finished: bool
    token_logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    routing: dict[str, np.ndarray] | None = dataclasses.field(default=None, repr=False)

    def with_logprobs(self, number: int | None) -> "Hypothesis":
        """A copy with the `number` likeliest tokens in each place; None drops all logprobs."""
        if self.token_logprobs is None or number is None:
            return dataclasses.replace(self, token_logprobs=None, top_logprobs=None)
        top = [dict(itertools.islice(each.items(), number)) for each in self.top_logprobs]
        return dataclasses.replace(self, top_logprobs=top if number else None)

    def stopped(self, num_tokens: int, decoding: DecodingConfig) -> "Hypothesis":
        """A copy with only the first tokens, which end at a stop string; without
        log-probabilities it keeps the score of all tokens."""
        ended = dataclasses.replace(self, tokens=self.tokens[:num_tokens], is_finished=True)
        if self.token_logprobs is None:
            return ended
        own, top = self.token_logprobs[:num_tokens], self.top_logprobs
        score = math.fsum(own[len(decoding.forced_prefix) :])
        score /= num_tokens**decoding.length_penalty
        top = top and top[:num_tokens]
        return dataclasses.replace(ended, score=score, token_logprobs=own, top_logprobs=top)

    def without_first(self, number: int) -> "Hypothesis":
        """A copy without the first tokens."""
        own, top = self.token_logprobs, self.top_logprobs
        return dataclasses.replace(
            self,
            tokens=self.tokens[number:],
            token_logprobs=own and own[number:],
            top_logprobs=top and top[number:],
        )

    def as_dict(self) -> dict[str, Any]:
        """All fields but `routing` as a dictionary; log-probabilities only where there are
        some."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        values.pop("routing", None)
        return values


class RunningBatch:
    """Sentences that are decoded together, each starting and ending on its own.

    A sentence is named by the number that `admit` gives it.

    Attributes:
        waiting: sentences that were not abandoned and whose hypotheses `advance` has not
            returned yet.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        decoding: DecodingConfig,
        *,
        devices: ModelMesh = ONE_DEVICE,
        experts: ChosenExperts | None = None,
        is_recorded: bool = False,
    ):
        """A batch without sentences.

        Args:
            config, params: the model, as `for_decoding` returns it.
            devices: the devices of `params`, for which `config` was made.
            experts: the experts that are moved to the device when they are chosen, where
                `params` are the other parameters; None where `params` has all experts.
            is_recorded: whether hypotheses have their `routing`.
        """
        self._experts, self._is_recorded = experts, is_recorded
        self._config, self._params, self._decoding = config, params, decoding
        self._devices, self._batches = devices, devices.batches(config, BATCHES)
        self.waiting: set[int] = set()
        self._num_admitted = 0
        # The state, its programs' settings, and the length that inputs are padded to.
        self._state, self._program, self._length = None, decoding.program, 0
        # The sentence of each row; in free rows, one that is no longer waiting, or -1.
        self._sentence_B = np.full(0, -1)

    def admit(
        self,
        inputs: Sequence[Sequence[int]],
        *,
        numbers: Sequence[int],
        token_limits: Sequence[int],
        settings: RowSettings | None = None,
        length: int | None = None,
        places: int = 1,
    ) -> list[int]:
        """Reads inputs, to be decoded beside the running ones; returns their names.

        A running batch is enlarged where it has no room for so many inputs, or for inputs or
        answers of this length; it stays enlarged until it has no sentences.

        Args:
            numbers: the sentences' numbers, on which samples depend. A number may occur twice.
            token_limits: most new tokens of each input.
            settings: NumPy arrays with one entry for each sentence; None takes the settings of
                `decoding`.
            length: least length that inputs are padded to; None takes the next of `LENGTHS`.
            places: least number of places for new tokens; it is rounded up to one of
                `NEW_TOKENS`.
        """
        length = length or rounded_up(max(map(len, inputs)), LENGTHS)
        places = rounded_up(max(places, *token_limits), NEW_TOKENS)
        if self.waiting:
            length = max(length, self._length)
            places = max(places, self._program.max_new_tokens)
        else:
            self._state = None
        program = self._decoding.program_of(places, is_recorded=self._is_recorded)
        settings = settings or RowSettings.of([self._decoding] * len(inputs))
        fresh = self._prefilled(program, inputs, length, numbers, token_limits, settings)
        names = list(range(self._num_admitted, self._num_admitted + len(inputs)))
        if self._state is None:
            self._state, B = fresh, fresh.begin_B.shape[0]
            self._sentence_B = np.pad(names, (0, B - len(names)), constant_values=-1)
        else:
            self._insert(program, fresh, length, names)
        self._program, self._length = program, length
        self._num_admitted += len(names)
        self.waiting.update(names)
        return names

    def advance(
        self, most_steps: int | None = None, *, is_compacting: bool = True
    ) -> dict[int, list[Hypothesis]]:
        """Decodes until enough sentences have ended for a smaller batch, or all have.

        Args:
            most_steps: most steps to decode; None sets no limit.
            is_compacting: whether the batch becomes smaller, where its pruning is `compact`;
                False where others wait to be admitted.

        Returns:
            The ended sentences' hypotheses, the best first; none where no score is finite.
        """
        if not self.waiting:
            return {}
        B, num_live = len(self._sentence_B), 0
        is_compacting &= self._decoding.pruning == "compact" and self._batches[0] < B
        if is_compacting:
            num_live = self._batches[self._batches.index(B) - 1]
        steps = self._program.max_new_tokens if most_steps is None else most_steps
        self._state = self._until(num_live, int(self._state.step) + steps)
        is_live_B = self._devices.fetch(self._state.rows.is_live_B)
        ended = self._results(~is_live_B)
        self.waiting -= ended.keys()
        if self.waiting and is_compacting:
            self._compact(is_live_B)
        return ended

    @property
    def num_steps(self) -> int:
        """Steps since the batch was empty; each gives every running sentence a token."""
        return int(self._state.step)

    def abandon(self, sentences: Iterable[int]) -> None:
        """Stops decoding these sentences."""
        gone = self.waiting & set(sentences)
        if not gone:
            return
        self.waiting -= gone
        self._keep_live(~np.isin(self._sentence_B, list(gone)))

    def so_far(self) -> dict[int, Hypothesis]:
        """The waiting sentences' hypotheses so far, in greedy decoding and sampling."""
        if not self.waiting:
            return {}
        texts, length_B = self._texts(), self._devices.fetch(self._state.hypotheses.length_B)
        return {
            int(sentence): self._hypothesis(texts, (row, 0), length_B[row])
            for row, sentence in enumerate(self._sentence_B)
            if sentence in self.waiting
        }

    def _prefilled(self, program, inputs, length: int, numbers, token_limits, settings):
        """The state of these sentences; further rows fill it up to one of the batch sizes."""
        size, B = len(inputs), rounded_up(len(inputs), self._batches)
        number_B, max_new_tokens_B = np.full(B, -1, np.int32), np.ones(B, np.int32)
        number_B[:size], max_new_tokens_B[:size] = numbers, token_limits
        # A row that fills up the batch has the last one's settings, whatever they are.
        settings = settings.fitted(program)
        settings = jax.tree.map(
            lambda leaf: np.pad(
                leaf, [(0, B - size), *[(0, 0)] * (leaf.ndim - 1)], mode="edge"
            ),
            settings,
        )
        rows = Rows(number_B, np.arange(B) < size, max_new_tokens_B, settings)
        has_encoder = self._config.is_encoder_decoder
        token_BM, is_token_BM = padded(
            inputs, B, length, program.pad_id, on_the_left=not has_encoder
        )
        # Such a row attends to something: a softmax over nothing would average everything.
        is_token_BM[size:, 0 if has_encoder else -1] = True
        texts = {"prompt_BP": token_BM, "is_prompt_BP": is_token_BM}
        if has_encoder:
            texts = {
                "source_BM": token_BM,
                "is_source_BM": is_token_BM,
                "prompt_BP": np.full((B, 1), self._decoding.start_id, np.int32),
                "is_prompt_BP": np.ones((B, 1), bool),
            }
        arrays = {"params": self._params, "rows": rows, **texts}
        settings = self._config, program
        if self._experts is not None:
            how = {"shape": (B, length), "options": self._devices.options}
            return self._experts.run(prefill, *settings, **how, **arrays)
        return self._devices.run(prefill, settings, (B, length), **arrays)

    def _insert(self, program, fresh: Decoding, length: int, names: list[int]) -> None:
        """Puts prefilled rows into free ones; adds rows and places where there are too few."""
        is_free_B = ~np.isin(self._sentence_B, list(self.waiting))
        B = rounded_up(np.sum(~is_free_B) + len(names), self._batches)
        if (program, length) != (self._program, self._length):
            source = length if self._config.is_encoder_decoder else None
            sizes = program, fresh.is_prompt_BP.shape[1], source
            self._change(enlarged, sizes, batch=self._state)
        while (size := len(is_free_B)) < B:
            # Size by size, just as the batch shrinks.
            more = self._batches[self._batches.index(size) + 1] - size
            is_live_B = np.pad(~is_free_B, (0, more))
            row_B = np.minimum(np.arange(size + more), size - 1)
            self._change(_taken, (), batch=self._state, row_B=row_B.astype(np.int32))
            self._keep_live(is_live_B)
            is_free_B = ~is_live_B
            self._sentence_B = np.pad(self._sentence_B, (0, more), constant_values=-1)
        row_B = np.full(fresh.begin_B.shape[0], len(is_free_B), np.int32)
        row_B[: len(names)] = np.flatnonzero(is_free_B)[: len(names)]
        self._change(insert, (), state=self._state, fresh=fresh, row_B=row_B)
        self._sentence_B[row_B[: len(names)]] = names

    def _change(self, function, sizes: tuple, **arrays) -> None:
        """Replaces the state with the result of a function that does not run the model."""
        shapes = tuple(x.shape for x in jax.tree.leaves(arrays))
        self._state = self._devices.run(function, sizes, (self._config, shapes), **arrays)

    def _keep_live(self, is_live_B) -> None:
        """Ends the sentences of the other rows."""
        rows = self._state.rows
        rows = dataclasses.replace(rows, is_live_B=rows.is_live_B & jnp.array(is_live_B))
        self._state = dataclasses.replace(self._state, rows=rows)

    def _until(self, num_live: int, last_step: int) -> Decoding:
        settings, params, state = (self._config, self._program), self._params, self._state
        limits = {"num_live": np.int32(num_live), "last_step": np.int32(last_step)}
        arrays = {"params": params, "state": state, **limits}
        shape = len(self._sentence_B), self._length
        if self._experts is not None:
            how = {"shape": shape, "options": self._devices.options}
            run = functools.partial(self._experts.run, **how)
            return run_until_by(run, *settings, **arrays)
        return self._devices.run(run_until, settings, shape, **arrays)

    def _compact(self, is_live_B) -> None:
        """Gathers the live rows into the smallest batch that holds them.

        It goes size by size: programs for neighbouring sizes only, not for any two.
        """
        size = rounded_up(np.count_nonzero(is_live_B), self._batches)
        while (B := len(is_live_B)) > size:
            smaller = self._batches[self._batches.index(B) - 1]
            live = np.flatnonzero(is_live_B)
            # A finished row fills up the batch: it stays finished, and has no sentence.
            fill = np.flatnonzero(~is_live_B)[:1].repeat(max(0, smaller - len(live)))
            row_B = np.concatenate([live, fill]).astype(np.int32)
            self._change(_taken, (), batch=self._state, row_B=row_B)
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
        texts = self._texts()
        _, score_BL, *_ = texts
        max_new_tokens_B = self._devices.fetch(self._state.rows.max_new_tokens_B)
        return {
            sentence: [
                self._hypothesis(texts, (row, beam), max_new_tokens_B[row])
                for beam in np.flatnonzero(np.isfinite(score_BL[row]))  # that were found
            ]
            for sentence, row in ended.items()
        }

    def _texts(self) -> tuple:
        """The texts of all rows: token_BLT, score_BL, `LogProbs` or None, and the routing with
        its places or None."""
        state, hypotheses = self._state, self._state.hypotheses
        read = None
        if self._is_recorded:
            where = state.begin_B, hypotheses.result_lane_BLT, state.is_source_BM
            read = state.routing, *where, state.is_prompt_BP
        texts = *hypotheses.results(state.rows), hypotheses.result_log_probs, read
        return self._devices.fetch(texts)

    def _hypothesis(self, texts: tuple, place: tuple[int, int], most: int) -> Hypothesis:
        """The hypothesis in `place`, a row and a beam, with `most` tokens at most."""
        token_BLT, score_BL, log_probs, read = texts
        token_T, score = token_BLT[place][:most], float(score_BL[place])
        ends = np.flatnonzero(self._decoding.program.ends(token_T))
        length = int(ends[0]) if len(ends) else len(token_T)
        hypothesis = Hypothesis(token_T[:length].tolist(), score, bool(len(ends)))
        num_steps = length + len(ends[:1])
        if read is not None:
            routing, *where = read
            found = routing.of_text(place, num_steps, *where)
            hypothesis = dataclasses.replace(hypothesis, routing=found)
        if log_probs is None:
            return hypothesis
        own_T, token_TS, log_prob_TS = (
            x[place][:num_steps] for x in jax.tree.leaves(log_probs)
        )
        top = [
            dict(zip(tokens, values, strict=True))
            for tokens, values in zip(token_TS.tolist(), log_prob_TS.tolist(), strict=True)
        ]
        return dataclasses.replace(hypothesis, token_logprobs=own_T.tolist(), top_logprobs=top)


def are_compiled(generator, size: int, length: int, is_recorded: bool = False) -> bool:
    """Whether a `Generator`'s programs are kept for batches of up to `size` inputs that are
    padded to `length`."""
    steps = run_until if generator.experts is None else run_step
    program = dataclasses.replace(generator.decoding.program, is_recorded=is_recorded)
    settings = generator.config, program
    batches = generator.devices.batches(generator.config, BATCHES)
    sizes = batches[: batches.index(rounded_up(size, batches)) + 1]
    if generator.decoding.pruning != "compact":
        sizes = sizes[-1:]
    options = generator.devices.options
    return all(PROGRAMS.holds(steps, settings, (B, length), options) for B in sizes)


def _taken(batch: Decoding, row_B) -> Decoding:
    return take_rows(batch, row_B)


def padded(inputs, B: int, length: int, pad_id: int = 0, *, on_the_left: bool = False):
    """Token lists as an array `[B, length]`, and where in it there are tokens."""
    token_BM = np.full((B, length), pad_id, np.int32)
    is_token_BM = np.zeros((B, length), bool)
    for row, tokens in enumerate(inputs):
        places = slice(length - len(tokens), None) if on_the_left else slice(len(tokens))
        token_BM[row, places], is_token_BM[row, places] = tokens, True
    return token_BM, is_token_BM
