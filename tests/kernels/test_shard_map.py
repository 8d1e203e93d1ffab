# SPDX-License-Identifier: Apache-2.0
"""Every product inside `jax.shard_map`: lowered for TPU and GPU, and raw gradients by loops.

Dims: R rows, D inputs, F outputs, E experts, G groups of channels with a scale
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import QTensor, grouped_matmul, quantized_grouped_matmul
from tests.absent_devices import mesh_of
from tests.cases import slow_unless
from tests.kernels import loops

P = PartitionSpec
BOTH = ("expert", "data")
DEVICES = {
    "H200": ("NVIDIA H200", "gpu"),
    "A100": ("NVIDIA A100-SXM4-80GB", "gpu"),
    "v5e": ("TPU v5 lite", "tpu"),
}
KERNEL = {"H200": "mosaic_gpu", "A100": "__gpu\\$xla.gpu.triton", "v5e": "tpu_custom_call"}
# Rows (with the sizes of their groups) and weights: (over both axes, over one), ...
PLACES = {
    "weights split": (P(BOTH), P("expert")),
    "weights replicated": (P(BOTH), P()),
    "rows replicated": (P(), P("expert")),
}


def absent_mesh(device: str):
    return mesh_of(*DEVICES[device], {"expert": 2, "data": 2})


def number_of_parts(spec: PartitionSpec) -> int:
    """How many parts a first dimension is cut into over axes of two devices each."""
    [names] = spec or [()]
    return 2 ** len([names] if isinstance(names, str) else names)


def mapped(function, mesh, rows: PartitionSpec, weights: PartitionSpec):
    """`function(x, w, sizes)` on every device; the sizes are of whatever is split further."""
    sizes = rows or weights
    # The rows that a device returns are as different as its operands are.
    return jax.shard_map(function, mesh=mesh, in_specs=(rows, weights, sizes), out_specs=sizes)


def lowered(function, device, mesh, *operands_and_specs) -> str:
    structs = [
        jax.tree.map(
            lambda a, spec=spec: jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=NamedSharding(mesh, spec)
            ),
            operand,
        )
        for operand, spec in operands_and_specs
    ]
    traced = jax.jit(function).trace(*structs)
    platform = {"gpu": "cuda", "tpu": "tpu"}[DEVICES[device][1]]
    return traced.lower(lowering_platforms=(platform,)).as_text()


def operands_of(rows, weights, dtype="bfloat16", R=64, D=128, F=128, E=4):
    """Shapes of all devices' x, w and sizes, of which one device has R, E and E."""
    parts = number_of_parts(rows), number_of_parts(weights), number_of_parts(rows or weights)
    x_RD = jax.ShapeDtypeStruct((parts[0] * R, D), dtype)
    w_EDF = jax.ShapeDtypeStruct((parts[1] * E, D, F), dtype)
    return x_RD, w_EDF, jax.ShapeDtypeStruct((parts[2] * E,), "int32")


def cells(*kinds):
    """Each kind in each place; slow but for the first place."""
    first, *_ = PLACES
    return [slow_unless(place == first, place, *kind) for place in PLACES for kind in kinds]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("place", "implementation"), cells((None,), ("reference",)))
def test_products_and_gradients_lower(device, place, implementation):
    rows, weights = PLACES[place]
    mesh = absent_mesh(device)
    product = functools.partial(grouped_matmul, implementation=implementation)
    on_mesh = mapped(product, mesh, rows, weights)

    def loss(x_RD, w_EDF, sizes_E):
        return jnp.sum(on_mesh(x_RD, w_EDF, sizes_E).astype(jnp.float32) ** 2)

    operands = operands_of(rows, weights)
    specs = (rows, weights, rows or weights)
    text = lowered(
        jax.value_and_grad(loss, (0, 1)), device, mesh, *zip(operands, specs, strict=True)
    )
    calls = len(re.findall(rf"custom_call @{KERNEL[device]}", text))
    # On Hopper the weights' gradient has a schedule; those of few rows make their own.
    kernels = 4 if device == "H200" else 3
    assert calls == (kernels if implementation is None else 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("place", "bits", "G", "implementation"),
    cells(
        (4, 2, None),
        (8, 1, None),
        ("float8_e4m3fn", 2, None),
        (4, 1, None),
        (4, 2, "reference"),
    ),
)
def test_quantized_products_lower(device, place, bits, G, implementation):
    rows, weights = PLACES[place]
    mesh = absent_mesh(device)

    def product(x_RD, w, sizes_E):
        values, scales_EFG, bias_EF, gate_R = w
        q = QTensor(
            values, scales_EFG, 4 if bits == 4 else 8, None if G == 1 else x_RD.shape[1] // G
        )
        return quantized_grouped_matmul(
            x_RD, q, sizes_E, bias_EF=bias_EF, activation="relu", gate_R=x_RD[:, 0],
            implementation=implementation, quantize_rows_to=bits if q.is_float8 else None,
        )  # fmt: skip

    x_RD, w_EDF, sizes_E = operands_of(rows, weights, D=8192)
    E, D, F = w_EDF.shape
    w = (
        jax.ShapeDtypeStruct((E, F, D), {8: "int8", 4: "int4"}.get(bits, bits)),
        jax.ShapeDtypeStruct((E, F, G), "float32"),
        jax.ShapeDtypeStruct((E, F), "float32"),
        None,
    )
    text = lowered(
        mapped(product, mesh, rows, weights), device, mesh,
        (x_RD, rows), (w, weights), (sizes_E, rows or weights),
    )  # fmt: skip
    calls = len(re.findall(rf"custom_call @{KERNEL[device]}", text))
    # D is long and tiles are few: sums in parts, whose schedule is a kernel of its own.
    kernels = 2 if device == "H200" else 1
    assert calls == (kernels if implementation is None else 0)


