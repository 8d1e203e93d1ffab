# SPDX-License-Identifier: Apache-2.0
"""The runs of experiments/pretraining that other experiments begin with, each checked."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.measured import Cells
from experiments.pretraining.run import COMPARISON
from experiments.study import HASHES, ROOT, Study, run_name
from switchx.checkpoint.run_folder import RunFolder, read_config
from switchx.fields import differences
from switchx.gin_config.building import job_from_gin


def pretrained(study: Study, contender: str) -> RunFolder:
    """A finished run of experiments/pretraining below the study's output, such as `dense`.

    Raises:
        ValueError: it is not there, or is of another configuration or other data.
    """
    _found(study, contender)
    runs = dataclasses.replace(study, name="pretraining").runs
    run = RunFolder(runs / run_name(contender, seed=0))
    files = [ROOT / file for file in COMPARISON.gin_files]
    job = job_from_gin(files, study.placed(_bindings(study, contender)))
    # Gin files may have been edited since.
    _require_same(study, run.root, list(differences(read_config(run), job, "resume")))
    return run


def pretrained_curve(study: Study, contender: str) -> dict[int, float]:
    """Validation negative log perplexity by step of a run of experiments/pretraining."""
    return {int(step): value for step, value in _found(study, contender)["curve"].items()}


def _found(study: Study, contender: str) -> dict[str, Any]:
    """What `Study.train` found of the run."""
    runs = dataclasses.replace(study, name="pretraining").runs
    name = run_name(contender, seed=0)
    bindings = _bindings(study, contender)
    for line in Cells(runs / "cells.jsonl").lines:
        if line["cell"].get("run") != name:
            continue
        _require_same(study, runs / name, sorted({*bindings} ^ {*line["cell"]["bindings"]}))
        _require_known_data(study, runs)
        return line["value"]
    raise ValueError(
        f"{runs / name} is not there or not finished; it is made by "
        f"{study.again('pretraining')}"
    )


def _bindings(study: Study, contender: str) -> list[str]:
    """Those that a run of experiments/pretraining is asked for by."""
    (asked,) = (each for each in COMPARISON.contenders if each.name == contender)
    return [*COMPARISON.bindings_of(asked, seed=0), *study.quick_bindings]


def _require_same(study: Study, run: pathlib.Path, differing: Sequence[str]) -> None:
    """That nothing differs between a run of experiments/pretraining and what is asked for."""
    if differing:
        raise ValueError(
            f"{run} was trained with another configuration ({'; '.join(differing)}); make one "
            "that experiments/pretraining/run.py asks for: "
            f"{study.again('pretraining', output='OTHER')}"
        )


def _require_known_data(study: Study, runs: pathlib.Path) -> None:
    """That runs which are begun with read what `data.json` knows, or nobody asks for it."""
    file, known = runs / "data.json", json.loads(HASHES.read_text())
    read = json.loads(file.read_text()) if file.exists() else {}
    other = [name for name, of in read.items() if known.get(name) != of]
    if other and not study.takes_other_data:
        taken = dataclasses.replace(study, takes_other_data=True)
        raise ValueError(
            f"{runs} is of other data: {', '.join(other)}; make it anew: "
            f"{study.again('pretraining', output='OTHER')}, or have results of your own: "
            f"{taken.again()}"
        )
