# SPDX-License-Identifier: Apache-2.0
"""How likely texts are: log-likelihoods of targets given inputs, by whole forward passes.

A decoder-only model reads long texts a chunk at a time (chunked_prefill.py).

log p(y | x) is the sum over the target's tokens of log p(y_l | x, y_1 .. y_{l-1}), natural
logarithms.

Dims: B batch, L length, Q places of a chunk, D model, V vocabulary
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from switchx.data.features import read_and_predicted
from switchx.data.special_ids import PAD_ID
from switchx.inference.chunked_prefill import chunk_size, read_in_chunks
from switchx.inference.config import BATCHES, LENGTHS, DecodingConfig, rounded_up
from switchx.inference.generate import check_tokens, token_fault, without_capacity
from switchx.inference.model_mesh import ONE_DEVICE, ModelMesh
from switchx.inference.offload.chosen_experts import ChosenExperts
from switchx.inference.offload.expert_slots import slotted
from switchx.inference.running_batch import padded
from switchx.inference.sampling import likeliest_tokens
from switchx.models.config import ModelConfig
from switchx.models.params import bind, forward
from switchx.partitioning.constrain import constrain
from switchx.routing_record import RecordWriter, recorded

Pair = tuple[Sequence[int], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Score:
    """The score of one target.

    Attributes:
        log_likelihood: natural logarithm of the target's probability, summed over its tokens.
        num_tokens: number of the target's tokens that are predicted, with its end where one was
            given: all but a first token before which nothing is read.
        token_logprobs: log-probability of each token, or None for one that is not predicted;
            None where they were not asked for.
        top_logprobs: log-probabilities of the likeliest tokens in each token's place, by token
            id, the likeliest first.
    """

    log_likelihood: float
    num_tokens: int
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[int, float] | None] | None = None


class Scorer:
    """Scores pairs: `for number, score in scorer(pairs): ...`, the longest first.

    Attributes:
        config, params: the model as it was trained, or unrolled. A target's score depends on
            other targets in its batch only where the configuration has a capacity.
        is_prompt_bidirectional: whether each token of a decoder-only model's inputs attends to
            all of the inputs.
        batch_size: most pairs in a batch.
        logprobs: number of likeliest tokens whose log-probabilities are given beside each
            token's own; None gives neither.
        forced_prefix: tokens in front of each target, as in generation; they are not scored.
        devices: the devices of `params`.
        experts: see `Generator`.
        record: writer that gets the routing of each batch; rows have their pairs' numbers.
        start_id: id that the decoder reads first; None where it begins with the text.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        *,
        is_prompt_bidirectional: bool = False,
        batch_size: int = 32,
        logprobs: int | None = None,
        forced_prefix: Sequence[int] = (),
        devices: ModelMesh = ONE_DEVICE,
        experts: ChosenExperts | None = None,
        record: RecordWriter | None = None,
        start_id: int | None = PAD_ID,
    ):
        """Raises ValueError: a setting is out of its bounds."""
        self.record, self._num_recorded, self.start_id = record, 0, start_id
        # The settings of generation have the same bounds.
        most = len(forced_prefix) or 1
        ids = {"eos_id": -1, "start_id": start_id}
        asked = DecodingConfig(most, logprobs=logprobs, forced_prefix=forced_prefix, **ids)
        check_tokens(config, asked)
        self.logprobs, self.forced_prefix = asked.logprobs, list(asked.forced_prefix)
        self._num_kept = asked.num_kept
        if not 1 <= batch_size <= BATCHES[-1]:
            raise ValueError(f"batch_size={batch_size}; use 1 to {BATCHES[-1]}")
        devices.check(config, params)
        self.config = config if experts is None else slotted(config)
        self.params, self.experts = params, experts
        self.is_prompt_bidirectional = is_prompt_bidirectional
        self.batch_size, self.devices = batch_size, devices
        self.batches = devices.batches(config, BATCHES)

    def __call__(self, pairs: Sequence[Pair], first_number: int = 0) -> Iterator:
        """Yields a pair's number and its `Score`.

        Args:
            pairs: inputs and targets. A decoder-only model reads the start token, the inputs,
                which may be empty, and the targets.
            first_number: number of the first pair, where the pairs are part of a longer list.

        Raises:
            ValueError: a pair has a fault, see `fault`; nothing has been scored.
        """
        for index, pair in enumerate(pairs):
            if fault := self.fault(pair):
                raise ValueError(f"pair {first_number + index} {fault}")
        order = sorted(range(len(pairs)), key=lambda index: self._size(pairs[index]))
        for first in range(0, len(order), self.batch_size):
            indices = order[first : first + self.batch_size]
            batch = self._batch([pairs[index] for index in indices])
            results, routing = self.devices.fetch(self._log_likelihoods(batch))
            if self.record is not None:
                self._write_record(routing, [first_number + index for index in indices], batch)
            log_likelihood_B, *kept = results
            for row, index in enumerate(indices):
                inputs, targets = pairs[index]
                first = self._first_place(inputs)
                unpredicted = [None] * -min(first, 0)
                places = slice(first + len(unpredicted), first + len(targets))
                score = Score(float(log_likelihood_B[row]), len(targets) - len(unpredicted))
                score = self._with_logprobs(score, kept, (row, places), unpredicted)
                yield first_number + index, score

    def _write_record(self, routing: dict, numbers: list[int], batch: dict) -> None:
        B = len(batch["decoder_segment_ids"])
        # Rows that fill up the batch have no text; their groups are recorded with the others.
        rows = numbers + [-1] * (B - len(numbers))
        self.record.add(self._num_recorded, routing, B, rows)
        self._num_recorded += 1

    def _with_logprobs(self, score: Score, kept: list, where: tuple, unpredicted) -> Score:
        if self.logprobs is None:
            return score
        own_L, token_LS, log_prob_LS = (x[where].tolist() for x in kept)
        top = [
            dict(zip(tokens[: self.logprobs], values, strict=False))
            for tokens, values in zip(token_LS, log_prob_LS, strict=True)
        ]
        own_L, top = [*unpredicted, *own_L], [*unpredicted, *top]
        return dataclasses.replace(
            score, token_logprobs=own_L, top_logprobs=top if self.logprobs else None
        )

    def _first_place(self, inputs: Sequence[int]) -> int:
        """The decoder's place that predicts a target's first token; -1 where none does."""
        num_inputs = 0 if self.config.is_encoder_decoder else len(inputs)
        return num_inputs + len(self.forced_prefix) - (self.start_id is None)

    def _log_likelihoods(self, batch: dict) -> tuple:
        size, length = None, batch["decoder_input_tokens"].shape[1]
        if not self.config.is_encoder_decoder and self.record is None:
            whole = self.config, self.params, length
            size = chunk_size(*whole, is_bidirectional=self.is_prompt_bidirectional)
            size = None if size == length else size
        settings = self.config, self._num_kept, self.record is not None, size
        if self.experts is not None:
            arrays = {"params": self.params, "batch": batch}
            options = self.devices.options
            return self.experts.run(_log_likelihoods, *settings, options=options, **arrays)
        return self._run(_log_likelihoods, settings, batch)

    def _run(self, function, settings: tuple, batch: dict):
        arrays = {"params": self.params, "batch": batch}
        shapes = tuple(x.shape for x in batch.values())
        return self.devices.run(function, settings, shapes, **arrays)

    def fault(self, pair: Pair) -> str | None:
        """The reason why a pair cannot be read, to follow its name in a message; or None."""
        inputs, targets = pair
        if self.config.is_encoder_decoder and not len(inputs):
            return "has no inputs; give at least one token"
        if not len(targets):
            return "has no targets; give at least one token"
        if self._first_place(inputs) + len(targets) < 1:
            return "has one token, which nothing stands before; give inputs, or a longer target"
        for tokens in pair:
            if wrong := token_fault(self.config, tokens):
                return wrong
        needed, most = -self._size(pair)[0], self.config.max_length
        if self.config.has_length_limit and needed > most:
            return f"needs {needed} positions, the model has {most}; shorten it"
        return None

    @property
    def _reads_last(self) -> bool:
        """Whether a text's last token, which predicts nothing, is read too: after a start token
        it comes one place later, and a record has the routing of all tokens."""
        return self.start_id is not None or self.record is not None

    def _size(self, pair: Pair) -> tuple[int, int]:
        """Negative numbers of tokens read, so that the longest pair is sorted first."""
        num_read = len(self.forced_prefix) + len(pair[1]) - (not self._reads_last)
        lengths = [len(pair[0]), num_read]
        if not self.config.is_encoder_decoder:
            return -sum(lengths), 0
        return -max(lengths), -min(lengths)

    def _batch(self, pairs: Sequence[Pair]) -> dict:
        B = rounded_up(len(pairs), self.batches)
        batch = {}
        texts = [[*self.forced_prefix, *targets] for _, targets in pairs]
        num_inputs_B1, first_B1 = np.zeros((2, B, 1), np.int32)
        first_B1[: len(pairs), 0] = [self._first_place(inputs) for inputs, _ in pairs]
        if self.config.is_encoder_decoder:
            batch = features("encoder", *_in_bucket([inputs for inputs, _ in pairs], B))
        else:
            texts = [[*inputs, *text] for (inputs, _), text in zip(pairs, texts, strict=True)]
            num_inputs_B1[: len(pairs), 0] = [len(inputs) for inputs, _ in pairs]
        if self._reads_last:
            text_BL, is_token_BL = _in_bucket(texts, B)
            read_BL, target_BL, is_predicted_BL = read_and_predicted(
                text_BL, is_token_BL.astype(np.int32), self.start_id
            )
        else:
            read_BL, is_token_BL = _in_bucket([text[:-1] for text in texts], B)
            target_BL, is_predicted_BL = _in_bucket([text[1:] for text in texts], B)
        batch |= features("decoder", read_BL, is_token_BL)
        place_BL = batch["decoder_positions"]
        # Place of the last input among the tokens read, which a start token shifts.
        last_B1 = num_inputs_B1 - (self.start_id is None)
        is_prefix_BL = (place_BL <= last_B1) & (num_inputs_B1 > 0)
        batch["decoder_prefix_mask"] = is_prefix_BL * self.is_prompt_bidirectional
        batch["decoder_target_tokens"] = target_BL
        batch["decoder_loss_weights"] = is_predicted_BL * (place_BL >= first_B1)
        return {name: jnp.array(value, jnp.int32) for name, value in batch.items()}


