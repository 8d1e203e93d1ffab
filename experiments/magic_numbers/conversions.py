# SPDX-License-Identifier: Apache-2.0
"""Ways to make 16-bit floating point of int8 and int4, and how each is put into a kernel.

Kim et al. 2022 (arXiv:2211.10017), sections 3.4.1 to 3.4.3. Three of them: the compiler's own
conversion, the paper's magic numbers in the 16-bit type, and the same idea in float32, whose
sums are then rounded to bfloat16 (exactly, as they are integers of 8 bits). All are exact.
Dims: N, K axes of a tile of weights as they lie in memory; H pairs of channels
"""

import contextlib
import functools
import importlib
from collections.abc import Callable
from unittest import mock

import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul import tpu_product
from pallas_kernels.quantization import magic_numbers

COMPILER = "the compiler's"
IN_16_BITS = "magic, 16 bits"
IN_32_BITS = "magic, 32 bits"


def of_type(dtype: str) -> tuple[str, ...]:
    """The ways to a type: float16 has one of magic numbers, the paper's."""
    return (COMPILER, IN_16_BITS) + (IN_32_BITS,) * (dtype == "bfloat16")


def in_16_bits(q, dtype):
    """Of int8 or `jnp.int4` values."""
    is_int4 = q.dtype == jnp.int4
    if dtype == jnp.float16:
        convert = magic_numbers.int4_to_float16 if is_int4 else magic_numbers.int8_to_float16
        return convert(q)
    if is_int4:
        u = q.astype(jnp.int8).astype(jnp.int16) & jnp.int16(15)
        return magic_numbers.nibbles_to_float(u, dtype)
    return int8_to_bfloat16(q)


def int8_to_bfloat16(q):
    """bfloat16 has 7 bits behind the first: the eighth, the sign, is subtracted as a number.

    0x4300 with the low 7 bits is 128 + those; with the sign alone it is 128, or 256.
    """
    bits = (q.astype(jnp.int16) & jnp.int16(0xFF)) | jnp.int16(0x4300)
    low, sign = bits & jnp.int16(0x437F), bits & jnp.int16(0x4380)
    low, sign = (lax.bitcast_convert_type(each, jnp.bfloat16) for each in (low, sign))
    return low - sign


def in_32_bits(q, dtype):
    """0x4B400000 is 1.5 * 2^23, from where neighbours differ by 1 in both directions."""
    bits = q.astype(jnp.int32) + jnp.int32(0x4B400000)
    sum_N = lax.bitcast_convert_type(bits, jnp.float32)
    return (sum_N - jnp.float32(1.5 * 2**23)).astype(dtype)


BY_NAME: dict[str, Callable] = {
    COMPILER: lambda q, dtype: q.astype(dtype),
    IN_16_BITS: in_16_bits,
    IN_32_BITS: in_32_bits,
}


def halves(pairs_NH, dtype, *, name: str):
    """The low and the high nibbles of bytes, as the Triton kernel takes them."""
    if name == IN_16_BITS:
        u_NH = pairs_NH.astype(jnp.uint16)
        parts = u_NH & jnp.uint16(15), u_NH >> jnp.uint16(4)
        return [magic_numbers.nibbles_to_float(each, dtype) for each in parts]
    pairs_NH = pairs_NH.astype(jnp.int32)
    parts = [(pairs_NH << (28 - 4 * i)) >> 28 for i in (0, 1)]
    return [BY_NAME[name](each, dtype) for each in parts]


@contextlib.contextmanager
def in_kernel(back_end: str, name: str):
    """Within it the kernel of a back end, `gpu`, `triton` or `tpu`, converts this way."""
    convert = BY_NAME[name]
    if back_end == "tpu":
        dot = tpu_product._dot

        def converted_first(plan, x_rd, w, *others):
            return dot(plan, x_rd, convert(w, x_rd.dtype), *others)

        with mock.patch.object(tpu_product, "_dot", converted_first):
            yield
        return
    module = importlib.import_module(f"pallas_kernels.quantized_grouped_matmul.{back_end}")
    with contextlib.ExitStack() as patches:
        patches.enter_context(
            mock.patch.object(module, "_converted", lambda q, dtype, *_: convert(q, dtype))
        )
        if back_end == "triton":
            patches.enter_context(
                mock.patch.object(module, "_halves", functools.partial(halves, name=name))
            )
        yield
