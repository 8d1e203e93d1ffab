# SPDX-License-Identifier: Apache-2.0
"""Lines in, lines out: what is read, what is refused, what goes on after a kill."""

import argparse
import io
import json
import sys
import types

import pytest
from rich.console import Console

from switchx.cli.text import lines
from switchx.cli.text.lines import BATCHES_PER_SHARD, read_lines, run_in_shards
from switchx.cli.text.resumable_output import ResumableOutput, StandardOutput
from switchx.progress import TerminalReporter
from tests.data.refusals import refused
from tests.training.jobs import DENSE
from tests.training.saved_runs import save_run


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\n b \r\n", ["a", " b "]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"\xef\xbb\xbfa", ["a"]),
        ("é\u2028\x0c\x85c\nd".encode(), ["é\u2028\x0c\x85c", "d"]),
    ],
)
def test_lines_of_a_file_and_of_standard_input(tmp_path, monkeypatch, data, lines):
    (tmp_path / "in.txt").write_bytes(data)
    assert read_lines(str(tmp_path / "in.txt")) == lines
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))
    assert read_lines("-") == lines


def test_input_that_is_not_there_has_no_lines_or_is_not_utf8(tmp_path):
    file = tmp_path / "in.txt"
    file.write_bytes(b"a\nb\xff\nc\n\xe9t\xe9")
    with refused(f"{file}: line 2 is not UTF-8: byte 2 is 0xff"):
        read_lines(str(file))
    file.write_bytes(b"")
    with refused(f"{file} has no lines"):
        read_lines(str(file))
    with refused(f"--input={tmp_path}/no cannot be read (No such file or directory)"):
        read_lines(f"{tmp_path}/no")
    with refused("--input=<any> cannot be read (Is a directory)"):
        read_lines(str(tmp_path))


def test_wrong_lines_are_named_and_counted():
    with refused(
        "standard input: line 1 cannot be read <any>line 10 cannot be read (sentinel 9 of 2)"
    ):
        lines.check("-", ["!"] * 13, lambda line: lines.encoded(options(), encode, line))

    def read_line(line):
        return lines.encoded(options(), encode, line)

    assert lines.check("-", ["a", "b"], read_line) == [[97], [98]]
    with refused("standard input: line 2 cannot be read "):
        lines.check("-", ["a", "!", "abcdefghi"], read_line)
    assert lines.check("-", [""], read_line) == [[]]


def options(**changes):
    values = {
        "input": "-", "output": None, "max_input_tokens": 4, "model_dir": None, "step": None,
        "capacity": "dropless", "mesh": None, "xla": [], "task": None, "expert_slots": None,
        "ring_slots": None, "host_bytes": None, "expert_policy": None, "expert_cache": None,
        "expert_prefetch": False, "hardware": None,
    }  # fmt: skip
    return argparse.Namespace(**(values | changes))


def encode(text):
    if "!" in text:
        raise ValueError("sentinel 9 of 2")
    return list(text.encode())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("abcde", "has 5 tokens, more than --max_input_tokens=4"),
        ("a!", "cannot be read (sentinel 9 of 2)"),
    ],
)
def test_texts_that_are_not_read(text, said):
    with refused(said):
        lines.encoded(options(), encode, text)
    with refused(f"has a target that {said}"):
        lines.encoded(options(), encode, text, "has a target that ")
    assert lines.encoded(options(), encode, "abcd") == [97, 98, 99, 100]


def test_output_is_not_the_input(tmp_path):
    file = tmp_path / "in.txt"
    file.write_text("a\n")
    with refused(f"--output={tmp_path}/./in.txt is the input"):
        lines.run(options(input=str(file), output=f"{tmp_path}/./in.txt"), None)


