# SPDX-License-Identifier: Apache-2.0
"""experiments/: pages say what results.json says, bad input is named, quick runs end."""

import dataclasses
import importlib
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.stats

from experiments import experiment, figures, ladder, pages, pretrained, rules, study
from experiments.measured import Cells, Interval, Ratio, interval_of
from experiments.pages import BEGIN, END, ROOT, page
from experiments.study import Study
from pallas_kernels.aot import gpu_compiler
from switchx import fields
from switchx.gin_config.building import job_from_gin
from tests.processes import skip_without

FOLDERS = [folder for folder in pages.folders() if folder.name not in pages.NO_CLAIM]
NAMES = [folder.name for folder in FOLDERS]
KEYS = {
    "experiment": str, "date": str, "environment": dict, "data": dict, "wall_seconds": int,
    "verdict": str, "because": str, "effect": dict, "effect_of": str, "seeds": list,
    "tables": list,
}  # fmt: skip


def made_of_results(folder: pathlib.Path) -> str:
    text = (folder / "README.md").read_text(encoding="utf-8")
    return text.split(BEGIN)[1].split(END)[0].strip()


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_pages_are_made_of_results(folder):
    results = pages.read_results(folder)
    expected = pages.NOT_RUN if results is None else page(results)
    assert made_of_results(folder) == expected
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "**Question.**" in text and "arXiv:" in text or folder.name == "rates"
    assert f"make experiments EXPERIMENT={folder.name} DATA=data\n" in text


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_results_have_their_form(folder):
    results = pages.read_results(folder)
    if results is None:
        pytest.skip("not run in full")
    for key, kind in KEYS.items():
        assert isinstance(results[key], kind), key
    assert results["verdict"] in rules.WORDS and results["experiment"] == folder.name
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", results["environment"]["commit"])
    known = json.loads(experiment.HASHES.read_text())
    assert all(known[name] == of for name, of in results["data"].items())
    effect = results["effect"]
    assert effect["low"] <= effect["mean"] <= effect["high"]
    pictures = list(folder.glob("*.svg"))
    assert pictures
    for each in pictures:
        xml.etree.ElementTree.parse(each)
    for curves in results.get("curves", {}).values():
        assert len(curves) == len(results["seeds"])
        last = results.get("steps", 1)  # a value that is of no training stands at 1
        assert all(max(map(int, curve)) == last for curve in curves)


def test_the_overview_is_made_of_results():
    assert made_of_results(ROOT / "experiments") == pages.overview()


