# SPDX-License-Identifier: Apache-2.0
"""The way of a run, and within a step: the files are those that docs/architecture.md lists."""

import re
import sys

import jax
import pytest

from switchx.training.program import TrainingProgram
from tests.processes import ROOT
from tests.training.jobs import SPARSE, make_batch, make_job, stacked
from tests.way import RUN, STEP, traced

WAYS = {"The way of a run": (RUN, 18), "Within a step": (STEP, 7)}


def listed(heading: str) -> list[str]:
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| \[[\w/.]+\]\(\.\./([\w/.]+)\) \| \w", section, re.MULTILINE)


@pytest.mark.parametrize("heading", WAYS)
def test_the_way_is_through_the_files_that_the_page_lists(finished_run, heading):
    moments, most = WAYS[heading]
    files = [finished_run.way[moment] for moment in moments]
    assert all(files) and {*listed(heading)} == set().union(*files)
    assert len(listed(heading)) <= most


def test_tracing_a_step_enters_no_more_files_than_the_page_says():
    job, files = make_job(SPARSE), set()
    program = TrainingProgram(job, jax.devices()[:1])
    batch = make_batch(job.model, job.batch_size)
    with program.scope():
        sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename))
        try:
            program.trace_step(batch)
        finally:
            sys.setprofile(None)
    entered = {path for path in files if path.startswith(str(ROOT / "switchx"))}
    page = (ROOT / "docs/architecture.md").read_text()
    (most,) = re.findall(r"enters\s+functions of at most (\d+) files", page)
    assert len(entered) <= int(most)  # fewer where an earlier test traced the same


def test_a_step_of_scanned_layers_goes_the_same_way():
    job = make_job(stacked(SPARSE))
    with traced() as files:
        program = TrainingProgram(job, jax.devices()[:1])
        with program.scope():
            program.trace_step(make_batch(job.model, job.batch_size))
    assert {*listed("Within a step")} == set().union(*(files[moment] for moment in STEP))
