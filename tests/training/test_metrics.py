# SPDX-License-Identifier: Apache-2.0
"""Metrics: the paper's perplexity, shares of routing, and lines that survive a kill."""

import dataclasses
import json
import math
import struct

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from switchx.training.losses import TokenSums
from switchx.training.metrics import (
    MetricsLog,
    flat_scalars,
    routing_metrics,
    token_metrics,
)
from tests.training.routing_stats import two_layers


def sums(**values) -> TokenSums:
    return TokenSums(**{name: np.float32(value) for name, value in values.items()})


def events(folder) -> list[tuple[str, int, float]]:
    """(tag, step, value) of all scalars, read as the TFRecord format says."""
    found = []
    for path in sorted(folder.glob("events*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            data = data[12 + size + 4 :]
    return found


def test_negative_log_perplexity_is_in_nats_and_higher_is_better():
    # Fedus et al. 2021, section 2.3, footnote 4: base e. Table 1 has T5-Base at -1.731; a
    # model that is uniform over 32,128 ids is at -ln 32128 = -10.377.
    nll = 3 * math.log(32_128)
    got = token_metrics(sums(loss=40.0, nll=nll, correct=1, tokens=3))
    assert got["neg_log_perplexity"] == pytest.approx(-10.377, abs=1e-3)
    assert got["cross_entropy"] == pytest.approx(40 / 3)
    assert got["accuracy"] == pytest.approx(1 / 3)
    assert got["target_tokens"] == 3
    better = token_metrics(sums(loss=40.0, nll=nll / 2, correct=1, tokens=3))
    assert better["neg_log_perplexity"] > got["neg_log_perplexity"]


def test_a_batch_of_padding_alone_divides_by_no_zero():
    assert set(token_metrics(sums(loss=0, nll=0, correct=0, tokens=0)).values()) == {0.0}


def test_routing_is_reported_per_layer_in_shares_of_its_tokens():
    assert routing_metrics(two_layers()) == {
        "dropped_fraction": 3 / 12,
        "routing": {
            "load": [[0.75, 0.25], [0.25, 0.75]],
            "dropped": [0.25, 0.25],
            "entropy": [0.5, 0.25],
            "gate": [0.75, 0.75],
            "balance_loss": [1.5, 1.25],
            "router_z_loss": [0.5, 0.25],
        },
    }
    assert routing_metrics(None) == {}


def test_drops_are_a_share_of_choices_where_a_token_has_several():
    stats = two_layers()
    stats = dataclasses.replace(stats, load_E=2 * stats.load_E, dropped=4 * stats.dropped)
    assert routing_metrics(stats)["dropped_fraction"] == 12 / 24


def test_nested_metrics_are_named_by_layer_and_expert():
    assert flat_scalars(
        routing_metrics(two_layers()) | {"loss": 2, "tasks": {"a": {"b": 0.5}}}
    ) == {
        "dropped_fraction": 0.25,
        "routing/load/layer_0/expert_0": 0.75,
        "routing/load/layer_0/expert_1": 0.25,
        "routing/load/layer_1/expert_0": 0.25,
        "routing/load/layer_1/expert_1": 0.75,
        "routing/dropped/layer_0": 0.25,
        "routing/dropped/layer_1": 0.25,
        "routing/entropy/layer_0": 0.5,
        "routing/entropy/layer_1": 0.25,
        "routing/gate/layer_0": 0.75,
        "routing/gate/layer_1": 0.75,
        "routing/balance_loss/layer_0": 1.5,
        "routing/balance_loss/layer_1": 1.25,
        "routing/router_z_loss/layer_0": 0.5,
        "routing/router_z_loss/layer_1": 0.25,
        "loss": 2.0,
        "tasks/a/b": 0.5,
    }


def write(folder, last_step, steps) -> list[str]:
    log = MetricsLog(folder / "metrics.jsonl", folder / "tensorboard", last_step)
    for step in steps:
        log.write(step, {"loss": step / 2})
    log.close()
    return (folder / "metrics.jsonl").read_text().splitlines()


def test_a_line_and_a_scalar_a_step(tmp_path):
    lines = write(tmp_path, -1, [2, 4])
    assert [json.loads(line) for line in lines] == [
        {"step": 2, "loss": 1.0},
        {"step": 4, "loss": 2.0},
    ]
    assert events(tmp_path / "tensorboard") == [("loss", 2, 1.0), ("loss", 4, 2.0)]


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", -1)
    log.write(1, {"loss": 1.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1
    log.close()


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", -1)
    log.write(
        1, {"loss": math.nan, "routing": {"load": [[math.inf, 0.5]]}, "grad_norm": -math.inf}
    )
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "routing": {"load": [[None, 0.5]]},
        "grad_norm": None,
    }
    values = {tag: value for tag, _, value in events(tmp_path / "tensorboard")}
    assert caplog.messages == []
    assert math.isnan(values["loss"]) and values["routing/load/layer_0/expert_1"] == 0.5


def test_resuming_cuts_the_steps_that_are_taken_again(tmp_path):
    first = write(tmp_path, -1, [2, 4, 6])
    assert write(tmp_path, 4, [6, 8])[:2] == first[:2]
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()]
    assert steps == [2, 4, 6, 8]


@pytest.mark.parametrize("last_step", [-1, 2])
def test_a_run_begun_anew_keeps_no_line_and_a_resumed_one_its_own(tmp_path, last_step):
    write(tmp_path, -1, [0, 2])
    lines = write(tmp_path, last_step, [])
    assert [json.loads(line)["step"] for line in lines] == [0, 2][: last_step + 1]


@pytest.mark.parametrize(
    "half", ['{"step": 4, "lo', '{"step"', "{", "\x00\x00\x00", '{"loss": 1.0}'], ids=repr
)
def test_a_line_that_a_kill_left_half_written_is_cut(tmp_path, half):
    write(tmp_path, -1, [2, 4])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(half)
    lines = write(tmp_path, 100, [6])
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6]


def test_a_last_line_without_its_end_is_kept_whole(tmp_path):
    write(tmp_path, -1, [2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 2.0}')
    assert [json.loads(line)["step"] for line in write(tmp_path, 4, [6])] == [2, 4, 6]


def test_a_kill_while_cutting_loses_no_line(tmp_path, monkeypatch):
    lines = write(tmp_path, -1, [2, 4])

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("switchx.data.data_dir.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", 2)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines
