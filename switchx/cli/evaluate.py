# SPDX-License-Identifier: Apache-2.0
"""`switchx eval`: the validation metrics of a trained model and of what it writes."""

import argparse
import importlib.util
from typing import Any, NamedTuple

from switchx.cli import arguments as shared
from switchx.fields import json_text
from switchx.inference.config import DecodingConfig
from switchx.malloc import keep_freed_memory

DESCRIPTION = """\
Evaluates a checkpoint of a run folder on the validation split of its task: negative log
perplexity (higher is better), accuracy, dropped choices and load per expert.

  switchx eval --model_dir=DIR
  switchx eval --model_dir=DIR --step=best --json

The configuration is the run's own, DIR/operative_config.gin, and --gin.NAME=VALUE changes
it: the data, batch, capacity and mesh may differ from training, the meaning of the parameters
may not. To add further gin files, name that file too:

  switchx eval --gin_file=DIR/operative_config.gin --gin_file=configs/meshes/one_device.gin \\
    --gin.TrainingJob.eval_batches=None --model_dir=DIR

All checkpoints that were kept, or those at multiples of N steps, are written to a table of JSON
lines, by default evaluations.jsonl in the run folder, which `switchx report` shows; the same
command goes on where it was stopped:

  switchx eval --model_dir=DIR --step=all
  switchx eval --model_dir=DIR --step=every:1000 --output=FILE

If tasks of inputs and targets have metrics (Task.metrics), or --metrics names some, the model
also generates outputs for the split's inputs, without dropping tokens, and their metrics are
printed with their libraries' signatures, by task and as the mean of all:

  switchx eval --model_dir=DIR --metrics=bleu,chrf --split=test --beam_size=4 \\
    --bootstrap=1000 --predictions=FILE

Tasks of lm-evaluation-harness are run by it (`pip install 'switchx[harness]'`); --harness_path
is the folder of tasks in local files:

  switchx eval --model_dir=DIR --harness=hellaswag,my_task --harness_path=my_tasks

A folder of `switchx quantize` is evaluated by generated texts only, on the tasks of gin files:

  switchx eval --gin_file=DIR/operative_config.gin --model_dir=DIR_INT4 --metrics=bleu
"""
# Flags that concern the tasks of gin files.
_NOT_OF_HARNESS = (
    *("gin_file", "gin_search_paths", "output", "predictions", "record", "replay"),
    *("record_places", "metrics", "tasks", "split", "rank_choices", "bootstrap"),
    *("beam_size", "max_new_tokens", "length_penalty"),
)


class Every(NamedTuple):
    """All checkpoints at multiples of this number of steps."""

    steps: int


TEXTS = {
    "--tasks=NAMES": "tasks of a mixture to answer, with commas; default: all with metrics",
    "--split=NAME": "split of the corpora; default: the tasks'",
    "--max_examples=N": "number of examples of each task to answer",
}
GENERATION = {
    "--batch_size=N": "maximum number of inputs generated for at once",
    "--rank_choices": "also score the choices of each example and measure the most likely ones",
    "--bootstrap=N": "samples of sacreBLEU's bootstrap, for 95%% confidence intervals of BLEU "
    "and chrF, such as 1000",
    "--predictions=FILE": "file to write: JSON lines of task, inputs, target, prediction, "
    "also for tasks without metrics",
    "--harness=TASKS": (
        shared.not_empty,
        "tasks of lm-evaluation-harness, separated by commas, in place of the validation "
        "split; --max_examples and --batch_size apply, too",
    ),
    "--harness_path=FOLDER": "folder of further tasks, YAML files",
    "--record=FILE": "also write where every token was routed, a Parquet file "
    "(docs/records.md)",
    "--replay=FILE": "use the choices of this record of the same batches, in place of the "
    "routers'",
    "--record_places=N": "batches beyond this many places are left out of the record",
}


