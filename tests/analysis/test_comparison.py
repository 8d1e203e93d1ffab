# SPDX-License-Identifier: Apache-2.0
"""Runs compared, of folders written by hand: numbers against loops and scipy, the command."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import scipy.stats

from switchx.analysis.comparison import Interval, compare, difference, read_run_log
from switchx.cli.main import main
from tests.analysis.parsed_page import Parser
from tests.analysis.recorded import routing_line, write_lines
from tests.commands import commands, python_blocks
from tests.data.refusals import refused
from tests.processes import ROOT

LOADS = [[0.5, 0.5], [1.0, 0.0]]
FINALS = {"0.1": [3.0, 3.5, 3.3], "0.2": [2.8, 3.1, 3.2]}
CONFIG = """\
LEARNING_RATE = {rate}
SEED = {seed}
rules.Rules.params = \\
    (('N', ('pipe',)),
     ('D', ({axis!r},)))

job.TrainingJob.seed = %SEED
"""


def write_run(folder, rate="0.1", seed=0, final=3.0, axis="fsdp", is_sparse=True, tokens=50):
    """Two logged steps and two evaluations; the second line's process began at step 2."""
    folder.mkdir(parents=True)
    lines = []
    for step, speed, seconds in ((2, 1.0, 5.0), (6, 2.0, 9.0)):
        line = routing_line(step, LOADS) if is_sparse else {"step": step}
        line |= {"steps_per_s": speed, "tokens_per_s": 10.0, "model_flops_per_s": 100.0}
        line |= {"goodput": {"seconds": {"step": seconds, "start": 1.0}}}
        lines.append(line | {"neg_log_perplexity": -4.0})
    write_lines(folder / "metrics.jsonl", lines)
    ends = [
        {"step": step, "neg_log_perplexity": loss, "accuracy": 0.5, "target_tokens": tokens}
        for step, loss in ((0, -7.0), (6, None if final is None else -final))
    ]
    write_lines(folder / "validation.jsonl", ends)
    text = CONFIG.format(rate=rate, seed=seed, axis=axis)
    (folder / "operative_config.gin").write_text(text)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [
        write_run(root / f"{rate}_{seed}", rate, seed, final)
        for rate, finals in FINALS.items()
        for seed, final in enumerate(finals)
    ]


def test_costs_add_up_over_the_logged_intervals(folders):
    run = read_run_log(folders[0])
    # Two steps at one a second, four at two a second: two seconds each.
    np.testing.assert_allclose(run.costs["tokens"], [20, 40])
    np.testing.assert_allclose(run.costs["model FLOPs"], [200, 400])
    np.testing.assert_allclose(run.costs["wall-clock hours"], [6 / 3600, 10 / 3600])
    assert run.losses == {"training": {2: 4.0, 6: 4.0}, "validation": {0: 7.0, 6: 3.0}}
    assert run.settings["rules.Rules.params"] == "(('N', ('pipe',)), ('D', ('fsdp',)))"


def test_seeds_are_one_configuration_with_the_interval_of_scipy(folders):
    first, second = compare(folders).configurations
    assert [each.name for each in (first, second)] == ["LEARNING_RATE=0.1", "LEARNING_RATE=0.2"]
    for each, values in zip((first, second), FINALS.values(), strict=True):
        expected = scipy.stats.t.interval(0.95, 2, np.mean(values), scipy.stats.sem(values))
        assert (each.final.low, each.final.high) == pytest.approx(expected)
        x, line, low, high = each.loss_band("validation", "tokens")
        np.testing.assert_allclose(x, [0, 40])
        np.testing.assert_allclose(line, [7, np.mean(values)])
        np.testing.assert_allclose((low[1], high[1]), expected)
    of_pairs = scipy.stats.ttest_rel(*FINALS.values()).confidence_interval()
    found = difference(first, second)
    assert (found.low, found.high) == pytest.approx(tuple(of_pairs))
    # The mean of batches, which training logged; of runs that did not, that of the loads: 0, 1.
    np.testing.assert_allclose(first.routing_band("MaxVio")[1], [0.02, 0.06])
    old = dataclasses.replace(first.runs[0].history, others={})
    old = dataclasses.replace(first, runs=[dataclasses.replace(first.runs[0], history=old)])
    np.testing.assert_allclose(old.routing_band("MaxVio")[1], [0.5, 0.5])


def test_costs_that_no_run_has_logged_are_left_out(tmp_path):
    folder = write_run(tmp_path / "a")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    lines = [{k: v for k, v in line.items() if k != "model_flops_per_s"} for line in lines]
    write_lines(folder / "metrics.jsonl", lines)
    compared = compare([folder])
    (table,), (figure,) = compared.overview().tables, compared.losses().figures
    assert "tokens" in table.columns and "model FLOPs" not in table.columns
    assert len(figure.axes) == 2 * 3 and "nan" not in compared.overview()._repr_html_()


