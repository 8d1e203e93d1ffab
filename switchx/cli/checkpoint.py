# SPDX-License-Identifier: Apache-2.0
"""`switchx checkpoint`: what a run's checkpoints hold, whether they are sound, their mean."""

import argparse
import math
from collections.abc import Sequence

from switchx.cli import arguments as shared
from switchx.cli import hosts
from switchx.fields import json_text

DESCRIPTION = """\
Inspects and manages the checkpoints of a run folder.

  switchx checkpoint inspect DIR     steps, scores and sizes; names, shapes, dtypes, bytes and
                                     sharding of the newest one's arrays
  switchx checkpoint verify DIR      reads every byte of every checkpoint and names all faults
  switchx checkpoint average DIR OUT --steps=900,1000
                                     writes the mean of checkpoints as a new run folder
  switchx checkpoint rewind DIR --step=900
                                     training goes on from this one; later ones are kept
                                     under other names

Training or loading on another mesh, or with layers scanned that were unrolled, needs no
conversion. Only `rewind` changes DIR.
"""
INSPECT = """\
Shows the steps of a run's checkpoints, and the arrays of one of them: names, shapes,
dtypes, bytes, and how they were spread over the mesh that saved them. Reads no arrays.
"""
VERIFY = """\
Reads every byte of the checkpoints of a run and names every fault: files that are missing,
truncated or changed; parameters that are not those of the run's model; values that are not
finite; data states that do not belong to the step. The exit status is 1 if there is a fault.
Several processes read a checkpoint together, each its share.
"""
AVERAGE = """\
Writes averaged parameters of a run into OUT, a new folder that is read like a run folder: by
`switchx eval`, `generate`, `export`, `quantize`, `switchx.load` and INIT_FROM.
"""
REWIND = """\
Makes an earlier checkpoint the newest: the same `switchx train` command then goes on from
there, with that checkpoint's optimizer and place in the data. Later checkpoints are renamed to
`STEP.superseded-1` and are yours to delete. To begin with its parameters and a fresh optimizer,
train another run folder with INIT_FROM and INIT_STEP.
"""

AVERAGED = {
    "--steps=N,N,..": (shared.numbers, "the mean of the checkpoints at these steps"),
    "--moving": "the moving average that training kept (StepConfig.ema_decay)",
}


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "checkpoint", None, "inspect checkpoints, or go back to one", DESCRIPTION
    )
    actions = parser.add_subparsers(
        title="actions", metavar="inspect|verify|average|rewind", required=True
    )
    for name, run, help_text, description in (
        ("inspect", inspect, "show steps, scores, sizes and parameters", INSPECT),
        ("verify", verify, "read every byte and name all faults", VERIFY),
        ("average", average, "write the mean of checkpoints", AVERAGE),
        ("rewind", rewind, "go on from an earlier checkpoint", REWIND),
    ):
        action = actions.add_parser(
            name, prog=f"switchx checkpoint {name}", help=help_text, description=description
        )
        action.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
        action.add_argument("dir", metavar="DIR", help="run folder of `switchx train`")
        shared.add_trust(action)
        action.set_defaults(run=run, parser=action)
        shared.add_json(action)
        if name == "verify":
            action.add_argument("--step", type=int, metavar="N", help="step; default: all")
            hosts.add_hosts(action)
        elif name == "inspect":
            shared.add_step(action, "checkpoint")
        elif name == "average":
            _add_average(action)
        else:
            shared.add_step(action, "go on from the checkpoint")


def _add_average(action) -> None:
    action.add_argument("out", metavar="OUT", help="new folder")
    which = action.add_mutually_exclusive_group(required=True)
    shared.add_flags(which, AVERAGED)
    shared.add_step(action, "with --moving, the checkpoint that has it")


