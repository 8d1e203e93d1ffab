# SPDX-License-Identifier: Apache-2.0
"""docs/routing.md: its commands train, and it names every field of a router."""

import dataclasses
import functools
import re
import shlex

import jax
import pytest

from switchx.cli.arguments import gin_of
from switchx.cli.main import _parse, _parser, main
from switchx.gin_config import building
from switchx.models.params import abstract_params
from switchx.moe.config import RouterConfig
from switchx.training.step import gradients
from switchx.tree import num_elements
from tests.compilation import compiled_once
from tests.processes import ROOT

PAGE = (ROOT / "docs/routing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]

# So that a run takes seconds; a later flag wins.
BRIEF = [
    *(f"--gin.ModelConfig.{name}=8" for name in ("d_model", "d_ff", "d_head")),
    "--gin.ModelConfig.num_heads=1",
    "--gin.ModelConfig.num_decoder_layers=2",
    "--gin.NUM_EXPERTS=4",
    "--gin.VOCAB_SIZE=500",
    "--gin.TRAIN_STEPS=2",
    "--gin.TrainingJob.eval_batches=1",
]


def options_of(command: str) -> list[str]:
    """What follows `switchx`, made brief."""
    program, *words = shlex.split(command)
    assert (program, words[0]) == ("switchx", "train")
    brief = [*BRIEF]
    if "gpt" in command:
        brief.append("--gin.WARMUP_STEPS=1")
    else:
        brief.append("--gin.ModelConfig.num_encoder_layers=2")
    return [*words, *brief]


def name_of(command: str) -> str:
    return command.rpartition("/")[2]


@pytest.mark.parametrize("command", COMMANDS, ids=name_of)
def test_command_builds_a_job_whose_gradient_can_be_traced(command):
    job = building.parse_job(*gin_of(_parse(_parser(), options_of(command))))
    assert job.model.switch.router != RouterConfig() or job.model.switch.has_attention
    features = "input_tokens target_tokens loss_weights segment_ids positions prefix_mask"
    batch = {
        f"{stack}_{feature}": jax.ShapeDtypeStruct((2, length), "int32")
        for stack, length in zip(("encoder", "decoder"), job.sequence_lengths, strict=True)
        for feature in features.split()
    }
    if job.model.switch.router.kind == "task":
        batch["task_ids"] = jax.ShapeDtypeStruct((2,), "int32")
    gradient = functools.partial(gradients, job.model, job.loss, job.step)
    grads, _, _, stats = jax.eval_shape(
        gradient, abstract_params(job.model), batch, key=jax.random.key(0)
    )
    assert num_elements(grads) == num_elements(abstract_params(job.model))
    layers = job.model.num_sparse_layers * (2 if job.model.switch.sublayers == "both" else 1)
    assert stats.load_E.shape == (layers, 4)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=name_of)
def test_command_trains(command, capsys, tmp_path, monkeypatch, session_cache):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(session_cache))
    monkeypatch.delenv("SWITCHX_DATA_DIR", raising=False)
    with compiled_once(session_cache / "compiled"):
        assert main(options_of(command)) == 0, capsys.readouterr().err


def test_every_field_is_named():
    fields = {field.name for field in dataclasses.fields(RouterConfig)}
    assert [name for name in fields if f"`{name}`" not in PAGE] == []
