# SPDX-License-Identifier: Apache-2.0
"""Arguments of commands that use a model whose experts come to the device when chosen."""

import argparse
from typing import Any

from switchx.cli import arguments as shared


def add_expert_slots(parser: shared.CommandParser) -> None:
    parser.add_argument(
        "--expert_slots",
        type=shared.positive,
        metavar="K",
        help="experts of each Switch layer that are on the device at once, those that were "
        "chosen last; all are in host memory, and results stay the same; default: all",
    )
    parser.add_argument(
        "--ring_slots",
        type=shared.positive,
        metavar="K",
        help="instead of --expert_slots: layers of each stack whose experts are on the device "
        "at once; all others stream through two of these slots in each step",
    )
    parser.add_argument(
        "--host_bytes",
        type=shared.positive,
        metavar="N",
        help="with --expert_slots: host memory for experts, which are read from files (of "
        "`switchx quantize`, or of a run with configs/storage/disk.gin); default: room for all",
    )
    parser.add_argument(
        "--expert_policy",
        choices=["lru", "decayed_lfu", "next_use"],
        help="with --expert_slots: which expert makes room for another (default: lru)",
    )
    parser.add_argument(
        "--expert_cache",
        type=shared.not_empty,
        metavar="FILE",
        help="with --expert_slots: the policy and the host_bytes that `switchx simulate cache` "
        "wrote into this gin file",
    )
    parser.add_argument(
        "--expert_prefetch",
        action="store_true",
        help="with --expert_slots: the router of the next layer predicts what is moved ahead",
    )


def add_hardware(parser: shared.CommandParser) -> None:
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help="with --expert_slots: a spec (docs/planner.md) that the formula of streaming is "
        "evaluated for at the end; default: that of the device",
    )


def expert_slots(arguments: argparse.Namespace):
    """The ExpertSlots of `--expert_slots` and the flags beside it, or None without it.

    Raises:
        UsageError: a flag beside it is given alone.
        ConfigurationError: the file of `--expert_cache` is not one of `switchx simulate cache`.
    """
    from switchx.inference.config import ExpertSlots

    beside = ("host_bytes", "expert_policy", "expert_cache", "expert_prefetch", "hardware")
    given = {name: value for name in beside if (value := getattr(arguments, name, None))}
    if given.get("hardware"):
        from switchx.planner.hardware import load_hardware

        load_hardware(given["hardware"])  # what is wrong with it is said before the work
    ring_slots = getattr(arguments, "ring_slots", None)
    if ring_slots is not None:
        for name in ("expert_slots", *beside[:-1]):
            if getattr(arguments, name, None):
                arguments.parser.error(f"--{name} with --ring_slots; give one of the two")
        return ExpertSlots(ring_slots, ring=True)
    if arguments.expert_slots is None:
        for name in given:
            arguments.parser.error(
                f"--{name} without --expert_slots; give --expert_slots=K, too"
            )
        return None
    cache = _simulated_cache(given["expert_cache"]) if "expert_cache" in given else {}
    named = {"policy": given.get("expert_policy"), "host_bytes": given.get("host_bytes")}
    cache |= {name: value for name, value in named.items() if value is not None}
    return ExpertSlots(arguments.expert_slots, prefetch="expert_prefetch" in given, **cache)


def traffic_lines(arguments: argparse.Namespace, experts) -> list[str]:
    """What the slots have done, and for each kind of call what the formula of streaming says.

    Args:
        experts: the `ChosenExperts` of a model.
    """
    import jax

    from switchx.planner.hardware import hardware_of, load_hardware

    lines = [str(experts.traffic)]
    if arguments.hardware:
        hardware = load_hardware(arguments.hardware)
    else:
        try:
            hardware = hardware_of(jax.devices()[0].device_kind)
        except ValueError as error:
            return [*lines, f"streaming: {error}"]
    for count, call in experts.streaming(hardware):
        lines.append(f"{count:,} calls on {hardware.name}: {call}")
    return lines


def _simulated_cache(file: str) -> dict[str, Any]:
    """Policy and capacity in a file of `switchx simulate cache`."""
    from switchx.cli.config import building
    from switchx.storage.cache import StorageSpec

    building.parse_files([file], [])
    spec = building.build("STORAGE", StorageSpec)
    return {"policy": spec.policy, "host_bytes": spec.host_bytes}
