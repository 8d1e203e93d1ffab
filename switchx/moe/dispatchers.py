# SPDX-License-Identifier: Apache-2.0
"""The dispatchers: their table, the choice of the one that runs a layer, and refusals.

Dims: G groups, T tokens of a group, S choices of a token
"""

import functools

import jax

from switchx.moe.all_to_all import all_to_all_dispatch, hierarchical_dispatch, ragged_dispatch
from switchx.moe.dispatch import Dispatcher, einsum_dispatch, gather_dispatch
from switchx.moe.dispatcher_traits import DISPATCHERS
from switchx.moe.dropless import gathered_dispatch, sliced_dispatch
from switchx.moe.routing_plan import RoutingPlan
from switchx.partitioning.collectives import RAGGED_PLATFORMS
from switchx.partitioning.constrain import current_rules, num_devices
from switchx.partitioning.mesh import platform_of
from switchx.partitioning.placement import Placement
from switchx.partitioning.rules import Rules

# Functions of the dispatchers that `moe.dispatcher_traits.DISPATCHERS` names.
FUNCTIONS = {
    "gather": gather_dispatch,
    "einsum": einsum_dispatch,
    "dropless": sliced_dispatch,
    "all_to_all": all_to_all_dispatch,
    "hierarchical": hierarchical_dispatch,
    "ragged_all_to_all": ragged_dispatch,
    "sliced": sliced_dispatch,
    "sliced_scatter": functools.partial(sliced_dispatch, split_tokens=True),
}


def choose_dispatcher(switch, plan: RoutingPlan, *, is_training: bool) -> Dispatcher:
    """The function that runs a `SwitchConfig`'s layer on one plan, on the mesh in use.

    It is the configured one, except outside of training where slots would be empty; the numbers
    stay the same. With no more choices than experts (a decode step), `gather` is replaced by
    `dropless`, which does not read the other experts' matrices; and `dropless` on a mesh that
    splits the experts sends rows (`ragged_all_to_all`), gathers tokens on GPUs
    (`gathered_dispatch`), or computes slices (`sliced`) if the devices have the same tokens.
    Switch attention runs `gather` or `einsum` as configured: its experts have no `run_rows`
    (`moe/attention.py`).

    Raises:
        ValueError: the mesh is not one that this dispatcher can run on.
    """
    name = switch.dispatcher
    mesh = jax.sharding.get_abstract_mesh()
    rules = current_rules()
    if num_devices() == 1:
        is_few = plan.expert_GTS.size <= plan.num_experts
        if name == "gather" and is_few and not is_training:
            name = "dropless"
    else:
        place = Placement.on(mesh, rules)
        if name == "dropless" and place.experts and not is_training:
            is_sent = set(place.experts) <= set(place.batch)
            name = "ragged_all_to_all" if is_sent else "sliced"
        G, T, _ = plan.expert_GTS.shape
        if reason := refusal(name, mesh, rules, num_groups=G, tokens_per_group=T):
            raise ValueError(reason)
        is_own_choice = name == "ragged_all_to_all" and name != switch.dispatcher
        if is_own_choice and platform_of(mesh) not in RAGGED_PLATFORMS:
            # Not slots (`gather`, `all_to_all`): without a capacity every expert has one for
            # every token, E times the work, and the compiler splits no quantized experts.
            # The meshes and groups are those of `ragged_all_to_all`.
            return gathered_dispatch
    if DISPATCHERS[name].is_sliced:
        return functools.partial(FUNCTIONS[name], buffer_factor=switch.buffer_factor)
    if DISPATCHERS[name].exchanges_slots:
        return functools.partial(FUNCTIONS[name], exchange_parts=switch.exchange_parts)
    return FUNCTIONS[name]


def suited_dispatcher(config, mesh, rules: Rules) -> str:
    """The dispatcher for `auto` on a mesh: `dropless` if nothing is dropped, or `gather`.

    `dropless` has no empty slots, whereas `gather` has E for each token. It needs all experts
    on every device, and its products do not support float64.

    Args:
        config: a sparse `ModelConfig`.
        mesh: a mesh, or anything with a `shape` like one's.
    """
    switch = config.switch
    drops_none = switch.router.overflow == "dropless" and not switch.has_attention
    if not drops_none or config.precision.compute == "float64":
        return "gather"
    return "gather" if refusal("dropless", mesh, rules) else "dropless"


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
        num_groups, tokens_per_group: G and T; None assumes that they fit.
    """
    if DISPATCHERS[name].is_automatic:
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
            "Rules.activations, or use dispatcher='gather'"
        )
    if name == "dropless":
        if place.experts:
            return (
                f"dispatcher='dropless' needs all experts on every device, but this mesh "
                f"splits them {axes}; use dispatcher='ragged_all_to_all', or a mesh without"
            )
    elif DISPATCHERS[name].is_sliced:
        if not place.experts or with_tokens:
            return (
                f"dispatcher={name!r} needs experts on devices that share their tokens, as "
                f"configs/meshes/pipeline_moe.gin puts them on 'model'; this mesh has none "
                f"{axes}".rstrip()
                + "; use that file with model > 1, or dispatcher='gather'"
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
            + "; use expert > 1, or dispatcher='gather'"
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
    if not DISPATCHERS[name].shares_groups:
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
    is_sharing = G is not None and DISPATCHERS[name].shares_groups
    if is_sharing and (shared := place.shared_by(G)):
        return _wrong_sharing(name, place, shared, T)
    if G is not None and G % parts:
        most = "" if T is None else f" of at most {G * T // parts}"
        return (
            f"dispatcher={name!r} keeps routing groups whole, and {G} of them do not divide "
            f"over the {parts} devices that split the batch; use a SwitchConfig.group_size"
            f"{most} (groups never follow the devices by themselves){_to_share(name, place)}, "
            "a larger batch, or dispatcher='gather'"
        )
    shared = place.size(place.summed)
    if name == "sliced_scatter" and T is not None and T % shared:
        return (
            f"dispatcher='sliced_scatter' splits a group's tokens over {shared} devices, and "
            f"{T} do not divide; use another SwitchConfig.group_size, or dispatcher='sliced'"
        )
    return None
