# SPDX-License-Identifier: Apache-2.0
"""Alarms: each raised by lines of numbers that call for it, once, and by no others."""

import dataclasses
import json

import numpy as np
import pytest

from switchx.checkpoint.run_folder import RunFolder
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.training.telemetry.metrics import routing_metrics
from switchx.training.telemetry.routing_alarms import AlarmWatch, RoutingAlarms
from tests.data.refusals import refused
from tests.training.jobs import DENSE, make_job
from tests.training.routing_stats import two_layers

E, TOKENS, RATE = 4, 4_000, 0.001
MODEL = ModelConfig(
    "encoder_decoder", 512, 16, 24, 2, 8, num_encoder_layers=1, num_decoder_layers=1,
    switch=SwitchConfig(E, every=1, router=RouterConfig(bias_update_rate=RATE)),
)  # fmt: skip
EVEN = np.full(E, TOKENS / E)


def line(load_E=EVEN, *, violation=None, dropped=0.0, floor=0.0, bias=0.0, prob_E=None):
    """Metrics of a step: the encoder's layer is even, the decoder's has these sums."""
    prob_E = EVEN if prob_E is None else prob_E
    stats = dataclasses.replace(
        two_layers(),
        tokens=np.array([TOKENS, TOKENS]),
        load_E=np.stack([EVEN, load_E]),
        prob_E=np.stack([EVEN, prob_E]),
        # Of a mean p that is even, with an entropy of 1 nat: ln 4 - 1 is told.
        entropy=np.array([TOKENS, TOKENS * 1.0]),
        dropped=np.array([0, dropped * TOKENS]),
        expected_dropped=np.array([0, floor * TOKENS]),
        bias=np.array([0, bias * TOKENS]),
    )
    violation_N = None if violation is None else np.array([0.0, violation])
    return routing_metrics(stats, violation_N)


@pytest.fixture
def watch(tmp_path):
    """`watch(lines, **fields)`: what each line raises, by kind and layer."""

    def raised(lines, last_step=-1, first_lines=1, model=MODEL, **fields):
        alarms, run = RoutingAlarms(first_lines=first_lines, **fields), RunFolder(tmp_path)
        watch = AlarmWatch(alarms, model, run, last_step)
        if last_step < 0:
            assert watch.raised_by(0, line()) == []
        steps = range(max(last_step, 0) + 1, max(last_step, 0) + 1 + len(lines))
        of_steps = [watch.raised_by(*each) for each in zip(steps, lines, strict=True)]
        return [[(alarm.kind, alarm.layer) for alarm in alarms] for alarms in of_steps]

    return raised


def test_a_healthy_run_raises_none(watch):
    rng = np.random.default_rng(0)
    loads = rng.multinomial(TOKENS, rng.dirichlet(np.full(E, 20), size=60))
    lines = [line(load, dropped=0.15, floor=0.02, bias=0.05) for load in loads]
    assert watch(lines, first_lines=10) == [[]] * 60


def test_the_first_lines_raise_nothing(watch):
    """Routers start uneven: experts that are dead there count from the eleventh line on."""
    dead = line(np.array([0, 2, 1, 1]) * TOKENS / 4, bias=1.0)
    raised = watch([dead] * 14, first_lines=10)
    assert raised[:9] == [[]] * 9 and raised[9] == [("bias", "decoder 0")]
    assert raised[10:] == [[], [("dead_expert", "decoder 0")], [], []]


def test_a_batch_less_even_than_three_times_the_median(watch):
    quiet = [line(violation=0.5)] * 10
    raised = [("max_violation", "decoder 0")]
    assert watch([*quiet, line(violation=1.51)])[-1] == raised
    assert watch([*quiet, line(violation=1.49)])[-1] == []
    even = [line(violation=0.1)] * 10
    assert watch([*even, line(violation=0.99)])[-1] == []  # ten times, and still little
    assert watch([*even, line(violation=1.01)])[-1] == raised
    # The median is of the last lines alone.
    last = [line(violation=0.1)] * 50 + [line(violation=1.0)] * 20 + [line(violation=2.9)]
    assert watch(last, median_lines=20)[-1] == []
    assert watch([*quiet, line(violation=3)], violation_factor=None)[-1] == []


def test_drops_far_beyond_those_of_a_balanced_router_three_times(watch):
    raised = [("dropped", "decoder 0")]
    assert watch([line(dropped=0.31, floor=0.05)] * 4) == [[], [], raised, []]
    assert watch([line(dropped=0.29, floor=0.05)] * 4) == [[]] * 4  # 24 percent more
    assert watch([line(dropped=0.59, floor=0.3)] * 4) == [[]] * 4  # less than twice
    many, few = line(dropped=0.5), line()
    assert watch([many, many, few, many, many]) == [[]] * 5
    # Said again when it has ceased to be so.
    assert watch([*[many] * 3, few, *[many] * 3])[-1] == raised


