# SPDX-License-Identifier: Apache-2.0
"""`switchx deploy`: from a trained run to a folder ready to be served, in six steps."""

import argparse
import math
from typing import Any

from switchx.cli import arguments as shared
from switchx.cli import devices
from switchx.inference.config import DecodingConfig

DESCRIPTION = """\
Turns a run into a model to serve, with one folder per step (SE-MoE, section 3.1):

  switchx deploy --model_dir=runs/tiny --output=deployed --experts=4 --bits=4 --platform=cpu
  switchx serve --model_dir=deployed/6_deploy
  echo "[69, 70, 258, 1]" | python deployed/6_deploy/run.py

  1_fuse      one unsharded model, without the optimizer
  2_reduce    --experts: fewer experts, by merging similar ones or dropping those of the
              lowest REAP score; with --teacher and --distill_steps, the model is trained on
              the teacher's probabilities and the run's text
  3_convert   layers unrolled, --dtype
  4_segment   split over --devices of --memory GiB, as the planner chooses
  5_optimize  --bits per expert weight; programs for --platform; if --memory has no room for
              all experts, they stay in host memory and stream to the device
  6_deploy    what run.py and `switchx serve` read

Repeating the command goes on with the first incomplete step; with other settings, it begins
with the first step that these affect. For each step it prints bytes, validation loss, tokens
per second and, from the third on, how many tokens differ from those of the same weights in
this process. The exit status is 1 if a check does not hold.
"""
# Options that are settings of the deployment by the same names.
SETTINGS = (
    *("experts", "reduce", "dtype", "devices", "bits", "device_kind", "batch_size"),
    *("input_length", "teacher", "distill_steps"),
)
MODEL = {
    "--experts=N": (int, "experts to keep in each Switch layer; default: all"),
    "--reduce=merge|drop": "with --experts: merge experts that compute alike, or drop those "
    "of the lowest REAP score",
    "--teacher=DIR": "with --experts: run folder whose model teaches the smaller one",
    "--distill_steps=N": "with --teacher: number of training steps",
    "--dtype=bfloat16|float32": "dtype of parameters and of computation, except routers'; "
    "default: as they are",
    "--devices=N": "number of devices to split over",
}
TARGET = {
    "--memory=GIB": (float, "memory of a device; default: no limit"),
    "--bits=4|8": (int, "bits of each expert weight; default: as they are"),
    "--platform=cpu|tpu|cuda": "platform to export for",
    "--device_kind=NAME": "device whose kernels are used, as JAX names it; default: TPU v5 "
    "lite, NVIDIA H200",
    "--batch_size=N": (int, "inputs processed at once"),
    "--input_length=N": (int, "maximum number of tokens of an input"),
}


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "deploy", run, "make a folder to be served, in six steps", DESCRIPTION
    )
    shared.add_model_dir(parser, "run folder of `switchx train`; nothing is written there")
    shared.add_output(
        parser, "folder of the steps; created, or continued", "DIR", required=True
    )
    shared.add_gin_arguments(parser, default="the run's own, for its validation text")
    shared.add_step(parser, "checkpoint to deploy")
    shared.add_flags(parser, MODEL, reduce="merge", devices=1)
    devices.add_mesh(parser, "the planner's for --devices; data is 1 unless given")
    shared.add_flags(parser, TARGET, required="platform", batch_size=8, input_length=64)
    # Outputs are searched for, not sampled: tokens are compared.
    names = (
        *("max_new_tokens", "beam_size", "length_penalty", "min_new_tokens"),
        *("repetition_penalty", "no_repeat_ngram_size", "forced_prefix"),
    )
    shared.add_options(parser, DecodingConfig, names)
    shared.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.mesh is not None:
        needed = math.prod(arguments.mesh.values())
        if arguments.devices not in (1, needed):
            raise ValueError(
                f"--devices={arguments.devices} with a --mesh of {needed}; leave out one"
            )
        arguments.devices = needed
    if arguments.devices > 1:
        shared.simulate_devices(arguments.devices)
    from switchx.progress import TerminalReporter
    from switchx.results import Report

    with TerminalReporter() as reporter:
        reporter.note("loading JAX and the data libraries")
        rows, checks = _deploy(arguments, reporter)
    return Report("deploy", rows, checks).print(arguments.json)


