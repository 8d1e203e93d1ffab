# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints stay: scores by sign, finite ones only, messages in full."""

import math

import pytest

from switchx.checkpoint.checkpointer import Retention


def test_a_higher_score_is_always_better():
    metrics = {"neg_log_perplexity": -2.0, "loss": 2.0}
    assert Retention().score(metrics) == -2.0
    lowest = Retention(best_metric="loss", best_mode="min")
    assert lowest.score({"loss": 1.0}) > lowest.score({"loss": 2.0})


def test_without_metrics_or_a_finite_one_there_is_no_score():
    assert Retention().score(None) is None
    assert Retention().score({"neg_log_perplexity": math.nan}) is None


def test_an_unknown_metric_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="best_metric=.bleu. is not among the metrics loss"):
        Retention(best_metric="bleu").score({"loss": 1.0, "acc": 0.5})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"keep_last": 0}, "Retention.keep_last=0; use at least 1"),
        ({"keep_best": -1}, "Retention.keep_best=-1; use 0 or more"),
        ({"best_mode": "most"}, "Retention.best_mode='most'; use 'max' or 'min'"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Retention(**arguments)
