# SPDX-License-Identifier: Apache-2.0
"""Runs compared: loss by what it took, what differs in their configurations, their routing.

Runs whose configurations differ in the seed alone are one configuration with an interval. A
loss is the mean negative log-likelihood of real target tokens in nats, minus the negative log
perplexity of the logs, without the losses of routers; in training it is with dropout.

    compare(["runs/a", "runs/b_seed0", "runs/b_seed1"])    # a notebook shows the sections

Dims: S seeds, N Switch layers, E experts
"""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from switchx.analysis.comparison_plots import Band, Panel, panels_figure
from switchx.analysis.intervals import Interval, interval_of, paired
from switchx.analysis.report import Section, Table
from switchx.analysis.routing import RoutingHistory, read_history, read_lines
from switchx.moe.balance import dead_experts, load_entropy, max_violation

# What training takes, as axes of the graphs.
COSTS = ("step", "tokens", "model FLOPs", "wall-clock hours")
_STATEMENT = re.compile(r"^([\w./]+) =((?:.|\n(?=[ \n]))*)", re.MULTILINE)
_SEED = re.compile(r"SEED|(.*\.)?TrainingJob\.seed")
# A configuration is named by what it differs in where that is so short, else by a folder.
MOST_CHARACTERS = 60


@dataclasses.dataclass(frozen=True)
class RunLog:
    """What a run folder tells of its training.

    Attributes:
        settings: values of the bindings of `operative_config.gin`, as they are written there.
        losses: loss by step, of `training` and of `validation`.
        costs: what training took until each logged step, by `COSTS`: `[logged steps]`; NaN
            where the log does not say.
        end: last line of `validation.jsonl`.
        history: routing in training; None of a dense model.
    """

    folder: str
    settings: dict[str, str]
    losses: dict[str, dict[int, float]]
    costs: dict[str, np.ndarray]
    end: dict
    history: RoutingHistory | None

    @property
    def seed(self) -> str:
        """The seed as it is bound; empty where nothing binds one."""
        given = {name: value for name, value in self.settings.items() if _SEED.fullmatch(name)}
        return next((value for value in given.values() if not value.startswith("%")), "")

    @property
    def without_seed(self) -> dict[str, str]:
        return {n: value for n, value in self.settings.items() if not _SEED.fullmatch(n)}

    def cost_at(self, cost: str, steps) -> np.ndarray:
        """What training took until some steps, in between the logged ones by interpolation."""
        known = np.r_[0, self.costs["step"]], np.r_[0, self.costs[cost]]
        return np.interp(steps, *known)


def read_run_log(folder: str | os.PathLike) -> RunLog:
    """The log of a run folder, which may still be trained.

    Raises:
        ValueError: it has no configuration, no logged step or no evaluation, or a file is
            damaged; says which.
    """
    root = pathlib.Path(folder)
    lines, evaluations = (read_lines(root / f"{n}.jsonl") for n in ("metrics", "validation"))
    if not (lines and evaluations):
        missing = "validation" if lines else "metrics"
        raise ValueError(f"{root}/{missing}.jsonl has no line yet; leave that run out")
    try:
        text = (root / "operative_config.gin").read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{root}/operative_config.gin cannot be read ({error.strerror}); give run folders"
        ) from error
    settings = {
        n: " ".join(value.split()).lstrip("\\ ") for n, value in _STATEMENT.findall(text)
    }
    is_sparse = any("routing" in line for line in lines)
    return RunLog(
        folder=os.fspath(folder),
        settings=settings,
        losses={"training": _losses(lines), "validation": _losses(evaluations)},
        costs=_costs(lines),
        end=evaluations[-1],
        history=read_history(root / "metrics.jsonl") if is_sparse else None,
    )


def _losses(lines: Sequence[dict]) -> dict[int, float]:
    values = {line["step"]: line.get("neg_log_perplexity") for line in lines}
    return {step: math.nan if value is None else -value for step, value in values.items()}


