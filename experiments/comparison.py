# SPDX-License-Identifier: Apache-2.0
"""Models trained from scratch on the same data in the same order, for the same steps.

A contender is a name and gin bindings over `configs/runs/pretrain_english.gin`; all have the
learning rate of that file (T5's, chosen for none of them). Quality is the validation negative
log perplexity after the last step, higher is better. Differences are paired by seed. Times of
steps are measured apart, all contenders taking turns in one process, so that they do not depend
on what else the machine did during hours of training. That is done in TIMINGS processes, as a
program's memory lies elsewhere in another one.
"""

import concurrent.futures
import dataclasses
import math
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.experiment import Comparison, run_name
from experiments.measured import Cells, Interval, Ratio, paired
from experiments.pages import ROOT
from experiments.rules import Rule, judged
from experiments.side_by_side import pin_to_one_core
from experiments.statistics import dunnett
from experiments.study import Study
from pallas_kernels.bench.timing import Contender as Timed
from pallas_kernels.bench.timing import speedup, take_turns
from switchx.data.loader import evaluation_batches
from switchx.data.mixtures import as_mixture
from switchx.gin_config.building import job_from_gin
from switchx.models.flops import train_flops
from switchx.training.job import TrainingJob
from switchx.training.programs import compiled_program

# Processes that time steps.
TIMINGS = 5


@dataclasses.dataclass(frozen=True)
class Trained:
    """What came of a comparison, by contender.

    Attributes:
        curves: validation negative log perplexity by step, one curve a seed.
        step_times: seconds of a step relative to the first contender's, one a timing; None
            where not timed.
        flops: of a token in training, relative to the first contender's.
        skipped: steps that were skipped as their gradients were not finite, all seeds.
        dropped: fraction of tokens that training drops at its end, the mean over seeds.
    """

    curves: dict[str, list[dict[int, float]]]
    step_times: dict[str, list[float]] | None
    flops: dict[str, float]
    skipped: dict[str, int]
    dropped: dict[str, float]

    def models(self) -> dict[str, dict[str, Any]]:
        """All but the curves, as results.json has it."""
        return {
            name: {"flops": self.flops[name]}
            | ({} if self.step_times is None else {"step_times": self.step_times[name]})
            | {"skipped_steps": self.skipped[name], "dropped": self.dropped[name]}
            for name in self.curves
        }

    def final(self, name: str) -> list[float]:
        """Quality after the last step, one a seed."""
        return [curve[max(curve)] for curve in self.curves[name]]

    def gain(self, name: str, over: str) -> Interval:
        """Final quality over another's, paired by seed, in nats per token."""
        return paired(self.final(name), self.final(over))

    def quality_at(self, name: str, step: float) -> float:
        """Between evaluations, the mean over seeds."""
        return statistics.mean(
            float(np.interp(step, sorted(curve), [curve[s] for s in sorted(curve)]))
            for curve in self.curves[name]
        )

    def speedup_in_steps(self, name: str, over: str) -> float:
        """Steps after which `over` first has its final quality, divided by those of `name`."""
        gains = []
        for mine, other in zip(self.curves[name], self.curves[over], strict=True):
            steps = [first_step_at(curve, other[max(other)]) for curve in (other, mine)]
            gains.append(steps[0] / steps[1] if steps[1] else math.nan)
        return statistics.mean(gains)

    def step_time(self, name: str, over: str) -> Ratio:
        """Of a step over another's: the median and the range of all timings."""
        pairs = zip(self.step_times[name], self.step_times[over], strict=True)
        ratios = [mine / other for mine, other in pairs]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios))

    def speedup_in_time(self, name: str, over: str) -> Ratio:
        """`speedup_in_steps` by the median and the range of all timings."""
        steps, time = self.speedup_in_steps(name, over), self.step_time(name, over)
        return Ratio(steps / time.mean, steps / time.high, steps / time.low)

    def rows(self, gains: dict[str, Interval] | None = None) -> list[dict[str, Any]]:
        """One a contender, for a page.

        Args:
            gains: those over the first contender; by default paired by seed.
        """
        first = next(iter(self.curves))
        rows = []
        for name in self.curves:
            final = self.final(name)
            row = {
                "model": name,
                "FLOPs per token": self.flops[name],
                "negative log perplexity": statistics.mean(final),
                "lowest seed": min(final),
                "highest seed": max(final),
                f"gain over {first} (95%)": dataclasses.asdict(
                    gains[name] if gains else self.gain(name, first)
                ),
                "speed-up in steps": known(self.speedup_in_steps(name, first)),
            }
            if self.step_times is not None:
                row["step time (range)"] = dataclasses.asdict(self.step_time(name, first))
                row["speed-up in time"] = known(self.speedup_in_time(name, first).mean)
            row["dropped tokens"] = self.dropped[name]
            rows.append(row | {"skipped steps": self.skipped[name]})
        return rows


def trained_in(results: dict[str, Any]) -> Trained:
    """What came of a comparison, of its `models` and `curves` as results.json has them."""
    curves = {
        name: [{int(step): value for step, value in seed.items()} for seed in seeds]
        for name, seeds in results["curves"].items()
    }

    def each(key: str) -> dict[str, Any]:
        return {name: model[key] for name, model in results["models"].items() if key in model}

    return Trained(
        curves,
        each("step_times") or None,
        each("flops"),
        each("skipped_steps"),
        each("dropped"),
    )


