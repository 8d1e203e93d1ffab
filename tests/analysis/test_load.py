# SPDX-License-Identifier: Apache-2.0
"""Load by hand: shares, even shares, dead experts; logs that are torn or of no use."""

import numpy as np
import pytest

from switchx.analysis.routing import dead_experts, even_shares, read_history
from tests.analysis.recorded import routing_line, write_lines
from tests.data.refusals import refused


def test_history_is_by_step_and_layer(tmp_path):
    path = tmp_path / "metrics.jsonl"
    loads = [[[0.25, 0.75], [1.0, 0.0]], [[0.5, 0.5], [0.9, 0.1]]]
    write_lines(path, [routing_line(5, loads[0]), routing_line(10, loads[1])])
    history = read_history(path)
    np.testing.assert_array_equal(history.steps, [5, 10])
    np.testing.assert_allclose(history.load, loads)
    for name in ("dropped", "entropy", "gate"):
        np.testing.assert_allclose(getattr(history, name), [[0.05, 0.05], [0.1, 0.1]])
    assert history.num_experts == 2


def test_loads_of_several_choices_are_shares_of_the_choices(tmp_path):
    path = tmp_path / "metrics.jsonl"
    # Two choices a token: the log counts 2 a token.
    write_lines(path, [routing_line(1, [[1.0, 0.6, 0.4]])])
    np.testing.assert_allclose(read_history(path).load, [[[0.5, 0.3, 0.2]]])


def test_lines_of_skipped_steps_and_the_line_being_written_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [{"step": 1, "loss": None}, routing_line(2, [[0.5, 0.5]])])
    path.write_text(path.read_text() + '{"step": 3, "rou')
    np.testing.assert_array_equal(read_history(path).steps, [2])


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1\n{"step": 2}\n')
    with refused(f"{path}: line 1 is damaged (<any>); remove that line"):
        read_history(path)


def test_logs_without_routing_say_what_to_do(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with refused(
        f"{path} cannot be read (No such file or directory); give the model_dir of a run that "
        "has logged a step"
    ):
        read_history(path)
    path.write_text("")
    with refused(f"{path} has no line yet; train until a step is logged (LOG_EVERY)"):
        read_history(path)
    write_lines(path, [{"step": 1, "loss": 2.0}])
    with refused(
        f"{path} has no routing, the model is dense or every step was skipped; give the folder "
        "of a run with Switch layers"
    ):
        read_history(path)


def test_even_shares_by_hand():
    got = even_shares(np.array([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]]))
    np.testing.assert_allclose(got, [[1, 1, 1, 1], [2, 2, 0, 0]])


@pytest.mark.parametrize(("share", "is_dead"), [(0.0, True), (0.0024, True), (0.0026, False)])
def test_an_expert_is_dead_below_a_hundredth_of_its_even_share(share, is_dead):
    rest = (1 - share) / 3
    # An even share of four experts is 0.25, a hundredth of it 0.0025.
    got = dead_experts(np.array([share, rest, rest, rest]))
    assert got.tolist() == [is_dead, False, False, False]


def test_experts_of_a_layer_without_tokens_are_all_dead():
    assert dead_experts(np.zeros((1, 3))).all()
