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

Started again with the same command, it resumes bit for bit from the last complete checkpoint;
kill -9 does no harm. On SIGTERM or Ctrl-C it saves before it exits; a second Ctrl-C waits only
for a save; under a launcher or with several processes, each then exits with status 75, to be
started again. --stop_on_alarm saves and ends with status 3 at the first routing alarm; the
same command goes on past it. Training ends with a summary on standard output, and says where
compiled programs are kept (JAX_COMPILATION_CACHE_DIR; JAX_ENABLE_COMPILATION_CACHE=false keeps
none).

Macros that every file in configs/runs honours:

  TRAIN_STEPS       step at which training ends; may be raised to go on
  BATCH_SIZE        rows per batch, over all devices
  INPUTS_LENGTH     tokens per row, for the encoder
  TARGETS_LENGTH    tokens per row, for the decoder
  NUM_MICROBATCHES  parts of a batch whose gradients are summed
  LEARNING_RATE     learning rate of the optimizer's file
  WARMUP_STEPS      warm-up steps of the optimizer's file, if it has a warm-up
  SEED              seed of parameters, dropout, jitter and data order
  LOG_EVERY         steps between lines of metrics.jsonl
  EVAL_EVERY        steps between evaluations
  CHECKPOINT_EVERY  steps between checkpoints
  BEST_METRIC       metric by which the best checkpoint is kept, such as glue_cola/accuracy
  LOCAL_DIR         folder on each machine's disk for copies between checkpoints
  LOCAL_EVERY       steps between copies
  GRACE_S           seconds from SIGTERM to the kill: a longer save is not begun
  EVAL_TIME_SHARE   limit on the time of generating texts at evaluations, a share of training's
  DATA_DIR          where corpora are (default: SWITCHX_DATA_DIR, or ~/.cache/switchx)
  VOCABULARY_FILE   SentencePiece model, tokenizer.json or run folder, to replace the task's;
                    VOCAB_SIZE follows
  INIT_FROM         run folder to start from, with its model and vocabulary
  INIT_STEP         which of its checkpoints, a number or best (default: the newest)
  INIT_RULES, INIT_DROP, INIT_OPTIMIZER  which parts of it (docs/training.md)
"""

# EX_TEMPFAIL of sysexits.h: nothing is wrong, the same command resumes.
STOPPED_STATUS = 75


ELASTIC = {
    "--mesh=auto": "use the planner's fastest mesh for the available devices, in place of the "
    "gin files' mesh, dispatcher and microbatches",
    "--hardware=NAME|FILE": "kind of these devices, as in `switchx plan` (default: what JAX "
    "says)",
}
FLAGS = {
    "--stop_on_alarm": "save and end, with status 3, at the first routing alarm "
    "(docs/routing_statistics.md)",
    "--stop_with_stdin": "save and end when standard input ends, for a parent program that "
    "holds the other end of the pipe and may be killed",
}


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "train", run, "pretrain or fine-tune a model, or resume", DESCRIPTION
    )
    shared.add_gin_arguments(parser)
    shared.add_model_dir(
        parser,
        "run folder: created if it does not exist, resumed if it does",
        kind=shared.not_empty,
    )
    elastic = parser.add_argument_group(
        "elastic training",
        "A run started again with fewer or more devices goes on with the same batches and\n"
        "losses; docs/several_hosts.md.",
    )
    shared.add_flags(elastic, ELASTIC)
    parser.add_argument(
        "--profile",
        type=_profiled,
        metavar="START:END",
        help="write a jax.profiler trace of the steps after step START up to END into the run "
        "folder, such as 10:20 for ten steps",
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
    """0, but 75 for each of several processes if a signal came before the last step.

    A launcher takes 0 for the end of the run, and would not start it again. The launchers in
    `launch/` set SWITCHX_LAUNCHED, which counts even for a single process.
    """
    is_launched = processes is not None or "SWITCHX_LAUNCHED" in os.environ
    return STOPPED_STATUS if is_launched and not is_finished else 0


def _train(arguments: argparse.Namespace, reporter, started_s: float, job):
    """Trains the job in its run folder; returns the Outcome, even if a signal ended the run."""
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
    """The ElasticJob for the available devices; notes what was chosen."""
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
