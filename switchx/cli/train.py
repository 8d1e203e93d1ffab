# SPDX-License-Identifier: Apache-2.0
"""`switchx train`: pretrain or fine-tune what gin files describe, in one run folder."""

import argparse
import functools
import os
import time

from switchx.cli import arguments as shared
from switchx.cli import hosts
from switchx.malloc import keep_freed_memory

DESCRIPTION = """\
Trains what the gin files describe and writes checkpoints, metrics.jsonl, TensorBoard events
and the operative configuration into the run folder.

  switchx train --gin_file=configs/runs/pretrain_tiny.gin --gin.TRAIN_STEPS=100 --model_dir=DIR

Started again with the same command, it resumes from the last complete checkpoint, to the
bit; kill -9 does no harm. SIGTERM and Ctrl-C save before they leave, a second Ctrl-C
waits for a save alone; under a launcher or of several processes each then leaves with status
75, to be started again. --stop_on_alarm saves and ends with status 3 at the first alarm of the
routing; the same command goes on, past it. It ends with a summary on standard output, and says
where compiled programs are kept (JAX_COMPILATION_CACHE_DIR; JAX_ENABLE_COMPILATION_CACHE=false
keeps none).

Macros that every file in configs/runs honours:

  TRAIN_STEPS       step at which training ends; may be raised to go on
  BATCH_SIZE        rows of a batch, over all devices
  INPUTS_LENGTH     tokens of a row, for the encoder
  TARGETS_LENGTH    tokens of a row, for the decoder
  NUM_MICROBATCHES  parts of a batch whose gradients are summed
  LEARNING_RATE     of the optimizer's file
  WARMUP_STEPS      of the optimizer's file, where it has a warm-up
  SEED              of parameters, dropout, jitter and data order
  LOG_EVERY         steps between lines of metrics.jsonl
  EVAL_EVERY        steps between evaluations
  CHECKPOINT_EVERY  steps between checkpoints
  BEST_METRIC       of the checkpoint that is kept as the best, as glue_cola/accuracy
  LOCAL_DIR         folder on each machine's disk for copies between checkpoints
  LOCAL_EVERY       steps between copies
  GRACE_S           seconds from SIGTERM to the kill: a longer save is not begun
  EVAL_TIME_SHARE   most time of generating texts at evaluations, a share of training's
  DATA_DIR          where corpora are (default: SWITCHX_DATA_DIR, or ~/.cache/switchx)
  VOCABULARY_FILE   SentencePiece model, tokenizer.json or run folder, for the task's own;
                    VOCAB_SIZE follows
  INIT_FROM         run folder to start from, with its model and vocabulary
  INIT_STEP         which of its checkpoints, a number or best (default: the newest)
  INIT_RULES, INIT_DROP, INIT_OPTIMIZER  what of it (docs/training.md)
"""

# EX_TEMPFAIL of sysexits.h: nothing is wrong, the same command goes on.
STOPPED_STATUS = 75


ELASTIC = {
    "--mesh=auto": "the planner's fastest mesh for the devices there are, in place of the gin "
    "files' mesh, dispatcher and microbatches",
    "--hardware=NAME|FILE": "what they are, as in `switchx plan` (default: what JAX says they "
    "are)",
}
FLAGS = {
    "--stop_on_alarm": "save and end, with status 3, at the first alarm of the routing "
    "(docs/routing_statistics.md)",
    "--stop_with_stdin": "save and end when standard input ends, for a program that starts "
    "this one and holds the other end of the pipe: it may be killed",
}


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "train", run, "pretrain or fine-tune a model, or resume", DESCRIPTION
    )
    shared.add_gin_arguments(parser)
    shared.add_model_dir(
        parser,
        "run folder: made if it is not there, resumed if it is",
        kind=shared.not_empty,
    )
    elastic = parser.add_argument_group(
        "elastic training",
        "Started again with fewer devices, or with more, a run goes on with the same batches\n"
        "and losses; docs/several_hosts.md.",
    )
    shared.add_flags(elastic, ELASTIC)
    parser.add_argument(
        "--profile",
        type=_profiled,
        metavar="START:END",
        help="write a jax.profiler trace of the steps after step START until END into the run "
        "folder, as 10:20 for ten steps",
    )
    shared.add_flags(parser, FLAGS)
    hosts.add_hosts(parser)


