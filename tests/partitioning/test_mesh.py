# SPDX-License-Identifier: Apache-2.0
"""Meshes: sizes over simulated devices, the order over machines, the compiler's options."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels.aot import tpu_compiler
from switchx.gin_config import building
from switchx.partitioning.compiler_options import DEFAULT_OPTIONS, CompilerOptions
from switchx.partitioning.mesh import (
    AXES,
    MeshSpec,
    arranged,
    batch_axes,
    batch_parts,
    cpu_device,
    is_box,
    machine_of,
)
from switchx.partitioning.rules import TABLES, Rules
from switchx.partitioning.topology import Topology
from switchx.training.job import TrainingJob
from tests.data.refusals import refused
from tests.processes import ROOT, script_with_compiler
from tests.promises import torus


@pytest.mark.parametrize(
    ("spec", "sizes", "parts"),
    [
        (MeshSpec(), {"data": 8}, 8),
        (MeshSpec(expert=4), {"data": 2, "expert": 4}, 8),
        (MeshSpec(data=1, expert=8), {"expert": 8}, 8),
        (MeshSpec(fsdp=2, model=2), {"data": 2, "fsdp": 2, "model": 2}, 4),
        (MeshSpec(node=2, expert=2, model=2), {"node": 2, "expert": 2, "model": 2}, 4),
        (MeshSpec(data=1, model=8), {"model": 8}, 1),
    ],
)
def test_data_takes_the_devices_that_other_axes_leave(spec, sizes, parts):
    mesh = spec.build()
    assert tuple(mesh.shape) == AXES
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == sizes
    assert batch_parts(mesh, Rules()) == parts
    assert batch_axes(mesh, Rules()) == tuple(axis for axis in sizes if axis != "model")
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))


def test_a_machine_without_the_cpu_back_end_is_told_the_way_out(monkeypatch):
    def unknown(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "local_devices", unknown)
    with pytest.raises(ValueError, match="use 'cuda,cpu', or unset it"):
        cpu_device()


def test_axes_are_automatic():
    """Explicit ones, `jax.make_mesh`'s default, would forbid what constraints leave open."""
    assert MeshSpec(expert=2).build().axis_types == (AxisType.Auto,) * len(AXES)


def test_inner_axes_are_on_neighbours_and_data_across():
    def ids(spec, *shape):
        return [device.id for device in spec.build().devices.reshape(*shape)[0]]

    assert ids(MeshSpec(expert=4), 2, 4) == [0, 1, 2, 3]
    # A node is a block of devices that stand next to each other.
    assert ids(MeshSpec(node=2, expert=4), 2, 4) == [0, 1, 2, 3]
    assert ids(MeshSpec(expert=4, model=2), 4, 2) == [0, 1]


def test_some_of_the_devices():
    mesh = MeshSpec(data=1).build(jax.devices()[3:4])
    assert mesh.size == 1 and mesh.devices.item() == jax.devices()[3]
    assert batch_parts(mesh, Rules()) == 1


@pytest.mark.parametrize(
    ("spec", "text", "needed"),
    [
        (MeshSpec(data=2, expert=2), "data=2 x expert=2", 4),
        (MeshSpec(data=4, expert=4), "data=4 x expert=4", 16),
        (MeshSpec(expert=16), "data=1 x expert=16", 16),
        (MeshSpec(expert=3), "data=2 x expert=3", 6),
        (MeshSpec(fsdp=3, model=2), "data=1 x fsdp=3 x model=2", 6),
        (MeshSpec(data=1, node=2, expert=2), "data=1 x node=2 x expert=2", 4),
    ],
)
def test_a_mesh_uses_exactly_the_devices_there_are(spec, text, needed):
    with refused(f"mesh {text} needs {needed} devices, but there are 8 (cpu)"):
        spec.build()


