# SPDX-License-Identifier: Apache-2.0
"""Runs on the ladder: each contender at its own rate, over the whole validation split.

A rung is a gin file; a contender is gin bindings over it, with the rate that
experiments/rates found for it. Quality is the negative log perplexity after the last step,
nothing dropped. Cells run side by side, one on each core.
"""

import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.experiment import ENGLISH, Contender, run_name
from experiments.measured import Cells, finals_of
from experiments.pages import ROOT, read_results
from experiments.rules import Rule, judged
from experiments.side_by_side import num_cores, on_each_core
from experiments.statistics import intervals, parabola
from experiments.study import Study
from switchx.gin_config.building import job_from_gin
from switchx.models.flops import train_flops

DENSE = "ModelConfig.switch=None"
# What evaluation drops says nothing of the model.
DROPLESS = ("RouterConfig.overflow='dropless'", "SwitchConfig.dispatcher='dropless'")
# The ladder drops nothing in training either; these are over what has a capacity.
WITH_CAPACITY = ("RouterConfig.overflow='drop'", "SwitchConfig.dispatcher='gather'")
# Of a core that trains these models; what a run takes beside: compilation, validation.
FLOPS_PER_SECOND, SECONDS_BESIDE = 50e9, 40.0
# Sweeps of experiments/rates by number of experts; other numbers are interpolated.
SWEPT = {1: "dense", **{n: f"{n} experts" for n in (2, 4, 16, 32)}}


@dataclasses.dataclass(frozen=True)
class Rung:
    """A size of models and length of training.

    Attributes:
        steps: TRAIN_STEPS of the file.
        suffix: what names of its contenders end with in experiments/rates.
    """

    gin_file: str
    steps: int
    suffix: str = ""


R0 = Rung("configs/runs/ladder_r0.gin", 1280)
R1 = Rung("configs/runs/ladder_r1.gin", 2880, ", R1")


@dataclasses.dataclass(frozen=True)
class OnLadder(Contender):
    """A contender of the ladder.

    Attributes:
        rate_of: model of experiments/rates whose rate it has, or a number of experts, which
            is interpolated in its logarithm where it was not swept; a float is the rate.
        length: steps over those of the rung. The rate goes with its root: rate * length^-0.5
            is assumed, and the same for all.
        has_capacity: whether training may drop tokens; it is then evaluated without a capacity
            by a command of its own.
    """

    rate_of: str | int | float = 16
    length: float = 1.0
    has_capacity: bool = False


@dataclasses.dataclass(frozen=True)
class Runs:
    """Contenders of a rung; the first is what the tables compare with."""

    contenders: tuple[OnLadder, ...]
    rung: Rung = R0
    seeds: tuple[int, ...] = ()


def rate(rung: Rung, contender: OnLadder) -> float:
    """The learning rate of a contender.

    Raises:
        ValueError: experiments/rates has not been run, or found no rate for it.
    """
    if isinstance(contender.rate_of, float):
        return contender.rate_of * contender.length**-0.5
    found = read_results(ROOT / "experiments/rates")
    if found is None:
        raise ValueError(
            "experiments/rates has no results, and contenders have the rates that it finds; "
            "run it first: `make experiments EXPERIMENT=rates DATA=FOLDER`"
        )

    def swept(name: str) -> float:
        qualities = found["quality"].get(name + rung.suffix, {})
        fit = parabola([*map(float, qualities)], [*qualities.values()]) if qualities else None
        if fit is None or fit.rate is None:
            raise ValueError(
                f"{contender.name}: rate not found: experiments/rates "
                + (f"says {fit.problem}" if fit else f"did not sweep {name}{rung.suffix}")
            )
        return fit.rate

    if isinstance(contender.rate_of, str):
        own = swept(contender.rate_of)
    elif contender.rate_of in SWEPT:
        own = swept(SWEPT[contender.rate_of])
    else:
        logs = [math.log(swept(name)) for name in SWEPT.values()]
        sizes = np.log2([*SWEPT])
        own = math.exp(np.interp(math.log2(contender.rate_of), sizes, logs))
    return own * contender.length**-0.5


