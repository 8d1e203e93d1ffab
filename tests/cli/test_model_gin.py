# SPDX-License-Identifier: Apache-2.0
"""A model's gin file builds the model, and takes the place of a run file's."""

import dataclasses

import pytest

from switchx.cli.config import building
from switchx.cli.config.files import model_gin
from switchx.models.config import ModelConfig, Precision
from switchx.training.job import TrainingJob
from tests.interop.folders import SWITCH, T5_1_1

HALF = dataclasses.replace(T5_1_1, precision=Precision(compute="bfloat16"), init_scale=0.1)


@pytest.fixture(autouse=True)
def clean_gin():
    yield
    building.gin.clear_config()


@pytest.mark.parametrize("model", [SWITCH, HALF], ids=["sparse", "dense"])
def test_the_model_is_built_again_alone_and_after_a_run_file(tmp_path, model):
    model = dataclasses.replace(model, dropout_rate=0.0)
    file = tmp_path / "model.gin"
    file.write_text(model_gin(model))
    building.parse_files([str(file)], [])
    assert building.build("MODEL", ModelConfig) == model

    building.parse_files(["runs/pretrain_tiny.gin", str(file)], [])
    job = building.build("JOB", TrainingJob)
    assert job.model == dataclasses.replace(model, dropout_rate=job.model.dropout_rate)
