# SPDX-License-Identifier: Apache-2.0
"""docs/scale.md says what was measured, of the configurations that are here."""

import json
import re
import shlex

import pytest

from switchx.bench import scale_page
from switchx.bench.compiled import PODS
from switchx.cli.arguments import parse_job
from switchx.cli.main import _parse, _parser
from switchx.partitioning.topology import Topology
from switchx.planner.model_cost import count_parameters

PAGE = scale_page.PAGE.read_text(encoding="utf-8")
REPORTS = json.loads(scale_page.RESULTS.read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_results():
    assert scale_page.with_tables(PAGE, REPORTS) == PAGE


def test_a_page_without_a_place_is_refused():
    with pytest.raises(ValueError, match="has no lines"):
        scale_page.with_tables("# Scale", REPORTS)


def test_another_run_is_refused():
    with pytest.raises(ValueError, match="there is no switch_d; use switch_base"):
        scale_page.main(["switch_d"])


@pytest.mark.parametrize(("run_file", "topology"), PODS)
def test_results_are_of_this_configuration_and_hold(run_file, topology):
    report = REPORTS[scale_page.name_of(run_file)]
    [row] = report["results"]
    job = parse_job(
        _parse(_parser(), ["compile", f"--gin_file={run_file}", f"--topology={topology}"])
    )
    assert row["parameters"] == count_parameters(job.model).total
    assert row["topology"] == topology
    assert row["devices"] == Topology.parse(topology).num_devices
    assert row["tokens_per_batch"] == job.batch_size * job.inputs_length == 1 << 20
    assert not [check for check in report["checks"] if not check["holds"]]


def test_commands_are_understood():
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    compiled = [words[1:] for words in commands if words[0] == "switchx"]
    assert len(compiled) == 2
    for words in compiled:
        arguments = _parse(_parser(), words)
        assert (arguments.gin_file[0], arguments.topology) in PODS
