# SPDX-License-Identifier: Apache-2.0
"""The paper's conversion is the plain one, bit by bit, for every value in every place."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantization.magic_numbers import (
    bias_int4,
    bias_int8,
    int4_to_float16,
    int8_to_float16,
)


def bits(array) -> np.ndarray:
    return np.asarray(array).view(np.uint16)


def test_every_int8_in_every_byte():
    every = np.arange(-128, 128, dtype=np.int8)
    values_N4 = np.stack([np.roll(every, shift) for shift in (0, 1, 77, 200)], axis=-1)
    converted = int8_to_float16(bias_int8(jnp.array(values_N4)))
    np.testing.assert_array_equal(bits(converted), bits(values_N4.astype(np.float16)))


def test_every_int4_in_every_nibble():
    every = np.arange(-8, 8, dtype=np.int8)
    values_N8 = np.stack([np.roll(every, shift) for shift in (0, 1, 3, 4, 7, 9, 11, 14)], -1)
    for values in (values_N8, values_N8[:, ::-1]):
        converted = int4_to_float16(bias_int4(jnp.array(values)))
        np.testing.assert_array_equal(bits(converted), bits(values.astype(np.float16)))
    native = jnp.array(values_N8).astype(jnp.int4)
    np.testing.assert_array_equal(
        np.asarray(bias_int4(native)), np.asarray(bias_int4(jnp.array(values_N8)))
    )


def test_the_papers_example_and_layouts():
    """3 in the mantissa of 1024 is 0x6403; the 4-bit layout has even elements first."""
    assert int(np.float16(1027).view(np.uint16)) == 0x6400 | 3
    assert hex(int(bias_int8(jnp.array([[-128, -127, -126, -125]]))[0])) == "0x3020100"
    registers = bias_int4(jnp.arange(8)[None] - 8)
    assert hex(int(registers[0])) == "0x75316420"
