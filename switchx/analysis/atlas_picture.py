# SPDX-License-Identifier: Apache-2.0
"""The picture of an atlas: drops by capacity factor, beside the loss without single experts.

Later layers and labels are darker, and labels have their own markers, so that it can be
printed in grey.
Dims: N Switch layers, K labels, X removed experts, M measured capacity factors
"""

import math

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from switchx.analysis.atlas import Atlas, KnockOuts
from switchx.analysis.drops import FEW, DropsByFactor
from switchx.analysis.plots import COLOURS, PERCENT, STYLE, plain

MARKERS = "os^DvPX*"
FEW_EXPERTS, FEW_LABELS = 6, len(MARKERS)


def picture(atlas: Atlas) -> Figure:
    """Draws drops, if there are some to predict, and knock-outs, if there are any."""
    has_drops = not isinstance(atlas.drops, str)
    panels = max(has_drops + (atlas.knock_outs is not None), 1)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.3 * panels, 3.5))
        axes = figure.subplots(1, panels, squeeze=False)[0]
    if has_drops:
        _draw_drops(axes[0], atlas.drops)
    if atlas.knock_outs is not None:
        _draw_changes(axes[-1], atlas.knock_outs, atlas.labels.names)
    return figure


def _draw_drops(axis, drops: DropsByFactor) -> None:
    axis.axvspan(drops.least, drops.dropless, color="0.9", linewidth=0)
    if drops.own is not None:
        name = f"evaluation: {drops.own:g}"
        axis.axvline(drops.own, color="0.4", linestyle=":", linewidth=1, label=name)
    N = len(drops.layers)
    for n, layer in enumerate(drops.layers):
        shade = COLOURS(0.4 + 0.6 * (n + 1) / N)
        # With more than a few layers, shades show the order; first and last name its direction.
        name = layer if N <= 6 or n in (0, N - 1) else None
        axis.plot(drops.factor_P, drops.share_PN[:, n], color=shade, label=name, zorder=2)
        share_M = [errors[layer].measured_share for errors in drops.errors.values()]
        axis.scatter(list(drops.errors), share_M, color=shade, s=16, zorder=3, clip_on=False)
    top = max(drops.share_PN.max(), 0.01)
    most = max(*drops.errors, drops.least, drops.own or 0)
    right = min(drops.factor_P[-1], 3 * most)  # a hot expert would leave no room for the rest
    axis.set_xlim(drops.factor_P[0], right)
    axis.set_ylim(0, 1.05 * top)
    axis.yaxis.set_major_formatter(PERCENT)
    axis.set_xlabel("capacity factor")
    axis.set_title("dropped choices: predicted (lines), measured (dots)", loc="left")
    text = (
        f"{FEW:.0%} dropped: {drops.least:.3g}\nnone: {drops.dropless:.3g}\n"
        f"{drops.saved:.0%} of its slots\nsaved, {drops.saved_bytes:,.0f} bytes\n"
        "a token and layer"
    )
    middle = (drops.least + min(drops.dropless, right)) / 2
    axis.text(middle, 0.4 * top, text, ha="center", va="center", fontsize=8)
    axis.legend(frameon=False, fontsize=8, loc="upper right")


def _draw_changes(axis, removed: KnockOuts, labels) -> None:
    shown = np.sort(np.argsort(-removed.tokens_K, kind="stable")[:FEW_LABELS])
    size_XK = np.abs(removed.change_XK[:, shown])
    most = np.argsort(-size_XK.max(axis=1), kind="stable")[:FEW_EXPERTS]
    handles = []
    for i, k in enumerate(shown):
        change_X, low_X, high_X = (
            each_XK[most, k] for each_XK in (removed.change_XK, removed.low_XK, removed.high_XK)
        )
        drawn = axis.errorbar(
            change_X,
            np.arange(len(most)) + 0.6 * ((i + 0.5) / len(shown) - 0.5),
            xerr=np.maximum([change_X - low_X, high_X - change_X], 0),
            fmt=MARKERS[i],
            color=COLOURS(0.4 + 0.6 * (i + 1) / len(shown)),
            markersize=4,
            linewidth=1,
        )
        handles.append(drawn)
    largest = np.nanmax(size_XK, initial=1e-9)  # a label may have no text with rows
    axis.set_xscale("symlog", linthresh=10 ** math.floor(math.log10(largest) - 1))
    axis.axvline(0, color="0.4", linewidth=1)
    names = (f"{layer}: {e}" for layer, e in (removed.experts[x] for x in most))
    axis.set_yticks(range(len(most)), names)
    axis.invert_yaxis()
    axis.set_xlabel("change of loss, nats a target token")
    axis.set_title("without one expert, by label (95% intervals)", loc="left")
    names = [plain(labels[k]) for k in shown]  # given here: labels may begin with "_"
    # The smallest changes are at the bottom.
    axis.legend(handles, names, frameon=False, fontsize=8, loc="lower right")
