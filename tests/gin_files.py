# SPDX-License-Identifier: Apache-2.0
"""The gin files that ship: their names, and what they require."""

import dataclasses
import json
import pathlib
import re

from switchx.data.tokenizers import ByteVocabulary
from switchx.data.vocabularies import save_vocabulary
from switchx.fields import describe
from tests.interop.folders import SWITCH

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
# What every run includes, and is no run.
NOT_RUNS = {"runs/defaults.gin"}


def names(*folders: str) -> list[str]:
    """`models/switch_tiny.gin`, ...: the files of some folders of configs/."""
    paths = [path for folder in folders for path in CONFIGS.glob(f"{folder}/**/*.gin")]
    return sorted(path.relative_to(CONFIGS).as_posix() for path in paths)


RUNS = [name for name in names("runs") if name not in NOT_RUNS]


def describe_run(folder: pathlib.Path) -> None:
    """What a gin file reads of the run INIT_FROM: its model and its vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    model = dataclasses.replace(SWITCH, vocab_size=384)
    (folder / "config.json").write_text(json.dumps({"model": describe(model)}))
    save_vocabulary(ByteVocabulary(), folder)


def required_macros(name: str) -> set[str]:
    """Macros that a file or one it includes sets to gin.REQUIRED."""
    text = (CONFIGS / name.removeprefix("configs/")).read_text(encoding="utf-8")
    found = set(re.findall(r"^(\w+) = %gin\.REQUIRED", text, re.MULTILINE))
    included = re.findall(r'^include "(.+)"', text, re.MULTILINE)
    return found.union(*map(required_macros, included))