def bindings_of(study: Study, rung: Rung, contender: OnLadder, seed: int) -> list[str]:
    """All bindings of a run over the rung's file, with a rate of its own but in a quick run."""
    own = 0.01 if study.is_quick else rate(rung, contender)
    steps = round(rung.steps * contender.length)
    return [
        f"TRAIN_STEPS={steps}",
        f"WARMUP_STEPS={1 if study.is_quick else steps // 20}",
        f"CHECKPOINT_EVERY={steps // 4}",
        f"LEARNING_RATE={own:.6g}",
        f"SEED={seed}",
        f"FILES=<data {' '.join(ENGLISH)}>",
        "checkpointer.Retention.keep_period=None",
        *WITH_CAPACITY * contender.has_capacity,
        *("TrainingJob.eval_batches=1",) * contender.has_capacity,
        *of_seed(contender.bindings, seed),
    ]


def of_seed(bindings: Sequence[str], seed: int) -> list[str]:
    """The bindings with the folder of this seed's run in `<pretrained NAME>`."""

    def folder(match: re.Match) -> str:
        return f"<pretrained {run_name(match[1], seed)}>"

    return [re.sub("<pretrained ([^>]*)>", folder, each) for each in bindings]


def train_all(study: Study, cells: Cells, runs: Runs) -> dict[str, Any]:
    """Trains every contender with every seed, seed by seed.

    Returns:
        As results.json has it: `curves` (the last step's quality alone, by contender and
        seed), `seeds`, `steps`, `models` (FLOPs of a token over the first one's, those of the
        training, rate, length, share of tokens dropped at the end of training, skipped steps),
        and `validation`, tokens and bytes of the split, of which a contender without a
        capacity is needed.
    """
    if study.is_quick:
        last = [each for each in runs.contenders if not each.has_capacity][-1]
        runs = dataclasses.replace(runs, contenders=(runs.contenders[0], last), seeds=(0,))
    flops = {
        each.name: flops_of(
            study, runs.rung, bindings_of(study, runs.rung, each, runs.seeds[0])
        )
        for each in runs.contenders
    }
    first, _ = flops[runs.contenders[0].name]
    pairs = [*itertools.product(runs.seeds, runs.contenders)]
    if not study.is_quick:
        suffix = runs.rung.suffix
        print_plan({run_name(e.name + suffix, seed): flops[e.name][1] for seed, e in pairs})
    found = on_each_core(lambda pair: _trained(study, cells, runs.rung, *pair), pairs)
    by_pair = {(seed, each.name): f for (seed, each), f in zip(pairs, found, strict=True)}
    curves, models = {}, {}
    for each in runs.contenders:
        of_seeds = [by_pair[seed, each.name] for seed in runs.seeds]
        curves[each.name] = [{runs.rung.steps: one["quality"]} for one in of_seeds]
        models[each.name] = {
            "flops": flops[each.name][0] / first,
            "training_flops": flops[each.name][1],
            "rate": None if study.is_quick else rate(runs.rung, each),
            "length": each.length,
            "dropped": statistics.mean(one["dropped"] for one in of_seeds),
            "skipped_steps": sum(one["skipped_steps"] for one in of_seeds),
        }
    return {
        "curves": curves,
        "seeds": list(runs.seeds),
        "steps": runs.rung.steps,
        "models": models,
        "validation": {
            # Those with a capacity score a part of the split while they train.
            "tokens": max(one["scored_tokens"] for one in found),
            "bytes": cells.get(
                {"bytes_of_validation": runs.rung.gin_file},
                lambda: _bytes_of_validation(study, runs),
            ),
        },
    }


def flops_of(study: Study, rung: Rung, bindings: Sequence[str]) -> tuple[float, float]:
    """Training FLOPs of a sequence, and of a run with these bindings over the rung's file."""
    job = job_from_gin([ROOT / rung.gin_file], study.placed(bindings))
    of_one = train_flops(job.model, *job.sequence_lengths)
    return of_one, of_one * job.batch_size * job.train_steps


