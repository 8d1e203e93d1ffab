# SPDX-License-Identifier: Apache-2.0
"""Changes to propose if no layout of a step runs or fits.

Changes of devices, rows, routing groups, remat, or where the experts are: one is named only if
the planner finds a plan with it or, for the nearest numbers of devices and rows, a layout that
runs.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from switchx.hardware.spec import Hardware
from switchx.planner.layout import Workload
from switchx.planner.search import (
    MOST_DEVICES,
    ON_DEVICE,
    Plan,
    Search,
    layouts,
    num_bytes,
    predict,
    refusal_of,
    search,
    shortage,
)
from switchx.planner.storage_tiers import TIERS, Storage
from switchx.planner.torus import divisors


def no_plan_message(
    workload: Workload,
    hardware: Hardware,
    devices: int,
    found: Search,
    storage: Storage = ON_DEVICE,
    others: dict[str, Workload] | None = None,
    tiers: Sequence[str] = TIERS,
) -> str:
    """The reason why a search found no plan, and changes that were found to work.

    Args:
        others: workloads with a change of the job, by the words that describe the change.
        tiers: storage tiers that the job allows.
    """
    if found.smallest is None:
        reasons = sorted(found.refused.items(), key=lambda item: -item[1])
        text = "; ".join(f"{reason} ({count} meshes)" for reason, count in reasons[:3])
        ways = _ways_to_run(workload, hardware, devices, storage, others or {})
        ways = ways or [_error(workload, hardware, devices, storage)]
        ways += _other_tiers(workload, hardware, devices, storage, tiers)
        return (
            f"no mesh of {devices} devices runs this model with its batch of "
            f"{workload.batch_size} rows: {text}; use {' or '.join(ways)}"
        )
    return (
        f"the model does not fit {devices} devices of {hardware.name}: the smallest of the "
        f"meshes ({found.smallest.layout.name}) {_needs(found.smallest, hardware)}; use "
        + " or ".join(_ways_to_fit(workload, hardware, devices, storage, found.smallest, tiers))
    )


def smallest_that_fits(
    workload: Workload, hardware: Hardware, devices: int, storage: Storage = ON_DEVICE
) -> tuple[int, Plan] | None:
    """The fewest devices, doubling from `devices`, on which a plan fits; None if never."""
    most = hardware.max_devices or MOST_DEVICES
    while 2 * devices <= most:
        devices *= 2
        is_whole = hardware.is_whole(devices)
        if is_whole and (plans := search(workload, hardware, devices, storage).plans):
            return devices, plans[0]
    return None


def workable_devices(
    workload: Workload, hardware: Hardware, devices: int, storage: Storage = ON_DEVICE
) -> list[int]:
    """The nearest numbers of devices, below and above, for which a mesh exists.

    `pipe` and the axes that split the batch divide its rows, `model` heads and d_ff: few do.
    """
    model, most = workload.model, min(2 * devices, hardware.max_devices or MOST_DEVICES)
    sizes = workload.batch_size, math.gcd(model.num_heads, model.d_ff)
    numbers = sorted({a * b for a, b in itertools.product(*map(divisors, sizes))})
    below = [each for each in reversed(numbers) if each < devices]
    above = [each for each in numbers if devices < each <= most]
    works = functools.partial(_runs, workload, hardware, storage=storage)
    nearest = [next(filter(works, each), None) for each in (below, above)]
    return [number for number in nearest if number is not None]


def _runs(workload: Workload, hardware: Hardware, devices: int, storage: Storage) -> bool:
    """Whether some layout of the devices runs, even if it is too large for them."""
    found = _outcomes(workload, hardware, devices, storage)
    return hardware.is_whole(devices) and any(isinstance(each, Plan) for each in found)


def _outcomes(
    workload: Workload, hardware: Hardware, devices: int, storage: Storage
) -> Iterator[Plan | ValueError]:
    """The plan of each layout on which a dispatcher can run, or why there is none."""
    for layout in layouts(workload, hardware, devices, collections.Counter()):
        if refusal_of(workload, layout, hardware) is None:
            try:
                yield predict(workload, layout, hardware, storage)
            except ValueError as error:
                yield error


def _ways_to_run(
    workload: Workload,
    hardware: Hardware,
    devices: int,
    storage: Storage,
    others: dict[str, Workload],
) -> list[str]:
    near = workable_devices(workload, hardware, devices, storage)
    more = -(-workload.batch_size // devices) * devices
    if more != workload.batch_size:
        rows = dataclasses.replace(workload, batch_size=more)
        others = others | {f"BATCH_SIZE={more}": rows}
    ways = [f"--devices={number}" for number in near]
    ways += [w for w, other in others.items() if _runs(other, hardware, devices, storage)]
    return ways


def _error(workload: Workload, hardware: Hardware, devices: int, storage: Storage) -> str:
    """The reason why a layout is refused, with the remedy in its message."""
    for each in _outcomes(workload, hardware, devices, storage):
        if isinstance(each, ValueError):
            return str(each).partition("; use ")[2] or str(each).rpartition("; ")[2]
    return "a model or a batch with more factors"


def _needs(plan: Plan, hardware: Hardware) -> str:
    usable = hardware.memory.usable_bytes
    if plan.memory.total > usable:
        return (
            f"needs {num_bytes(plan.memory.total)} a device, of which {num_bytes(usable)} can "
            "be used"
        )
    short = shortage(plan.storage, plan.layout, hardware)
    return (
        f"{short.reason}: {num_bytes(short.needed)}, of which {num_bytes(short.usable)} can be "
        "used"
    )


def _ways_to_fit(
    workload: Workload,
    hardware: Hardware,
    devices: int,
    storage: Storage,
    least: Plan,
    tiers: Sequence[str],
) -> list[str]:
    ways = _other_tiers(workload, hardware, devices, storage, tiers)
    short = shortage(least.storage, least.layout, hardware)
    if short is not None and storage.tier == "disk":
        cached = min(storage.host_bytes or math.inf, short.sharing * least.storage.bytes.disk)
        host_bytes = int(cached - (short.needed - short.usable))
        smaller = dataclasses.replace(storage, host_bytes=host_bytes)
        if host_bytes > 0 and search(workload, hardware, devices, smaller).plans:
            ways.append(f"StorageSpec.host_bytes={host_bytes}")
    if fits := smallest_that_fits(workload, hardware, devices, storage):
        number, plan = fits
        needed = num_bytes(plan.memory.total)
        ways.append(f"--devices={number}, where {plan.layout.name} needs {needed}")
    if workload.model.remat != "full":
        model = dataclasses.replace(workload.model, remat="full")
        again = dataclasses.replace(workload, model=model)
        if search(again, hardware, devices, storage).plans:
            ways.append("ModelConfig.remat='full'")
    return ways or ["fewer tokens a row, a smaller model or other hardware"]


def _other_tiers(
    workload: Workload,
    hardware: Hardware,
    devices: int,
    storage: Storage,
    tiers: Sequence[str],
) -> list[str]:
    """The first other tier with which the step fits, as an option of `switchx plan`."""
    for tier in tiers:
        elsewhere = dataclasses.replace(storage, tier=tier)
        if tier != storage.tier and search(workload, hardware, devices, elsewhere).plans:
            return [f"--storage={tier}"]
    return []
