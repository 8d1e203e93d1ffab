# SPDX-License-Identifier: Apache-2.0
"""`switchx tasks`: the list, an example of a task, and what is refused."""

import pathlib
import re

import pytest

from switchx.data.downstream.catalogue import DATASETS
from tests.data.downstream.published_files import PUBLISHED
from tests.processes import ROOT


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    for name in ("super_glue_copa", "scitldr"):
        for file, content in PUBLISHED[name].files.items():
            path = tmp_path / DATASETS[name].folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    return tmp_path


def test_all_tasks_are_listed_and_have_a_gin_file(cli):
    rows = cli.json("tasks", "--json")
    assert [row["task"] for row in rows] == list(DATASETS)
    listed = cli("tasks").out
    assert all(re.search(rf"^{name} ", listed, re.MULTILINE) for name in DATASETS)
    files = {path.stem: path.read_text() for path in (ROOT / "configs/tasks").glob("*.gin")}
    named = set(re.findall(r'"(\w+)"', "".join(files.values())))
    assert set(DATASETS) <= named


def test_the_page_says_which_gin_files_are_no_data_sets():
    page = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
    table, _, after = page.partition("## The table")[2].partition("\nMost gin files")
    names = set()
    for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        listed = re.findall(r"`(\w+)`", cell)
        names |= {f"super_glue{name}" if name.startswith("_") else name for name in listed}
    said = set(re.findall(r"`(\w+)`", after.partition("\n\n")[0]))
    files = {path.stem for path in (ROOT / "configs/tasks").glob("*.gin")}
    assert names <= files
    assert names - set(DATASETS) == said & files
    assert set(DATASETS) - names == said & set(DATASETS)


def test_an_example_and_templates_are_shown(cli, folder):
    folders = (f"--manual_dir={folder}", f"--data_dir={folder}")
    about = cli.json("tasks", "super_glue_copa", *folders, "--json")
    want = PUBLISHED["super_glue_copa"]
    account = about.pop("corpora")[0]
    assert account["rows"] == account["documents"]["train"] == account["files"][".jsonl"] == 1
    assert about == {
        "task": "super_glue_copa", "split": "train", "examples": 1, "inputs": want.inputs,
        "targets": want.targets, "answers": [want.targets],
        "choices": ["choice1", "choice2"], "metrics": ["Accuracy"],
    }  # fmt: skip
    text = cli("tasks", "scitldr", *folders, "--split=validation[:100%]").out
    assert "inputs   summarize: One.\n" in text and "answers  q r; a b\n" in text
    data = folder / "super_glue/COPA"
    options = ("--inputs=why: {premise}", "--targets={choice2}", f"--data_dir={folder}")
    text = cli("tasks", data, *options).out
    assert "inputs   why: A.\ntargets  C.\n" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("super_glue_cop",), "there is no data set 'super_glue_cop'; use one of glue_cola"),
        (("super_glue_copa", "--split=tset"), "has no split 'tset'; use one of train, valid"),
        (("super_glue_copa", "--split=train[:2]"), "train[:2] goes beyond train, which has 1"),
        (
            ("super_glue_copa", "--example=1"),
            "super_glue_copa has 1 examples in train; use 0 to 0",
        ),
        (("x", "--inputs={a}"), "templates need both --inputs and --targets"),
    ],
)
def test_wrong_options(cli, folder, options, said):
    folders = [f"--manual_dir={folder}", f"--data_dir={folder}"]
    assert said in " ".join(cli.refused("tasks", *options, *folders).split())
