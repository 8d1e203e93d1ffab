# SPDX-License-Identifier: Apache-2.0
"""`switchx quantize` and `switchx export`: what they print is what they wrote."""

import dataclasses
import json
import os
import shlex

import pytest

import switchx
from pallas_kernels.quantization.quantize import METHODS
from switchx.cli import export, quantize
from switchx.cli.main import main
from switchx.inference.export import DEVICE_KINDS
from switchx.inference.quantize import model_bytes
from switchx.models.config import ModelConfig, SwitchConfig
from tests.training.jobs import DENSE
from tests.training.saved_runs import save_run

MODEL = ModelConfig("encoder_decoder", 384, 8, 8, 1, 8, 1, 1, switch=SwitchConfig(2, every=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"), MODEL)


def test_names_are_those_of_what_is_imported_late():
    assert quantize.METHODS == METHODS
    assert tuple(DEVICE_KINDS) == export.PLATFORMS


def test_quantized_report_is_that_of_the_folder(folder, tmp_path, cli):
    output = tmp_path / "int4"
    options = ["--bits=4", "--rest=bfloat16", "--group_size=8", "--method=absmax", "--json"]
    report = cli.json("quantize", f"--model_dir={folder}", f"--output={output}", *options)
    before, after = switchx.load(folder), switchx.load(output)
    assert report["bytes_before"] == model_bytes(before.params)
    assert report["bytes_after"] == model_bytes(after.params)
    assert report["bytes_of_files"] == sum(file.stat().st_size for file in output.iterdir())
    assert report["share_of_expert_bytes_quantized"] == 1.0
    assert len(report["matrices"]) == 6  # gate, in and out, of a layer of each stack
    assert all(0.02 < each["error"] < 0.2 for each in report["matrices"])
    about = report["about"]
    assert (about["source"], about["source_fingerprint"]) == (str(folder), before.fingerprint)
    assert (about["step"], about["method"], about["group_size"]) == (9, "absmax", 8)
    assert after.config.precision.params == "bfloat16"


def test_others_may_read_what_the_umask_says(folder, tmp_path):
    """Of an artifact, an export, a conversion to Hugging Face and one back each file and
    folder, as the Dockerfile's uid reads what root wrote."""
    run = save_run(tmp_path / "run", dataclasses.replace(MODEL, activation="relu"))
    before = os.umask(0o027)
    theirs = f"{tmp_path}/theirs"
    decoding = ["--platform=cpu", "--batch_size=1", "--input_length=4", "--max_new_tokens=2"]
    words = {
        "artifact": ["quantize", f"--model_dir={folder}", "--bits=8"],
        "export": ["export", f"--model_dir={folder}", *decoding],
        "theirs": ["convert", "--to=huggingface", str(run), theirs],
        "back": ["convert", "--from=huggingface", theirs, f"{tmp_path}/back"],
    }
    try:
        for name, each in words.items():
            output = [] if each[0] == "convert" else [f"--output={tmp_path / name}"]
            assert main([*each, *output]) == 0
    finally:
        os.umask(before)
    for name in words:
        paths = [tmp_path / name, *(tmp_path / name).rglob("*")]
        assert len(paths) > 3
        modes = {path: oct(path.stat().st_mode & 0o777) for path in paths}
        assert modes == {path: "0o750" if path.is_dir() else "0o640" for path in paths}


def test_float8_experts_generate(folder, tmp_path, cli):
    output = tmp_path / "float8"
    options = ["--bits=8", "--dtype=float8_e4m3fn", "--json"]
    report = cli.json("quantize", f"--model_dir={folder}", f"--output={output}", *options)
    assert (report["about"]["dtype"], report["about"]["method"]) == ("float8_e4m3fn", "absmax")
    assert all(0.01 < each["error"] < 0.03 for each in report["matrices"])
    before, after = switchx.load(folder), switchx.load(output)
    [score], [expected] = (each.score([[3, 4]], [[4, 3, 1]]) for each in (after, before))
    assert score.log_likelihood == pytest.approx(expected.log_likelihood, rel=0.1)
    assert score.log_likelihood != expected.log_likelihood


def test_tables_for_a_person_and_models_that_are_refused(folder, tmp_path, cli):
    output = tmp_path / "int8"
    words = ["quantize", f"--model_dir={folder}", f"--output={output}", "--bits=8"]
    said = cli(*words, "--step=best").out
    assert "encoder/blocks/layer_0/ffn/experts/w_in_EDF" in said
    assert "100.0% of the experts' bytes are quantized" in said
    assert "bytes before" in said and str(output) in said
    assert switchx.load(output).step == 5
    assert f"{output} exists" in cli.refused(*words)
    dense, output = save_run(tmp_path / "dense", DENSE), tmp_path / "out"
    words = ["quantize", f"--output={output}", "--bits=8"]
    assert "no experts to quantize" in cli.refused(*words, f"--model_dir={dense}")
    (tmp_path / "artifact.json").touch()
    assert f"{tmp_path} is quantized already" in cli.refused(*words, f"--model_dir={tmp_path}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--bits=8", "--output="], "--output: it is empty"),
        (["--bits=3", "--output=x"], "invalid choice: 3 (choose from 4, 8)"),
        (["--bits=8", "--output=x", "--group_size=5"], "group_size=5 does not divide D="),
        (["--bits=4", "--output=x", "--dtype=float8_e4m3fn"], "with bits=4; use int4"),
        (["--bits=8", "--output=x", "--step=7"], "no complete checkpoint of step 7"),
    ],
)
def test_wrong_options_of_quantize_write_nothing(
    folder, cli, tmp_path, monkeypatch, options, said
):
    monkeypatch.chdir(tmp_path)
    assert said in cli.refused("quantize", f"--model_dir={folder}", *options)
    assert list(tmp_path.iterdir()) == []


