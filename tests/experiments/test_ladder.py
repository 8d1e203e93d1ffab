# SPDX-License-Identifier: Apache-2.0
"""experiments/ladder.py: each contender at its own rate, without a capacity in evaluation."""

import dataclasses
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from experiments import ladder, measured, pages, rules, side_by_side, sweeps
from experiments.fine_tuning import run as fine_tuning
from experiments.initialization import run as initialization
from experiments.ladder import R0, R1, OnLadder, Runs
from experiments.measured import Cells
from experiments.multilingual import run as multilingual
from experiments.pages import ROOT
from experiments.quantization import run as quantization
from experiments.rates.run import WIDTH
from experiments.routing import run as routing
from experiments.selective_precision import run as selective_precision
from experiments.switch_vs_dense import run as switch_vs_dense
from experiments.todays_block import run as todays_block
from switchx.gin_config.building import job_from_gin
from switchx.models.flops import train_flops
from switchx.shipped import TEXTS

OPTIMA = {"dense": 0.016, "2 experts": 0.012, "4 experts": 0.008, "16 experts": 0.004,
          "32 experts": 0.002, "dense, R1": 0.012, "16 experts, R1": 0.003}  # fmt: skip


@pytest.fixture
def swept(monkeypatch):
    """Results of experiments/rates: a parabola about each optimum."""
    quality = {
        name: {f"{rate * 2.0**i:g}": -2 - 0.1 * (math.log(2) * i) ** 2 for i in range(-2, 3)}
        for name, rate in OPTIMA.items()
    }
    quality["4 experts"] = {"1": -3.0, "2": -2.0, "4": -1.0}
    monkeypatch.setattr(ladder, "read_results", lambda folder: {"quality": quality})


def test_rungs_are_those_of_their_gin_files():
    jobs = [job_from_gin([ROOT / rung.gin_file], ["FILES='text'"]) for rung in (R0, R1)]
    assert [job.train_steps for job in jobs] == [R0.steps, R1.steps]
    assert jobs[1].model.d_model / jobs[0].model.d_model == WIDTH


def test_each_contender_has_its_own_rate(swept):
    def rate(rung, rate_of, length=1.0):
        return ladder.rate(rung, OnLadder("one", (), rate_of, length))

    assert rate(R0, "dense") == pytest.approx(0.016, rel=0.1)
    assert rate(R1, 16) == pytest.approx(0.003, rel=0.1)
    assert rate(R0, 16, length=4.0) == pytest.approx(rate(R0, 16) / 2)
    for rung, model in ((R0, 4), (R0, 8), (R1, "4 experts")):
        with pytest.raises(ValueError, match="rate not found: experiments/rates"):
            rate(rung, model)


def test_numbers_of_experts_between_are_interpolated(swept, monkeypatch):
    monkeypatch.setattr(ladder, "SWEPT", {1: "dense", 16: "16 experts"})
    rates = [ladder.rate(R0, OnLadder("one", (), n)) for n in (1, 4, 16)]
    assert rates[1] == pytest.approx(math.sqrt(rates[0] * rates[2]))


def test_without_results_of_rates_nothing_is_trained(monkeypatch):
    monkeypatch.setattr(ladder, "read_results", lambda folder: None)
    with pytest.raises(ValueError, match="EXPERIMENT=rates"):
        ladder.rate(R0, OnLadder("16 experts"))


class Trains:
    """A study whose training and evaluation are numbers."""

    is_quick = False

    def __init__(self, runs):
        self.runs, self.asked = runs, []

    def placed(self, texts):
        return [text.replace("<data", "'<data") + "'" * ("<data" in text) for text in texts]

    def train(self, cells, name, gin_files, bindings):
        self.asked.append((name, dict(each.split("=", 1) for each in bindings)))
        return {
            "curve": {"0": -7.0, "9": -2.0},
            "scored_tokens": 1000,
            "dropped": 0.25,
            "skipped_steps": 1,
        }

    def command(self, cells, label, *arguments):
        self.asked.append((label, dict(each.split("=", 1) for each in arguments[1:])))
        return {"neg_log_perplexity": -1.5}