def print_plan(flops: dict[str, float]) -> None:
    """Says how long runs take that are not done yet, if none is, by their FLOPs."""
    seconds = sum(each / FLOPS_PER_SECOND + SECONDS_BESIDE for each in flops.values())
    minutes, cores = seconds / 60 / num_cores(), num_cores()
    print(f"PLAN {len(flops)} runs, some {minutes:.0f} minutes on {cores} cores: "
          f"{', '.join(flops)}", flush=True)  # fmt: skip


def run_by(
    study: Study, runs: Runs, claims: Sequence[Rule], judge: Callable, **measured
) -> None:
    """Trains all contenders at the study's look, writes results, figure and page.

    Args:
        judge: what follows from what was measured (`Study.publish`), such as `judge_by`'s.
        measured: beside what `train_all` returns.
    """
    files, cells = study.files(*ENGLISH), study.cells()
    trained = train_all(study, cells, study.at_look(runs, claims[0]))
    seconds = wall_seconds(cells)
    study.publish(cells, files, judge, **trained, **measured, wall_seconds=seconds)


def judge_by(claims: Sequence[Rule]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """`judge` of an experiment that has nothing but the runs of a rung, by its rules."""

    def judge(results: dict[str, Any]) -> dict[str, Any]:
        return judged(claims, results) | {
            "intervals": intervals(results),
            "intervals_of": f"over {next(iter(results['curves']))}, nats per token",
            "tables": [{"title": "", "rows": rows(results)}],
        }

    return judge


def _trained(study: Study, cells: Cells, rung: Rung, seed: int, each: OnLadder) -> dict:
    """What `Study.train` found, with `quality`."""
    name = run_name(each.name + rung.suffix, seed)
    found = study.train(cells, name, [rung.gin_file], bindings_of(study, rung, each, seed))
    if not each.has_capacity:
        step = max(found["curve"], key=int)
        return found | {"quality": found["curve"][step]}
    batches = 1 if study.is_quick else None
    evaluated = study.command(
        cells,
        f"{name}_evaluated",
        "eval",
        f"--model_dir=<run {name}>",
        f"--gin.FILES=<data {' '.join(ENGLISH)}>",
        f"--gin.TrainingJob.eval_batches={batches}",
        *(f"--gin.{binding}" for binding in DROPLESS),
    )
    return found | {"quality": evaluated["neg_log_perplexity"]}


def _bytes_of_validation(study: Study, runs: Runs) -> int:
    """Of the split's text."""
    bindings = study.placed(bindings_of(study, runs.rung, runs.contenders[0], 0))
    job = job_from_gin([ROOT / runs.rung.gin_file], bindings)
    texts = job.source.corpus.open("validation", job.data_dir)
    return sum(len(example[field].encode()) for example in texts for field in texts.fields)


def wall_seconds(cells: Cells) -> int:
    """Of the whole machine: a cell has one of its cores."""
    return round(cells.seconds / num_cores())


def bits_per_byte(results: dict[str, Any]) -> dict[str, list[float]]:
    """Loss after the last step, by contender, one a seed."""
    split = results["validation"]
    scale = -split["tokens"] / split["bytes"] / math.log(2)
    return {name: [scale * each for each in v] for name, v in finals_of(results).items()}


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """A row each contender of what `train_all` returned, for a page; without a quality where it
    diverged."""
    finals, over = finals_of(results), intervals(results)
    first, bits = next(iter(finals)), bits_per_byte(results)
    return [
        {
            "model": name,
            **{key: results["models"][name][key] for key in ("rate", "flops", "length")},
            "negative log perplexity": statistics.mean(of_seeds),
            "lowest seed": min(of_seeds),
            "highest seed": max(of_seeds),
            "bits per byte": statistics.mean(bits[name]),
            f"over {first} (95%)": over.get(name),
            "dropped tokens": results["models"][name]["dropped"],
            "skipped steps": results["models"][name]["skipped_steps"],
        }
        for name, of_seeds in finals.items()
    ]
