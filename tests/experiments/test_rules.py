# SPDX-License-Identifier: Apache-2.0
"""Rules are registered before runs, judged at their looks, and refused by name otherwise."""

import ast
import dataclasses
import datetime
import importlib
import json
import os
import pathlib
import re
import runpy
import subprocess
from typing import Any

import numpy as np
import pytest
import scipy.stats

from experiments import experiment, pages, rules, study
from experiments.measured import Cells, device
from experiments.rules import Rule
from experiments.statistics import difference
from experiments.study import Study

RUN = """
from experiments.ladder import OnLadder, Runs, judge_by
from experiments.rules import Rule
from experiments.statistics import difference

RUNS = Runs((OnLadder("dense"), OnLadder("sparse")), seeds=tuple(range(100, 107)))
RULES = (
    Rule(
        "experts over dense", difference("sparse", "dense"), "ahead", "5% of compute", (4, 7),
        RUNS.seeds, 0.1, gates=("nothing dropped",),
    ),
)
judge = judge_by(RULES)
"""
LENGTHS = {"0.5": [-4.3, -4.31], "1": [-4.0, -4.01], "2": [-3.7, -3.71]}
RULE = Rule(
    "a claim", difference("sparse", "dense"), "ahead", 0.02, (4, 7), tuple(range(7)), 0.1
)  # fmt: skip


