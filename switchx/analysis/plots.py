# SPDX-License-Identifier: Apache-2.0
"""Plots of routing and of pipeline schedules, each a matplotlib Figure made from arrays.

Dark means much in every map, early layers are light and late ones dark in every graph, so
that a page printed in grey says the same. A schedule is drawn as in Narayanan et al. 2021
(arXiv:2104.04473), Figures 3 and 4: stages by time, ticks as wide as their work, forward
light, backward dark, later chunks of an interleaved schedule hatched.

Dims: N Switch layers, E experts; of a schedule T ticks, P stages, S lanes (its stacks)
"""

import dataclasses
import math
import textwrap
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from switchx.pipeline.schedule import BACKWARD_WORK, FORWARD_WORK, Schedule

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "0.4",
    "xtick.color": "0.3",
    "ytick.color": "0.3",
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "switchx",
    # Text stays text: it can be found and copied, and the page stays small.
    "svg.fonttype": "none",
}
# Grey where there is nothing to show.
COLOURS = matplotlib.colormaps["Blues"].with_extremes(bad="0.85")
PERCENT = PercentFormatter(1.0, decimals=0)
MAX_COLUMNS = 4
# Cells of a map show their number if it has no more rows than this.
MAX_NUMBERED_ROWS = 12
# Loads from here on have the same colour.
LOAD_LIMIT = 4.0


def plain(text: str) -> str:
    """A text that matplotlib does not take for mathematics, whatever dollar signs it has."""
    return text.replace("$", r"\$")


def load_figure(steps: np.ndarray, even_load: np.ndarray, layers: Sequence[str]) -> Figure:
    """Plots load by step and expert, one map per layer.

    Args:
        even_load: `[steps, N, E]`, 1 for an even share.
    """
    highest = float(np.max(even_load))
    limit = float(np.clip(highest, 2.0, LOAD_LIMIT))
    figure, axes = _panels(len(layers), height=2.2)
    for n, (axis, layer) in enumerate(zip(axes, layers, strict=True)):
        edges = _edges(steps)
        experts = np.arange(even_load.shape[-1] + 1) - 0.5
        mesh = axis.pcolormesh(
            edges, experts, even_load[:, n].T, cmap=COLOURS, vmin=0, vmax=limit, rasterized=True
        )
        place = axis.get_subplotspec()
        x, y = "step" * place.is_last_row(), "expert" * place.is_first_col()
        _map_axes(axis, layer, x, y)
        axis.invert_yaxis()  # expert 0 on top, as in the other maps
        axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    extend = "max" if highest > limit else "neither"
    _colour_bar(figure, mesh, axes, "load (1 = even share)", extend=extend)
    return figure


@dataclasses.dataclass(frozen=True)
class Course:
    """A number of every layer by step: its label, `[steps, N]`, the level of a dotted line,
    and whether the axis begins at 0."""

    label: str
    values: np.ndarray
    level: float | None = None
    is_from_zero: bool = True


def course_figure(
    steps: np.ndarray,
    rows: Sequence[Course],
    layers: Sequence[str],
    markers: bool = False,
) -> Figure:
    """Numbers by step, one graph per layer: one row of axes per number, a column per stack.

    Args:
        markers: whether every step has a marker, for few steps; a single step always has one.
    """
    stacks = list(dict.fromkeys(layer.split()[0] for layer in layers))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.2 + 4.2 * len(stacks), 0.5 + 1.7 * len(rows)))
        grid = figure.subplots(len(rows), len(stacks), sharex=True, sharey="row", squeeze=False)
    for axes, course in zip(grid, rows, strict=True):
        for axis, stack in zip(axes, stacks, strict=True):
            mine = [n for n, layer in enumerate(layers) if layer.split()[0] == stack]
            ends = []
            for i, n in enumerate(mine):
                shade = COLOURS(0.4 + 0.6 * (i + 1) / len(mine))
                y = course.values[:, n]
                marker = "o" if markers or np.isfinite(y).sum() == 1 else None
                axis.plot(steps, y, color=shade, marker=marker, markersize=3, clip_on=False)
                ends.append((float(y[-1]), layers[n].split()[1], shade))
            if course.level is not None:
                axis.axhline(course.level, color="0.4", linestyle=":", linewidth=1)
            axis.set_ylim(*_limits(course))
            if len(steps) > 1:
                axis.set_xlim(steps[0], steps[-1])
            _label_ends(axis, ends)
        axes[0].set_ylabel(course.label)
    for axis, stack in zip(grid[0], stacks, strict=True):
        axis.set_title(f"{stack}, by block", loc="left")
    for axis in grid[-1]:
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    return figure


def transition_figure(shares: Sequence[np.ndarray], pairs: Sequence[tuple[str, str]]) -> Figure:
    """Plots where an expert's tokens go in the next Switch layer, one map for each layer pair.

    Args:
        shares: `[E, E]` each, rows adding up to 1, NaN for an expert without tokens.
        pairs: names of the two layers; for co-activation, twice the same one.
    """
    figure, axes = _panels(len(shares), height=2.9, max_columns=3)
    limit = _limit(shares)
    for axis, share_EE, (layer, after) in zip(axes, shares, pairs, strict=True):
        image = _map(axis, share_EE, limit, None, f"expert in {after}", f"expert in {layer}")
        _integer_ticks(axis)
    _colour_bar(figure, image, axes, "share of the row's tokens", format=PERCENT)
    return figure


