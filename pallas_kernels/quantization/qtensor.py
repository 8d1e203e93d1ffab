# SPDX-License-Identifier: Apache-2.0
"""QTensor: quantized expert matrices, and the one layout that they have in memory.

Kim et al. 2022, "Who Says Elephants Can't Run" (arXiv:2211.10017), section 3.4: symmetric,
range-based, one scale for each output feature of each expert. Weights that others quantized
may have zero points (`packed_int32.py`). The layout is output-major: in training it is
[E, D, F], here [E, F, D], so that what is summed over lies together.
Dims: E experts, D inputs, F outputs, G groups of D with a scale
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

# Floating point of 8 bits: 4 of exponent, 3 of mantissa, no infinity; the largest is 448.
FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
# Why a kernel without zero points does not take them.
ZEROS_OF_8_BITS = (
    "w has 8 bits and zero points, which this kernel does not subtract; expected 4 bits, or "
    "zeros_EFG=None: use implementation='reference', or quantize(dequantize(w), 8)"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """`w_edf = scales[e, f, g] * (values[e, f, d] - zeros[e, f, g])`, `g = d // group_size`.

    4-bit values have two forms. Files and hosts keep packed values, two in a uint8, the one of
    even d in the low nibble: NumPy's int4 takes a whole byte. Kernels read native `jnp.int4`
    values, which XLA packs by itself on devices. Hopper's kernel reads integers of 4 and of 8
    bits fastest in the order of its registers (`fragments`). Changing from one form to another
    costs copies (on TPU about 20 bytes for each value), so it is done once, when weights are
    loaded.

    8-bit values are int8 or float8_e4m3fn. The float8 values have no NaN and no negative zero:
    a TPU v5 or v6 reads them as another type of 8 bits (e4m3b11fnuz), in which these are 480
    and NaN. A NaN is in the scale instead.

    Attributes:
        values: int8 or float8_e4m3fn `[E, F, D]`, packed uint8 `[E, F, D // 2]` or int4
            `[E, F, D]`.
        scales_EFG: float32; G = 1, or D / group_size.
        bits: 8 or 4.
        group_size: number of channels of D that share a scale; None if all of them do.
        zeros_EFG: zero points, float32; None if all are 0, as from `quantize`.
        is_fragments: whether native values are in the order of `fragments`.
        layout_version: version of the layout of `values`; stays with the arrays.
    """

    LAYOUT_VERSION: ClassVar[int] = 1

    values: Any
    scales_EFG: Any
    bits: int = dataclasses.field(metadata={"static": True})
    group_size: int | None = dataclasses.field(default=None, metadata={"static": True})
    layout_version: int = dataclasses.field(default=LAYOUT_VERSION, metadata={"static": True})
    zeros_EFG: Any = None
    is_fragments: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, D, F), the shape of the matrices in a product."""
        E, F, last = self.values.shape
        return E, 2 * last if self.is_packed else last, F

    @property
    def is_packed(self) -> bool:
        """Whether two 4-bit values share a uint8."""
        return self.values.dtype == jnp.uint8

    @property
    def is_float8(self) -> bool:
        return self.values.dtype == FLOAT8

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and zero points on a device, where an int4 takes half a byte.

        `jax.Array.nbytes` counts a whole one for `jnp.int4`.
        """
        num_scales = math.prod(self.scales_EFG.shape)
        return self.values_nbytes + 4 * num_scales * (1 if self.zeros_EFG is None else 2)

    @property
    def values_nbytes(self) -> int:
        return math.prod(self.shape) * self.bits // 8

    def native(self) -> Self:
        """A copy with the values that kernels read: 8-bit values, or `jnp.int4`.

        Arrays are converted once: the tensor keeps what it returned, and as long as it exists,
        both take memory. Traced values are converted whenever their program runs.
        """
        self.check()
        if self.is_fragments:
            return _in_order(self)
        if not self.is_packed:
            return self
        return self._kept("_native", lambda: _native(self))

    def _kept(self, name: str, make: Callable[[], Self]) -> Self:
        """The result of `make`, made once; traced results are made anew."""
        if (kept := self.__dict__.get(name)) is not None:
            return kept
        made = make()
        if not isinstance(made.values, jax.core.Tracer):
            object.__setattr__(self, name, made)  # no field: trees do not have it
        return made

    def fragments(self) -> Self:
        """`native` with integers in the order in which Hopper's kernel reads them fastest.

        With n = 4 for 4 bits and 2 for 8: of 8 n channels, number 8 i + 2 t + h stands at
        2 n t + n h + i. So the 32 bits at t are what a thread gives to n products of 16
        channels, and the two for one instruction are 16 bits apart (Frantar et al. 2024,
        MARLIN, arXiv:2408.11743). Weights that the kernel reads only in native order stay
        `native`: float8, those with zero points, with scales of groups that are not multiples
        of 64, and those where 8 n does not divide D.
        """
        self.check()
        if self.is_fragments:
            return self
        is_other = self.is_float8 or self.zeros_EFG is not None or (self.group_size or 64) % 64
        if is_other or self.shape[1] % (128 // self.bits):
            return self.native()
        q = _native(self) if self.is_packed else self  # not kept beside the fragments
        return dataclasses.replace(_reordered(q, (3, 5)), is_fragments=True)

    def without_zeros(self) -> Self:
        """`native` with zero points subtracted from the values, which are then int8.

        It is for kernels without zero points. It is exact, since differences of 4-bit numbers
        are -15 to 15, and takes twice the bytes. Arrays are converted once, as by `native`.

        Raises:
            ValueError: 8-bit values, whose differences may not fit 8 bits; or zero points that
                are not integers of -16 to 16. (Under `jax.jit` they are not known.)
        """
        if self.zeros_EFG is None:
            return self.native()
        if self.bits == 8:
            raise ValueError(ZEROS_OF_8_BITS)
        return self._kept("_without_zeros", self._subtracted)

    def _subtracted(self) -> Self:
        if not isinstance(self.zeros_EFG, jax.core.Tracer):
            zeros_EFG = np.asarray(self.zeros_EFG)
            is_known_EFG = (np.abs(zeros_EFG) <= 16) & (zeros_EFG == np.round(zeros_EFG))
            if not is_known_EFG.all():
                e, f, g = np.argwhere(~is_known_EFG)[0]
                raise ValueError(
                    f"zeros_EFG[{e}, {f}, {g}]={zeros_EFG[e, f, g]}, which this kernel cannot "
                    "subtract from integers; expected integers of -16 to 16: use "
                    "implementation='reference', or quantize(dequantize(w), 8)"
                )
        native = self.native()
        E, F, D = native.values.shape
        zeros_EFG1 = jnp.asarray(self.zeros_EFG, jnp.int8)[..., None]
        values_EFGC = native.values.astype(jnp.int8).reshape(*zeros_EFG1.shape[:3], -1)
        values_EFD = (values_EFGC - zeros_EFG1).reshape(E, F, D)
        return dataclasses.replace(native, values=values_EFD, bits=8, zeros_EFG=None)

    def packed(self) -> Self:
        """A copy with values as files store them: 8-bit values, or uint8 of two 4-bit ones."""
        self.check()
        q = _in_order(self) if self.is_fragments else self
        if q.bits == 8 or q.is_packed:
            return q
        return dataclasses.replace(q, values=pack_int4(q.values))

    def check(self) -> None:
        """Raises ValueError if the fields do not describe one quantized tensor.

        Not in `__post_init__`: JAX makes QTensors of whatever its transformations map over.
        """
        if self.layout_version != self.LAYOUT_VERSION:
            raise ValueError(
                f"QTensor has layout version {self.layout_version}; this code reads version "
                f"{self.LAYOUT_VERSION}: quantize the weights again with this version"
            )
        dtypes = {8: (jnp.int8, FLOAT8), 4: (jnp.uint8, jnp.int4)}.get(self.bits)
        if dtypes is None:
            raise ValueError(f"QTensor has bits={self.bits}; expected 8 or 4: use quantize()")
        if self.values.dtype not in dtypes:
            names = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
            raise ValueError(
                f"QTensor with bits={self.bits} has values of {self.values.dtype}; expected "
                f"{names}"
            )
        if self.values.ndim != 3 or self.scales_EFG.ndim != 3:
            raise ValueError(
                f"QTensor has values {self.values.shape} and scales {self.scales_EFG.shape}; "
                "expected [E, F, D] (D // 2 where packed) and [E, F, G]"
            )
        E, D, F = self.shape
        G = 1 if self.group_size is None else D // self.group_size
        if self.scales_EFG.shape != (E, F, G) or (self.group_size or D) * G != D:
            raise ValueError(
                f"QTensor has values for E={E}, D={D}, F={F}, group_size={self.group_size} "
                f"and scales {self.scales_EFG.shape}; expected scales {(E, F, G)}"
            )
        if self.scales_EFG.dtype != jnp.float32:
            raise ValueError(
                f"QTensor has scales of {self.scales_EFG.dtype}; expected float32: use astype"
            )
        zeros, channels = self.zeros_EFG, 128 // self.bits
        is_other = self.is_packed or self.is_float8 or zeros is not None
        if self.is_fragments and (is_other or D % channels):
            raise ValueError(
                f"QTensor has is_fragments with {self.values.dtype} values, D={D}"
                f"{'' if zeros is None else ' and zero points'}; expected int4 or int8, a "
                f"multiple of {channels} (also of a device's part) and no zero points: use "
                "native()"
            )
        if zeros is not None and (zeros.shape, zeros.dtype) != ((E, F, G), jnp.float32):
            raise ValueError(
                f"QTensor has zero points {zeros.dtype}{list(zeros.shape)}; expected float32"
                f"{[E, F, G]}, one for each scale, or None"
            )
        if zeros is not None and self.is_float8:
            raise ValueError(
                "QTensor has float8_e4m3fn values and zero points; expected integers with zero "
                "points: subtract them first, quantize(dequantize(w), 8, dtype='float8_e4m3fn')"
            )


def _native(q: QTensor) -> QTensor:
    values = jax.lax.bitcast_convert_type(q.values, jnp.int4)
    return dataclasses.replace(q, values=values.reshape(*q.values.shape[:-1], -1))


def _in_order(q: QTensor) -> QTensor:
    return dataclasses.replace(_reordered(q, (5, 3)), is_fragments=False)


def _reordered(q: QTensor, moved: tuple[int, int]) -> QTensor:
    """Moves the axis of n products of each 8 n channels; XLA moves whole bytes."""
    (E, F, D), n = q.values.shape, 32 // (2 * q.bits)
    parts = (n, 4, 2) if moved[0] == 3 else (4, 2, n)
    values = q.values.astype(jnp.int8).reshape(E, F, D // (8 * n), *parts)
    values = jnp.moveaxis(values, *moved).reshape(E, F, D).astype(q.values.dtype)
    return dataclasses.replace(q, values=values)


def pack_int4(values_EFD):
    """uint8 `[E, F, D // 2]` of integers -8..7: two in a byte, even d in the low nibble."""
    nibbles = values_EFD.astype(jnp.int8).astype(jnp.uint8) & 0xF
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)
