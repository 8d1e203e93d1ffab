# SPDX-License-Identifier: Apache-2.0
"""Flaxformer's mixture-of-experts layer, where a checkout of it can be imported.

It is in no package index: clone google/flaxformer, put the clone on PYTHONPATH and install
`aqtp`, which it imports. `switchx bench moe` then measures it too.
"""

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp

NEEDED = ("flaxformer", "aqt")
# Its quantization library imports a message of XLA's from TensorFlow, to count what a
# compiled program does. Nothing that is run here needs it.
UNUSED_MODULE = "tensorflow.compiler.xla.service"


def is_available() -> bool:
    return all(importlib.util.find_spec(name) for name in NEEDED)


def masked_layer(num_experts: int, d_ff: int, group_size: int):
    """Its layer with masks of dispatch and combine weights, top 1, capacity factor 1.0.

    Args:
        group_size: at most so many tokens; it makes no fewer groups than there are experts.
    """
    with _unused_module():
        from flaxformer.architectures.moe import moe_layers, routing
        from flaxformer.components import dense

    router = routing.TokensChooseMaskedRouter(
        router_weights=routing.RouterWeights(use_bias=False, dtype=jnp.float32),
        jitter_noise=0.0,
        num_selected_experts=1,
        batch_prioritized_routing=False,
        dtype=jnp.float32,
        ignore_padding_tokens=False,
    )
    expert = dense.MlpBlock(
        use_bias=False,
        intermediate_dim=d_ff,
        activations=("relu",),
        intermediate_dropout_rate=0.0,
        final_dropout_rate=0.0,
        dtype=jnp.float32,
    )
    return moe_layers.MoeLayer(
        num_experts=num_experts,
        max_group_size=group_size,
        train_capacity_factor=1.0,
        eval_capacity_factor=1.0,
        expert=expert,
        router=router,
        num_expert_partitions=1,
        num_model_partitions=1,
        dropout_rate=0.0,
        dtype=jnp.float32,
    )


def training_arguments(layer, x_BLD):
    """(forward, params): `forward(params, x_BLD)` -> outputs, balance loss."""
    keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(0)), strict=True))
    params = layer.init(keys, x_BLD)["params"]

    def forward(params, x_BLD):
        y_BLD, sown = layer.apply(
            {"params": params},
            x_BLD,
            mutable=["intermediates"],
            rngs={"dropout": keys["dropout"]},
        )
        (loss_11,) = sown["intermediates"]["auxiliary_loss"]
        return y_BLD, loss_11[0, 0]

    return forward, params


@contextlib.contextmanager
def _unused_module() -> Iterator[None]:
    if importlib.util.find_spec("tensorflow"):
        yield
        return
    parts = UNUSED_MODULE.split(".")
    names = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    sys.modules.update({name: types.ModuleType(name) for name in names})
    sys.modules[UNUSED_MODULE].hlo_pb2 = types.SimpleNamespace(
        HloModuleProto=object, HloComputationProto=object, HloInstructionProto=object
    )
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
