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
from experiments.figures import Cell, Frontier, Strip, frontier_figure
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
from experiments.law import Point, half_widths, speedups
from experiments.measured import Interval, finite_of
from experiments.rules import OF_COMPUTE, Rule
from experiments.statistics import curvature, difference, estimate, intervals, trend
from experiments.step_times import step_times
from experiments.study import Study, main

EXPERTS = (2, 4, 8, 16, 32)
SEEDS = tuple(range(100, 107))
_FAN = "first rung, length 1"
CAPTION = (
    "Models of 0.26M and 0.59M active parameters in blocks, 20 tokens each, AdamW, each at "
    "its own rate. Above: small dots are seeds, bars 95% intervals of a cell's mean by its "
    "own variance. Cells are, from the left, half, once and double the first rung's length, "
    "and the second rung; lengths of a half and of two have three seeds, the others four. "
    "The arrow goes from 16 experts to the compute at which the dashed line, straight "
    "between dense cells, has the same loss, with a 95% interval. Below: the first rung at "
    "its length; diamonds are what a doubling gains, above 0 a lower loss. All but the "
    "second rung's difference is exploratory."
)
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
            "bound": each.bound,
            "speed-up in FLOPs (95%)": dataclasses.asdict(each.ratio),
            "speed-up in time (95%)": _over(
                each.ratio, statistics.median(results["step_time"]["second" in each.name])
            ),
        }
        for each in found
    ]
    title = "What 16 experts are worth at equal loss, read between dense cells:"
    tables = [{"title": title, "rows": rungs}]
    if growth is not None:
        named = "speed-up at ten times the compute, over this one (95%)"
        title = "Whether that grows with scale, by cells that are no bounds:"
        tables.append({"title": title, "rows": [{named: dataclasses.asdict(growth)}]})
    return tables


def _over(ratio: Interval, time: float) -> dict[str, float]:
    """In time, by steps that take `time` times as long; their five timings differ by 4%, which
    is left out."""
    return {name: value / time for name, value in dataclasses.asdict(ratio).items()}


def is_whole(results: dict[str, Any]) -> bool:
    """Whether results are of these rungs and no run diverged."""
    parts = (results, results.get("second"), results.get("lengths"))
    return all(part and len(finite_of(part)) == len(part["curves"]) for part in parts)


def picture(results: dict[str, Any]) -> Figure | None:
    """Loss by FLOPs and by time, by the number of experts, and the gain of each doubling; None
    where a run diverged, or of results before the ladder's."""
    if not is_whole(results):
        return None
    dense, sparse = (_points(results, kind) for kind in ("dense", "16 experts"))
    found, _ = speedups(dense, sparse)
    by_name = {point.name: point for point in sparse}
    # What is read off: the largest sparse cell whose loss lies between dense ones.
    inside = [each for each in found if not each.bound] or found
    read = max(inside, key=lambda each: by_name[each.name].flops)
    at = by_name[read.name]
    times = [*map(statistics.median, results["step_time"])]
    ratios = {point.name: times["second" in point.name] for point in sparse}

    def cells(points: list[Point], over: dict[str, float]) -> list[Cell]:
        errors = half_widths(points)
        return [
            Cell(point.flops * over.get(point.name, 1.0), point.losses, error)
            for point, error in zip(points, errors, strict=True)
        ]

    def panel(x: str, over: dict[str, float]) -> Frontier:
        start = at.flops * over.get(at.name, 1.0)
        loss = statistics.mean(at.losses)
        ratio = read.ratio
        worth, low, high = (v * at.flops / start for v in (ratio.mean, ratio.low, ratio.high))
        text = f"{read.bound} {worth:.2f} ({low:.2f} to {high:.2f}) times".strip()
        by_flops = sorted(dense, key=lambda point: point.flops)
        arrow = start, start * worth, loss, text
        return Frontier(x, cells(by_flops, {}), cells(sparse, over), arrow)

    return frontier_figure(
        [
            panel("training FLOPs", {}),
            panel("FLOPs that the dense model does in the same training time", ratios),
        ],
        ("dense", "16 experts"),
        "validation loss, bits per byte",
        _strips(results),
    )


def _strips(results: dict[str, Any]) -> list[Strip]:
    """Loss by experts on the first rung, and what a doubling of them gains there."""
    kinds = {"dense": "dense"} | {str(n): f"{n} experts" for n in EXPERTS}
    points = [p for kind in kinds.values() for p in _points(results, kind) if p.name == _FAN]
    losses = {
        name: _around(statistics.mean(point.losses), error)
        for name, point, error in zip(kinds, points, half_widths(points), strict=True)
    }
    bits = {name: [-each for each in v] for name, v in bits_per_byte(results).items()}
    gains = {
        f"{a} to {b}": dataclasses.asdict(
            estimate(bits, difference(f"{b} experts", f"{a} experts")).interval()
        )
        for a, b in zip(EXPERTS, EXPERTS[1:], strict=False)
    }
    by_experts = Strip("experts, first rung", "bits per byte", losses, ["dense"])
    doubling = Strip("experts, doubled", "gain, bits per byte", gains, is_difference=True)
    return [by_experts, doubling]


def _around(mean: float, half: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - half, "high": mean + half}


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """By the rules, of the runs that are done; beside them whether the gain of a doubling
    ends."""
    found, finals = rules.judged(RULES, results), finite_of(results)
    by_experts = {f"{n} experts": n for n in EXPERTS}
    if by_experts.keys() <= finals.keys():
        bend = estimate(finals, curvature(by_experts)).interval()
        sparse = {name: finals[name] for name in by_experts}
        alone = estimate(sparse, trend(by_experts)).interval()
        found["because"] += (
            f" The gain of a doubling changes by {bend} with each further one. By the variance "
            f"of the sparse models alone, which is not the rule's, a doubling gains {alone}."
        )
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