def test_what_has_a_capacity_is_evaluated_without(swept, tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "_bytes_of_validation", lambda *_: 3000)
    study = Trains(tmp_path)
    contenders = (
        OnLadder("16 experts"),
        OnLadder("drops", ("SwitchConfig.capacity_factor=1.0",), length=0.5, has_capacity=True),
    )
    runs = Runs(contenders, seeds=(100, 101))
    found = ladder.train_all(study, Cells(tmp_path / "cells.jsonl"), runs)
    assert found["curves"] == {"16 experts": [{1280: -2.0}] * 2, "drops": [{1280: -1.5}] * 2}
    assert found["models"]["drops"]["dropped"] == 0.25
    assert found["models"]["drops"]["flops"] == 1.0
    asked = dict(study.asked)
    names = ("16_experts_seed{}", "drops_seed{}", "drops_seed{}_evaluated")
    assert set(asked) == {name.format(seed) for seed in (100, 101) for name in names}
    trained = asked["drops_seed101"]
    assert trained["TRAIN_STEPS"] == "640" and trained["SEED"] == "101"
    assert trained["RouterConfig.overflow"] == "'drop'"
    evaluated = asked["drops_seed101_evaluated"]
    assert evaluated["--gin.RouterConfig.overflow"] == "'dropless'"
    assert evaluated["--gin.TrainingJob.eval_batches"] == "None"
    rates = [
        float(asked[name]["LEARNING_RATE"]) for name in ("16_experts_seed100", "drops_seed100")
    ]
    assert rates[1] / rates[0] == pytest.approx(math.sqrt(2), rel=1e-4)


def test_flops_are_those_of_a_seed_that_is_run(swept, tmp_path, monkeypatch):
    """A contender may begin with a finished run, of its own seed."""
    monkeypatch.setattr(ladder, "_bytes_of_validation", lambda *_: 3000)

    def missing(bindings):
        raise ValueError(f"{bindings} is not there")

    study = Trains(tmp_path)
    monkeypatch.setattr(study, "placed", missing)
    taught = OnLadder("16 experts", ("TEACHER='<pretrained 32 experts>'",))
    with pytest.raises(ValueError, match="TEACHER='<pretrained 32_experts_seed100>'"):
        ladder.train_all(study, Cells(tmp_path / "cells.jsonl"), Runs((taught,), seeds=(100,)))


@pytest.mark.slow
def test_a_run_beside_others_is_the_run_alone(tmp_path):
    """To the bit, so that cells may run beside anything."""

    def train(name: str) -> list[float]:
        bindings = {
            "FILES": repr(str(TEXTS)), "TRAIN_STEPS": 6, "WARMUP_STEPS": 1, "EVAL_EVERY": 3,
            "CHECKPOINT_EVERY": 6,
        }  # fmt: skip
        command = [sys.executable, "-m", "switchx", "train", f"--gin_file={R0.gin_file}"]
        command += [f"--gin.{key}={value}" for key, value in bindings.items()]
        command += [f"--model_dir={tmp_path / name}"]
        environment = os.environ | {"XLA_FLAGS": ""}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=280)
        lines = (tmp_path / name / "validation.jsonl").read_text().splitlines()
        return [json.loads(line)["neg_log_perplexity"] for line in lines]

    (alone,) = side_by_side.on_each_core(train, ["alone"])
    beside = side_by_side.on_each_core(train, ["first", "second"])
    assert len({*alone}) == 3 and beside == [alone, alone]


def made(runs: Runs, seeds: tuple[int, ...], qualities: dict[str, float]) -> dict:
    """What `ladder.train_all` returns, with a little noise of seeds."""
    noise = (0.004, -0.003, 0.002, -0.005, 0.001, 0.003, -0.002)
    names = [each.name for each in runs.contenders]
    return {
        "curves": {
            name: [
                {"9": qualities.get(name, -2.0) + noise[(i + j) % 7]} for j in range(len(seeds))
            ]
            for i, name in enumerate(names)
        },
        "seeds": list(seeds),
        "steps": 9,
        "models": {
            each.name: dict.fromkeys(("flops", "rate"), 1.0)
            | {"training_flops": 1e12 * each.length, "length": each.length}
            | {"dropped": 0.0, "skipped_steps": 0}
            for each in runs.contenders
        },
        "validation": {"tokens": 1000, "bytes": 2000},
    }


