# SPDX-License-Identifier: Apache-2.0
"""Figures of the experiments' pages: losses by compute, by bytes and by rate, and intervals.

In the style of `switchx/analysis/plots.py`: what grey does not tell apart, dashes do.

Dims: C cells
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from switchx.analysis.comparison_plots import DASHES
from switchx.analysis.plots import COLOURS, STYLE


@dataclasses.dataclass(frozen=True)
class Cell:
    """The runs of one model at one compute.

    Attributes:
        x: its place on the horizontal axis.
        losses: losses of its runs, one a seed.
        error: half of the 95% interval of their mean.
    """

    x: float
    losses: Sequence[float]
    error: float


@dataclasses.dataclass(frozen=True)
class Frontier:
    """A panel of `frontier_figure`.

    Attributes:
        x: label of the horizontal axis.
        dense, sparse: cells with more and more compute that a line joins, as low as any before,
            and those read against it.
        arrow: a sparse cell's x, the x of the line at its loss, that loss, and what the
            quotient is; None where nothing is read.
    """

    x: str
    dense: Sequence[Cell]
    sparse: Sequence[Cell]
    arrow: tuple[float, float, float, str] | None = None


@dataclasses.dataclass(frozen=True)
class Strip:
    """A panel below those of `frontier_figure`.

    Attributes:
        x, y: labels of its axes.
        values: `mean`, `low` and `high` by name, from left to right.
        hollow: names of those whose dot is open.
        is_difference: whether 0 is no effect; it has a dotted line then, and values diamonds.
    """

    x: str
    y: str
    values: Mapping[str, Mapping[str, float]]
    hollow: Collection[str] = ()
    is_difference: bool = False


def frontier_figure(
    panels: Sequence[Frontier], names: tuple[str, str], y: str, strips: Sequence[Strip]
) -> Figure:
    """Plots losses by compute: hollow dense cells with a line between, filled sparse ones,
    every seed a small dot; below, values with intervals.

    Args:
        names: what dense and sparse cells are called.
        strips: as many as there are panels.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 6.6))
        grid = figure.add_gridspec(2, len(panels), height_ratios=(2, 1))
    first = None
    for column, (panel, strip) in enumerate(zip(panels, strips, strict=True)):
        axis = first = figure.add_subplot(grid[0, column], sharey=first)
        _draw_frontier(axis, panel, names)
        axis.set_ylabel(y if column == 0 else "")
        if column == 0:
            axis.legend(frameon=False)
        _draw_strip(figure.add_subplot(grid[1, column]), strip)
    return figure