def inspect(arguments: argparse.Namespace) -> int:
    from switchx.checkpoint.items import stored_items
    from switchx.checkpoint.manifest import damages, read_manifest, scores_of
    from switchx.checkpoint.run_folder import RunFolder, read_config
    from switchx.tree import named_leaves

    run = RunFolder(arguments.dir)
    checkpoints, manifests = [], []
    for path in reversed(_paths(run)):
        row = {"step": int(path.name), "fault": next(damages(path), None)}
        if row["fault"] is None:
            manifests.append(read_manifest(path))
            row["bytes"] = sum(size for size, _ in manifests[-1].files.values())
            row["processes"] = len(list((path / "data").glob("process_*.json")))
        checkpoints.append(row)
    scores = scores_of(manifests)
    for row in checkpoints:
        row["score"] = scores.get(row["step"])
    step = _chosen(run, arguments.step, checkpoints)
    items = stored_items(run.checkpoints / str(step))
    arrays = [
        _array(f"{item}/{name}", leaf)
        for item, tree in items.items()
        for name, leaf in named_leaves(tree).items()
    ]
    found = dict(step=step, checkpoints=checkpoints, arrays=arrays, config=read_config(run))
    if arguments.json:
        print(json_text({"command": "checkpoint inspect"} | found))
    else:
        _print_inspection(run, **found)
    return 0


def _array(name: str, leaf) -> dict:
    sharding = getattr(leaf, "sharding", None)
    spec = getattr(sharding, "partition_spec", None)
    names = getattr(sharding, "axis_names", ())
    sizes = getattr(sharding, "shape", ())
    axes = dict(zip(names, map(int, sizes), strict=True))
    return {
        "name": name,
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "bytes": math.prod(leaf.shape) * leaf.dtype.itemsize,
        "mesh": {axis: size for axis, size in axes.items() if size > 1},
        "partition": None if spec is None else [_axes(each) for each in spec],
    }


def _axes(entry: str | Sequence[str] | None) -> str | None:
    """The mesh axes that one dimension is split over, `data*expert`."""
    return entry if entry is None or isinstance(entry, str) else "*".join(entry)