LENGTHS = {"0.5": [-2.1, -2.09], "1.0": [-2.0, -2.01], "2.0": [-1.9, -1.91]}


def ladder_results() -> dict:
    """Of switch_vs_dense after its first look."""
    run, seeds = switch_vs_dense, switch_vs_dense.SEEDS
    gains = {f"{n} experts": -2.0 + 0.02 * i for i, n in enumerate(run.EXPERTS)}
    results = made(run.FIRST, seeds[:4], gains) | {
        "second": made(run.SECOND, seeds[:4], {"16 experts": -1.9}),
        "lengths": made(run.LENGTHS, seeds[:3], {}),
        "dense_lengths": LENGTHS,
        "step_time": [[1.1, 1.2, 1.1], [1.1, 1.1, 1.2]],
    }
    for name, [loss] in {"dense, 0.5 lengths": [-2.2], "dense, 2.0 lengths": [-1.8]}.items():
        results["lengths"]["curves"][name] = [{"9": loss + 0.001 * i} for i in range(3)]
    for model in results["second"]["models"].values():
        model["training_flops"] = 4e12
    return results


def test_switch_vs_dense_is_judged_by_both_its_rules():
    run, seeds, results = switch_vs_dense, switch_vs_dense.SEEDS, ladder_results()
    judged = run.judge(results)
    assert [claim["verdict"] for claim in judged["claims"]] == [rules.REPRODUCED] * 2
    assert judged["claims"][1]["effect"]["mean"] == pytest.approx(0.02, abs=0.003)
    cells = {row["cell"]: row for row in judged["tables"][3]["rows"]}
    assert len(cells) == 4
    one = cells["first rung, length 1"]
    by_flops, by_time = (one[f"speed-up in {x} (95%)"] for x in ("FLOPs", "time"))
    assert by_time == pytest.approx({name: x / 1.1 for name, x in by_flops.items()})
    row = judged["tables"][0]["rows"][0]
    assert row["bits per byte"] == pytest.approx(
        -row["negative log perplexity"] / 2 / math.log(2)
    )
    results["second"] = made(run.SECOND, seeds[:4], {"16 experts": -2.0})
    assert run.judge(results)["verdict"] == rules.EQUIVALENT


def test_the_first_rung_is_judged_before_the_second_is_done():
    """The other claim is open, on the page and in the overview."""
    results = ladder_results()
    for key in ("second", "lengths", "dense_lengths", "step_time"):
        del results[key]
    judged = pages.as_written(switch_vs_dense.judge(results))
    done = [(claim["verdict"], claim["look"]) for claim in judged["claims"]]
    assert done == [(rules.OPEN, 0), (rules.REPRODUCED, 1)]
    assert [table["title"] for table in judged["tables"]] == ["The first rung:"]
    assert switch_vs_dense.picture(results) is None
    claims = [claim | {"p_holm": 1.0} for claim in judged["claims"]]
    assert "its runs are not done" in judged["because"] and pages._claim_row(claims[0])
    assert pages._numbers(claims[0])["effect"] == claims[0]["claim"]


def test_both_blocks_of_todays_block_have_the_same_flops_and_experts():
    models = {}
    for each in todays_block.contenders(0.01).contenders:
        job = job_from_gin([ROOT / R0.gin_file], ["FILES='text'", *each.bindings])
        models[each.name] = job.model, train_flops(job.model, *job.sequence_lengths)
    (old, flops), (new, as_many) = models[todays_block.CONTROL], models[todays_block.MODERN]
    assert flops == as_many
    assert (old.positions, new.positions) == ("relative", "rotary")
    assert 2 * old.d_ff == 3 * new.d_ff and new.switch.num_experts == 16