def _profiled(text: str) -> tuple[int, int]:
    start, _, end = text.partition(":")
    if not (start.isdecimal() and end.isdecimal() and int(start) < int(end)):
        raise argparse.ArgumentTypeError(
            f"{text!r} has no steps; use START:END, two step numbers, the second one larger, "
            "as 10:20 for the ten steps after step 10"
        )
    return int(start), int(end)


def run(arguments: argparse.Namespace) -> int:
    started_s = time.perf_counter()
    if arguments.stop_with_stdin:
        from switchx.training.stopping import stop_with_stdin

        stop_with_stdin()
    if arguments.hardware is not None and arguments.mesh is None:
        arguments.parser.error("--hardware is for --mesh=auto; add that, or leave it out")
    processes = hosts.processes_of(arguments)
    is_first = processes is None or processes.is_first
    with hosts.reporter_of(processes) as reporter:
        keep_freed_memory()  # before JAX; `switchx.jobs.train` says so
        reporter.note("loading JAX and the data libraries")
        from switchx.gin_config import building

        def prepare():
            return building.parse_job(*shared.gin_of(arguments))

        work = functools.partial(_train, arguments, reporter, started_s)
        if processes is None:
            job = prepare()
            outcome = work(job)
        else:
            options = "model_dir", "mesh", "hardware", "stop_on_alarm"
            job, outcome = hosts.run_together(
                processes,
                arguments,
                prepare=prepare,
                state=lambda job: hosts.statement(job, arguments, *options),
                work=work,
            )
    if is_first:
        from switchx.checkpoint.run_folder import RunFolder
        from switchx.cli import summary

        summary.print_summary(job, RunFolder(arguments.model_dir), outcome, arguments)
    return exit_status(outcome.is_finished, processes)


def exit_status(is_finished: bool, processes) -> int:
    """0, but 75 of each of several processes where a signal came before the last step.

    A launcher takes 0 for the end of the run, and would not start it again: those of `launch/`
    set SWITCHX_LAUNCHED, for a process alone.
    """
    is_launched = processes is not None or "SWITCHX_LAUNCHED" in os.environ
    return STOPPED_STATUS if is_launched and not is_finished else 0


def _train(arguments: argparse.Namespace, reporter, started_s: float, job):
    """Trains the job in its run folder; the Outcome, also of a run that a signal ended."""
    from switchx.gin_config import building
    from switchx.jobs import TrainingInterrupted, train

    configuration, devices = building.operative_config("JOB"), None
    if arguments.mesh is not None:
        elastic = _planned(arguments, reporter, job)
        job, devices = elastic.job, elastic.devices
    try:
        return train(
            job,
            arguments.model_dir,
            configuration=configuration,
            devices=devices,
            reporter=reporter,
            profile=arguments.profile,
            started_s=started_s,
            stop_on_alarm=arguments.stop_on_alarm,
        )
    except TrainingInterrupted as interrupted:
        return interrupted.outcome


def _planned(arguments: argparse.Namespace, reporter, job):
    """The ElasticJob for the devices there are; says what was chosen."""
    import jax

    from switchx.compiled.elastic import job_for_devices
    from switchx.hardware.spec import hardware_of, load_hardware

    if arguments.hardware is None:
        hardware = hardware_of(jax.devices()[0].device_kind)
    else:
        hardware = load_hardware(arguments.hardware)
    elastic = job_for_devices(job, hardware)
    layout = elastic.plan.layout
    reporter.note(
        f"mesh {layout.name}, planned for {len(elastic.devices)} devices of {hardware.name}; "
        f"{elastic.num_idle} idle"
    )
    return elastic
