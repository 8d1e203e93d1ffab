# SPDX-License-Identifier: Apache-2.0
"""Spec files: rates and sizes of a device, its host and the networks around it.

There is one efficiency per resource. The files in `specs/` name the source of every number and
are written before anything is compared with a measurement; nothing here is fitted. A device is
what JAX calls a device.
"""

import dataclasses
import pathlib
import re
import tomllib
import typing
from collections.abc import Mapping
from typing import Any

SPECS = pathlib.Path(__file__).parent / "specs"
# `h200x8x16`: 16 nodes of 8 devices.
# JAX's names for the specs' devices; a dash and the card's form may follow.
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA A100": "a100",
    "Tesla V100": "v100",
}
_SIZED = re.compile(r"(?P<name>.+?)x(?P<per_node>\d+)x(?P<nodes>\d+)")


@dataclasses.dataclass(frozen=True)
class Compute:
    """Matrix products.

    Attributes:
        peak_flops_per_s: peak FLOP/s in the dtype that models multiply in, by the vendor.
        efficiency: share of the peak that a whole step's products reach, without communication.
        operand_bytes: most bytes of an element that is gathered or exchanged only for products:
            where matrix units read bfloat16, the TPU compiler rounds before it sends.
        sums_after_loops: whether the compiler moves sums of gradients out of a loop over
            microbatches to behind it, where blocks are not in their own loop.
    """

    peak_flops_per_s: float
    efficiency: float
    source: str
    operand_bytes: int = 4
    sums_after_loops: bool = False

    @property
    def flops_per_s(self) -> float:
        return self.peak_flops_per_s * self.efficiency


@dataclasses.dataclass(frozen=True)
class Memory:
    """A device's memory.

    Attributes:
        num_bytes: bytes of memory on the device.
        usable: share of them that a program can use.
        bytes_per_s: bandwidth of the memory, by the vendor.
        efficiency: share of `bytes_per_s` that element-wise work reaches.
    """

    num_bytes: float
    usable: float
    bytes_per_s: float
    efficiency: float
    source: str

    @property
    def usable_bytes(self) -> float:
        return self.num_bytes * self.usable

    @property
    def achieved_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.efficiency


@dataclasses.dataclass(frozen=True)
class Host:
    """The memory of the host beside its devices, and the links between it and each of them.

    Attributes:
        num_bytes: bytes of memory in one host.
        usable: share of them that a run can use.
        devices: number of devices per host.
        bytes_per_s: bandwidth between the memory and one device, in one direction, by the
            vendor; where devices share a port, one device's share.
        memory_bytes_per_s: bandwidth at which the host's processors read and write the memory.
        efficiency: share of both bandwidths that large copies and element-wise work reach.
    """

    num_bytes: float
    usable: float
    devices: int
    bytes_per_s: float
    memory_bytes_per_s: float
    efficiency: float
    source: str

    @property
    def achieved_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.efficiency


@dataclasses.dataclass(frozen=True)
class Disk:
    """The disks of a host, taken as one.

    Attributes:
        num_bytes: bytes on the disks of one host.
        usable: share of them that a run can use.
        read_bytes_per_s, write_bytes_per_s: bandwidths of reading and writing, by the vendor.
        efficiency: share of both bandwidths that files of some MiB reach.
        day_written_bytes: bytes that the vendor's warranty allows to be written per day
            (endurance); 0 without such a limit.
    """

    num_bytes: float
    usable: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    efficiency: float
    day_written_bytes: float
    source: str


