# SPDX-License-Identifier: Apache-2.0
"""Made-up text, varied enough to train vocabularies of some hundred pieces on."""

import random

_SYLLABLES = [c + v for c in "bdfgklmnprst" for v in "aeiou"]


def sentences(count: int) -> list[str]:
    """The same ones each time, each with its line break."""
    draw = random.Random(0)
    lexicon = ["".join(draw.choices(_SYLLABLES, k=draw.randint(1, 4))) for _ in range(400)]
    return [" ".join(draw.choices(lexicon, k=8)) + ".\n" for _ in range(count)]
