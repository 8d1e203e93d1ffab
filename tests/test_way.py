# SPDX-License-Identifier: Apache-2.0
"""The way of a run, and within a step: the files are those that docs/architecture.md lists."""

import re

import pytest

from tests.processes import ROOT
from tests.way import RUN, STEP

WAYS = {"The way of a run": (RUN, 18), "Within a step": (STEP, 7)}


@pytest.mark.parametrize("heading", WAYS)
def test_the_way_is_through_the_files_that_the_page_lists(finished_run, heading):
    moments, most = WAYS[heading]
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| \[[\w/.]+\]\(\.\./([\w/.]+)\) \| \w", section, re.MULTILINE)
    files = [finished_run.way[moment] for moment in moments]
    assert all(files) and {*listed} == set().union(*files)
    assert len(listed) <= most
