# SPDX-License-Identifier: Apache-2.0
"""Multilingual mixtures: each language is a task of its own, all with one vocabulary.

mT5 (Xue et al. 2021, arXiv:2010.11934, section 3.1) and mSwitch (Fedus et al. 2021,
arXiv:2101.03961, section 4.3): language L is drawn at a rate proportional to |L|^0.3 examples.
Evaluation measures each task, and with it each language.
"""

import collections
from pathlib import Path

from switchx.data.corpora.c4 import C4
from switchx.data.corpora.packed_files import name_of, only
from switchx.data.corpora.text_files import TextFiles, is_text_file
from switchx.data.mixtures import Mixture, ProportionalRates
from switchx.data.objectives import SpanCorruption, TextObjective
from switchx.data.tasks import Task
from switchx.data.tokenizers import Vocabulary
from switchx.fields import require

# The 101 languages of mC4, under Common Crawl's codes (iw is Hebrew).
MC4_LANGUAGES = tuple(
    "af am ar az be bg bn ca ceb co cs cy da de el en eo es et eu fa fi fil fr fy ga gd gl gu "
    "ha haw hi hmn ht hu hy id ig is it iw ja jv ka kk km kn ko ku ky la lb lo lt lv mg mi mk "
    "ml mn mr ms mt my ne nl no ny pa pl ps pt ro ru sd si sk sl sm sn so sq sr st su sv sw ta "
    "te tg th tr uk ur uz vi xh yi yo zh zu".split()
)
# Six of them in Latin letters; mT5 trains on these, too.
MC4_IN_LATIN = tuple("bg-Latn el-Latn hi-Latn ja-Latn ru-Latn zh-Latn".split())
MT5_RATES = ProportionalRates(temperature=1 / 0.3)


def mc4(
    vocabulary: Vocabulary,
    languages: tuple[str, ...] = MC4_LANGUAGES,
    rates: tuple[float, ...] | ProportionalRates = MT5_RATES,
    evaluated: tuple[str, ...] | None = None,
    objective: TextObjective = SpanCorruption(),
) -> Mixture:
    """Languages of mC4 as TFDS prepared it, tasks `mc4_de`, ...

    Args:
        evaluated: languages to evaluate; None is all that are learnt.

    Raises:
        ValueError: mC4 does not have one of the languages.
    """
    known = MC4_LANGUAGES + MC4_IN_LATIN
    unknown = sorted(set(languages + (evaluated or ())) - set(known))
    require(
        not unknown, f"mC4 has no language {', '.join(unknown)}; use some of {' '.join(known)}"
    )

    def tasks(names: tuple[str, ...]) -> tuple[Task, ...]:
        return tuple(
            Task(f"mc4_{name}", C4("multilingual", name), vocabulary, objective)
            for name in names
        )

    return Mixture(tasks(languages), rates, evaluation=evaluated and tasks(evaluated))


def language_files(
    folder: str, languages: tuple[str, ...], columns: tuple[str, ...] | None = None
) -> tuple[TextFiles, ...]:
    """A user's own text by language: `de.txt`, `de.txt.gz`, `de.parquet`, ..., or folder `de`.

    Args:
        columns: columns, as in `TextFiles.columns`.

    Raises:
        ValueError: there are no languages, or one has no such file, or several.
    """
    require(languages, "no languages; name those whose files are in the folder")
    root = Path(folder).expanduser()
    found = {}
    entries = sorted(root.iterdir()) if root.is_dir() else []
    for name in languages:
        paths = collections.defaultdict(list)
        for path in entries:
            parts = name_of(path.name)
            if path.name == name or (parts.stem == name and is_text_file(parts, columns)):
                paths[parts.kind].append(path)
        found[name] = [only(same) for same in paths.values()]
        require(
            len(found[name]) == 1,
            f"language {name!r}: expected one of {name}/, {name}.txt, {name}.jsonl "
            f"(or packed, as .gz), {name}.parquet in {root}, got "
            f"{', '.join(path.name for path in found[name]) or 'none'}; put it there, or take "
            "the others away",
        )
    return tuple(TextFiles(str(paths[0]), columns=columns) for paths in found.values())


def text_languages(
    folder: str,
    languages: tuple[str, ...],
    vocabulary: Vocabulary,
    rates: tuple[float, ...] | ProportionalRates = MT5_RATES,
    objective: TextObjective = SpanCorruption(),
    columns: tuple[str, ...] | None = None,
) -> Mixture:
    """A user's own text in several languages, tasks `text_de`, ...

    Args:
        columns: columns, as in `TextFiles.columns`.

    Raises:
        ValueError: as `language_files`.
    """
    corpora = language_files(folder, languages, columns)
    tasks = (
        Task(f"text_{name}", corpus, vocabulary, objective)
        for name, corpus in zip(languages, corpora, strict=True)
    )
    return Mixture(tuple(tasks), rates)
