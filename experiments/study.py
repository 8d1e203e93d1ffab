# SPDX-License-Identifier: Apache-2.0
"""What all experiments share: runs that go on, results and their page.

`make experiments EXPERIMENT=NAME DATA=FOLDER` runs `experiments/NAME/run.py`. What it trains
and measures lies cell by cell below `--output`; the same command goes on after a kill. At the
end it writes `experiments/NAME/results.json`: what was measured, and what `judge` of run.py
makes of that. `figure.svg` and the page between two marks of README.md are made of it alone.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from experiments import rules
from experiments.experiment import Experiment
from experiments.fingerprints import code_fingerprint, sha256
from experiments.measured import Cells, Interval, key_of
from experiments.pages import ROOT, all_claims, publish_page, read_results, write_results
from experiments.pretrained import SOURCE, pretrained
from switchx.checkpoint.run_folder import RunFolder
from switchx.files import write_atomically
from switchx.results import environment
from switchx.whole_folders import git_commit

Runs = TypeVar("Runs")


@dataclasses.dataclass(frozen=True)
class Study(Experiment):
    """One experiment as it is run.

    Attributes:
        look: number of the look that its seeds are trained for, where it has rules.
    """

    look: int = 1

    @property
    def begun(self) -> pathlib.Path:
        return self.runs / "begun.json"

    def cells(self) -> Cells:
        """What has been done; before the first cell, what it is begun with is noted.

        Raises:
            ValueError: it was done by other code or by another rule, what it was begun with
                is lost, or it may not begin (`rules.begin`, `at_look`).
        """
        file, code = self.begun, code_fingerprint(self.name)
        now = {"commit": git_commit(), "code": code}
        if not self.is_quick:
            now |= rules.begin(self.name)
        if self.look > 1 and not (self.is_quick or "rule" in now):
            raise ValueError(f"--look={self.look}: {self.name} has no rule; leave that out")
        found = Cells(self.runs / "cells.jsonl")
        # Runs of a sweep lie a folder deeper.
        if not (found.lines or any(self.runs.rglob(RunFolder(self.runs).config.name))):
            write_atomically(file, f"{json.dumps(now)}\n".encode())
        elif not file.exists():
            raise ValueError(
                f"{self.runs} has runs and no {file.name}, which says what they were begun "
                f"with; begin anew: {self.again(output='OTHER')}"
            )
        begun = json.loads(file.read_text())
        if begun.get("rule") != now.get("rule"):
            raise ValueError(
                f"the rule of {self.name} was changed after {self.runs} was begun, whose runs "
                f"can only be exploratory: take back the change, or begin anew with seeds from "
                f"{rules.next_seed()}: {self.again(output='OTHER')}"
            )
        if begun["code"] != code:
            commit, _, is_dirty = begun["commit"].partition("-")
            go_on = "" if is_dirty else f"go on with `git checkout {commit}`, or "
            raise ValueError(
                f"{self.runs} was begun by commit {begun['commit']} and this is "
                f"{now['commit']}, whose code is another one; {go_on}begin anew: "
                f"{self.again(output='OTHER')}"
            )
        changed = [key for key in now.keys() - {"commit"} if begun.get(key) != now[key]]
        if changed:
            raise ValueError(
                f"{file} has another {' and '.join(sorted(changed))} than this checkout, whose "
                f"rule can only judge what was begun with it; begin anew: "
                f"{self.again(output='OTHER')}"
            )
        self._require_a_look()
        return found

    def at_look(self, runs: Runs, rule: rules.Rule) -> Runs:
        """The runs with the seeds of this look.

        Args:
            runs: a dataclass with `seeds`, as `ladder.Runs`.

        Raises:
            ValueError: the rule has no such look, or that before it is not published, or
                decided all claims, or a later one is published.
        """
        self._require_look(rule)
        return dataclasses.replace(runs, seeds=rule.seeds_at(self.look))

    def _require_a_look(self) -> None:
        """Before anything is measured: raises as `at_look` where no rule has this look now."""
        faults = []
        for rule in rules.constants_of(self.name).get("RULES", ()):
            try:
                return self._require_look(rule)
            except ValueError as fault:
                faults.append(fault)
        if faults:
            raise faults[0]

    def _require_look(self, rule: rules.Rule) -> None:
        """Raises as `at_look`, and where other code has seen the seeds of a published run."""
        if self.is_quick:
            return
        seeds = rule.seeds_at(self.look)
        if self.is_published and (
            again := rules.seen_again(self.name, code_fingerprint(self.name), seeds)
        ):
            shown = ", ".join(map(str, again))
            raise ValueError(
                f"an earlier rule of {self.name}, or other code, has seen seeds {shown}, which "
                "test nothing any more; go on at the commit of its page (`git worktree add`), "
                f"or register a rule for seeds from {rules.next_seed()}"
            )
        found, previous = read_results(self.folder) or {}, self.look - 1
        is_its_rule = found.get("rule") == rules.digest(rules.constants_of(self.name))
        claims = all_claims().get(self.name, []) if is_its_rule else []
        published = next((e["look"] for e in claims if e["claim"] == rule.claim), 0)
        if previous > published:
            raise ValueError(
                f"look {self.look} of {self.name} before its time: look {previous} is not "
                f"published; end it first with ARGS=--look={previous}"
            )
        if self.look < published:
            raise ValueError(
                f"look {self.look} of {self.name} is over: look {published} is published, and "
                f"its verdict stands; leave it, or go on with ARGS=--look={published}"
            )
        if 0 < previous == published and all(e["verdict"] != rules.OPEN for e in claims):
            raise ValueError(
                f"look {previous} of {self.name} left no claim open: more seeds are no test; "
                "leave it, or register another rule for seeds from "
                f"{rules.next_seed()}"
            )

    def train(
        self, cells: Cells, name: str, gin_files: Sequence[str], bindings: Sequence[str]
    ) -> dict:
        """Trains a run to its end, by the command that a user would type.

        Args:
            gin_files: paths from the checkout's top; the later one wins.
            bindings: of gin; places in them are as `placed` knows them.

        Returns:
            `curve` (validation negative log perplexity by step), `tasks` (the same by
            task, of a mixture), `scored_tokens` of the last validation, `skipped_steps`,
            `dropped` (the fraction of tokens at the last logged step), `peaks` (the best of
            each metric of generated texts, by task) and `seconds` of wall time, restarts
            included.

        Raises:
            SystemExit: interrupted or failed; the same command goes on.
        """
        run = RunFolder(self.runs / name)
        bindings = (*bindings, *self.quick_bindings)
        arguments = [
            *(f"--gin_file={file}" for file in gin_files),
            *(f"--gin.{binding}" for binding in self.placed(bindings)),
            f"--model_dir={run.root}",
        ]
        cell = {"run": name, "gin_files": list(gin_files), "bindings": list(bindings)}
        return cells.get(cell, lambda: self._trained(run, arguments))

    def placed(self, texts: Sequence[str]) -> list[str]:
        """As of `Experiment`; `<pretrained NAME>` is a run of experiments/switch_vs_dense."""

        def place(match: re.Match) -> str:
            return str(pretrained(self, match[1]).root)

        return super().placed([re.sub("<pretrained ([^>]*)>", place, text) for text in texts])

    def _trained(self, run: RunFolder, arguments: Sequence[str]) -> dict:
        self._switchx(run.root.name, "train", *arguments)
        goodput = json.loads(run.goodput.read_text())
        done = goodput["step"]
        asked = json.loads(run.config.read_text())["train_steps"]
        if done < asked:  # SIGTERM: the state is saved, and the status is 0
            raise SystemExit(
                f"{run.root} was stopped at step {done} of {asked}; the same command goes on"
            )
        lines = [json.loads(line) for line in run.validation.read_text().splitlines()]
        logged = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        peaks = run.root / "peaks.json"
        return {
            "curve": {str(line["step"]): line["neg_log_perplexity"] for line in lines},
            "tasks": _by_task(lines),
            "scored_tokens": round(lines[-1]["target_tokens"]),
            "skipped_steps": sum(line["skipped_steps"] for line in logged),
            "dropped": logged[-1].get("dropped_fraction", 0.0),
            "peaks": json.loads(peaks.read_text()) if peaks.exists() else {},
            "seconds": sum(goodput["seconds"].values()),
        }

    def command(self, cells: Cells, name: str, *arguments: str) -> dict:
        """What a command of switchx prints with --json.

        Raises:
            SystemExit: it failed.
        """
        cell = {"command": name, "arguments": list(arguments)}
        placed = (*self.placed(arguments), "--json")
        return cells.get(cell, lambda: json.loads(self._switchx(name, *placed)))

    def _switchx(self, name: str, *arguments: str) -> str:
        """Runs a command with a log of its own; the last line of what it printed. Training
        saves and ends where this process is killed."""
        ends = ["--stop_with_stdin"] * (arguments[0] == "train")
        command = [sys.executable, "-m", "switchx", *arguments, *ends]
        print(f"[{self.name}] {shlex.join(command[1:])}", flush=True)
        log = self.runs / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with (
            log.open("ab") as lines,
            subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=lines, stderr=lines
            ) as process,
        ):
            status = process.wait()
        tail = log.read_text(errors="replace").splitlines()
        if status:
            text = "\n".join(tail[-5:])
            go_on = "the same command goes on"
            if status == 2:  # refused: as it is, it would be again
                go_on = f"mend what it says, or begin anew: {self.again(output='OTHER')}"
            raise SystemExit(f"{text}\n{log}: status {status}; {go_on}")
        return tail[-1]

    def publish(
        self,
        cells: Cells,
        files: dict[str, pathlib.Path],
        judge: Callable[[dict[str, Any]], dict[str, Any]],
        **measured,
    ) -> dict[str, Any]:
        """Writes results.json and the page; beside the runs alone where not `is_published`.

        Args:
            judge: results, as results.json has them -> what follows from what was measured:
                `verdict`, one of rules.WORDS, where there are rules, `because`, a sentence,
                `effect`, an Interval with
                `effect_of`, and `tables`, each a `title` and `rows`. `intervals`, if there are,
                become the figure, or else the measured `curves`. Not called by a quick run,
                which has not measured enough.
            measured: what the experiment measured; `seeds` is required.
        """
        cells.require_one_machine()
        begun = json.loads(self.begun.read_text())
        noted = ("code", "rule", "registered", "registered_at", "dense_lengths")
        results = {
            "experiment": self.name,
            "first_cell": cells.began,
            **{key: begun[key] for key in noted if key in begun},
            "date": datetime.date.today().isoformat(),
            "environment": environment(),
            "data": {name: sha256(path) for name, path in files.items()},
            "wall_seconds": round(cells.seconds),
            **self.began_with(cells),
            **self.trained_by(cells),
            **measured,
        }
        target = self.folder if self.is_published else self.runs
        results = write_results(target, results, _nothing if self.is_quick else judge)
        if self.is_published:
            rules.note_seeds(results)
            publish_page(self.folder)
        print(f"{self.name}: {results['verdict']}; {results['because']} ({target})")
        return results

    def began_with(self, cells: Cells) -> dict[str, list[str]]:
        """The commits of the runs of switch_vs_dense that any of the runs began with."""
        keys = " ".join(key_of(line["cell"]) for line in cells.lines)
        runs = dataclasses.replace(self, name=SOURCE).runs
        names = set(re.findall("<pretrained ([^>]*)>", keys))
        return _commits("pretraining", [runs / name for name in names])

    def trained_by(self, cells: Cells) -> dict[str, list[str]]:
        """The commits that trained the runs, where their folders are still there."""
        names = [line["cell"]["run"] for line in cells.lines if "run" in line["cell"]]
        return _commits("trained_by", [self.runs / name for name in names])


def _nothing(results: dict[str, Any]) -> dict[str, Any]:
    """What a quick run is judged to show."""
    return {
        "verdict": rules.EXPLORATORY, "because": "a quick run shows only that it runs",
        "effect": Interval(0.0, 0.0, 0.0), "effect_of": "nothing",
    }  # fmt: skip


def main(file: str, description: str, run: Callable[[Study], Any]) -> None:
    """Runs a folder's run.py by its arguments; bad input ends it with a line and status 2."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    path = pathlib.Path
    parser.add_argument("--data", type=path, help="folder of the data (experiments/README.md)")
    parser.add_argument("--output", type=path, default=path("runs/experiments"))
    parser.add_argument("--quick", action="store_true", help="a smoke; publishes nothing")
    parser.add_argument("--other_data", action="store_true", help="take files of other hashes")
    parser.add_argument("--look", type=int, default=1, help="of a rule; its seeds are trained")
    given = parser.parse_args()
    name = path(file).resolve().parent.name
    try:
        study = Study(name, given.output, given.data, given.quick, given.other_data, given.look)
        with RunFolder(study.runs).create().locked():  # two processes would measure all twice
            run(study)
    except ValueError as error:
        parser.exit(2, f"{error}\n")


def _commits(key: str, folders: Sequence[pathlib.Path]) -> dict[str, list[str]]:
    """Under a key of results.json, what trained these runs; nothing where none is there."""
    files = [RunFolder(folder).git_commit for folder in folders]
    commits = {file.read_text().strip() for file in files if file.exists()}
    return {key: sorted(commits)} if commits else {}


def _by_task(lines: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Curves of a mixture's tasks, of the lines of validation.jsonl."""
    curves: dict[str, dict[str, float]] = {}
    for line in lines:
        for task, metrics in line.get("tasks", {}).items():
            curves.setdefault(task, {})[str(line["step"])] = metrics["neg_log_perplexity"]
    return curves
