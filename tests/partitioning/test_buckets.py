# SPDX-License-Identifier: Apache-2.0
"""Slices in buckets: nothing overlaps, nothing is lost, and whole arrays come back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from switchx.partitioning.buckets import SliceIndex
from tests.data.refusals import refused

DTYPES = ("float32", "bfloat16")
PARTS = st.integers(1, 4)
ARRAYS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 4), min_size=1, max_size=3),
        st.integers(0, 2),
        st.sampled_from(DTYPES),
    ),
    min_size=1,
    max_size=8,
)


def index_of(arrays, num_parts, bucket_bytes) -> SliceIndex:
    slices = [
        (f"w_{i}", tuple(shape), axis % len(shape), dtype)
        for i, (shape, axis, dtype) in enumerate(arrays)
    ]
    return SliceIndex.of(slices, num_parts=num_parts, bucket_bytes=bucket_bytes)


def numbers(index: SliceIndex, num_parts: int) -> dict:
    """Whole arrays in which every element is another one."""
    arrays = {}
    for i, each in enumerate(index.slices):
        shape = list(each.shape)
        shape[each.axis] *= num_parts
        arrays[each.name] = jnp.arange(np.prod(shape), dtype=each.dtype).reshape(shape) + i
    return arrays


@given(ARRAYS, PARTS, st.integers(1, 2000))
@settings(deadline=None)
def test_every_slice_has_its_place_and_buckets_are_no_larger_than_asked(
    arrays, num_parts, bucket_bytes
):
    index = index_of(arrays, num_parts, bucket_bytes)
    assert [each.name for each in index.slices] == [f"w_{i}" for i in range(len(arrays))]
    assert sum(map(len, index.buckets)) == len(arrays)
    for bucket in index.buckets:
        assert len({each.dtype for each in bucket}) == 1
        ends = [0] + [each.end for each in bucket]
        assert [each.offset for each in bucket] == ends[:-1]
        num_bytes = ends[-1] * num_parts * jnp.dtype(bucket[0].dtype).itemsize
        assert num_bytes <= bucket_bytes or len(bucket) == 1


@given(ARRAYS, PARTS, st.integers(1, 2000))
@settings(max_examples=20, deadline=None)
def test_whole_arrays_come_back_from_the_slices_of_all_devices(arrays, num_parts, bucket_bytes):
    index = index_of(arrays, num_parts, bucket_bytes)
    whole = numbers(index, num_parts)
    parts = {
        each.name: np.split(np.asarray(whole[each.name]), num_parts, each.axis)
        for each in index.slices
    }
    sent = [
        index.flatten({name: slices[p] for name, slices in parts.items()})
        for p in range(num_parts)
    ]
    gathered = [jnp.stack(bucket) for bucket in zip(*sent, strict=True)]
    for got, want in ((index.join(gathered), whole), (index.join(index.cut(whole)), whole)):
        assert got.keys() == want.keys()
        for name in want:
            assert got[name].dtype == want[name].dtype
            np.testing.assert_array_equal(got[name], want[name])
    for p in range(num_parts):
        for name, array in index.unflatten(sent[p]).items():
            np.testing.assert_array_equal(array, parts[name][p])


def test_one_bucket_for_all_or_one_for_each():
    arrays = [((4, 2), 0, "float32")] * 5
    assert index_of(arrays, 2, 2**20).num_buckets == 1
    assert index_of(arrays, 2, 1).num_buckets == 5
    assert index_of(arrays, 2, 2 * 64).num_buckets == 3


def test_an_index_is_a_constant_of_a_program():
    index = index_of([((4,), 0, "float32")], 2, 8)
    assert hash(index) == hash(index_of([((4,), 0, "float32")], 2, 8))
    jitted = jax.jit(lambda index, x: index.join([x]), static_argnums=0)
    np.testing.assert_array_equal(jitted(index, jnp.arange(8.0).reshape(2, 4))["w_0"], range(8))


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_holds_something(bucket_bytes):
    with refused(
        f"bucket_bytes={bucket_bytes}; use a whole number of bytes above 0, as 2**28, or None "
        "to leave gathering to the compiler"
    ):
        index_of([((4,), 0, "float32")], 2, bucket_bytes)
