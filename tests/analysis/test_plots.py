# SPDX-License-Identifier: Apache-2.0
"""Plots show the numbers they are given, with axes named; a schedule has a box an op."""

import io
import types

import numpy as np
import pytest

from switchx.analysis import plots
from switchx.analysis.atlas import Labels, knock_outs
from switchx.analysis.atlas_picture import picture
from switchx.analysis.comparison_plots import panels_figure
from switchx.analysis.plots import schedule_boxes, schedule_figure
from switchx.pipeline.schedule import ScheduleSpec

LAYERS = ["encoder 1", "encoder 3", "decoder 1"]
STEPS = np.array([10, 20, 30])


def drawn(figure) -> bytes:
    content = io.BytesIO()
    plots.write_svg(figure, content)
    return content.getvalue()


def panels(figure) -> list:
    """The axes without the colour bar."""
    return [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]


def test_load_is_a_map_of_steps_and_experts_for_each_layer():
    even = np.random.default_rng(0).uniform(0, 3, (3, 3, 5))
    figure = plots.load_figure(STEPS, even, LAYERS)
    assert [axis.get_title("left") for axis in panels(figure)] == LAYERS
    for n, axis in enumerate(panels(figure)):
        (mesh,) = axis.collections
        np.testing.assert_allclose(mesh.get_array().reshape(5, 3), even[:, n].T)
        # A column ends at its step, and begins where the one before ended.
        np.testing.assert_allclose(mesh.get_coordinates()[0, :, 0], [0, 10, 20, 30])
    assert panels(figure)[0].get_ylabel() == "expert"
    assert panels(figure)[0].get_xlabel() == "step"
    assert b"load (1 = even share)" in drawn(figure)


def test_courses_are_lines_by_layer_and_a_dotted_level():
    dropped = np.random.default_rng(0).uniform(0, 1, (3, 3))
    rows = [plots.Course("dropped", dropped, 0.125), plots.Course("dead", dropped * 0)]
    figure = plots.course_figure(STEPS, rows, LAYERS)
    encoder, decoder, dead, _ = figure.axes
    first, second, level = encoder.lines
    np.testing.assert_array_equal(first.get_ydata(), dropped[:, 0])
    np.testing.assert_array_equal(second.get_ydata(), dropped[:, 1])
    np.testing.assert_array_equal(decoder.lines[0].get_ydata(), dropped[:, 2])
    assert level.get_ydata() == [0.125, 0.125] and level.get_linestyle() == ":"
    assert encoder.get_ylabel() == "dropped" and dead.get_xlabel() == "step"
    assert encoder.get_ylim()[0] == 0 and dead.get_ylim()[0] == 0 < dead.get_ylim()[1]
    # Named at their ends, by block.
    assert [text.get_text() for text in decoder.texts] == ["1"]
    assert sorted(text.get_text() for text in encoder.texts) == ["1", "3"]
    drawn(figure)


def test_later_layers_are_darker():
    layers = [f"decoder {n}" for n in range(6)]
    rows = [plots.Course("gate", np.ones((3, 6)), is_from_zero=False)]
    figure = plots.course_figure(STEPS, rows, layers, markers=True)
    grey = [np.dot(line.get_color()[:3], [0.3, 0.6, 0.1]) for line in figure.axes[0].lines]
    assert grey == sorted(grey, reverse=True) and grey[0] - grey[-1] > 0.3
    # Of many, the first and the last are named.
    assert [text.get_text() for text in figure.axes[0].texts] == ["0", "5"]
    drawn(figure)


def test_names_at_the_ends_and_single_steps_can_be_drawn():
    rows = [plots.Course("gate", np.array([[0.0] * 4] * 2))]
    figure = plots.course_figure(STEPS[:2], rows, [f"decoder {n}" for n in range(4)])
    axis = figure.axes[0]
    low, high = axis.get_ylim()
    places = sorted(text.xy[1] for text in axis.texts)
    assert np.all(np.diff(places) > 0.12 * (high - low)) and places[0] >= low
    drawn(plots.load_figure(np.array([5]), np.ones((1, 1, 2)), ["decoder 0"]))
    rows = [plots.Course("gate", np.ones((1, 1)))]
    figure = plots.course_figure(np.array([5]), rows, ["decoder 0"])
    assert figure.axes[0].lines[0].get_marker() == "o" and drawn(figure)
    assert axis.lines[0].get_marker() == "None"
    bands = {name: np.array([[5.0], *[[0.5]] * 3]) for name in ("_a", "$b$ and $c$")}
    figure = panels_figure([[("step", "loss", bands)]])
    assert [line.get_marker() for line in figure.axes[0].lines] == ["o", "o"]
    assert all(name in drawn(figure).decode() for name in bands)
    figure = plots.similarity_figure(
        [np.eye(20)], [("decoder", *map(str, range(20)))], "shared information"
    )
    assert b"shared information" in drawn(figure)


def test_maps_write_few_numbers_and_are_darkest_at_a_large_share():
    share = np.array([[0.25, 0.75], [np.nan, np.nan]])
    figure = plots.transition_figure([share], [("encoder 1", "encoder 3")])
    (axis,) = panels(figure)
    assert [text.get_text() for text in axis.texts] == ["25", "75"]
    assert axis.get_ylabel() == "expert in encoder 1"
    assert axis.get_xlabel() == "expert in encoder 3"
    many = plots.transition_figure([np.full((32, 32), 1 / 32)], [("a 1", "a 3")])
    assert len(panels(many)[0].texts) == 0
    assert b"share of the row" in drawn(figure)
    pairs = [("a 1", "a 3")] * 2
    for top, limit in ((0.05, 0.2), (0.6, 0.6)):
        shares = [np.full((2, 2), 0.01), np.array([[top, 0.0], [np.nan, np.nan]])]
        figure = plots.transition_figure(shares, pairs)
        assert [axis.images[0].get_clim() for axis in panels(figure)] == [(0, limit)] * 2


def test_classes_name_their_columns(tmp_path):
    names = [[r"a $\frac$", "all (9)"]]
    plots.write_svg(plots.class_figure([np.eye(2)], names, ["encoder 1"]), tmp_path / "p.svg")
    assert names[0][0] in (tmp_path / "p.svg").read_text()
    figure = plots.class_figure([np.eye(2)], [["digits (3)", "all (9)"]], ["encoder 1"])
    (axis,) = panels(figure)
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["digits (3)", "all (9)"]
    assert axis.get_title("left") == "encoder 1" and axis.get_ylabel() == "expert"
    drawn(figure)


def test_the_picture_of_an_atlas_has_labels_of_all_kinds():
    names = ("plain", "_notes", "cost $5 to $10")
    labels = Labels(names, np.arange(18) // 6, np.arange(18))
    loss_R, *loss_XR = np.random.default_rng(0).random((3, 18))
    experts = [("encoder 1", 0), ("encoder 1", 1)]
    removed = knock_outs(experts, loss_R, np.array(loss_XR), np.full(18, 5.0), labels)
    atlas = types.SimpleNamespace(drops="none", knock_outs=removed, labels=labels)
    text = drawn(picture(atlas)).decode()
    assert all(name in text for name in names)


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_every_layer_has_its_panel(count):
    layers = [f"decoder {n}" for n in range(count)]
    figure = plots.load_figure(STEPS, np.ones((3, count, 4)), layers)
    assert [axis.get_title("left") for axis in panels(figure)] == layers


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
