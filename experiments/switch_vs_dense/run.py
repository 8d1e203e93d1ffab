# SPDX-License-Identifier: Apache-2.0
"""Sparse over dense at equal FLOPs: 2 to 32 experts on the first rung, 16 on the second.

make experiments EXPERIMENT=switch_vs_dense DATA=FOLDER
"""

import dataclasses
import statistics
from typing import Any

from matplotlib.figure import Figure

from experiments import rules
from experiments.experiment import ENGLISH
from experiments.ladder import (
    DENSE,
    R0,
    R1,
    OnLadder,
    Runs,
    bindings_of,
    bits_per_byte,
    rows,
    train_all,
    wall_seconds,
)
from experiments.law import ASYMPTOTES, Point, band, errors_of, speedups
from experiments.measured import finite_of
from experiments.rules import OF_COMPUTE, Rule
from experiments.statistics import curvature, difference, estimate, intervals, trend
from experiments.step_times import step_times
from experiments.study import Study, main
from switchx.analysis.comparison_plots import Cell, Frontier, frontier_figure

EXPERTS = (2, 4, 8, 16, 32)
SEEDS = tuple(range(100, 107))
_FAN = "first rung, length 1"
_DENSE = OnLadder("dense", (DENSE,), rate_of="dense")
_SPARSE = OnLadder("16 experts")

FIRST = Runs((_DENSE, *(OnLadder(f"{n} experts", (f"NUM_EXPERTS={n}",), n) for n in EXPERTS)))
SECOND = Runs((_DENSE, _SPARSE), R1)
# What compute is worth, and guards against what holds at one length alone.
LENGTHS = Runs(
    tuple(
        OnLadder(f"{each.name}, {length} lengths", each.bindings, each.rate_of, length)
        for length in (0.5, 2.0)
        for each in (_DENSE, _SPARSE)
    ),
    seeds=SEEDS[:3],
)

RULES = (
    Rule(
        "16 experts are ahead of the dense model on the second rung",
        difference("16 experts", "dense"),
        "ahead",
        margin=OF_COMPUTE,
        looks=(4,),
        seeds=SEEDS[:4],
        expected=0.04,
        runs="second",
    ),
    Rule(
        "a doubling of the experts gains, from 2 to 32 on the first rung",
        trend({f"{n} experts": n for n in EXPERTS}),
        "ahead",
        margin=None,
        looks=(4, 7),
        seeds=SEEDS,
        expected=0.006,
    ),
)


def _points(results: dict[str, Any], kind: str) -> list[Point]:
    """Cells of `dense` or of `16 experts`, by rung and length."""
    parts = {"lengths": results["lengths"], "first": results, "second": results["second"]}
    return [
        Point(
            f"{'second' if part == 'second' else 'first'} rung, length {model['length']:g}",
            model["training_flops"],
            tuple(bits_per_byte(found)[name]),
        )
        for part, found in parts.items()
        for name, model in found["models"].items()
        if name.partition(", ")[0] == kind
    ]


