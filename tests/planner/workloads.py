# SPDX-License-Identifier: Apache-2.0
"""Small training steps, shipped models, and small memories, for the planner's tests."""

import dataclasses
import functools

import gin

from switchx.compiled.workload import workload_of
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.planner.layout import Workload
from tests.processes import ROOT
from tests.training.jobs import make_job

SWITCH = SwitchConfig(8, every=2, capacity_factor=1.0, min_capacity=1, group_size=16)
SPARSE = ModelConfig(
    "decoder_only", 96, 64, 128, 8, 8, 4, activation="gelu", scan_layers=True, switch=SWITCH
)
DENSE = dataclasses.replace(SPARSE, switch=None)


def make_workload(model: ModelConfig = SPARSE, **changes) -> Workload:
    """16 rows of 16 tokens, Adafactor."""
    fields = dict(batch_size=16, inputs_length=8, targets_length=8)
    return workload_of(make_job(model, **(fields | changes)))


@functools.cache
def shipped_model(name: str, *bindings: str) -> ModelConfig:
    """The model of `configs/models/{name}.gin`."""
    gin.clear_config()
    gin.add_config_file_search_path(str(ROOT / "configs"))
    try:
        gin.parse_config_files_and_bindings([f"models/{name}.gin"], bindings)
        return gin.get_configurable("switchx.models.config.ModelConfig")()
    finally:
        gin.clear_config()


def small(hardware, num_bytes: float):
    """The hardware with devices of so many bytes, all of them usable."""
    memory = dataclasses.replace(hardware.memory, num_bytes=num_bytes, usable=1.0)
    return dataclasses.replace(hardware, memory=memory)