def _costs(lines: Sequence[dict]) -> dict[str, np.ndarray]:
    def of(name: str) -> np.ndarray:
        return np.array([line.get(name, math.nan) for line in lines], float)

    step = of("step")
    # A rate is that of the steps since the line before, whatever process took them.
    seconds = np.diff(step, prepend=0) / of("steps_per_s")
    wall = [sum(line.get("goodput", {}).get("seconds", {}).values()) for line in lines]
    values = (
        step,
        np.cumsum(of("tokens_per_s") * seconds),
        np.cumsum(of("model_flops_per_s") * seconds),
        (np.array(wall) if all(wall) else np.cumsum(seconds)) / 3600,
    )
    return dict(zip(COSTS, values, strict=True))


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Runs that differ in the seed alone, by seed."""

    name: str
    runs: Sequence[RunLog]

    @property
    def seeds(self) -> list[str]:
        return [run.seed for run in self.runs]

    @property
    def last_step(self) -> int:
        """The last step at which all runs were evaluated."""
        common = set.intersection(*({*run.losses["validation"]} for run in self.runs))
        return max(common, default=0)

    @property
    def finals(self) -> list[float]:
        """Validation loss at the last step, for each seed; NaN where it is not finite."""
        step = self.last_step
        return [run.losses["validation"].get(step, math.nan) for run in self.runs]

    def band(self, kind: str, cost: str) -> Band:
        """The loss by what it took: mean over the seeds, and its 95% interval."""
        steps = sorted(set.intersection(*({*run.losses[kind]} for run in self.runs)))
        values = [[run.losses[kind][step] for step in steps] for run in self.runs]
        x = np.mean([run.cost_at(cost, steps) for run in self.runs], axis=0)
        return _band(x, np.array(values))


def _band(x: np.ndarray, values_SX: np.ndarray) -> Band:
    around = [interval_of(values_S) for values_S in values_SX.T]
    return Band(
        x, *(np.array([getattr(e, n) for e in around]) for n in ("mean", "low", "high"))
    )


def difference(mine: Configuration, other: Configuration) -> Interval:
    """Final validation losses, mine less the other's: of pairs of the same seeds, or of the means,
    without an interval, where no seed is the same."""
    theirs = dict(zip(other.seeds, other.finals, strict=True))
    pairs = [
        (loss, theirs[s])
        for s, loss in zip(mine.seeds, mine.finals, strict=True)
        if s in theirs
    ]
    if not pairs:
        return interval_of([float(np.mean(mine.finals) - np.mean(other.finals))])
    return paired(*zip(*pairs, strict=True))


def first_step_at(curve: dict[int, float], quality: float) -> float | None:
    """Step at which a curve first reaches a quality, interpolated between evaluations; None
    where it never does."""
    points = sorted(curve.items())
    if points[0][1] >= quality:
        return points[0][0]
    for (step_0, value_0), (step_1, value_1) in zip(points, points[1:], strict=False):
        if value_0 < quality <= value_1:
            return step_0 + (quality - value_0) / (value_1 - value_0) * (step_1 - step_0)
    return None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Configurations, in the order of their first runs; a notebook shows the sections."""

    configurations: Sequence[Configuration]

    @property
    def by_loss(self) -> list[Configuration]:
        """The configurations by final validation loss, the lowest first; not finite is last."""

        def key(each: Configuration) -> tuple[bool, float]:
            return math.isnan(mean := float(np.mean(each.finals))), mean

        return sorted(self.configurations, key=key)

    @property
    def headline(self) -> str:
        """Which configuration ends lowest, by how much, and whether seeds tell it apart."""
        best, *others = self.by_loss
        loss = f"{shown(interval_of(best.finals))} nats a token at step {best.last_step}"
        if not others:
            return f"{best.name}: validation loss {loss}."
        other, lead = others[0], difference(others[0], best)
        known = f"seeds {'' if lead.excludes(0) else 'do not '}tell them apart"
        if lead.low == lead.high:
            known = "one seed cannot say whether others would agree"
        return (
            f"{best.name} ends lowest: validation loss {loss}, {shown(lead)} below "
            f"{other.name} at step {other.last_step}; {known}.{_speed(best, other)}"
        )

    @property
    def caution(self) -> str:
        """Why losses do not compare, if that can be seen."""
        runs = [run for each in self.configurations for run in each.runs]
        if len({run.end.get("target_tokens") for run in runs}) == 1:
            return ""
        return " They were evaluated on different numbers of tokens: losses do not compare."

    def sections(self) -> list[Section]:
        """Everything, in the order of the page."""
        return [self.overview(), self.losses(), self.settings(), self.routing()]

    def _repr_html_(self) -> str:
        return "\n".join(each._repr_html_() for each in self.sections())

    def overview(self) -> Section:
        """The headline, and the end of each configuration in numbers."""
        first, rows = self.configurations[0], []
        for each in self.configurations:
            costs = {
                cost: f"{np.mean([run.cost_at(cost, each.last_step) for run in each.runs]):.4g}"
                for cost in COSTS
            }
            accuracy = np.mean([run.end["accuracy"] for run in each.runs])
            dropped = [run.end.get("dropped_fraction", math.nan) for run in each.runs]
            rows.append(
                {
                    "configuration": each.name,
                    "seeds": len(each.runs),
                    "validation loss": shown(interval_of(each.finals)),
                    f"less that of {first.name}": shown(difference(each, first)),
                    "accuracy": f"{accuracy:.1%}",
                    "dropped": "" if np.isnan(dropped).any() else f"{np.mean(dropped):.2%}",
                }
                | costs
            )
        return Section(
            "At the end",
            f"{self.headline}{self.caution} Behind a mean over seeds stands its 95% interval "
            "(Student's t; of differences, of pairs with the same seed). Tokens are those that "
            "the model read, FLOPs the model's, hours the run's with compilation, evaluation "
            "and saves.",
            tables=[Table.of(rows)],
        )

    def losses(self) -> Section:
        """Loss in training and validation by each cost."""
        rows = [
            [
                Panel(
                    cost,
                    f"{kind} loss, nats a token",
                    {each.name: each.band(kind, cost) for each in self.configurations},
                )
                for cost in COSTS
            ]
            for kind in ("training", "validation")
        ]
        return Section(
            "Loss",
            "Lines are means over seeds, bands their 95% intervals. The first quarter of "
            "training may lie above a graph's upper end.",
            [panels_figure(rows)],
        )

    def settings(self) -> Section:
        """The settings that differ between configurations."""
        found = differing([each.runs[0] for each in self.configurations])
        names = [each.name for each in self.configurations]
        in_all = {n: row for n, row in found.items() if None not in row}
        in_some = {
            n: ["" if v is None else v for v in found[n]] for n in found if n not in in_all
        }
        tables = [
            Table(("setting", *names), [(name, *row) for name, row in rows.items()], title)
            for rows, title in ((in_all, ""), (in_some, "Settings that some do not have"))
            if rows
        ]
        return Section(
            "What differs",
            "Bindings of `operative_config.gin`, but for the seed."
            if found
            else "Nothing but the seed.",
            tables=tables,
        )

    def routing(self) -> Section:
        """Routing side by side: by step over all layers, and of each layer at the end."""
        title = "Routing"
        sparse = [each for each in self.configurations if each.runs[0].history is not None]
        if not sparse:
            return Section(title, "All models are dense.")
        panels = [
            Panel("step", label, {each.name: _routing_band(each, of) for each in sparse})
            for label, of in ROUTING.items()
        ]
        rows = [
            {"layer": n, "configuration": each.name}
            | {label: float(np.mean([_at_end(run, of)[n] for run in each.runs]))
               for label, of in ROUTING.items()}
            for each in sparse
            for n in range(each.runs[0].history.load.shape[1])
        ]  # fmt: skip
        rows.sort(key=lambda row: row["layer"])
        return Section(
            title,
            "Means over Switch layers, and the 95% interval over seeds. Dead experts and "
            "effective experts (the exponential of the load's entropy) are shares of all "
            "experts; the router's entropy is a share of ln E. MaxVio is the load of the "
            "busiest expert in even shares, less 1. The table has every layer, the encoder's "
            "first, at the last logged step.",
            [panels_figure([panels[:3], panels[3:]])],
            [Table.of(rows, title="By layer")],
        )


