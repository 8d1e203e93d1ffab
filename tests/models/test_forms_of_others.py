# SPDX-License-Identifier: Apache-2.0
"""What models of others need: biases of each layer, two tables, biased routers, sinusoids.

`tests/interop` compares them with transformers; here is what that cannot show: that they are
the same on meshes, and which combinations are refused.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.layers.positions import sinusoids
from switchx.models.config import ModelConfig, RotaryConfig, RouterConfig, SwitchConfig
from switchx.models.flops import count_parameters
from switchx.models.params import abstract_params, forward
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import param_sharding
from tests.cases import slow_unless
from tests.data.refusals import refused
from tests.training.jobs import MODERN, make_batch, make_params

ROUTER = RouterConfig(has_logit_bias=True, overflow="dropless")
FORMS = {
    "umt5": ModelConfig(
        "encoder_decoder", 32, 16, 24, 4, 4, 2, 2,
        relative_bias_per_layer=True, separate_embeddings=True, activation="geglu_exact",
        switch=SwitchConfig(4, every=2, router=ROUTER),
    ),
    "nllb": ModelConfig(
        "encoder_decoder", 32, 16, 24, 4, 4, 2, 2,
        positions="sinusoidal", norm="layer", norm_epsilon=1e-3, use_bias=True,
        scale_attention=True, activation="gelu_exact",
        switch=SwitchConfig(4, every=2, expert_bias=True, router=dataclasses.replace(
            ROUTER, num_selected=2, gate="normalized"
        )),
    ),
    "modern": MODERN,
    "one head": dataclasses.replace(
        MODERN, num_kv_heads=1, qk_norm="all", norm_place="after", attention_bias="all"
    ),
    "experts that attend": ModelConfig(
        "decoder_only", 32, 16, 24, 2, 4, 1, activation="relu",
        switch=SwitchConfig(
            2, every=1, sublayers="both", attention_experts="ffn", dispatcher="gather",
            router=RouterConfig(exploration="none"),
        ),
    ),
}  # fmt: skip


def test_sinusoids_are_those_of_the_formula():
    position_BL = jnp.array([[0, 1, 2, 40]])
    for D in (6, 7):
        got_BLD = np.asarray(sinusoids(position_BL, D))
        for i, position in enumerate((0, 1, 2, 40)):
            angles = [(position + 2) * 10000 ** (-f / 2) for f in range(3)]
            want = [*map(np.sin, angles), *map(np.cos, angles), *([0.0] * (D - 6))]
            np.testing.assert_allclose(got_BLD[0, i], want, atol=1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_parameters_are_counted_as_they_are_built(name):
    config = FORMS[name]
    assert count_parameters(config).total == tree.num_elements(abstract_params(config))


# Two heads of keys are split in two, and whole in four; one is whole.
MESHES = {
    "umt5": ("umt5", MeshSpec(model=2, expert=2), 8, 2e-5),
    "nllb": ("nllb", MeshSpec(model=2, expert=2), 8, 2e-5),
    # The norms of keys add heads of several devices up; a Xeon's rounding is 6e-6 of them.
    "modern, model": ("modern", MeshSpec(data=1, model=2), 2, 1e-5),
    "modern, model 4": ("modern", MeshSpec(data=1, model=4), 4, 1e-5),
    "modern, expert": ("modern", MeshSpec(data=1, expert=2), 2, 5e-6),
    "modern, fsdp": ("modern", MeshSpec(data=1, fsdp=2), 2, 5e-6),
    "one head, model": ("one head", MeshSpec(data=1, model=2), 2, 5e-6),
    "experts that attend": ("experts that attend", MeshSpec(data=1, model=2), 2, 5e-6),
}


@pytest.mark.parametrize(
    "case", [slow_unless(case == "one head, model", case) for case in MESHES]
)
def test_raw_gradients_on_a_mesh_are_those_of_one_device(case):
    """To 2e-6 of the largest number of all, and to `bound` of the largest of each array."""
    name, spec, devices, bound = MESHES[case]
    config = FORMS[name]
    batch, params = make_batch(config, 4), make_params(config)

    def gradient(params, batch):
        def loss(params):
            logits_BLV, _ = forward(config, params, batch, is_training=False)
            return jnp.mean(jnp.sin(logits_BLV))

        return jax.grad(loss)(params)

    want = tree.named_leaves(jax.jit(gradient)(params, batch))
    mesh = spec.build(jax.devices()[:devices])
    placed = tree.map_named(
        lambda name, leaf: jax.device_put(leaf, param_sharding(spec.rules, mesh, name, leaf)),
        params,
    )
    with use_mesh(mesh, spec.rules):
        got = tree.named_leaves(jax.jit(gradient)(placed, batch))
    assert got.keys() == want.keys()
    of_all = 2e-6 * max(np.max(np.abs(value)) for value in want.values())
    for leaf, value in want.items():
        largest = np.max(np.abs(value))
        assert largest > 0, leaf
        difference = np.max(np.abs(np.asarray(got[leaf]) - np.asarray(value)))
        assert difference <= min(of_all, bound * max(largest, 1e-3)), leaf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"relative_bias_per_layer": True, "scan_layers": True},
            "relative_bias_per_layer=True with positions='relative' and scan_layers=True",
        ),
        (
            {"relative_bias_per_layer": True, "positions": "sinusoidal"},
            "relative_bias_per_layer=True with positions='sinusoidal' and ",
        ),
        ({"positions": "sinusoidal", "d_model": 2}, "positions='sinusoidal' with "),
        (
            {
                "separate_embeddings": True,
                "architecture": "decoder_only",
                "num_encoder_layers": 0,
            },
            "separate_embeddings=True in a decoder_only model, which has one stack",
        ),
        ({"num_kv_heads": 3}, "num_kv_heads=3 with num_heads=4; use a divisor"),
        ({"attention_bias": "q"}, "attention_bias='q'; use none, qkv, all or None"),
        (
            {"positions": "rotary", "rotary": RotaryConfig(fraction=0.3)},
            "RotaryConfig.fraction=0.3 of d_head=4 is 1 features",
        ),
        ({"rotary": RotaryConfig(theta=5e5)}, "with positions='relative', which reads no"),
        (
            {"qk_norm": "head", "switch": SwitchConfig(2, every=1, sublayers="both")},
            "qk_norm='head' with SwitchConfig.sublayers='both'",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with refused(message):
        ModelConfig(**dict(
            architecture="encoder_decoder", vocab_size=32, d_model=16, d_ff=24, num_heads=4,
            d_head=4, num_encoder_layers=2, num_decoder_layers=2,
        ) | changes)  # fmt: skip
