# SPDX-License-Identifier: Apache-2.0
"""`switchx teach`: a teacher's most probable tokens for a student's batches, on disk."""

import argparse
import functools
import pathlib

from switchx.cli import arguments as shared
from switchx.cli import hosts
from switchx.fields import json_text
from switchx.malloc import keep_freed_memory

DESCRIPTION = """\
Reads the batches that a student will be trained on, and writes its teacher's logits for them:

  switchx teach --gin_file=configs/runs/distill.gin --gin.TEACHER=runs/tiny --output=answers \\
    --top=16
  switchx train --gin_file=configs/runs/distill.gin --gin.TEACHER=answers \\
    --gin.Distillation.starts_from_teacher=False --model_dir=runs/student

The first command has the gin files and bindings of the second, so that task, seed, batches and
TRAIN_STEPS are the same; training refuses any other batch. Several students can learn from one
folder. For each position --top tokens and their logits are kept, 8 bytes per token.

Several processes, started like those of `switchx train`, write their rows of each batch; any
number of processes can read them.
"""


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "teach", run, "write a teacher's logits for students", DESCRIPTION
    )
    shared.add_gin_arguments(parser)
    shared.add_trust(parser)
    shared.add_output(parser, "folder to write; must be new or empty", "DIR", required=True)
    shared.add_flags(parser, {"--top=K": "tokens kept per position"}, top=16)
    shared.add_json(parser)
    hosts.add_hosts(parser)


def run(arguments: argparse.Namespace) -> int:
    from switchx.whole_folders import require_free

    require_free(arguments.output)
    processes = hosts.processes_of(arguments)
    with hosts.reporter_of(processes) as reporter:
        reporter.note(keep_freed_memory())
        reporter.note("loading JAX and the data libraries")
        prepare = functools.partial(_job_of, arguments)
        work = functools.partial(_write, arguments, reporter)
        if processes is None:
            job = prepare()
            num_bytes = work(job)
        else:
            options = "output", "top"
            job, num_bytes = hosts.run_together(
                processes,
                arguments,
                prepare=prepare,
                state=lambda job: hosts.statement(job, arguments, *options),
                work=work,
            )
    if processes is not None and not processes.is_first:
        return 0
    output = str(pathlib.Path(arguments.output).expanduser().absolute())
    report = {"command": "teach", "output": output, "batches": job.train_steps}
    report |= {"top": arguments.top, "bytes_of_files": num_bytes}
    text = f"{output}: {job.train_steps} batches, {num_bytes:,} bytes"
    print(json_text(report) if arguments.json else text)
    return 0


def _job_of(arguments: argparse.Namespace):
    """The student's job, whose teacher is a run folder."""
    from switchx.fields import require
    from switchx.gin_config import building
    from switchx.training.distillation.written_teacher import has_logits

    job = building.parse_job(*shared.gin_of(arguments))
    require(
        job.distillation is not None,
        "there is no teacher: use --gin_file=configs/runs/distill.gin, or "
        "--gin.DISTILLATION=@Distillation()",
    )
    require(
        not has_logits(job.distillation.teacher),
        f"{job.distillation.teacher} is what `switchx teach` wrote; give the run folder of "
        "a teacher",
    )
    return job


def _write(arguments: argparse.Namespace, reporter, job) -> int:
    from switchx.training.distillation.written_teacher import write_logits

    return write_logits(job, arguments.output, arguments.top, note=reporter.note)