@pytest.mark.parametrize("name", AXES)
def test_an_axis_has_a_device(name):
    with refused(f"mesh axis {name!r} has size 0"):
        MeshSpec(**{name: 0})


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("axes", [("fspd",), "fsdp", ("fsdp", "experts")], ids=str)
def test_rules_that_name_no_axis_of_a_mesh_are_refused(table, axes):
    with refused(f"Rules.{table} splits D over {axes!r}"):
        MeshSpec(rules=dataclasses.replace(Rules(), **{table: (("D", axes),)}))


def test_a_mesh_of_devices_that_are_not_here():
    mesh = MeshSpec(expert=16, model=8).abstract(None)
    assert tuple(mesh.shape) == AXES
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == {
        "expert": 16,
        "model": 8,
    }


@dataclasses.dataclass(frozen=True)
class Device:
    """What the order is made of."""

    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"


def cluster(machines: int, local: int, processes: int = 1) -> list[Device]:
    """GPUs: machine 1 has the ids from `local` on; each machine runs some processes."""
    per_process = local // processes
    return [Device(i, i // per_process, i // local) for i in range(machines * local)]


def axis_sizes(data=1, fsdp=1, node=1, expert=1, model=1) -> dict[str, int]:
    return dict(data=data, fsdp=fsdp, node=node, expert=expert, model=model)


def places(devices, **axes):
    """Machine and local rank of each device of the mesh, by data, fsdp, node, expert, model."""
    local = len(devices) // len({machine_of(device) for device in devices})
    array = arranged(devices, axis_sizes(**axes))
    ids = np.vectorize(lambda device: device.id)(array)
    assert sorted(ids.flat) == sorted(device.id for device in devices)
    return ids // local, ids % local


@pytest.mark.parametrize("processes", [1, 2, 8])
@pytest.mark.parametrize(
    "axes",
    [
        dict(node=4, expert=8),
        dict(node=4, expert=4, model=2),
        dict(node=4, expert=2, data=4),
        dict(node=4, expert=4, fsdp=2),
        dict(node=2, expert=4, data=2, fsdp=2),
        dict(node=2, expert=2, data=8),
        dict(node=2, expert=2, model=2, data=4),
    ],
)
def test_inner_axes_stay_in_a_machine_and_node_on_a_rail(processes, axes):
    machine, rank = places(cluster(4, 8, processes), **axes)
    # Along expert and model the machine is one; so it is a hierarchical all-to-all's inside.
    assert (machine == machine[:, :, :, :1, :1]).all()
    # Along node the local rank is one, and every machine another.
    assert (rank == rank[:, :, :1]).all()
    for column in np.moveaxis(machine, 2, -1).reshape(-1, axes["node"]):
        assert len(set(column)) == axes["node"]


def test_without_node_machine_follows_machine():
    machine, rank = places(cluster(2, 4), data=2, expert=4)
    assert machine[:, 0, 0, :, 0].tolist() == [[0] * 4, [1] * 4]
    assert rank[:, 0, 0, :, 0].tolist() == [[0, 1, 2, 3]] * 2
    # A flat all-to-all over both machines is slow, not wrong.
    machine, _ = places(cluster(2, 4), expert=8)
    assert machine.flatten().tolist() == [0] * 4 + [1] * 4


def test_devices_may_come_in_any_order_of_machines():
    devices = cluster(2, 4)
    mixed = devices[4:] + devices[:4]
    for axes in (dict(node=2, expert=4), dict(data=2, expert=4)):
        got = arranged(mixed, axis_sizes(**axes))
        assert (got == arranged(devices, axis_sizes(**axes))).all()


def test_one_machine_is_simulated_nodes_of_neighbours():
    machine, rank = places(cluster(1, 8), node=2, expert=4)
    assert rank[0, 0, :, :, 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not machine.any()


def test_chips_of_a_slice_stay_as_they_come_and_slices_are_nodes():
    # A pod's ids go along its torus, not host after host: chips 0, 1, 4, 5 are on host 0.
    def chips(slice_index, platform="tpu"):
        return [
            Device(16 * (slice_index or 0) + i, (i // 2) % 2 + 2 * (i // 8), slice_index,
                   platform)
            for i in range(16)
        ]  # fmt: skip

    for index in (0, None):
        array = arranged(chips(index), axis_sizes(data=4, expert=4))
        assert [device.id for device in array.flat] == list(range(16))
    array = arranged(chips(0) + chips(1), axis_sizes(node=2, expert=16))
    assert [device.slice_index for device in array.flat] == [0] * 16 + [1] * 16


@pytest.mark.parametrize(
    ("slices", "axes", "boxes"),
    [
        # Each axis on whole sides; in the order of ids fsdp would be a line of 15.
        (1, dict(fsdp=8, expert=128), {"fsdp": "1x8x1", "expert": "8x1x16"}),
        (1, dict(node=8, expert=8, model=16), {"node": "1x8x1", "expert": "8x1x1"}),
        # A part of a side: the inner axis has neighbours, the outer one every second of them.
        (1, dict(data=256, model=4), {"model": "4x1x1"}),
        # Over two slices, `data` or `node` goes over them, and the others stay in one.
        (2, dict(data=2, fsdp=8, expert=128), {"data": "1x1x1", "fsdp": "1x8x1"}),
        (2, dict(fsdp=8, node=2, expert=128), {"node": "1x1x1", "expert": "8x1x16"}),
        (2, dict(data=4, fsdp=8, expert=64), {"fsdp": "1x1x8", "expert": "8x8x1"}),
    ],
)
def test_axes_of_tpus_follow_the_torus(slices, axes, boxes):
    chips = torus.chips_of(Topology.parse("v5p:8x8x16"), slices)
    sizes = axis_sizes(**axes)
    mesh = arranged(chips, sizes)
    assert sorted(chip.id for chip in mesh.flat) == list(range(1024 * slices))
    for axis, box in boxes.items():
        for group in torus.groups_of(mesh, list(sizes).index(axis)):
            assert torus.sides_of(group) == box
    if slices == 2:
        across = "node" if "node" in axes else "data"
        numbers = np.vectorize(lambda chip: chip.slice_index)(mesh)
        numbers = np.moveaxis(numbers, list(sizes).index(across), 0)
        # Along no other axis does a group leave its slice.
        assert all(len(set(each.flat)) == 1 for each in numbers)


def test_chips_that_fill_no_box_stay_as_they_come():
    chips = torus.chips_of(Topology.parse("v5p:4x4x4"))
    chips = [*chips[:8], *chips[10:12]]
    assert not is_box(chips)
    got = arranged(chips, axis_sizes(data=5, expert=2))
    assert [chip.id for chip in got.flat] == [chip.id for chip in chips]


def test_processes_of_cpus_are_machines():
    devices = [Device(i, i // 2, platform="cpu") for i in range(4)]
    got = arranged(devices, axis_sizes(node=2, data=2))
    assert [device.id for device in got.flat] == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (dict(node=3, data=4), "mesh axis 'node' of size 3 does not divide the 4 machines"),
        (
            dict(node=2, expert=6),
            "with an axis 'node', expert=6 has to fit a machine's 4 devices",
        ),
        (
            dict(node=2, expert=4, model=2),
            "with an axis 'node', expert=4 x model=2 has to fit a machine's 4 devices",
        ),
    ],
)
def test_axes_that_do_not_fit_machines(axes, message):
    with refused(message):
        arranged(cluster(4, 4), axis_sizes(**axes))


def test_unequal_machines_have_no_rails():
    devices = cluster(2, 4)[:6]
    with refused(
        "mesh axis 'node' of size 2 needs machines with equally many devices<any>4, 2"
    ):
        arranged(devices, axis_sizes(node=2, expert=3))
    assert arranged(devices, axis_sizes(data=6)).size == 6


def test_a_mesh_is_built_in_this_order():
    devices = [Device(i, i // 4, platform="cpu") for i in range(8)]
    mesh = MeshSpec(data=2, node=2, expert=2).build(devices)
    ids = [[device.id for device in rows.flat] for rows in mesh.devices.reshape(2, 2, 2)]
    assert ids == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.fixture
def overlap(tmp_path) -> CompilerOptions:
    files = ["runs/pretrain_tiny.gin", "xla/overlap.gin"]
    building.parse_files(files, [], [])
    return building.build("JOB", TrainingJob).compiler


def compiles(options: dict[str, str]) -> None:
    """On CPU, where XLA parses options of all platforms."""
    jax.jit(lambda x: x + 1, compiler_options=options)(jnp.ones(()))


def test_xla_knows_the_options_of_gpus(overlap):
    options = overlap.of("gpu")
    assert len(options) == len(overlap.gpu) > 5 and overlap.of("cuda") == options
    for name, value in options.items():
        compiles({name: value})


def test_xla_refuses_others():
    """Without which the test above could not fail."""
    with pytest.raises(Exception, match="No such compile option: 'xla_gpu_enable_overlap'"):
        compiles({"xla_gpu_enable_overlap": "True"})
    name = "xla_gpu_enable_latency_hiding_scheduler"
    with pytest.raises(Exception, match="not a valid bool value"):
        compiles({name: "maybe"})


TPU_PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
device = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices[0]
sharding = jax.sharding.SingleDeviceSharding(device)
x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=sharding)
for name, value in json.loads(sys.argv[1]).items():
    try:
        jax.jit(jnp.sin, compiler_options={name: value}).lower(x).compile()
    except Exception as error:
        print(name, error)
"""


@pytest.mark.aot
def test_the_tpu_compiler_knows_the_options_of_tpus(overlap):
    options = overlap.of("tpu") | {"xla_tpu_enable_overlap": "True"}
    done = script_with_compiler(tpu_compiler, TPU_PROGRAM, json.dumps(options))
    (refusal,) = [line for line in done.stdout.splitlines() if line.startswith("xla_")]
    assert "No such compile option: 'xla_tpu_enable_overlap'" in refusal


def test_nothing_on_cpu(overlap):
    assert overlap.of("cpu") == {}


def test_a_chip_is_not_given_what_its_compiler_refuses(overlap):
    everything, name = overlap.of("tpu", "TPU v5"), "xla_tpu_enable_async_all_to_all"
    assert everything == overlap.of("tpu") and name in everything
    del everything[name]
    assert overlap.of("tpu", "TPU v5 lite") == everything


def test_a_job_has_the_last_word_on_what_all_have():
    ((name, value),) = DEFAULT_OPTIONS["tpu"].items()
    assert CompilerOptions().of("tpu") == {name: value}
    assert CompilerOptions(tpu=(f"{name}=True",)).of("tpu") == {name: "True"} != value
    assert CompilerOptions(not_on=(("TPU v9", name),)).of("tpu", "TPU v9") == {}
    assert CompilerOptions().of("tpu", gathers_weights=True) == {}


def test_each_option_is_explained():
    text = (pathlib.Path(ROOT) / "configs/xla/overlap.gin").read_text(encoding="utf-8")
    groups = [each for each in text.split("CompilerOptions.")[1:] if '  "xla_' in each]
    assert len(groups) == 2
    for group in groups:
        first = next(line for line in group.splitlines()[1:] if line.strip())
        assert first.strip().startswith("#")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--xla_a=1",), "CompilerOptions.gpu has '--xla_a=1'"),
        (("xla_a=1", "xla_a=2"), "CompilerOptions.gpu sets xla_a twice"),
    ],
)
def test_bad_options(options, message):
    with refused(message):
        CompilerOptions(gpu=options)


def test_an_exception_is_of_an_option_that_is_set():
    with refused("CompilerOptions.not_on has xla_b, which no platform sets"):
        CompilerOptions(tpu=("xla_a=1",), not_on=(("TPU v5 lite", "xla_b"),))
