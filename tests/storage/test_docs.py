# SPDX-License-Identifier: Apache-2.0
"""docs/storage.md is true: its commands and its Python run, its table is what they print."""

import json
import re
import shlex
import shutil

import numpy as np
import pytest

from switchx.cli.main import main
from switchx.gin_config import building
from switchx.storage.simulation import POLICIES
from switchx.storage.trace import trace_of_choices
from switchx.training.offload.storage_spec import StorageSpec
from tests.commands import commands, python_blocks
from tests.processes import ROOT

PAGE = (ROOT / "docs/storage.md").read_text(encoding="utf-8")
NAMES = [
    "next_use_vs_belady_all_touched",
    "next_use_vs_belady_half_touched",
    "chosen_vs_best_policy",
]


@pytest.fixture
def run(in_a_folder, finished_run):
    """A folder with the page's run, which has 12 steps."""
    shutil.copytree(finished_run.folder, in_a_folder / "runs" / "pretrain_tiny")
    return in_a_folder / "runs" / "pretrain_tiny"


@pytest.fixture
def few_checks(monkeypatch):
    """Synthetic traces are simulated by one test alone."""
    monkeypatch.setattr("switchx.cli.simulate._checks", lambda simulations: ([], []))


@pytest.mark.slow  # tests/cli/test_docs.py parses them by default
def test_commands_run(run, few_checks, capsys):
    found = [each for each in commands(PAGE) if each.startswith("switchx simulate ")]
    assert len(found) == 3
    for command in found:
        assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
        assert capsys.readouterr().out


def test_gin_file_has_the_choice_and_is_read_after_a_runs_own(run, few_checks, capsys):
    output = run.parent / "cache.gin"
    words = ["simulate", "cache", f"--model_dir={run}", f"--output={output}"]
    assert main([*words, "--requests=training", "--tokens_per_step=20"]) == 0
    last, name = capsys.readouterr().out.splitlines()[-2:]
    policy, num_bytes = re.fullmatch(r"(\w+), .* experts \(([\d,]+) bytes\)", last).groups()
    assert name == str(output)
    use = run.parent / "use.gin"
    use.write_text(f"include {str(output)!r}\nSTORAGE = @storage_spec.StorageSpec()\n")
    building.parse_files([str(run / "operative_config.gin"), str(use)], [], [])
    spec = building.build("STORAGE", StorageSpec)
    assert (spec.policy, spec.host_bytes) == (policy, int(num_bytes.replace(",", "")))


def test_a_trace_of_the_run_itself_is_taken(run, few_checks, capsys):
    expert_NTS = np.array([[[0], [1], [0], [1]]])
    trace = trace_of_choices([(["a"], expert_NTS)], 2, 100, sweeps=1, tokens_per_step=1)
    trace.save(run / "storage" / "trace.npz")
    words = ["simulate", "cache", f"--model_dir={run}"]
    assert main([*words, "--host_bytes=250", "--json"]) == 0
    rates, traffic = json.loads(capsys.readouterr().out)["results"]
    assert rates == {"run": "100%", "belady": 0.5} | {policy: 0.5 for policy in POLICIES}
    assert traffic["experts"] == 2 and traffic["step_read_mib"] == 2 * 100 / 2**20 / 4
    assert main([*words, "--requests=training"]) == 2
    assert "has the requests of the run itself" in capsys.readouterr().err
    assert main([*words, "--host_bytes=99"]) == 2
    assert "holds 0 experts of 100 bytes" in capsys.readouterr().err


@pytest.mark.slow  # simulates all policies
def test_checks_hold_and_the_table_is_theirs(run, capsys):
    assert main(["simulate", "cache", f"--model_dir={run}", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [check["name"] for check in printed["checks"]] == NAMES
    assert all(check["holds"] for check in printed["checks"])
    rows = [row for row in printed["results"] if "synthetic" in row]
    measured = [[f"{row[name]:.2f}" for name in (*POLICIES, "belady")] for row in rows]
    cells = [[cell.strip() for cell in line.split("|")[3:7]] for line in PAGE.splitlines()]
    said = [row for row in cells if len(row) == 4 and re.fullmatch(r"0\.\d\d", row[0])]
    assert said == measured
    for name, check in zip(NAMES, printed["checks"], strict=True):
        digits = re.search(rf"`{name}`\s+\((-?[\d.]+), bound\s+(-?[\d.]+)\)", PAGE)
        decimals = len(digits[1].partition(".")[2])
        assert f"{check['value']:z.{decimals}f}" == digits[1]
        assert float(check["bound"].strip("<=>")) == float(digits[2])


@pytest.mark.parametrize("rate", ["0", "1.1", "x"])
def test_hit_rates_are_shares(rate, capsys):
    assert main(["simulate", "cache", "--model_dir=x", f"--min_hits={rate}"]) == 2
    assert f"{rate!r} is no share" in capsys.readouterr().err


def test_snippets_run(capsys):
    for snippet in python_blocks(PAGE):
        exec(compile(snippet, "storage.md", "exec"), {})
    said = capsys.readouterr().out
    assert "Transfer(linked_bytes=" in said and "[3., 3., 3.]" in said
