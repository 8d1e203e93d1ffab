# SPDX-License-Identifier: Apache-2.0
"""Settings of models and of training that are out of their range are named, with the value."""

import dataclasses
import math

import pytest

from switchx.models.config import ModelConfig, Precision, RouterConfig, SwitchConfig
from switchx.optim.adafactor import Adafactor
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import Constant, InverseSquareRoot, LinearWarmup, WarmupCosine
from switchx.training.distillation.soft_loss import Distillation
from switchx.training.losses import LossConfig
from switchx.training.step import StepConfig
from switchx.training.telemetry.routing_alarms import RoutingAlarms
from switchx.training.text_evaluation import TextEvaluation
from tests.data.refusals import refused
from tests.training.jobs import make_job

MODEL, SWITCH = ModelConfig("decoder_only", 100, 16, 32, 2, 8, 4), SwitchConfig(8)
# Of each configuration, which is in order, the values that a field must not have.
OUT_OF_RANGE = [
    (MODEL, dict(architecture=["encoder"], activation=["tanh"], norm=["batch"])),
    (MODEL, dict(positions=["alibi"], remat=["some"], dropout_rate=[1.0, -0.1, math.nan])),
    (MODEL, dict(vocab_size=[0], d_model=[-1], d_ff=[0, 4 * 10**21], num_heads=[0])),
    (MODEL, dict(d_head=[0], num_decoder_layers=[0], init_scale=[0.0], norm_epsilon=[0.0])),
    (Precision(), dict.fromkeys(("params", "compute", "router", "logits"), ["int8"])),
    (SWITCH, dict(dispatcher=["magic"], stacks=["decoder"], sublayers=["query"])),
    (SWITCH, dict(attention_experts=["deep"], capacity_rounding=["even"], num_experts=[0])),
    (SWITCH, dict(every=[0], min_capacity=[0], group_size=[0], d_ff=[0], shared_d_ff=[0])),
    (SWITCH, dict(capacity_factor=[0.0], eval_capacity_factor=[-1.0], buffer_factor=[0.0])),
    (SWITCH, dict(expert_capacity=[0], expert_dropout_rate=[1.5], router_init_scale=[-0.1])),
    (RouterConfig(), dict(kind=["top"], gate=["sum"], priority=["x"], exploration=["x"])),
    (RouterConfig(), dict(overflow=["x"], balance_counts=["x"], balance_scope=["x"])),
    (RouterConfig(), dict(padding=["x"], num_selected=[0], max_rounds=[0], jitter=[1.0])),
    (RouterConfig(), dict(temperature=[0.0], input_dropout_rate=[1.0], gate_scale=[0.0])),
    (RouterConfig(), dict(bias_update_rate=[-0.1])),
    (AdamW(), dict(beta1=[1.0], beta2=[-0.1], epsilon=[0.0], weight_decay=[-1.0])),
    (Adafactor(), dict(beta1=[1.0], decay_rate=[0], clipping_threshold=[0.0])),
    (Adafactor(), dict(weight_decay_rate=[-0.1], min_dim_size_to_factor=[0])),
    (Adafactor(), dict(epsilon1=[0.0], epsilon2=[-1.0])),
    (Constant(0.1), dict(value=[0.0, math.nan])),
    (InverseSquareRoot(), dict(base=[-1.0], warmup_steps=[0])),
    (LinearWarmup(1.0, 10), dict(warmup_steps=[0])),
    (WarmupCosine(1.0, 10, 20), dict(final=[2.0])),
    (LossConfig("mean"), dict(layer_reduction=["max"], balance_weight=[-0.01])),
    (LossConfig("mean"), dict(router_z_weight=[-1], z_loss=[-1e-4], label_smoothing=[1.0])),
    (StepConfig(), dict(num_microbatches=[0], clip_norm=[0.0, -1.0], ema_decay=[1.0])),
    (Distillation("teacher"), dict(soft_weight=[0, 1.5], temperature=[0.0])),
    (TextEvaluation(), dict(time_share=[0.0, 2, math.nan], batch_size=[0], num_samples=[-1])),
    (RoutingAlarms(), dict(first_lines=[0], dropped_factor=[0])),
    (make_job(), dict(inputs_length=[0], targets_length=[0], batch_size=[0], log_every=[0])),
    (make_job(), dict(eval_every=[0], checkpoint_every=[0], eval_batches=[0])),
    (make_job(), dict(max_skipped_in_a_row=[0], train_steps=[-1], seed=[-1, 2**32])),
]


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (config, name, value)
        for config, fields in OUT_OF_RANGE
        for name, values in fields.items()
        for value in values
    ],
    ids=lambda each: type(each).__name__ if dataclasses.is_dataclass(each) else str(each),
)
def test_a_value_out_of_range_is_named(config, name, value):
    unknown = " is unknown" if isinstance(value, str) else ""
    with refused(f"{type(config).__name__}.{name}={value!r}{unknown}"):
        dataclasses.replace(config, **{name: value})


def test_an_unknown_choice_is_told_the_known_ones():
    with pytest.raises(ValueError) as error:
        Precision(compute="int8")
    known = "float32, bfloat16, float16, float64"
    assert str(error.value) == f"Precision.compute='int8' is unknown; use one of {known}"


def test_values_at_the_ends_of_a_range_are_taken():
    make_job(train_steps=0, seed=2**32 - 1, eval_batches=None)
