# SPDX-License-Identifier: Apache-2.0
"""Slices of many arrays in few long vectors, by a recorded index of what lies where.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 2.3, Figure 2. Dims: P devices that have
slices, X elements of one device in a bucket
"""

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Slice:
    """Where one device's slice of one array is.

    Attributes:
        name: of the array.
        shape: of the slice.
        axis: dimension along which devices have different slices.
        dtype: of the array, and of its bucket.
        bucket, offset: which bucket, and its first element there.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    dtype: str
    bucket: int
    offset: int

    @property
    def size(self) -> int:
        """Elements of the slice."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclasses.dataclass(frozen=True)
class SliceIndex:
    """All slices of a group of arrays; every bucket is sent at once.

    Attributes:
        num_parts: P.
    """

    slices: tuple[Slice, ...]
    num_parts: int

    @classmethod
    def of(
        cls,
        slices: Iterable[tuple[str, tuple[int, ...], int, str]],
        *,
        num_parts: int,
        bucket_bytes: int,
    ) -> "SliceIndex":
        """Fills buckets in order: the next slice opens a new one where it does not fit.

        Args:
            slices: name, shape of the slice, sliced axis and dtype of each array. Arrays of
                different dtypes are in different buckets.
            bucket_bytes: most bytes of a bucket, of all devices together; an array that is
                larger has a bucket for itself.

        Raises:
            ValueError: `bucket_bytes` is not above 0.
        """
        require_bucket_bytes(bucket_bytes)
        placed, num_buckets = [], 0
        latest: dict[str, tuple[int, int]] = {}  # by dtype: its last bucket, elements in it
        for name, shape, axis, dtype in slices:
            bucket, offset = latest.get(dtype, (-1, 0))
            end = offset + math.prod(shape)
            if bucket < 0 or end * num_parts * jnp.dtype(dtype).itemsize > bucket_bytes:
                bucket, offset, num_buckets = num_buckets, 0, num_buckets + 1
            placed.append(Slice(name, tuple(shape), axis, dtype, bucket, offset))
            latest[dtype] = bucket, placed[-1].end
        return cls(tuple(placed), num_parts)

    @property
    def num_buckets(self) -> int:
        return len({each.bucket for each in self.slices})

    @property
    def buckets(self) -> list[list[Slice]]:
        """The slices of each bucket, in order."""
        return [
            [each for each in self.slices if each.bucket == bucket]
            for bucket in range(self.num_buckets)
        ]

    def flatten(self, slices: dict[str, jax.Array]) -> list[jax.Array]:
        """One device's slices -> its buckets, `[X]` each."""
        return [
            jnp.concatenate([slices[each.name].reshape(-1) for each in bucket])
            for bucket in self.buckets
        ]

    def unflatten(self, buckets: list[jax.Array]) -> dict[str, jax.Array]:
        """The inverse of `flatten`."""
        return {
            each.name: buckets[each.bucket][each.offset : each.end].reshape(each.shape)
            for each in self.slices
        }

    def cut(self, arrays: dict[str, jax.Array]) -> list[jax.Array]:
        """Whole arrays -> the buckets of all devices, `[P, X]` each."""

        def slices(each: Slice):
            P, axis = self.num_parts, each.axis
            shape = (*each.shape[:axis], P, *each.shape[axis:])
            return jnp.moveaxis(arrays[each.name].reshape(shape), axis, 0).reshape(P, -1)

        return [
            jnp.concatenate([slices(each) for each in bucket], axis=1)
            for bucket in self.buckets
        ]

    def join(self, buckets: list[jax.Array]) -> dict[str, jax.Array]:
        """The inverse of `cut`: whole arrays from the buckets of all devices."""

        def whole(each: Slice):
            slices = buckets[each.bucket][:, each.offset : each.end]
            slices = jnp.moveaxis(slices.reshape(self.num_parts, *each.shape), 0, each.axis)
            sizes = list(each.shape)
            sizes[each.axis] *= self.num_parts
            return slices.reshape(sizes)

        return {each.name: whole(each) for each in self.slices}


def require_bucket_bytes(bucket_bytes: int) -> None:
    """Raises ValueError unless a bucket can hold something."""
    if bucket_bytes < 1:
        raise ValueError(
            f"bucket_bytes={bucket_bytes}; use a whole number of bytes above 0, as 2**28, or "
            "None to leave gathering to the compiler"
        )
