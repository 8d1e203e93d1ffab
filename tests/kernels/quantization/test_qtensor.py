# SPDX-License-Identifier: Apache-2.0
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantization.qtensor import QTensor, pack_int4


def int4_tensor(E=2, D=6, F=3, group_size=None) -> QTensor:
    values_EFD = np.random.default_rng(0).integers(-8, 8, (E, F, D)).astype(np.int8)
    G = 1 if group_size is None else D // group_size
    return QTensor(
        pack_int4(jnp.array(values_EFD)), jnp.ones((E, F, G)), bits=4, group_size=group_size
    )


def test_even_elements_lie_in_low_nibbles():
    packed = pack_int4(jnp.array([[[1, 2, -1, -8]]], jnp.int8))
    assert np.asarray(packed).tolist() == [[[0x21, 0x8F]]]


def test_native_and_packed_are_each_others_inverse():
    every_pair = np.stack(np.meshgrid(np.arange(-8, 8), np.arange(-8, 8)), -1).reshape(1, 1, -1)
    q = QTensor(pack_int4(jnp.array(every_pair)), jnp.ones((1, 1, 1)), bits=4)
    native = q.native()
    assert native.values.dtype == jnp.int4
    assert native.shape == q.shape == (1, 512, 1)
    np.testing.assert_array_equal(np.asarray(native.values.astype(jnp.int8)), every_pair)
    np.testing.assert_array_equal(np.asarray(native.packed().values), np.asarray(q.values))


def test_bytes_are_those_of_a_device():
    q = int4_tensor(E=2, D=8, F=16)
    assert q.values_nbytes == q.native().values_nbytes == 2 * 8 * 16 // 2
    assert q.nbytes == q.native().nbytes == 2 * 8 * 16 // 2 + 2 * 16 * 4
    # XLA holds a native int4 in half a byte, whatever `.nbytes` of the array says.
    compiled = jax.jit(lambda q: q.values.astype(jnp.int8)).lower(q.native()).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == q.values_nbytes


def test_a_pytree_keeps_its_static_fields():
    q = int4_tensor(group_size=2)
    mapped = jax.tree.map(lambda array: array[:1], q)
    assert mapped.shape == (1, 6, 3)
    assert (mapped.bits, mapped.group_size, mapped.layout_version) == (4, 2, 1)
    assert jax.jit(lambda q: q)(q).shape == q.shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout_version": 2}, "layout version 2; this code reads version 1: quantize"),
        ({"bits": 3}, "bits=3; use 8 or 4"),
        ({"bits": 8}, "bits=8 has values of uint8; expected int8"),
        ({"scales_EFG": jnp.ones((2, 3))}, r"expected \[E, F, D\]"),
        ({"scales_EFG": jnp.ones((2, 3, 2))}, r"expected scales \(2, 3, 1\)"),
        ({"group_size": 2}, r"expected scales \(2, 3, 3\)"),
        ({"group_size": 4}, "group_size=4"),
        ({"scales_EFG": jnp.ones((2, 3, 1), jnp.bfloat16)}, "scales of bfloat16"),
    ],
)
@pytest.mark.parametrize("consumer", ["native", "packed"])
def test_what_does_not_fit_is_refused(changes, message, consumer):
    q = dataclasses.replace(int4_tensor(), **changes)
    with pytest.raises(ValueError, match=message):
        getattr(q, consumer)()