@dataclasses.dataclass
class Checkout:
    """A clone with one experiment, `asked`, and the results that its rule takes."""

    root: pathlib.Path

    @property
    def run(self) -> pathlib.Path:
        return self.root / "experiments/asked/run.py"

    def commit(self, day: int = 1) -> None:
        dates = dict.fromkeys(
            ("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), f"2026-01-0{day}T00:00"
        )
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        for command in (("add", "-A"), ("commit", "-qm", "rule")):
            subprocess.run(
                ["git", *who, *command], cwd=self.root, env=os.environ | dates, check=True
            )

    def results(self, name: str, found: dict[str, Any]) -> None:
        folder = self.root / "experiments" / name
        folder.mkdir(exist_ok=True)
        (folder / "results.json").write_text(json.dumps(found))

    def study(self, output: str, look: int = 1) -> Study:
        return Study("asked", self.root / output, None, look=look)

    def publish(self, output: str, gain: float, num_seeds: int, **more) -> dict[str, Any]:
        """What is published of a cell and of curves that end so far apart."""
        mine = self.study(output)
        cells = mine.cells()
        cells.get({"run": "sparse_seed100"}, dict)
        noise = np.resize([0.004, -0.006, 0.002], num_seeds)
        curves = {
            name: [{"0": -9.0, "10": end + e} for e in np.roll(noise, shift)]
            for name, end, shift in (("dense", -4.0, 0), ("sparse", -4.0 + gain, 1))
        }
        keys = ("flops", "rate", "length", "skipped_steps", "dropped")
        nothing, split = dict.fromkeys(keys, 1.0), {"tokens": 1, "bytes": 2}
        measured = {
            "seeds": list(range(100, 100 + num_seeds)), "steps": 10, "curves": curves,
            "models": dict.fromkeys(curves, nothing), "validation": split,
            "gates": {"nothing dropped": True},
        }  # fmt: skip
        return mine.publish(
            cells, {}, runpy.run_path(str(self.run))["judge"], **measured | more
        )


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    mine, here = Checkout(tmp_path), tmp_path / "experiments"
    mine.run.parent.mkdir(parents=True)
    for page in (here / "README.md", mine.run.parent / "README.md"):
        page.write_text(f"# A question?\n\n{pages.BEGIN}\n{pages.END}\n")
    (here / "seeds_seen.json").write_text('[{"experiment": "x", "rule": null, "seeds": [0]}]')
    mine.results("switch_vs_dense", {"dense_lengths": LENGTHS})
    mine.results("rates", {"quality": {"sparse": {"1": -5.1, "2": -5.0, "4": -5.1}}})
    (tmp_path / ".gitignore").write_text("runs*\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    mine.commit()
    mine.run.write_text(RUN)

    for module, name, value in (
        (rules, "HERE", here), (rules, "SEEN", here / "seeds_seen.json"), (pages, "HERE", here),
        (experiment, "ROOT", tmp_path),
        (rules, "constants_of", lambda name: runpy.run_path(str(mine.run))),
        (pages, "write_svg", lambda *of: None), (pages, "LADDER", "other"),
        (study, "code_fingerprint", lambda name: "code"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(pages, "folders", lambda: [mine.run.parent])
    return mine


def of_today(source: str) -> ast.Module:
    """A run.py of before without imports of what has gone since, which no rule names."""
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            there = vars(importlib.import_module(node.module))
            node.names = [each for each in node.names if each.name in there]
    tree.body = [node for node in tree.body if getattr(node, "names", True)]
    return tree


def require_registered(results: dict[str, Any]) -> None:
    """The rule is that of run.py at its commit, which is of this history and older than the
    first cell."""
    commit, file = results["registered"], f"experiments/{results['experiment']}/run.py"
    rules.git("merge-base", "--is-ancestor", commit, "HEAD")
    constants = {"__name__": "registered"}
    exec(compile(of_today(rules.git("show", f"{commit}:{file}")), file, "exec"), constants)
    assert rules.digest(constants) == results["rule"]
    time = rules.git("show", "-s", "--format=%cI", commit)
    assert time == results["registered_at"]
    begun = datetime.datetime.fromisoformat(results["first_cell"])
    assert datetime.datetime.fromisoformat(time) < begun


def test_published_rules_are_older_than_their_runs():
    for folder in pages.folders():
        results = pages.read_results(folder)
        if results and "rule" in results and results["verdict"] != rules.EXPLORATORY:
            require_registered(results)


def test_a_rule_is_registered_and_judged(checkout):
    """From the commit to the page and the overview."""
    checkout.commit()
    results = checkout.publish("runs", 0.1, 4)
    require_registered(results)
    assert results["verdict"] == "reproduced" and "verdict_before" not in results
    (claim,) = results["claims"]
    finals = {name: [curve["10"] for curve in c] for name, c in results["curves"].items()}
    oracle = scipy.stats.ttest_ind(finals["sparse"], finals["dense"]).confidence_interval()
    gains = [row["over dense (95%)"] for row in results["tables"][0]["rows"]]
    assert gains[0] is None and gains[1]["low"] == pytest.approx(oracle.low)
    assert claim["margin"] == pytest.approx(0.6 / np.log(4) * np.log(1.05))
    assert claim["power"] > 0.9 and claim["effect"]["low"] > 0 and claim["look"] == 1
    for page in (checkout.run.parent, checkout.run.parent.parent):
        text = (page / "README.md").read_text()
        assert "reproduced" in text and results["rule"][:8] in text and "97.1%" in text
    assert rules.seen()[-1] == {
        "experiment": "asked", "rule": results["rule"], "code": "code",
        "seeds": [100, 101, 102, 103],
    }  # fmt: skip
    for wrong in ({"first_cell": "2025-01-01T00:00+00:00"}, {"rule": "other"}):
        with pytest.raises(AssertionError):
            require_registered(results | wrong)
        assert rules.standing(results | wrong)["verdict"] == "exploratory"


def test_a_rule_that_is_not_committed_is_refused(checkout):
    with pytest.raises(ValueError, match="asked/run.py has rules and is not committed"):
        checkout.study("runs").cells()
    checkout.commit()
    checkout.study("runs").cells()
    checkout.run.write_text(RUN + "# More.\n")
    with pytest.raises(
        ValueError, match="is changed: .*`git add experiments/asked/run.py && git"
    ):
        checkout.study("runs").cells()


def test_contenders_are_of_a_commit_too(checkout):
    checkout.commit()
    (checkout.run.parent.parent / "ladder.py").write_text("# The rungs.\n")
    with pytest.raises(ValueError, match="^experiments/ladder.py: not committed, and the cont"):
        checkout.study("runs").cells()


def test_what_runs_were_begun_with_is_not_exchanged(checkout, monkeypatch):
    checkout.commit()
    checkout.study("runs").cells()
    sweep = checkout.root / "runs/asked/dense/LEARNING_RATE=1,seed=100"
    sweep.mkdir(parents=True)
    (sweep / "config.json").write_text("{}")  # killed in its first cell
    file = checkout.root / "runs/asked/begun.json"
    begun = json.loads(file.read_text())
    file.write_text(json.dumps(begun | {"dense_lengths": {"1": [-4.0], "2": [-3.9]}}))
    with pytest.raises(ValueError, match="begun.json has another dense_lengths than this"):
        checkout.study("runs").cells()
    file.write_text(json.dumps(begun))
    checkout.study("runs").cells()
    monkeypatch.setattr(study, "code_fingerprint", lambda name: "other")
    with pytest.raises(ValueError, match="whose code is another one"):
        checkout.study("runs").cells()
    file.unlink()
    with pytest.raises(ValueError, match="has runs and no begun.json.*OUTPUT=OTHER"):
        checkout.study("runs").cells()


def test_the_same_seeds_by_other_code_are_exploratory(checkout, monkeypatch):
    checkout.commit()
    checkout.publish("runs", 0.0135, 4)
    monkeypatch.setattr(study, "code_fingerprint", lambda name: "other")
    with pytest.raises(ValueError, match="has seen seeds 100, 101, 102, 103, which test noth"):
        checkout.publish("runs2", 0.1, 4)
    # Where the code changes behind the beginning.
    monkeypatch.setattr(Study, "_require_a_look", lambda mine: None)
    again = checkout.publish("runs2", 0.1, 4)
    assert (again["verdict"], again["verdict_before"]) == ("exploratory", "reproduced")
    assert "or other code, had seen seeds 100, 101" in again["exploratory_because"]


def test_two_processes_do_not_run_one_experiment(checkout, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run.py", f"--output={checkout.root}/runs"])

    def twice(mine):
        with pytest.raises(SystemExit) as ended:
            study.main(str(checkout.run), "", lambda mine: pytest.fail("both run"))
        assert ended.value.code == 2

    study.main(str(checkout.run), "", twice)
    assert f"by process {os.getpid()}" in capsys.readouterr().err


def test_training_ends_with_the_process_that_started_it(tmp_path, monkeypatch):
    """Its standard input is a pipe that stays open."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/bash\nread -t 0.1\necho $? $@\n")
    fake.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(fake))
    status, *words = Study("asked", tmp_path, None)._switchx("a", "train", "--b").split()
    assert int(status) > 128 and words[-1] == "--stop_with_stdin"  # no end of file yet


def test_a_rule_that_was_changed_after_its_runs_is_exploratory(checkout):
    """And so are runs on the seeds that the earlier rule had seen; unseen seeds are a test."""
    checkout.commit()
    first = checkout.publish("runs", 0.1, 4)
    checkout.run.write_text(RUN.replace('"5% of compute"', "0.01"))
    checkout.commit(day=2)
    with pytest.raises(
        ValueError, match="rule of asked was changed .* from 200: .*OUTPUT=OTHER"
    ):
        checkout.study("runs").cells()
    pages.judge_anew(checkout.run.parent)
    anew = pages.read_results(checkout.run.parent)
    assert anew["verdict"] == "exploratory" and anew["verdict_before"] == first["verdict"]
    assert "rule was changed" in pages.page(anew) and "verdict was: reproduced" in pages.page(
        anew
    )
    assert "exploratory (was: reproduced)" in pages.overview()
    with pytest.raises(ValueError, match="an earlier rule of asked, or other code, has seen"):
        checkout.publish("runs2", 0.1, 4)
    checkout.run.write_text(RUN.replace("range(100, 107)", "range(200, 207)"))
    checkout.commit(day=3)
    unseen = checkout.publish("runs3", 0.1, 4, seeds=[200, 201, 202, 203])
    assert unseen["verdict"] == "reproduced"


def test_a_look_has_its_time(checkout):
    checkout.commit()
    with pytest.raises(ValueError, match="look before its time: seeds .*, 104.* ARGS=--look=N"):
        checkout.publish("runs", 0.1, 5)
    (rule,) = runpy.run_path(str(checkout.run))["RULES"]
    comparison = runpy.run_path(str(checkout.run))["RUNS"]
    second = checkout.study("runs", look=2)
    with pytest.raises(ValueError, match="look 2 of asked before its time: look 1 is not"):
        second.at_look(comparison, rule)
    # Ahead, and yet not by Holm's p over twelve claims.
    noisy = checkout.publish("runs", 0.0135, 4)
    assert (noisy["verdict"], pages.all_claims()["asked"][0]["verdict"]) == (
        "reproduced",
        "open",
    )
    assert second.at_look(comparison, rule).seeds == tuple(range(100, 107))
    three = dataclasses.replace(rule, looks=(2, 4, 7))
    with pytest.raises(ValueError, match="look 2 is not published.*--look=2"):
        checkout.study("runs", look=3).at_look(comparison, three)
    assert checkout.study("runs").at_look(comparison, rule).seeds == tuple(range(100, 104))
    with pytest.raises(ValueError, match="look=3; 'experts over dense' has looks 1 to 2"):
        checkout.study("runs", look=3).at_look(comparison, rule)
    assert checkout.publish("runs", 0.1, 4)["verdict"] == "reproduced"
    with pytest.raises(ValueError, match="left no claim open: .* seeds from 200"):
        second.at_look(comparison, rule)
    checkout.publish("runs", 0.1, 7)
    assert second.at_look(comparison, rule).seeds == tuple(range(100, 107))
    with pytest.raises(ValueError, match="look 1 of asked is over: look 2 is published"):
        checkout.study("runs").at_look(comparison, rule)


def test_what_a_rule_takes_is_there_before_it_begins(checkout):
    """Rates at the edge, and dense lengths."""
    edge = {"1": -5.2, "2": -5.1, "4": -5.0}
    checkout.results("rates", {"quality": {"sparse": edge}})
    checkout.commit()
    with pytest.raises(ValueError, match="sparse: rate not found: .* add higher rates"):
        checkout.study("runs").cells()
    checkout.results("rates", {"quality": {}})
    checkout.results("switch_vs_dense", {})
    with pytest.raises(ValueError, match="has no `dense_lengths`.* EXPERIMENT=switch_vs_dense"):
        checkout.study("runs").cells()


def test_a_look_without_a_rule_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--look=2: rates has no rule"):
        Study("rates", tmp_path, None, look=2).cells()


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        ((("H100", "1"), ("H100", "1"), ("H200", "1")), r"H100 \(JAX 1\) and H200"),
        ((("H100", "1"), ("cpu", "1")), r"H100 \(JAX 1\) and cpu \(JAX 1\)"),
        ((("cpu", "1"), ("cpu", "2")), r"cpu \(JAX 1\) and cpu \(JAX 2\)"),
    ],
)
def test_cells_of_two_machines_do_not_compare(checkout, monkeypatch, machines, said):
    checkout.commit()
    cells = checkout.study("runs").cells()
    for number, (name, version) in enumerate(machines):
        cells.require_one_machine()
        monkeypatch.setattr("experiments.measured.device", lambda name=name: name)
        monkeypatch.setattr("importlib.metadata.version", lambda name, v=version: v)
        cells.get({"number": number}, dict)
    with pytest.raises(ValueError, match=f"has cells of {said}.*do not compare"):
        cells.require_one_machine()
    monkeypatch.undo()
    assert isinstance(device(), str)


def results_of(gain: float, seeds: int = 4, sd: float = 0.004, **more) -> dict[str, Any]:
    noise = sd * np.resize([1.0, -1.5, 0.5], seeds)
    ends = {"dense": -4 + noise, "sparse": -4 + gain + noise[::-1]}
    curves = {
        name: [{"5": 0.0, "10": float(end)} for end in each] for name, each in ends.items()
    }
    return {"seeds": list(range(seeds)), "curves": curves} | more


@pytest.mark.parametrize(
    ("changes", "found", "word"),
    [
        ({}, results_of(0.1), "reproduced"),
        ({}, results_of(-0.1), "not reproduced"),
        ({}, results_of(0.001), "equivalent"),
        ({}, results_of(0.02, sd=0.02), "open"),
        ({}, results_of(0.02, sd=0.02, seeds=7), "undecided"),
        ({}, results_of(0.1, sd=0.5), "not testable"),
        ({"direction": "behind", "expected": -0.1}, results_of(-0.1), "reproduced"),
        ({"direction": "equivalent", "expected": 0.0}, results_of(0.1), "not reproduced"),
        ({"gates": ("seen",)}, results_of(0.1, gates={"seen": False}), "not testable"),
        ({"runs": "large"}, {"large": results_of(0.1), "seeds": []}, "reproduced"),
    ],
)
def test_words_follow_the_rule(changes, found, word):
    said = rules.judged((dataclasses.replace(RULE, **changes),), found)
    assert said["verdict"].startswith(word) and said["verdict"] in rules.WORDS
    assert said["because"].endswith(".")


def test_two_names_of_one_model_are_named():
    found = results_of(0.0)
    found["curves"]["sparse"] = found["curves"]["dense"]
    with pytest.raises(ValueError, match="sparse, dense two have the same .*: they are one"):
        rules.judged((RULE,), found)


def test_claims_are_judged_together():
    """Three p of fifteen: 15 x 0.0033 holds, 14 x 0.01 does not."""
    claim = {"verdict": "reproduced", "look": 1, "looks": 2}
    claims = [
        claim | {"p": 0.01}, claim | {"p": 0.0033, "verdict": "not reproduced"},
        claim | {"p": 0.02, "look": 2}, claim | {"p": 0.9, "verdict": "equivalent"},
        claim | {"p": 0.0001, "verdict": "exploratory"},
    ]  # fmt: skip
    found = rules.over_all_claims(claims)
    words = [each["verdict"] for each in found]
    assert words == ["open", "not reproduced", "undecided", "equivalent", "exploratory"]
    assert [each["p_holm"] for each in found[:2]] == pytest.approx([0.14, 0.0495])
    registered = [
        rule
        for path in sorted((pages.ROOT / "experiments").glob("*/run.py"))
        for rule in getattr(
            importlib.import_module(f"experiments.{path.parent.name}.run"), "RULES", ()
        )
    ]
    assert len(registered) <= rules.CLAIMS


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"direction": "behind"}, "self.expected=0.1 is not behind; give another sign"),
        ({"direction": "better"}, "use one of ahead, behind, equivalent"),
        ({"looks": (7, 4)}, "give rising numbers"),
        ({"looks": (4, 8)}, "the last of all seeds"),
        ({"margin": "5%"}, "give nats per token, None or '5% of compute'"),
        ({"direction": "equivalent", "margin": None}, "has a margin; give one"),
    ],
)  # fmt: skip
def test_what_is_no_rule_is_named(changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        dataclasses.replace(RULE, **changes)


def test_git_that_refuses_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(rules, "HERE", tmp_path / "experiments")
    with pytest.raises(ValueError, match="not a git repository.*work in a clone"):
        rules.git("log")


def test_a_cell_says_when_and_where_it_was_measured(tmp_path):
    cells = Cells(tmp_path / "cells.jsonl")
    assert cells.began is None
    cells.get({"a": 1}, dict)
    (line,) = cells.lines
    assert cells.began == line["began"] and line["device"] == device()
    assert datetime.datetime.fromisoformat(line["began"]).tzinfo is not None