def _deploy(arguments: argparse.Namespace, reporter) -> tuple[list[dict[str, Any]], list]:
    from switchx.checkpoint.run_folder import RunFolder
    from switchx.deploy.checked_plan import DeployPlan
    from switchx.deploy.folders import require_deployment, steps_done_twice
    from switchx.deploy.measure import ValidationText
    from switchx.deploy.steps import Deployment
    from switchx.fields import describe
    from switchx.gin_config import building
    from switchx.results import Check
    from switchx.training.loop import open_evaluated
    from switchx.training.resume import check_same_model, read_as_prompts

    settings = _settings(arguments)
    require_deployment(arguments.output)
    plan = DeployPlan(arguments.model_dir, arguments.step, settings)
    folder = RunFolder(arguments.model_dir)
    job = check_same_model(folder, building.parse_job(*shared.gin_of(arguments, folder)))
    job = read_as_prompts(folder, job, reporter.note)
    split = plan.split
    if settings.devices > 1 or settings.memory_gib is not None:
        reporter.note(
            f"split {split.name}: {split.total / 2**20:,.2f} MiB a device, "
            f"{split.weights / 2**20:,.2f} of it weights"
        )
    if plan.ring is not None:
        ring = plan.ring
        reporter.note(
            f"experts in host memory, {ring.host / 2**20:,.2f} MiB, and a ring of {ring.slots} "
            f"slots: {ring.total / 2**20:,.2f} MiB on the device; {plan.because}"
        )

    def text() -> ValidationText:
        reporter.note("reading the validation text")
        return ValidationText.of(job, settings.batch_size, settings.input_length)

    records = [opened.records.fingerprint for opened in open_evaluated(job)]
    described = describe((job.source, job.batches, job.eval_batches, records))
    deployment = Deployment(plan, text, described, _command(arguments), job)
    made = deployment.run(arguments.output, reporter.note)
    (optimized,) = (each.measured for each in made if "compiled" in each.measured)
    rows = [*map(_measured, made), *map(_made, made), _optimized(optimized)]
    differing = sum(each.measured.get("tokens_differing") or 0 for each in made)
    return rows, [
        Check("tokens_differing", differing, "==0"),
        Check("steps_done_twice", steps_done_twice(arguments.output), "==0"),
        *_fits(optimized, settings.memory_gib),
    ]


def _measured(each) -> dict[str, Any]:
    """A step's row of what was measured."""
    measured = each.measured
    taught = measured.keys() & {"untaught_loss"}
    return {
        "step": each.path.name,
        "experts": measured["experts"],
        "weights_mib": measured["bytes_of_weights"] / 2**20,
        "files_mib": measured["bytes_of_files"] / 2**20,
        "loss_nats": measured["validation_loss"],
        "tokens_per_s": measured["tokens_per_s"],
        "differing": measured["tokens_differing"],
    } | {f"{name}_nats": measured[name] for name in taught}


def _made(each) -> dict[str, Any]:
    """A step's row of how it was made."""
    measured = each.measured
    collectives = measured.get("collectives") or {}
    return {
        "folder": each.path.name,
        "made": "now" if each.is_new else "before",
        "seconds": measured["seconds"],
        "mesh": measured.get("mesh"),
        "collectives": " ".join(f"{n} {kind}" for kind, n in collectives.items()) or None,
    }


def _optimized(measured: dict[str, Any]) -> dict[str, Any]:
    """The row of where the deployed programs hold experts, and what the compiler reports."""
    compiled = measured["compiled"] or {}
    return {
        "experts_are": measured["experts_are"],
        "because": measured["because"],
        "compiled_for": compiled.get("topology"),
        **{
            f"{name}_mib": compiled[name]["needed_bytes"] / 2**20 if compiled else None
            for name in ("prefill", "step")
        },
        "host_mib": compiled["step"]["host_bytes"] / 2**20 if compiled else None,
    }


def _fits(measured: dict[str, Any], memory_gib: float | None) -> list:
    """The check that memory suffices for what the compiler reports, if there is a compiler."""
    from switchx.results import Check

    if measured["compiled"] is None or memory_gib is None:
        return []
    needed = max(measured["compiled"][name]["needed_bytes"] for name in ("prefill", "step"))
    return [Check("fits", int(needed <= memory_gib * 2**30), "==1")]


def _settings(arguments: argparse.Namespace):
    from switchx.deploy.checked_plan import DeploySettings

    decoding = DecodingConfig(**shared.options_of(arguments, DecodingConfig))
    given = {name: getattr(arguments, name) for name in ("platform", "mesh", *SETTINGS)}
    return DeploySettings(memory_gib=arguments.memory, decoding=decoding, **given)


def _command(arguments: argparse.Namespace) -> str:
    """The command that makes this deployment again, for messages of what is deployed."""
    names = ("model_dir", "output", "step", "memory", *SETTINGS)
    given = {name: getattr(arguments, name) for name in names}
    given |= shared.options_of(arguments, DecodingConfig)
    words = shared.option_words(given)
    if arguments.mesh is not None:
        words += ["--mesh=" + ",".join(f"{axis}={n}" for axis, n in arguments.mesh.items())]
    words += shared.configuration_words(arguments)
    return shared.command_line("deploy", *words, f"--platform={arguments.platform}")
