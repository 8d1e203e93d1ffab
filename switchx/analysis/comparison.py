# SPDX-License-Identifier: Apache-2.0
"""Comparison of runs: loss by cost, settings that differ, routing side by side.

Runs whose settings differ only in the seed are one configuration, with an interval. A loss is
minus the negative log perplexity of the logs: nats per target token, without router losses,
in training with dropout. A notebook shows what `compare(["runs/a", "runs/b"])` returns.

Dims: S seeds, X points of a line, N Switch layers
"""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Sequence

import numpy as np
import scipy.stats

from switchx.analysis.comparison_plots import panels_figure
from switchx.analysis.report import Section, Table
from switchx.analysis.routing import RoutingHistory, read_history, read_lines
from switchx.moe.load_evenness import dead_experts, load_entropy, max_violation

# Fewer values than these are too few for a bootstrap, whose intervals of ten hold 91%.
FEW = 40
# What training takes.
COSTS = ("step", "tokens", "model FLOPs", "wall-clock hours")
# Numbers of every Switch layer, `[steps, N]`, where training logged them.
ROUTING = {
    "dropped choices": lambda history: history.dropped,
    "MaxVio": lambda h: h.others.get("max_violation", max_violation(h.load)),
    "dead experts": lambda h: (
        h.others.get("dead_experts", dead_experts(h.load).sum(axis=-1)) / h.num_experts
    ),
    "effective experts": lambda h: (
        h.others.get("effective_experts", np.exp(load_entropy(h.load))) / h.num_experts
    ),
    "router entropy": lambda h: h.entropy / math.log(max(h.num_experts, 2)),
    "gate of 1st choice": lambda history: history.gate,
}
# A configuration is named by its differing settings if these are so short, else by a folder.
MOST_CHARACTERS = 60
# A binding of a gin file as gin writes it, with further lines indented.
_BINDING = re.compile(r"^([\w./]+) = ?((?:.|\n(?=[ \n]))*)", re.MULTILINE)
_SEED = re.compile(r"SEED|(.*\.)?TrainingJob\.seed")


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean and its 95% interval."""

    mean: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether the value lies outside the interval: 0, or for a Ratio 1, is no effect."""
        return self.low > value or self.high < value

    def __str__(self) -> str:
        """Three decimals; for a small interval, enough for two digits of the larger bound."""
        largest = max(abs(self.low), abs(self.high))
        is_small = 0 < largest < 0.01
        digits = 1 - math.floor(math.log10(largest)) if is_small else 3
        mean, low, high = (f"{each:+.{digits}f}" for each in (self.mean, self.low, self.high))
        return f"{mean} ({low} to {high})"


def interval_of(values: Sequence[float], kind: type[Interval] = Interval) -> Interval:
    """The mean of some values (one per seed, text or task) and its 95% interval.

    For fewer than FEW values it is Student's t: a bootstrap of three is their range, which
    misses the true mean in a quarter of all cases. For more it is the middle 95% of 10,000
    bootstrap means. A single value has an interval of no width.
    """
    values_S = np.asarray(values, float)
    mean = float(values_S.mean())
    if len(values_S) == 1:
        return kind(mean, mean, mean)
    if len(values_S) < FEW:
        error = values_S.std(ddof=1) / math.sqrt(len(values_S))
        half = float(scipy.stats.t.ppf(0.975, len(values_S) - 1) * error)
        return kind(mean, mean - half, mean + half)
    drawn = np.random.default_rng(0).integers(0, len(values_S), (10_000, len(values_S)))
    low, high = np.percentile(values_S[drawn].mean(1), (2.5, 97.5))
    return kind(mean, float(low), float(high))


def paired(mine: Sequence[float], others: Sequence[float]) -> Interval:
    """Differences, mine minus the others', for the same seeds in the same order."""
    return interval_of([a - b for a, b in zip(mine, others, strict=True)])


