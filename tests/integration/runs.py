# SPDX-License-Identifier: Apache-2.0
"""The small run that tests train, kill, damage, resume and evaluate."""

import json
import pathlib
import random

SMALL = pathlib.Path(__file__).with_name("small.gin")


def write_corpus(folder: pathlib.Path) -> pathlib.Path:
    """A text file of many short documents, the same each time."""
    rng = random.Random(0)
    words = "expert token router gate slot group capacity balance switch layer".split()
    paragraphs = [
        " ".join(rng.choice(words) for _ in range(rng.randint(20, 60))) for _ in range(200)
    ]
    path = folder / "corpus.txt"
    path.write_text("\n\n".join(paragraphs))
    return path


def arguments(model_dir, files, *bindings: str) -> list[str]:
    """Arguments of `switchx train` and `switchx eval` for the small run."""
    return [
        f"--gin_file={SMALL}",
        f"--gin.FILES={files}",
        f"--model_dir={model_dir}",
        *(f"--gin.{binding}" for binding in bindings),
    ]


def lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(path: pathlib.Path) -> list[dict]:
    """Lines of a log without what depends on the clock."""
    clocked = ("_per_s", "seconds", "goodput", "step_time", "checkpoint")
    return [
        {name: value for name, value in line.items() if not name.endswith(clocked)}
        for line in lines(path)
    ]
