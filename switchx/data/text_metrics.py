# SPDX-License-Identifier: Apache-2.0
"""Metrics of generated texts against a corpus's targets, as their own libraries compute them.

All take raw, untokenized texts, and are between 0 and 100. A target is a text, or a `Reference`
with several right answers and more about its example. A result comes with its signature, which
one must know to compare it with another. Metrics of classes are in `label_metrics.py`.
"""

import collections
import dataclasses
import importlib.metadata
import itertools
import logging
import math
import re
import string
from collections.abc import Sequence
from typing import Literal, Protocol

from switchx.fields import check_choices, require, require_at_least

_log = logging.getLogger(__name__)

_TRIVIA_PUNCTUATION = frozenset(string.punctuation + "\u2018\u2019\u00b4`_")


class Reference(str):
    """A target text, and what else metrics need to know about its example.

    Attributes:
        answers: all texts that are right, at least one.
        group: name shared by examples that belong together; empty if there are no groups.
        label: number of the right class; None if targets are not classes.
        choices: texts to be ranked by score; empty if there is no choice.
        example_id: the data set's own name of the example; empty if it has none.
    """

    __slots__ = ("answers", "choices", "example_id", "group", "label")

    def __new__(cls, text, answers=(), group="", label=None, choices=(), example_id=""):
        self = super().__new__(cls, text)
        self.answers = tuple(answers) or (text,)
        self.group, self.label, self.choices = group, label, tuple(choices)
        self.example_id = example_id
        return self


def answers_of(target: str) -> tuple[str, ...]:
    """All texts that are right: the target, or the answers of a `Reference`."""
    return target.answers if isinstance(target, Reference) else (target,)


@dataclasses.dataclass(frozen=True)
class MetricResult:
    """One number about many texts.

    Attributes:
        score: the number; None if it could not be computed.
        signature: library, its version and its settings.
        interval: 95% bootstrap interval, if it was asked for and the library has it.
        note: the reason why there is no score.
    """

    name: str
    score: float | None
    signature: str
    interval: tuple[float, float] | None = None
    note: str | None = None


def computed(result: MetricResult) -> MetricResult:
    """The result with Python numbers; if the score is not finite, without a score and with a
    note."""
    if result.score is None:
        return result
    interval = result.interval and tuple(map(float, result.interval))
    result = dataclasses.replace(result, score=float(result.score), interval=interval)
    if math.isfinite(result.score):
        return result
    note = result.note or f"the score is {result.score}, no finite number"
    return dataclasses.replace(result, score=None, interval=None, note=note)


def results_or_notes(
    metric: "TextMetric",
    predictions: Sequence[str],
    targets: Sequence[str],
    num_bootstrap: int = 0,
) -> list[MetricResult]:
    """The metric's results; if it raises, each of its names without a score, with a note.

    Metrics are code of libraries and users; their failure is no reason to end training.
    """
    try:
        return list(map(computed, metric.results(predictions, targets, num_bootstrap)))
    except Exception as error:
        _log.debug("%s failed", type(metric).__name__, exc_info=True)
        note = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return [MetricResult(name, None, "", note=note) for name in metric.names]