@dataclasses.dataclass(frozen=True)
class RunLog:
    """What a run folder says about its training.

    Attributes:
        seed: seed as it is bound.
        settings: values of the bindings of `operative_config.gin`, except the seed.
        losses: loss by step, of `training` and of `validation`; NaN where it is not finite.
        costs: what training took until each logged step, by `COSTS`.
        end: last line of `validation.jsonl`.
        validated: what identifies the validation set.
        history: routing in training; None for a dense model.
    """

    folder: str
    seed: str
    settings: dict[str, str]
    losses: dict[str, dict[int, float]]
    costs: dict[str, np.ndarray]
    end: dict
    validated: dict[str, object]
    history: RoutingHistory | None

    @property
    def is_diverged(self) -> bool:
        """Whether the last logged loss of training is not finite."""
        return math.isnan([*self.losses["training"].values()][-1])


def read_run_log(folder: str | os.PathLike) -> RunLog:
    """The log of a run folder, which may still be training.

    Raises:
        ValueError: it has no configuration, no logged step or no evaluation, or a file is
            damaged; says which.
    """
    root = pathlib.Path(folder)
    seed = ""
    settings = {}
    losses = {}
    logs = {"training": root / "metrics.jsonl", "validation": root / "validation.jsonl"}
    lines = {kind: read_lines(path) for kind, path in logs.items()}
    for kind, path in logs.items():
        if not lines[kind]:
            raise ValueError(f"{path} has no line yet; leave that run out")
        values = {line["step"]: line.get("neg_log_perplexity") for line in lines[kind]}
        losses[kind] = {s: math.nan if v is None else -v for s, v in values.items()}
    try:
        text = (root / "operative_config.gin").read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{root}/operative_config.gin: {error.strerror}; give runs") from error
    for name, value in _BINDING.findall(text):
        value = " ".join(value.split()).lstrip("\\ ")
        if not _SEED.fullmatch(name):
            settings[name] = value
        elif not value.startswith("%"):
            seed = value
    is_sparse = any("routing" in line for line in lines["training"])
    history = read_history(logs["training"]) if is_sparse else None
    costs, end = _costs(lines["training"]), lines["validation"][-1]
    # By what was read, as the same files may lie in another folder.
    files = {"vocabulary": root / "vocabulary.json", "corpora": root / "corpora.json"}
    validated = {"target tokens": end.get("target_tokens")} | {
        name: path.read_bytes() if path.is_file() else None for name, path in files.items()
    }
    return RunLog(os.fspath(folder), seed, settings, losses, costs, end, validated, history)


