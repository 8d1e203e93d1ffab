# SPDX-License-Identifier: Apache-2.0
"""Models as pure functions of a plain dictionary of parameters.

A model is built once, abstractly, and split into its structure and its parameters; after
that the parameters are a nested dictionary that `jax.jit`, `jax.grad`, Optax and Orbax see,
and `bind` puts them back under the module for a call.
"""

import dataclasses
import functools

import jax
from flax import nnx

from switchx import tree
from switchx.axes import dims_of
from switchx.fields import require
from switchx.models.config import ModelConfig
from switchx.models.transformer import Transformer


def _build(config: ModelConfig, key) -> nnx.Module:
    return Transformer(config, key=key) if config.build is None else config.build(key)


@functools.lru_cache(maxsize=32)
def _abstract(config: ModelConfig):
    """The model's graph definition and its state of shape structs; allocates nothing."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: _build(config, jax.random.key(0))))
    # Traced under a mesh, the structs would carry its sharding into every later call.
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    return graphdef, state


def abstract_params(config: ModelConfig) -> dict:
    """The parameters' names and shapes, as nested dictionaries of `ShapeDtypeStruct`."""
    return nnx.to_pure_dict(_abstract(config)[1])


def init_params(config: ModelConfig, key) -> dict:
    """Freshly drawn parameters. Under jit with out_shardings, each device draws its part."""
    return nnx.to_pure_dict(nnx.split(_build(config, key))[1])


def params_of(module: nnx.Module) -> dict:
    """Names and values (or shape structs) of a module's parameters, as nested dictionaries."""
    return nnx.to_pure_dict(nnx.state(module))


def with_params(module: nnx.Module, params: dict) -> nnx.Module:
    """A copy of the module that computes with `params`, also while they are traced."""
    graphdef, state = nnx.split(module)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def bind(config: ModelConfig, params: dict) -> nnx.Module:
    """The model with these parameters, for calls inside of JAX's own transforms."""
    graphdef, abstract = _abstract(config)
    state = jax.tree.map(lambda leaf: leaf, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def forward(config: ModelConfig, params: dict, batch: dict, *, is_training: bool, key=None):
    """Logits `[B, L, V]` (float32 by default) and RoutingStats stacked over Switch layers.

    Args:
        batch: T5X's feature names, as `data/features.py` makes them.
        is_training: chooses the training capacity and turns jitter on.
        key: turns dropout and jitter on; None is deterministic.
    """
    return bind(config, params)(batch, is_training=is_training, key=key)


def of_task(config: ModelConfig, params: dict, source: dict, task: str):
    """The model for the rows of one task: its experts, and their columns of the routers.

    Args:
        config: configuration with a router by task (`moe/router.task_logits`).
        params: the parameters, arrays.
        source: description of the model's training, as in `config.json`.
        task: name of the task in `source`.

    Returns:
        The configuration, the parameters, and the description of the task in `source`.

    Raises:
        ValueError: the experts are not divided among tasks, or there is no such task.
    """
    is_by_task = config.switch is not None and config.switch.router.kind == "task"
    names = [each["name"] for each in source["tasks"]] if is_by_task else []
    require(
        task in names,
        f"task={task!r} of a model whose experts are "
        + (
            f"divided among the tasks {', '.join(names)}; name one of these"
            if names
            else "not divided among tasks; leave it out"
        ),
    )
    own = config.switch.num_candidates
    begin = names.index(task) * own

    def cut(name, leaf):
        dims = dims_of(name.rpartition("/")[2], leaf.ndim)
        if "E" not in dims:
            return leaf
        return jax.lax.slice_in_dim(leaf, begin, begin + own, axis=dims.index("E"))

    router = dataclasses.replace(config.switch.router, kind="top_k", num_tasks=1)
    switch = dataclasses.replace(config.switch, num_experts=own, router=router)
    config = dataclasses.replace(config, switch=switch)
    described = source["tasks"]
    return config, tree.map_named(cut, params), described[names.index(task)]
