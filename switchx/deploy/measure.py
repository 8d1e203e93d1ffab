# SPDX-License-Identifier: Apache-2.0
"""What is measured after each deployment step: loss, tokens, tokens per second; and a sample.

All of it uses validation text of the run's own task: the loss of the weights on one device,
with no token dropped, as they are deployed; the tokens that the model writes for the first
inputs, greedily or by beam search.
Dims: E experts, R rows, D model
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from switchx import tree
from switchx.api import Model
from switchx.data.features import Batch
from switchx.data.loader import evaluation_batches
from switchx.data.mixtures import evaluated_tasks
from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, for_decoding, without_capacity
from switchx.inference.offload.chosen_experts import ChosenExperts, layer_path, on_host
from switchx.inference.offload.expert_slots import slotted
from switchx.inference.run_exported import ExportedModel
from switchx.models.config import ModelConfig
from switchx.models.knock_out import without_each
from switchx.models.params import forward
from switchx.models.reshape import LayerSample, gates_of_rows
from switchx.training.evaluate import eval_step, evaluate
from switchx.training.job import TrainingJob

# Number of inputs of a Switch layer on which experts are compared.
SAMPLE_ROWS = 256
TIMED_RUNS = 3
Tokens = list[list[int]]


@dataclasses.dataclass(frozen=True)
class ValidationText:
    """Validation text: batches for the loss, and prompts.

    Attributes:
        batches: batches of all tasks, as for evaluation in training.
        prompts: token ids of the inputs that a model answers.
    """

    batches: tuple[Batch, ...]
    prompts: Tokens

    @classmethod
    def of(cls, job: TrainingJob, num_prompts: int, input_length: int) -> "ValidationText":
        """The job's evaluation batches, and their first inputs, cut to `input_length`.

        A decoder-only model continues the first half of a row's first text.
        """
        batches = tuple(
            itertools.chain.from_iterable(
                evaluation_batches(
                    task,
                    job.evaluated_batches,
                    data_dir=job.data_dir,
                    num_batches=job.eval_batches,
                )
                for task in evaluated_tasks(job.source)
            )
        )
        stack = "encoder" if job.model.is_encoder_decoder else "decoder"
        prompts = []
        for batch in batches:
            tokens_BL, segment_BL = (
                batch[f"{stack}_{name}"] for name in ("input_tokens", "segment_ids")
            )
            for token_L, segment_L in zip(tokens_BL, segment_BL, strict=True):
                text = token_L[segment_L == 1].tolist()
                if stack == "decoder":
                    text = text[: (len(text) + 1) // 2]
                if text:
                    prompts.append(text[:input_length])
        return cls(batches, prompts[:num_prompts])


@dataclasses.dataclass(frozen=True)
class Written:
    """A model's answers to the prompts: the best hypothesis of each, and the speed."""

    tokens: Tokens
    tokens_per_s: float


def validation_loss(model: Model, text: ValidationText) -> float:
    """Nats per target token, as the mean over all batches; no token is dropped."""
    step = functools.partial(_eval_step, without_capacity(model.config))
    return evaluate(step, model.params, text.batches)["cross_entropy"]


_eval_step = jax.jit(eval_step, static_argnames="config")


def written_by(model: Model, text: ValidationText, decoding: DecodingConfig) -> Written:
    """The answers that the model writes in this process, on one device."""
    config, size = for_decoding(model.config), max(len(text.prompts), 1)
    generator = Generator(config, model.params, decoding, size)

    def write() -> list[tuple[list[int], bool]]:
        best = {number: hypotheses[0] for number, hypotheses in generator(text.prompts)}
        return [(best[n].tokens, best[n].is_finished) for n in sorted(best)]

    return _timed(write)


def written_by_export(model: ExportedModel, text: ValidationText) -> Written:
    """The answers that exported programs write, on the devices for which they were made."""

    def write() -> list[tuple[list[int], bool]]:
        best = [best for best, *_ in model.generate(text.prompts)]
        return [(each["tokens"], each["is_finished"]) for each in best]

    return _timed(write)


def tokens_differing(found: Tokens, expected: Tokens) -> int:
    """Number of places at which outputs differ, including those that one of them lacks."""
    pairs = itertools.zip_longest(found, expected, fillvalue=())
    return sum(
        one != other
        for pair in pairs
        for one, other in itertools.zip_longest(*map(tuple, pair))
    )


