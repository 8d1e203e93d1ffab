# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/tasks.md run, in their order; training up to what would be compiled."""

import json
import re
import shlex
import shutil

import pytest

from switchx.cli.main import main
from switchx.data.downstream.catalogue import DATASETS
from switchx.training.program import TrainingProgram
from tests.compilation import T5
from tests.data.downstream.published_files import PUBLISHED
from tests.data.words import sentences
from tests.processes import ROOT

PAGE = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class WouldCompile(Exception):
    """Options, gin files and data are what a run needs; a program comes next."""


@pytest.mark.slow  # half a minute; the README's commands are a default test
def test_every_block_runs(in_a_folder, tiny_run, monkeypatch, capsys):
    shutil.copytree(tiny_run, in_a_folder / "runs/pretrain_tiny")
    cola = in_a_folder / "data/glue/CoLA"
    cola.mkdir(parents=True)
    for name, content in PUBLISHED["glue_cola"].files.items():
        (cola / name).write_text(content)
    news = in_a_folder / "my_news"
    news.mkdir()
    (news / "train.jsonl").write_text(json.dumps({"title": "Rain", "topics": ["weather"]}))
    (in_a_folder / "texts").mkdir()
    for language in ("en", "tr"):
        (in_a_folder / f"texts/{language}.txt").write_text("\n\n".join(sentences(99)))

    def stop(program, params):
        raise WouldCompile

    said = ""
    for language, block in BLOCK.findall(PAGE):
        if language == "python":
            exec(compile(block, "tasks.md", "exec"), {})
        for command in block.splitlines() if language == "sh" else ():
            _, *words = shlex.split(command)
            if words[0] == "eval":
                # Of the run that the line before trains, which is not trained here.
                continue
            if words[0] == "train":
                with monkeypatch.context() as patch, pytest.raises(WouldCompile):
                    patch.setattr(TrainingProgram, "init_state", stop)
                    main([*words, *T5])
                continue
            assert main(words) == 0, capsys.readouterr().err
        said += capsys.readouterr().out
    assert "cola sentence: Our friends won't." in said and "news: Rain" in said
    assert "{'matthews_corrcoef': 0.0}" in said


def test_the_page_names_every_file_and_macro():
    files = {path.stem for path in (ROOT / "configs/tasks").glob("*.gin")}
    table = PAGE.partition("## The table")[2].partition("##")[0]
    named = set(re.findall(r"`(\w+)`", table))
    short = {f"super_glue{name}" for name in named if name.startswith("_")}
    found = {name for name in named | short if name in files}
    of_datasets = {name for name in files if name in DATASETS} | {"natural_questions", "glue"}
    assert of_datasets <= found
    links = re.findall(r"\]\((?!https:)([^)#\s]+)", PAGE)
    assert all((ROOT / "docs" / link).exists() for link in links)
