# SPDX-License-Identifier: Apache-2.0
"""The training loss on devices that gather their parameters by buckets.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 2.3. Every device computes the terms of
its own rows, inside of `jax.shard_map`; the loss is their sum, and is differentiated outside.

Dims: B batch, L length, D model
"""

import math

import jax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from switchx import tree
from switchx.models.config import ModelConfig, require_our_blocks
from switchx.moe.capacity import layer_groups
from switchx.partitioning.buckets import Slicing, sliced, whole
from switchx.partitioning.constrain import current_rules, open_axes
from switchx.partitioning.replicas import on_own_rows, own_key
from switchx.partitioning.rules import Rules, param_spec
from switchx.training.losses import LossConfig, LossDenominators, batch_loss


def fused_batch_loss(
    config: ModelConfig,
    loss: LossConfig,
    params,
    batch,
    *,
    denominators: LossDenominators,
    key,
    bucket_bytes: int,
):
    """`training.losses.batch_loss`, in the scope of a mesh that `check_fused` has accepted.

    Its value and raw gradients are the same, except for random numbers (dropout, the routers'
    noise) if replicas run microbatches: a replica's number is in the key (`own_key`).
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    slicing = Slicing.on(mesh, rules, bucket_bytes)

    def local(params, batch, denominators, key):
        with on_own_rows(slicing.varying), sliced(slicing):
            params = _whole_outside_blocks(params)
            terms = batch_loss(config, loss, params, batch, denominators=denominators, key=key)
        vector, unravel = ravel_pytree(terms)  # all in one all-reduce
        return unravel(jax.lax.psum(vector, slicing.varying))

    specs = tree.map_named(lambda name, leaf: param_spec(rules, mesh, name, leaf.shape), params)
    rows = PartitionSpec(rules.axes("B", mesh, table="activations"))
    whole_spec = PartitionSpec()
    return jax.shard_map(
        local,
        in_specs=(specs, jax.tree.map(lambda _: rows, batch), whole_spec, whole_spec),
        out_specs=whole_spec,
        axis_names=open_axes(),
    )(params, batch, denominators, own_key(key))


def _whole_outside_blocks(params):
    """Gathers embedding, norms and positional biases; every block gathers its own."""
    leaves = tree.named_leaves(params)
    outside = whole({name: leaf for name, leaf in leaves.items() if "/blocks/" not in name})
    return tree.map_named(lambda name, leaf: outside.get(name, leaf), params)


def check_fused(
    config: ModelConfig,
    mesh,
    rules: Rules,
    *,
    bucket_bytes: int,
    rows: int,
    lengths: tuple[int, ...],
) -> None:
    """Refuses what cannot be computed in this way, before anything is.

    Args:
        rows: rows of a microbatch, over all devices.
        lengths: tokens of a row in each stack.

    Raises:
        ValueError: says why, and the ways out.
    """
    asked = f"StepConfig.bucket_bytes={bucket_bytes}"
    require_our_blocks(config, asked)
    slicing = Slicing.on(mesh, rules, bucket_bytes)
    if not slicing.axes:
        raise ValueError(
            f"{asked} on a mesh where no axis slices D: nothing is gathered; use "
            "MeshSpec.fsdp above 1, or bucket_bytes=None"
        )
    others = [
        axis
        for axis, size in mesh.shape.items()
        if size > 1 and (axis not in slicing.varying or axis in ("node", "expert"))
    ]
    if others:
        raise ValueError(
            f"{asked} with mesh axis {others[0]!r} of size {mesh.shape[others[0]]}: buckets "
            "are gathered by devices that compute whole layers on their own tokens; use data "
            "and fsdp alone, or bucket_bytes=None"
        )
    if rules.axes("D", mesh, table="expert_params") != slicing.axes or any(
        rules.axes(letter, mesh, table=table)
        for table in ("params", "expert_params")
        for letter, _ in getattr(rules, table)
        if letter != "D"
    ):
        raise ValueError(
            f"{asked} with rules that slice other dimensions than D over data or fsdp; use "
            "the default Rules, or bucket_bytes=None"
        )
    if slices := rules.slice_axes(mesh):
        raise ValueError(
            f"{asked} with Rules.optimizer_slices={slices!r}: buckets reduce gradients for "
            "replicas that have the whole of each slice of D; use optimizer_slices=(), or "
            "bucket_bytes=None"
        )
    if config.remat == "none":
        raise ValueError(
            f"{asked} with ModelConfig.remat='none': all gathered parameters would be kept "
            "for the backward pass; use remat='minimal' or 'full', which gather them again"
        )
    if config.switch is None:
        return
    if config.switch.router.counts_first:
        raise ValueError(
            f"{asked} with RouterConfig.balance_scope='batch': every device would need the "
            "load of all; use balance_load='previous_step', balance_scope='group', or "
            "bucket_bytes=None"
        )
    parts = math.prod(mesh.shape[axis] for axis in slicing.varying)
    for length in lengths:
        _, T = layer_groups(config.switch, rows, length)
        if rows * length % (parts * T) or layer_groups(
            config.switch, rows // parts, length
        ) != (rows * length // parts // T, T):
            fitting = rows * length // parts
            raise ValueError(
                f"{asked} with routing groups of {T} tokens: each of {parts} devices has "
                f"{fitting} tokens, and groups have to stay whole; use "
                f"SwitchConfig.group_size={fitting} or a divisor of it, or bucket_bytes=None"
            )
