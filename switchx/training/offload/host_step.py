# SPDX-License-Identifier: Apache-2.0
"""A training step whose experts, and what the optimizer keeps for them, are in host memory.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2. Gradients are those of `step.py`, where
`host_ring.py` takes the place of the scan over layers. The optimizer runs on one
layer of one parameter at a time: slices are copied to the device, updated, and written back,
so the device has a few slices and the host one copy of the state. The loop has no iterations
in a step that is not finite; a conditional around it would copy the arrays on GPUs.

AdamW is elementwise and Adafactor takes its means within one matrix of one expert, so a layer
alone is updated as in its stack. Dims: N layers
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from switchx import tree
from switchx.axes import dims_of
from switchx.models.layer_loop import LayerLoop, use_layer_loop
from switchx.models.stack import scan_layers
from switchx.models.stages import is_of_experts
from switchx.optim.updates import global_norm
from switchx.training.microbatches import added_gradients, into_microbatches
from switchx.training.offload.host_ring import layer_numbers, ring_scan
from switchx.training.offload.host_stack import (
    HostStack,
    add_gradients,
    host_stacks,
    is_host_stack,
    to_device,
    to_host,
    with_totals,
    zero_gradients,
)
from switchx.training.step import TrainState, gradients, seam_of, take_step


def _remat(blocks, configured: str) -> str:
    """The remat of blocks: none for the ring, which recomputes a layer by itself anyway."""
    return "none" if host_stacks(blocks) else configured


def _scan(run, x_BLD, blocks, others, inputs):
    """See `stack.scan_layers`; a stack without experts is scanned as usual."""
    stacks = host_stacks(blocks)
    if not stacks:
        return scan_layers(run, x_BLD, blocks, others, inputs)
    order_N = layer_numbers(len(stacks[0].value))
    return ring_scan(run, x_BLD, blocks, others, inputs, order_N, slots=stacks[0].slots)


LAYERS_FROM_HOST = LayerLoop(_remat, _scan)


def with_host_stacks(params: dict, slots: int) -> dict:
    """The parameters, with those of experts as `HostStack`s."""

    def stack(name, leaf):
        if not is_of_experts(name, leaf):
            return leaf
        return HostStack.of(leaf, dims_of(name.rpartition("/")[2], leaf.ndim), slots)

    return tree.map_named(stack, params)


@dataclasses.dataclass(frozen=True)
class SlicedState:
    """A training state, and its part for each parameter of the experts, `[N, ...]`.

    Attributes:
        dense: the state of all other parameters.
        experts: (parameter, its arrays in the optimizer's state) by path of the parameter.
    """

    dense: TrainState
    experts: dict[str, tuple[dict, dict]]


def split_state(optimizer, state: TrainState) -> SlicedState:
    """Takes a state apart; `join_state` is the inverse."""
    leaves = tree.named_leaves(state.params)
    kept = tree.named_leaves(state.opt_state)
    own = {name for name, leaf in leaves.items() if is_of_experts(name, leaf)}

    def part(names):
        params = tree.nested({name: leaves[name] for name in leaves if name in names})
        shapes = jax.eval_shape(optimizer.init, params)
        names = tree.named_leaves(shapes)
        return params, jax.tree.unflatten(jax.tree.structure(shapes), [kept[n] for n in names])

    params, opt_state = part(leaves.keys() - own)
    dense = dataclasses.replace(state, params=params, opt_state=opt_state)
    return SlicedState(dense, {name: part({name}) for name in leaves if name in own})


def join_state(state: TrainState, parts: SlicedState) -> TrainState:
    """The whole state, with the structure of `state` and the dense part's optimizer counts."""
    params, opt_state = {}, {}
    for one in (*parts.experts.values(), (parts.dense.params, parts.dense.opt_state)):
        params |= tree.named_leaves(one[0])
        opt_state |= tree.named_leaves(one[1])
    return dataclasses.replace(
        parts.dense,
        params=tree.map_named(lambda name, _: params[name], state.params),
        opt_state=tree.map_named(lambda name, _: opt_state[name], state.opt_state),
    )


def host_gradients(config, loss, step, params, batch: dict, **arguments):
    """See `training.step.gradients`; `params` are of `with_host_stacks`."""
    seam = seam_of(step)._replace(summed=_summed_in_place)
    with use_layer_loop(LAYERS_FROM_HOST):
        return gradients(config, loss, step, params, batch, seam=seam, **arguments)


def _summed_in_place(gradient_of, config, params, batch, key, num_microbatches):
    """See `microbatches.summed_gradients`: each microbatch's are added to the sum in place."""
    rows = into_microbatches(config, batch, num_microbatches)
    keys = jax.random.split(key, num_microbatches)

    def add(total, params, batch, key):
        grads, measured = gradient_of(with_totals(params, total), batch, key)
        return add_gradients(total, grads), measured

    return added_gradients(add, params, rows, keys, zero_gradients)


def host_train_step(config, loss, step, optimizer, slots: int, state: TrainState, batch: dict):
    """See `training.step.train_step`; the experts of `state` are in host memory.

    Args:
        slots: layers whose experts are on the device at once.
    """
    is_half = config.precision.compute == "float16"
    grads, value, sums, stats = host_gradients(
        config,
        loss,
        step,
        with_host_stacks(state.params, slots),
        batch,
        key=state.key,
        loss_scale=state.loss_scale if is_half else 1.0,
    )
    parts = split_state(optimizer, state)
    all_grads = tree_of_stacks(grads)
    dense = tree.nested({n: g for n, g in all_grads.items() if n not in parts.experts})
    squares = sum(all_grads[name].squares for name in parts.experts)
    raw_norm = jnp.sqrt(jnp.square(global_norm(dense)) + squares)
    updated, metrics, scale = take_step(
        config, step, optimizer, parts.dense, dense, raw_norm, value, sums, stats
    )
    experts = {
        name: sliced_update(
            optimizer,
            *own,
            tree.nested({name: all_grads[name].value}),
            gradient_scale=scale,
            is_finite=metrics.is_skipped == 0,
        )
        for name, own in parts.experts.items()
    }
    return join_state(state, SlicedState(updated, experts)), metrics


def tree_of_stacks(grads: dict) -> dict:
    """Gradients by path, with a `HostStack` as one leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(grads, is_leaf=is_host_stack)
    return {tree.path_name(path): leaf for path, leaf in leaves}


def sliced_update(optimizer, params, opt_state, grads, *, gradient_scale, is_finite):
    """The parameters and the optimizer's state after one update, a layer at a time.

    Args:
        params, opt_state, grads: parameters, optimizer state and gradients of one stack of
            layers, arrays `[N, ...]`, in host memory or not; the optimizer's scalars are
            returned as they are.
        gradient_scale: factor of the gradients.
        is_finite: whether the step is good; if false, nothing changes.
    """
    leaves, structure = jax.tree.flatten((params, opt_state))
    is_array = [leaf.ndim > 0 for leaf in leaves]
    (num_layers,) = {leaf.shape[0] for leaf in leaves if leaf.ndim}
    order_N = layer_numbers(num_layers)

    def fetch(leaves, n):
        return [
            to_device(leaf, n)[None] if is_one else leaf
            for leaf, is_one in zip(leaves, is_array, strict=True)
        ]

    # Reading the next layer before this one is written would use both ways of the link, but
    # Switch-Large, compiled so for TPUs, took a quarter more host memory (smaller models not).
    def turn(i, leaves):
        n = order_N[i]
        own, kept = jax.tree.unflatten(structure, fetch(leaves, n))
        grad = jax.tree.map(lambda leaf: to_device(leaf, n)[None], grads)
        updates, kept = optimizer.update(grad, kept, own, gradient_scale=gradient_scale)
        new = jax.tree.leaves((optax.apply_updates(own, updates), kept))
        return [
            to_host(leaf, one[0], n) if is_one else leaf
            for leaf, one, is_one in zip(leaves, new, is_array, strict=True)
        ]

    turns = jnp.where(is_finite, num_layers, 0)
    return jax.tree.unflatten(structure, jax.lax.fori_loop(0, turns, turn, leaves))