@functools.partial(jax.jit, static_argnames=("config", "num_kept", "is_recorded", "size"))
def _log_likelihoods(
    config: ModelConfig, num_kept: int | None, is_recorded: bool, size, params, batch
) -> tuple:
    """The log-likelihood of each row and, unless `num_kept` is None, log-probabilities; and the
    routing by stack if it `is_recorded`. `size` is a chunk's, or None for whole passes."""
    routing = {}
    if size is None:
        logits_BLV, stats = forward(config, params, batch, is_training=False)
        routing = recorded(config, stats, batch) if is_recorded else {}
        found = _log_probs(logits_BLV, batch["decoder_target_tokens"], num_kept)
    else:
        found = _log_probs_in_chunks(config, num_kept, size, params, batch)
    log_prob_BL = found[0]
    is_scored_BL = batch["decoder_loss_weights"] > 0
    log_likelihood_B = jnp.sum(jnp.where(is_scored_BL, log_prob_BL, 0), axis=1)
    return (log_likelihood_B, *(() if num_kept is None else found)), routing


def _log_probs(logits_BLV, target_BL, num_kept: int | None) -> tuple:
    """Log-probabilities of the targets and, unless `num_kept` is None, likeliest tokens."""
    log_prob_BLV = jax.nn.log_softmax(logits_BLV.astype(jnp.float32), axis=-1)
    log_prob_BL = jnp.take_along_axis(log_prob_BLV, target_BL[..., None], axis=-1)[..., 0]
    likeliest = () if num_kept is None else likeliest_tokens(log_prob_BLV, num_kept)
    return log_prob_BL, *likeliest