def judge_of(
    verdict: Callable[[Trained], dict[str, Any]],
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """`judge` of an experiment that has nothing but a comparison, by its rule."""

    def judge(results: dict[str, Any]) -> dict[str, Any]:
        trained = trained_in(results)
        return verdict(trained) | {"tables": [{"title": "", "rows": trained.rows()}]}

    return judge


def judge_by(
    claims: Sequence[Rule],
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """`judge` of an experiment that has a comparison and rules of its claims. Gains over the
    first contender are reported without a word, with Dunnett's intervals."""

    def judge(results: dict[str, Any]) -> dict[str, Any]:
        trained = trained_in(results)
        control, *others = trained.curves
        found = dunnett({name: trained.final(name) for name in trained.curves}, control)
        gains = {control: Interval(0.0, 0.0, 0.0)} | {name: found[name][0] for name in others}
        title = (
            "Intervals of gains hold for all contenders together (Dunnett); they judge nothing:"
        )
        return judged(claims, results) | {
            "tables": [{"title": title, "rows": trained.rows(gains)}]
        }

    return judge


def run_comparison(
    study: Study,
    comparison: Comparison,
    judge: Callable[[dict[str, Any]], dict[str, Any]],
    rule: Rule | None = None,
    **measured,
) -> dict[str, Any]:
    """Trains all contenders, writes results, figure and page.

    Args:
        judge: what follows from what was measured (`Study.publish`).
        rule: the one whose seeds are trained, those of the study's look.
        measured: beside the comparison.
    """
    if rule is not None and not study.is_quick:
        comparison = study.at_look(comparison, rule)
    if study.is_quick:
        comparison = comparison.quick()
    files, cells = study.files(*comparison.data), study.cells()
    trained = train_all(study, cells, comparison)
    return study.publish(
        cells,
        files,
        judge,
        seeds=list(comparison.seeds),
        steps=comparison.steps,
        models=trained.models(),
        curves=trained.curves,
        **measured,
    )


def train_all(study: Study, cells: Cells, comparison: Comparison) -> Trained:
    """Every contender on every seed, seed by seed; then the times of steps."""
    curves = {each.name: [] for each in comparison.contenders}
    skipped, dropped = dict.fromkeys(curves, 0), dict.fromkeys(curves, 0.0)
    for seed in comparison.seeds:
        for each in comparison.contenders:
            bindings = comparison.bindings_of(each, seed)
            found = study.train(
                cells, run_name(each.name, seed), comparison.gin_files, bindings
            )
            curve = {int(step): value for step, value in found["curve"].items()}
            curves[each.name].append(curve)
            skipped[each.name] += found["skipped_steps"]
            dropped[each.name] += found["dropped"] / len(comparison.seeds)
    bindings = {each.name: comparison.bindings_of(each, 0) for each in comparison.contenders}
    placed = {n: study.placed((*b, *study.quick_bindings)) for n, b in bindings.items()}
    jobs = _jobs(comparison.gin_files, placed)
    flops = {name: train_flops(job.model, *job.sequence_lengths) for name, job in jobs.items()}
    least = next(iter(flops.values()))
    times = None
    if comparison.times:
        times = step_times(study, cells, comparison.gin_files, bindings)
    relative = {name: each / least for name, each in flops.items()}
    return Trained(curves, times, relative, skipped, dropped)


def step_times(
    study: Study,
    cells: Cells,
    gin_files: Sequence[str],
    bindings: dict[str, Sequence[str]],
    *,
    on_one_core: bool = False,
) -> dict[str, list[float]]:
    """Times of a step relative to the first contender's, one each of TIMINGS processes.

    Args:
        bindings: all bindings of each contender, its places not yet placed.
        on_one_core: whether the processes have a single core, as the ladder's cells have.
    """
    quick = study.quick_bindings
    placed = {name: study.placed((*each, *quick)) for name, each in bindings.items()}
    cell = {"step_times": list(bindings), "bindings": list(map(list, bindings.values()))}
    cell |= {"cores": 1} if on_one_core else {}
    rounds = 2 if study.is_quick else 9
    timings = [
        cells.get(
            cell | {"timing": timing},
            lambda: _in_a_process(
                _step_times, gin_files, placed, rounds, on_one_core=on_one_core
            ),
        )
        for timing in range(1 if study.is_quick else TIMINGS)
    ]
    return {name: [each[name] for each in timings] for name in bindings}


def _jobs(
    gin_files: Sequence[str], bindings: dict[str, Sequence[str]]
) -> dict[str, TrainingJob]:
    files = [ROOT / file for file in gin_files]
    return {name: job_from_gin(files, each) for name, each in bindings.items()}


def _in_a_process(function: Callable, *arguments, on_one_core: bool = False):
    """What a function returns that a process of its own calls."""
    spawn, begin = (
        multiprocessing.get_context("spawn"),
        pin_to_one_core if on_one_core else None,
    )
    with concurrent.futures.ProcessPoolExecutor(1, spawn, begin) as executor:
        return executor.submit(function, *arguments).result()


def _step_times(
    gin_files: Sequence[str], bindings: dict[str, Sequence[str]], rounds: int
) -> dict[str, float]:
    """Seconds of a training step relative to the first job's, measured in turns."""
    jobs = _jobs(gin_files, bindings)
    timed = {name: _timed(name, job) for name, job in jobs.items()}
    take_turns(list(timed.values()), rounds, num_steps=5)
    first = next(iter(timed.values()))
    return {name: 1 / speedup(each, first) for name, each in timed.items()}


def _timed(name: str, job: TrainingJob) -> Timed:
    """A job's own step on one of its batches, compiled and ready."""
    program = compiled_program(job)
    (task,) = as_mixture(job.source).tasks
    batch = program.place(next(evaluation_batches(task, job.batches, num_batches=1)))

    def step(state):
        with program.scope():
            return program.train_step(state, batch)

    return Timed.stepping(name, step, program.init_state())


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


def known(value: float) -> float | None:
    """None where some seed never came to the other's quality: JSON has no NaN."""
    return None if math.isnan(value) else value
