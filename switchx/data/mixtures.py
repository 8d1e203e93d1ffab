# SPDX-License-Identifier: Apache-2.0
"""Mixtures: several tasks learnt at once, and how often each is drawn.

Raffel et al. 2020 (arXiv:1910.10683), section 3.5.2. Rates count examples before packing, as
seqio's do. `multi30k_directions` is one model for several languages, as Kim et al. 2022
(arXiv:2211.10017), section 4.1, train it: a task for each direction, told apart by its prefix.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from switchx.data.corpora.corpus import Account
from switchx.data.corpora.multi30k import LANGUAGES, Multi30k
from switchx.data.corpora.splits import open_split
from switchx.data.objectives import InputsToTargets
from switchx.data.tasks import Task
from switchx.data.text_metrics import Bleu, ChrF
from switchx.data.tokenizers import Vocabulary
from switchx.fields import at_resume, require, require_at_least

LANGUAGE_NAMES = {"cs": "Czech", "de": "German", "en": "English", "fr": "French"}


@dataclasses.dataclass(frozen=True)
class ProportionalRates:
    """Examples-proportional mixing, `r_m = min(e_m, K)^(1/T)`, normalised.

    Attributes:
        temperature: T; 1 is proportional, larger values are nearer to equal (mT5's exponent
            of 0.3 is T = 1/0.3).
        maximum: K, the artificial limit on the size of a task; None for no limit.
    """

    temperature: float = 1.0
    maximum: int | None = None

    def __post_init__(self):
        require(self.temperature > 0, f"temperature={self.temperature}; use a number above 0")
        require_at_least(self, 1, "maximum")

    def of_sizes(self, sizes: Sequence[int]) -> list[float]:
        exponent = 1 / self.temperature
        sizes = [min(size, self.maximum or size) for size in sizes]
        # In units of the largest where powers would overflow.
        unit = max(sizes) if exponent * math.log(max(1, *sizes)) > 600 else 1
        return [(size / unit) ** exponent for size in sizes]


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Tasks, and the rates at which examples of them are drawn.

    Attributes:
        tasks: tasks with one vocabulary and different names.
        rates: one fixed weight for each task, or `ProportionalRates` of the number of records
            in each task's training split.
        rows: number of rows of each task in every batch, in the order of the tasks, instead of
            rates; batches then name the task of each row. None draws every example by the
            rates, regardless of its row.
        evaluation: tasks that are evaluated; they need not be among `tasks`. None is `tasks`.
    """

    tasks: tuple[Task, ...]
    rates: tuple[float, ...] | ProportionalRates = ProportionalRates()
    rows: tuple[int, ...] | None = None
    evaluation: tuple[Task, ...] | None = at_resume(None)

    def __post_init__(self):
        _check_names("a mixture of", self.tasks)
        if self.evaluation is not None:
            object.__setattr__(self, "evaluation", tuple(self.evaluation))
            _check_names("an evaluation of", self.evaluation)
            require(
                self.rows is None,
                "Mixture.rows gives experts to the tasks that are learnt, and other tasks in "
                "Mixture.evaluation have none; leave one of them out",
            )
        names = [task.name for task in self.tasks]
        # A fingerprint reads or trains the vocabulary; equal descriptions do not need one.
        first = self.tasks[0].vocabulary
        every = (*self.tasks, *(self.evaluation or ()))
        others = [task.vocabulary for task in every if task.vocabulary != first]
        require(
            all(each.fingerprint() == first.fingerprint() for each in others),
            f"the tasks {[t.name for t in every]} have different vocabularies; one model "
            "reads one, use the same for all",
        )
        require(
            isinstance(self.rates, ProportionalRates)
            or (len(self.rates) == len(names) and min(self.rates) > 0),
            f"rates={self.rates} for the tasks {names}; use a number above 0 for each, in "
            "their order",
        )
        if self.rows is None:
            return
        object.__setattr__(self, "rows", tuple(self.rows))  # JSON gives a list
        require(
            len(self.rows) == len(names) and min(self.rows) > 0,
            f"Mixture.rows={self.rows} for the tasks {names}; use a number above 0 for each, "
            "in their order",
        )
        require(
            self.rates == ProportionalRates(),
            f"Mixture.rows={self.rows} with rates={self.rates}: rows fix how often a task is "
            "drawn; leave one of them out",
        )

    def check_rows(self, batch_size: int) -> None:
        """Raises ValueError if the rows of the tasks do not add up to a batch."""
        require(
            self.rows is None or sum(self.rows) == batch_size,
            f"Mixture.rows={self.rows} are {sum(self.rows or ())} rows, and "
            f"batch_size={batch_size}; use rows of that sum",
        )

    def probabilities(self, sizes: Sequence[int]) -> np.ndarray:
        """The probability of each task for the next example, in order; the sum is 1.

        Args:
            sizes: records in each task's training split.
        """
        is_fixed = not isinstance(self.rates, ProportionalRates)
        rates = np.array(self.rates if is_fixed else self.rates.of_sizes(sizes), float)
        return rates / rates.sum()


