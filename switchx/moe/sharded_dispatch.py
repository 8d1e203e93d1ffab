# SPDX-License-Identifier: Apache-2.0
"""A dispatcher on every device of a mesh, with that device's groups and experts.

Everything is differentiated from outside of `jax.shard_map`, and each value's devices are
part of its type (`check_vma`): under `check_vma=False`, or with `jax.grad` inside, gradients
come out multiplied by the size of the mesh.
Dims: G groups, T tokens of a group, S choices of a token, D model, E experts, F ffn, R rows,
P devices that have experts
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from switchx import tree
from switchx.moe.dispatch import ExpertBank
from switchx.moe.routing_plan import RoutingPlan
from switchx.partitioning.collectives import vary
from switchx.partitioning.constrain import current_rules, num_devices, open_axes
from switchx.partitioning.placement import ONE_DEVICE, Placement
from switchx.partitioning.replicas import on_own_rows, own_key
from switchx.partitioning.rules import MeshAxes, Rules, param_dims

Local = Callable[[jax.Array, RoutingPlan, ExpertBank, Placement], jax.Array]


def run_on_devices(
    local: Local,
    x_GTD,
    plan: RoutingPlan,
    experts: ExpertBank,
    *,
    split_tokens: bool = False,
    shared: MeshAxes = (),
):
    """Runs `local(x_GTD, plan, experts, placement)` on every device and sums its outputs.

    Each device sees whole groups of tokens (or its part of one) and whole tokens, their plan,
    and its experts with all of D; what it returns is its term of these tokens' outputs. Terms
    are summed over `placement.summed` by one all-reduce, and so are, backward, the
    gradients of the activations and (small) of the gates.

    Args:
        split_tokens: activations are split along T over `placement.summed` outside, so they
            are gathered first, and the sum is a reduce-scatter.
        shared: axes along which devices share groups (`Placement.shared_by`).
    """
    if num_devices() == 1:
        return local(x_GTD, plan, experts, ONE_DEVICE)
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    placement = Placement.on(mesh, rules)
    batch, summed = placement.batch, placement.summed
    plan_tokens = token_spec(batch, shared)
    tokens = PartitionSpec(batch, summed) if split_tokens else plan_tokens
    # Counts of a group have no token dimension; all devices that share the group have them.
    groups = jax.tree.map(
        lambda leaf: plan_tokens if leaf.ndim == 3 else PartitionSpec(plan_tokens[0]), plan
    )

    def varied(values):
        return jax.tree.map(lambda leaf: vary(leaf, placement.varying), values)

    def on_device(x_GTD, plan, experts):
        # Typed first, then gathered: backward, slices are summed over replicas.
        experts = _whole_d(varied(experts), placement.gathered)
        index = jax.lax.axis_index(placement.varying)
        part = jax.lax.axis_index(placement.parts) if placement.parts else 0
        experts = experts.on_device(index, part == 0)
        plan = dataclasses.replace(plan, gate_GTS=varied(plan.gate_GTS))
        if split_tokens:
            x_GTD = jax.lax.all_gather(x_GTD, summed, axis=1, tiled=True)
            y_GTD = local(x_GTD, plan, experts, placement)
            return jax.lax.psum_scatter(y_GTD, summed, scatter_dimension=1, tiled=True)
        y_GTD = local(varied(x_GTD), plan, experts, placement)
        return jax.lax.psum(y_GTD, summed) if summed else y_GTD

    def body(*arguments):
        with on_own_rows(()):
            return on_device(*arguments)

    specs = expert_specs(rules, mesh, experts)
    sharded = jax.shard_map(
        body,
        in_specs=(tokens, groups, specs),
        out_specs=tokens,
        axis_names=open_axes(),
        check_vma=True,
    )
    experts = jax.tree.map(lambda leaf: own_key(leaf) if _is_key(leaf) else leaf, experts)
    return sharded(x_GTD, plan, experts)


def run_exchanged(
    x_PERD,
    experts: ExpertBank,
    exchange: Callable[[jax.Array], jax.Array],
    exchange_parts: int = 1,
):
    """Sends each device's rows to the experts of P devices, through them and back.

    Args:
        exchange: `[P, E, R, D]` by destination -> the same by source.
        exchange_parts: parts of the R rows, each with exchanges of its own, which a compiler
            needs to send one while another is computed. No row depends on another, so only
            the experts' gradients are summed in another order.
    """
    P, E, R, D = x_PERD.shape
    parts = min(exchange_parts, R)
    cuts = [R * part // parts for part in range(parts + 1)]

    def run(part: int):
        x = exchange(x_PERD[:, :, cuts[part] : cuts[part + 1]])
        rows = x.shape[2]
        # A part has its own random numbers, as a device does, and adds what is added once.
        bank = experts if parts == 1 else experts.on_device(part, is_first_part=True)
        # Rows of one expert lie together, those of device 0 first.
        y = bank(x.swapaxes(0, 1).reshape(E, P * rows, D))
        return exchange(y.reshape(E, P, rows, D).swapaxes(0, 1))

    return jnp.concatenate([run(part) for part in range(parts)], axis=2)


def token_spec(batch: MeshAxes, shared: MeshAxes) -> PartitionSpec:
    """The spec of `[G, T, ...]` where devices along `shared` have parts of one group each."""
    whole = tuple(axis for axis in batch if axis not in shared)
    return PartitionSpec(whole or None, shared) if shared else PartitionSpec(batch)


def expert_specs(rules: Rules, mesh, experts: ExpertBank):
    """Partitions of a bank's weights by the letters in their names; a key is whole."""
    return tree.map_named(
        lambda name, leaf: rules.spec(
            _dims(name, leaf), leaf.shape, mesh, table="expert_params"
        ),
        experts,
    )


def _dims(name: str, leaf) -> str:
    """Dimension letters of a bank's leaf; none of a PRNG key."""
    return "" if _is_key(leaf) else param_dims(name, leaf.shape)


def _is_key(leaf) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _whole_d(experts: ExpertBank, axes: MeshAxes):
    """The experts with all of D: slices gathered forward, gradients reduce-scattered."""
    if not axes:
        return experts

    def gather(name, leaf):
        dims = _dims(name, leaf)
        if "D" not in dims:
            return leaf
        return jax.lax.all_gather(leaf, axes, axis=dims.index("D"), tiled=True)

    return tree.map_named(gather, experts)
