# SPDX-License-Identifier: Apache-2.0
"""`switchx tasks`: the downstream tasks, and what a model reads of one of them."""

import argparse
import dataclasses

from switchx.cli import arguments as shared
from switchx.fields import json_text

DESCRIPTION = """\
Lists the downstream tasks, or shows an example of one: the text that a model reads, the text
it has to write, and how the task is measured.

  switchx tasks
  switchx tasks glue_cola --manual_dir=DATA
  switchx tasks squad --data_dir=DIR --split="validation[:10%]" --example=3
  switchx tasks tfds:ag_news_subset --inputs="news: {title}" --targets="{label}" --data_dir=DIR

Without --manual_dir, the data set is read as TFDS prepared it in --data_dir. To train on it:

  switchx train --gin_file=configs/runs/finetune_task.gin \\
    --gin_file=configs/tasks/glue_cola.gin --gin.INIT_FROM=DIR --model_dir=OTHER_DIR
"""

FLAGS = {
    "--data_dir=DIR": "TFDS's folder; prepared data go there",
    "--manual_dir=DIR": "folder of the published files",
    "--split=NAME": "split or slice; default: that of training, or of evaluation if none is",
    "--example=N": (int, "number of the example in the split, from 0"),
    "--inputs=TEMPLATE": 'template of inputs, such as "question: {question}"',
    "--targets=TEMPLATE": 'template of targets, such as "{answer}"',
}


def add_command(commands) -> None:
    help_text = "list downstream tasks and show their examples"
    parser = shared.add_command(commands, "tasks", run, help_text, DESCRIPTION)
    parser.add_argument(
        "task",
        nargs="?",
        metavar="TASK",
        help="name of a task, or tfds:NAME or a folder with --inputs and --targets",
    )
    shared.add_flags(parser, FLAGS, example=0)
    shared.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.task is None:
        return _list(arguments)
    task = _task(arguments)
    from switchx.data.corpora.splits import open_split
    from switchx.data.downstream.catalogue import DATASETS
    from switchx.data.evaluation import target_of

    is_learnt = task.name not in DATASETS or DATASETS[task.name].train_split
    split = arguments.split or (task.train_split if is_learnt else task.evaluation_split)
    records = open_split(task.corpus, split, arguments.data_dir)
    if not 0 <= arguments.example < len(records):
        raise ValueError(
            f"--example={arguments.example}: {task.name} has {len(records)} examples in "
            f"{split}; use 0 to {len(records) - 1}"
        )
    record = records[arguments.example]
    target = target_of(record)
    description = {
        "task": task.name,
        "split": split,
        "examples": len(records),
        "inputs": record["inputs"],
        "targets": record["targets"],
        "answers": list(target.answers),
        "choices": list(target.choices),
        "metrics": [type(metric).__name__ for metric in task.metrics],
        "corpora": [
            dataclasses.asdict(each) if arguments.json else str(each)
            for each in records.accounts
        ],
    }
    _print(description, arguments.json)
    return 0


def _task(arguments: argparse.Namespace):
    """The named task, with a vocabulary of bytes: reading texts needs no other."""
    from switchx.data.downstream.tasks import task
    from switchx.data.downstream.templates import Templates, template_task
    from switchx.data.tokenizers import ByteVocabulary

    if arguments.inputs is None and arguments.targets is None:
        return task(arguments.task, ByteVocabulary(), arguments.manual_dir)
    if arguments.inputs is None or arguments.targets is None or arguments.manual_dir:
        raise ValueError(
            "templates need both --inputs and --targets, and their data set is TASK itself, "
            "tfds:NAME or a folder; give these, and no --manual_dir"
        )
    corpus = Templates(arguments.task, arguments.inputs, arguments.targets)
    return template_task(corpus, ByteVocabulary())


def _print(description: dict, is_json: bool) -> None:
    if is_json:
        print(json_text(description, ensure_ascii=False))
        return
    for name, value in description.items():
        text = "; ".join(value) if isinstance(value, list) else str(value)
        if text:
            print(f"{name:<9}{text}")


def _list(arguments: argparse.Namespace) -> int:
    from switchx.data.downstream.catalogue import DATASETS

    rows = [
        {
            "task": name,
            "tfds": each.tfds,
            "train": each.train_split,
            "evaluation": each.evaluation_split,
            "metrics": [type(metric).__name__ for metric in each.metrics],
            "text": "ours" if each.is_ours else "T5's",
        }
        for name, each in DATASETS.items()
    ]
    if arguments.json:
        print(json_text(rows))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        cells = (", ".join(v) if isinstance(v, list) else v or "" for v in row.values())
        table.add_row(*cells)
    Console(markup=False, width=140, soft_wrap=True).print(table)
    return 0