# What is shown of the routing, functions of a history to `[steps, N]`.
ROUTING = {
    "dropped per token": lambda history: history.dropped,
    "MaxVio": lambda history: max_violation(history.load),
    "dead experts": lambda history: dead_experts(history.load).mean(axis=-1),
    "effective experts": lambda h: np.exp(load_entropy(h.load)) / h.num_experts,
    "router entropy": lambda h: h.entropy / math.log(max(h.num_experts, 2)),
    "gate of 1st choice": lambda history: history.gate,
}


def _at_end(run: RunLog, of) -> np.ndarray:
    return of(run.history)[-1]


def _routing_band(each: Configuration, of) -> Band:
    common = set.intersection(*({*run.history.steps.tolist()} for run in each.runs))
    values = [
        of(run.history)[np.isin(run.history.steps, list(common))].mean(axis=-1)
        for run in each.runs
    ]
    return _band(np.array(sorted(common)), np.array(values))


def _speed(best: Configuration, other: Configuration) -> str:
    """A sentence on how much earlier the best one has the other's final loss, if it does."""
    shares = []
    for mine, their in zip(best.runs, other.runs, strict=False):
        curve = {step: -loss for step, loss in mine.losses["validation"].items()}
        loss = their.losses["validation"].get(other.last_step, math.nan)
        if not other.last_step or (step := first_step_at(curve, -loss)) is None:
            return ""
        costs = [
            mine.cost_at(cost, step) / their.cost_at(cost, other.last_step) for cost in COSTS
        ]
        shares.append(costs)
    steps, _, flops, hours = np.mean(shares, axis=0)
    return (
        f" It has that loss after {steps:.0%} of the steps, {flops:.0%} of the FLOPs and "
        f"{hours:.0%} of the time."
    )


