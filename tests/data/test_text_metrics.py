# SPDX-License-Identifier: Apache-2.0
"""Metrics are those of the libraries, and of T5's own tests where no library is kept."""

import pytest
import sacrebleu
from rouge_score import rouge_scorer

from switchx.data.text_metrics import (
    Accuracy,
    Bleu,
    ChrF,
    Reference,
    Rouge,
    normalized_answer,
    normalized_trivia_answer,
)
from tests.data.refusals import refused

TARGETS = ["Zwei Männer stehen am Herd.", "Ein Mädchen, allein.", "Die Hunde rennen schnell."]
TEXTS = ["Zwei Männer am Herd.", "ein Mädchen, allein.", "Die Katzen rennen dort schnell."]


def scores(metric, texts, targets, **options):
    return {each.name: each.score for each in metric.results(texts, targets, **options)}


def test_bleu_and_chrf_are_those_of_sacrebleu():
    want = {
        "bleu": sacrebleu.corpus_bleu(TEXTS, [TARGETS]).score,
        "chrf": sacrebleu.corpus_chrf(TEXTS, [TARGETS]).score,
        "chrf++": sacrebleu.corpus_chrf(TEXTS, [TARGETS], word_order=2).score,
    }
    got = [Bleu(), ChrF(), ChrF(word_order=2)]
    assert want == {k: v for each in got for k, v in scores(each, TEXTS, TARGETS).items()}
    assert list(want) == [name for each in got for name in each.names]
    lower = sacrebleu.corpus_bleu(TEXTS, [TARGETS], lowercase=True, tokenize="intl").score
    assert lower != want["bleu"]
    assert scores(Bleu("intl", lowercase=True), TEXTS, TARGETS) == {"bleu": lower}
    with refused("Bleu.tokenize='moses'"):
        Bleu("moses")


def test_signatures_and_intervals_are_those_of_sacrebleu():
    for metric, theirs in (
        (Bleu(), sacrebleu.metrics.BLEU()),
        (ChrF(), sacrebleu.metrics.CHRF()),
    ):
        want = theirs.corpus_score(TEXTS, [TARGETS], n_bootstrap=50)
        (got,) = metric.results(TEXTS, TARGETS, num_bootstrap=50)
        assert got.signature == str(theirs.get_signature())
        assert "bs:50|" in got.signature and "version:" in got.signature
        assert got.interval == (want._mean - want._ci, want._mean + want._ci)
        (plain,) = metric.results(TEXTS, TARGETS)
        assert plain.score == got.score
        assert plain.interval is None and "|bs:" not in plain.signature


def test_rouge_is_the_mean_of_rouge_score():
    metric = Rouge(("rouge1", "rougeL"), use_stemmer=True)
    scorer = rouge_scorer.RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
    each = [scorer.score(*pair) for pair in zip(TARGETS, TEXTS, strict=True)]
    got = scores(metric, TEXTS, TARGETS)
    for name in ("rouge1", "rougeL"):
        assert got[name] == 100 * sum(s[name].fmeasure for s in each) / 3
    # A text with more words than its target: precision and recall are not taken for another.
    (recall,) = Rouge(("rouge1",)).results(["a b c d"], ["a b"])
    assert round(recall.score, 6) == round(100 * 2 * 0.5 / 1.5, 6)
    assert metric.results(TEXTS, TARGETS)[0].signature.startswith("rouge-score|stemmer:yes|v:")
    with refused("Rouge.types=('rougeX',)"):
        Rouge(("rougeX",))


def test_rouge_lsum_ends_sentences_at_newlines_and_where_t5_does():
    """t5.evaluation.metrics.rouge: a sentence ends at " . " too, its tokenized full stop."""
    scorer = rouge_scorer.RougeScorer(["rougeLsum"])
    target, text = "the cat sat . a dog ran", "a dog ran . the cat sat"
    lines = [each.replace(" . ", " .\n") for each in (target, text)]
    want = 100 * scorer.score(*lines)["rougeLsum"].fmeasure
    assert want == 100 and scorer.score(target, text)["rougeLsum"].fmeasure == 0.5
    assert scores(Rouge(("rougeLsum",)), [text], [target]) == {"rougeLsum": want}
    assert scores(Rouge(("rougeLsum",)), [lines[1]], [target]) == {"rougeLsum": want}
    # "e.g." and a full stop at a word's end, as in plain text, end no sentence there.
    plain = scores(Rouge(("rougeLsum",)), ["A dog. A cat."], ["A cat. A dog."])
    assert plain == {"rougeLsum": 50.0}


@pytest.mark.parametrize(
    "tokenize, text, other, score",
    [
        ("intl", "Кот сидел дома.", "кот сидел", 100 * 2 * 2 / (2 + 4)),
        ("char", "แมว", "แมว", 100.0),
        ("zh", "我爱你", "我爱他", 100 * 2 / 3),
    ],
)
def test_rouge_of_other_scripts_needs_another_tokenizer(tokenize, text, other, score, caplog):
    t5, mine = (Rouge(("rouge1",), tokenize=name) for name in ("rouge", tokenize))
    (result,) = mine.results([other], [text])
    assert result.score == pytest.approx(score) and f"|tok:{tokenize}|" in result.signature
    assert not caplog.text
    (result,) = t5.results([text, "a"], [text, "a"])
    assert result.score == 50.0 and "tok" not in result.signature
    assert "1 of 2 targets have no token" in caplog.text and "tokenize='intl'" in caplog.text
    with refused("Rouge.use_stemmer=True is for tokenize='rouge', got 'zh'"):
        Rouge(use_stemmer=True, tokenize="zh")


def test_bleu_and_chrf_take_all_right_answers():
    texts = ["the cat sat on the mat", "it rains in Spain today"]
    answers = [("a dog ran over the road", texts[0]), (texts[1],)]
    targets = [Reference(each[0], answers=each) for each in answers]
    for metric in (Bleu(), ChrF()):
        (result,) = metric.results(texts, targets)
        assert result.score == pytest.approx(100)
        assert metric.results(texts, [each[0] for each in answers])[0].score < 90


def test_answers_are_compared_as_in_the_tests_of_t5():
    """t5/evaluation/qa_utils_test.py and metrics_test.py, those with one answer."""
    assert (
        normalized_answer("`Needs\tA_LOT of the 'normalization'.\"‘")
        == "needs alot of normalization‘"
    )
    assert normalized_answer("needs no normalization") == "needs no normalization"
    assert (
        normalized_trivia_answer("`Needs\tA_LOT of the 'normalization'.\"‘")
        == "needs lot of normalization"
    )


def test_accuracy_is_of_equal_texts():
    assert scores(Accuracy(), ["a", "B", "c", "d"], ["a", "b", "c", "e"]) == {"accuracy": 50.0}
