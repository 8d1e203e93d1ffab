# SPDX-License-Identifier: Apache-2.0
"""A model's gin file builds the model, and takes the place of a run file's."""

import dataclasses

import pytest

from switchx.cli import gin_edge
from switchx.cli.model_gin import model_gin
from switchx.models.config import ModelConfig, Precision
from switchx.training.job import TrainingJob
from tests.interop.folders import SWITCH, T5_1_1

HALF = dataclasses.replace(T5_1_1, precision=Precision(compute="bfloat16"), init_scale=0.1)


@pytest.fixture(autouse=True)
def clean_gin():
    yield
    gin_edge.gin.clear_config()


@pytest.mark.parametrize("model", [SWITCH, HALF], ids=["sparse", "dense"])
def test_the_model_is_built_again_alone_and_after_a_run_file(tmp_path, model):
    model = dataclasses.replace(model, dropout_rate=0.0)
    file = tmp_path / "model.gin"
    file.write_text(model_gin(model))
    gin_edge.parse_files([str(file)], [])
    assert gin_edge.build("MODEL", ModelConfig) == model

    gin_edge.parse_files(["runs/pretrain_tiny.gin", str(file)], [])
    job = gin_edge.build("JOB", TrainingJob)
    assert job.model == dataclasses.replace(model, dropout_rate=job.model.dropout_rate)