def slice_of(spec: PartitionSpec, expert: int, data: int, length: int) -> slice:
    """What the device (expert, data) of 2 x 2 has of a first dimension."""
    [names] = spec or [()]
    part = {(): 0, "expert": expert, BOTH: 2 * expert + data}[names]
    size = length // number_of_parts(spec)
    return slice(part * size, part * size + size)


def by_loops(x_RD, w_EDF, sizes_E, dy_RF, rows, weights):
    """(y, dx, dw) of all devices by loops over each one's rows."""
    y_RF, dx_RD, dw_EDF = np.zeros(dy_RF.shape), np.zeros(x_RD.shape), np.zeros(w_EDF.shape)
    for expert, data in np.ndindex(2, 2):
        if data and "data" not in str((rows, weights)):
            continue  # the same computation as device (expert, 0)
        x, w, y = (
            slice_of(spec, expert, data, len(array))
            for spec, array in ((rows, x_RD), (weights, w_EDF), (rows or weights, dy_RF))
        )
        sizes = sizes_E[slice_of(rows or weights, expert, data, len(sizes_E))]
        y_RF[y] = loops.product(x_RD[x], w_EDF[w], sizes)
        dx_RD[x] += loops.product(dy_RF[y], np.swapaxes(w_EDF[w], 1, 2), sizes)
        dw_EDF[w] += loops.weight_gradient(x_RD[x], dy_RF[y], sizes)
    return y_RF, dx_RD, dw_EDF


def on_devices(mesh, rows, weights, operands, **options):
    """(y, dx, dw) of `grouped_matmul` with the gradient dy_RF of y."""
    *xw_sizes, dy_RF = operands
    function = mapped(functools.partial(grouped_matmul, **options), mesh, rows, weights)

    @jax.jit
    def run(x_RD, w_EDF, sizes_E, dy_RF):
        y_RF, pull_back = jax.vjp(lambda x, w: function(x, w, sizes_E), x_RD, w_EDF)
        return y_RF, *pull_back(dy_RF)

    return run(*xw_sizes, dy_RF)


@pytest.mark.parametrize("place", PLACES)
def test_raw_gradients_are_those_of_all_devices(place):
    """An operand that devices share has the sum of the gradients that each of them has."""
    rows, weights = PLACES[place]
    structs = operands_of(rows, weights, "float32", R=6, D=8, F=12, E=2)
    rng = np.random.default_rng(0)
    x_RD, w_EDF = (rng.normal(size=s.shape).astype(np.float32) for s in structs[:2])
    sizes_E = rng.integers(0, 4, structs[2].shape).astype(np.int32)
    R = 6 * len(sizes_E) // 2
    dy_RF = rng.normal(size=(R, 12)).astype(np.float32)
    operands = x_RD, w_EDF, sizes_E, dy_RF
    mesh = jax.make_mesh((2, 2), BOTH, axis_types=(AxisType.Auto,) * 2)
    found = on_devices(mesh, rows, weights, operands)
    expected = by_loops(*operands, rows, weights)
    for name, got, want in zip(("y", "dx", "dw"), found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=name)


def test_devices_multiply_the_rows_of_their_own_experts_by_an_offset():
    """All rows everywhere, experts split over four devices: parts add up to the whole."""
    sizes, D, F = (3, 0, 7, 2, 0, 5, 4, 1), 8, 12
    rng = np.random.default_rng(0)
    x_RD, dy_RF = (rng.normal(size=(24, n)).astype(np.float32) for n in (D, F))
    w_EDF = rng.normal(size=(8, D, F)).astype(np.float32)
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))

    def on_device(x_RD, w_EDF, sizes_G):
        offset = jax.lax.axis_index("expert") * len(w_EDF)
        y_RF = grouped_matmul(x_RD, w_EDF, sizes_G, group_offset=offset)
        return jax.lax.psum(y_RF, "expert")

    def product(x_RD, w_EDF):
        specs = {"in_specs": (P(), P("expert"), P()), "out_specs": P()}
        return jax.shard_map(on_device, mesh=mesh, **specs)(x_RD, w_EDF, jnp.array(sizes))

    @jax.jit
    def run(x_RD, w_EDF, dy_RF):
        y_RF, pull_back = jax.vjp(product, x_RD, w_EDF)
        return y_RF, *pull_back(dy_RF)

    y_RF, dx_RD, dw_EDF = run(x_RD, w_EDF, dy_RF)
    for got, wanted in (
        (y_RF, loops.product(x_RD, w_EDF, sizes)),
        (dx_RD, loops.product(dy_RF, w_EDF.swapaxes(1, 2), sizes)),
        (dw_EDF, loops.weight_gradient(x_RD, dy_RF, sizes)),
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
