# SPDX-License-Identifier: Apache-2.0
"""Parameters gathered by buckets inside of `shard_map`: values, raw gradients, collectives."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from switchx import tree
from switchx.partitioning.buckets import Slicing, sliced, whole
from switchx.partitioning.hlo_collectives import collectives
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules, param_spec

RULES = Rules()
SHAPES = {
    "w_in_DF": (8, 6),
    "w_out_FD": (6, 8),
    "experts": {"w_in_EDF": (2, 8, 3), "b_EF": (2, 3)},
    "scale_D": (8,),
    "bias_UH": (4, 2),
}
RNG = np.random.default_rng(0)
PARAMS = jax.tree.map(
    lambda shape: RNG.integers(-4, 5, shape).astype(np.float32),
    SHAPES,
    is_leaf=lambda leaf: isinstance(leaf, tuple),
)
SLICED = 4  # of the six: all that have a D
# Whole numbers, so that sums over devices are exact in any order: one weight a device.
WEIGHT_P = np.array([1, -2, 3, 5, -1, 4, 2, 7], np.float32)
ONE_BUCKET, ONE_EACH = 2**20, 1


def total_of(params, weight_P):
    """Half the squares of all elements, weighed by their numbers and by the device's weight."""
    total = sum(jnp.sum(leaf**2 * numbers_of(leaf)) for leaf in jax.tree.leaves(whole(params)))
    return total * weight_P[0] / 2


def numbers_of(leaf):
    return np.arange(leaf.size, dtype=np.float32).reshape(leaf.shape)


def mapped(function, spec: MeshSpec, bucket_bytes: int, out_specs):
    """`function(params, weight_P)` on every device of a mesh, on its slices and its weight."""
    mesh = spec.build()
    slicing = Slicing.on(mesh, RULES, bucket_bytes)
    specs = tree.map_named(lambda name, leaf: param_spec(RULES, mesh, name, leaf.shape), PARAMS)

    def local(params, weight_P):
        with sliced(slicing):
            return function(params, weight_P)

    rows = PartitionSpec(("data", "fsdp"))
    run = jax.shard_map(local, mesh=mesh, in_specs=(specs, rows), out_specs=out_specs)
    return jax.jit(lambda params: run(params, WEIGHT_P))


def gradients(spec: MeshSpec, bucket_bytes: int, function=total_of):
    """Jitted: the sum over devices and its raw gradients, taken outside."""

    def summed(params, weight_P):
        return jax.lax.psum(function(params, weight_P), ("data", "fsdp"))

    return jax.jit(jax.value_and_grad(mapped(summed, spec, bucket_bytes, PartitionSpec())))


@pytest.mark.parametrize("bucket_bytes", [ONE_EACH, 300, ONE_BUCKET])
@pytest.mark.parametrize("fsdp", [2, 8])
def test_every_device_sees_whole_parameters_and_gradients_are_summed(fsdp, bucket_bytes):
    spec = MeshSpec(fsdp=fsdp)

    def see(params, weight_P):
        return jax.tree.map(lambda leaf: leaf[None], whole(params))

    seen = mapped(see, spec, bucket_bytes, PartitionSpec(("data", "fsdp")))(PARAMS)
    _, grads = gradients(spec, bucket_bytes)(PARAMS)

    def check(param, grad, seen):
        np.testing.assert_array_equal(seen, np.broadcast_to(param, (8, *param.shape)))
        np.testing.assert_array_equal(grad, param * numbers_of(param) * WEIGHT_P.sum())

    jax.tree.map(check, PARAMS, grads, seen)


def kinds(spec: MeshSpec, bucket_bytes: int, function=total_of) -> dict[str, int]:
    """How many collectives of each kind there are, one-element ones left out."""
    compiled = gradients(spec, bucket_bytes, function).lower(PARAMS).compile()
    return Counter(each.kind for each in collectives(compiled.as_text()) if each.num_bytes > 4)


def test_collectives_are_as_many_as_buckets():
    # The gradients of the two that have no slices are summed together.
    alone = {"all-reduce": 1}
    assert kinds(MeshSpec(fsdp=8), ONE_BUCKET) == alone | {"all-gather": 1, "reduce-scatter": 1}
    each = {"all-gather": SLICED, "reduce-scatter": SLICED}
    assert kinds(MeshSpec(fsdp=8), ONE_EACH) == alone | each
    # Replicas add their scattered parts up: one all-reduce more a bucket.
    assert kinds(MeshSpec(fsdp=4), ONE_BUCKET)["all-gather"] == 1
    assert kinds(MeshSpec(fsdp=4), ONE_BUCKET)["all-reduce"] == 2


def test_what_is_recomputed_gathers_again():
    """In a loop, as scanned layers are; CPU's compiler merges gathers of straight code."""

    def total_of_layers(params, weight_P):
        def body(carry, _):
            return carry + jax.checkpoint(total_of)(params, weight_P * (1 + 0 * carry)), None

        return jax.lax.scan(body, 0 * weight_P[0], length=3)[0]

    again = kinds(MeshSpec(fsdp=8), ONE_BUCKET, total_of_layers)
    assert again == {"all-gather": 2, "reduce-scatter": 1, "all-reduce": 1}


def test_nothing_happens_outside_of_slices():
    assert whole(PARAMS) is PARAMS


def test_slices_are_read_off_the_rules():
    slicing = Slicing.on(MeshSpec(fsdp=4).build(), RULES, 100)
    assert (slicing.axes, slicing.replicas, slicing.num_parts) == (("fsdp",), ("data",), 4)
    assert slicing.sliced_axis("decoder/w_in_DF", (2, 6)) == 0
    assert slicing.sliced_axis("blocks/w_out_FD", (3, 6, 2)) == 2
    assert slicing.sliced_axis("experts/w_in_EDF", (2, 2, 3)) == 1
    assert slicing.sliced_axis("bias_UH", (4, 2)) is None
