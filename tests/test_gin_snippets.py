# SPDX-License-Identifier: Apache-2.0
"""Every gin snippet of the pages and of `--help`, pasted into a file, builds a run."""

import pathlib
import re

import pytest

from switchx.cli.main import _parser
from switchx.gin_config import building, gin_internals
from tests.commands import parsers
from tests.gin_files import describe_run

ROOT = pathlib.Path(__file__).parents[1]
# What only gin writes: an import of gin's, an include, `module.Class.field =`, `MACRO =`.
_GIN = re.compile(
    r'^(from __gin__ |include "|(\w+/)*([a-z]\w*\.)?[A-Z]\w+\.\w+ = |[A-Z][A-Z_]+ = )',
    re.MULTILINE,
)
_BLOCK = re.compile(r"(?:^ {2,}\S.*\n(?:\n(?= {2}))?)+", re.MULTILINE)
_FENCE = re.compile(r"^```gin\n(.*?)^```", re.MULTILINE | re.DOTALL)
_BINDING = re.compile(r"^([\w./]+) = ", re.MULTILINE)
# The run that a snippet is for, by a part of it; others are for any.
PAIRS = ("runs/pretrain_tiny.gin", "tasks/pairs.gin")
RUNS = {
    "InputsToTargets": PAIRS,
    "tasks.Task.metrics": PAIRS,
    "INIT_RULES": ("runs/finetune_english.gin",),
}
_MODULE = re.compile(r"(?:^(?:\w+/)*|@)([a-z]\w*)\.[A-Za-z]", re.MULTILINE)


def snippets() -> dict[str, str]:
    """Texts of gin by where they stand; those of own_code.md have a test of their own."""
    found = {}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("launch/**/*.md")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(pages)}
    texts |= {name: each.description or "" for name, each in parsers(_parser())}
    for name, text in texts.items():
        if name == "own_code.md":
            continue
        for block in [*_BLOCK.finditer(text + "\n"), *_FENCE.finditer(text)]:
            lines = (block[1] if block.re is _FENCE else block[0]).splitlines()
            content = "\n".join(line.strip() for line in lines) + "\n"
            if _GIN.search(content):
                number = text.count("\n", 0, block.start()) + 1
                found[f"{name}:{number}"] = content
    return found


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with gin_internals.restored():
        yield


def build_pasted(content: str):
    """Builds the run with the snippet alone in a second file; each binding has to be read."""
    files = next((run for part, run in RUNS.items() if part in content), PAIRS[:1])
    describe_run(pathlib.Path("x"))
    given = {"runs/finetune_english.gin": ["INIT_FROM=x"], "tasks/pairs.gin": ["FILES=x"]}
    pathlib.Path("snippet.gin").write_text(content, encoding="utf-8")
    building.parse_files([*files, "snippet.gin"], given.get(files[-1], []))
    job = building.build("JOB", building.TrainingJob)
    building.require_effect("JOB", [f"{name}=" for name in _BINDING.findall(content)])
    return job


@pytest.mark.parametrize("place", snippets())
def test_snippet_is_pasted_and_builds(place):
    content = snippets()[place]
    assert build_pasted(content).model
    # What the run has imported is not the snippet's: it names all that it uses.
    modules = set(_MODULE.findall(content))
    imports = re.findall(r"^from [\w.]+ import (\w+)$", content, re.MULTILINE)
    assert modules <= set(imports)
    assert not modules or content.startswith("from __gin__ import dynamic_registration\n")


def test_snippets_are_found_in_pages():
    places = snippets()
    assert len(places) >= 7
    assert {"models.md", "optimizers.md", "training.md"} <= {
        place.partition(":")[0] for place in places
    }


@pytest.mark.parametrize(
    "snippet, said",
    [
        ("step.StepConfig.ema_decayed = 0.9\n", "no parameter 'ema_decayed'"),
        ("TRAIN_STEP = 3\n", "TRAIN_STEP has no effect"),
    ],
)
def test_a_snippet_that_does_not_work_is_told(snippet, said):
    with pytest.raises(building.ConfigurationError, match=said):
        build_pasted(snippet)