def class_figure(
    shares: Sequence[np.ndarray], classes: Sequence[Sequence[str]], layers: Sequence[str]
) -> Figure:
    """Plots the experts that the tokens of each class go to, one map for each layer.

    Args:
        shares: `[E, classes]` each, columns adding up to the choices of a token; the last
            column is for all tokens.
        classes: names of the columns of each map.
    """
    label = "share of the class's tokens"
    limit = _limit(shares)
    return _class_maps(shares, classes, layers, limit, "expert", label, format=PERCENT)


def knock_out_figure(
    changes: Sequence[np.ndarray], labels: Sequence[str], layers: Sequence[str]
) -> Figure:
    """Plots the change of loss of each label without each expert, one map for each layer.

    Args:
        changes: `[E, K]` each, in nats per token, NaN for an expert that was not removed; the
            last column is for all labels.
    """
    names, limit = [labels] * len(layers), _limit(changes, least=0.0) or 1.0
    bar = "change, nats (in cells 0.01)"
    return _class_maps(changes, names, layers, limit, "removed expert", bar)


def _class_maps(values, classes, layers, limit: float, y: str, bar: str, **options) -> Figure:
    """Maps `[E, classes]` whose last column, after a gap, is for all classes."""
    figure, axes = _panels(len(values), height=3.2, max_columns=2)
    for axis, each, names, layer in zip(axes, values, classes, layers, strict=True):
        image = _map(axis, each, limit, layer, None, y)
        axis.axvline(len(names) - 1.5, color="white", linewidth=5)
        axis.set_xticks(range(len(names)), map(plain, names), rotation=35, ha="right")
        axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    _colour_bar(figure, image, axes, bar, **options)
    return figure


def similarity_figure(
    similarities: Sequence[np.ndarray], names: Sequence[Sequence[str]], label: str
) -> Figure:
    """Plots how similar layers are, one map for each stack.

    Args:
        names: for each map, the name of the stack, then the names of its layers.
        label: label of the colour bar.
    """
    figure, axes = _panels(len(similarities), height=2.4)
    for axis, similarity, (title, *rows) in zip(axes, similarities, names, strict=True):
        image = _map(axis, similarity, 1.0, title, None, None)
        if len(rows) <= MAX_NUMBERED_ROWS:
            axis.set_xticks(range(len(rows)), rows, rotation=35, ha="right")
            axis.set_yticks(range(len(rows)), rows)
        else:
            _integer_ticks(axis)
    _colour_bar(figure, image, axes, label, format=PERCENT)
    return figure


def _panels(count: int, height: float, max_columns: int = MAX_COLUMNS):
    """A figure and `count` axes in as few, even rows as `max_columns` allows."""
    rows = math.ceil(count / max_columns)
    columns = math.ceil(count / rows)
    # One panel does not fill the page.
    width = 10.5 * ((0.35 + 0.65 * columns / max_columns) if rows == 1 else 1.0)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height * rows))
        grid = figure.subplots(rows, columns, squeeze=False)
    for axis in grid.flat[count:]:
        axis.remove()
    return figure, list(grid.flat[:count])


def _limit(maps: Sequence[np.ndarray], least: float = 0.2) -> float:
    """The darkest value: the largest there is, so that many experts do not all look pale."""
    return max(least, *(float(np.max(each[np.isfinite(each)], initial=0)) for each in maps))


def _map(axis, values: np.ndarray, limit: float, title: str | None, x, y):
    _map_axes(axis, title, x, y)
    image = axis.imshow(
        values, cmap=COLOURS, vmin=0, vmax=limit, aspect="auto", interpolation="nearest"
    )
    if len(values) <= MAX_NUMBERED_ROWS:
        for (row, column), value in np.ndenumerate(values):
            if not math.isnan(value):
                colour = "white" if value > 0.6 * limit else "0.15"
                axis.text(
                    column,
                    row,
                    f"{round(100 * value)}",
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color=colour,
                )
    return image


def _map_axes(axis, title: str | None, x: str | None, y: str | None) -> None:
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    axis.set_title(title or "", loc="left")
    axis.set_xlabel(x or "")
    axis.set_ylabel(y or "")


def _integer_ticks(axis) -> None:
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_locator(MaxNLocator(integer=True, nbins=10))


def _colour_bar(figure: Figure, image, axes, label: str, **options) -> None:
    """Draws a colour bar beside the first maps, as long as one or two of them."""
    shrink = min(1.0, 3.0 / figure.get_figheight())
    bar = figure.colorbar(
        image, ax=axes, shrink=shrink, anchor=(0.0, 1.0), aspect=15, pad=0.02, **options
    )
    bar.set_label(label)
    bar.outline.set_visible(False)