def test_the_headline_says_whether_seeds_tell_apart(folders, tmp_path):
    said = compare(folders).headline
    assert said.startswith("LEARNING_RATE=0.2 ends lowest: validation loss 3.0333 (")
    assert "0.2333 (-0.1461 to 0.6128) below LEARNING_RATE=0.1" in said
    assert said.endswith("; seeds do not tell them apart.")
    far = [write_run(tmp_path / f"far_{s}", "9", s, 5.0 + 0.01 * s) for s in range(3)]
    assert compare([*folders[3:], *far]).headline.endswith("; seeds tell them apart.")
    assert "; one common seed cannot say" in compare([folders[2], folders[5]]).headline
    assert "; without a common seed nothing tells" in compare(folders[2:4]).headline
    # The means and the one common seed disagree.
    ends = {("5", 0): 5.0, ("5", 1): 3.0, ("6", 0): 4.8, ("6", 2): 3.6}
    apart = [write_run(tmp_path / f"{r}_{s}", r, s, end) for (r, s), end in ends.items()]
    said = "; in the seeds that both have LEARNING_RATE=6 ends 0.2000 lower."
    assert compare(apart).headline.endswith(f"loss 4.0000 (-8.7062 to 16.7062) at step 6{said}")
    diverged = write_run(tmp_path / "diverged", "7", final=None, tokens=51)
    compared = compare([diverged, folders[0]])
    said = "3.0000 at step 6; of no other all seeds end with a finite loss. Validation sets"
    assert compared.headline.startswith(f"LEARNING_RATE=0.1: validation loss {said} differ")
    assert compared.overview().tables[0].rows[0][2] == "not finite"


def test_no_winner_is_named_across_validation_sets(folders, tmp_path):
    """Other files, another vocabulary, or another number of target tokens."""
    others = {name: write_run(tmp_path / name, "7", final=1.0) for name in ("files", "words")}
    (others["files"] / "corpora.json").write_text('[{"num_bytes": 1}]')
    (others["words"] / "vocabulary.json").write_text('{"fingerprint": "1"}')
    others["tokens"] = write_run(tmp_path / "tokens", "7", final=1.0, tokens=51)
    for name, said in (
        ("files", "corpora"),
        ("words", "vocabulary"),
        ("tokens", "target tokens"),
    ):
        found = compare([folders[0], others[name]]).headline
        sets = f"Validation sets differ ({said}), so losses do not compare."
        assert found == f"No configuration is named lowest. {sets}"


def test_a_seed_that_diverged_is_not_hidden_by_what_came_before(folders, tmp_path):
    """Its log ends in steps that were all skipped, which have neither loss nor routing."""
    lost = write_run(tmp_path / "lost", seed=9)
    lines = [{"step": step, "neg_log_perplexity": None} for step in (2, 6)]
    write_lines(lost / "metrics.jsonl", lines)
    write_lines(lost / "validation.jsonl", [{"step": 0, "neg_log_perplexity": -7.0}])
    alone, compared = compare(folders[:1]), compare([lost, folders[0]])
    assert ": validation loss not finite at step 6." in compared.headline
    (one,), (both,) = alone.configurations, compared.configurations
    assert both.last_step == 6 and math.isnan(both.finals["9"])
    for name in ("loss_band", "routing_band"):
        asked = ("validation", "tokens") if name == "loss_band" else ("MaxVio",)
        bands = (getattr(each, name)(*asked) for each in (one, both))
        np.testing.assert_array_equal(*bands)
    assert compared.routing().figures


def test_what_differs_is_a_table_and_dense_models_are_compared(folders, tmp_path):
    dense = write_run(tmp_path / "dense", "0.1", 0, 4.0, axis="data", is_sparse=False)
    compared = compare([folders[0], dense])
    (table,) = compared.settings().tables
    ((name, *values),) = table.rows
    assert name == "rules.Rules.params" and "'data'" in values[1]
    assert len({each.name for each in compared.configurations}) == 2
    assert compare([dense]).routing().text == "All models are dense."
    # The same configuration and seed again, as by other code.
    again = write_run(tmp_path / "again", final=2.0)
    assert compare([folders[0], again]).settings().text == "Nothing, but for seeds."
    assert compare([folders[0], again]).headline.startswith(f"{again} ends lowest")


def test_the_page_runs(folders, capsys, in_a_folder):
    for name, folder in zip("abc", folders, strict=False):
        shutil.copytree(folder, in_a_folder / "runs" / name)
    page = (ROOT / "docs/sweeps.md").read_text(encoding="utf-8")
    command, *_ = commands(page)
    assert main(command.split()[1:]) == 0
    headline = capsys.readouterr().out.splitlines()[0]
    parsed = Parser((in_a_folder / "comparison.html").read_text())
    assert len(parsed.references) == 2  # pictures, inside of the page
    assert any(each.startswith(headline) for each in parsed.texts)
    assert {"At the end", "Loss", "What differs", "Routing"} <= {*parsed.texts}
    (snippet,) = python_blocks(page)
    exec(snippet, {})
    assert "a: validation loss 3.2500 (" in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused(folders, capsys, tmp_path):
    with refused("a run folder is given twice"):
        compare([folders[0], folders[0]])
    (empty := write_run(tmp_path / "empty") / "validation.jsonl").write_text("")
    with refused("validation.jsonl has no line yet; leave that run out"):
        compare([folders[0], empty.parent])
    for words in ([], ["a", "--model_dir=b"]):
        assert main(["report", *words]) == 2
        assert "give --model_dir=DIR for one run, or the folders" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((0.5, -1.25, 2.0), "+0.500 (-1.250 to +2.000)"),
        ((0.0095, 0.008, 0.011), "+0.009 (+0.008 to +0.011)"),
        ((0.0047, 0.0038, 0.0052), "+0.0047 (+0.0038 to +0.0052)"),
        ((0.000053, -0.000071, 0.000177), "+0.00005 (-0.00007 to +0.00018)"),
        ((0.0, 0.0, 0.0), "+0.000 (+0.000 to +0.000)"),
        ((np.nan, np.nan, np.nan), "+nan (+nan to +nan)"),
        ((0.0, -np.inf, np.inf), "+0.000 (-inf to +inf)"),
    ],
)
def test_a_small_interval_has_digits_enough(values, text):
    assert str(Interval(*values)) == text
