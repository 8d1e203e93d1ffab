# SPDX-License-Identifier: Apache-2.0
"""A configuration survives JSON; what is not one is refused by name."""

import dataclasses
import json

import pytest

from switchx.models.config import ModelConfig, Precision, SwitchConfig, model_from_description
from switchx.moe.config import RouterConfig
from tests.data.refusals import refused

CONFIG = ModelConfig(
    "decoder_only", 40, 8, 16, 1, 8, 2,
    switch=SwitchConfig(4, router=RouterConfig(num_selected=2, exploration="none")),
    precision=Precision(compute="bfloat16"),
)  # fmt: skip


@pytest.mark.parametrize("config", [CONFIG, dataclasses.replace(CONFIG, switch=None)])
def test_a_configuration_comes_back(config):
    description = json.loads(json.dumps(dataclasses.asdict(config)))
    assert model_from_description(description, "here") == config


def test_what_is_no_configuration_is_named():
    description = dataclasses.asdict(CONFIG)
    description["switch"]["router"]["k"] = 2
    with refused("a.json: RouterConfig has no k; it was written by another version<any>"):
        model_from_description(description, "a.json")
    with refused("a.json: ModelConfig needs architecture, d_ff, d_head, d_model<any>"):
        model_from_description({}, "a.json")