def test_all_experiments_take_a_day_at_most():
    """On two cores, as they were run."""
    assert 0 < pages.hours_of_all(is_ladder=True) <= 20
    half = {"wall_seconds": 3600, "environment": {"cores": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "read_results", lambda folder: half)
        assert pages.hours_of_all() == len(pages.folders()) / 2


def numbers_in(found) -> list[float]:
    """Of results.json, those in its sentences, too; of curves also the means over seeds and
    the differences of their ends."""
    if isinstance(found, str):
        return [float(number) for number in DECIMAL.findall(found)]
    if isinstance(found, int | float):
        return [float(found)]
    if isinstance(found, dict):
        inside = [number for value in found.values() for number in numbers_in(value)]
        curves = list(found.get("curves", {}).values())
        inside += [
            statistics.mean(seed[step] for seed in seeds)
            for seeds in curves
            for step in seeds[0]
        ]
        ends = [[seed[max(seed, key=int)] for seed in seeds] for seeds in curves]
        pairs = itertools.combinations(ends, 2)
        return inside + [a - b for pair in pairs for a, b in zip(*pair, strict=True)]
    return [number for value in found or () for number in numbers_in(value)]


DECIMAL = re.compile(r"(?<![\d.:-])-?\d+\.\d+")


# A percentage, a ratio of FLOPs, a section of a paper.
WORKED_OUT = {"1.7", "4.6", "3.3"}


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_what_a_page_says_by_hand_is_in_its_results(folder):
    """Numbers with a decimal point in `Interpretation` and `Found`, rounded as they are there,
    or to the digit those of the paper and of the method, that the page gives before."""
    page = (folder / "README.md").read_text(encoding="utf-8").split(BEGIN)[0]
    said, others, is_said = [], [], False
    for part in page.split("\n\n"):
        if part.startswith(("**", "#")):
            is_said = part.startswith(("**Interpretation", "**Found."))
        (said if is_said and not part.startswith("|") else others).append(part)
    known = [abs(each) for each in numbers_in(pages.read_results(folder))]
    of_others = set(DECIMAL.findall(" ".join(others)))
    for number in set(DECIMAL.findall(" ".join(said))) - of_others - WORKED_OUT:
        digits = len(number.partition(".")[2])
        wanted = abs(float(number))
        assert any(abs(round(each, digits) - wanted) < 1e-9 for each in known), number


def test_a_number_that_no_result_has_is_found():
    assert numbers_in({"a": [0.25, {"b": "ends 1.50 ahead"}], "c": None}) == [0.25, 1.5]
    curves = {
        "x": [{"0": 1.0, "10": 2.0}, {"0": 1.0, "10": 4.0}],
        "y": [{"10": 1.5}, {"10": 1}],
    }
    found = numbers_in({"curves": curves})
    assert {3.0, 0.5} <= set(found) and 2.5 not in found


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_published_verdicts_are_those_of_the_rules(folder):
    """What follows from what results.json has as measured is what stands beside it."""
    results = pages.read_results(folder)
    if results is None:
        pytest.skip("not run in full")
    run = importlib.import_module(f"experiments.{folder.name}.run")
    if rules.digest(vars(run)) == results.get("rule"):
        judged = pages.as_written(run.judge(results))
        assert {"because", "effect", "effect_of"} <= set(judged)
        assert pages.agree(rules.standing(results | judged), results)
    else:
        assert results["verdict"] == rules.EXPLORATORY


def test_what_another_rule_changes_is_dated(tmp_path, monkeypatch):
    """Pages made anew are judged by the rule as it stands."""
    run = importlib.import_module("experiments.expert_offload.run")
    folder = tmp_path / "expert_offload"
    folder.mkdir()
    before = pages.read_results(ROOT / "experiments/expert_offload")
    before.pop("judged", None)
    pages.write_results(folder, before, run.judge)
    # As another CPU rounds it.
    rounded = before | {"effect": {k: v * (1 + 1e-15) for k, v in before["effect"].items()}}
    for measured in (before, rounded):
        (folder / "results.json").write_text(json.dumps(measured))
        pages.judge_anew(folder)
        assert pages.read_results(folder) == measured
    assert rounded["effect"] != before["effect"]
    assert not pages.agree(before | {"seeds": 1}, before | {"seeds": 2})
    changed = {"because": "Another sentence.", "verdict": "reproduced"}
    monkeypatch.setattr(run, "judge", lambda results: changed)
    pages.judge_anew(folder)
    after = pages.read_results(folder)
    words = before["verdict_before"], after["verdict_before"]
    assert words == ("not reproduced", "reproduced")
    assert before["verdict"] == after["verdict"] == "exploratory"
    assert "; judged anew on 20" in pages.provenance(after)


def test_intervals_hold_the_true_mean_as_often_as_they_say():
    """By Student's t of few values, by bootstrap of many; one value has no width."""
    assert interval_of([0.25]) == Interval(0.25, 0.25, 0.25)
    three = interval_of([1.0, 2.0, 4.0])
    want = scipy.stats.ttest_1samp([1.0, 2.0, 4.0], 0).confidence_interval(0.95)
    assert (three.low, three.high) == pytest.approx(tuple(want))
    random = np.random.default_rng(0)
    for size, least in ((3, 0.93), (50, 0.91)):
        found = [interval_of(random.normal(1, 1, size)) for _ in range(400)]
        assert least < np.mean([each.low < 1 < each.high for each in found]) < 0.98


def test_ratios_have_no_sign():
    assert (
        pages.shown(dataclasses.asdict(Interval(1.5, 1.0, 2.0))) == "+1.500 (+1.000 to +2.000)"
    )
    assert pages.shown(dataclasses.asdict(Ratio(1.5, 1.0, 2.0))) == "1.500 (1.000 to 2.000)"


def test_pages_say_what_trained_their_models(tmp_path):
    """Where that was another commit than the one that published."""
    mine, commits = Study("fine_tuning", tmp_path, None), ["a" * 40, "b" * 40]
    cells = Cells(mine.runs / "cells.jsonl")
    for name, commit in zip("xyz", [*commits, commits[0]], strict=True):
        cells.get({"run": name}, dict)
        (mine.runs / name).mkdir()
        (mine.runs / name / "git_commit.txt").write_text(commit + "\n")
    results = {"environment": {"commit": commits[0], "device": "cpu", "cores": 1, "jax": "0"},
               "date": "", "wall_seconds": 0} | mine.trained_by(cells)  # fmt: skip
    assert results["trained_by"] == commits
    assert f"commit {'a' * 12}, models trained by {'b' * 12};" in pages.provenance(results)


def test_a_cell_is_measured_once_and_a_torn_line_again(tmp_path):
    file, measured = tmp_path / "cells.jsonl", []

    def measure():
        measured.append(1)
        return {"value": len(measured), "seconds": 7.0}

    cells = Cells(file)
    assert cells.get({"a": 1}, measure) == cells.get({"a": 1}, measure)
    assert Cells(file).get({"a": 1}, measure)["value"] == 1
    assert Cells(file).get({"a": 2}, measure)["value"] == 2
    assert Cells(file).seconds == 14.0
    with file.open("a") as lines:
        lines.write('{"cell": {"a": 3}, "val')
    assert Cells(file).get({"a": 3}, measure)["value"] == 3
    assert len(file.read_text().splitlines()) == 3


def test_a_run_that_a_signal_stopped_is_no_result(tmp_path, monkeypatch):
    """`switchx train` saves and ends with status 0: the same command is to go on."""
    mine = Study("rates", tmp_path, None)
    folder = mine.runs / "jitter_seed0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"train_steps": 300}')
    (folder / "goodput.json").write_text('{"step": 73, "seconds": {"step": 1.0}}')
    (folder / "validation.jsonl").write_text(
        '{"step": 0, "neg_log_perplexity": -9.0, "target_tokens": 7.0}\n'
    )
    (folder / "metrics.jsonl").write_text('{"step": 50, "skipped_steps": 0}\n')
    monkeypatch.setattr(Study, "_switchx", lambda *arguments: "")
    cells = Cells(mine.runs / "cells.jsonl")
    with pytest.raises(SystemExit, match="stopped at step 73 of 300; the same command goes on"):
        mine.train(cells, "jitter_seed0", [], [])
    assert not cells.lines
    (folder / "goodput.json").write_text('{"step": 300, "seconds": {"step": 1.0}}')
    assert mine.train(cells, "jitter_seed0", [], [])["seconds"] == 1.0


def test_other_code_is_named(tmp_path, monkeypatch):
    """Once something has been done; a commit with changes cannot be checked out."""
    mine = Study("rates", tmp_path, None)
    monkeypatch.setattr(study, "git_commit", lambda: "abc")
    mine.cells()
    monkeypatch.setattr(study, "code_fingerprint", lambda name: "another")
    mine.cells().get({"a": 1}, lambda: 1)
    monkeypatch.setattr(study, "code_fingerprint", lambda name: "a third")
    anew = r"begin anew: `make experiments EXPERIMENT=rates DATA=FOLDER OUTPUT=OTHER`"
    with pytest.raises(ValueError, match=rf"begun by commit abc .*`git checkout abc`.*{anew}"):
        mine.cells()
    # A run that was interrupted before anything was finished is of that code, too.
    (mine.runs / "cells.jsonl").unlink()
    mine.cells()
    (mine.runs / "jitter_seed0").mkdir()
    (mine.runs / "jitter_seed0/config.json").write_text("{}")
    monkeypatch.setattr(study, "code_fingerprint", lambda name: "a fourth")
    with pytest.raises(ValueError, match="begun by commit abc "):
        mine.cells()
    begun = mine.runs / "begun.json"
    begun.write_text(begun.read_text().replace("abc", "abc-dirty"))
    with pytest.raises(ValueError, match=r"begun by commit abc-dirty (?!.*checkout)"):
        mine.cells()


def test_data_that_is_not_there_or_not_the_same_is_named(tmp_path):
    with pytest.raises(ValueError, match="`make experiments EXPERIMENT=rates DATA=FOLD"):
        Study("rates", tmp_path, None).files("openstax/*.txt.gz")
    with pytest.raises(
        ValueError, match=r"has no openstax/anatomy.txt.gz, .*--commands \| sh &&"
    ):
        Study("rates", tmp_path, tmp_path).files("openstax/*.txt.gz")
    (tmp_path / "movie_reviews").mkdir()
    (tmp_path / "movie_reviews/reviews.txt.gz").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"reviews.txt.gz have other .* ARGS=--other_data`"):
        Study("rates", tmp_path, tmp_path).files("movie_reviews/*.gz")
    taken = Study("rates", tmp_path, tmp_path, takes_other_data=True)
    assert list(taken.files("movie_reviews/*.gz")) == ["movie_reviews/reviews.txt.gz"]
    assert not taken.is_published
    # What goes on does so with the same files.
    (tmp_path / "movie_reviews/reviews.txt.gz").write_bytes(b"a third")
    with pytest.raises(ValueError, match=r"begun with other files .*reviews.*OUTPUT=OTHER"):
        taken.files("movie_reviews/*.gz")