def _log_probs_in_chunks(config: ModelConfig, num_kept, size: int, params, batch) -> tuple:
    """`_log_probs` of a decoder-only model without capacity, `size` places at a time."""
    model, target_BL = bind(without_capacity(config), params), batch["decoder_target_tokens"]
    text_BL = batch["decoder_input_tokens"], batch["decoder_positions"]
    shapes = jax.eval_shape(
        functools.partial(_log_probs, num_kept=num_kept),
        jax.ShapeDtypeStruct((*target_BL.shape, config.vocab_size), jnp.float32),
        target_BL,
    )

    def keep(kept, first, y_BQD, stats):
        target_BQ = jax.lax.dynamic_slice_in_dim(target_BL, first, size, axis=1)
        logits_BQV = constrain(model.embedding.logits(y_BQD), "BLV")
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=1)
        return jax.tree.map(put, kept, _log_probs(logits_BQV, target_BQ, num_kept))

    return read_in_chunks(
        model,
        (*text_BL, batch["decoder_segment_ids"] > 0),
        model.decoder.new_cache(*target_BL.shape),
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
        keep,
        size=size,
    )[1]


def features(stack: str, token_BL, is_token_BL) -> dict:
    """T5X's features for one text per row, for `forward`."""
    position_BL = np.broadcast_to(np.arange(token_BL.shape[1]), token_BL.shape)
    return {
        f"{stack}_input_tokens": token_BL,
        f"{stack}_segment_ids": is_token_BL.astype(np.int32),
        f"{stack}_positions": position_BL,
    }


def _in_bucket(texts: Sequence[Sequence[int]], B: int):
    return padded(texts, B, rounded_up(max(map(len, texts)), LENGTHS))


@functools.partial(jax.jit, static_argnames="config")
def logits_of(
    config: ModelConfig,
    params,
    decoder_tokens,
    is_decoder_token,
    encoder_tokens=None,
    is_encoder_token=None,
):
    """Logits `[B, L, V]` of every decoder position.

    Args:
        decoder_tokens, encoder_tokens: one example per row.
        is_decoder_token, is_encoder_token: where in them there are tokens; the decoder's first
            place always counts as one.
    """
    is_decoder_token = is_decoder_token.at[:, 0].set(True)
    batch = features("decoder", decoder_tokens, is_decoder_token)
    batch["decoder_prefix_mask"] = jnp.zeros_like(decoder_tokens)
    if encoder_tokens is not None:
        batch |= features("encoder", encoder_tokens, is_encoder_token)
    return forward(config, params, batch, is_training=False)[0]