def _print_inspection(run, step, checkpoints, arrays, config) -> None:
    print(f"{run.where}: {config['type']}, {len(checkpoints)} checkpoints")
    for row in checkpoints:
        if row["fault"]:
            print(f"  {row['step']:>8}  not whole: {row['fault']}")
        else:
            score = "" if row["score"] is None else f"  score {row['score']:.4f}"
            number = row["processes"]
            by = f"  by {number} process{'es' * (number > 1)}" if number else ""
            print(f"  {row['step']:>8}  {_size(row['bytes'])}{score}{by}")
    model = [f"{k}={v}" for k, v in config["model"].items() if isinstance(v, int | float | str)]
    print(f"model: {', '.join(model)}")
    print(f"step {step}: name, shape, dtype, bytes, split over the mesh that saved it")
    width = max(len(each["name"]) for each in arrays)
    for each in arrays:
        split = []
        for axes in filter(None, each["partition"] or ()):
            parts = math.prod(each["mesh"].get(axis, 1) for axis in axes.split("*"))
            split += [f"{axes}={parts}"] * (parts > 1)
        shape = "x".join(map(str, each["shape"])) or "-"
        print(
            f"  {each['name']:<{width}}  {shape:>16}  {each['dtype']:<9} {each['bytes']:>13,}  "
            f"{' '.join(split) or 'whole'}"
        )
    for item in dict.fromkeys(each["name"].partition("/")[0] for each in arrays):
        mine = [each for each in arrays if each["name"].startswith(f"{item}/")]
        elements = sum(math.prod(each["shape"]) for each in mine)
        total = sum(each["bytes"] for each in mine)
        print(f"{item}: {len(mine)} arrays, {elements:,} numbers, {_size(total)}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"


def verify(arguments: argparse.Namespace) -> int:
    from switchx.checkpoint.run_folder import RunFolder
    from switchx.checkpoint.verify import checkpoint_faults

    run = RunFolder(arguments.dir)
    processes = hosts.processes_of(arguments)

    def work(steps: list[int]) -> dict[int, list[str]]:
        return {step: checkpoint_faults(run, step) for step in steps}

    if processes is None:
        faults = work(_steps_to_verify(run, arguments.step))
    else:
        _, faults = hosts.run_together(
            processes,
            arguments,
            prepare=lambda: _steps_to_verify(run, arguments.step),
            state=lambda steps: {"DIR": str(run.where), "steps": steps},
            work=work,
        )
    # A run that trains deletes checkpoints meanwhile, which is no fault.
    deleted = [step for step in faults if not (run.checkpoints / str(step)).is_dir()]
    faults = {step: found for step, found in faults.items() if step not in deleted}
    if processes is not None and not processes.is_first:
        pass  # the first says what all have found
    elif arguments.json:
        print(json_text({"command": "checkpoint verify", "faults": faults}))
    else:
        for step, found in faults.items():
            verdict = f"{len(found)} faults" if found else "sound"
            print(f"{run.checkpoints / str(step)}: {verdict}")
            for fault in found:
                print(f"  {fault.strip()}")
        for step in deleted:
            print(f"{run.checkpoints / str(step)}: deleted while it was read")
    return 1 if any(faults.values()) else 0


def _steps_to_verify(run, step: int | None) -> list[int]:
    steps = sorted(int(path.name) for path in _paths(run))
    if step is None:
        return steps
    if step not in steps:
        available = ", ".join(map(str, steps))
        raise ValueError(f"{run.where} has no checkpoint {step}, but {available}")
    return [step]


def average(arguments: argparse.Namespace) -> int:
    from switchx.checkpoint.averaging import (
        mean_of_checkpoints,
        moving_average,
        write_average,
    )
    from switchx.checkpoint.restore import choose_step
    from switchx.checkpoint.run_folder import RunFolder, read_model_config
    from switchx.gin_config.writing import model_gin
    from switchx.whole_folders import new_folder

    run, steps = RunFolder(arguments.dir), arguments.steps
    if arguments.step is not None and not arguments.moving:
        arguments.parser.error("--step is for --moving; add that, or leave it out")
    _paths(run)
    with new_folder(arguments.out) as folder:
        if steps is None:
            step = choose_step(run, arguments.step)
            params = moving_average(run, step)
            what = f"the moving average of step {step}"
        else:
            params = mean_of_checkpoints(run, steps)
            what = f"the mean of steps {', '.join(map(str, steps))}"
        write_average(run, params, RunFolder(folder), f"{what} of {run.where}")
        text = model_gin(read_model_config(run))
        RunFolder(folder).model_gin.write_text(text, encoding="utf-8")
    if arguments.json:
        written = {"steps": steps or [step], "is_moving": arguments.moving}
        print(json_text({"command": "checkpoint average", "out": arguments.out} | written))
    else:
        print(f"{arguments.out}: {what} of {run.where}")
    return 0


def rewind(arguments: argparse.Namespace) -> int:
    from switchx.checkpoint.retention import rewind
    from switchx.checkpoint.run_folder import RunFolder

    run = RunFolder(arguments.dir)
    if arguments.step is None:
        arguments.parser.error("give --step=N or --step=best, the checkpoint to go on from")
    _paths(run)
    step, renamed = rewind(run, arguments.step)
    if arguments.json:
        print(json_text({"command": "checkpoint rewind", "step": step, "renamed": renamed}))
    else:
        print(f"{run.where}: training goes on from step {step}")
        for name in renamed:
            print(f"  a later one is kept as {run.checkpoints / name}")
    return 0


def _paths(run) -> list:
    from switchx.checkpoint.restore import checkpoint_paths

    paths = checkpoint_paths(run.checkpoints)
    if not paths:
        raise ValueError(
            f"{run.where} has no checkpoints: {run.found()}; give the model_dir of a run"
        )
    return paths


def _chosen(run, step, checkpoints) -> int:
    """The step whose arrays are shown; none of the arrays' bytes are read."""
    whole = [row for row in checkpoints if row["fault"] is None]
    if step == "best":
        whole = [row for row in whole if row["score"] is not None]
        whole.sort(key=lambda row: row["score"])
    elif step is not None:
        whole = [row for row in whole if row["step"] == step]
    if not whole:
        steps = ", ".join(str(row["step"]) for row in checkpoints)
        raise ValueError(
            f"no whole checkpoint{'' if step is None else f' {step}'} among {steps} in "
            f"{run.where}; "
            "`switchx checkpoint verify` says what is wrong"
        )
    return whole[-1]["step"]
