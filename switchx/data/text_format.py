# SPDX-License-Identifier: Apache-2.0
"""How a person's text becomes the token ids that a model learnt to read."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Self

from switchx.data.objectives import OBJECTIVES, Objective
from switchx.data.tokenizers import Vocabulary
from switchx.fields import from_description, require

SENTINEL = re.compile(r"<extra_id_(\d+)>")


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """What the tasks of a model's training do to the texts that they read.

    Attributes:
        inputs_end_with_eos: span corruption and inputs to targets end inputs so; a prefix
            ends anywhere.
        is_prompt_bidirectional: a decoder-only model's inputs see all inputs, where the
            objective says so.
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

        Raises:
            ValueError: a user's own objective cannot be imported.
        """
        found = list(_objectives(source))
        if not found:
            return cls(is_encoder_decoder, False, is_encoder_decoder)
        return cls(
            any(each.ends_inputs_with_eos for each in found),
            not is_encoder_decoder and any(each.is_prefix_bidirectional for each in found),
            any(each.has_sentinels for each in found),
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


def _objectives(source: Any) -> Iterator[Objective]:
    """All objectives in the description of a task or a mixture."""
    if isinstance(source, list):
        for item in source:
            yield from _objectives(item)
    elif isinstance(source, dict):
        objective = source.get("objective")
        if isinstance(objective, dict):
            cls = OBJECTIVES.get(name := objective.get("type", ""), Objective)
            require(
                cls is not Objective or "." in name,
                f"config.json names the objective {name!r}; expected one of "
                f"{', '.join(OBJECTIVES)}, or a class with its module",
            )
            yield from_description(cls, objective, "config.json")
        for item in source.values():
            yield from _objectives(item)


def _reads_sentinels(vocabulary: Vocabulary) -> bool:
    """Whether its model has sentinels as pieces, and so finds them itself."""
    if not vocabulary.num_sentinels:
        return True
    return vocabulary.sentinel_id(0) in vocabulary.encode("<extra_id_0>")
