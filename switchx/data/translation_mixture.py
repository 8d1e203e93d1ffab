# SPDX-License-Identifier: Apache-2.0
"""One model for several languages: every direction of Multi30K, told apart by its prefix.

Kim et al. 2022 (arXiv:2211.10017), section 4.1, train one model on many directions too.
"""

import itertools
from collections.abc import Sequence

from switchx.data.corpora.multi30k import LANGUAGES, Multi30k
from switchx.data.mixtures import Mixture
from switchx.data.objectives import InputsToTargets
from switchx.data.tasks import Task
from switchx.data.text_metrics import Bleu, ChrF
from switchx.data.tokenizers import Vocabulary

LANGUAGE_NAMES = {"cs": "Czech", "de": "German", "en": "English", "fr": "French"}


def multi30k_directions(
    vocabulary: Vocabulary,
    languages: Sequence[str] = LANGUAGES,
    favoured: Sequence[str] = (),
    favour: float = 1.0,
) -> Mixture:
    """A task for each ordered pair of languages: `German: A man sleeps.` asks for German.

    Tasks are named `multi30k_en_de`, are measured by BLEU and chrF, and are drawn equally
    often but for the favoured.

    Args:
        vocabulary: of all languages.
        languages: two or more of cs, de, en, fr.
        favoured: directions, such as `en_de`, drawn `favour` times as often as others.

    Raises:
        ValueError: an unknown language, fewer than two, or a direction that is not among
            them.
    """
    if unknown := sorted(set(languages) - set(LANGUAGES)):
        raise ValueError(f"languages {unknown} are not in Multi30K; use {', '.join(LANGUAGES)}")
    directions = [f"{a}_{b}" for a, b in itertools.permutations(languages, 2)]
    if not directions:
        raise ValueError(f"languages={tuple(languages)} have no direction; use two or more")
    if unknown := sorted(set(favoured) - set(directions)):
        raise ValueError(f"favoured={unknown}; use directions of {', '.join(directions)}")
    return Mixture(
        tuple(_task(direction, vocabulary) for direction in directions),
        tuple(favour if direction in favoured else 1.0 for direction in directions),
    )


def _task(direction: str, vocabulary: Vocabulary) -> Task:
    source, target = direction.split("_")
    return Task(
        f"multi30k_{direction}",
        Multi30k(source, target),
        vocabulary,
        InputsToTargets(prefix=f"{LANGUAGE_NAMES[target]}: "),
        metrics=(Bleu(), ChrF()),
    )
