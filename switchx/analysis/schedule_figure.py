# SPDX-License-Identifier: Apache-2.0
"""A picture of a pipeline schedule: stages by time, ticks as wide as their work.

As in Narayanan et al. 2021 (arXiv:2104.04473), Figures 3 and 4. Forward is light, backward
dark; later chunks of an interleaved schedule are hatched. Dims: T P S
"""

import textwrap

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from switchx.partitioning.schedule import BACKWARD_WORK, FORWARD_WORK, Schedule

FORMATS = (".png", ".svg", ".pdf")
COLOURS = (("#9ecae1", "#3182bd"), ("#fdd0a2", "#e6550d"))
# Beyond this many boxes numbers would not be legible.
MAX_NUMBERED = 1500
HATCHES = ("", "///", "...", "xxx", "\\\\\\")


def schedule_figure(schedule: Schedule, title: str) -> Figure:
    """Boxes of microbatches; an encoder's ops blue, a decoder's (and all others') orange."""
    boxes, end = schedule_boxes(schedule)
    with matplotlib.rc_context({"font.size": 8, "hatch.linewidth": 0.4}):
        size = (min(24.0, 3 + 0.16 * end), 1.2 + 0.45 * schedule.num_stages)
        figure = Figure(figsize=size, layout="constrained")
        axis = figure.subplots()
        for stage, begin, width, lane, is_backward, m, chunk in boxes:
            colour = COLOURS[lane if schedule.num_lanes > 1 else 1][int(is_backward)]
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

    In a tick every kind of op that any stage has gets its time, one after the other.
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