class TextMetric(Protocol):
    """A metric of a task; `names` are the names of its results, in their order."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def results(
        self, predictions: Sequence[str], targets: Sequence[str], num_bootstrap: int = 0
    ) -> list[MetricResult]:
        """Compares predictions with equally many targets, at least one.

        Args:
            targets: texts or `Reference`s.
            num_bootstrap: samples for an interval; 0 gives none.
        """


@dataclasses.dataclass(frozen=True)
class Bleu:
    """Corpus BLEU of sacreBLEU (Post 2018, arXiv:1804.08771); T5's `bleu` has tokenize="intl".

    All right answers of an example are its references.

    Attributes:
        tokenize: tokenizer. 13a is WMT's; intl splits at all Unicode punctuation; zh and char
            are for Chinese, and for texts without spaces. Only those of sacreBLEU that need no
            further package and download nothing.
        lowercase: whether case is ignored.
    """

    tokenize: Literal["13a", "intl", "char", "zh", "none"] = "13a"
    lowercase: bool = False
    names = ("bleu",)

    def __post_init__(self):
        check_choices(self)

    def results(self, predictions, targets, num_bootstrap=0) -> list[MetricResult]:
        # Libraries are imported where they are used: reading a configuration needs none.
        from sacrebleu.metrics import BLEU

        metric = BLEU(tokenize=self.tokenize, lowercase=self.lowercase)
        return [_sacrebleu(*self.names, metric, predictions, targets, num_bootstrap)]


@dataclasses.dataclass(frozen=True)
class ChrF:
    """Character F-score of sacreBLEU (Popovic 2015, 2017), of the best right answer.

    Attributes:
        word_order: longest n-gram of words; 0 is chrF, 2 is chrF++.
    """

    word_order: int = 0

    def __post_init__(self):
        require_at_least(self, 0, "word_order")

    @property
    def names(self) -> tuple[str]:
        return ("chrf" + "+" * self.word_order,)

    def results(self, predictions, targets, num_bootstrap=0) -> list[MetricResult]:
        from sacrebleu.metrics import CHRF

        metric = CHRF(word_order=self.word_order)
        return [_sacrebleu(*self.names, metric, predictions, targets, num_bootstrap)]


@dataclasses.dataclass(frozen=True)
class Rouge:
    """Mean F-measures of rouge-score (Lin 2004), in percent.

    For ROUGE-Lsum a sentence ends at a newline, and at ` . ` as in T5's metric (for tokenized
    texts such as CNN/Daily Mail). T5 reports the bootstrap median of the mean. With several
    answers, the best one counts for each type (as in SciTLDR).

    Attributes:
        types: types of rouge-score; T5's by default.
        use_stemmer: whether the stems of English words are compared.
        tokenize: tokenizer. `rouge` is rouge-score's and T5's, only the runs of a to z and 0 to
            9; the others are sacreBLEU's (`Bleu`), for other scripts, on lower-cased
            texts.
    """

    types: tuple[str, ...] = ("rouge1", "rouge2", "rougeLsum")
    use_stemmer: bool = False
    tokenize: Literal["rouge", "intl", "char", "zh"] = "rouge"

    def __post_init__(self):
        check_choices(self)
        require(
            not self.use_stemmer or self.tokenize == "rouge",
            f"Rouge.use_stemmer=True is for tokenize='rouge', got {self.tokenize!r}; leave one "
            "of them out",
        )
        wrong = [name for name in self.types if not re.fullmatch(r"rouge([1-9]|L|Lsum)", name)]
        require(
            self.types and not wrong,
            f"Rouge.types={self.types!r}; use some of rouge1 to rouge9, rougeL, rougeLsum",
        )

    @property
    def names(self) -> tuple[str, ...]:
        return self.types

    def results(self, predictions, targets, num_bootstrap=0) -> list[MetricResult]:
        from rouge_score.rouge_scorer import RougeScorer

        tokenizer = self._tokenizer()
        _warn_of_empty_references(tokenizer, self.tokenize, targets)
        scorer = RougeScorer(list(self.types), tokenizer=tokenizer)
        # One line per sentence: rouge-score splits only at newlines.
        scores = [
            scorer.score_multi(list(map(_lines, answers_of(target))), _lines(prediction))
            for target, prediction in zip(targets, predictions, strict=True)
        ]
        stemmer, version = self.use_stemmer, importlib.metadata.version("rouge-score")
        tokens = "" if self.tokenize == "rouge" else f"|tok:{self.tokenize}"
        signature = f"rouge-score|stemmer:{'yes' if stemmer else 'no'}{tokens}|v:{version}"
        return [
            MetricResult(name, _percent([score[name].fmeasure for score in scores]), signature)
            for name in self.names
        ]

    def _tokenizer(self):
        """The tokenizer that rouge-score calls."""
        from rouge_score.tokenizers import DefaultTokenizer

        if self.tokenize == "rouge":
            return DefaultTokenizer(self.use_stemmer)
        return _SacrebleuTokens(self.tokenize)


class _SacrebleuTokens:
    """A tokenizer of sacreBLEU with the interface of rouge-score."""

    def __init__(self, name: str):
        from sacrebleu.tokenizers import tokenizer_char, tokenizer_intl, tokenizer_zh

        self._split = {
            "intl": tokenizer_intl.TokenizerV14International,
            "char": tokenizer_char.TokenizerChar,
            "zh": tokenizer_zh.TokenizerZh,
        }[name]()

    def tokenize(self, text: str) -> list[str]:
        return self._split(text.lower()).split()


def _warn_of_empty_references(tokenizer, name: str, targets: Sequence[str]) -> None:
    empty = [
        target
        for target in targets
        if not any(tokenizer.tokenize(answer) for answer in answers_of(target))
    ]
    if empty:
        way_out = ""
        if name == "rouge":
            way_out = (
                "; rouge-score reads a to z and 0 to 9 alone: use Rouge.tokenize='intl', and "
                "'char' or 'zh' for texts without spaces"
            )
        _log.warning(
            "Rouge: %d of %d targets have no token, %.40r for one, and score 0%s",
            len(empty),
            len(targets),
            str(empty[0]),
            way_out,
        )


@dataclasses.dataclass(frozen=True)
class Squad:
    """Exact match and token F1 of answers, each the best over the right answers.

    They are T5's `squad` and `trivia_qa` metrics (`qa_utils`).

    Attributes:
        normalization: normalization of answers. `squad`, as SQuAD's own script: lower case,
            without punctuation, articles and extra white space (Rajpurkar et al. 2016,
            arXiv:1606.05250, section 6.1); `trivia_qa`: more punctuation, made spaces.
        once_per_group: whether only the first example of each group counts (for ReCoRD, which
            has an example for each right answer).
    """

    normalization: Literal["squad", "trivia_qa"] = "squad"
    once_per_group: bool = False
    names = ("exact_match", "f1")

    def __post_init__(self):
        check_choices(self)

    def results(self, predictions, targets, num_bootstrap=0) -> list[MetricResult]:
        pairs = list(zip(predictions, targets, strict=True))
        if self.once_per_group:
            # Later entries of a dictionary win, so the first pair of each group stays.
            pairs = list({_group_of(pair[1]): pair for pair in reversed(pairs)}.values())
        normalize = {"squad": normalized_answer, "trivia_qa": normalized_trivia_answer}
        text = normalize[self.normalization]
        pairs = [(text(guess), list(map(text, answers_of(right)))) for guess, right in pairs]
        most = max(len(answers) for _, answers in pairs)
        signature = f"{self.normalization}|v:1.1|answers:{most}"
        exact = [guess in answers for guess, answers in pairs]
        f1 = [max(_token_f1(guess, each) for each in answers) for guess, answers in pairs]
        scores = zip(self.names, (exact, f1), strict=True)
        return [MetricResult(name, _percent(each), signature) for name, each in scores]


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Percentage of texts that equal the target exactly (seqio's and T5's)."""

    names = ("accuracy",)

    def results(self, predictions, targets, num_bootstrap=0) -> list[MetricResult]:
        pairs = zip(predictions, targets, strict=True)
        return [MetricResult(*self.names, _percent([a == b for a, b in pairs]), "equal texts")]