def add_command(commands) -> None:
    parser = shared.add_command(commands, "eval", run, "evaluate a trained model", DESCRIPTION)
    shared.add_gin_arguments(parser, default="operative_config.gin of the run folder")
    shared.add_model_dir(
        parser,
        "run folder of `switchx train` or `switchx quantize`; only the table of several "
        "checkpoints is written there",
    )
    parser.add_argument(
        "--step",
        type=_steps,
        metavar="N|best|all|every:N",
        help="checkpoint to evaluate: the one after N steps, or the best of those evaluated in "
        "training; all, or those at multiples of N steps; default: the newest",
    )
    shared.add_output(parser, "table of several checkpoints; default: in the run folder")
    parser.add_argument(
        "--metrics",
        type=_metric_names,
        metavar="NAMES",
        help="metrics of generated texts, some of bleu,chrf,rouge,squad,accuracy, instead of "
        "the tasks' own; none generates nothing",
    )
    shared.add_flags(parser, TEXTS)
    # Outputs are searched for, not sampled, so that scores are reproducible.
    shared.add_options(
        parser,
        DecodingConfig,
        ("beam_size", "max_new_tokens", "length_penalty"),
        max_new_tokens=128,
    )
    shared.add_flags(parser, GENERATION, batch_size=32, record_places=1 << 22)
    parser.set_defaults(bootstrap=0)
    shared.add_json(parser, "print one JSON object, with the routing of each layer")


def _steps(text: str) -> int | str | Every:
    """A step, `best`, or the checkpoints of `Every`."""
    kind, _, number = text.partition(":")
    if text == "all":
        return Every(1)
    if kind == "every" and number.isdecimal() and int(number):
        return Every(int(number))
    if text != "best" and not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no step; give its number, best, all, or every:N"
        )
    return text if text == "best" else int(text)


def run(arguments: argparse.Namespace) -> int:
    from switchx.progress import TerminalReporter

    is_table = isinstance(arguments.step, Every)
    if arguments.harness is not None:
        return _ask_harness(arguments)
    if arguments.harness_path is not None:
        arguments.parser.error("--harness_path is for --harness; add that, or leave it out")
    if arguments.output is not None and not is_table:
        arguments.parser.error(
            "--output is for --step=all or every:N; add that, or leave it out"
        )
    for name in ("predictions", "record", "replay"):
        if getattr(arguments, name) is not None and is_table:
            arguments.parser.error(f"--{name} is for one checkpoint; give its --step")
    with TerminalReporter(unit="example") as reporter:
        reporter.note(keep_freed_memory())
        reporter.note("loading JAX and the data libraries")
        job, metrics = _evaluate(arguments, reporter)
    if arguments.json:
        print(json_text(metrics))
    elif is_table:
        print_checkpoints(metrics)
    else:
        print_tables(job, metrics)
    return 0


