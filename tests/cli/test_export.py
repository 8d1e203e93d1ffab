# SPDX-License-Identifier: Apache-2.0
"""`switchx export`: the recipe in it makes it again; wrong options write nothing."""

import json
import shlex

import pytest

import switchx
from switchx.cli import export, generate
from switchx.cli.main import main
from switchx.inference.export import DEVICE_KINDS
from switchx.models.config import ModelConfig, SwitchConfig
from tests.training.saved_runs import save_run

MODEL = ModelConfig("encoder_decoder", 384, 8, 8, 1, 8, 1, 1, switch=SwitchConfig(2, every=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"), MODEL)


def test_the_recipe_in_it_makes_it_again(folder, tmp_path, capsys):
    options = ["--platform=cpu", "--batch_size=2", "--input_length=5", "--max_new_tokens=3"]
    words = ["export", f"--model_dir={folder}", f"--output={tmp_path / 'a'}", *options]
    assert main([*words, "--json", "--mesh=expert=2"]) == 0
    report = json.loads(capsys.readouterr().out)
    files = list((tmp_path / "a").iterdir())
    assert report["bytes_of_files"] == sum(file.stat().st_size for file in files)
    assert report["platforms"] == {"cpu": {"device_kind": "cpu", "needs_same_jax": False}}
    assert {"export.json", "run.py", "vocabulary.json"} <= {file.name for file in files}
    about = report["about"]
    assert about["fingerprint"] == switchx.load(folder).fingerprint
    program, *recipe = shlex.split(about["rebuild"].replace("/a ", "/b "))
    assert program == "switchx" and "--step=9" in recipe
    assert main(recipe) == 0
    said = capsys.readouterr().out
    assert "cpu: cpu, mesh expert=2" in said and str(tmp_path / "b") in said
    first, again = (json.loads((tmp_path / name / "export.json").read_text()) for name in "ab")
    for manifest in (first, again):
        for name in ("about", "sha256"):
            del manifest[name]
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
        (["--platform=cpu", "--output="], "--output is empty"),
        (["--platform=cpu", "--input_length=0"], "input_length=0; use at least 1"),
        (["--platform=cpu", "--top_k=3"], "temperature=0 does not sample"),
        (["--platform=cpu,tpu", "--device_kind=x"], "export for one platform at a time"),
        (["--platform=cpu", "--mesh=expert=2", "--batch_size=3"], "is not divisible by the 2"),
        (["--platform=cpu", "--mesh=expert=4"], "expert dimension E=2 is not divisible by"),
    ],
)
def test_wrong_options_write_nothing(folder, capsys, tmp_path, options, said):
    words = [f"--model_dir={folder}", f"--output={tmp_path / 'out'}", *options]
    assert main(["export", *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_names_are_those_of_what_is_imported_late():
    assert tuple(DEVICE_KINDS) == export.PLATFORMS
    assert set(export.DECODING) == set(generate.DECODING) - {"pruning"}
