# SPDX-License-Identifier: Apache-2.0
"""Routers against one control: exploration, capacity, rerouting, two choices, other balances.

make experiments EXPERIMENT=routing DATA=FOLDER
"""

import dataclasses
import statistics
from typing import Any

from experiments import rules
from experiments.experiment import ENGLISH
from experiments.ladder import (
    DROPLESS,
    R0,
    OnLadder,
    Runs,
    bindings_of,
    rows,
    train_all,
    wall_seconds,
)
from experiments.measured import finite_of
from experiments.rules import OF_COMPUTE, Rule
from experiments.statistics import difference, dunnett
from experiments.step_times import step_times
from experiments.study import Study, main

CONTROL, ONE, TWO = "argmax", "Switch, factor 1", "MoE, factor 1, equal time"
SEEDS = tuple(range(100, 107))


def _routed(name: str, *bindings: str) -> OnLadder:
    return OnLadder(name, bindings, has_capacity=True)


def _at(factor: float, selected: int = 1) -> tuple[str, ...]:
    """A factor of the paper's eq. 3, slots over tokens: `SwitchConfig` counts choices."""
    gate = "softmax" if selected == 1 else "normalized"
    return (
        f"SwitchConfig.capacity_factor={factor / selected}",
        f"RouterConfig.num_selected={selected}",
        f"RouterConfig.gate='{gate}'",
    )


# All have 16 experts and the rate of 16 dropless ones of as many choices.
RUNS = Runs(
    (
        _routed(CONTROL),
        _routed("jitter", "RouterConfig.exploration='jitter'"),
        _routed("sampling", "RouterConfig.exploration='sample'"),
        _routed("input dropout", "RouterConfig.exploration='dropout'"),
        _routed(ONE, *_at(1.0)),
        _routed("Switch, factor 2", *_at(2.0)),
        OnLadder(TWO, _at(1.0, 2), "16 experts, 2 choices", has_capacity=True),
        _routed(
            "reroute, factor 1", *_at(1.0),
            "RouterConfig.overflow='reroute'", "RouterConfig.max_rounds=4",
        ),
        OnLadder("dropless", DROPLESS),
        _routed("hash", "RouterConfig.kind='hash'"),
        _routed(
            "loss-free balance", "RouterConfig.bias_update_rate=0.001",
            "LossConfig.balance_weight=0.0",
        ),
        _routed("batch priority", "RouterConfig.priority='gate'"),
    )
)  # fmt: skip

_SHARED = {"margin": OF_COMPUTE, "looks": (4, 7), "seeds": SEEDS}
RULES = (
    Rule(
        "Switch at capacity factor 1 is ahead of top-2 MoE at 1 after as long a time",
        difference(ONE, TWO),
        "ahead",
        expected=0.03,
        **_SHARED,
    ),
    Rule(
        "sampling is behind argmax", difference("sampling", CONTROL), "behind",
        expected=-0.1, **_SHARED,
    ),
    Rule(
        "jitter is as good as argmax", difference("jitter", CONTROL), "equivalent",
        expected=0.0, **_SHARED,
    ),
    Rule(
        "rerouting is as good as dropping at capacity factor 1",
        difference("reroute, factor 1", ONE),
        "equivalent",
        expected=0.0,
        **_SHARED,
    ),
)  # fmt: skip


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """By the rules; beside them each router over the control, by Dunnett's test, but those
    that diverged."""
    finals = finite_of(results)
    over = dunnett(finals, CONTROL) if CONTROL in finals else {}
    tested = [
        {"model": name, f"over {CONTROL} (95%, all together)": dataclasses.asdict(interval),
         "p": p}
        for name, (interval, p) in over.items()
    ]  # fmt: skip
    return rules.judged(RULES, results) | {
        "intervals": {name: dataclasses.asdict(each) for name, (each, _) in over.items()},
        "intervals_of": f"over {CONTROL}, nats per token; 95% of all together (Dunnett)",
        "tables": [
            {"title": "", "rows": rows(results)},
            *[{"title": f"Each against {CONTROL} (Dunnett):", "rows": tested}] * bool(tested),
        ],
    }


def run(study: Study) -> None:
    """Times steps first: MoE has as many as take it the time of Switch."""
    files, cells = study.files(*ENGLISH), study.cells()
    timed = {each.name: each for each in RUNS.contenders if each.name in (ONE, TWO)}
    bindings = {name: bindings_of(study, R0, each, 0) for name, each in timed.items()}
    times = step_times(study, cells, (R0.gin_file,), bindings)
    ratio = statistics.median(times[TWO])
    contenders = tuple(
        dataclasses.replace(each, length=1 / ratio) if each.name == TWO else each
        for each in RUNS.contenders
    )
    runs = dataclasses.replace(RUNS, contenders=contenders)
    trained = train_all(study, cells, study.at_look(runs, RULES[0]))
    study.publish(
        cells, files, judge, **trained, step_time_of_two=times[TWO],
        wall_seconds=wall_seconds(cells),
    )  # fmt: skip


if __name__ == "__main__":
    main(__file__, __doc__, run)
