# SPDX-License-Identifier: Apache-2.0
"""`switchx generate`: what the Python API says, a line each, in order, and on after a kill."""

import dataclasses
import io
import json
import sys
import types

import pytest

import switchx
from switchx.cli import generate
from switchx.cli.main import main
from switchx.cli.text import lines as line_commands
from switchx.data.objectives import SpanCorruption
from switchx.inference.config import PRUNING, DecodingConfig
from switchx.models.config import ModelConfig, SwitchConfig
from tests.training.jobs import TASK
from tests.training.saved_runs import save_run

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

MODEL = ModelConfig("encoder_decoder", 384, 8, 8, 1, 8, 1, 1, switch=SwitchConfig(2, every=1))
LINES = ["gate", "an expert", "<extra_id_0> slot", "of", "a token or two"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    task = dataclasses.replace(TASK, objective=SpanCorruption())
    return save_run(tmp_path_factory.mktemp("run"), MODEL, source=task)


@pytest.fixture(scope="module")
def model(folder):
    return switchx.load(folder)


@pytest.fixture
def lines(tmp_path):
    file = tmp_path / "in.txt"
    file.write_text("\n".join(LINES))
    return file


def words(folder, *options):
    return ["generate", f"--model_dir={folder}", "--max_new_tokens=3", *map(str, options)]


def test_lines_are_those_of_the_api(folder, model, lines, capsys, monkeypatch):
    want = model.generate(LINES, max_length=3, with_scores=True)
    assert main(words(folder, f"--input={lines}", "--json")) == 0
    got = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["output"], each["is_finished"]) for each in got] == [
        (each.output, each.is_finished) for each in want
    ]
    for each, result in zip(got, want, strict=True):
        assert each["score"] == pytest.approx(result.score, rel=1e-5)
        assert model.vocabulary.decode(each["tokens"]) == each["output"]
    stdin = types.SimpleNamespace(buffer=io.BytesIO(lines.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(words(folder)) == 0
    captured = capsys.readouterr()
    plain = [each.output.replace("\n", " ").replace("\r", " ") for each in want]
    assert captured.out.split("\n")[:-1] == plain
    assert "reading standard input until its end" in captured.err


def test_every_way_of_decoding_is_an_option(folder, model, lines, tmp_path):
    fields = {field.name for field in dataclasses.fields(DecodingConfig)}
    assert set(generate.DECODING) == fields - {
        "early_stopping", "eos_id", "pad_id", "start_id", "is_prompt_bidirectional",
    }  # fmt: skip
    for number, (options, settings) in enumerate(
        [
            (
                ["--beam_size=2", "--length_penalty=0.5"],
                {"beam_size": 2, "length_penalty": 0.5},
            ),
            (
                ["--temperature=1", "--top_k=9", "--top_p=0.9", "--seed=3"],
                {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "seed": 3},
            ),
        ]
    ):
        output = tmp_path / f"{number}.jsonl"
        options += [f"--input={lines}", f"--output={output}", "--json"]
        assert main(words(folder, *options)) == 0
        got = [json.loads(line)["output"] for line in output.read_text().splitlines()]
        assert got == model.generate(LINES, max_length=3, **settings)
    choices = next(
        action.choices for action in parser_of("generate")._actions if action.dest == "pruning"
    )
    assert choices == PRUNING


def parser_of(name):
    from switchx.cli.main import _parse, _parser

    return _parse(_parser(), [name, "--model_dir=x"]).parser


def test_a_killed_command_goes_on_to_the_same_samples(folder, lines, tmp_path, monkeypatch):
    """Shards of two lines, so that samples are of the line's number, not the shard's."""
    options = [f"--input={lines}", "--temperature=1", "--json", "--batch_size=2"]
    assert main(words(folder, *options, f"--output={tmp_path / 'whole'}")) == 0
    monkeypatch.setattr(line_commands, "BATCHES_PER_SHARD", 1)
    append, written = line_commands.run_in_shards, tmp_path / "out"

    def dies_after_one_shard(lines, output, compute, reporter, **settings):
        def some(shard, first):
            if first:
                raise KeyboardInterrupt
            yield from compute(shard, first)

        append(lines, output, some, reporter, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(line_commands, "run_in_shards", dies_after_one_shard)
        assert main(words(folder, *options, f"--output={written}")) == 130
    assert len(written.read_text().splitlines()) == 2
    assert main(words(folder, *options, f"--output={written}")) == 0
    got, want = ([json.loads(line) for line in path.read_text().splitlines()]
                 for path in (written, tmp_path / "whole"))  # fmt: skip
    assert [each["tokens"] for each in got] == [each["tokens"] for each in want]


def test_other_settings_do_not_go_on(folder, lines, tmp_path, capsys):
    options = [f"--input={lines}", f"--output={tmp_path / 'out'}"]
    assert main(words(folder, *options)) == 0
    assert main(words(folder, *options, "--pruning=none", "--batch_size=2")) == 0
    assert main(words(folder, *options, "--beam_size=2")) == 2
    assert "begun with other settings (beam_size: 1 then, 2 now)" in capsys.readouterr().err
    assert main(words(folder, *options, "--step=5")) == 2
    assert "begun with other settings (model: " in capsys.readouterr().err


def test_a_capacity_is_told(folder, lines, capsys):
    note = "experts have a capacity: a line's result depends on its batch mates"
    assert main(words(folder, f"--input={lines}")) == 0
    assert note not in capsys.readouterr().err
    assert main(words(folder, f"--input={lines}", "--capacity=trained")) == 0
    assert note in capsys.readouterr().err


def test_wrong_lines_are_named_before_anything_runs(folder, tmp_path, capsys):
    file, output = tmp_path / "in.txt", tmp_path / "out"
    file.write_text("a\n\n" + "b" * 2049 + "\n<extra_id_100>\n")
    assert main(words(folder, f"--input={file}", f"--output={output}")) == 2
    said = capsys.readouterr().err
    assert (
        f"{file}: line 2 is empty; line 3 has 2050 tokens, more than --max_input_tokens=2048; "
        "line 4 cannot be read (sentinel 100 of 100" in said
    )
    assert not output.exists()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--beam_size=0", "DecodingConfig.beam_size=0; use a whole number"),
        ("--top_k=3", "temperature=0 does not sample"),
        ("--batch_size=0", "batch_size=0; use 1 to"),
        ("--capacity=some", "there is no 'some'"),
        ("--beam_sise=2", "unknown option --beam_sise (did you mean --beam_size?)"),
        ("--mesh=experts=2", "argument --mesh: 'experts=2' is no axis of a mesh; write AXIS=N"),
        ("--mesh=data=2,expert=2", "mesh data=2 x expert=2 needs 4 devices, but there are 8"),
        ("--input=none.txt", "--input=none.txt cannot be read"),
    ],
)
def test_wrong_options(folder, lines, capsys, option, said):
    assert main(words(folder, f"--input={lines}", option)) == 2
    assert said in capsys.readouterr().err
