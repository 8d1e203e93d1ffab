# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest

from switchx.data.corpora.multi30k import Multi30k
from switchx.data.mixtures import multi30k_directions
from switchx.data.text_metrics import Bleu, ChrF
from tests.data.fakes import NumberVocabulary
from tests.data.refusals import refused


def test_every_direction_asks_for_its_language():
    mixture = multi30k_directions(
        NumberVocabulary(), ("en", "de", "fr"), favoured=["de_en"], favour=3.0
    )
    by_name = {task.name: task for task in mixture.tasks}
    assert set(by_name) == {
        f"multi30k_{a}_{b}" for a, b in itertools.permutations(("en", "de", "fr"), 2)
    }
    task = by_name["multi30k_de_en"]
    assert task.corpus == Multi30k("de", "en") and task.objective.prefix == "English: "
    assert task.metrics == (Bleu(), ChrF())
    rates = dict(zip(by_name, mixture.probabilities([29000] * 6), strict=True))
    assert rates.pop("multi30k_de_en") == pytest.approx(3 / 8)
    assert set(rates.values()) == {1 / 8}


def test_bad_languages():
    with refused("languages ['xx'] are not in Multi30K; use cs, de, en, fr"):
        multi30k_directions(NumberVocabulary(), ("en", "xx"))
    with refused("languages=('en',) have no direction; use two or more"):
        multi30k_directions(NumberVocabulary(), ("en",))
    with refused("favoured=['en_fr']; use directions of en_de, de_en"):
        multi30k_directions(NumberVocabulary(), ("en", "de"), favoured=("en_fr",))
