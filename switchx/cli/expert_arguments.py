# SPDX-License-Identifier: Apache-2.0
"""Arguments of commands that load a model, whose experts may move to the device on demand."""

import argparse
from typing import Any

from switchx.cli import arguments as shared
from switchx.cli import devices

FLAGS = {
    "--expert_slots=K": "experts of each Switch layer that are on the device at once, the most "
    "recently chosen; all are in host memory, and results stay the same; default: all",
    "--ring_slots=K": "layers of each stack whose experts are on the device at once; all "
    "others stream through two of these slots in each step. With --expert_slots, a formula "
    "decides for each call: prompts with many tokens stream, steps move the chosen experts",
    "--host_bytes=N": "with --expert_slots: host memory for experts, which are read from files "
    "(of `switchx quantize`, or of a run with configs/storage/disk.gin); default: room for all",
    "--expert_policy=lru|decayed_lfu|next_use": "with --expert_slots: which expert makes room "
    "for another (default: lru)",
    "--expert_cache=FILE": "with --expert_slots: gin file of `switchx simulate cache` that "
    "gives the policy and host_bytes",
    "--expert_prefetch": "with --expert_slots: the router of the next layer predicts which "
    "experts to move ahead",
    "--hardware=NAME|FILE": "with --expert_slots or --ring_slots: spec (docs/planner.md) for "
    "which the streaming formula is evaluated; default: that of the device",
}


def add_loading(parser: shared.CommandParser) -> None:
    """Adds what a model is loaded with; `loading` turns it into settings of `switchx.load`."""
    shared.add_step(parser, "checkpoint of a run folder")
    devices.add_mesh(parser, "one device")
    devices.add_xla(parser)
    shared.add_flags(parser, FLAGS)
    shared.add_task(parser)


def loading(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "step": arguments.step,
        "mesh": devices.mesh_spec(arguments),
        "expert_slots": expert_slots(arguments),
        "task": arguments.task,
        "compiler": devices.compiler_options(arguments),
    }


def expert_slots(arguments: argparse.Namespace):
    """The ExpertSlots of `--expert_slots` and the flags beside it, or None without it.

    Raises:
        UsageError: a flag beside it is given alone.
        ConfigurationError: the file of `--expert_cache` is not one of `switchx simulate cache`.
    """
    from switchx.inference.config import ExpertSlots

    beside = ("host_bytes", "expert_policy", "expert_cache", "expert_prefetch", "hardware")
    given = {name: value for name in beside if (value := getattr(arguments, name))}
    if given.get("hardware"):
        from switchx.hardware.spec import load_hardware

        load_hardware(given["hardware"])  # reports what is wrong with it before the work
    slots, ring_slots = arguments.expert_slots, arguments.ring_slots
    if slots is None:
        if ring_slots is not None:
            given.pop("hardware", None)
        for name in given:
            arguments.parser.error(
                f"--{name} without --expert_slots; give --expert_slots=K, too"
            )
        return None if ring_slots is None else ExpertSlots(ring_slots=ring_slots)
    cache = _simulated_cache(given["expert_cache"]) if "expert_cache" in given else {}
    named = {"policy": given.get("expert_policy"), "host_bytes": given.get("host_bytes")}
    cache |= {name: value for name, value in named.items() if value is not None}
    if ring_slots is not None:
        if "host_bytes" in cache:
            arguments.parser.error(
                "--host_bytes (or one of --expert_cache) with --ring_slots, which has all "
                "experts in host memory; leave out one of the two"
            )
        cache |= {"ring_slots": ring_slots, "hardware": given.get("hardware")}
    return ExpertSlots(slots, prefetch="expert_prefetch" in given, **cache)


def traffic_lines(arguments: argparse.Namespace, experts) -> list[str]:
    """Lines about the slots' traffic, and the streaming formula for each kind of call.

    Args:
        experts: the `OutsideExperts` of a model.
    """
    import jax

    from switchx.hardware.spec import hardware_of, load_hardware

    lines = str(experts.traffic).splitlines()
    if arguments.hardware:
        hardware = load_hardware(arguments.hardware)
    else:
        try:
            hardware = hardware_of(jax.devices()[0].device_kind)
        except ValueError as error:
            return [*lines, f"streaming: {error}"]
    return [*lines, *(f"{hardware.name}: {kind}" for kind in experts.kinds(hardware))]


def _simulated_cache(file: str) -> dict[str, Any]:
    """Policy and capacity in a file of `switchx simulate cache`."""
    from switchx.gin_config import building
    from switchx.training.offload.storage_spec import StorageSpec

    building.parse_files([file], [])
    spec = building.build("STORAGE", StorageSpec)
    return {"policy": spec.policy, "host_bytes": spec.host_bytes}