def _draw_frontier(axis, panel: Frontier, names: tuple[str, str]) -> None:
    dark = COLOURS(0.9)
    line_C = np.minimum.accumulate([np.mean(cell.losses) for cell in panel.dense])
    label = f"{names[0]}, between its cells"
    x_C = [cell.x for cell in panel.dense]
    axis.plot(x_C, line_C, color="0.55", linestyle=DASHES[1], label=label)
    styles = {names[0]: (panel.dense, "white"), names[1]: (panel.sparse, dark)}
    for name, (cells, face) in styles.items():
        for i, cell in enumerate(cells):
            _draw(axis, cell, dark, face, None if i else name)
    if panel.arrow is not None:
        start, end, loss, text = panel.arrow
        style = {"arrowstyle": "->", "color": dark, "shrinkA": 4}
        axis.annotate("", (end, loss), (start, loss), arrowprops=style)
        place = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(text, (end, loss), **place, fontsize=8)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("e+", "e"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel(panel.x)


def _draw_strip(axis, strip: Strip) -> None:
    dark = COLOURS(0.9)
    marker = "D" if strip.is_difference else "o"
    for column, (name, each) in enumerate(strip.values.items()):
        axis.plot([column] * 2, [each["low"], each["high"]], color=dark, linewidth=1.5)
        face = "white" if name in strip.hollow else dark
        axis.plot(column, each["mean"], marker, color=dark, markerfacecolor=face)
    if strip.is_difference:
        axis.axhline(0.0, color="0.4", linestyle=":", linewidth=1)
    axis.set_xticks(range(len(strip.values)), list(strip.values))
    axis.set(xlabel=strip.x, ylabel=strip.y)


def _draw(axis, cell: Cell, color, face, label: str | None) -> None:
    """Seeds as small dots, their mean with its interval."""
    axis.plot(
        [cell.x] * len(cell.losses), cell.losses, ".", color=color, alpha=0.35, markersize=3
    )
    style = {"color": color, "markerfacecolor": face, "markersize": 6, "label": label}
    axis.errorbar(cell.x, np.mean(cell.losses), cell.error, fmt="o", linewidth=1, **style)


def points_figure(points: Sequence[Mapping[str, float | str | None]]) -> Figure:
    """Plots losses against bytes: an open dot at once, a filled one after training.

    Args:
        points: `model`, `MiB`, `loss` and `loss after`, None where nothing was trained.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.6))
        axis = figure.subplots()
    names: dict[tuple[int, float], tuple[float, float, list]] = {}
    for point in points:
        size = point["MiB"]
        loss = point["loss"]
        after = point["loss after"]
        if after is not None:
            axis.plot([size, size], [loss, after], "-", color="0.6", linewidth=1)
            axis.plot(size, after, "o", color=COLOURS(0.9))
        axis.plot(size, loss, "o", color=COLOURS(0.9), markerfacecolor="white")
        names.setdefault((round(size), round(loss, 1)), (size, loss, []))[2].append(
            point["model"]
        )
    for size, loss, together in names.values():  # of dots that touch, one below the other
        place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate("\n".join(together), (size, loss), **place, fontsize=7, color="0.3")
    axis.set_xscale("log")
    sizes = sorted({place[0] for place in names})
    axis.set_xticks(sizes, list(map(str, sizes)))
    axis.minorticks_off()
    axis.set_xlabel("MiB of parameters, float32")
    axis.set_ylabel("loss, nats per token: open at once, filled after training")
    return figure


def rates_figure(quality: Mapping[str, Mapping[str, float | None]], y: str) -> Figure:
    """Quality by learning rate, a line each model, whose best rate has a filled dot.

    Args:
        quality: by model and rate; None where a run diverged.
        y: label of the vertical axis.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.6))
        axis = figure.subplots()
    shades = np.linspace(0.45, 0.95, len(quality))
    rates = sorted({float(rate) for by_rate in quality.values() for rate in by_rate})
    for number, (name, by_rate) in enumerate(quality.items()):
        points = sorted((float(rate), v) for rate, v in by_rate.items() if v is not None)
        colour, dashes = COLOURS(shades[number]), DASHES[number % len(DASHES)]
        best = max(points, key=lambda point: point[1])
        axis.plot(*zip(*points, strict=True), "o", color=colour, markerfacecolor="white")
        axis.plot(*zip(*points, strict=True), linestyle=dashes, color=colour, label=name)
        axis.plot(*best, "o", color=colour)
    axis.set_xscale("log")
    axis.set_xticks(rates, [f"{rate:.2g}" for rate in rates])
    axis.minorticks_off()
    axis.set_xlabel("peak learning rate")
    axis.set_ylabel(y)
    axis.legend(fontsize=8, handlelength=4)
    return figure


def intervals_figure(
    intervals: Mapping[str, Mapping[str, float]], x: str, no_effect: float = 0.0
) -> Figure:
    """Effects, a row each: a dot at `mean`, a bar from `low` to `high`, a line at `no_effect`.

    A dot is filled where the interval leaves out `no_effect`: 0 of differences, 1 of ratios.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 1.0 + 0.3 * len(intervals)))
        axis = figure.subplots()
    dark = COLOURS(0.9)
    for row, each in enumerate(intervals.values()):
        is_known = each["low"] > no_effect or each["high"] < no_effect
        axis.plot([each["low"], each["high"]], [row, row], color=dark, linewidth=1.5)
        face = dark if is_known else "white"
        axis.plot(each["mean"], row, "o", color=dark, markerfacecolor=face, markersize=6)
    axis.axvline(no_effect, color="0.4", linestyle=":", linewidth=1)
    axis.set_yticks(range(len(intervals)), list(intervals))
    axis.set_ylim(len(intervals) - 0.5, -0.5)
    axis.set_xlabel(x)
    return figure
