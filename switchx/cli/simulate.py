# SPDX-License-Identifier: Apache-2.0
"""`switchx simulate cache`: the policy and size of a cache of experts in host memory."""

import argparse
import math

from switchx.cli import arguments as shared

DESCRIPTION = """\
Runs the experts that a run requests through a cache in host memory, for each policy and several
capacities, and writes the ones to use as a gin file. The model is not run.

  switchx simulate cache --model_dir=DIR --output=cache.gin
  switchx simulate cache --model_dir=DIR --requests=training --tokens_per_step=512
  switchx simulate cache --model_dir=DIR --host_bytes=8000000000 --json

Requests are those that a run with experts in storage recorded (DIR/storage/trace.npz), or are
made from the newest sample of tokens in DIR/routing: as decoding would request the decoder's
experts, or as training would request all of them (forward, backward, update). The policy is
chosen on the first half of the requests. The exit status is 1 if a check does not hold:
next use against Belady's optimum, the choice against the best policy of the second half.
"""
FLAGS = {
    "--requests=decoding|training": "requests to make from the tokens of DIR/routing (default: "
    "decoding)",
    "--tokens_per_step=N": "tokens of a step, over all stacks (default: 1 in decoding, 512 in "
    "training)",
    "--host_bytes=N": "capacity in bytes; default: the smallest of 10, 25, 50, 75 and "
    "100%% of all experts that reaches --min_hits, or the largest",
    "--min_hits=X": "hit rate to reach in the first half",
}
# Capacity for the checks' synthetic traces, as a share of all experts.
FRACTION = 0.25


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "simulate", run, "choose a cache of experts by simulation", DESCRIPTION
    )
    parser.add_argument("what", choices=["cache"], help="what to simulate")
    shared.add_model_dir(parser, "run folder of `switchx train`")
    shared.add_flags(parser, FLAGS, min_hits=0.9)
    shared.add_output(parser, "write policy and capacity as a gin file")
    shared.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    import pathlib

    from switchx.files import write_atomically
    from switchx.results import Report
    from switchx.storage import simulation

    trace = _trace(arguments)
    if arguments.host_bytes is None:
        simulations = simulation.simulate_capacities(trace)
    else:
        capacity = min(arguments.host_bytes // trace.record_bytes, trace.num_keys)
        least = simulation.least_capacity(trace)
        if capacity < least:
            raise ValueError(
                f"--host_bytes={arguments.host_bytes} holds {capacity} experts of "
                f"{trace.record_bytes:,} bytes, but one layer needs {least} at once; give at "
                f"least {least * trace.record_bytes}"
            )
        simulations = [simulation.simulate(trace, capacity)]
    chosen = simulation.choose(simulations, arguments.min_hits)
    rows = [_row("run", trace, each) for each in simulations]
    rows += [_traffic(trace, each) for each in simulations]
    more_rows, checks = _checks(chosen)
    rows += more_rows
    if arguments.output:
        text = _cache_gin(arguments, trace, chosen)
        write_atomically(pathlib.Path(arguments.output).expanduser(), text.encode())
    status = Report("simulate cache", rows, checks).print(arguments.json)
    if not arguments.json:
        print(
            f"{chosen.chosen}, {chosen.capacity} of {trace.num_keys} experts "
            f"({chosen.capacity * trace.record_bytes:,} bytes)"
        )
        if arguments.output:
            print(arguments.output)
    return status


def _trace(arguments: argparse.Namespace):
    """The requests of the run: recorded ones, or made from its routing."""
    from switchx.analysis.routing import read_snapshots
    from switchx.checkpoint.run_folder import RunFolder, read_sparse_model_config
    from switchx.storage.trace import read_trace, trace_of_choices

    folder = RunFolder(arguments.model_dir)
    model = read_sparse_model_config(folder)
    recorded = folder.root / "storage" / "trace.npz"
    if recorded.exists():
        for name in ("requests", "tokens_per_step"):
            if (value := getattr(arguments, name)) is not None:
                raise ValueError(
                    f"--{name}={value}: {recorded} has the requests of the run itself; leave "
                    f"--{name} out, or move the file away"
                )
        return read_trace(recorded)
    is_training = arguments.requests == "training"
    stacks = [
        (stack.layers, stack.expert_NTS)
        for stack in read_snapshots(folder.routing)[-1].stacks
        if is_training or stack.layers[0].startswith("decoder")
    ]
    if not stacks:
        raise ValueError(
            f"the decoder of {folder.root} has no Switch layer, so decoding requests no "
            "experts; use --requests=training"
        )
    layers = [name for names, _ in stacks for name in names]
    return trace_of_choices(
        stacks,
        model.switch.num_experts,
        _record_bytes(_job(folder), layers, is_training),
        sweeps=3 if is_training else 1,
        tokens_per_step=arguments.tokens_per_step or (512 if is_training else 1),
    )


def _job(folder):
    from switchx.gin_config import building
    from switchx.training.job import TrainingJob

    building.parse_files([str(folder.operative_config)], [], [])
    return building.build("JOB", TrainingJob)


def _record_bytes(job, layers: list[str], is_training: bool) -> int:
    """Bytes of an expert's parameters, and in training of its optimizer statistics."""
    from switchx.compiled.workload import state_arrays

    stacks = {name.split()[0] for name in layers}
    arrays = [
        array
        for array in state_arrays(job)
        if array.table == "expert_params"
        and stacks & {*array.name.split("/")}  # the optimizer's begin like `0/mu/decoder`
        and (is_training or array.kind == "params")
    ]
    total = sum(math.prod(array.shape) * array.itemsize for array in arrays)
    return total // (len(layers) * job.model.switch.num_experts)


def _row(what: str, trace, each, name: str = "") -> dict:
    """The row of hit rates at one capacity, shown as a share of all experts.

    Args:
        what: name of the first column.
        name: name of the trace; the share is added.
    """
    share = f"{name} {each.capacity / trace.num_keys:.0%}".strip()
    return {what: share} | {policy: each.hits(policy) for policy in each.hit_T}


def _traffic(trace, each) -> dict:
    """The chosen policy's bytes in host memory, and its reads and writes."""
    num_steps = len(set(trace.step_T.tolist()))
    mib = trace.record_bytes / 2**20
    num_misses = int((~each.hit_T[each.chosen]).sum())
    return {
        "chosen": each.chosen,
        "experts": each.capacity,
        "vs_best": each.chosen_vs_best,
        "host_mib": each.capacity * mib,
        "step_read_mib": num_misses * mib / num_steps,
        "step_written_mib": each.num_written_back[each.chosen] * mib / num_steps,
    }


def _checks(chosen) -> tuple[list[dict], list]:
    """Rows of synthetic traces, and the checks of these and of the run.

    Args:
        chosen: the simulation of the run whose capacity and policy are recommended.
    """
    from switchx.results import Check
    from switchx.storage.simulation import simulate, synthetic_traces, training_trace

    rows = []
    checks = []
    choices = [chosen.chosen_vs_best]
    for name, used, bound in (("all_touched", 1.0, ">=0.999"), ("half_touched", 0.5, ">=0.80")):
        trace, ratios = training_trace(used), []
        for fraction in (0.25, 0.5):
            each = simulate(trace, int(fraction * trace.num_keys))
            rows.append(_row("synthetic", trace, each, f"training, {name}"))
            ratios.append(each.hits("next_use") / each.hits("belady"))
        checks.append(Check(f"next_use_vs_belady_{name}", min(ratios), bound))
    for name, trace in synthetic_traces().items():
        each = simulate(trace, int(FRACTION * trace.num_keys))
        rows.append(_row("synthetic", trace, each, name))
        choices.append(each.chosen_vs_best)
    checks.append(Check("chosen_vs_best_policy", min(choices), ">=-0.02"))
    return rows, checks


def _cache_gin(arguments: argparse.Namespace, trace, chosen) -> str:
    """The choice, to be read after a run's own files."""
    command = shared.command_line("simulate", "cache", f"--model_dir={arguments.model_dir}")
    return f"""\
# Made by {command}
#
# {chosen.capacity} of {trace.num_keys} experts in host memory. Hit rate in the second half of
# the requests: {chosen.hits(chosen.chosen, half=1):.3f}, of Belady's optimum \
{chosen.hits("belady", half=1):.3f}.

from __gin__ import dynamic_registration
from switchx.training.offload import storage_spec

storage_spec.StorageSpec.host_bytes = {chosen.capacity * trace.record_bytes}
storage_spec.StorageSpec.policy = "{chosen.chosen}"
STORAGE = @storage_spec.StorageSpec()
"""
