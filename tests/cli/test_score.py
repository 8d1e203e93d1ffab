# SPDX-License-Identifier: Apache-2.0
"""`switchx score`: what the Python API says, a line each, in order."""

import json

import pytest

import switchx
from switchx.cli.main import main
from switchx.models.config import ModelConfig, SwitchConfig
from tests.training.saved_runs import save_run

T5 = ModelConfig("encoder_decoder", 384, 8, 8, 1, 8, 1, 1, switch=SwitchConfig(2, every=1))
DECODER = ModelConfig("decoder_only", 384, 8, 8, 1, 8, 1)
PAIRS = [("a gate", "of"), ("x", "an expert"), ("slot", "y")]


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("t5"), T5)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("decoder"), DECODER)


def file_of(folder, *lines):
    file = folder / "pairs.tsv"
    file.write_text("\n".join(lines))
    return file


def test_lines_are_those_of_the_api(t5, tmp_path, capsys):
    file = file_of(tmp_path, *map("\t".join, PAIRS))
    want = switchx.load(t5).score(*zip(*PAIRS, strict=True))
    assert main(["score", f"--model_dir={t5}", f"--input={file}"]) == 0
    captured = capsys.readouterr()
    on_a_mesh = ["score", f"--model_dir={t5}", f"--input={file}", "--mesh=expert=2"]
    assert main(on_a_mesh) == 0
    split = [float(line.split("\t")[0]) for line in capsys.readouterr().out.splitlines()]
    assert split == pytest.approx([score.log_likelihood for score in want], rel=1e-5)
    rows = [line.split("\t") for line in captured.out.splitlines()]
    assert [int(num_tokens) for _, num_tokens in rows] == [3, 10, 2]  # bytes, and eos
    for (log_likelihood, _), score in zip(rows, want, strict=True):
        assert float(log_likelihood) == pytest.approx(score.log_likelihood, abs=1e-5)
    total = sum(score.log_likelihood for score in want)
    said = f"3 lines, 15 target tokens: log-likelihood {total:.4f}, {total / 15:.4f} a token"
    assert said in captured.err


def test_a_file_goes_on_and_the_sum_is_of_all_its_lines(t5, tmp_path, capsys):
    lines, output = list(map("\t".join, PAIRS)), tmp_path / "scores.jsonl"
    words = ["score", f"--model_dir={t5}", f"--output={output}", "--json"]
    assert main([*words, f"--input={file_of(tmp_path, *lines[:2])}"]) == 0
    capsys.readouterr()
    assert main([*words, f"--input={file_of(tmp_path, *lines)}"]) == 0
    got = [json.loads(line) for line in output.read_text().splitlines()]
    assert [each["num_tokens"] for each in got] == [3, 10, 2]
    total = sum(each["log_likelihood"] for each in got)
    said = capsys.readouterr().err
    assert "2 of 3 lines are there already" in said
    assert f"3 lines, 15 target tokens: log-likelihood {total:.4f}" in said


def test_a_decoder_scores_texts_from_their_beginning(decoder, tmp_path, capsys):
    model, file = switchx.load(decoder), file_of(tmp_path, "a gate", "a\tgate")
    want = model.score(["", "a"], ["a gate", "gate"])
    assert main(["score", f"--model_dir={decoder}", f"--input={file}"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    for (log_likelihood, num_tokens), score in zip(rows, want, strict=True):
        assert float(log_likelihood) == pytest.approx(score.log_likelihood, abs=1e-5)
        assert int(num_tokens) == score.num_tokens


def test_wrong_lines_are_all_named(t5, tmp_path, capsys):
    file = file_of(tmp_path, "a\tb", "no tab", "a\tb\tc", "\tb", "a\t", "", "a\t" + "b" * 2048)
    assert main(["score", f"--model_dir={t5}", f"--input={file}"]) == 2
    assert (
        "line 2 has 0 tabs, expected input<TAB>target; line 3 has 2 tabs, expected "
        "input<TAB>target; line 4 has an input that is empty; line 5 has a target that is "
        "empty; line 6 has 0 tabs, expected input<TAB>target; line 7 has a target that has "
        "2049 tokens, more than --max_input_tokens=2048. Nothing was done"
    ) in capsys.readouterr().err