def test_todays_block_is_judged_and_each_has_its_own_rate(swept):
    runs = todays_block.contenders(0.01)
    rates = [ladder.rate(R0, each) for each in runs.contenders]
    assert rates == [pytest.approx(0.004, rel=0.05), 0.01]
    words = [rules.REPRODUCED, rules.REFUTED]
    for quality, word in zip((-1.9, -2.1), words, strict=True):
        found = made(runs, todays_block.SEEDS[:4], {todays_block.MODERN: quality})
        assert todays_block.judge(found | {"dense_lengths": LENGTHS})["verdict"] == word


def test_routing_is_judged_by_its_four_rules():
    run = routing
    found = {run.ONE: -1.95, "sampling": -2.2}
    results = made(run.RUNS, run.SEEDS[:4], found) | {"dense_lengths": LENGTHS}
    words = [claim["verdict"] for claim in run.judge(results)["claims"]]
    assert words[:3] == [rules.REPRODUCED, rules.REPRODUCED, rules.EQUIVALENT]
    assert words[3] == rules.REFUTED  # rerouting is 0.05 behind dropping
    peek = made(run.RUNS, run.SEEDS[:5], found) | {"dense_lengths": LENGTHS}
    with pytest.raises(ValueError, match="a look before its time"):
        run.judge(peek)


@pytest.mark.parametrize("lost", ["sampling", routing.CONTROL])
def test_a_contender_that_diverged_judges_nothing(lost):
    """Its claims are not testable, and the others are judged as without it."""
    run = routing
    results = made(run.RUNS, run.SEEDS[:4], {run.ONE: -1.95}) | {"dense_lengths": LENGTHS}
    results["curves"][lost][2] = {"9": None}  # as JSON has NaN
    judged = pages.as_written(run.judge(results))
    words = [claim["verdict"] for claim in judged["claims"]]
    assert words[0] == rules.REPRODUCED and words[1] == rules.NOT_TESTABLE
    assert judged["claims"][1]["because"] == f"runs of {lost} have no finite quality."
    assert ("sampling" in judged["intervals"]) is False
    (row,) = [row for row in judged["tables"][0]["rows"] if row["model"] == lost]
    assert row["negative log perplexity"] is None and "nan" not in json.dumps(judged).lower()
    assert pages.table(map(pages._claim_row, [c | {"p_holm": 1.0} for c in judged["claims"]]))


def test_hours_are_those_of_the_whole_machine(tmp_path):
    cells = Cells(tmp_path / "cells.jsonl")
    cells.get({"a": 1}, lambda: {"seconds": 600})
    assert ladder.wall_seconds(cells) == round(600 / side_by_side.num_cores())


def test_the_picture_shows_what_experts_are_worth(tmp_path, monkeypatch):
    """Cells where their compute and loss are; the arrow ends on the dense line. It stands at
    the top of the page once there are results of the ladder in which no run diverged."""
    results, page = ladder_results(), tmp_path / "README.md"
    monkeypatch.setattr(pages, "HERE", tmp_path)
    monkeypatch.setattr(pages, "folders", lambda: [])
    monkeypatch.setattr(pages, "overview", lambda: "All.")
    drawn = []
    monkeypatch.setattr(pages, "write_svg", lambda figure, file: drawn.append(figure))
    page.write_text(f"# Top\n{pages.OF_LADDER}\n{pages.END}\n{pages.BEGIN}\n{pages.END}\nEnd.")
    monkeypatch.setattr(pages, "read_results", lambda folder: {"curves": {}})
    pages.publish_overview()
    assert not drawn and "law.svg" not in page.read_text()
    monkeypatch.setattr(pages, "read_results", lambda folder: results)
    pages.publish_overview()
    assert page.read_text().partition(pages.BEGIN)[0].count("(law.svg)") == 1
    assert page.read_text().endswith(f"All.\n\n{pages.END}\nEnd.")
    by_flops, by_experts, by_time, doublings = drawn[0].axes
    assert by_flops.get_xscale() == by_time.get_xscale() == "log"
    arrows = [t for t in by_flops.texts + by_time.texts if t.arrow_patch is not None]
    x_N, line_N = map(np.log, by_flops.lines[0].get_data())
    end, loss = arrows[0].xy
    assert np.exp(np.interp(np.log(end), x_N, line_N)) == pytest.approx(loss, abs=1e-6)
    # Its name says the quotient; in time it is less by the steps' times, 1.1.
    said = [float(t.get_text().split()[0]) for t in by_flops.texts + by_time.texts
            if t.get_text().endswith("times")]  # fmt: skip
    start = arrows[0].xyann[0]
    assert said[0] == pytest.approx(end / start, abs=0.006)
    assert said[0] / said[1] == pytest.approx(1.1, abs=0.02)
    # What grey does not tell apart, fillings do.
    faces = [c[0].get_markerfacecolor() for c in by_flops.containers]
    assert "white" in faces and len({str(face) for face in faces}) == 2
    names = [[t.get_text() for t in axis.get_xticklabels()] for axis in (by_experts, doublings)]
    assert names[0] == ["dense", "2", "4", "8", "16", "32"] and names[1][0] == "2 to 4"
    results["lengths"]["curves"]["dense, 0.5 lengths"][0] = {"9": None}
    assert switch_vs_dense.picture(results) is None


