# SPDX-License-Identifier: Apache-2.0
"""Routing alarms, raised in a run while its routers go wrong.

No published threshold is known to us: these are ours, from our own runs, and are fields
(docs/routing_statistics.md). An alarm is raised when its condition begins to hold, and again
only after it has ceased to. It is a line of `alarms.jsonl` in the run folder and a line of the
terminal; hooks are called with it, and `switchx train --stop_on_alarm` ends training.

Dims: N Switch layers, E experts
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from switchx.checkpoint.run_folder import RunFolder
from switchx.fields import json_text, require, require_above_zero, require_at_least, without_gin
from switchx.models.config import ModelConfig
from switchx.moe.load_evenness import DEAD_FRACTION, by_task, dead_experts
from switchx.training.telemetry.metrics import cut_after, logged_lines

# With fewer choices than this in an even share, an expert may have no tokens by chance.
FEWEST_CHOICES = 100
# Experts that one sentence lists.
MOST_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Alarm:
    """One alarm.

    Attributes:
        step: step of the line of metrics that raised it.
        kind: `max_violation`, `dropped`, `dead_expert`, `bias` or `information`.
        layer: name of the Switch layer, such as `encoder 1`.
        value: value that is beyond `limit`.
        text: a sentence for the user.
    """

    step: int
    kind: str
    layer: str
    value: float
    limit: float
    text: str


@dataclasses.dataclass(frozen=True)
class RoutingAlarms:
    """The conditions of the alarms, checked whenever a line of metrics is written.

    Attributes:
        first_lines: lines at a run's beginning that raise nothing: routers start uneven.
        violation_factor: largest MaxVio of a layer's batches, in medians of the previous lines;
            None disables this alarm, here and in the other fields that may be None.
        least_violation: MaxVio that is never too much: at 1 the busiest expert has two even
            shares.
        median_lines: largest number of lines in the median.
        dropped_factor: most drops, in drops that a balanced router expects (the floor).
        least_dropped: share of choices over the floor that is never too much.
        dead_lines: number of lines in a row in which the same expert is dead.
        bias_updates: largest mean of a selection bias, in its update rates.
        least_information: least information of a token about its expert, in nats: it is 0 for
            a router that is uniform, or sends all tokens to one expert.
        lines_in_a_row: lines in a row for which drops or information have to be out of bounds.
        hooks: functions that are called with each `Alarm`, only by process 0; an error that
            they raise ends training.
    """

    first_lines: int = 10
    violation_factor: float | None = 3.0
    least_violation: float = 1.0
    median_lines: int = 100
    dropped_factor: float | None = 2.0
    least_dropped: float = 0.25
    dead_lines: int | None = 3
    bias_updates: float | None = 100.0
    least_information: float | None = 0.002
    lines_in_a_row: int = 3
    hooks: tuple[Callable[[Alarm], None], ...] = ()

    def __post_init__(self):
        require_above_zero(self, "violation_factor", "dropped_factor", "bias_updates")
        require_above_zero(self, "least_information")
        require_at_least(self, 0, "least_violation", "least_dropped")
        require_at_least(self, 1, "first_lines", "median_lines", "dead_lines", "lines_in_a_row")
        object.__setattr__(self, "hooks", tuple(map(without_gin, self.hooks)))
        for hook in self.hooks:
            require(
                callable(hook),
                f"RoutingAlarms.hooks: {hook!r} cannot be called; use functions of an Alarm "
                "that a module defines",
            )


class AlarmWatch:
    """The alarms of one run: the lines of metrics seen so far, what is raised, and the file."""

    def __init__(
        self, alarms: RoutingAlarms, model: ModelConfig, run: RunFolder, last_step: int
    ):
        """Continues after `last_step`; -1 begins anew.

        The steps until then are read from the run's own `metrics.jsonl`.
        """
        self._alarms, self._model, self._path = alarms, model, run.alarms
        self._is_first = jax.process_index() == 0
        self._num_lines = 0
        self._violations = collections.deque(maxlen=alarms.median_lines)
        self._in_a_row: dict[str, np.ndarray] = {}
        self._raised: set[tuple[str, int]] = set()
        if self._is_first:
            cut_after(run.alarms, last_step)
        for line in logged_lines(run.metrics, last_step):
            self._look(line["step"], line)

    def raised_by(self, step: int, metrics: dict[str, Any]) -> list[Alarm]:
        """The alarms that a line of metrics raises; they are written, and hooks called."""
        alarms = self._look(step, metrics)
        if alarms and self._is_first:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json_text(dataclasses.asdict(each)) + "\n" for each in alarms)
            for hook, alarm in itertools.product(self._alarms.hooks, alarms):
                hook(alarm)
        return alarms

    def _look(self, step: int, metrics: dict[str, Any]) -> list[Alarm]:
        # A dense model has no routing, nor has a line whose steps were all skipped.
        if "max_violation" not in metrics.get("routing", {}):
            return []
        routing = {
            name: np.array(values, np.float64) for name, values in metrics["routing"].items()
        }
        self._num_lines += 1
        has_begun = self._num_lines > self._alarms.first_lines
        checks = (self._violation, self._dropped, self._dead, self._bias, self._information)
        found = {}
        for check in checks if has_begun else ():
            for kind, n, value, limit, sentence in check(routing):
                layer = self._layer(n)
                text = f"{layer}: {sentence}"
                found[kind, n] = Alarm(step, kind, layer, float(value), float(limit), text)
        self._violations.append(routing["max_violation"])
        new, self._raised = found.keys() - self._raised, {*found}
        return [alarm for condition, alarm in found.items() if condition in new]

    def _layer(self, n: int) -> str:
        # A user's own model may have statistics and no SwitchConfig.
        return f"layer {n}" if self._model.switch is None else self._model.sparse_layer_names[n]

    def _lines_of(self, name: str, holds: np.ndarray) -> np.ndarray:
        """The number of lines in a row, this one included, in which something holds."""
        self._in_a_row[name] = np.where(holds, self._in_a_row.get(name, 0) + 1, 0)
        return self._in_a_row[name]

    def _violation(self, routing: dict[str, np.ndarray]) -> Iterator[tuple]:
        alarms, value_N = self._alarms, routing["max_violation"]
        if alarms.violation_factor is None:
            return
        median_N = np.median(self._violations, axis=0)
        limit_N = np.maximum(alarms.violation_factor * median_N, alarms.least_violation)
        for n in np.flatnonzero(value_N > limit_N):
            text = (
                f"MaxVio is {value_N[n]:.2f}, more than {limit_N[n]:.2f}; its median of the "
                f"{len(self._violations)} lines before was {median_N[n]:.2f}"
            )
            yield "max_violation", n, value_N[n], limit_N[n], text

    def _dropped(self, routing: dict[str, np.ndarray]) -> Iterator[tuple]:
        alarms = self._alarms
        if alarms.dropped_factor is None or "expected_dropped" not in routing:
            return
        per_token_N = np.maximum(routing["load"].sum(axis=-1), 1e-12)
        value_N = routing["dropped"] / per_token_N
        floor_N = routing["expected_dropped"] / per_token_N
        limit_N = np.maximum(alarms.dropped_factor * floor_N, floor_N + alarms.least_dropped)
        lines_N = self._lines_of("dropped", value_N > limit_N)
        for n in np.flatnonzero(lines_N >= alarms.lines_in_a_row):
            text = (
                f"{value_N[n]:.1%} of choices are dropped, more than {limit_N[n]:.1%} in "
                f"{lines_N[n]} lines in a row; a balanced router drops {floor_N[n]:.1%}"
            )
            yield "dropped", n, value_N[n], limit_N[n], text

    def _dead(self, routing: dict[str, np.ndarray]) -> Iterator[tuple]:
        least, load_NE = self._alarms.dead_lines, routing["load"]
        if least is None:
            return
        switch = self._model.switch
        num_tasks = 1 if switch is None else switch.router.num_tasks
        share_NE = load_NE / np.maximum(load_NE.sum(axis=-1, keepdims=True), 1e-12)
        choices_NUW = by_task(routing["choices"][:, None] * share_NE, num_tasks)
        is_much_NU1 = choices_NUW.mean(axis=-1, keepdims=True) >= FEWEST_CHOICES
        is_dead_NUW = by_task(dead_experts(load_NE, num_tasks), num_tasks) & is_much_NU1
        lines_NE = self._lines_of("dead", is_dead_NUW.reshape(load_NE.shape))
        for n, lines_E in enumerate(lines_NE):
            if (dead := np.flatnonzero(lines_E >= least)).size:
                more = f" and {dead.size - MOST_NAMED} more" * (dead.size > MOST_NAMED)
                named = ", ".join(map(str, dead[:MOST_NAMED]))
                text = (
                    f"expert {named}{more} got less than {DEAD_FRACTION:.0%} of an even share "
                    f"in {least} lines in a row"
                )
                yield "dead_expert", n, dead.size, 0, text

    def _bias(self, routing: dict[str, np.ndarray]) -> Iterator[tuple]:
        switch, updates = self._model.switch, self._alarms.bias_updates
        rate = None if switch is None else switch.router.bias_update_rate
        if not rate or updates is None or "bias" not in routing or switch.router.has_quantiles:
            return  # nothing moves it, or not by the rate in each step
        limit = updates * rate
        for n in np.flatnonzero(np.abs(routing["bias"]) > limit):
            text = (
                f"the mean of the selection bias is {routing['bias'][n]:.3g}, beyond "
                f"{updates:g} updates of {rate:g}: scores count for little beside it"
            )
            yield "bias", n, routing["bias"][n], limit, text

    def _information(self, routing: dict[str, np.ndarray]) -> Iterator[tuple]:
        least, switch = self._alarms.least_information, self._model.switch
        is_learned = switch is None or switch.router.has_weights
        if least is None or "information" not in routing or not is_learned:
            return
        value_N = routing["information"]
        lines_N = self._lines_of("information", value_N < least)
        for n in np.flatnonzero(lines_N >= self._alarms.lines_in_a_row):
            text = (
                f"a token tells {value_N[n]:.4f} nats about its expert, less than {least:g} "
                f"in {lines_N[n]} lines in a row: the router is uniform or the same for all"
            )
            yield "information", n, value_N[n], least, text
