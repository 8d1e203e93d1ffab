# SPDX-License-Identifier: Apache-2.0
"""The runs of experiments/switch_vs_dense, which other experiments begin with, each checked."""

import dataclasses
import json
import threading

from experiments import rules
from experiments.experiment import HASHES, Experiment
from experiments.measured import Cells
from experiments.pages import ROOT
from switchx.checkpoint.run_folder import RunFolder, read_config
from switchx.fields import differences
from switchx.gin_config.building import job_from_gin

SOURCE = "switch_vs_dense"
# Gin has one configuration, and cells begin side by side.
_GIN = threading.Lock()


def pretrained(experiment: Experiment, name: str) -> RunFolder:
    """A finished run of switch_vs_dense below the experiment's output, by its folder's name.

    Args:
        name: such as `16_experts_R1_seed100`; `experiment.run_name` makes it.

    Raises:
        ValueError: it is not there, or is of another rule, configuration or other data.
    """
    runs = dataclasses.replace(experiment, name=SOURCE).runs
    run = RunFolder(runs / name)
    line = next(
        (e for e in Cells(runs / "cells.jsonl").lines if e["cell"].get("run") == name), None
    )
    if line is None:
        raise ValueError(
            f"{run.root} is not there or not finished; it is made by {experiment.again(SOURCE)}"
        )
    begun, data = (
        json.loads(file.read_text()) if file.exists() else {}
        for file in (runs / "begun.json", runs / "data.json")
    )
    cell = line["cell"]
    files = [ROOT / file for file in cell["gin_files"]]
    placed = experiment.placed(cell["bindings"])
    with _GIN:
        job = job_from_gin(files, placed)
    differing = list(differences(read_config(run), job, "resume"))  # gin files are edited
    rule = rules.digest(rules.constants_of(SOURCE))
    if not experiment.is_quick and begun.get("rule") != rule:
        differing.append(f"rule: {begun.get('rule')} != {rule}")
    if differing:
        raise ValueError(
            f"{run.root} was trained with another configuration ({'; '.join(differing)}); make "
            f"one that experiments/{SOURCE}/run.py asks for: "
            f"{experiment.again(SOURCE, output='OTHER')}"
        )
    known = json.loads(HASHES.read_text())
    other = [name for name, digest in data.items() if known.get(name) != digest]
    if other and not experiment.takes_other_data:
        taken = dataclasses.replace(experiment, takes_other_data=True)
        raise ValueError(
            f"{runs} is of other data: {', '.join(other)}; make it anew: "
            f"{experiment.again(SOURCE, output='OTHER')}, or have results of your own: "
            f"{taken.again()}"
        )
    return run
