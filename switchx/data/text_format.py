# SPDX-License-Identifier: Apache-2.0
"""How a person's text becomes the token ids that a model learnt to read."""

import dataclasses
import re
from typing import Any, Self

from switchx.data.objectives import (
    CausalLM,
    InputsToTargets,
    PrefixLM,
    SpanCorruption,
)
from switchx.data.tokenizers import Vocabulary

OBJECTIVES = {
    objective.__name__: objective
    for objective in (SpanCorruption, PrefixLM, CausalLM, InputsToTargets)
}
SENTINEL = re.compile(r"<extra_id_(\d+)>")


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """What the tasks of a model's training do to the texts that they read.

    Attributes:
        inputs_end_with_eos: span corruption and inputs to targets end inputs so; a prefix
            ends anywhere.
        is_prompt_bidirectional: a decoder-only model's inputs see themselves whole, as in all
            tasks but causal language modelling.
        names_sentinels: `<extra_id_0>` in a text is sentinel 0, not its characters.
    """

    inputs_end_with_eos: bool
    is_prompt_bidirectional: bool
    names_sentinels: bool

    @classmethod
    def of_training(cls, source: Any, *, is_encoder_decoder: bool) -> Self:
        """The format of a task or a mixture, by its description in `config.json`.

        Where its tasks differ: eos, if one of them writes it, and a bidirectional prompt, if
        one of them has it. Where nothing is known of them (a model from elsewhere), T5's for
        a model with an encoder, and a causal language model's without.
        """
        found = [OBJECTIVES[name] for name in _objectives(source) if name in OBJECTIVES]
        if not found:
            return cls(is_encoder_decoder, False, is_encoder_decoder)
        return cls(
            any(objective.ends_inputs_with_eos for objective in found),
            not is_encoder_decoder and any(objective is not CausalLM for objective in found),
            SpanCorruption in found,
        )

    def inputs(self, vocabulary: Vocabulary, text: str) -> list[int]:
        """What an encoder reads, or what a decoder-only model goes on from."""
        tokens = self._tokens(vocabulary, text)
        return tokens + [vocabulary.eos_id] if tokens and self.inputs_end_with_eos else tokens

    def targets(self, vocabulary: Vocabulary, text: str) -> list[int]:
        """A whole text that a model may write, its end included."""
        return [*self._tokens(vocabulary, text), vocabulary.eos_id]

    def _tokens(self, vocabulary: Vocabulary, text: str) -> list[int]:
        # Odd parts are numbers of sentinels.
        parts = SENTINEL.split(text)
        if not self.names_sentinels or len(parts) == 1 or _reads_sentinels(vocabulary):
            return vocabulary.encode(text)
        tokens = []
        for i, part in enumerate(parts):
            tokens += [vocabulary.sentinel_id(int(part))] if i % 2 else vocabulary.encode(part)
        return tokens


def _objectives(source: Any) -> list[str]:
    """Names of all objectives in the description of a task or a mixture."""
    if isinstance(source, list):
        return [name for item in source for name in _objectives(item)]
    if not isinstance(source, dict):
        return []
    objective = source.get("objective")
    own = [objective.get("type")] if isinstance(objective, dict) else []
    return own + [name for item in source.values() for name in _objectives(item)]


def _reads_sentinels(vocabulary: Vocabulary) -> bool:
    """Whether its model has sentinels as pieces, and so finds them itself."""
    if not vocabulary.num_sentinels:
        return True
    return vocabulary.sentinel_id(0) in vocabulary.encode("<extra_id_0>")
