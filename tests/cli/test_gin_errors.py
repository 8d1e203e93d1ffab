# SPDX-License-Identifier: Apache-2.0
"""Gin's own errors as sentences: what is wrong, where, and what may be meant.

Each error is gin's, made by what a person would write.
"""

import pathlib

import pytest

from switchx.cli.config import building
from tests.integration.runs import SMALL

HEAD = "from __gin__ import dynamic_registration\nfrom switchx.models import config\n"
SWITCH_FIELDS = (
    "num_experts, every, stacks, encoder_layers, decoder_layers, sublayers, "
    "attention_experts, capacity_factor, eval_capacity_factor, min_capacity, "
    "expert_capacity, capacity_rounding, group_size, d_ff, shared_d_ff, "
    "expert_dropout_rate, expert_bias, dispatcher, buffer_factor, router_init_scale, router"
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    building.gin.clear_config()


def message(*bindings: str, text: str | bytes = "") -> str:
    """What is said of a file with this text on top of the small run, and of bindings."""
    pathlib.Path("my.gin").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(building.ConfigurationError) as error:
        building.parse_files([str(SMALL), "my.gin"], ["FILES=a.txt", *bindings])
        building.build("JOB", object)
    return str(error.value)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "config.SwitchConfig.capacity_facto = 1.0",
            "my.gin:3: config.SwitchConfig has no parameter 'capacity_facto' (did you mean "
            f"capacity_factor?); it has {SWITCH_FIELDS}",
        ),
        (
            "config.SwitchConfg.capacity_factor = 1.0",
            "my.gin:3: switchx.models.config has no 'SwitchConfg' (did you mean SwitchConfig?)",
        ),
        (
            "from switchx.models import confg",
            "my.gin:3: there is no module 'switchx.models.confg' (did you mean config?)",
        ),
        (
            'include "runs/default.gin"',
            "my.gin:3: there is no gin file 'runs/default.gin' to include; did you mean "
            "configs/runs/defaults.gin?",
        ),
        ("\nBATCH_SIZE = = 8", "my.gin:4: Unable to parse value."),
        (
            "config.ModelConfig.d_model 3",
            "my.gin:3: Couldn't parse statement, expected ':' or '='.",
        ),
        ("SIZES = [3", "my.gin:4: EOF in multi-line statement"),
        (
            "config.ModelConfig.d_model = %D_MODL",
            "nothing defines the macro %D_MODL (did you mean MODEL?)",
        ),
        (
            "MODEL = @config.ModelConfig\nMODEL = @ModelCnfig()",
            "my.gin:4: there is no 'ModelCnfig' (did you mean ModelConfig?); a gin file has to "
            "import the module that it is in",
        ),
    ],
)
def test_mistake_in_a_file_is_told_with_file_and_line(lines, said):
    assert message(text=HEAD + lines + "\n").removeprefix("./") == said


def test_file_that_is_no_text_is_named():
    assert message(text=b"\xff\xfe").startswith(
        "./my.gin: 'utf-8' codec can't decode byte 0xff"
    )


def test_mistake_in_an_included_file_is_told_of_that_file():
    pathlib.Path("inner.gin").write_text(HEAD + "SIZES = [3\n")
    assert (
        message(text='\ninclude "inner.gin"\n') == "./inner.gin:4: EOF in multi-line statement"
    )


@pytest.mark.parametrize(
    ("binding", "said"),
    [
        (
            "SwitchConfig.groupsize=8",
            "SwitchConfig has no parameter 'groupsize' (did you mean group_size?); it has "
            f"{SWITCH_FIELDS}",
        ),
        (
            "SwitchConfg.group_size=8",
            "there is no 'SwitchConfg' (did you mean SwitchConfig?); a gin file has to import "
            "the module that it is in",
        ),
        (
            "MODEL=@config.ModelConfg()",
            "there is no 'config.ModelConfg' (did you mean ModelConfig?); a gin file has to "
            "import the module that it is in",
        ),
    ],
)
def test_mistake_in_a_binding_is_told_with_the_binding(binding, said):
    assert message(binding) == f"--gin.{binding}: {said}"


def test_all_that_is_required_is_asked_for_at_once():
    with pytest.raises(building.ConfigurationError) as error:
        building.parse_files(["runs/finetune.gin", "tasks/text_span_corruption.gin"], [])
        building.build("JOB", object)
    assert str(error.value) == (
        "INIT_FROM, FILES are required and not set; give --gin.INIT_FROM=VALUE "
        "--gin.FILES=VALUE"
    )
    with pytest.raises(building.ConfigurationError) as error:
        building.parse_files([str(SMALL)], [])
        building.build("JOB", object)
    assert str(error.value) == "FILES is required and not set; give --gin.FILES=VALUE"


def test_refusal_of_a_constructor_says_what_was_being_built():
    assert message("TRAIN_STEPS=-1") == (
        "train_steps=-1; use 0 or more (while building TrainingJob)"
    )
