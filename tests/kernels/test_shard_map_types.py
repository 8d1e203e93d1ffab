# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul import tpu
from pallas_kernels.shard_map_types import result_type
from tests.absent_devices import mesh_of

P = jax.sharding.PartitionSpec


# Of TPUs that are not there: enough to trace for.
TPU_MESH = mesh_of("TPU v5 lite", "tpu", {"expert": 2, "data": 2})


def test_outside_a_result_varies_over_nothing():
    found = result_type((3, 4), jnp.float32, jnp.ones(3))
    assert (found.shape, found.dtype) == ((3, 4), jnp.float32)
    assert found.manual_axis_type.varying == frozenset()


def test_result_varies_over_the_axes_of_all_operands():
    seen = []

    def look(a, b, c):
        seen.append(result_type((1,), jnp.float32, a, b, c).manual_axis_type.varying)
        return a

    specs = (P("expert"), P("data"), P())
    mapped = jax.shard_map(look, mesh=TPU_MESH, in_specs=specs, out_specs=P("expert"))
    jax.eval_shape(mapped, *[jax.ShapeDtypeStruct((2,), jnp.float32)] * 3)
    assert seen[-1] == {"expert", "data"}


@pytest.mark.parametrize("w_spec", [P("expert"), P()])
def test_kernels_trace_inside_shard_map(w_spec):
    x_RD = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    w_EDF = jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16)
    group_sizes_E = jax.ShapeDtypeStruct((4,), jnp.int32)

    def both(x_RD, w_EDF, group_sizes_E):
        y_RF = tpu.forward(x_RD, w_EDF, group_sizes_E)
        return y_RF, tpu.weight_gradient(x_RD, y_RF, group_sizes_E, out_dtype="bfloat16")

    mapped = jax.shard_map(
        both,
        mesh=TPU_MESH,
        in_specs=(P("expert"), w_spec, P("expert") if w_spec else P()),
        out_specs=P("expert"),
    )
    y_RF, dw_EDF = jax.eval_shape(mapped, x_RD, w_EDF, group_sizes_E)
    assert y_RF.shape == (64, 128)
    assert dw_EDF.shape == ((4 if w_spec else 8), 128, 128)