METRICS = {"bleu": Bleu, "chrf": ChrF, "rouge": Rouge, "squad": Squad, "accuracy": Accuracy}


def normalized_answer(text: str) -> str:
    """An answer as SQuAD compares it."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def normalized_trivia_answer(text: str) -> str:
    """An answer as TriviaQA's script compares it."""
    text = "".join(" " if c in _TRIVIA_PUNCTUATION else c for c in text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _lines(text: str) -> str:
    """The text with one line per sentence, as in T5."""
    return " .\n".join(text.split(" . "))


def _group_of(target: str) -> str:
    require(
        isinstance(target, Reference) and target.group,
        "Squad.once_per_group=True needs targets with groups, such as those of ReCoRD; leave "
        "it out",
    )
    return target.group


def _token_f1(prediction: str, target: str) -> float:
    guessed, wanted = prediction.split(), target.split()
    same = sum((collections.Counter(guessed) & collections.Counter(wanted)).values())
    return 2 * same / (len(guessed) + len(wanted)) if same else 0.0


def _percent(values: Sequence[float]) -> float:
    return 100 * sum(values) / len(values)


def _sacrebleu(name: str, metric, predictions, targets, num_bootstrap: int) -> MetricResult:
    # To sacreBLEU, a bootstrap of 1 means none.
    answers = itertools.zip_longest(*map(answers_of, targets))  # None where there are fewer
    score = metric.corpus_score(
        list(predictions), list(map(list, answers)), n_bootstrap=max(num_bootstrap, 1)
    )
    interval = None
    if num_bootstrap > 1:
        interval = (score._mean - score._ci, score._mean + score._ci)
    return MetricResult(name, score.score, str(metric.get_signature()), interval)