def _costs(lines: Sequence[dict]) -> dict[str, np.ndarray]:
    def of(name: str) -> np.ndarray:
        return np.array([line.get(name, math.nan) for line in lines], float)

    step = of("step")
    # A rate covers the steps since the previous line, whichever process took them.
    seconds = np.diff(step, prepend=0) / of("steps_per_s")
    wall = [sum(line.get("goodput", {}).get("seconds", {}).values()) for line in lines]
    tokens, flops = (np.cumsum(of(f"{n}_per_s") * seconds) for n in ("tokens", "model_flops"))
    hours = (np.array(wall) if all(wall) else np.cumsum(seconds)) / 3600
    return dict(zip(COSTS, (step, tokens, flops, hours), strict=True))


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Runs that differ only in the seed, by seed."""

    name: str
    runs: Sequence[RunLog]

    @property
    def going(self) -> list[RunLog]:
        """The runs that did not diverge; all if every run did."""
        return [run for run in self.runs if not run.is_diverged] or [*self.runs]

    @property
    def last_step(self) -> int:
        """The last step at which all runs that did not diverge were evaluated.

        Raises:
            ValueError: there is no such step.
        """
        steps = _common(run.losses["validation"] for run in self.going)
        if not steps:
            folders = ", ".join(run.folder for run in self.going)
            raise ValueError(
                f"{folders} are seeds of one configuration and have no step at which all were "
                "evaluated; leave one out, or train on"
            )
        return steps[-1]

    @property
    def finals(self) -> dict[str, float]:
        """Validation loss at the last step, by seed; NaN for a run that diverged before."""
        step = self.last_step
        return {run.seed: run.losses["validation"].get(step, math.nan) for run in self.runs}

    @property
    def final(self) -> Interval:
        return interval_of([*self.finals.values()])

    def loss_band(self, kind: str, cost: str) -> np.ndarray:
        """The loss by a cost, which is interpolated between logged steps."""
        runs = self.going
        steps = _common(run.losses[kind] for run in runs)
        values = [[run.losses[kind][step] for step in steps] for run in runs]
        taken = [[np.r_[0, run.costs[name]] for name in ("step", cost)] for run in runs]
        return _band(np.mean([np.interp(steps, *each) for each in taken], axis=0), values)

    def routing_band(self, name: str) -> np.ndarray:
        """The mean over layers of a number of `ROUTING`, by step."""
        histories = [run.history for run in self.runs if run.history is not None]
        steps = _common(history.steps.tolist() for history in histories)
        values = [
            ROUTING[name](history)[np.isin(history.steps, steps)].mean(axis=-1)
            for history in histories
        ]
        return _band(steps, values)


def _common(steps) -> list[int]:
    return sorted(set.intersection(*map(set, steps)))


def _band(x, values_SX) -> np.ndarray:
    """The mean over seeds and its 95% interval, in the form that `panels_figure` draws."""
    around = [dataclasses.astuple(interval_of(each)) for each in np.transpose(values_SX)]
    return np.array([x, *np.reshape(around, (-1, 3)).T])


def difference(mine: Configuration, other: Configuration) -> Interval:
    """Final validation losses, mine minus the other's: over pairs with the same seed, or, if
    there is no pair, of the means and without an interval."""
    pairs = [(loss, other.finals[s]) for s, loss in mine.finals.items() if s in other.finals]
    return paired(*zip(*(pairs or [(mine.final.mean, other.final.mean)]), strict=True))


def shown(interval: Interval) -> str:
    """An interval as text; only the mean if it has no width."""
    if not math.isfinite(interval.mean):
        return "not finite"
    around = f" ({interval.low:.4f} to {interval.high:.4f})"
    return f"{interval.mean:.4f}{around * (interval.low < interval.high)}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Configurations, in the order of their first runs."""

    configurations: Sequence[Configuration]

    @property
    def headline(self) -> str:
        """Which configuration ends lowest, by how much, and whether seeds tell it apart.

        Names none if validation sets differ.
        """
        best, *others = sorted(
            self.configurations, key=lambda each: (math.isnan(each.final.mean), each.final.mean)
        )
        loss = f"validation loss {shown(best.final)} at step {best.last_step}"
        first, *runs = [run.validated for each in self.configurations for run in each.runs]
        unlike = ", ".join(n for n in first if any(run[n] != first[n] for run in runs))
        caution = f" Validation sets differ ({unlike}), so losses do not compare." * bool(
            unlike
        )
        if not others or math.isnan(others[0].final.mean):
            alone = "; of no other all seeds end with a finite loss" * bool(others)
            return f"{best.name}: {loss}{alone}.{caution}"
        if unlike:
            return f"No configuration is named lowest.{caution}"
        steps = {best.last_step, others[0].last_step}
        caution += " They end at other steps, and the later one learnt more." * (len(steps) > 1)
        lead = difference(others[0], best)
        known = f"seeds {'' if lead.excludes(0) else 'do not '}tell them apart"
        if lead.low == lead.high:
            known = "one common seed cannot say whether others would agree"
            if not best.finals.keys() & others[0].finals.keys():
                known = "without a common seed nothing tells whether others would agree"
        if lead.mean < 0:
            return (
                f"{best.name} ends lowest by the mean of its seeds: {loss}; in the seeds that "
                f"both have {others[0].name} ends {shown(paired([0], [lead.mean]))} lower."
                f"{caution}"
            )
        return (
            f"{best.name} ends lowest: {loss}, {shown(lead)} below {others[0].name} at step "
            f"{others[0].last_step}; {known}.{caution}"
        )

    @property
    def costs(self) -> list[str]:
        """The costs that a run has logged."""
        runs = [run for each in self.configurations for run in each.runs]
        return [c for c in COSTS if any(np.isfinite(run.costs[c][-1]) for run in runs)]

    def sections(self) -> list[Section]:
        """Everything, in the order of the page."""
        return [self.overview(), self.losses(), self.settings(), self.routing()]

    def _repr_html_(self) -> str:
        return "\n".join(each._repr_html_() for each in self.sections())

    def overview(self) -> Section:
        """The headline, and the end of each configuration in numbers."""
        first = self.configurations[0]
        rows = [
            {
                "configuration": each.name,
                "seeds": len(each.runs),
                "validation loss": shown(each.final),
                f"less that of {first.name}": shown(difference(each, first)),
            }
            | {
                cost: f"{np.mean([run.costs[cost][-1] for run in each.runs]):.4g}"
                for cost in self.costs
            }
            for each in self.configurations
        ]
        return Section(
            "At the end",
            f"{self.headline} Losses are in nats a token. Behind a mean over seeds stands its "
            "95% interval (Student's t), of differences that of pairs with the same seed. "
            "Tokens are those that the model read, FLOPs the model's, hours the run's with "
            "compilation, evaluation and saves.",
            tables=[Table.of(rows)],
        )

    def losses(self) -> Section:
        """Loss in training and validation by each cost."""
        rows = []
        for kind in ("training", "validation"):
            bands = {
                c: {x.name: x.loss_band(kind, c) for x in self.configurations}
                for c in self.costs
            }
            rows.append([(cost, f"{kind} loss", bands[cost]) for cost in self.costs])
        return Section(
            "Loss",
            "Lines are means over seeds that did not diverge, bands their 95% intervals. The "
            "first quarter of a line may lie outside of its graph.",
            [panels_figure(rows)],
        )

    def settings(self) -> Section:
        """The settings that differ between configurations."""
        title = "What differs"
        found = differing([each.runs[0] for each in self.configurations])
        if not found:
            return Section(title, "Nothing, but for seeds.")
        rows = [(name, *row) for name, row in found.items()]
        columns = ("setting", *(each.name for each in self.configurations))
        folded = f"{len(rows)} settings" * (len(rows) > 20)  # of a dense and a sparse model
        text = "Bindings of operative_config.gin; empty where a configuration has none."
        return Section(title, text, tables=[Table(columns, rows, folded)])

    def routing(self) -> Section:
        """Routing side by side, by step."""
        sparse = [x for x in self.configurations if any(run.history for run in x.runs)]
        if not sparse:
            return Section("Routing", "All models are dense.")
        panels = [("step", n, {x.name: x.routing_band(n) for x in sparse}) for n in ROUTING]
        return Section(
            "Routing",
            "Means over Switch layers and seeds, and the 95% interval over seeds. Dead and "
            "effective experts are shares of all experts, the router's entropy one of ln E, "
            "MaxVio the load of the busiest expert in even shares, less 1, the mean of "
            "batches. Drops are shares of choices.",
            [panels_figure([panels[:3], panels[3:]])],
        )


