# SPDX-License-Identifier: Apache-2.0
"""Trains dense and Switch models on equal data for equal steps, and tabulates who is ahead.

    python experiments/switch_vs_dense/run.py --output=runs/switch_vs_dense

Each run resumes where it was left. The time of a step is measured afterwards, all models
taking turns, so that the wall-clock column does not depend on what else the machine did
during hours of training. Writes results.json beside this file.
"""

import argparse
import json
import pathlib
import statistics

import jax

from pallas_kernels.bench.timing import Contender, speedup, take_turns
from switchx.bench.report import environment
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.loader import evaluation_batches
from switchx.data.mixtures import as_mixture
from switchx.gin_config import building
from switchx.training.job import TrainingJob
from switchx.training.loop import train
from switchx.training.program import TrainingProgram

HERE = pathlib.Path(__file__).parent
EXPERTS = (0, 2, 8, 32)  # 0 is the dense model of equal FLOPs


class Lines:
    """A reporter of one line an evaluation."""

    def __init__(self, name: str):
        self.name = name

    def begin(self, first_step, last_step): ...
    def stepped(self, step): ...
    def logged(self, step, metrics): ...

    def evaluated(self, step, metrics):
        print(f"{self.name} step {step}: {metrics['neg_log_perplexity']:.4f}", flush=True)

    def note(self, text):
        print(f"{self.name}: {text}", flush=True)


def build_job(num_experts: int, seed: int, steps: int) -> TrainingJob:
    """The run's job; data order and initialization follow the seed."""
    bindings = [f"TRAIN_STEPS={steps}", f"SEED={seed}"]
    bindings.append(f"NUM_EXPERTS={num_experts}" if num_experts else "ModelConfig.switch=None")
    building.parse_files([str(HERE / "run.gin")], bindings)
    return building.build("JOB", TrainingJob)


def name_of(num_experts: int) -> str:
    return f"switch {num_experts}" if num_experts else "dense"


def train_all(output: pathlib.Path, seeds: int, steps: int) -> dict[str, list[dict]]:
    """Validation curves by model, one a seed: `{step: negative log perplexity}`."""
    curves = {name_of(n): [] for n in EXPERTS}
    for seed in range(seeds):
        for num_experts in EXPERTS:
            name = name_of(num_experts)
            run = RunFolder(output / f"{name.replace(' ', '_')}_seed{seed}")
            job = build_job(num_experts, seed, steps)
            if not train(job, run, Lines(f"{name}, seed {seed}")).is_finished:
                raise SystemExit(f"stopped; the same command resumes {name}, seed {seed}")
            lines = map(json.loads, run.validation.read_text().splitlines())
            curves[name].append({line["step"]: line["neg_log_perplexity"] for line in lines})
    return curves


def step_times(rounds: int) -> dict[str, float]:
    """Seconds of a training step relative to the dense model's, measured in turns."""
    contenders = {name_of(n): _stepper(n) for n in EXPERTS}
    take_turns(list(contenders.values()), rounds, num_steps=10)
    dense = contenders["dense"]
    return {name: 1 / speedup(each, dense) for name, each in contenders.items()}


def _stepper(num_experts: int) -> Contender:
    """The run's own step on one of its batches, compiled and ready."""
    job = build_job(num_experts, seed=0, steps=1)
    program = TrainingProgram(job)
    (task,) = as_mixture(job.source).tasks
    batch = program.place(next(evaluation_batches(task, job.batches, num_batches=1)))
    held = [program.init_state()]

    def step():
        with program.scope():
            held[0], metrics = program.train_step(held[0], batch)
        jax.block_until_ready((held[0], metrics))

    return Contender(name_of(num_experts), step)


def first_step_at(curve: dict[int, float], quality: float) -> float | None:
    """Step at which a curve first reaches a quality, interpolated between evaluations."""
    points = sorted(curve.items())
    for (step_0, value_0), (step_1, value_1) in zip(points, points[1:], strict=False):
        if value_0 < quality <= value_1:
            return step_0 + (quality - value_0) / (value_1 - value_0) * (step_1 - step_0)
    return None


def tabulate(curves: dict[str, list[dict]], times: dict[str, float]) -> list[dict]:
    """One row a model: final quality, and how much sooner it reaches the dense model's."""
    rows = []
    for name, seeds in curves.items():
        finals = [curve[max(curve)] for curve in seeds]
        gains = []
        for curve, dense in zip(seeds, curves["dense"], strict=True):
            step = first_step_at(curve, dense[max(dense)])
            gains.append(max(dense) / step if step else 0.0)
        rows.append(
            {
                "model": name,
                "final_neg_log_perplexity": statistics.mean(finals),
                "lowest_seed": min(finals),
                "highest_seed": max(finals),
                "speedup_in_steps": statistics.mean(gains) if name != "dense" else 1.0,
                "step_time_vs_dense": times[name],
                "speedup_in_time": statistics.mean(gains) / times[name]
                if name != "dense"
                else 1.0,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=pathlib.Path, required=True, help="folder for the runs"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9, help="turns when timing a step")
    parser.add_argument("--results", type=pathlib.Path, default=HERE / "results.json")
    arguments = parser.parse_args()
    curves = train_all(arguments.output, arguments.seeds, arguments.steps)
    rows = tabulate(curves, step_times(arguments.rounds))
    result = {
        "environment": environment(),
        "steps": arguments.steps,
        "rows": rows,
        "curves": {name: [{str(s): v for s, v in c.items()} for c in seeds]
                   for name, seeds in curves.items()},
    }  # fmt: skip
    arguments.results.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