def test_bad_input_ends_with_a_line_and_status_2(tmp_path):
    command = [
        sys.executable,
        "-m",
        "experiments.rates.run",
        f"--output={tmp_path}",
    ]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr.startswith("no data folder; give one with ")
    assert process.stderr.count("\n") == 1


def test_a_pretrained_run_that_is_not_there_is_named(tmp_path):
    mine = Study("fine_tuning", tmp_path, None)
    with pytest.raises(ValueError, match="make experiments EXPERIMENT=switch_vs_dense"):
        pretrained.pretrained(mine, "16_experts_R1_seed100")


def test_a_pretrained_run_of_another_configuration_is_named(tmp_path, monkeypatch):
    mine = Study("fine_tuning", tmp_path, None)
    monkeypatch.setattr(Study, "placed", lambda self, texts: placed_texts(texts))
    runs, name = tmp_path / "switch_vs_dense", "16_experts_R1_seed100"
    bindings = ["FILES=<data text>", "LEARNING_RATE=0.01", "SEED=100"]
    cell = {"run": name, "gin_files": [ladder.R1.gin_file], "bindings": bindings}
    Cells(runs / "cells.jsonl").get(cell, lambda: {"curve": {"2880": -4.0}})
    job = job_from_gin([ROOT / ladder.R1.gin_file], placed_texts(bindings))
    (runs / name).mkdir()
    config = runs / name / "config.json"
    config.write_text(json.dumps(fields.describe(job)))
    with pytest.raises(ValueError, match=r"another configuration \(rule: None != .*OTHER`"):
        pretrained.pretrained(mine, name)
    rule = rules.digest(rules.constants_of("switch_vs_dense"))
    (runs / "begun.json").write_text(json.dumps({"rule": rule}))
    assert pretrained.pretrained(mine, name).root == runs / name
    running = []

    def build(files, bindings):
        running.append(1)
        time.sleep(0.05)
        assert running.pop() and not running  # gin has one configuration
        return job

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(pretrained, "job_from_gin", build)
        list(threads.map(pretrained.pretrained, [mine] * 2, [name] * 2))
    edited = dataclasses.replace(job, model=dataclasses.replace(job.model, d_ff=128))
    config.write_text(json.dumps(fields.describe(edited)))
    with pytest.raises(ValueError, match=r"another configuration \(model.d_ff.*OUTPUT=OTHER`"):
        pretrained.pretrained(mine, name)
    config.write_text(json.dumps(fields.describe(job)))
    (runs / "data.json").write_text('{"movie_reviews/reviews.txt.gz": "other"}')
    with pytest.raises(ValueError, match=r"is of other data: .* ARGS=--other_data`"):
        pretrained.pretrained(mine, name)
    assert pretrained.pretrained(dataclasses.replace(mine, takes_other_data=True), name)


