# SPDX-License-Identifier: Apache-2.0
"""The runs of experiments/pretraining, which other experiments begin with, each checked."""

import dataclasses
import json
import pathlib

from experiments.experiment import HASHES, Comparison, Contender, Experiment, run_name
from experiments.measured import Cells
from experiments.pages import ROOT
from switchx.checkpoint.run_folder import RunFolder, read_config
from switchx.fields import differences
from switchx.gin_config.building import job_from_gin

COMPARISON = Comparison(
    contenders=(
        Contender("dense", ("ModelConfig.switch=None",)),
        *(Contender(f"{n} experts", (f"NUM_EXPERTS={n}",)) for n in (32, 8, 64)),
    ),
    steps=1000,
    seeds=(0,),
    # Figure 13 fine-tunes what was kept on the way.
    bindings=("checkpointer.Retention.keep_period=250", "TrainingJob.eval_batches=20"),
)


def pretrained(experiment: Experiment, contender: str) -> RunFolder:
    """A finished run of experiments/pretraining below the experiment's output, such as `dense`.

    Raises:
        ValueError: it is not there, or is of another configuration or other data.
    """
    run, bindings, _ = _found(experiment, contender)
    files = [ROOT / file for file in COMPARISON.gin_files]
    job = job_from_gin(files, experiment.placed(bindings))
    # Gin files may have been edited since.
    _require_same(experiment, run.root, list(differences(read_config(run), job, "resume")))
    return run


def pretrained_curve(experiment: Experiment, contender: str) -> dict[int, float]:
    """Validation negative log perplexity by step of a run of experiments/pretraining."""
    curve = _found(experiment, contender)[2]["curve"]
    return {int(step): value for step, value in curve.items()}


def _found(experiment: Experiment, contender: str) -> tuple[RunFolder, list[str], dict]:
    """The run, the bindings that it is asked for by, and what `study.Study.train` found."""
    runs = dataclasses.replace(experiment, name="pretraining").runs
    run = RunFolder(runs / run_name(contender, seed=0))
    (asked,) = (each for each in COMPARISON.contenders if each.name == contender)
    bindings = [*COMPARISON.bindings_of(asked, seed=0), *experiment.quick_bindings]
    for line in Cells(runs / "cells.jsonl").lines:
        if line["cell"].get("run") != run.root.name:
            continue
        _require_same(experiment, run.root, sorted({*bindings} ^ {*line["cell"]["bindings"]}))
        _require_known_data(experiment, runs)
        return run, bindings, line["value"]
    raise ValueError(
        f"{run.root} is not there or not finished; it is made by "
        f"{experiment.again('pretraining')}"
    )


def _require_same(experiment: Experiment, run: pathlib.Path, differing: list[str]) -> None:
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
