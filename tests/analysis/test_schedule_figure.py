# SPDX-License-Identifier: Apache-2.0
"""The picture of a schedule: every op once, no two of a stage at one time."""

import pytest

from switchx.analysis.plots import schedule_boxes, schedule_figure
from switchx.partitioning.schedule import ScheduleSpec


@pytest.mark.parametrize(
    ("spec", "lanes"), [(ScheduleSpec(), 1), (ScheduleSpec("interleaved", 2), 2)]
)
def test_boxes_are_the_ops_in_their_time(spec, lanes):
    schedule = spec.build(4, 8, lanes)
    boxes, end = schedule_boxes(schedule)
    assert end == pytest.approx(schedule.time())
    assert len(boxes) == len(set(boxes)) == 2 * 4 * 8 * lanes * spec.num_chunks
    for stage in range(4):
        mine = sorted(box[1:3] for box in boxes if box[0] == stage)
        for (begin, width), (after, _) in zip(mine, mine[1:], strict=False):
            assert begin + width <= after + 1e-9


def test_figure_has_a_row_a_stage_and_a_number_a_box(tmp_path):
    schedule = ScheduleSpec().build(3, 4)
    figure = schedule_figure(schedule, "title")
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["0", "1", "2"]
    assert len(axis.texts) == len(axis.collections) == 2 * 3 * 4
    figure.savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
