# SPDX-License-Identifier: Apache-2.0
"""The model that ships: small, whole, of its gin file, and opened by its name."""

import html
import importlib.metadata
import re
import shutil

import numpy as np
import pyarrow.parquet
import pytest

import switchx
from experiments.first_screen import COMMANDS, PICTURE, TERMINAL
from switchx.cli.main import main
from switchx.data.labelled_texts import read_labelled_texts
from switchx.gin_config.building import job_from_gin
from switchx.shipped import NAMES, TEXTS, folder_of
from tests.processes import ROOT

FOLDER = folder_of("tiny")


@pytest.fixture(scope="module")
def model():
    return switchx.load("tiny")


def test_it_is_small_and_of_its_run(model):
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 5 << 20
    job = job_from_gin("configs/runs/pretrain_shipped.gin")
    assert model.step == job.train_steps
    assert model.config.sparse_layer_names == job.model.sparse_layer_names
    for name in ("d_model", "d_ff", "vocab_size", "num_heads", "num_encoder_layers"):
        assert getattr(model.config, name) == getattr(job.model, name), name
    assert model.config.switch.num_experts == job.model.switch.num_experts


def test_it_has_learnt(model):
    """Python's text is likelier than the same letters in another order."""
    inputs = ["def <extra_id_0>(self):", "import <extra_id_0>"]
    likely = model.score(inputs, ["<extra_id_0> __init__", "<extra_id_0> os"])
    others = model.score(inputs, ["<extra_id_0> __tini__", "<extra_id_0> zq"])
    for one, other in zip(likely, others, strict=True):
        assert one.log_likelihood > other.log_likelihood


def test_a_folder_of_that_name_goes_first(in_a_folder):
    assert NAMES == ("tiny",) and folder_of("other") == "other"
    (in_a_folder / "tiny").mkdir()
    assert folder_of("tiny") == "tiny"
    shutil.copytree(FOLDER, in_a_folder / "tiny", dirs_exist_ok=True)
    assert switchx.load("tiny").step > 0


def test_texts_ship_whose_licences_are_said():
    texts = read_labelled_texts([TEXTS])
    assert np.bincount(texts.label_R).tolist() == [32] * 4
    licences = (TEXTS.parent / "LICENSES.md").read_text()
    for label in texts.labels:
        assert re.search(
            rf"^\| `texts/{label}.jsonl` \|.*(Apache|CC BY|public)", licences, re.M
        )


def test_the_first_screen_is_of_what_ships(model):
    """As far as it can be seen without making it anew, which takes minutes."""
    picture, terminal = (each.read_text() for each in (PICTURE, TERMINAL))
    labels = (path.stem for path in TEXTS.iterdir())
    for name in (*model.config.sparse_layer_names, *labels):
        assert f">{name}</text>" in picture
    said = html.unescape(re.sub("<.*?>", "", terminal)).replace("\xa0", " ")
    for command in (f"switchx {switchx.__version__}", *COMMANDS):
        assert command in said
    assert "@font-face" not in terminal and ROOT.parent.as_posix() not in said


@pytest.mark.slow
def test_an_atlas_of_what_ships(in_a_folder, one_device, capsys):
    words = ["atlas", "tiny", "--output=atlas", "--factors=1", "--knockouts=4"]
    assert main([*words, "--knockout_texts=4"]) == 0
    page, *lines = capsys.readouterr().out.splitlines()
    assert page == str(in_a_folder / "atlas/atlas.html") and len(lines) == 4
    assert lines[0].startswith("tiny, code: loss ") and ", without " in lines[0]
    read = lambda name: pyarrow.parquet.read_table(f"atlas/tables/tiny/{name}.parquet")  # noqa: E731
    first, *others = read("drops").to_pylist()
    assert first["layer"] == "encoder 1" and first["differing"] == 0 < first["measured"]
    assert all(each["differing"] < 0.02 * each["choices"] for each in others)
    for each in read("knockouts").to_pylist():
        assert each["change_low"] <= each["change"] <= each["change_high"]
    assert "measured (dots)" in (in_a_folder / "atlas/picture.svg").read_text()


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    version = importlib.metadata.version("switchx")
    assert capsys.readouterr().out == f"switchx {version}\n" and switchx.__version__ == version


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["quantize", "--output=made", "--bits=4"],
            "shipped/tiny is quantized already; give the run",
        ),
        (["reshape", "--output=made", "--experts=4"], "tiny is made for inference already"),
        (["eval"], "such as operative_config.gin of a run of such tasks"),
    ],
)
def test_commands_that_need_a_run_say_what_the_name_is(in_a_folder, capsys, words, said):
    assert main([words[0], "--model_dir=tiny", *words[1:]]) == 2
    assert said in capsys.readouterr().err
