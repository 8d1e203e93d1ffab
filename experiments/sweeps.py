# SPDX-License-Identifier: Apache-2.0
"""Rates of contenders that experiments/rates has not, and what all sweeps found.

    python -m experiments.sweeps

prints the rate of every contender that was swept; the exit status is 1 where one is not
interior.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from experiments.ladder import Runs, of_seed
from experiments.measured import Cells
from experiments.pages import folders, read_results, table
from experiments.rates.run import SEED, Swept, found_rate, sweep
from experiments.side_by_side import on_each_core
from experiments.study import Study

RATES = "rates"


def with_own_rates(
    study: Study, cells: Cells, runs: Runs, names: Sequence[str]
) -> tuple[Runs, dict[str, dict[str, float]]]:
    """Runs whose named contenders have the rates of a sweep on the seed of experiments/rates.

    What a contender begins with, or learns from, is of the first seed of the runs. A quick run
    sweeps nothing.

    Returns:
        Also quality by contender and rate.

    Raises:
        ValueError: a contender's best rate is at the edge.
    """
    if study.is_quick:
        return runs, {}
    swept = [
        Swept(each.name, tuple(of_seed(each.bindings, runs.seeds[0])), rung=runs.rung)
        for each in runs.contenders
        if each.name in names
    ]
    qualities = on_each_core(lambda each: sweep(study, cells, each), swept)
    found = {each.name: quality for each, quality in zip(swept, qualities, strict=True)}
    rates = own_rates(found)
    contenders = tuple(
        dataclasses.replace(each, rate_of=rates.get(each.name, each.rate_of))
        for each in runs.contenders
    )
    return dataclasses.replace(runs, contenders=contenders), found


def own_rates(qualities: dict[str, dict[str, float]]) -> dict[str, float]:
    """The rate of each contender.

    Args:
        qualities: quality by contender and rate.

    Raises:
        ValueError: a contender's best rate is at the edge.
    """
    fits = {name: found_rate(quality) for name, quality in qualities.items()}
    for name, fit in fits.items():
        if fit.rate is None:
            raise ValueError(f"{name}: rate not found on seed {SEED}: {fit.problem}")
    return {name: fit.rate for name, fit in fits.items()}


def all_rates() -> list[dict[str, Any]]:
    """A row each contender that was swept, of all published results."""
    published = ((folder.name, read_results(folder) or {}) for folder in folders())
    return [
        {
            "experiment": name,
            "model": model,
            "rate": fit.rate,
            "interior": "no: " + fit.problem if fit.problem else "yes",
        }
        for name, results in published
        if name == RATES or "rule" in results
        for model, quality in results.get("quality", {}).items()
        for fit in (found_rate(quality),)
    ]


def main() -> int:
    rows = all_rates()
    if not rows:
        print("no rate was swept yet: `make experiments EXPERIMENT=rates DATA=FOLDER`")
        return 1
    print(table(rows))
    return int(any(row["rate"] is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