def test_drops_are_shares_of_choices(watch):
    """Of two choices a token, 0.4 dropped a token are 20 percent."""
    assert watch([line(2 * EVEN, dropped=0.4)] * 3) == [[]] * 3
    assert watch([line(2 * EVEN, dropped=0.6)] * 3)[-1] == [("dropped", "decoder 0")]


def test_an_expert_that_is_dead_in_three_lines_running(watch):
    dead, other = np.array([0, 2, 1, 1]) * TOKENS / 4, np.array([1, 2, 0, 1]) * TOKENS / 4
    raised = [("dead_expert", "decoder 0")]
    assert watch([line(dead)] * 5) == [[], [], raised, [], []]
    assert watch([line(dead), line(other)] * 3) == [[]] * 6
    # 99 choices are an even share: none may be chance.
    few = [line(dead * 99 * E / TOKENS)] * 5
    assert watch(few) == [[]] * 5
    # Of two tasks with two experts each: a task has few rows, has enough, or sleeps evenly.
    router = RouterConfig(kind="task", num_tasks=2, exploration="none")
    switch = dataclasses.replace(MODEL.switch, router=router)
    by_task = dataclasses.replace(MODEL, switch=switch)
    for load_E, found in (([0, 190], []), ([0, 210], raised), ([5, 5], [])):
        rest = (TOKENS - sum(load_E)) / 2
        lines = [line(np.array([*load_E, rest, rest]))] * 3
        assert watch(lines, model=by_task) == [[], [], found]


def test_a_bias_that_drifts_is_told_to_hooks(watch):
    said = []
    lines = [line(bias=b * RATE) for b in (99, 101, 99, -101)]
    raised = [("bias", "decoder 0")]
    assert watch(lines, hooks=(said.append,)) == [[], raised, [], raised]
    assert [alarm.step for alarm in said] == [2, 4]
    assert said[0].value == pytest.approx(0.101)
    assert "beyond 100 updates of 0.001" in said[0].text
    for changes in ({"bias_update_rate": 0.0}, {"bias_rule": "quantile"}):
        router = dataclasses.replace(MODEL.switch.router, **changes)
        switch = dataclasses.replace(MODEL.switch, router=router)
        still = dataclasses.replace(MODEL, switch=switch)
        assert watch([line(bias=101 * RATE)], model=still) == [[]]


def test_a_router_that_tells_nothing(watch):
    one = np.array([0.15, 0.15, 0.15, 3.55]) * TOKENS / 4  # entropy 0.44 and less than 1
    raised = [("information", "decoder 0")]
    assert watch([line(prob_E=one)] * 4) == [[], [], raised, []]
    hashed = dataclasses.replace(
        MODEL,
        switch=SwitchConfig(E, every=1, router=RouterConfig(kind="hash", exploration="none")),
    )
    silent = AlarmWatch(RoutingAlarms(first_lines=1), hashed, RunFolder("nowhere"), -1)
    assert [silent.raised_by(step, line(prob_E=one)) for step in range(4)] == [[]] * 4


def test_a_resumed_run_remembers_and_its_file_has_each_alarm_once(watch, tmp_path):
    run, dead = RunFolder(tmp_path), np.array([0, 2, 1, 1]) * TOKENS / 4
    lines = [line(dead)] * 5
    run.metrics.write_text(
        "".join(
            json.dumps({"step": step} | each) + "\n"
            for step, each in enumerate([line(), *lines])
        )
    )
    whole = watch(lines)
    assert whole[2] == [("dead_expert", "decoder 0")]
    text = run.alarms.read_text()
    (said,) = map(json.loads, text.splitlines())
    assert said == {
        "step": 3,
        "kind": "dead_expert",
        "layer": "decoder 0",
        "value": 1.0,
        "limit": 0.0,
        "text": "decoder 0: expert 0 got less than 1% of an even share in 3 lines in a row",
    }
    assert watch(lines[2:], last_step=2) == whole[2:] and run.alarms.read_text() == text
    assert watch(lines[4:], last_step=4) == whole[4:] and run.alarms.read_text() == text


def test_lines_without_routing_or_of_earlier_versions_raise_nothing(watch):
    assert watch([{"loss": 1.0}, {"routing": {"load": [[1.0, 0.0]]}}]) == [[], []]


def test_what_cannot_be_is_refused():
    with refused("RoutingAlarms.hooks: 'page me' cannot be called; use functions of an Alarm"):
        make_job(DENSE, alarms=RoutingAlarms(hooks=("page me",)))
