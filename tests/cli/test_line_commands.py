# SPDX-License-Identifier: Apache-2.0
"""What is refused before a model reads a line."""

import argparse
import json

import pytest

from switchx.cli.text import lines
from tests.data.refusals import refused
from tests.training.jobs import DENSE
from tests.training.saved_runs import save_run


def options(**changes):
    values = {
        "input": "-", "output": None, "max_input_tokens": 4, "model_dir": None, "step": None,
        "capacity": "dropless", "mesh": None,
    }  # fmt: skip
    return argparse.Namespace(**(values | changes))


def encode(text):
    if "!" in text:
        raise ValueError("sentinel 9 of 2")
    return list(text.encode())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (" \t", "is empty"),
        ("abcde", "has 5 tokens, more than --max_input_tokens=4"),
        ("a!", "cannot be read (sentinel 9 of 2)"),
    ],
)
def test_texts_that_are_not_read(text, said):
    with refused(said):
        lines.encoded(options(), encode, text)
    assert lines.encoded(options(), encode, "abcd") == [97, 98, 99, 100]


def test_all_wrong_lines_are_named():
    def read_line(line):
        return lines.encoded(options(), encode, line)

    lines.check(options(), ["a", "b"], read_line)
    with refused("standard input: line 2 is empty; line 3 has 9 tokens, more than <any>"):
        lines.check(options(), ["a", "", "abcdefghi"], read_line)


def test_output_is_not_the_input(tmp_path):
    file = tmp_path / "in.txt"
    file.write_text("a\n")
    with refused(f"--output={tmp_path}/./in.txt is the input; give another file"):
        lines.read(options(input=str(file), output=f"{tmp_path}/./in.txt"), None)
    assert lines.read(options(input=str(file), output="out.txt"), None) == ["a"]
    with refused("--output is empty; is a shell variable not set?"):
        lines.read(options(output=""), None)
    with refused("--max_input_tokens=0; use at least 1"):
        lines.read(options(max_input_tokens=0), None)


def test_a_model_without_a_vocabulary_reads_no_lines(tmp_path):
    folder = save_run(tmp_path, DENSE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model": config["model"]}))
    (folder / "vocabulary.json").unlink()
    with refused(f"{folder} has no vocabulary, so it cannot read lines of text; give <any>"):
        lines.load_model(options(model_dir=str(folder)), None)
