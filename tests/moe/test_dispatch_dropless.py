# SPDX-License-Identifier: Apache-2.0
"""Dropless dispatch against a loop over choices and the einsum form's gradients."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, NamedSharding, PartitionSpec

from switchx.models.config import ModelConfig, Precision, RouterConfig, SwitchConfig
from switchx.models.params import params_of, with_params
from switchx.moe.dispatch import einsum_dispatch
from switchx.moe.dropless import sliced_dispatch
from switchx.moe.layer import SwitchFFN
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules, param_shardings
from tests.cases import slow
from tests.compare import assert_close
from tests.moe.banks import ffn_bank, ffn_numbers
from tests.moe.plans import D, E, T, fixed_plan, numbers

NUMBERS = ffn_numbers(E, D, 7)
SLICED = Rules(expert_params=(("E", ("model",)), ("D", ("fsdp",))))


def gradients(dispatch, plan, x_GTD, target_GTD):
    def loss(x_GTD, gate_GTS, bank):
        y_GTD = dispatch(x_GTD, dataclasses.replace(plan, gate_GTS=gate_GTS), bank)
        return jnp.sum(y_GTD * target_GTD)

    return jax.jit(jax.grad(loss, (0, 1, 2)))(x_GTD, plan.gate_GTS, ffn_bank(NUMBERS))


@pytest.mark.parametrize(("num_choices", "tokens"), [(1, 2), (2, T)])
def test_gradients_equal_those_of_the_einsum_form(num_choices, tokens):
    """With two tokens, their experts' matrices are gathered; with all, looped over."""
    plan, (x_GTD, _, target_GTD) = fixed_plan(num_choices), numbers()
    names = ("expert_GTS", "gate_GTS", "slot_GTS")
    plan = dataclasses.replace(plan, **{n: getattr(plan, n)[:, :tokens] for n in names})
    args = plan, jnp.asarray(x_GTD[:, :tokens]), target_GTD[:, :tokens]
    got, want = gradients(sliced_dispatch, *args), gradients(einsum_dispatch, *args)
    assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert np.any(got[1])


@pytest.mark.parametrize(
    ("kind", "platform", "kernel"),
    [("NVIDIA H200", "cuda", "mosaic_gpu_v2"), slow("TPU v5 lite", "tpu", "tpu_custom_call")],
)
@pytest.mark.parametrize(
    ("dispatcher", "spec", "schedules"),
    [
        ("dropless", MeshSpec(data=1), 2),
        slow("dropless", MeshSpec(data=2, model=2), 0),  # few rows: products make their own
        slow("ragged_all_to_all", MeshSpec(data=1, expert=2, model=2), 2),
        ("sliced", MeshSpec(data=2, model=2, rules=SLICED), 2),
    ],
)
def test_training_on_meshes_of_accelerators_runs_our_kernels(
    kind, platform, kernel, dispatcher, spec, schedules
):
    router = RouterConfig(overflow="dropless")
    switch = SwitchConfig(4, router=router, every=1, dispatcher=dispatcher, expert_capacity=1)
    config = ModelConfig(
        "decoder_only", 8, 128, 256, 2, 64, 1, activation="relu", switch=switch,
        precision=Precision(compute="bfloat16"),
    )  # fmt: skip
    layer = SwitchFFN(config, key=jax.random.key(0))
    is_token_BL = jnp.ones((4, 64), bool)

    def loss(params, x_BLD):
        y_BLD, _ = with_params(layer, params)(x_BLD, is_token_BL, is_training=True)
        return jnp.sum(y_BLD.astype(jnp.float32) ** 2)

    num_cores = 1 if platform == "tpu" else None
    mesh = spec.abstract(
        AbstractDevice(device_kind=kind, num_cores=num_cores, platform=platform)
    )
    with use_mesh(mesh, spec.rules):
        params = jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
            params_of(layer),
            param_shardings(spec.rules, mesh, params_of(layer)),
        )
        whole = NamedSharding(mesh, PartitionSpec())
        x_BLD = jax.ShapeDtypeStruct((4, 64, 128), jnp.bfloat16, sharding=whole)
        traced = jax.jit(jax.grad(loss)).trace(params, x_BLD)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    # Two forward, three or four backward: the gradient of x is not asked for; on Hopper
    # schedules beside them, one a pass.
    schedules *= platform == "cuda"
    assert len(re.findall(rf"custom_call @{kernel}", text)) - schedules in (5, 6)
    assert "ragged_dot" not in text