def test_the_recipe_in_an_export_makes_it_again(folder, tmp_path, cli):
    options = ["--platform=cpu", "--batch_size=2", "--input_length=5", "--max_new_tokens=3"]
    options += ["--forced_prefix=5,6", "--logprobs=1", "--repetition_penalty=1.5"]
    words = ["export", f"--model_dir={folder}", f"--output={tmp_path / 'a'}", *options]
    report = cli.json(*words, "--json", "--mesh=expert=2")
    files = list((tmp_path / "a").iterdir())
    assert report["bytes_of_files"] == sum(file.stat().st_size for file in files)
    assert report["platforms"] == {"cpu": {"device_kind": "cpu", "needs_same_jax": False}}
    assert {"export.json", "run.py", "vocabulary.json"} <= {file.name for file in files}
    about = report["about"]
    assert about["fingerprint"] == switchx.load(folder).fingerprint
    program, *recipe = shlex.split(about["rebuild"].replace("/a ", "/b "))
    assert program == "switchx" and "--step=9" in recipe
    said = cli(*recipe).out
    assert "cpu: cpu, mesh expert=2" in said and str(tmp_path / "b") in said
    first, again = (json.loads((tmp_path / name / "export.json").read_text()) for name in "ab")
    for manifest in (first, again):
        for name in ("about", "sha256"):
            del manifest[name]
    assert first["decoding"]["forced_prefix"] == [5, 6]
    # Programs name the lines that they come from, as does the order of their parts.
    for name in ("weights.safetensors", "run.py", "vocabulary.json"):
        assert first["files"][name] == again["files"][name]
    del first["files"], again["files"]
    assert first == again


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--platform=gpu"], "'gpu' is no platform; use cpu, tpu, cuda, each once at most"),
        (["--platform=cpu,cpu"], "'cpu' is no platform; use cpu, tpu, cuda, each once"),
        ([], "give: --platform"),
        (["--platform=cpu", "--pruning=none"], "unknown option --pruning"),
        (["--platform=cpu", "--stop=x"], "unknown option --stop"),
        (["--platform=cpu", "--best_of=9", "--temperature=1"], "use batch_size=8 at most"),
        (["--platform=cpu", "--forced_prefix=999"], "the vocabulary has 0 to"),
        (["--platform=cpu", "--output="], "--output: it is empty"),
        (["--platform=cpu", "--input_length=0"], "input_length=0; use at least 1"),
        (["--platform=cpu", "--top_k=3"], "temperature=0 does not sample"),
        (["--platform=cpu,tpu", "--device_kind=x"], "export for one platform at a time"),
        (["--platform=tpu", "--device_kind=TPU v99"], "'TPU v99' of platform 'tpu': no device"),
        (["--platform=cuda", "--device_kind=TPU v4"], "as 'NVIDIA H200'"),
        (["--platform=cpu", "--mesh=expert=0"], "'expert=0' is no axis of a mesh; write"),
        (["--platform=cpu", "--mesh=expert=2", "--batch_size=3"], "is not divisible by the 2"),
        (["--platform=cpu", "--mesh=expert=4"], "expert dimension E=2 is not divisible by"),
    ],
)
def test_wrong_options_of_export_write_nothing(folder, cli, tmp_path, options, said):
    words = [f"--model_dir={folder}", f"--output={tmp_path / 'out'}", *options]
    assert said in cli.refused("export", *words)
    assert list(tmp_path.iterdir()) == []
