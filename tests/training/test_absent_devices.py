# SPDX-License-Identifier: Apache-2.0
import sys

import pytest

from pallas_kernels.aot import gpu_compiler, tpu_compiler
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.topology import Topology
from switchx.training import aot
from switchx.training.aot import require_mesh_fits, run_with_compiler

V5E = Topology.parse("v5e:4x4")


def test_the_child_alone_sees_the_compiler(tmp_path, monkeypatch):
    (tmp_path / "libtpu").mkdir()
    monkeypatch.setenv(tpu_compiler.FOLDER_VARIABLE, str(tmp_path))
    seen = {}

    def run(command, env, **options):
        seen.update(command=command, env=env)

    monkeypatch.setattr(aot.subprocess, "run", run)
    run_with_compiler(["compile", "--json"], V5E)
    assert seen["command"] == [sys.executable, "-m", "switchx", "compile", "--json"]
    assert str(tmp_path) in seen["env"]["PYTHONPATH"]
    assert seen["env"][aot.CHILD_VARIABLE]
    assert not aot.has_compiler()


def test_no_compiler_for_gpus_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv(gpu_compiler.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="pallas_kernels.aot.install gpu"):
        run_with_compiler(["compile"], Topology.parse("h200"))


def test_a_mesh_that_uses_all_devices():
    require_mesh_fits(MeshSpec(expert=4), V5E)
    require_mesh_fits(MeshSpec(data=4, expert=4), V5E)


@pytest.mark.parametrize(
    ("mesh", "needed", "way_out"),
    [
        (MeshSpec(expert=32), 32, "--topology=v5e:4x8"),
        (MeshSpec(data=2, expert=4), 8, "--topology=v5e:2x4, or leave MeshSpec.data out"),
        (MeshSpec(expert=3), 15, "axes whose product divides 16"),
    ],
)
def test_a_mesh_that_does_not(mesh, needed, way_out):
    with pytest.raises(
        ValueError, match=f"needs {needed} devices, but v5e:4x4 has 16"
    ) as error:
        require_mesh_fits(mesh, V5E)
    assert way_out in str(error.value)
