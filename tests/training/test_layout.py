# SPDX-License-Identifier: Apache-2.0
"""Converted runs as folders; their numbers are in test_meshes_of_checkpoints.py."""

import dataclasses
import json

import pytest

from switchx.checkpoint.run_folder import RunFolder, read_model_config
from switchx.checkpoint.scan_conversion import write_converted_layout
from switchx.manifest import find_damage, read_manifest
from switchx.models.config import RouterConfig, SwitchConfig
from switchx.training.resume import check_same_run
from tests.data.refusals import refused
from tests.training.jobs import SPARSE, make_job
from tests.training.saved_runs import save_run

MODEL = dataclasses.replace(
    SPARSE, switch=SwitchConfig(2, every=2, router=RouterConfig(jitter=0.0))
)
GIN = (
    "x.ModelConfig.d_ff = 24\nx.ModelConfig.scan_layers = False\ny.Other.scan_layers = False\n"
)


@pytest.fixture
def run(tmp_path):
    run = RunFolder(save_run(tmp_path / "run", MODEL))
    run.operative_config.write_text(GIN)
    run.git_commit.write_text("abc\n")
    return run


@pytest.fixture
def converted(run, tmp_path):
    folder = RunFolder(tmp_path / "converted").create()
    write_converted_layout(run, 5, folder.root, is_scanned=True)
    return folder


def test_it_is_a_run_of_the_other_configuration(converted):
    scanned = dataclasses.replace(MODEL, scan_layers=True)
    assert read_model_config(converted) == scanned
    check_same_run(converted, make_job(scanned))
    with pytest.raises(ValueError, match="model.scan_layers: True there, False here"):
        check_same_run(converted, make_job(MODEL))
    assert converted.git_commit.read_text() == "abc\n"
    assert converted.operative_config.read_text() == GIN.replace(
        "x.ModelConfig.scan_layers = False", "x.ModelConfig.scan_layers = True"
    )


def test_the_checkpoint_is_whole_and_keeps_its_score(run, converted):
    (path,) = converted.checkpoints.iterdir()
    assert path.name == "5" and find_damage(path, checksums=True) is None
    assert read_manifest(path).score == read_manifest(run.checkpoints / "5").score == -1.0
    data = json.loads((path / "data" / "process_0_of_1.json").read_text())
    assert data == json.loads((run.checkpoints / "5/data/process_0_of_1.json").read_text())


@pytest.mark.parametrize("alias", ["", "a."])
def test_a_configuration_that_had_the_default_gets_a_line(run, tmp_path, alias):
    before = f"{alias}ModelConfig.d_ff = 1\n"
    run.operative_config.write_text(before)
    folder = RunFolder(tmp_path / "other").create()
    write_converted_layout(run, 9, folder.root, is_scanned=True)
    after = folder.operative_config.read_text()
    assert after == f"{before}\n{alias}ModelConfig.scan_layers = True\n"


def test_the_layout_that_it_has_is_refused(run, converted, tmp_path):
    with refused(f"the layers of {run.root} are unrolled already; nothing to convert"):
        write_converted_layout(run, 5, tmp_path / "x", is_scanned=False)
    with refused(f"the layers of {converted.root} are scanned already; nothing to convert"):
        write_converted_layout(converted, 5, tmp_path / "x", is_scanned=True)
