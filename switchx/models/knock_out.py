# SPDX-License-Identifier: Apache-2.0
"""A model without one expert: its router never chooses it, and tokens go to the others.

The logit of the expert is `NEVER` before the softmax, so the other experts' gates are the same
as if the expert had been dropped (`drop_experts` of `models/reshape.py`). The mask is a
parameter, the bias of the router's logits: all experts share one compiled program.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import jax.numpy as jnp

from switchx.fields import require
from switchx.models.config import ModelConfig, require_our_blocks
from switchx.moe.router import NEVER


def with_logit_biases(config: ModelConfig, params: dict) -> tuple[ModelConfig, dict]:
    """The same model, whose routers have biases that `without_expert` changes; new ones are 0.

    Raises:
        ValueError: no token could choose another expert, because there is no router or only
            one expert; or the module is a user's own.
    """
    require_our_blocks(config, "removing an expert")
    switch = config.switch
    require(
        switch is not None and switch.router.has_weights and switch.num_candidates > 1,
        "experts cannot be removed one by one where tokens have no others to choose (a dense "
        "model, a hash router, one expert); leave the knock-outs out: --knockouts=0",
    )
    router = dataclasses.replace(switch.router, has_logit_bias=True)
    config = dataclasses.replace(config, switch=dataclasses.replace(switch, router=router))
    return config, _with_biases(params)


def _with_biases(params: dict) -> dict:
    changed = {
        name: _with_biases(value) if isinstance(value, dict) else value
        for name, value in params.items()
    }
    if "w_router_DE" in changed and "b_router_E" not in changed:
        weight = changed["w_router_DE"]
        shape = (*weight.shape[:-2], weight.shape[-1])
        changed["b_router_E"] = jnp.zeros(shape, weight.dtype)
    return changed


def without_expert(config: ModelConfig, params: dict, layer: str, expert: int) -> dict:
    """The parameters with one expert of one Switch layer masked; the others are shared.

    Args:
        config, params: the model of `with_logit_biases`, layers scanned or not.
        layer: name of the layer, one of `config.sparse_layer_names`.
    """
    stack, number, *part = layer.split()
    block, repeat = int(number), ()
    if config.scan_layers:
        block, repeat = block % config.period, (block // config.period,)
    sublayer = "self_attention" if part == ["attention"] else "ffn"
    return _masked(params, (stack, "blocks", f"layer_{block}", sublayer), (*repeat, expert))


def _masked(params: dict, path: tuple[str, ...], place: tuple[int, ...]) -> dict:
    if path:
        return params | {path[0]: _masked(params[path[0]], path[1:], place)}
    # A bias that balances loads is added to probabilities: it alone may choose an expert.
    names = [name for name in ("b_router_E", "router_bias_E") if name in params]
    return params | {name: jnp.asarray(params[name]).at[place].set(NEVER) for name in names}


def without_each(model, experts: Iterable[tuple[str, int]]) -> Iterator:
    """Yields a model, first whole, then without each of `experts` alone.

    All of them run the programs of the first.

    Args:
        model: dataclass with a `config` and its `params`, such as `switchx.Model`.
        experts: Switch layer and number of each expert.

    Raises:
        ValueError: as in `with_logit_biases`.
    """
    config, params = with_logit_biases(model.config, model.params)
    yield dataclasses.replace(model, config=config, params=params)
    for layer, expert in experts:
        masked = without_expert(config, params, layer, expert)
        yield dataclasses.replace(model, config=config, params=masked)
