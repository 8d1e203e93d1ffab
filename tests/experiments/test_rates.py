# SPDX-License-Identifier: Apache-2.0
"""experiments/rates: cells side by side, rates that are added at an edge, the next rung's."""

import json
import math
import os
import subprocess
import sys
import time

import pytest

from experiments.rates import run as rates
from experiments.side_by_side import num_cores, on_each_core


def test_each_item_has_a_core_of_its_own():
    """The processes that it starts stay there; results are in the order of the items."""
    print_cores = "import os; print(sorted(os.sched_getaffinity(0)))"

    def work(item):
        out = subprocess.run([sys.executable, "-c", print_cores], capture_output=True)
        time.sleep(0.2)  # the other core takes the next one
        return item, json.loads(out.stdout)

    before = os.sched_getaffinity(0)
    found = on_each_core(work, range(2 * num_cores()))
    assert [item for item, _ in found] == [*range(2 * num_cores())]
    assert {tuple(cores) for _, cores in found} == {(core,) for core in before}
    assert os.sched_getaffinity(0) == before


def test_after_an_error_no_other_item_begins():
    begun = []

    def work(item):
        begun.append(item)
        time.sleep(0.1)
        raise SystemExit("interrupted")

    with pytest.raises(SystemExit, match="interrupted"):
        on_each_core(work, range(20))
    assert len(begun) <= 2 * num_cores()


class Swept:
    """A study whose sweeps find a parabola in the logarithm of the rate."""

    is_quick = False

    def __init__(self, optimum: float):
        self.optimum, self.asked = optimum, []

    def command(self, cells, label, command, *arguments):
        assert command == "sweep"
        (text,) = (each for each in arguments if "LEARNING_RATE=" in each)
        self.asked.append(tried := text.partition("=")[2].split(","))
        losses = {rate: 5 + 0.1 * math.log(float(rate) / self.optimum) ** 2 for rate in tried}
        return {
            "results": [
                {"values": {"LEARNING_RATE": rate}, "losses": {str(rates.SEED): loss}}
                for rate, loss in losses.items()
            ]
        }


def test_rates_are_added_where_the_best_is_at_the_edge():
    study = Swept(optimum=0.07)
    quality = rates.sweep(study, None, rates.Swept("dense"))
    assert [len(tried) for tried in study.asked] == [5, 6, 7]
    assert study.asked[-1][-2:] == ["0.064", "0.128"]
    assert rates.found_rate(quality).vertex == pytest.approx(0.07)
    rising = Swept(optimum=100.0)
    quality = rates.sweep(rising, None, rates.Swept("dense"))
    assert [len(tried) for tried in rising.asked] == [5, 6, 7, 8]
    assert rates.found_rate(quality).rate is None


def test_a_rate_that_diverged_is_the_worst():
    study = Swept(optimum=0.008)
    found = study.command(None, "", "sweep", "--gin.LEARNING_RATE=0.004,0.008,0.016,0.032")
    found["results"][3]["losses"] = {str(rates.SEED): None}  # as JSON has NaN
    study.command = lambda *arguments: found
    quality = rates.sweep(study, None, rates.Swept("dense"))
    assert quality["0.032"] is None and rates.found_rate(quality).rate == pytest.approx(2**-7)
    names = [each.name for each in (*rates.BOTH, *rates.GATE)]
    said = rates.judge({"quality": dict.fromkeys(names, quality)})
    assert said["tables"][0]["rows"][0]["best, nats"] == pytest.approx(-5)


def test_the_next_rung_is_predicted_by_its_width():
    dense, experts = rates.next_rung({"dense": 0.012, "16 experts": 0.006})
    assert dense.rates == pytest.approx((0.004, 0.008, 0.016)) and dense.rung == rates.R1
    assert experts.rates == pytest.approx((0.002, 0.004, 0.008))


def test_the_page_says_which_rates_are_not_found():
    def curve(optimum: float, best: float) -> dict[str, float]:
        tried = (0.002, 0.004, 0.008, 0.016, 0.032)
        return {f"{r:g}": best - 0.1 * math.log(r / optimum) ** 2 for r in tried}

    quality = {
        "dense": curve(0.008, -2.0),
        "16 experts": curve(0.004, -1.9),
        "dense, Adafactor": curve(0.008, -2.1),
        "16 experts, Adafactor": curve(0.001, -2.15),
    }
    found = rates.judge({"quality": quality})
    assert "No rate is found of ['16 experts, Adafactor']" in found["because"]
    assert "disagree on the sign" in found["because"]
    assert found["effect"].mean == pytest.approx(0.1)
    row = found["tables"][0]["rows"][1]
    assert row["vertex"] == pytest.approx(0.004) and row["rate"] == pytest.approx(2**-8)