def test_a_model_without_a_vocabulary_reads_no_lines(tmp_path):
    folder = save_run(tmp_path, DENSE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model": config["model"]}))
    (folder / "vocabulary.json").unlink()
    with refused(f"{folder} has no vocabulary, so it cannot read lines of text"):
        lines.load_model(options(model_dir=str(folder)), None)


MANY = [str(i) for i in range(3 * BATCHES_PER_SHARD + 2)]


class Clock:
    """One that goes on by four seconds a look."""

    now_s = 0

    def __call__(self):
        self.now_s += 4
        return self.now_s


def backwards(shard, first):
    """As decoding does, the last first."""
    for index in reversed(range(len(shard))):
        yield first + index, f"<{shard[index]}>"


def run(path, compute, inputs=MANY):
    said = Console(file=io.StringIO(), width=80)
    with (
        TerminalReporter(said, Clock(), unit="line") as reporter,
        ResumableOutput(path, inputs, {}) as output,
    ):
        run_in_shards(inputs, output, compute, reporter, batch_size=1)
    return said.file.getvalue()


def test_lines_are_in_order_and_progress_is_told(tmp_path):
    said = run(tmp_path / "out.txt", backwards)
    assert (tmp_path / "out.txt").read_text().split() == [f"<{each}>" for each in MANY]
    assert "of 26 lines" in said and "left" in said


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_killed_at_any_time_the_result_is_the_same(tmp_path, monkeypatch, shards):
    """Killed in a shard, and between the shard and the note that it is there."""
    path, seen = tmp_path / "out.txt", []

    def dies(shard, first):
        if first == shards * BATCHES_PER_SHARD:
            raise KeyboardInterrupt
        yield from backwards(shard, first)

    def remembers(shard, first):
        seen.append(first)
        yield from backwards(shard, first)

    with pytest.raises(KeyboardInterrupt):
        run(path, dies)
    assert len(path.read_text().split()) == shards * BATCHES_PER_SHARD
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(ResumableOutput, "_add", lambda *_: 1 / 0)
        run(path, backwards)
    said = run(path, remembers)
    assert path.read_text().split() == [f"<{each}>" for each in MANY]
    assert seen[0] == shards * BATCHES_PER_SHARD
    assert ("lines are there already" in said) == bool(shards)
    seen.clear()
    run(path, remembers)
    assert seen == []  # nothing is left to do


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


@pytest.mark.parametrize("cut_off", ["", "C\nhal"])
def test_it_goes_on_and_what_was_cut_off_is_written_again(begun, cut_off):
    with begun.open("a") as file:
        file.write(cut_off)
    with ResumableOutput(begun, INPUTS, SETTINGS) as output:
        assert output.num_lines == 2
        output.append(["C", "D"])
    assert begun.read_text() == "A\né\nC\nD\n"
    with ResumableOutput(begun, [*INPUTS, "e"], SETTINGS) as output:
        assert output.num_lines == 4  # lines were added to the input
        assert list(output.lines()) == ["A", "é", "C", "D"]


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
        (lambda path: change_progress(path, settings=3), ".progress.json is damaged (<any>); "),
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
        refused(f"{begun}<any>{said}give another --output, or remove "),
        ResumableOutput(begun, INPUTS, SETTINGS),
    ):
        pass
    assert begun.read_bytes() == before


def test_other_settings_and_other_inputs(begun):
    with (
        refused(f"{begun} was begun with other settings (model: 'm' then, 'n' now"),
        ResumableOutput(begun, INPUTS, {"model": "n", "top_k": None, "seed": 1}),
    ):
        pass
    for inputs in (["a", "x", "c"], ["a"]):
        with (
            refused(f"the 2 lines of {begun} belong to other inputs than the first 2 of "),
            ResumableOutput(begun, inputs, SETTINGS),
        ):
            pass


def test_one_process_at_a_time_in_a_place_that_can_be_written(begun):
    with (
        ResumableOutput(begun, INPUTS, SETTINGS),
        refused(f"{begun} is being written by another process"),
        ResumableOutput(begun, INPUTS, SETTINGS),
    ):
        pass
    with (
        refused(" cannot be written (<any>)"),
        ResumableOutput(begun / "out.txt", INPUTS, SETTINGS),
    ):
        pass


def test_standard_output(capsys):
    with StandardOutput() as output:
        output.append(["a", "b"])
    assert (output.num_lines, capsys.readouterr().out) == (2, "a\nb\n")
    assert list(output.lines()) == ["a", "b"]
