# SPDX-License-Identifier: Apache-2.0
"""Which dispatcher runs a layer: the configured one, on the meshes that it can run on.

Dims: G T S E
"""

import functools

import jax

from switchx.moe.all_to_all import all_to_all_dispatch, hierarchical_dispatch, ragged_dispatch
from switchx.moe.dispatch import Dispatcher, einsum_dispatch, sort_dispatch
from switchx.moe.dropless import dropless_dispatch
from switchx.moe.plan import RoutingPlan
from switchx.moe.shared_groups import SHARING
from switchx.moe.tensor_parallel import sliced_dispatch, sliced_scatter_dispatch
from switchx.partitioning.constrain import current_rules, num_devices
from switchx.partitioning.placement import Placement
from switchx.partitioning.rules import Rules

DISPATCHERS = {
    "sort": sort_dispatch,
    "einsum": einsum_dispatch,
    "dropless": dropless_dispatch,
    "all_to_all": all_to_all_dispatch,
    "hierarchical": hierarchical_dispatch,
    "ragged_all_to_all": ragged_dispatch,
    "sliced": sliced_dispatch,
    "sliced_scatter": sliced_scatter_dispatch,
}
# The compiler decides what these communicate; the others say it themselves.
LEFT_TO_THE_COMPILER = ("sort", "einsum")
# In training, these give every expert a block of as many rows; the others what it has.
EQUAL_BLOCKS = ("sort", "einsum", "all_to_all", "hierarchical")


def choose_dispatcher(switch, plan: RoutingPlan, *, is_training: bool) -> Dispatcher:
    """The function that runs a `SwitchConfig`'s layer on one plan.

    `sort` computes every slot of every expert, and each expert has some. With no more
    choices than experts (a step of decoding) most slots are empty, so those go through
    `dropless`, which gives the same numbers: other experts' matrices are not even read.

    Raises:
        ValueError: the mesh is not one that this dispatcher can run on.
    """
    name = switch.dispatcher
    is_few = plan.expert_GTS.size <= plan.num_experts
    if num_devices() > 1:
        mesh, (G, T, _) = jax.sharding.get_abstract_mesh(), plan.expert_GTS.shape
        reason = refusal(name, mesh, current_rules(), num_groups=G, tokens_per_group=T)
        if reason:
            raise ValueError(reason)
    elif name == "sort" and is_few and not is_training:
        return dropless_dispatch
    if name.startswith("sliced"):
        return functools.partial(DISPATCHERS[name], buffer_factor=switch.buffer_factor)
    return DISPATCHERS[name]


def refusal(
    name: str,
    mesh,
    rules: Rules,
    *,
    num_groups: int | None = None,
    tokens_per_group: int | None = None,
) -> str | None:
    """Why a dispatcher cannot run on a mesh of several devices, and the ways out; or None.

    Args:
        mesh: a mesh, or an `AbstractMesh` of the same axes.
        num_groups, tokens_per_group: G and T; None where they are to be thought to fit.
    """
    if name in LEFT_TO_THE_COMPILER:
        return None
    place = Placement.on(mesh, rules)
    return _wrong_axes(name, mesh, place) or _wrong_sizes(
        name, place, num_groups, tokens_per_group
    )


def _wrong_axes(name: str, mesh, place: Placement) -> str | None:
    axes = f"(rules put them on {'*'.join(place.experts)!r})" if place.experts else ""
    with_tokens = [axis for axis in place.experts if axis in place.batch]
    if set(place.gathered) - set(place.batch):
        return (
            f"dispatcher={name!r} gathers slices of D over devices with different tokens, but "
            f"{'*'.join(place.gathered)!r} does not split the batch; put G on it in "
            "Rules.activations, or use dispatcher='sort'"
        )
    if name == "dropless":
        if place.experts:
            return (
                f"dispatcher='dropless' needs all experts on every device, but this mesh "
                f"splits them {axes}; use dispatcher='ragged_all_to_all', or a mesh without"
            )
    elif name.startswith("sliced"):
        if not place.experts or with_tokens:
            return (
                f"dispatcher={name!r} needs experts on devices that share their tokens, as "
                f"configs/meshes/pipeline_moe.gin puts them on 'model'; this mesh has none "
                f"{axes}".rstrip()
                + "; use that file with model > 1, or dispatcher='sort'"
            )
        if place.parts:
            return (
                f"dispatcher={name!r} needs whole experts, but Rules.expert_params splits F "
                f"over {'*'.join(place.parts)!r}; leave F out of it"
            )
    elif len(with_tokens) < max(1, len(place.experts)):
        return (
            f"dispatcher={name!r} needs experts on devices that have different tokens, and "
            f"this mesh has none {axes}".rstrip()
            + "; use expert > 1, or dispatcher='sort'"
        )
    elif name == "hierarchical" and len(place.experts) != 2:
        sizes = " x ".join(f"{axis}={mesh.shape.get(axis, 1)}" for axis in ("node", "expert"))
        return (
            f"dispatcher='hierarchical' needs an expert axis in two, node > 1 and expert > 1, "
            f"but this mesh has {sizes}; use dispatcher='all_to_all', or split it"
        )
    return None


def _to_share(name: str, place: Placement) -> str:
    """The numbers of groups that the devices of a mesh could share, as a way out."""
    if name not in SHARING:
        return ""
    counts = [
        place.size(place.batch[:i])
        for i in range(len(place.batch))
        if place.experts[-len(place.batch[i:]) :] == place.batch[i:]
    ]
    return f", one that makes {' or '.join(map(str, counts))} of them" if counts else ""


def _wrong_sharing(name: str, place: Placement, shared, T: int | None) -> str | None:
    axes, devices = "*".join(shared), place.size(shared)
    if place.experts[-len(shared) :] != shared:
        return (
            f"dispatcher={name!r} has groups that the devices along {axes!r} share, so these "
            f"have to be the last axes of the experts, which are on "
            f"{'*'.join(place.experts)!r}; put E on {axes!r} in Rules.expert_params, or use a "
            "SwitchConfig.group_size with a group or more to each device"
        )
    if T is not None and T % devices:
        return (
            f"dispatcher={name!r} has groups of {T} tokens that {devices} devices share (mesh "
            f"axes {axes!r}), and they do not divide; use another SwitchConfig.group_size"
        )
    return None


def _wrong_sizes(name: str, place: Placement, G: int | None, T: int | None) -> str | None:
    parts = place.size(place.batch)
    if G is not None and name in SHARING and (shared := place.shared_by(G)):
        return _wrong_sharing(name, place, shared, T)
    if G is not None and G % parts:
        most = "" if T is None else f" of at most {G * T // parts}"
        return (
            f"dispatcher={name!r} keeps routing groups whole, and {G} of them do not divide "
            f"over the {parts} devices that split the batch; use a SwitchConfig.group_size"
            f"{most} (groups never follow the devices by themselves){_to_share(name, place)}, "
            "a larger batch, or dispatcher='sort'"
        )
    shared = place.size(place.summed)
    if name == "sliced_scatter" and T is not None and T % shared:
        return (
            f"dispatcher='sliced_scatter' splits a group's tokens over {shared} devices, and "
            f"{T} do not divide; use another SwitchConfig.group_size, or dispatcher='sliced'"
        )
    return None
