# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step and of an interval, their log, and the batches of skipped steps."""

import dataclasses
import json
import math
import struct
import types

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from switchx.data.features import batch_digest
from switchx.training.losses import TokenSums
from switchx.training.step import StepMetrics
from switchx.training.telemetry.metrics import (
    MetricsLog,
    SkippedBatches,
    flat_scalars,
    rms_metrics,
    routing_metrics,
    token_metrics,
)
from switchx.training.telemetry.throughput import Interval, Stopwatch
from tests.training.jobs import DENSE, make_batch
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
    # The loss of 40 has z-loss and smoothing, which validation has not.
    assert got["cross_entropy"] == -got["neg_log_perplexity"]
    assert got["accuracy"] == pytest.approx(1 / 3)
    assert got["target_tokens"] == 3
    better = token_metrics(sums(loss=40.0, nll=nll / 2, correct=1, tokens=3))
    assert better["neg_log_perplexity"] > got["neg_log_perplexity"]


def test_a_batch_of_padding_alone_divides_by_no_zero():
    assert set(token_metrics(sums(loss=0, nll=0, correct=0, tokens=0)).values()) == {0.0}


def test_routing_is_reported_per_layer_in_shares_of_its_tokens():
    got = routing_metrics(two_layers())
    # The loads 3:1 of both: their entropy, and MaxVio of 0.75 against an even 0.5.
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    routing = got["routing"]
    assert routing.pop("load_entropy") == pytest.approx([entropy / math.log(2)] * 2)
    assert routing.pop("effective_experts") == pytest.approx([math.exp(entropy)] * 2)
    assert routing.pop("information") == pytest.approx([entropy - 0.5, entropy - 0.25])
    assert got == {
        "dropped_fraction": 3 / 12,
        "routing": {
            "load": [[0.75, 0.25], [0.25, 0.75]],
            "dropped": [0.25, 0.25],
            "entropy": [0.5, 0.25],
            "gate": [0.75, 0.75],
            "balance_loss": [1.5, 1.25],
            "router_z_loss": [0.5, 0.25],
            "gate_mass": [0.75, 0.5],
            "margin": [0.25, 0.75],
            "expected_dropped": [0.125, 0.125],
            "max_violation": [0.5, 0.5],
            "dead_experts": [0, 0],
            "choices": [8.0, 4.0],
        },
    }
    assert routing_metrics(None) == {}


def test_drops_are_a_share_of_choices_where_a_token_has_several():
    stats = two_layers()
    stats = dataclasses.replace(stats, load_E=2 * stats.load_E, dropped=4 * stats.dropped)
    assert routing_metrics(stats)["dropped_fraction"] == 12 / 24
    taken = dataclasses.replace(stats, asked=np.array([18, 12], np.float32))
    assert routing_metrics(taken)["dropped_fraction"] == 12 / 30