def test_what_sweeps_found_is_printed(monkeypatch, capsys):
    found = {"quality": {"dense": {"1": -5.1, "2": -5.0, "4": -5.1}}}
    assert sweeps.main() == 1  # of what is published: dense's rate for Adafactor is not found
    assert capsys.readouterr().out.count("| no: ") == 1
    monkeypatch.setattr(sweeps, "folders", lambda: [ROOT / "experiments/rates"])
    monkeypatch.setattr(sweeps, "read_results", lambda folder: found)
    assert sweeps.main() == 0
    assert "| rates | dense | 2 | yes |" in capsys.readouterr().out
    found["quality"]["16 experts"] = {"1": -5.2, "2": -5.1, "4": -5.0}
    assert sweeps.main() == 1
    assert "| 16 experts |  | no: the best rate is 4 and none" in capsys.readouterr().out
    with pytest.raises(ValueError, match="16 experts: rate not found on seed 900: .* higher"):
        sweeps.own_rates(found["quality"])
    monkeypatch.setattr(sweeps, "read_results", lambda folder: None)
    assert sweeps.main() == 1 and "no rate was swept yet" in capsys.readouterr().out


def test_a_precision_is_judged_where_its_harm_is_seen():
    run, seeds = selective_precision, selective_precision.SEEDS[:4]
    harmed = made(run.RUNS, seeds, {run.HURT: -2.5}) | {"dense_lengths": LENGTHS}
    assert run.judge(harmed)["verdict"] == rules.EQUIVALENT
    unharmed = made(run.RUNS, seeds, {}) | {"dense_lengths": LENGTHS}
    judged = run.judge(unharmed)
    assert judged["verdict"] == rules.NOT_TESTABLE and run.SEEN in judged["because"]
    harmed["curves"][run.HURT][0] = {"9": None}  # diverged
    assert run.judge(harmed)["verdict"] == rules.EQUIVALENT


def test_spreads_are_reported_beside_the_claim():
    run = initialization
    results = made(run.RUNS, run.SEEDS[:5], {run.SMALL: -1.9}) | {"dense_lengths": LENGTHS}
    judged = run.judge(results)
    assert judged["verdict"] == rules.REPRODUCED
    (row,) = judged["tables"][1]["rows"]
    finals = measured.finals_of(results)
    ratio = np.std(finals[run.SMALL], ddof=1) / np.std(finals[run.LARGE], ddof=1)
    assert next(iter(row.values()))["mean"] == pytest.approx(ratio)


