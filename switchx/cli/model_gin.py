# SPDX-License-Identifier: Apache-2.0
"""A model's configuration as a gin file that comes after a run file and takes its place."""

import dataclasses

from switchx.models.config import ModelConfig

FILE = "model.gin"
_HEADER = """\
# The model of this folder, whole. It comes after a run file and takes the place of its model:
#
#   switchx train --gin_file=configs/runs/finetune.gin --gin_file=THIS_FOLDER/{file} \\
#     --gin.INIT_FROM=THIS_FOLDER --model_dir=DIR
#
# Dropout is the run file's.

from __gin__ import dynamic_registration
from switchx.models import config

MODEL = @config.ModelConfig()
"""
# A run's own, which decide nothing about what the parameters mean.
_OF_THE_RUN = ("dropout_rate", "expert_dropout_rate")


def model_gin(model: ModelConfig) -> str:
    """Every field of a model as bindings, those with default values too."""
    return _HEADER.format(file=FILE) + "\n" + "\n".join(_bindings(model)) + "\n"


def _bindings(description) -> list[str]:
    """Lines of one configuration, then those of the ones in it."""
    name = type(description).__name__
    lines, nested = [], []
    for field in dataclasses.fields(description):
        value = getattr(description, field.name)
        if field.name in _OF_THE_RUN:
            continue
        if dataclasses.is_dataclass(value):
            nested += _bindings(value)
            value = f"@config.{type(value).__name__}()"
        else:
            value = repr(value)
        lines.append(f"config.{name}.{field.name} = {value}")
    return [*lines, "", *nested]
