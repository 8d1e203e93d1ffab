# SPDX-License-Identifier: Apache-2.0
"""Granularity by sparsity: more and smaller experts, of which a token has as many FLOPs.

make experiments EXPERIMENT=grid DATA=FOLDER

A cell has E0 experts for each one that a token would choose at granularity 1: at granularity G
there are G * E0 experts of F / G, and a token chooses G of them.
"""

import dataclasses
import statistics
from typing import Any

from experiments.experiment import ENGLISH
from experiments.ladder import R0, OnLadder, Runs, bindings_of, rows, train_all, wall_seconds
from experiments.measured import Interval, finite_of
from experiments.statistics import Estimate, curvature, estimate, intervals, trend
from experiments.step_times import step_times
from experiments.study import Study, main

GRANULARITIES, SPARSITIES = (1, 2, 4), (4, 8, 16)
D_FF = 384  # of all experts of a token together, as in configs/runs/ladder_r0.gin
SEEDS = (910, 911)  # no rule of another experiment has them


def _name(granularity: int, sparsity: int) -> str:
    choices = f"{granularity} choice{'s' * (granularity > 1)}"
    return f"{granularity * sparsity} experts, {choices}"


def _cell(granularity: int, sparsity: int) -> OnLadder:
    """Gates are probabilities: G chosen ones of G * E0 sum to the same at the beginning."""
    bindings = (
        f"NUM_EXPERTS={granularity * sparsity}",
        f"RouterConfig.num_selected={granularity}",
        f"SwitchConfig.d_ff={D_FF // granularity}",
    )
    return OnLadder(_name(granularity, sparsity), bindings, rate_of=sparsity)


RUNS = Runs(
    tuple(_cell(g, e) for e in SPARSITIES for g in GRANULARITIES),
    seeds=SEEDS,
)


def effects(finals: dict[str, list[float]]) -> dict[str, Estimate]:
    """Contrasts of the grid, by one variance of all its cells."""
    over_g = {e: {_name(g, e): g for g in GRANULARITIES} for e in SPARSITIES}
    over_e = [{_name(g, e): e for e in SPARSITIES} for g in GRANULARITIES]
    slopes = {e: trend(sizes) for e, sizes in over_g.items()}
    weights = {
        "a doubling of the granularity, mean of all sparsities": _mean(slopes.values()),
        "a doubling of the sparsity, mean of all granularities": _mean(map(trend, over_e)),
        "change of the first with each further doubling": _mean(
            map(curvature, over_g.values())
        ),
        **{
            f"a doubling of the granularity at sparsity {e}": each for e, each in slopes.items()
        },
    }
    return {name: estimate(finals, each) for name, each in weights.items()}


def _mean(contrasts) -> dict[str, float]:
    """Of contrasts that share no cell."""
    contrasts = list(contrasts)
    return {name: w / len(contrasts) for each in contrasts for name, w in each.items()}


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """Nothing is claimed: the papers have one granularity."""
    finals = finite_of(results)
    if len(finals) < len(RUNS.contenders):
        lost = sorted({each.name for each in RUNS.contenders} - finals.keys())
        found = {}
        because = f"Runs of {lost} diverged, so that no effect is estimated."
        effect, claim = Interval(0.0, 0.0, 0.0), "nothing"
    else:
        found = {name: each.interval() for name, each in effects(finals).items()}
        claim, effect = next(iter(found.items()))
        because = f"{claim}: {effect} nats per token."
    times = {name: statistics.median(each) for name, each in results["step_time"].items()}
    cells = [row | {"step time": times[row["model"]]} for row in rows(results)]
    tables = [{"title": "", "rows": cells}]
    if found:
        listed = [
            {"effect": name, "nats per token (95%)": dataclasses.asdict(each)}
            for name, each in found.items()
        ]
        tables.append({"title": "Over the grid:", "rows": listed})
    return {
        "verdict": "reported",
        "because": because,
        "effect": effect,
        "effect_of": f"{claim}, nats per token",
        "intervals": intervals(results),
        "intervals_of": f"over {RUNS.contenders[0].name}, nats per token",
        "tables": tables,
    }


def run(study: Study) -> None:
    files, cells = study.files(*ENGLISH), study.cells()
    trained = train_all(study, cells, RUNS)
    timed = [each for each in RUNS.contenders if each.name in trained["curves"]]
    bindings = {each.name: bindings_of(study, R0, each, 0) for each in timed}
    times = step_times(study, cells, (R0.gin_file,), bindings)
    study.publish(
        cells, files, judge, **trained, step_time=times, wall_seconds=wall_seconds(cells)
    )


if __name__ == "__main__":
    main(__file__, __doc__, run)
