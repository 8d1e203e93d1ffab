# SPDX-License-Identifier: Apache-2.0
"""Plots of runs that are compared: courses, gains by step and time, one number by size,
differences.

In the style of `plots.py`: later runs are darker, and dashes and names at the ends tell apart
what grey does not.

Dims: S seeds, N steps
"""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from switchx.analysis.plots import COLOURS, STYLE, name_ends

DASHES = ("-", (0, (5, 1.5)), (0, (2, 1)), (0, (6, 1.5, 1, 1.5)))


def gains_figure(
    curves: Mapping[str, Sequence[Mapping[int, float]]],
    unit: str,
    step_times: Mapping[str, float] | None = None,
) -> Figure:
    """Plots how far runs are ahead of the first one, by step: the mean over seeds, and a band
    from the least to the most. A second panel has the same by time, where times are known.

    Later names are darker; dashes, and names at the ends, tell apart what grey does not.

    Args:
        curves: for each name, one `{step: number}` for each seed, with the same steps; seeds
            are paired.
        unit: unit of the numbers.
        step_times: time of a step over the first run's, by name.
    """
    with matplotlib.rc_context(STYLE):
        panels = 1 if step_times is None else 2
        figure = Figure(figsize=(6.4 if panels == 1 else 11.0, 3.8))
        axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    baseline, *names = curves
    for axis, times in zip(axes, (dict.fromkeys(curves, 1.0), step_times), strict=False):
        shown, ends = [], []
        for i, name in enumerate(names):
            steps_N, gains_SN = _gains(curves[name], curves[baseline], times[name])
            shade = COLOURS(0.35 + 0.65 * (i + 1) / len(names))
            mean_N = gains_SN.mean(0)
            axis.plot(steps_N, mean_N, color=shade, linestyle=DASHES[i % len(DASHES)])
            low_N, high_N = gains_SN.min(0), gains_SN.max(0)
            axis.fill_between(steps_N, low_N, high_N, color=shade, alpha=0.15, linewidth=0)
            shown.append(mean_N[len(steps_N) // 4 :])
            ends.append((float(mean_N[-1]), name, shade))
        axis.set_xlim(0, max(curves[baseline][0]))
        axis.axhline(0, color="0.4", linewidth=1)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        if axis is axes[0]:
            # The first quarter of training would leave no room for what tells runs apart.
            every = np.concatenate([*shown, [0.0]])
            low, high = float(every.min()), float(every.max())
            room = 0.06 * (high - low) or 1.0
            axis.set_ylim(low - room, high + room)
            axis.set_ylabel(f"gain over {baseline}, {unit}")
            axis.set_xlabel("step")
        else:
            axis.set_xlabel(f"time, in steps of {baseline}")
        low, high = axis.get_ylim()
        name_ends(axis, [end for end in ends if low < end[0] < high], least_gap=0.055)
    return figure


def _gains(
    mine: Sequence[Mapping[int, float]], others: Sequence[Mapping[int, float]], time: float
) -> tuple[np.ndarray, np.ndarray]:
    """Steps of the others (N), and how far a run whose steps take `time` of theirs is ahead
    when they have done so many (S, N)."""
    steps_N = np.array(sorted(others[0]))
    steps_N = steps_N[steps_N <= time * max(mine[0])]
    gains = []
    for my, other in zip(mine, others, strict=True):
        my_steps = sorted(my)
        mine_N = np.interp(steps_N / time, my_steps, [my[step] for step in my_steps])
        gains.append(mine_N - np.array([other[step] for step in steps_N]))
    return steps_N, np.array(gains)


def sizes_figure(
    values: Mapping[int, Sequence[float]], levels: Mapping[str, float], x: str, y: str
) -> Figure:
    """Plots a number by size, on a logarithmic axis: a dot for each seed, a line through means.

    Args:
        values: for each size, one number for each seed.
        levels: heights of horizontal lines, by name, for runs that have no such size.
        x, y: labels of the axes.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.8))
        axis = figure.subplots()
    dark, light = COLOURS(0.9), COLOURS(0.5)
    for size, seeds in values.items():
        axis.plot([size] * len(seeds), seeds, "o", color=light, markersize=4)
    axis.plot(list(values), [np.mean(seeds) for seeds in values.values()], "-", color=dark)
    for i, (name, level) in enumerate(levels.items()):
        axis.axhline(level, color="0.4", linestyle=DASHES[1 + i % 3], linewidth=1)
        axis.annotate(
            name,
            (1.0, level),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="0.3",
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(values), [str(size) for size in values])
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    return figure


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
        size, loss, after = point["MiB"], point["loss"], point["loss after"]
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


def panels_figure(
    rows: Sequence[Sequence[tuple[str, str, Mapping[str, np.ndarray]]]],
) -> Figure:
    """Lines with bands in rows of panels, those of a name alike in all; the names below.

    The vertical axis leaves out what only the first quarter of a line reaches.

    Args:
        rows: for each panel, the labels of its axes, and by name `[4, N]`: x, line, lower and
            upper end of the band.
    """
    panels = [panel for row in rows for panel in row]
    names = list(dict.fromkeys(name for *_, bands in panels for name in bands))
    with matplotlib.rc_context(STYLE):
        height = 0.4 + 2.3 * len(rows) + 0.07 * len(names)
        figure = Figure(figsize=(11.0, height))
        grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    handles = {}
    for axis, (x, y, bands) in zip(grid.flat, panels, strict=True):
        for name, (x_N, line_N, low_N, high_N) in bands.items():
            i = names.index(name)
            shade = COLOURS(0.35 + 0.65 * (i + 1) / len(names))
            (handles[name],) = axis.plot(x_N, line_N, color=shade, linestyle=DASHES[i % 4])
            axis.fill_between(x_N, low_N, high_N, color=shade, alpha=0.15, linewidth=0)
        shown = np.concatenate([line_N[len(line_N) // 4 :] for _, line_N, *_ in bands.values()])
        if len(shown := shown[np.isfinite(shown)]):
            room = 0.15 * np.ptp(shown) or 0.1
            axis.set_ylim(shown.min() - room, shown.max() + room)
        axis.set(xlabel=x, ylabel=y)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=4))
    figure.legend(handles.values(), handles, loc="outside lower left", frameon=False, ncols=3)
    return figure