@dataclasses.dataclass(frozen=True)
class Network:
    """Links between devices.

    Attributes:
        bytes_per_s: bandwidth of one device in one direction: of all its links behind a switch,
            or of one link of a torus. Where devices share a port, one device's share.
        efficiency: share of `bytes_per_s` that large messages reach.
        latency_s: latency of one message.
        torus_dims: dimensions of a torus; 0 where a switch connects all devices.
        wraps_at: divisor of the sizes of the dimensions that are rings; at 0, all are lines.
    """

    bytes_per_s: float
    efficiency: float
    latency_s: float
    source: str
    torus_dims: int = 0
    wraps_at: int = 0

    @property
    def achieved_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.efficiency


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A cluster: devices in nodes, with a fast network inside each and a slower one between.

    Attributes:
        description: description of one device.
        devices_per_node: number of devices that `inside` connects; for a TPU, those of a pod.
        max_devices: largest number of devices; None where there is no limit.
        host, disk: memory and disks of a host; None where the file does not describe them, so
            that experts cannot be planned there.
    """

    name: str
    description: str
    devices_per_node: int
    compute: Compute
    memory: Memory
    inside: Network
    between: Network
    max_devices: int | None = None
    host: Host | None = None
    disk: Disk | None = None

    @property
    def platform(self) -> str:
        return "tpu" if self.inside.torus_dims else "gpu"

    def is_whole(self, devices: int) -> bool:
        """Whether these are part of one node or whole nodes; torus slices are not checked."""
        if self.inside.torus_dims:
            return True
        return devices < self.devices_per_node or devices % self.devices_per_node == 0


def known_hardware() -> list[str]:
    """Names of the committed spec files."""
    return sorted(path.stem for path in SPECS.glob("*.toml"))


def hardware_of(device_kind: str) -> Hardware:
    """The hardware of a kind of device, as in `jax.Device.device_kind`.

    Raises:
        ValueError: there is no spec for it.
    """
    named = [
        kind for kind in _KINDS if device_kind == kind or device_kind.startswith(f"{kind}-")
    ]
    found = load_hardware(_KINDS[named[0]]) if named else None
    size = re.search(r"-(\d+)GB", device_kind)  # of a card that comes in two sizes
    if found is None or (size and not _is_near(1e9 * int(size[1]), found.memory.num_bytes)):
        raise ValueError(
            f"nothing says what a device {device_kind!r} can do; give --hardware=NAME, of "
            f"{', '.join(known_hardware())}, or a spec file FILE.toml"
        )
    return found


def _is_near(num_bytes: float, other: float) -> bool:
    """Whether two sizes are the same, one perhaps in GB and one in GiB."""
    return abs(num_bytes / other - 1) < 0.1


def load_hardware(name: str) -> Hardware:
    """The hardware of a committed spec, with or without sizes (`h200x8x16`), or of a file.

    Args:
        name: `v5p`; `h200x8x16` for 16 nodes of 8; or a path that ends in `.toml`.

    Raises:
        ValueError: nothing has that name, or a file is wrong; all wrong fields are listed.
    """
    if name.endswith(".toml"):
        return read_spec(pathlib.Path(name).expanduser())
    if name in known_hardware():
        return read_spec(SPECS / f"{name}.toml")
    match = _SIZED.fullmatch(name)
    if match and match["name"] in known_hardware():
        per_node, nodes = int(match["per_node"]), int(match["nodes"])
        spec = read_spec(SPECS / f"{match['name']}.toml")
        if spec.inside.torus_dims:
            raise ValueError(
                f"--hardware={name}: {match['name']} has no nodes of {per_node} devices, a "
                f"torus joins all of them; use --hardware={match['name']} --devices=N"
            )
        if per_node < 1 or nodes < 1:
            raise ValueError(f"--hardware={name}: give at least 1 node of at least 1 device")
        return dataclasses.replace(
            spec, name=name, devices_per_node=per_node, max_devices=per_node * nodes
        )
    raise ValueError(
        f"--hardware={name}: no such hardware; there are {', '.join(known_hardware())}; write "
        "one with nodes as NAMExDEVICESxNODES (h200x8x16), or give a spec file FILE.toml"
    )


def read_spec(path: pathlib.Path) -> Hardware:
    """Reads and checks a spec file; `specs/` has examples.

    Raises:
        ValueError: the file is not TOML, or fields are missing, unknown, or out of range.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); give a spec file, or one of "
            f"{', '.join(known_hardware())}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is no TOML: {error}; see {SPECS / 'v5p.toml'}") from error
    problems: list[str] = []
    hardware = _built(Hardware, {"name": path.stem} | values, "", problems)
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}; {SPECS / 'h200.toml'} is an example")
    return hardware


_MAY_BE_ZERO = ("latency_s", "torus_dims", "wraps_at", "day_written_bytes")
_SHARES = ("efficiency", "usable")


def _built(kind: type, values: Mapping[str, Any], prefix: str, problems: list[str]):
    """The dataclass; or None, with a line in `problems` for each thing that is wrong."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    num_problems, arguments = len(problems), {}
    for name in values.keys() - fields.keys():
        problems.append(f"{prefix}{name} is unknown; there are {', '.join(fields)}")
    for name, field in fields.items():
        if name not in values:
            if field.default is dataclasses.MISSING:
                problems.append(f"{prefix}{name} is missing")
            continue
        value = values[name]
        # `Disk`, for both `Disk` and `Disk | None`.
        types = typing.get_args(field.type) or (field.type,)
        if part := next(filter(dataclasses.is_dataclass, types), None):
            if not isinstance(value, Mapping):
                problems.append(f"{prefix}{name}={value!r}; expected a table [{name}]")
            else:
                arguments[name] = _built(part, value, f"{name}.", problems)
        else:
            if problem := _wrong(name, value, field.type):
                problems.append(f"{prefix}{name}={value!r}; expected {problem}")
            arguments[name] = value
    return kind(**arguments) if len(problems) == num_problems else None


def _wrong(name: str, value, expected) -> str | None:
    """The kind of value that a field expects, if its value is wrong; otherwise None."""
    if expected is str:
        return None if isinstance(value, str) and value.strip() else "a text that is not empty"
    if expected is bool:
        return None if isinstance(value, bool) else "true or false"
    is_whole = expected is not float
    kinds = int if is_whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds):
        return "a whole number" if is_whole else "a number"
    if name in _SHARES:
        return None if 0 < value <= 1 else "a share above 0, at most 1"
    if name in _MAY_BE_ZERO:
        return None if value >= 0 else "0 or more"
    return None if value > 0 else "a number above 0"
