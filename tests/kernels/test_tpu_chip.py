# SPDX-License-Identifier: Apache-2.0
import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_chip import (
    MIB,
    SMALLEST,
    current_chip,
    described_tpu,
    interpret_mode,
    on_some_tpu,
)


@pytest.mark.parametrize(
    ("kind", "cores", "generation", "vmem"),
    [
        ("TPU v4", 2, 4, 16),
        ("TPU v5 lite", 1, 5, 128),
        ("TPU v5", 2, 5, 64),
        ("TPU v6 lite", 1, 6, 128),
        ("TPU7x", 1, 7, 64),
    ],
)
def test_described_chip_is_the_current_one(kind, cores, generation, vmem):
    with described_tpu(kind, cores):
        chip = current_chip()
    assert (chip.cores, chip.generation, chip.vmem_bytes) == (cores, generation, vmem * MIB)
    assert chip.bytes_per_s > 6e11
    assert chip.flops_per_s > 1.3e14


@pytest.mark.skipif(jax.default_backend() == "tpu", reason="there is a TPU")
def test_without_a_tpu_the_smallest_stands_in():
    assert current_chip() == SMALLEST
    with on_some_tpu(cores=2):
        assert current_chip().cores == 2
    with described_tpu("TPU7x"), on_some_tpu():
        assert current_chip().generation == 7


def test_a_description_keeps_the_mesh_that_is_in_use():
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    with jax.sharding.use_abstract_mesh(mesh), described_tpu():
        assert jax.sharding.get_abstract_mesh().shape["data"] == 2
        assert current_chip().generation == 5


@pytest.mark.skipif(jax.default_backend() == "tpu", reason="there is a TPU")
def test_a_mesh_of_other_devices_raises():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    message = "a mesh of 2 devices that are no TPUs; interpret them outside jax.set_mesh"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        on_some_tpu()
    one = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(one), on_some_tpu():
        assert current_chip().generation == 5


def test_interpreter_knows_pipelines():
    assert interpret_mode(False) is False
    assert isinstance(interpret_mode(True), pltpu.InterpretParams)
    given = pltpu.InterpretParams(detect_races=True)
    assert interpret_mode(given) is given