def runs_of_experiments() -> dict[str, ladder.Runs]:
    """Of the experiments that train contenders, by folder and name."""
    found = {}
    for folder in NAMES:
        run = importlib.import_module(f"experiments.{folder}.run")
        for name, value in vars(run).items():
            if isinstance(value, ladder.Runs) and value not in found.values():
                found[f"{folder}.{name}"] = value
    return found


@pytest.mark.parametrize(
    ("name", "runs"), runs_of_experiments().items(), ids=runs_of_experiments()
)
def test_all_contenders_are_jobs_of_their_own(name, runs):
    """Their bindings are built, none is without effect, and no two are the same job."""
    jobs, quick = [], Study("rates", pathlib.Path("runs"), None, is_quick=True)
    for each in runs.contenders:
        bindings = ladder.bindings_of(quick, runs.rung, each, seed=0)
        texts = placed_texts((*bindings, *experiment.QUICK[1:]))
        jobs.append(job_from_gin([ROOT / runs.rung.gin_file], texts))
        assert jobs[-1] not in jobs[:-1], each.name


def placed_texts(texts: Sequence[str]) -> list[str]:
    return [re.sub("<(data|run|pretrained)( [^>]*)?>", placed, text) for text in texts]


def placed(match: re.Match) -> str:
    """Names in place of files: nothing is read."""
    return "('text.txt',)" if match[1] == "data" and match[2] else f"/{match[2]}"