def _edges(steps: np.ndarray) -> np.ndarray:
    """Where the column of each logged step begins and ends: it covers the steps before it."""
    if len(steps) == 1:
        return np.array([0, steps[0]], float)
    return np.r_[max(0, 2 * steps[0] - steps[1]), steps]


def _limits(course: Course) -> tuple[float, float]:
    """The limits of the vertical axis: all values, with some room around them."""
    everything = course.values[np.isfinite(course.values)]
    everything = np.append(everything, [] if course.level is None else course.level)
    low = 0.0 if course.is_from_zero else float(np.min(everything, initial=np.inf))
    high = float(np.max(everything, initial=low))
    room = 0.08 * (high - low) or 1.0
    return low - room * (not course.is_from_zero), high + room


def _label_ends(axis, ends) -> None:
    """Writes block numbers after the ends of the graphs."""
    if len(ends) > 4:  # shades show the order; first and last its direction
        ends = [ends[0], ends[-1]]
    _name_ends(axis, ends, least_gap=0.13)


def _name_ends(axis, ends, least_gap: float) -> None:
    """Writes names after the ends of graphs, moved apart where they would overlap.

    Args:
        ends: `(last value, name, colour)` of each graph.
        least_gap: least distance between two names, as a share of the axis's height.
    """
    low, high = axis.get_ylim()
    gap = least_gap * (high - low)
    ends = sorted(ends, key=lambda end: end[0])
    places = [value for value, _, _ in ends]
    for _ in range(50):
        for i in range(len(places) - 1):
            missing = gap - (places[i + 1] - places[i])
            if missing > 0:
                places[i] -= missing / 2
                places[i + 1] += missing / 2
    lift = max(0.0, low - places[0])  # the step's numbers are below
    for place, (_, name, shade) in zip(places, ends, strict=True):
        axis.annotate(
            name,
            (1.0, place + lift),
            xycoords=("axes fraction", "data"),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=shade,
            annotation_clip=False,
        )


def write_svg(figure: Figure, file) -> None:
    """Writes a figure as SVG, the same bytes for the same figure."""
    with matplotlib.rc_context(STYLE):
        # The layout shifts a little with every drawing, so it is made once.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        figure.savefig(file, format="svg", dpi=150, metadata={"Date": None})


FORMATS = (".png", ".svg", ".pdf")
LANE_COLOURS = (("#9ecae1", "#3182bd"), ("#fdd0a2", "#e6550d"))
# Beyond this many boxes numbers would not be legible.
MAX_NUMBERED = 1500
HATCHES = ("", "///", "...", "xxx", "\\\\\\")


def schedule_figure(schedule: Schedule, title: str) -> Figure:
    """Draws boxes of microbatches; an encoder's ops blue, a decoder's (and others') orange."""
    boxes, end = schedule_boxes(schedule)
    with matplotlib.rc_context({"font.size": 8, "hatch.linewidth": 0.4}):
        size = (min(24.0, 3 + 0.16 * end), 1.2 + 0.45 * schedule.num_stages)
        figure = Figure(figsize=size, layout="constrained")
        axis = figure.subplots()
        for stage, begin, width, lane, is_backward, m, chunk in boxes:
            colour = LANE_COLOURS[lane if schedule.num_lanes > 1 else 1][int(is_backward)]
            axis.broken_barh(
                [(begin, width)],
                (stage - 0.45, 0.9),
                facecolor=colour,
                edgecolor="white",
                linewidth=0.4,
                hatch=HATCHES[chunk % len(HATCHES)],
            )
            if len(boxes) <= MAX_NUMBERED:
                ink = "white" if is_backward else "black"
                place = (begin + width / 2, stage)
                axis.annotate(str(m), place, ha="center", va="center", color=ink, fontsize=6)
        axis.set_ylim(schedule.num_stages - 0.5, -0.5)
        axis.set_xlim(0, end)
        axis.set_yticks(range(schedule.num_stages), labels=range(schedule.num_stages))
        axis.set_ylabel("stage")
        axis.set_xlabel("time, in forward passes of one stage's blocks of a stack")
        axis.set_title(textwrap.fill(title, int(16 * size[0])), loc="left")
    return figure


def schedule_boxes(schedule: Schedule) -> tuple[list[tuple], float]:
    """Every op as (stage, begin, width, lane, is backward, microbatch, chunk); and the end.

    Within a tick, each kind of op that any stage has gets its time, one after the other.
    """
    boxes, now = [], 0.0
    for tick in range(schedule.num_ticks):
        for is_backward, ops in enumerate((schedule.forward, schedule.backward)):
            width = (BACKWARD_WORK if is_backward else FORWARD_WORK) / schedule.num_chunks
            for lane in range(schedule.num_lanes):
                active_P = np.flatnonzero(ops.is_active_TPS[tick, :, lane])
                for stage in active_P.tolist():
                    op = (tick, stage, lane)
                    which = int(ops.microbatch_TPS[op]), int(ops.chunk_TPS[op])
                    boxes.append((stage, now, width, lane, bool(is_backward), *which))
                now += width * bool(active_P.size)
    return boxes, now