def _ask_harness(arguments: argparse.Namespace) -> int:
    from switchx.progress import TerminalReporter

    if isinstance(arguments.step, Every):
        arguments.parser.error("--harness asks one checkpoint; give its --step")
    default_of = arguments.parser.get_default
    others = {name: getattr(arguments, name) for name in _NOT_OF_HARNESS if name in arguments}
    given = [name for name, value in others.items() if value != default_of(name)]
    if given := [*given, *(f"gin.{each}" for each in arguments.gin_bindings)]:
        arguments.parser.error(
            f"--{given[0]} with --harness, whose tasks say what is asked; leave one out"
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("--harness needs lm_eval: pip install 'switchx[harness]'")
    with TerminalReporter() as reporter:
        reporter.note(keep_freed_memory())
        reporter.note("loading JAX and the model")
        from switchx.harness import results_of

        results = results_of(
            arguments.harness.split(","),
            arguments.model_dir,
            step=arguments.step,
            folder=arguments.harness_path,
            limit=arguments.max_examples,
            batch_size=arguments.batch_size,
        )
    if arguments.json:
        print(json_text(results["results"]))
    else:
        from lm_eval.utils import make_table

        print(make_table(results))
    return 0


def _evaluate(arguments: argparse.Namespace, reporter) -> tuple[Any, Any]:
    """The job, and its measurements (`switchx.evaluate`, `evaluate_checkpoints`)."""
    from switchx.checkpoint.run_folder import RunFolder
    from switchx.gin_config import building
    from switchx.inference.artifact import is_artifact
    from switchx.model_evaluation import evaluate, evaluate_checkpoints

    job = None
    if arguments.gin_file is not None or not is_artifact(arguments.model_dir):
        folder = RunFolder(arguments.model_dir)
        job = building.parse_job(*shared.gin_of(arguments, folder))
    names = ("metrics", "split", "max_examples", "batch_size", "rank_choices")
    given = {name: getattr(arguments, name) for name in (*names, "bootstrap", "predictions")}
    given |= {
        "tasks": None if arguments.tasks is None else arguments.tasks.split(","),
        "reporter": reporter,
        **shared.options_of(arguments, DecodingConfig),
    }
    if isinstance(arguments.step, Every):
        which = {"every": arguments.step.steps, "output": arguments.output}
        return job, evaluate_checkpoints(arguments.model_dir, job, **which, **given)
    files = {name: getattr(arguments, name) for name in ("record", "record_places", "replay")}
    return job, evaluate(arguments.model_dir, job, step=arguments.step, **files, **given)


# Tables for people.


def print_checkpoints(lines: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = ("neg_log_perplexity", "accuracy", "dropped_fraction")
    table = Table("step", *names, box=None, pad_edge=False)
    for line in lines:
        found = {name: line[name] for name in names if name in line}
        shown = {n: "nan" if x is None else f"{x:.4f}" for n, x in found.items()}
        numbers = (shown.get(name, "") for name in names)
        table.add_row(f"{line['step']}", *numbers)
    Console(markup=False, highlight=False, soft_wrap=True).print(table)


def print_tables(job, metrics: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from switchx.cli.summary import load_table

    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {name: value for name, value in metrics.items() if not isinstance(value, dict)}
    for task, values in metrics.get("tasks", {}).items():
        for name in ("neg_log_perplexity", "accuracy", "dropped_fraction"):
            if name in values:  # a dense model drops nothing
                rows[f"{task}: {name}"] = values[name]
    for name, value in rows.items():
        is_count = name in ("step", "target_tokens")
        table.add_row(name, f"{value:,.0f}" if is_count else f"{value:.4f}")
    texts = metrics.get("texts", {"tasks": {}, "mean": []})
    for row in rows_of_texts(texts):
        table.add_row(*row)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    for signature in signatures(texts):
        console.print(signature)
    if "routing" in metrics:
        console.print(load_table(job.model, metrics["routing"]["load"]))


def rows_of_texts(texts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Text metrics: name, score or number, and the interval or why there is none."""
    rows = []
    groups = {name: values["metrics"] for name, values in texts["tasks"].items()}
    for name, metrics in (groups | {"mean": texts["mean"]}).items():
        for each in metrics:
            interval = "{:.2f} to {:.2f}".format(*each["interval"]) if each["interval"] else ""
            score = "none" if each["score"] is None else f"{each['score']:.2f}"
            rows.append((f"{name}: {each['name']}", score, interval or each["note"] or ""))
    for name, values in texts["tasks"].items():
        for key, label in (
            ("inputs_cut", "inputs cut to a row of training"),
            ("outputs_unfinished", "outputs cut off"),
        ):
            if values[key]:
                rows.append((f"{name}: {label}", f"{values[key]:,}", ""))
    return rows


def signatures(texts: dict[str, Any]) -> list[str]:
    """Each metric's signature, once."""
    of_all = [each for values in texts["tasks"].values() for each in values["metrics"]]
    named = (f"{each['name']}  {each['signature']}" for each in of_all if each["signature"])
    return list(dict.fromkeys(named))


def _metric_names(text: str) -> list[str]:
    # Not imported from switchx.data: help does not wait for the data libraries.
    known = ("bleu", "chrf", "rouge", "squad", "accuracy")
    names = [] if text == "none" else text.split(",")
    if wrong := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(
            f"there is no metric {wrong[0]!r}; use some of {','.join(known)}, or none"
        )
    return list(dict.fromkeys(names))
