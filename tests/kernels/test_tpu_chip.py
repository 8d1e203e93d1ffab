# SPDX-License-Identifier: Apache-2.0
"""Chips that are described, what interpret mode needs of them, arrays as they lie in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu_chip import (
    MIB,
    SMALLEST,
    current_chip,
    described_tpu,
    on_some_tpu,
    padded_shape,
    padded_to_tiles,
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


def test_cut_axes_are_padded_to_whole_tiles_of_memory():
    # 40 rows in blocks of 16 end in half a tile of 16; 200 columns in 72 of 128.
    assert padded_shape((3, 40, 200), (16, 128)) == (3, 48, 256)
    assert padded_shape((3, 40, 200), (40, 200)) == (3, 40, 200)
    assert padded_shape((48, 256), (16, 128)) == (48, 256)


def test_padding_is_nothing_that_could_pass_for_a_number():
    padded = padded_to_tiles(jnp.ones((20, 130), jnp.bfloat16), (16, 128))
    assert padded.shape == (32, 256)
    assert np.isnan(padded[20:].astype(np.float32)).all()
    assert np.isnan(padded[:, 130:].astype(np.float32)).all()
    assert (padded[:20, :130] == 1).all()
    assert (padded_to_tiles(jnp.ones((20, 130), jnp.int8), (16, 128))[20:] == -128).all()
