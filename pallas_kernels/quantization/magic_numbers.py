# SPDX-License-Identifier: Apache-2.0
"""Integers to float16 by bits instead of a conversion: the number 0x6400; and float8.

Kim et al. 2022 (arXiv:2211.10017), sections 3.4.1 to 3.4.3. In float16 1024 is 0x6400, and
between 1024 and 2048 neighbours differ by 1: 0x6400 | u is 1024 + u for 0 <= u < 1024. So
weights are stored unsigned (8 bits: plus 128; 4 bits: plus 8), put below 0x64, and 1024 and
the offset are subtracted: exact, for two numbers of a 32-bit register at a time. Hardware
kernels do the same with their own instructions; this is what they are held to.
Dims: N registers of 32 bits, K parts of a register
"""

import jax
import jax.numpy as jnp

ONE_THOUSAND_TWENTY_FOUR = 0x6400
INT8_OFFSET, INT4_OFFSET = 128, 8

# Element of the paper's 4-bit layout in each nibble, low to high: a shift by 4 i leaves
# elements 2 i and 2 i + 1 in the low nibbles of the two halves of a register.
INT4_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def bias_int8(values_N4):
    """uint32 `[N]`: four int8 plus 128 in each, the first in the lowest byte."""
    biased_N4 = (values_N4.astype(jnp.int32) + INT8_OFFSET).astype(jnp.uint32)
    return _joined(biased_N4, 8)


def int8_to_float16(registers_N):
    """float16 `[N, 4]`: the int8 that `bias_int8` took (section 3.4.2)."""
    pairs = []
    for i in (0, 2):
        # The bytes i and i + 1, each in a half of a register: the `prmt` instruction.
        low_N = (registers_N >> (8 * i)) & 0xFF
        high_N = (registers_N >> (8 * (i + 1))) & 0xFF
        pairs.append(_halves(low_N | (high_N << 16), INT8_OFFSET))
    return jnp.concatenate(pairs, axis=-1)


def bias_int4(values_N8):
    """uint32 `[N]`: eight int4 plus 8 in each, in `INT4_ORDER` (section 3.4.3)."""
    biased_N8 = (values_N8.astype(jnp.int32) + INT4_OFFSET).astype(jnp.uint32)
    return _joined(biased_N8[:, jnp.array(INT4_ORDER)], 4)


def int4_to_float16(registers_N):
    """float16 `[N, 8]`: the int4 that `bias_int4` took (section 3.4.3)."""
    pairs = [_halves((registers_N >> (4 * i)) & 0x000F000F, INT4_OFFSET) for i in range(4)]
    return jnp.concatenate(pairs, axis=-1)


def _joined(parts_NK, bits: int):
    registers_N = jnp.zeros(parts_NK.shape[0], jnp.uint32)
    for i in range(parts_NK.shape[1]):
        registers_N |= parts_NK[:, i] << (bits * i)
    return registers_N


def _halves(registers_N, offset: int):
    """float16 `[N, 2]` of the two halves, each an unsigned integer below 1024."""
    magic_N = registers_N | (ONE_THOUSAND_TWENTY_FOUR << 16 | ONE_THOUSAND_TWENTY_FOUR)
    halves_N2 = jnp.stack([magic_N & 0xFFFF, magic_N >> 16], axis=-1).astype(jnp.uint16)
    plus_1024_N2 = jax.lax.bitcast_convert_type(halves_N2, jnp.float16)
    return plus_1024_N2 - jnp.float16(1024 + offset)


def float8_to_float16(bits):
    """float8_e4m3fn, given as int8, as float16: exact, for the values of a `QTensor`.

    Both have the exponent before the mantissa; 2^8 is what lies between their biases of 7 and
    15. Subnormal numbers become subnormal ones, and then normal.
    """
    bits = bits.astype(jnp.int16)
    bits = (bits & -(2**15)) | ((bits & 127) << 7)
    return jax.lax.bitcast_convert_type(bits, jnp.float16) * 256
