# SPDX-License-Identifier: Apache-2.0
"""Sparse layers of others as peers of ours: Flaxformer's and MaxText's own code, not a copy.

Each runs as its project provides it, from a clone that is on the path: `forward(params, x_BLD)`
-> outputs, balance loss. A layer here is top 1, without biases, in one dtype.
Dims: B rows of a batch, L tokens of a row, D model, F feed-forward, E experts
"""

import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

# What each needs to be imported: the project, and a library that we do not require.
NEEDED = {"flaxformer": ("flaxformer", "aqt"), "maxtext": ("maxtext", "aqt", "tokamax")}
# Flaxformer's quantization library imports a message of XLA's from TensorFlow, to count what a
# compiled program does. Nothing that is run here needs it.
UNUSED_MODULE = "tensorflow.compiler.xla.service"


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """One sparse layer.

    Attributes:
        num_experts, d_model, d_ff: E, D, F.
        batch, length: B and L.
        is_gated: whether it is a gated linear unit with GELU (GEGLU); else one matrix and a
            ReLU.
        capacity_factor: slots over tokens; None where no token is dropped and no slot is empty.
        dtype: dtype of parameters and products; the router computes in float32.
    """

    num_experts: int
    d_model: int
    d_ff: int
    batch: int
    length: int
    is_gated: bool = False
    capacity_factor: float | None = 1.0
    dtype: str = "float32"


def has_peer(name: str) -> bool:
    """Whether a clone of the project and what it imports is on the path.

    Neither is in a package index: clone google/flaxformer and `pip install aqtp`, or
    AI-Hypercomputer/maxtext, whose folder `src` has to be on the path.
    """
    return not missing_of(name)


def missing_of(name: str, folders: Sequence[str] = ()) -> list[str]:
    """What a peer needs that is neither on the path nor in one of the folders."""
    find_here = importlib.util.find_spec
    find_in = importlib.machinery.PathFinder.find_spec
    return [each for each in NEEDED[name] if not (find_here(each) or find_in(each, folders))]


def folder_on_path(folder: str) -> str:
    """The folder of a clone that has to be on the path.

    Raises:
        ValueError: the folder is no clone of a known project.
    """
    root = pathlib.Path(folder)
    for place in (root, root / "src"):
        if any((place / name / "__init__.py").is_file() for name in NEEDED):
            return str(place.absolute())
    raise ValueError(
        f"--peer={folder}: expected a clone of google/flaxformer or AI-Hypercomputer/maxtext "
        f"(a folder with one of {', '.join(NEEDED)} in it, or in its src), found none"
    )


def flaxformer_layer(shape: LayerShape, group_size: int):
    """Flaxformer's layer with dispatch and combine masks.

    Args:
        group_size: most tokens of a group; there are at least as many groups as experts.
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
        intermediate_dim=shape.d_ff,
        activations=("gelu", "linear") if shape.is_gated else ("relu",),
        intermediate_dropout_rate=0.0,
        final_dropout_rate=0.0,
        dtype=shape.dtype,
    )
    return moe_layers.MoeLayer(
        num_experts=shape.num_experts,
        max_group_size=group_size,
        train_capacity_factor=shape.capacity_factor,
        eval_capacity_factor=shape.capacity_factor,
        expert=expert,
        router=router,
        num_expert_partitions=1,
        num_model_partitions=1,
        dropout_rate=0.0,
        dtype=shape.dtype,
    )


def flaxformer_forward(layer, x_BLD) -> tuple[Callable, Any]:
    """(forward, params) of a layer; shapes of both where `x_BLD` is a shape."""
    keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(0)), strict=True))
    is_known = isinstance(x_BLD, jax.Array)
    make = layer.init if is_known else functools.partial(jax.eval_shape, layer.init)
    params = make(keys, x_BLD)["params"]

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


def maxtext_forward(shape: LayerShape, device) -> tuple[Callable, Any]:
    """(forward, shapes of params) of MaxText's `RoutedMoE`, for one described device.

    With a capacity factor it uses dense products with masks, without one its default: rows
    sorted by expert, and the megablox kernel.

    Raises:
        ValueError: the layer has no gate: MaxText's always has two matrices of the first
            product.
    """
    if not shape.is_gated:
        raise ValueError("MaxText's layer is a gated linear unit; use is_gated=True")
    import maxtext
    from maxtext.configs import pyconfig
    from maxtext.layers import moe
    from maxtext.layers.initializers import nd_dense_init

    is_dropless = shape.capacity_factor is None
    folder = pathlib.Path(next(iter(maxtext.__path__)))
    sizes = {
        "base_emb_dim": shape.d_model,
        "base_mlp_dim": shape.d_ff,
        "base_moe_mlp_dim": shape.d_ff,
        "num_experts": shape.num_experts,
        "per_device_batch_size": shape.batch,
        "max_target_length": shape.length,
        "dtype": shape.dtype,
        "weight_dtype": shape.dtype,
        "sparse_matmul": is_dropless,
        "capacity_factor": -1.0 if is_dropless else shape.capacity_factor,
    }
    fixed = {
        "run_name": "layer",
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "log_config": False,
        "enable_checkpointing": False,
        "dataset_type": "synthetic",
        "base_num_decoder_layers": 1,
        "num_experts_per_tok": 1,
        "decoder_block": "mixtral",
        "mlp_activations": "['gelu','linear']",
        "float32_gate_logits": True,
        "load_balance_loss_weight": 0.01,
    }
    words = [f"{name}={value}" for name, value in (sizes | fixed).items()]
    # MaxText prints what it was given.
    with contextlib.redirect_stdout(sys.stderr):
        config = pyconfig.initialize(["", str(folder / "configs" / "base.yml"), *words])
    axes = config.mesh_axes
    mesh = jax.sharding.Mesh(np.array([device]).reshape([1] * len(axes)), axes)

    def make():
        return moe.RoutedMoE(
            config=config,
            num_experts=shape.num_experts,
            num_experts_per_tok=1,
            mesh=mesh,
            kernel_init=nd_dense_init(1.0, "fan_in", "truncated_normal"),
            kernel_axes=("embed", None),
            rngs=nnx.Rngs(params=0),
            intermediate_dim=shape.d_ff,
            dtype=jnp.dtype(shape.dtype),
            weight_dtype=jnp.dtype(shape.dtype),
        )

    graph, params = nnx.split(nnx.eval_shape(make))

    def forward(params, x_BLD):
        y_BLD, balance_loss, _ = nnx.merge(graph, params)(x_BLD)
        return y_BLD, balance_loss

    return forward, params


@contextlib.contextmanager
def _unused_module() -> Iterator[None]:
    """Puts an empty module in place of TensorFlow's if that is not installed."""
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
