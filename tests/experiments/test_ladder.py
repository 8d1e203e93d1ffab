# SPDX-License-Identifier: Apache-2.0
"""experiments/ladder.py: each contender at its own rate, without a capacity in evaluation."""

import json
import math

import pytest

from experiments import ladder, pages, rules, side_by_side
from experiments.ladder import R0, R1, OnLadder, Runs
from experiments.measured import Cells
from experiments.pages import ROOT
from experiments.rates.run import WIDTH
from experiments.routing import run as routing
from experiments.switch_vs_dense import run as switch_vs_dense
from switchx.gin_config.building import job_from_gin

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
        folder = self.runs / name
        folder.mkdir()
        lines = [{"step": 0, "target_tokens": 1.0}, {"step": 9, "target_tokens": 1000.0}]
        (folder / "validation.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return {"curve": {"0": -7.0, "9": -2.0}, "dropped": 0.25, "skipped_steps": 1}

    def command(self, cells, label, *arguments):
        self.asked.append((label, dict(each.split("=", 1) for each in arguments[1:])))
        return {"neg_log_perplexity": -1.5}


def test_what_has_a_capacity_is_evaluated_without(swept, tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "_validation", lambda *_: {"tokens": 1000, "bytes": 3000})
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


def test_switch_vs_dense_is_judged_by_both_its_rules():
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
    judged = run.judge(results)
    assert [claim["verdict"] for claim in judged["claims"]] == [rules.REPRODUCED] * 2
    assert judged["claims"][1]["effect"]["mean"] == pytest.approx(0.02, abs=0.003)
    cells = {row["cell"]: row for row in judged["tables"][3]["rows"]}
    assert len(cells) == 4
    one = cells["first rung, length 1"]
    assert one["speed-up in time"] == pytest.approx(
        one["speed-up in FLOPs (95%)"]["mean"] / 1.1
    )
    row = judged["tables"][0]["rows"][0]
    assert row["bits per byte"] == pytest.approx(
        -row["negative log perplexity"] / 2 / math.log(2)
    )
    results["second"] = made(run.SECOND, seeds[:4], {"16 experts": -2.0})
    assert run.judge(results)["verdict"] == rules.EQUIVALENT


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
