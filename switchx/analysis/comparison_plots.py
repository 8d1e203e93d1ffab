# SPDX-License-Identifier: Apache-2.0
"""Plots of runs that are compared: lines with bands in panels.

In the style of `plots.py`: later runs are darker, and dashes and names at the ends distinguish
what shades of grey do not.

Dims: N points of a line
"""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from switchx.analysis.plots import COLOURS, STYLE, plain

DASHES = ("-", (0, (5, 1.5)), (0, (2, 1)), (0, (6, 1.5, 1, 1.5)))


def panels_figure(
    rows: Sequence[Sequence[tuple[str, str, Mapping[str, np.ndarray]]]],
) -> Figure:
    """Lines with bands in rows of panels, equal names alike in all panels; the names below.

    The vertical axis leaves out values that only the first quarter of a line reaches.

    Args:
        rows: for each panel, the labels of its axes, and by name `[4, N]`: x, line, and lower
            and upper end of the band.
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
            style = {"linestyle": DASHES[i % 4], "markersize": 3}
            style["marker"] = "o" if np.isfinite(line_N).sum() == 1 else None
            (handles[name],) = axis.plot(x_N, line_N, color=shade, **style)
            axis.fill_between(x_N, low_N, high_N, color=shade, alpha=0.15, linewidth=0)
        shown = np.concatenate([line_N[len(line_N) // 4 :] for _, line_N, *_ in bands.values()])
        if len(shown := shown[np.isfinite(shown)]):
            room = 0.15 * np.ptp(shown) or 0.1
            axis.set_ylim(shown.min() - room, shown.max() + room)
        axis.set(xlabel=x, ylabel=y)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=4))
    labels = map(plain, handles)
    options = {"loc": "outside lower left", "ncols": 3}
    figure.legend(handles.values(), labels, frameon=False, **options)
    return figure
