# SPDX-License-Identifier: Apache-2.0
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul.memory_tiles import padded_shape, padded_to_tiles


def test_cut_axes_are_padded_to_whole_tiles():
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
