# SPDX-License-Identifier: Apache-2.0
"""`switchx quantize`: what it prints is what it wrote; what it cannot do it says at once."""

import json

import pytest

import switchx
from switchx.cli import quantize
from switchx.cli.main import main
from switchx.inference.quantize import model_bytes
from tests.training.jobs import DENSE, ENCODER_DECODER
from tests.training.saved_runs import save_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"), ENCODER_DECODER)


def test_report_is_that_of_the_folder(folder, tmp_path, capsys):
    output = tmp_path / "int4"
    options = ["--bits=4", "--rest=bfloat16", "--group_size=8", "--method=absmax", "--json"]
    assert main(["quantize", f"--model_dir={folder}", f"--output={output}", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    before, after = switchx.load(folder), switchx.load(output)
    assert report["bytes_before"] == model_bytes(before.params)
    assert report["bytes_after"] == model_bytes(after.params)
    assert report["bytes_of_files"] == sum(file.stat().st_size for file in output.iterdir())
    assert report["share_of_expert_bytes_quantized"] == 1.0
    assert len(report["matrices"]) == 4  # in and out, of a layer of each stack
    assert all(0.02 < each["error"] < 0.2 for each in report["matrices"])
    about = report["about"]
    assert (about["source"], about["source_fingerprint"]) == (str(folder), before.fingerprint)
    assert (about["step"], about["method"], about["group_size"]) == (9, "absmax", 8)
    assert after.config.precision.params == "bfloat16"


def test_tables_for_a_person(folder, tmp_path, capsys):
    output = tmp_path / "int8"
    words = ["quantize", f"--model_dir={folder}", f"--output={output}", "--bits=8"]
    assert main([*words, "--step=best"]) == 0
    said = capsys.readouterr().out
    assert "encoder/blocks/layer_1/ffn/experts/w_in_EDF" in said
    assert "100.0% of the experts' bytes are quantized" in said
    assert "bytes before" in said and str(output) in said
    assert switchx.load(output).step == 5
    assert main(words) == 2
    assert f"{output} is not empty" in capsys.readouterr().err


def test_methods_are_those_of_the_kernels():
    from pallas_kernels.quantization.quantize import METHODS

    assert quantize.METHODS == METHODS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--bits=8", "--output="], "--output is empty"),
        (["--bits=3", "--output=x"], "invalid choice: 3 (choose from 4, 8)"),
        (["--bits=8", "--output=x", "--group_size=5"], "group_size=5 does not divide D="),
        (["--bits=8", "--output=x", "--step=7"], "no complete checkpoint of step 7"),
    ],
)
def test_wrong_options_write_nothing(folder, capsys, tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", f"--model_dir={folder}", *options]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_dense_and_quantized_models_are_refused(tmp_path, capsys):
    dense, output = save_run(tmp_path / "dense", DENSE), tmp_path / "out"
    words = ["quantize", f"--output={output}", "--bits=8"]
    assert main([*words, f"--model_dir={dense}"]) == 2
    assert "no experts to quantize" in capsys.readouterr().err
    (tmp_path / "artifact.json").touch()
    assert main([*words, f"--model_dir={tmp_path}"]) == 2
    assert f"{tmp_path} is quantized already" in capsys.readouterr().err