def sample_layers(model: Model, text: ValidationText) -> list[LayerSample]:
    """Samples of the Switch layers' inputs for the validation text, in the layers' order."""
    switch = model.config.switch
    config, params = on_host(model.config, model.params)
    config = slotted(without_capacity(config))
    listener = _Listener(config, params, switch.num_experts)
    for batch in text.batches:
        listener.run(_logits, config, params=listener.params, batch=batch)
    return [
        LayerSample(load_E, _spread(np.concatenate(parts), SAMPLE_ROWS), *sums_E)
        for load_E, parts, *sums_E in zip(
            listener.load_NE,
            listener.rows_N,
            listener.norm_NE,
            listener.gated_norm_NE,
            listener.sum_NED,
            strict=True,
        )
    ]


def with_harm(
    model: Model, text: ValidationText, samples: Sequence[LayerSample]
) -> list[LayerSample]:
    """The samples with the rise of the validation loss when each expert alone is removed."""
    config = model.config
    experts = itertools.product(config.sparse_layer_names, range(config.switch.num_experts))
    loss, *without = (validation_loss(each, text) for each in without_each(model, experts))
    harm_NE = np.reshape(without, (len(samples), -1)) - loss
    return [
        dataclasses.replace(sample, harm_E=harm_E)
        for sample, harm_E in zip(samples, harm_NE, strict=True)
    ]


class _Listener(ChosenExperts):
    """All experts of a model, and the inputs that they are given."""

    def __init__(self, config: ModelConfig, params: dict, slots: int):
        super().__init__(config, params, slots)
        layers = len(config.sparse_layer_names)
        self.load_NE = np.zeros((layers, slots), np.int64)
        self.rows_N: list[list[np.ndarray]] = [[] for _ in range(layers)]
        self.norm_NE, self.gated_norm_NE = np.zeros((2, layers, slots))
        self.sum_NED = np.zeros((layers, slots, config.d_model))
        leaves = tree.named_leaves(params)
        self._gated_by = [
            {
                leaf.removeprefix(f"{layer_path(name)}/"): np.asarray(array)
                for leaf, array in leaves.items()
                if leaf.startswith(f"{layer_path(name)}/") and "router" in leaf
            }
            for name in config.sparse_layer_names
        ]

    def run_rows(self, layer: int, x_RD, count_E):
        y_RD = super().run_rows(layer, x_RD, count_E)
        count_E = np.asarray(count_E)
        self.load_NE[layer] += count_E
        used_RD, out_RD = (
            np.asarray(rows, np.float32)[: count_E.sum()] for rows in (x_RD, y_RD)
        )
        # Every batch gives equally many rows; the rows of a batch are sorted by expert.
        self.rows_N[layer].append(_spread(used_RD, SAMPLE_ROWS))
        expert_R = np.repeat(np.arange(len(count_E)), count_E)
        norm_R = np.linalg.norm(out_RD, axis=1)
        gate_R = gates_of_rows(self._config, self._gated_by[layer], used_RD, expert_R)
        for e, own_RD in enumerate(np.split(out_RD, np.cumsum(count_E)[:-1])):
            self.sum_NED[layer, e] += own_RD.sum(axis=0, dtype=np.float64)
        self.norm_NE[layer] += np.bincount(expert_R, norm_R, len(count_E))
        self.gated_norm_NE[layer] += np.bincount(expert_R, gate_R * norm_R, len(count_E))
        return y_RD


@functools.partial(jax.jit, static_argnames="config")
def _logits(config: ModelConfig, params, batch):
    return forward(config, params, batch, is_training=False)[0]


def _spread(x_RD: np.ndarray, rows: int) -> np.ndarray:
    """Takes `rows` evenly spaced rows; all if there are no more."""
    if len(x_RD) <= rows:
        return x_RD
    return x_RD[np.linspace(0, len(x_RD) - 1, rows).astype(int)]


def _timed(write: Callable[[], Sequence[tuple[list[int], bool]]]) -> Written:
    """The outputs, and the median speed of several runs after the first, which compiles."""
    outputs, seconds = write(), []
    for _ in range(TIMED_RUNS):
        started = time.perf_counter()
        write()
        seconds.append(time.perf_counter() - started)
    number = sum(len(tokens) + is_finished for tokens, is_finished in outputs)
    return Written([tokens for tokens, _ in outputs], number / statistics.median(seconds))