def by_law(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Tables of what 16 experts are worth in compute and in time."""
    found, growth = speedups(_points(results, "dense"), _points(results, "16 experts"))
    rungs = [
        {
            "cell": each.name,
            "Linf, bits per byte": each.asymptote,
            "speed-up in FLOPs (95%)": dataclasses.asdict(each.ratio),
            "beyond the dense runs": "yes, at least this" if each.is_beyond else "",
            "speed-up in time": each.ratio.mean
            / statistics.median(results["step_time"]["second" in each.name]),
        }
        for each in found
    ]
    slopes = [
        {
            "Linf, bits per byte": asymptote,
            "speed-up at ten times the compute, over this one (95%)": dataclasses.asdict(ratio),
        }
        for asymptote, ratio in growth.items()
    ]
    return [
        {"title": "What 16 experts are worth at equal loss:", "rows": rungs},
        {"title": "Whether that grows with scale:", "rows": slopes},
    ]


def is_whole(results: dict[str, Any]) -> bool:
    """Whether results are of these rungs and no run diverged."""
    parts = (results, results.get("second"), results.get("lengths"))
    return all(part and len(finite_of(part)) == len(part["curves"]) for part in parts)


def picture(results: dict[str, Any]) -> Figure | None:
    """Loss by FLOPs and by time, and the gain of each doubling of experts; None where a run
    diverged, or of results before the ladder's."""
    if not is_whole(results):
        return None
    dense, sparse = (_points(results, kind) for kind in ("dense", "16 experts"))
    fan = [p for n in EXPERTS for p in _points(results, f"{n} experts") if p.name == _FAN]
    asymptote = ASYMPTOTES[1]
    found, _ = speedups(dense, sparse, (asymptote,))
    by_name = {point.name: point for point in sparse}
    # What is read off: the largest sparse cell whose loss a dense run has.
    inside = [each for each in found if not each.is_beyond] or found
    read = max(inside, key=lambda each: by_name[each.name].flops)
    at = by_name[read.name]
    times = [*map(statistics.median, results["step_time"])]
    ratios = {point.name: times["second" in point.name] for point in sparse}

    def cells(points: list[Point], over: dict[str, float]) -> list[Cell]:
        errors = [1.96 * each for each in errors_of(points)]
        return [
            Cell(point.flops * over.get(point.name, 1.0), point.losses, error)
            for point, error in zip(points, errors, strict=True)
        ]

    def panel(x: str, over: dict[str, float], others: dict[str, Cell]) -> Frontier:
        start, loss = at.flops * over.get(at.name, 1.0), statistics.mean(at.losses)
        ratio = read.ratio
        worth, low, high = (v * at.flops / start for v in (ratio.mean, ratio.low, ratio.high))
        text = f"{'at least ' * read.is_beyond}{worth:.2f} ({low:.2f}-{high:.2f}) times"
        arrow = (start, start * worth, loss, text)
        lines = band(dense, asymptote)
        return Frontier(x, cells(dense, {}), cells(sparse, over), others, lines, arrow)

    finals = finite_of(results)
    pairs = list(zip(EXPERTS, EXPERTS[1:], strict=False))
    gains = {
        f"{a} to {b}": estimate(finals, difference(f"{b} experts", f"{a} experts")).interval()
        for a, b in pairs
    }
    others = dict(zip(map(str, EXPERTS), cells(fan, {}), strict=True))
    return frontier_figure(
        [
            panel("training FLOPs", {}, others),
            panel("training time, in FLOPs of the dense model in it", ratios, {}),
        ],
        ("dense", "16 experts"),
        "validation loss, bits per byte",
        {name: dataclasses.asdict(each) for name, each in gains.items()},
        "gain of a doubling,\nnats per token",
    )


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """By the rules, of the runs that are done; beside them whether the gain of a doubling
    ends."""
    found, finals = rules.judged(RULES, results), finite_of(results)
    by_experts = {f"{n} experts": n for n in EXPERTS}
    if by_experts.keys() <= finals.keys():
        bend = estimate(finals, curvature(by_experts)).interval()
        found["because"] += f" The gain of a doubling changes by {bend} with each further one."
    parts = {
        "The first rung:": results,
        "The second rung:": results.get("second"),
        "Half and double lengths:": results.get("lengths"),
    }
    tables = [{"title": title, "rows": rows(part)} for title, part in parts.items() if part]
    return found | {
        "intervals": intervals(results),
        "intervals_of": "over dense on the first rung, nats per token",
        "tables": tables + (by_law(results) if is_whole(results) else []),
    }


def run(study: Study) -> None:
    """Trains and publishes the first rung, then trains lengths, of which the margin is, and the
    second rung; times steps last, which need a quiet machine, and publishes all."""
    files, cells = study.files(*ENGLISH), study.cells()

    def publish(**measured) -> None:
        seconds = wall_seconds(cells)
        study.publish(cells, files, judge, **first, **measured, wall_seconds=seconds)

    first = train_all(study, cells, study.at_look(FIRST, RULES[1]))
    publish()
    lengths = train_all(study, cells, LENGTHS)
    second = train_all(study, cells, Runs(SECOND.contenders, R1, RULES[0].seeds))
    if study.is_quick:
        return
    times = []
    for rung in (R0, R1):
        bindings = {e.name: bindings_of(study, rung, e, 0) for e in SECOND.contenders}
        of_rung = step_times(study, cells, (rung.gin_file,), bindings)
        times.append(of_rung[_SPARSE.name])
    dense = {"1.0": first["curves"]["dense"], **{
        str(each.length): lengths["curves"][each.name]
        for each in LENGTHS.contenders if each.rate_of == "dense"
    }}  # fmt: skip
    dense_lengths = {
        # The same seeds at every length, and at every look: the margin does not move.
        length: [v for curve in curves[: len(LENGTHS.seeds)] for v in curve.values()]
        for length, curves in dense.items()
    }
    publish(second=second, lengths=lengths, dense_lengths=dense_lengths, step_time=times)


if __name__ == "__main__":
    main(__file__, __doc__, run)
