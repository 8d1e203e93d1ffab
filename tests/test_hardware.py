# SPDX-License-Identifier: Apache-2.0
"""Spec files: committed ones are whole and name their sources, wrong ones are refused."""

import pathlib

import pytest

from switchx.hardware.spec import SPECS, hardware_of, known_hardware, load_hardware, read_spec
from switchx.partitioning.topology import GENERATIONS
from tests.data.refusals import refused

PARTS = ("compute", "memory", "inside", "between", "host", "disk")


@pytest.mark.parametrize("name", known_hardware())
def test_committed_specs_say_where_every_number_is_from(name):
    hardware = load_hardware(name)
    for part in PARTS:
        assert len(getattr(hardware, part).source) > 20
        assert 0 < getattr(hardware, part).efficiency <= 1


def test_there_are_the_pods_and_the_papers_clusters():
    assert known_hardware() == [
        "a100", "b200", "h100", "h200", "tpu7x", "v100", "v4", "v5e", "v5p", "v6e",
    ]  # fmt: skip


def test_what_tpus_compilers_do_is_said_of_tpus_alone():
    for name in known_hardware():
        hardware, is_tpu = load_hardware(name), name.startswith(("v4", "v5", "v6", "tpu"))
        assert (hardware.platform == "tpu") == is_tpu
        compute = hardware.compute
        assert (compute.operand_bytes, compute.sums_after_loops) == (
            (2, True) if is_tpu else (4, False)
        )


def test_memory_is_that_which_slices_are_compiled_for():
    both = sorted(GENERATIONS.keys() & set(known_hardware()))
    assert both == sorted(GENERATIONS) == ["h200", "tpu7x", "v4", "v5e", "v5p", "v6e"]
    for name in both:
        usable = load_hardware(name).memory.usable_bytes
        assert usable == pytest.approx(GENERATIONS[name].hbm_bytes, abs=1), name


def test_devices_and_files_of_ones_own_are_found(tmp_path):
    kinds = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200", "TPU7x", "TPU v5 lite")
    assert [hardware_of(kind).name for kind in kinds] == [
        "h100",
        "h200",
        "b200",
        "tpu7x",
        "v5e",
    ]
    for kind in ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-80GB", "Tesla V100-SXM2-32GB"):
        assert hardware_of(kind).name in ("a100", "v100")
    for kind in ("NVIDIA A100-SXM4-40GB", "Tesla V100-SXM2-16GB", "NVIDIA H100 PCIe"):
        with pytest.raises(ValueError, match=f"what a device '{kind}' can do; give --hardware"):
            hardware_of(kind)
    path = _spec(tmp_path, memory=("num_bytes = 141e9", "num_bytes = 80e9"))
    hardware = load_hardware(str(path))
    assert (hardware.name, hardware.memory.num_bytes) == ("mine", 80e9)


def test_numbers_worked_by_hand():
    # 2,307 TFLOP/s, 192 GiB, 7.38 TB/s a chip; its 6 links of 100 GB/s each way by halves.
    core = load_hardware("tpu7x")
    assert 2 * core.compute.peak_flops_per_s == 2307e12
    assert 2 * core.memory.num_bytes == 192 << 30 and 2 * core.memory.bytes_per_s == 7.38e12
    assert 2 * 2 * 6 * core.inside.bytes_per_s == 1200e9
    # Worked by hand from v100.toml: 125 TFLOP/s at 30%, a node's 12.5 GB/s for 8 GPUs.
    v100 = load_hardware("v100")
    assert v100.compute.flops_per_s == pytest.approx(37.5e12)
    assert 8 * v100.between.bytes_per_s == pytest.approx(12.5e9)


def test_nodes_are_part_of_a_gpu_clusters_name():
    hardware = load_hardware("h200x4x16")
    assert (hardware.devices_per_node, hardware.max_devices) == (4, 64)
    with refused("--hardware=v5px8x2: v5p has no nodes of 8 devices, a torus joins all"):
        load_hardware("v5px8x2")
    with refused("--hardware=h200x0x2: give at least 1 node of at least 1 device"):
        load_hardware("h200x0x2")
    with refused("--hardware=h20: no such hardware"):
        load_hardware("h20")


def _spec(tmp_path, **changes) -> pathlib.Path:
    text = (SPECS / "h200.toml").read_text(encoding="utf-8")
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("num_bytes = 141e9\n", "", "memory.num_bytes is missing"),
        ("usable = 0.92", "usable = 1.5", "memory.usable=1.5; expected a share above 0"),
        ("bytes_per_s = 50e9", "bytes_per_s = -1", "between.bytes_per_s=-1; expected a number"),
        ("devices_per_node = 8", "devices_per_node = 8.5", "expected a whole number"),
        ("latency_s = 14e-6", "latncy_s = 1", "between.latncy_s is unknown; there are"),
        ("devices_per_node = 8", "devices_per_node = true", "expected a whole number"),
        ("efficiency = 0.493", "efficiency = 0.493\nsums_after_loops = 1",
         "compute.sums_after_loops=1; expected true or false"),
        ("efficiency = 0.493", "efficiency = 0.493\noperand_bytes = 0",
         "compute.operand_bytes=0; expected a number above 0"),
        ('description = "', 'description = 3 # "', "description=3; expected a text"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(tmp_path, old, new, problem):
    path = _spec(tmp_path, change=(old, new))
    with pytest.raises(ValueError, match="mine.toml: ") as error:
        read_spec(path)
    assert problem in str(error.value)
    assert "h200.toml is an example" in str(error.value)


def test_all_wrong_fields_and_files_are_named(tmp_path):
    path = _spec(tmp_path, a=("num_bytes = 141e9\n", ""), b=("usable = 0.92", "usable = 0.0"))
    with pytest.raises(ValueError, match="missing") as error:
        read_spec(path)
    assert "memory.usable=0.0" in str(error.value)
    with pytest.raises(ValueError, match="none.toml: cannot be read .*; give a spec file"):
        load_hardware(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("x = [", encoding="utf-8")
    with pytest.raises(ValueError, match="bad.toml: is no TOML"):
        load_hardware(str(tmp_path / "bad.toml"))