@pytest.fixture(scope="module")
def quick_output(tmp_path_factory):
    """Where quick runs are, those of switch_vs_dense first: others begin with them."""
    output = tmp_path_factory.mktemp("experiments")
    run_quick("switch_vs_dense", output)
    return output


def run_quick(name: str, output: pathlib.Path) -> None:
    data = ROOT.parent / "shared/data"
    if not (data / "openstax").is_dir():
        pytest.skip("needs the textbooks of ../shared/data")
    command = [
        *(sys.executable, "-m", f"experiments.{name}.run", "--quick"),
        *(f"--data={data}", f"--output={output}"),
    ]
    # A user's machine has not the eight devices of the tests.
    environment = os.environ | {"XLA_FLAGS": ""}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_quick_runs_end(name, quick_output):
    if name == "magic_numbers":
        skip_without(gpu_compiler)
    run_quick(name, quick_output)
    runs = quick_output / f"{name}_quick"
    results = json.loads((runs / "results.json").read_text())
    if name == "elephants":
        assert results["throughput"]["rows"] and results["cost"]["rows"]
    assert results["verdict"] == "exploratory" and "quick run" in results["because"]
    done = (runs / "cells.jsonl").read_text()
    run_quick(name, quick_output)  # there is nothing left to do
    assert (runs / "cells.jsonl").read_text() == done


@pytest.mark.parametrize("no_effect", [0.0, 1.0])
def test_dots_are_filled_where_an_interval_leaves_out_no_effect(no_effect):
    differences = {
        "ahead": {"mean": 0.5, "low": 0.1, "high": 0.9},
        "undecided": {"mean": 0.1, "low": -0.2, "high": 0.4},
    }
    intervals = {
        name: {end: value + no_effect for end, value in each.items()}
        for name, each in differences.items()
    }
    (axis,) = figures.intervals_figure(intervals, "x", no_effect).axes
    bar_1, dot_1, bar_2, dot_2, line = axis.lines
    assert list(bar_1.get_xdata()) == [no_effect + 0.1, no_effect + 0.9]
    assert dot_1.get_markerfacecolor() != "white" and dot_2.get_markerfacecolor() == "white"
    assert list(line.get_xdata()) == [no_effect, no_effect]
