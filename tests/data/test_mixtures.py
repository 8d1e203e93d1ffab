# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from switchx.data.mixtures import Mixture, ProportionalRates, as_mixture
from switchx.data.objectives import SpanCorruption
from switchx.data.tasks import Task
from switchx.data.vocabularies import CorpusVocabulary
from tests.data.fakes import NumberVocabulary, text_corpus


def task(name, **vocabulary):
    return Task(name, text_corpus("1 2"), NumberVocabulary(**vocabulary), SpanCorruption())


A, B = task("a"), task("b")


@pytest.mark.parametrize(
    "rates, expected",
    [
        (ProportionalRates(), [0.1, 0.9]),
        (ProportionalRates(maximum=300), [0.25, 0.75]),  # 100 and min(900, 300)
        (ProportionalRates(temperature=2.0), [0.25, 0.75]),  # 10 and 30
        (ProportionalRates(temperature=2.0, maximum=400), [1 / 3, 2 / 3]),  # 10 and 20
        ((1.0, 3.0), [0.25, 0.75]),
    ],
)
def test_probabilities_by_hand(rates, expected):
    np.testing.assert_allclose(Mixture((A, B), rates).probabilities([100, 900]), expected)


def test_high_temperature_is_near_equal():
    probabilities = Mixture((A, B), ProportionalRates(temperature=1e6)).probabilities(
        [1, 10**6]
    )
    np.testing.assert_allclose(probabilities, [0.5, 0.5], atol=1e-5)


def test_a_task_alone():
    assert as_mixture(A).probabilities([5]).tolist() == [1.0]
    mixture = Mixture((A, B))
    assert as_mixture(mixture) is mixture


def test_errors():
    with pytest.raises(
        ValueError, match=r"a mixture of \['a', 'a'\]; use one task or more, each"
    ):
        Mixture((A, A))
    with pytest.raises(ValueError, match="have different vocabularies; one model reads one"):
        Mixture((A, task("c", size=500)))
    with pytest.raises(ValueError, match=r"rates=\(1.0,\) for the tasks \['a', 'b'\]"):
        Mixture((A, B), (1.0,))
    with pytest.raises(ValueError, match=r"rates=\(1.0, 0.0\).*above 0"):
        Mixture((A, B), (1.0, 0.0))
    with pytest.raises(ValueError, match="temperature=0; use a number above 0"):
        ProportionalRates(temperature=0)
    with pytest.raises(ValueError, match="maximum=0; use at least 1"):
        ProportionalRates(maximum=0)


def test_vocabularies_of_one_description_are_not_opened():
    """One that is trained on its corpus would be, where only its gin file is read."""
    vocabulary = CorpusVocabulary(text_corpus("1 2"), 500)
    tasks = [Task(n, text_corpus("1 2"), vocabulary, SpanCorruption()) for n in "ab"]
    assert len(Mixture(tuple(tasks)).tasks) == 2
    assert "resolved" not in vars(vocabulary)