def test_nested_metrics_are_named_by_layer_and_expert():
    routing = routing_metrics(two_layers())["routing"]
    few = {name: routing[name] for name in ("load", "dropped", "max_violation")}
    assert flat_scalars(
        {"dropped_fraction": 0.25, "routing": few, "loss": 2, "tasks": {"a": {"b": 0.5}}}
    ) == {
        "dropped_fraction": 0.25,
        "routing/load/layer_0/expert_0": 0.75,
        "routing/load/layer_0/expert_1": 0.25,
        "routing/load/layer_1/expert_0": 0.25,
        "routing/load/layer_1/expert_1": 0.75,
        "routing/dropped/layer_0": 0.25,
        "routing/dropped/layer_1": 0.25,
        "routing/max_violation/layer_0": 0.5,
        "routing/max_violation/layer_1": 0.5,
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


@pytest.mark.parametrize(
    "half",
    ['{"step": 4, "lo', '{"step"', "{", "\x00\x00\x00", '{"loss": 1.0}', "[3]"],
    ids=repr,
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


@pytest.fixture
def clock(monkeypatch):
    """`clock.now = seconds` sets the time."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    return clock


def test_evaluations_and_saves_do_not_count_as_training(clock):
    watch = Stopwatch()
    assert watch.read() == 0
    watch.start()
    clock.now += 2
    assert watch.read() == 2
    watch.stop()
    clock.now += 30  # an evaluation
    assert watch.read() == 2
    watch.stop()
    watch.start()
    clock.now += 1
    watch.start()  # it runs already: nothing is lost
    clock.now += 1
    assert watch.read() == 4
    watch.stop()
    assert watch.seconds == 4


def step(loss=2.0, nll=8.0, grad_norm=3.0, is_skipped=0, stats=None) -> StepMetrics:
    number = np.float32
    return StepMetrics(
        sums=TokenSums(number(2 * nll), number(nll), number(1), number(4)),
        loss=number(loss),
        routing=stats,
        grad_norm=number(grad_norm),
        is_skipped=np.int32(is_skipped),
        skipped_in_a_row=np.int32(is_skipped),
    )


def test_means_over_tokens_and_rates_over_seconds():
    interval = Interval(10.0)
    interval.add(step(loss=2.0, nll=8.0, grad_norm=3.0), input_tokens=100, examples=5)
    interval.add(step(loss=4.0, nll=12.0, grad_norm=5.0), input_tokens=140, examples=7)
    assert interval.metrics(14.0, flops_per_step=1e6) == {
        "loss": 3.0,
        "grad_norm": 4.0,
        "skipped_steps": 0,
        "steps_per_s": 0.5,
        "tokens_per_s": 60.0,
        "examples_per_s": 3.0,
        "model_flops_per_s": 5e5,
        "neg_log_perplexity": -20 / 8,
        "cross_entropy": 20 / 8,
        "token_loss": 40 / 8,
        "accuracy": 2 / 8,
        "target_tokens": 8.0,
    }


def test_a_skipped_step_took_time_but_has_no_part_in_the_means():
    interval = Interval(0.0)
    interval.add(step(loss=2.0), input_tokens=100, examples=5)
    bad = step(loss=math.nan, nll=math.nan, grad_norm=math.inf, is_skipped=1)
    interval.add(bad, input_tokens=100, examples=5)
    metrics = interval.metrics(2.0, flops_per_step=1.0)
    assert metrics["loss"] == 2.0 and metrics["grad_norm"] == 3.0
    assert metrics["neg_log_perplexity"] == -2.0 and metrics["target_tokens"] == 4
    assert metrics["skipped_steps"] == 1
    assert metrics["steps_per_s"] == 1.0 and metrics["tokens_per_s"] == 100.0


def test_an_interval_of_skipped_steps_alone_says_so():
    interval = Interval(0.0)
    interval.add(step(loss=math.nan, is_skipped=1), input_tokens=10, examples=1)
    metrics = interval.metrics(1.0, flops_per_step=1.0)
    assert math.isnan(metrics["loss"]) and metrics["skipped_steps"] == 1
    assert "neg_log_perplexity" not in metrics and "routing" not in metrics


def test_routing_adds_up_over_steps_and_its_losses_are_averaged():
    interval = Interval(0.0)
    for _ in range(3):
        interval.add(step(stats=two_layers()), input_tokens=1, examples=1)
    metrics = interval.metrics(1.0, flops_per_step=1.0)
    assert metrics["dropped_fraction"] == 9 / 36
    assert metrics["routing"]["load"] == [[0.75, 0.25], [0.25, 0.75]]
    assert metrics["routing"]["balance_loss"] == [1.5, 1.25]
    assert metrics["routing"]["router_z_loss"] == [0.5, 0.25]


def test_root_mean_squares_are_named_by_layer_and_expert():
    bank, router = "decoder/layer_1/ffn/w_in_EDF", "decoder/blocks/layer_1/ffn/w_router_DE"
    numbers = {bank: np.array([1.0, 2.0]), router: np.array([[3.0, 4.0]]), "scale_D": 5.0}
    metrics = rms_metrics({"weight_rms": numbers})
    assert metrics == {
        "weight_rms": {bank: [1.0, 2.0], router: {"repeat_0": [3.0, 4.0]}, "scale_D": 5.0}
    }
    assert flat_scalars(metrics) == {
        f"weight_rms/{bank}/expert_0": 1.0,
        f"weight_rms/{bank}/expert_1": 2.0,
        f"weight_rms/{router}/repeat_0/expert_0": 3.0,
        f"weight_rms/{router}/repeat_0/expert_1": 4.0,
        "weight_rms/scale_D": 5.0,
    }


def test_max_violation_is_that_of_single_batches():
    """Two batches, each of whose tokens go to another expert, are not balanced together."""
    interval = Interval(0.0)
    for load_E in ([[8, 0], [3, 1]], [[0, 8], [1, 3]]):
        stats = dataclasses.replace(two_layers(), load_E=np.array(load_E, np.float32))
        interval.add(step(stats=stats), input_tokens=1, examples=1)
    routing = interval.metrics(1.0, flops_per_step=1.0)["routing"]
    assert routing["load"] == [[0.5, 0.5], [0.5, 0.5]]
    assert routing["max_violation"] == [1.0, 0.5]
    assert routing["effective_experts"] == pytest.approx([2, 2])
    # Of two tasks with an expert each, whose rows are other ones in each batch.
    interval = Interval(0.0)
    for load_E in ([[8, 0], [3, 1]], [[0, 8], [1, 0]]):
        of_tasks = {"load_E": np.array(load_E, np.float32), "num_tasks": 2}
        stats = dataclasses.replace(two_layers(), **of_tasks)
        interval.add(step(stats=stats), input_tokens=1, examples=1)
    routing = interval.metrics(1.0, flops_per_step=1.0)["routing"]
    assert routing["max_violation"] == [0, 0] and routing["dead_experts"] == [0, 0]


def metrics(loss, grad_norm):
    numbers = {"loss": np.float32(loss), "grad_norm": np.float32(grad_norm)}
    return types.SimpleNamespace(**numbers, skipped_in_a_row=3)


def test_a_batch_is_kept_with_its_identity(tmp_path):
    skipped, batch = SkippedBatches(tmp_path / "skipped"), make_batch(DENSE, 2)
    digest = batch_digest(batch)
    assert skipped.keep(7, batch, metrics(np.nan, np.inf)) == (
        f"step 7 is skipped: loss nan, gradient norm inf, batch {digest}; no parameter changed"
    )
    assert {path.name for path in (tmp_path / "skipped").iterdir()} == {"7.0.json", "7.0.npz"}
    text = (tmp_path / "skipped" / "7.0.json").read_text()
    assert json.loads(text, parse_constant=lambda name: 1 / 0) == {
        "step": 7,
        "batch": digest,
        "loss": "nan",
        "grad_norm": "inf",
        "in_a_row": 3,
    }
    with np.load(tmp_path / "skipped" / "7.0.npz") as kept:
        assert set(kept) == set(batch)
        assert batch_digest(dict(kept)) == digest


def test_nothing_is_written_while_nothing_is_skipped(tmp_path):
    SkippedBatches(tmp_path / "skipped")
    assert list(tmp_path.iterdir()) == []
