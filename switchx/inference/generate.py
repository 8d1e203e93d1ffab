# SPDX-License-Identifier: Apache-2.0
"""Generation from token lists to token lists, in batches of similar lengths, longest first."""

import dataclasses
from collections.abc import Iterator, Sequence

from switchx.data.tokenizers import Vocabulary
from switchx.fields import FieldError
from switchx.inference.config import BATCHES, LENGTHS, DecodingConfig
from switchx.inference.model_mesh import ONE_DEVICE, ModelMesh, has_capacity
from switchx.inference.offload.chosen_experts import ChosenExperts
from switchx.inference.offload.expert_slots import slotted
from switchx.inference.quantize import separate_experts
from switchx.inference.read_routing import stack_record
from switchx.inference.running_batch import Hypothesis, RunningBatch
from switchx.inference.stop_strings import StopStrings
from switchx.models.config import ModelConfig, require_one_task, require_our_blocks
from switchx.routing_record import RecordWriter

# Decoding steps between two checks whether texts have stopped.
STEPS_TO_STOPS = 8
# Follows an input's name in an error message.
NO_ANSWER = (
    "has no answer whose score is a number: logits are NaN or infinite, or the settings leave "
    "no token; check the checkpoint, or ask with other settings"
)


def for_decoding(config: ModelConfig, *, is_dropless: bool = True) -> ModelConfig:
    """Returns the configuration that a model is decoded with.

    Args:
        is_dropless: whether no token is dropped, so that a sentence's result does not depend on
            others in its batch; False keeps the capacity of evaluation, and the result may.

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
    """The model's configuration without capacity: no expert is ever full.

    Experts that choose their tokens (`expert_choice`) cannot do without a capacity: there a
    text's result depends on the others in its group.
    """
    switch = config.switch
    if switch is None or switch.router.has_choosing_experts:
        return with_capacity(config)
    # Without capacity, padding takes no token's place, so nothing needs to count it.
    router = dataclasses.replace(
        switch.router, overflow="dropless", balance_counts="first_choice", padding="ignored"
    )
    # Where nothing is dropped, groups do not matter: with any `expert_capacity` each row is a
    # group, so that the devices of a mesh have whole groups.
    if not switch.has_attention:
        switch = switch.with_dispatcher("dropless")
    switch = dataclasses.replace(switch, router=router, expert_capacity=1)
    return dataclasses.replace(config, switch=switch)


def with_capacity(config: ModelConfig) -> ModelConfig:
    """The configuration with the groups that the model has on one device, which the compiler
    then splits."""
    if config.switch is None or config.switch.has_attention:
        return config
    return dataclasses.replace(config, switch=config.switch.with_dispatcher("gather"))


@dataclasses.dataclass(frozen=True)
class Generated:
    """A text that a model wrote.

    Attributes:
        output: text where texts were read, otherwise token ids without the end, up to the
            one that completes a text of `stop`.
        score: log-probability over length ** length_penalty, the end included. In a search it
            is computed from the changed logits, without forced tokens, as in `transformers`.
        is_finished: whether it reached its end or a text of `stop`; otherwise it was cut off.
        token_logprobs, top_logprobs: see `Hypothesis`.
    """

    output: str | list[int]
    score: float
    is_finished: bool
    token_logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None

    @classmethod
    def of(
        cls, hypothesis: Hypothesis, vocabulary: Vocabulary | None, stops: StopStrings | None
    ) -> "Generated":
        """A hypothesis with its text, or with its tokens where there is no vocabulary."""
        values = vars(hypothesis) | {"output": hypothesis.tokens}
        if vocabulary is not None:
            values["output"] = text_of(hypothesis, vocabulary, stops)
        del values["tokens"], values["routing"]
        return cls(**values)


def text_of(hypothesis: Hypothesis, vocabulary: Vocabulary, stops: StopStrings | None) -> str:
    text = vocabulary.decode(hypothesis.tokens)
    return stops.cut(text) if stops else text


class Generator:
    """Generates outputs: `for number, hypotheses in generator(inputs): ...`, longest first.

    Attributes:
        config, params: the model, as `for_decoding` returns it.
        decoding: decoding settings.
        batch_size: most sentences in a batch; each sample is one sentence.
        stops: texts that end an output, or None.
        devices: the devices of `params`.
        experts: the experts of a model that are moved to the device when they are chosen, where
            `params` are its other parameters; None where `params` has all experts.
        record: writer that gets the routing of the tokens read, for each input's first
            hypothesis; rows have their inputs' numbers.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        decoding: DecodingConfig,
        batch_size: int = 32,
        devices: ModelMesh = ONE_DEVICE,
        experts: ChosenExperts | None = None,
        vocabulary: Vocabulary | None = None,
        record: RecordWriter | None = None,
    ):
        """Raises ValueError: the model cannot be decoded or recorded with these settings."""
        if not 1 <= batch_size <= BATCHES[-1]:
            raise ValueError(f"batch_size={batch_size}; use 1 to {BATCHES[-1]}")
        if not decoding.beam_size <= config.vocab_size:
            raise ValueError(
                f"beam_size={decoding.beam_size} with a vocabulary of {config.vocab_size}: a "
                f"beam begins with a token of its own; use 1 to {config.vocab_size}"
            )
        check_tokens(config, decoding)
        if decoding.stop and vocabulary is None:
            way_out = (
                "the model came without a vocabulary, so its outputs are no texts; leave it out"
            )
            raise FieldError(decoding, "stop", way_out)
        if decoding.prompt_lookup_num_tokens is not None:
            check_drafts(config, decoding, has_slots=experts is not None)
        has_drafts = decoding.prompt_lookup_num_tokens is not None
        if record is not None and (has_drafts or has_capacity(config)):
            raise ValueError(
                "a record of decoding with drafts, or with experts that have a capacity: steps "
                "read tokens that are no text, and have no whole groups; leave these out, or "
                "record what was written: `switchx score --record`, or a `Scorer`"
            )
        self.record, self._num_recorded = record, 0
        self.stops = StopStrings(vocabulary, decoding.stop) if decoding.stop else None
        devices.check(config, params)
        self.config = config if experts is None else slotted(config)
        self.params = separate_experts(params) if devices.mesh is None else params
        self.decoding, self.batch_size, self.devices = decoding, batch_size, devices
        self.experts = experts

    def __call__(
        self,
        inputs: Sequence[Sequence[int]],
        token_limits: Sequence[int] | None = None,
        *,
        first_number: int = 0,
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """Yields an input's number and its hypotheses.

        A search yields all of its beams, and `best_of` all samples, the best first, so that the
        first `num_return_sequences` are the answers. Other samples come in the order of their
        numbers: sample s of S of input n depends on the number n * S + s.

        Args:
            inputs: token ids that the encoder reads, or that a decoder-only model continues.
            token_limits: most new tokens of each input, up to `max_new_tokens`; None takes
                `max_new_tokens` for all inputs.
            first_number: number of the first input, where the inputs are part of a longer list;
                samples depend on the number.

        Raises:
            ValueError: an input is empty, has ids outside the vocabulary, or needs more than
                the model's positions, or a limit is not 1 to `max_new_tokens`: then nothing has
                been generated. Or, later, an input has no answer whose score is a number.
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
        num_samples = self.decoding.num_samples
        answered = {}
        read = {}
        rows = [(index, sample) for index in order for sample in range(num_samples)]
        for first in range(0, len(rows), self.batch_size):
            part = rows[first : first + self.batch_size]
            batch = RunningBatch(
                self.config,
                self.params,
                self.decoding,
                devices=self.devices,
                experts=self.experts,
                is_recorded=self.record is not None,
            )
            batch.admit(
                [inputs[index] for index, _ in part],
                numbers=[
                    (first_number + index) * num_samples + sample for index, sample in part
                ],
                token_limits=[token_limits[index] for index, _ in part],
            )
            for row, hypotheses in self._until_ended(batch):
                index, sample = part[row]
                if not hypotheses:
                    raise ValueError(f"input {first_number + index} {NO_ANSWER}")
                of_input = answered.setdefault(index, {})
                of_input[sample] = hypotheses
                if len(of_input) == num_samples:
                    answer = self._answer(answered.pop(index))
                    if self.record is not None:
                        read[first_number + index] = inputs[index], answer[0]
                    yield first_number + index, answer
            if read:
                self._write_record(dict(sorted(read.items())))
                read.clear()

    def _write_record(self, read: dict[int, tuple[Sequence[int], Hypothesis]]) -> None:
        """Records one batch: inputs and their answers, by number."""
        parts = {}
        start = [self.decoding.start_id] if self.config.is_encoder_decoder else []
        for stack in next(iter(read.values()))[1].routing:
            numbers = [hypothesis.routing[stack] for _, hypothesis in read.values()]
            texts = [
                list(tokens) if stack == "encoder" else [*(start or tokens), *hypothesis.tokens]
                for tokens, hypothesis in read.values()
            ]
            parts[stack] = stack_record(self.config, texts, numbers)
        self.record.add(self._num_recorded, parts, len(read), list(read))
        self._num_recorded += 1

    def _until_ended(self, batch: RunningBatch) -> Iterator[tuple[int, list[Hypothesis]]]:
        """Yields the rows of a batch as they end."""
        while batch.waiting:
            for row, hypotheses in batch.advance(self.stops and STEPS_TO_STOPS).items():
                whole = [self._stopped(each, is_last=True) or each for each in hypotheses]
                yield row, whole
            for row, so_far in batch.so_far().items() if self.stops else ():
                if stopped := self._stopped(so_far, is_last=False):
                    batch.abandon([row])
                    yield row, [stopped]

    def _stopped(self, hypothesis: Hypothesis, *, is_last: bool) -> Hypothesis | None:
        """The hypothesis up to the stop string that ends it; None where it has none."""
        number = self.stops and self.stops.num_tokens(hypothesis.tokens, is_last=is_last)
        return hypothesis.stopped(number, self.decoding) if number else None

    def _answer(self, samples: dict[int, list[Hypothesis]]) -> list[Hypothesis]:
        """The hypotheses that are yielded for an input, from its samples' hypotheses."""
        hypotheses = [each for sample in sorted(samples) for each in samples[sample]]
        if self.decoding.best_of is not None:
            hypotheses.sort(key=lambda each: -each.score)
        return [each.with_logprobs(self.decoding.logprobs) for each in hypotheses]

    def fault(self, tokens: Sequence[int]) -> str | None:
        """The reason why an input cannot be read, to follow its name in a message; or None."""
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


def check_tokens(config: ModelConfig, decoding: DecodingConfig) -> None:
    """Raises FieldError: a setting does not fit the vocabulary or the architecture."""
    V = config.vocab_size
    if config.is_encoder_decoder and decoding.start_id is None:
        way_out = "a decoder behind an encoder begins with a token; use a vocabulary with one"
        raise FieldError(decoding, "start_id", way_out)
    for name in ("forced_prefix", "other_eos_ids", "suppressed_ids"):
        if wrong := [token for token in getattr(decoding, name) if token >= V]:
            way_out = f"the vocabulary has 0 to {V - 1}, not {wrong[0]}; is it this model's?"
            raise FieldError(decoding, name, way_out)
    if decoding.num_kept and decoding.num_kept > V:
        way_out = f"the vocabulary has {V} tokens; use 0, or leave it out"
        raise FieldError(decoding, "logprobs", way_out)


def check_drafts(config: ModelConfig, decoding: DecodingConfig, *, has_slots: bool) -> None:
    """Raises FieldError: the model's experts are such that drafts would change the output, or
    cost more than they save."""
    way_out = None
    if has_slots:
        way_out = "experts come when chosen, those of wrong drafts for nothing"
    elif has_capacity(config) and not config.switch.router.has_choosing_experts:
        way_out = "experts have a capacity, and drafts would take the places of tokens"
    if way_out:
        raise FieldError(
            decoding, "prompt_lookup_num_tokens", f"{way_out}; leave out one of the two"
        )


def positions_needed(config: ModelConfig, input_length: int, new_tokens: int) -> int | None:
    """Number of rows of a position table that decoding reads; None where there is no table."""
    if not config.has_length_limit:
        return None
    if config.is_encoder_decoder:
        return max(input_length, 1 + new_tokens)
    return input_length + new_tokens


def token_fault(config: ModelConfig, tokens: Sequence[int]) -> str | None:
    """The fault that rules token ids out for any use, to follow their name in a message; or
    None."""
    if len(tokens) > LENGTHS[-1]:
        return f"has {len(tokens)} tokens; shorten it to {LENGTHS[-1]} at most"
    V = config.vocab_size
    low = min(tokens, default=0)
    high = max(tokens, default=0)
    if low < 0 or high >= V:
        wrong = low if low < 0 else high
        return (
            f"has token id {wrong}, the vocabulary has 0 to {V - 1}; is it this model's "
            "vocabulary?"
        )
    return None