def differing(runs: Sequence[RunLog]) -> dict[str, list[str]]:
    """Settings that differ, with the value in each run; empty if it has none."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = {name: [run.settings.get(name, "") for run in runs] for name in names}
    return {name: row for name, row in rows.items() if len({*row}) > 1}


def compare(folders: Sequence[str | os.PathLike]) -> Comparison:
    """Compares run folders; those that differ only in the seed are one configuration.

    A second run of the same configuration and seed, as with other code, is a configuration of
    its own.

    Raises:
        ValueError: a folder is given twice, or does not hold a run with a logged step and an
            evaluation; says which.
    """
    if len({pathlib.Path(folder).resolve() for folder in folders}) < len(folders):
        raise ValueError("a run folder is given twice; give each one once")
    alike: dict[tuple, dict[str, RunLog]] = {}
    for run in map(read_run_log, folders):
        key = tuple(sorted(run.settings.items()))
        while run.seed in alike.get(key, ()):
            key += ("again",)
        alike.setdefault(key, {})[run.seed] = run
    groups = [
        [runs[seed] for seed in sorted(runs, key=lambda s: (len(s), s))]
        for runs in alike.values()
    ]
    found = differing([runs[0] for runs in groups]).items()
    names = [", ".join(f"{name}={row[i]}" for name, row in found) for i in range(len(groups))]
    if len({*names}) < len(names) or max(map(len, names)) > MOST_CHARACTERS or not found:
        names = [runs[0].folder for runs in groups]
    return Comparison([Configuration(*each) for each in zip(names, groups, strict=True)])