def _check_names(what: str, tasks: Sequence[Task]) -> None:
    names = [task.name for task in tasks]
    require(
        names and len(set(names)) == len(names),
        f"{what} {names}; use one task or more, each named once",
    )


def evaluated_tasks(source: Task | Mixture) -> tuple[Task, ...]:
    """The tasks that are evaluated: those that are learnt, or those that a mixture names."""
    mixture = as_mixture(source)
    return mixture.tasks if mixture.evaluation is None else mixture.evaluation


def with_evaluated(source: Task | Mixture, change: Callable[[Task], Task]) -> Task | Mixture:
    """The task or mixture, with each evaluated task changed."""
    if isinstance(source, Task):
        return change(source)
    name = "tasks" if source.evaluation is None else "evaluation"
    return dataclasses.replace(source, **{name: tuple(map(change, getattr(source, name)))})


def splits_read(source: Task | Mixture) -> list[tuple[Task, str]]:
    """Tasks with the splits of them that training and evaluation read."""
    read = [(task, task.train_split) for task in as_mixture(source).tasks]
    return read + [(task, task.evaluation_split) for task in evaluated_tasks(source)]


def accounts_of(source: Task | Mixture, data_dir: str | None) -> list[Account]:
    """The parts of the corpora's files that are read, each corpus once.

    Raises:
        ValueError: as for `Corpus.open`.
    """
    found = []
    for task, split in splits_read(source):
        opened = open_split(task.corpus, split, data_dir)
        found += [account for account in opened.accounts if account not in found]
    return found


def as_mixture(source: Task | Mixture) -> Mixture:
    """A task as a mixture of only itself."""
    return Mixture((source,)) if isinstance(source, Task) else source


def multi30k_directions(
    vocabulary: Vocabulary,
    languages: Sequence[str] = LANGUAGES,
    favoured: Sequence[str] = (),
    favour: float = 1.0,
) -> Mixture:
    """A task for each ordered pair of languages: `German: A man sleeps.` asks for German.

    Tasks are named like `multi30k_en_de` and are measured by BLEU and chrF.

    Args:
        languages: two or more of cs, de, en, fr.
        favoured: directions, such as `en_de`, drawn `favour` times as often as others.

    Raises:
        ValueError: an unknown language, fewer than two, or a direction not among them.
    """
    pairs = list(itertools.permutations(languages, 2))
    require(pairs, f"languages={tuple(languages)} have no direction; use two or more")
    directions = ["_".join(pair) for pair in pairs]
    unknown = sorted(set(favoured) - set(directions))
    require(not unknown, f"favoured={unknown}; use directions of {', '.join(directions)}")
    corpora = [Multi30k(*pair) for pair in pairs]
    tasks = tuple(
        Task(
            each.name,
            each,
            vocabulary,
            InputsToTargets(prefix=f"{LANGUAGE_NAMES[each.target]}: "),
            metrics=(Bleu(), ChrF()),
        )
        for each in corpora
    )
    return Mixture(tasks, tuple(favour if each in favoured else 1.0 for each in directions))
