# SPDX-License-Identifier: Apache-2.0
"""Parameters of which each device has a slice, gathered in buckets just before they are used.

ZeRO stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054) with the fused communication of Shen
et al. 2022 (SE-MoE, arXiv:2205.10034), section 2.3, Figure 2: the slices of many arrays lie in
few long vectors, the buckets, and an index records what lies where. A bucket is one all-gather,
and in the backward pass one reduce-scatter. `whole` runs inside of `jax.shard_map`;
differentiate outside of it. Dims: P devices that have slices, X elements of one device's bucket
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from switchx import tree
from switchx.partitioning.rules import MeshAxes, Rules, param_dims, param_table


@dataclasses.dataclass(frozen=True)
class Slice:
    """The place of one device's slice of one array.

    Attributes:
        name: name of the array.
        shape: shape of the slice.
        axis: dimension along which devices have different slices.
        dtype: dtype of the array and of its bucket.
        bucket, offset: number of the bucket, and index of the slice's first element in it.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    dtype: str
    bucket: int
    offset: int

    @property
    def end(self) -> int:
        """The element of the bucket after the slice's last one."""
        return self.offset + math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class SliceIndex:
    """The slices of a group of arrays, by bucket.

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
        """Fills buckets in order; a slice that does not fit opens a new one.

        Args:
            slices: name, shape of the slice, sliced axis and dtype of each array. Arrays of
                different dtypes are in different buckets.
            bucket_bytes: most bytes of a bucket, over all devices together; a larger array has
                a bucket of its own.

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
        """Packs one device's slices into its buckets, `[X]` each."""
        return [
            jnp.concatenate([slices[each.name].reshape(-1) for each in bucket])
            for bucket in self.buckets
        ]

    def cut(self, arrays: dict[str, jax.Array]) -> list[jax.Array]:
        """Packs whole arrays into the buckets of all devices, `[P, X]` each."""

        def slices(each: Slice):
            P, axis = self.num_parts, each.axis
            shape = (*each.shape[:axis], P, *each.shape[axis:])
            return jnp.moveaxis(arrays[each.name].reshape(shape), axis, 0).reshape(P, -1)

        return [
            jnp.concatenate([slices(each) for each in bucket], axis=1)
            for bucket in self.buckets
        ]

    def join(self, buckets: list[jax.Array]) -> dict[str, jax.Array]:
        """Whole arrays from the buckets of all devices: the inverse of `cut`."""

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


@dataclasses.dataclass(frozen=True)
class Slicing:
    """The slicing of parameters, and the size of the buckets that a collective moves.

    Attributes:
        rules: rules of the dimensions that are split.
        axes: mesh axes whose devices have different slices.
        replicas: axes whose devices have the same slices and other tokens.
        sizes: number of devices along each axis of the mesh.
        bucket_bytes: most bytes of a bucket once it is gathered.
    """

    rules: Rules
    axes: MeshAxes
    replicas: MeshAxes
    sizes: tuple[tuple[str, int], ...]
    bucket_bytes: int

    @classmethod
    def on(cls, mesh, rules: Rules, bucket_bytes: int) -> "Slicing":
        """Reads `rules` for a mesh, or for anything with a `shape` like one's."""
        axes = rules.axes("D", mesh, table="params")
        batch = rules.axes("B", mesh, table="activations")
        replicas = tuple(axis for axis in batch if axis not in axes)
        return cls(rules, axes, replicas, tuple(mesh.shape.items()), bucket_bytes)

    @property
    def shape(self) -> dict[str, int]:
        """Number of devices along each axis, like a mesh's `shape`."""
        return dict(self.sizes)

    @property
    def num_parts(self) -> int:
        """The number of slices of an array."""
        return math.prod(self.shape[axis] for axis in self.axes)

    @property
    def varying(self) -> MeshAxes:
        """All axes whose devices have different tokens."""
        return self.replicas + self.axes

    def sliced_axis(self, name: str, shape) -> int | None:
        """The dimension of a parameter that devices have slices of; None if it is whole."""
        dims = param_dims(name, shape)
        for axis, letter in enumerate(dims):
            if self.rules.axes(letter, self, table=param_table(dims)):
                return axis
        return None

    def index(self, slices: dict) -> SliceIndex:
        """The places of one device's slices (arrays or shape structs) in its buckets."""
        found = []
        for name, leaf in slices.items():
            axis = self.sliced_axis(name, leaf.shape)
            if axis is not None:
                found.append((name, leaf.shape, axis, str(leaf.dtype)))
        return SliceIndex.of(found, num_parts=self.num_parts, bucket_bytes=self.bucket_bytes)


# A user context, so that a program that was traced with other slices is traced again.
_slicing = jax.make_user_context(None)


@contextlib.contextmanager
def sliced(slicing: Slicing):
    """Makes parameters this device's slices inside of the block, which `whole` gathers."""
    with _slicing(slicing):
        yield


def whole(params):
    """Gathers the parameters of a tree or a module; outside of `sliced`, returns its argument.

    Call it inside of what is recomputed in the backward pass (`jax.checkpoint`): whole
    parameters are then freed after use and gathered again. Gradients come back as slices,
    summed over all devices; those of parameters without slices are summed in one all-reduce.
    """
    slicing = _slicing.value
    if slicing is None:
        return params
    named = {_name(name): leaf for name, leaf in tree.named_leaves(params).items()}
    index = slicing.index(named)
    gathered = [
        jax.lax.all_gather(_vary(bucket, slicing.replicas), slicing.axes)
        for bucket in index.flatten(named)
    ]
    arrays = _join(index, gathered)
    rest = {name: leaf for name, leaf in named.items() if name not in arrays}
    arrays |= _spread(slicing.varying, rest) if rest else {}
    return tree.map_named(lambda name, _: arrays[_name(name)], params)


def _name(name: str) -> str:
    """A parameter's name in a module, where a leaf is the `value` of its parameter."""
    return name.removesuffix("/value")


def _vary(array, axes: MeshAxes):
    """The array, typed as varying along `axes`: backward, its gradient is summed over them."""
    return jax.lax.pcast(array, axes, to="varying") if axes else array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _join(index: SliceIndex, buckets):
    """`index.join`, whose own transpose would add up one padded bucket per array."""
    return index.join(buckets)


_join.defvjp(
    lambda index, buckets: (index.join(buckets), None),
    lambda index, _, gradients: (index.cut(gradients),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(axes: MeshAxes, arrays):
    """The arrays, typed as varying along `axes`."""
    return {name: _vary(array, axes) for name, array in arrays.items()}


def _sum_together(axes: MeshAxes, _, gradients):
    """Sums gradients over devices, all of one dtype in one all-reduce."""
    summed = {}
    for dtype in dict.fromkeys(leaf.dtype for leaf in gradients.values()):
        same = {name: leaf for name, leaf in gradients.items() if leaf.dtype == dtype}
        vector, unravel = ravel_pytree(same)
        summed |= unravel(jax.lax.psum(vector, axes))
    return (summed,)


_spread.defvjp(lambda axes, arrays: (_spread(axes, arrays), None), _sum_together)
