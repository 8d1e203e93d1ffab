# SPDX-License-Identifier: Apache-2.0
"""The model that ships: small, whole, of its gin file, and opened by its name."""

import importlib.metadata
import shutil

import pytest

import switchx
from switchx.cli.main import main
from switchx.gin_config.building import job_from_gin
from switchx.shipped import NAMES, folder_of

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
        (["eval"], "such as operative_config.gin of the run it was made from"),
    ],
)
def test_commands_that_need_a_run_say_what_the_name_is(in_a_folder, capsys, words, said):
    assert main([words[0], "--model_dir=tiny", *words[1:]]) == 2
    assert said in capsys.readouterr().err