def test_fine_tuning_counts_what_the_dense_model_learns():
    run, noise = fine_tuning, (0.004, -0.003, 0.002, -0.005)

    def peaks(right: float, nats: float):
        return [{"right": right, "nats": nats + e} for e in noise]

    tasks = {
        "trec": {run.DENSE: peaks(80.0, -0.3), run.SPARSE: peaks(81.0, -0.2)},
        "glue_sst2": {run.DENSE: peaks(51.0, -0.7), run.SPARSE: peaks(51.0, -5.0)},
    }
    for by in tasks.values():
        by |= {name: peaks(70.0, -0.25) for name in run.ADAPTED}
    results = {"seeds": list(run.SEEDS[:4]), "tasks": tasks, "quality": {}}
    for model, shift in ((run.SPARSE, 1), (run.DENSE, 0)):
        seen = tasks["trec"][model]
        tasks["trec"][model] = seen[shift:] + seen[:shift]
    judged = run.judge(results)
    assert judged["verdict"] == rules.REPRODUCED
    assert [row["counts"] for row in judged["tables"][0]["rows"]] == ["yes", "no"]
    assert judged["claims"][0]["effect"]["mean"] == pytest.approx(0.1)
    over = "LoRA over full, nats per token (95%)"
    adapted = {(row["task"], row["model"]): row for row in judged["tables"][1]["rows"]}
    assert len(adapted) == 4
    assert adapted["trec", run.DENSE][over]["mean"] == pytest.approx(0.05)
    assert adapted["glue_sst2", run.SPARSE][over]["mean"] == pytest.approx(4.75)
    tasks["glue_sst2"][run.DENSE][0]["nats"] = None  # diverged
    assert [*run.judge(results)["intervals"]] == ["trec"]
    tasks["trec"][run.DENSE][0]["nats"] = None
    assert run.judge(results)["verdict"] == rules.NOT_TESTABLE
    tasks["trec"][run.DENSE] = peaks(30.0, -0.3)
    assert run.judge(results)["verdict"] == rules.NOT_TESTABLE


def test_the_rules_hash_covers_which_tasks_count():
    constants = vars(fine_tuning)
    other = dataclasses.replace(fine_tuning.METHOD, above=50.0)
    assert rules.digest(constants) != rules.digest(constants | {"METHOD": other})


def test_languages_are_judged_in_the_mean():
    run, noise = multilingual, np.array([0.004, -0.003, 0.002, -0.005])
    by = {
        name: {run.DENSE: list(-2.0 + noise), run.SPARSE: list(gain - 2.0 + np.roll(noise, 1))}
        for name, gain in {"en": 0.2, "de": 0.0}.items()
    }
    ends = {model: np.mean([of[model] for of in by.values()], 0) for model in by["en"]}
    curves = {model: [{"1": each} for each in of_seeds] for model, of_seeds in ends.items()}
    seeds = list(run.SEEDS[:4])
    results = {"seeds": seeds, "curves": curves, "languages": by, "dense_lengths": LENGTHS}
    judged = run.judge(results)
    assert judged["claims"][0]["effect"]["mean"] == pytest.approx(0.1)
    means = [each["mean"] for each in judged["intervals"].values()]
    assert means == pytest.approx([0.2, 0.0]) and judged["verdict"] == rules.REPRODUCED
    by["de"][run.SPARSE][0] = curves[run.SPARSE][0]["1"] = None  # diverged
    judged = run.judge(results)
    assert judged["verdict"] == rules.NOT_TESTABLE and [*judged["intervals"]] == ["en"]


def test_quantization_is_judged_within_models():
    """Seeds are blocks: models differ by far more than precisions."""
    run, of_models = quantization, (-2.0, -2.05, -1.9, -2.1)
    tiny = (1e-5, -2e-5, 3e-5, 0.0)
    curves = {
        name: [{"1": m - cost + e * (i + 1)} for m, e in zip(of_models, tiny, strict=True)]
        for i, (name, cost) in enumerate(dict.fromkeys(run.EXPERTS, 0.0).items())
    }
    results = {"seeds": list(run.SEEDS[:4]), "curves": curves, "dense_lengths": LENGTHS}
    assert [c["verdict"] for c in run.judge(results)["claims"]] == [rules.EQUIVALENT] * 2
    curves["int8"] = [{"1": m - 0.002 + e} for m, e in zip(of_models, tiny[::-1], strict=True)]
    words = [c["verdict"] for c in run.judge(results)["claims"]]
    assert words == [rules.REFUTED, rules.EQUIVALENT]
