# SPDX-License-Identifier: Apache-2.0
"""Exported programs compiled for slices that are not here, where the compiler is installed."""

import pytest

from pallas_kernels.aot import tpu_compiler
from switchx.deploy.compiled import compile_programs, slice_for
from switchx.inference.export import Shapes
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.topology import Topology
from tests.inference import exports
from tests.inference.exports import export
from tests.inference.tiny import trained
from tests.processes import skip_without

# Of sizes that kernels take.
WIDE = ModelConfig(
    "encoder_decoder", 12, 128, 256, 2, 64, 1, 1, switch=SwitchConfig(4, every=1)
)

MESH = MeshSpec(data=1, expert=4, model=2)


def test_slices_are_of_the_device_and_nothing_is_compiled_without_a_compiler(
    tmp_path, monkeypatch
):
    assert str(slice_for("TPU v5 lite", 8)) == "v5e:2x4"
    assert str(slice_for("TPU v5 lite", 1)) == "v5e:2x2"  # one of its devices
    assert str(slice_for("NVIDIA H200", 4)) == "h200:4"
    assert slice_for("TPU v5 lite", 3) is None
    assert slice_for("cpu", 1) is None and slice_for("NVIDIA A100", 1) is None
    monkeypatch.setenv(tpu_compiler.FOLDER_VARIABLE, str(tmp_path / "nothing"))
    assert compile_programs(tmp_path, "tpu", Topology.parse("v5e:2x2")) is None


@pytest.mark.aot
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("shapes", "mesh", "kinds"),
    [
        (Shapes(64, 16), MESH, {"all-reduce", "ragged-all-to-all"}),
        # Fewer rows than a tile of memory has, and no multiple of them.
        (Shapes(3, 7), None, set()),
    ],
    ids=["split", "few rows"],
)  # fmt: skip
def test_int4_programs_compile_for_a_slice(tmp_path, monkeypatch, shapes, mesh, kinds):
    skip_without(tpu_compiler)
    monkeypatch.setattr(exports, "SHAPES", shapes)
    devices = 1 if mesh is None else 8
    manifest = export(tmp_path / "e", trained(4, WIDE, rest="bfloat16"), ("tpu",), mesh=mesh)
    found = compile_programs(tmp_path / "e", "tpu", slice_for("TPU v5 lite", devices))
    assert found.keys() == {"prefill", "step"}
    for name, program in found.items():
        assert kinds <= program["collectives"].keys(), name
    size, _ = manifest["files"]["weights.safetensors"]
    assert size / devices < found["step"]["needed_bytes"] < 2**24