def shown(interval: Interval) -> str:
    """An interval as texts have it; a mean alone where it has no width."""
    if math.isnan(interval.mean):
        return "not finite"
    if interval.low == interval.high:
        return f"{interval.mean:.4f}"
    return f"{interval.mean:.4f} ({interval.low:.4f} to {interval.high:.4f})"


def differing(runs: Sequence[RunLog]) -> dict[str, list[str | None]]:
    """Settings that differ, the seed left out, with the value of each run; None for none."""
    names = dict.fromkeys(name for run in runs for name in run.without_seed)
    rows = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: row for name, row in rows.items() if len({*row}) > 1}


def compare(folders: Sequence[str | os.PathLike]) -> Comparison:
    """Compares run folders; those that differ in the seed alone are one configuration.

    Raises:
        ValueError: a folder is given twice, or is none of a run with a logged step and an
            evaluation; says which.
    """
    places = [pathlib.Path(folder).expanduser().resolve() for folder in folders]
    if again := [
        str(f) for f, place in zip(folders, places, strict=True) if places.count(place) > 1
    ]:
        raise ValueError(f"{again[0]} is given twice; give each run folder once")
    alike: dict[tuple, list[RunLog]] = {}
    for run in map(read_run_log, folders):
        alike.setdefault(tuple(sorted(run.without_seed.items())), []).append(run)
    groups = [
        sorted(runs, key=lambda run: (len(run.seed), run.seed)) for runs in alike.values()
    ]
    return Comparison(
        [Configuration(*each) for each in zip(_names(groups), groups, strict=True)]
    )


def _names(groups: Sequence[Sequence[RunLog]]) -> list[str]:
    """Short names of configurations: what they differ in, or their folders."""
    found = differing([runs[0] for runs in groups])
    names = [
        ", ".join(f"{name}={row[i]}" for name, row in found.items()) for i in range(len(groups))
    ]
    if found and max(map(len, names)) <= MOST_CHARACTERS:
        return names
    paths = [pathlib.Path(runs[0].folder) for runs in groups]
    bases = [path.name for path in paths]
    bases = bases if len({*bases}) == len(bases) else [str(path) for path in paths]
    return [
        f"{base} and {len(runs) - 1} more" if len(runs) > 1 else base
        for base, runs in zip(bases, groups, strict=True)
    ]
