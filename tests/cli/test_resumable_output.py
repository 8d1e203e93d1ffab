# SPDX-License-Identifier: Apache-2.0
"""An output goes on where it ended, and only if it is the beginning of the same."""

import json

import pytest

from switchx.cli.text.resumable_output import ResumableOutput, StandardOutput
from tests.data.refusals import refused

INPUTS = ["a", "b", "c", "d"]
SETTINGS = {"model": "m", "top_k": None}


@pytest.fixture
def begun(tmp_path):
    """An output with two of four lines."""
    with ResumableOutput(tmp_path / "out.txt", INPUTS, SETTINGS) as output:
        assert output.num_lines == 0
        output.append(["A"])
        output.append(["é"])
    return tmp_path / "out.txt"


def test_it_goes_on(begun):
    with ResumableOutput(begun, INPUTS, SETTINGS) as output:
        assert output.num_lines == 2
        output.append(["C", "D"])
    assert begun.read_text() == "A\né\nC\nD\n"
    with ResumableOutput(begun, [*INPUTS, "e"], SETTINGS) as output:
        assert output.num_lines == 4  # lines were added to the input
        assert list(output.lines()) == ["A", "é", "C", "D"]


def test_what_was_cut_off_is_written_again(begun):
    with begun.open("a") as file:
        file.write("C\nhal")
    with ResumableOutput(begun, INPUTS, SETTINGS) as output:
        assert output.num_lines == 2
        output.append(["C", "D"])
    assert begun.read_text() == "A\né\nC\nD\n"


def test_a_file_that_was_only_opened_is_no_hindrance(tmp_path):
    (tmp_path / "out.txt").touch()
    with ResumableOutput(tmp_path / "out.txt", INPUTS, SETTINGS) as output:
        assert output.num_lines == 0


def progress_of(path):
    return path.with_name("out.txt.progress.json")


def change_progress(path, **changes):
    content = json.loads(progress_of(path).read_text()) | changes
    progress_of(path).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_text("A\n"), "was cut since it was written; "),
        (lambda path: path.write_text("A\nE!\n"), "has changed since it was written; "),
        (lambda path: progress_of(path).write_text("{"), ".progress.json is damaged (<any>); "),
        (
            lambda path: change_progress(path, settings=3),
            ".progress.json is damaged (<any>); ",
        ),
        (
            lambda path: change_progress(path, num_bytes="x"),
            ".progress.json is damaged (<any>); ",
        ),
        (
            lambda path: progress_of(path).unlink(),
            "is there, and no out.txt.progress.json says how it was begun; ",
        ),
    ],
)
def test_anything_else_is_left_alone(begun, damage, said):
    damage(begun)
    before = begun.read_bytes()
    with (
        refused(f"{begun}<any>{said}give another --output, or remove <any>"),
        ResumableOutput(begun, INPUTS, SETTINGS),
    ):
        pass
    assert begun.read_bytes() == before


def test_other_settings_and_other_inputs(begun):
    with (
        refused(
            f"{begun} was begun with other settings (model: 'm' then, 'n' now; seed: None "
            "then, 1 now); give another --output, or remove <any>"
        ),
        ResumableOutput(begun, INPUTS, {"model": "n", "top_k": None, "seed": 1}),
    ):
        pass
    for inputs in (["a", "x", "c"], ["a"]):
        with (
            refused(f"the 2 lines of {begun} belong to other inputs than the first 2 of <any>"),
            ResumableOutput(begun, inputs, SETTINGS),
        ):
            pass


def test_one_process_at_a_time(begun):
    with (
        ResumableOutput(begun, INPUTS, SETTINGS),
        refused(
            f"{begun} is being written by another process; wait for it, or give another<any>"
        ),
        ResumableOutput(begun, INPUTS, SETTINGS),
    ):
        pass


def test_a_place_that_cannot_be_written(begun):
    with (
        refused("<any> cannot be written (<any>); give another --output"),
        ResumableOutput(begun / "out.txt", INPUTS, SETTINGS),
    ):
        pass


def test_standard_output(capsys):
    with StandardOutput() as output:
        output.append(["a", "b"])
    assert (output.num_lines, capsys.readouterr().out) == (2, "a\nb\n")
    assert list(output.lines()) == ["a", "b"]
