# SPDX-License-Identifier: Apache-2.0
"""Integers and float8 to 16-bit floating point by their bits, where a conversion is slow.

Kim et al. 2022, Who Says Elephants Can't Run (arXiv:2211.10017), sections 3.4.1 to 3.4.3. In
float16 1024 is 0x6400, and between 1024 and 2048 neighbours differ by 1: 0x6400 | u is 1024 + u
for 0 <= u < 1024. bfloat16 has the same from 128, which is 0x4300, for 0 <= u < 128. A signed
integer of n bits with its highest bit flipped is u = q + 2^(n-1), so `bits ^ (0x6400 |
2^(n-1))` is 1024 + 2^(n-1) + q, and a subtraction of two numbers at once leaves q. All steps
are exact.

Only conversions from which compiled code was counted to gain, in the kernels that call them,
are here (experiments/magic_numbers). Elsewhere kernels convert by `astype`: to bfloat16 Mosaic
GPU has magic numbers of its own, and TPUs convert in fewer instructions.
"""

import jax.numpy as jnp
from jax import lax

# Of each type, the number from which on neighbours differ by 1, and its bits.
_FIRST = {
    jnp.dtype(jnp.float16): (1024, 0x6400),
    jnp.dtype(jnp.bfloat16): (128, 0x4300),
}


def int8_to_float16(q):
    """float16 of int8 values."""
    # Not by uint8: the compilers for GPUs then take each byte out of a register twice.
    return _signed(q.astype(jnp.int16) & jnp.int16(0xFF), 8, jnp.float16)


def nibbles_to_float(u, dtype):
    """Floating point of integers of 4 bits, two's complement.

    Args:
        u: any integers of 16 bits, from 0 to 15, such as the low half of a byte.
        dtype: float16 or bfloat16.
    """
    return _signed(u, 4, dtype)


def int4_to_float16(q):
    """float16 of `jnp.int4` values, by way of bfloat16, to which Mosaic GPU converts them.

    bfloat16 of 136 + q, 0x4308 + q, read as float16 is 2 + 2 (0x308 + q) / 1024, so 512 times
    that is 1800 + q.
    """
    sum_as_float16 = lax.bitcast_convert_type(
        q.astype(jnp.bfloat16) + jnp.bfloat16(136), jnp.float16
    )
    return sum_as_float16 * jnp.float16(512) - jnp.float16(1800)


def _signed(bits, width: int, dtype):
    """The low `width` bits, two's complement, with zeros above them, as `dtype`."""
    (first, first_bits), sign = _FIRST[jnp.dtype(dtype)], 1 << (width - 1)
    magic = bits ^ jnp.asarray(first_bits | sign, bits.dtype)
    return lax.bitcast_convert_type(magic, dtype) - jnp.asarray(first + sign, dtype)


def float8_to_float16(bits):
    """float8_e4m3fn, given as int8, as float16: exact, for the values of a `QTensor`.

    Both have the exponent before the mantissa; 2^8 makes up for the difference of their biases,
    7 and 15. Subnormal numbers become subnormal ones, and then normal.
    """
    bits = bits.astype(jnp.int16)
    bits = (bits & -(2**15)) | ((bits & 127) << 7)
    return lax.bitcast_convert_type(bits, jnp.float16) * 256
