# SPDX-License-Identifier: Apache-2.0
"""The runs of experiments/pretraining that other experiments begin with, each checked."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.experiment import HASHES, Experiment, run_name
from experiments.measured import Cells
from experiments.pages import ROOT
from experiments.pretraining.models import COMPARISON
from switchx.checkpoint.run_folder import RunFolder, read_config
from switchx.fields import differences
from switchx.gin_config.building import job_from_gin


def pretrained(experiment: Experiment, contender: str) -> RunFolder:
    """A finished run of experiments/pretraining below the experiment's output, such as `dense`.

    Raises:
        ValueError: it is not there, or is of another configuration or other data.
    """
    _found(experiment, contender)
    runs = dataclasses.replace(experiment, name="pretraining").runs
    run = RunFolder(runs / run_name(contender, seed=0))
    files = [ROOT / file for file in COMPARISON.gin_files]
    job = job_from_gin(files, experiment.placed(_bindings(experiment, contender)))
    # Gin files may have been edited since.
    _require_same(experiment, run.root, list(differences(read_config(run), job, "resume")))
    return run


def pretrained_curve(experiment: Experiment, contender: str) -> dict[int, float]:
    """Validation negative log perplexity by step of a run of experiments/pretraining."""
    return {int(step): value for step, value in _found(experiment, contender)["curve"].items()}


def _found(experiment: Experiment, contender: str) -> dict[str, Any]:
    """What `study.Study.train` found of the run."""
    runs = dataclasses.replace(experiment, name="pretraining").runs
    name = run_name(contender, seed=0)
    bindings = _bindings(experiment, contender)
    for line in Cells(runs / "cells.jsonl").lines:
        if line["cell"].get("run") != name:
            continue
        differing = sorted({*bindings} ^ {*line["cell"]["bindings"]})
        _require_same(experiment, runs / name, differing)
        _require_known_data(experiment, runs)
        return line["value"]
    raise ValueError(
        f"{runs / name} is not there or not finished; it is made by "
        f"{experiment.again('pretraining')}"
    )


def _bindings(experiment: Experiment, contender: str) -> list[str]:
    """Those that a run of experiments/pretraining is asked for by."""
    (asked,) = (each for each in COMPARISON.contenders if each.name == contender)
    return [*COMPARISON.bindings_of(asked, seed=0), *experiment.quick_bindings]


def _require_same(experiment: Experiment, run: pathlib.Path, differing: Sequence[str]) -> None:
    """That nothing differs between a run of experiments/pretraining and what is asked for."""
    if differing:
        raise ValueError(
            f"{run} was trained with another configuration ({'; '.join(differing)}); make one "
            "that experiments/pretraining/run.py asks for: "
            f"{experiment.again('pretraining', output='OTHER')}"
        )


def _require_known_data(experiment: Experiment, runs: pathlib.Path) -> None:
    """That runs which are begun with read what `data.json` knows, or nobody asks for it."""
    file, known = runs / "data.json", json.loads(HASHES.read_text())
    read = json.loads(file.read_text()) if file.exists() else {}
    other = [name for name, of in read.items() if known.get(name) != of]
    if other and not experiment.takes_other_data:
        taken = dataclasses.replace(experiment, takes_other_data=True)
        raise ValueError(
            f"{runs} is of other data: {', '.join(other)}; make it anew: "
            f"{experiment.again('pretraining', output='OTHER')}, or have results of your own: "
            f"{taken.again()}"
        )
