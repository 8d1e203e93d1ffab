# SPDX-License-Identifier: Apache-2.0
"""The contenders of one cell: our products by weights, and those they are compared with.

Other libraries take part if they are installed: megablox, which JAX ships for TPUs, and
tokamax.
Dims: R rows, D inputs, F outputs, E experts, G groups of D with a scale
"""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.cells import Cell
from pallas_kernels.bench.timing import Contender, all_in_one_program, one_by_one
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.tile_schedule import tiles_by_block
from pallas_kernels.implementations import choose, form_of_int4
from pallas_kernels.quantization.qtensor import QTensor
from pallas_kernels.quantization.quantize import dequantize
from pallas_kernels.quantized_grouped_matmul.api import quantized_grouped_matmul

# Read between two uses of the same weights: more than four times what caches hold.
ROTATED_BYTES = {"cpu": 2**27, "gpu": 2**28, "tpu": 2**29}
CHECKED_ROWS = 8
# Rows per expert from which on gradients are measured, too: those of training.
LEAST_OF_GRADIENTS = 64
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
MEGABLOX = "jax.experimental.pallas.ops.tpu.megablox"


def activation_dtype():
    """The dtype of rows and unquantized weights: bfloat16, on CPU float32."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Product:
    """An implementation of a product.

    Attributes:
        run: `(x_RD, weights, group_sizes_E) -> y_RF`; in a pass `dx` the rows are the
            gradient with respect to y, in a pass `dw` both, `(x_RD, dy_RF)`.
        bits: bits of a weight; None for as many as the rows have.
        of: the pass: `forward`, the gradients `dx` and `dw`, or `schedule`, which comes before.
    """

    name: str
    run: Callable[[Any, Any, Any], Any]
    bits: int | None = None
    of: str = "forward"


def ragged_dot(x_RD, w_EDF, group_sizes_E):
    return jax.lax.ragged_dot(x_RD, w_EDF, group_sizes_E)


def megablox(x_RD, w_EDF, group_sizes_E):
    """The kernel that JAX ships for TPUs, with its default tiles."""
    gmm = importlib.import_module(MEGABLOX).gmm
    return gmm(x_RD, w_EDF, group_sizes_E, preferred_element_type=x_RD.dtype)


def tokamax(x_RD, w_EDF, group_sizes_E):
    return importlib.import_module("tokamax").ragged_dot(x_RD, w_EDF, group_sizes_E)


def dequantize_then_multiply(x_RD, w: QTensor, group_sizes_E):
    """The product without fusion: all weights are written and read once more."""
    return grouped_matmul(x_RD, dequantize(w).astype(x_RD.dtype), group_sizes_E)


def batched_einsum(x_RD, w_EDF, group_sizes_E):
    """The product of equal groups, which it takes for granted."""
    x_ERD = x_RD.reshape(w_EDF.shape[0], -1, x_RD.shape[1])
    y_ERF = jnp.einsum("ERD,EDF->ERF", x_ERD, w_EDF)
    return y_ERF.reshape(x_RD.shape[0], -1)


def dense(x_RD, w_DF, group_sizes_E):
    """A product of as many FLOPs with one matrix: on GPU, cuBLAS."""
    return x_RD @ w_DF


def products(cell: Cell) -> list[Product]:
    """The products of a cell; each pass has our unquantized one first, for comparison."""
    is_cpu = jax.default_backend() == "cpu"
    name = jnp.dtype(activation_dtype()).name
    found = [
        Product(name, grouped_matmul),
        Product("int8", quantized_grouped_matmul, 8),
        Product("int4", quantized_grouped_matmul, 4),
    ]
    if not is_cpu or cell.E <= 8:  # on CPU seconds for more
        found.append(Product("dequantize int8", dequantize_then_multiply, 8))
    if cell.load == "balanced" and cell.active == cell.E and is_cpu:
        found.append(Product("batched einsum", batched_einsum))
    if not is_cpu:  # On CPU ragged_dot does E times the work.
        found.append(Product("dequantize int4", dequantize_then_multiply, 4))
        found.append(Product(f"ragged_dot {name}", ragged_dot))
        if cell.load == "balanced" and cell.active == cell.E:
            found.append(Product(f"dense {name}", dense))
    found += [Product(f"{each.__name__} {name}", each) for each in installed()]
    if cell.active == cell.E and cell.tokens >= LEAST_OF_GRADIENTS:
        others = [each for each in found if each.bits is None and each.run is not dense]
        found += [gradient(each, of, cell) for of in ("dx", "dw") for each in others]
    if (run := tile_schedule(cell)) is not None:
        found.append(Product("tile schedule", run, of="schedule"))
    return found


def installed() -> list[Callable]:
    """Products of other libraries that can run here."""
    wanted = {"tpu": {MEGABLOX: megablox, "tokamax": tokamax}, "gpu": {"tokamax": tokamax}}
    here = wanted.get(jax.default_backend(), {})
    return [run for name, run in here.items() if importlib.util.find_spec(name) is not None]


def gradient(product: Product, of: str, cell: Cell) -> Product:
    """The gradient of a product by only its rows, `dx`, or only its matrices, `dw`.

    Nothing of the product itself is left in the compiled program: its result is not used.
    """

    def dx(dy_RF, w_EDF, group_sizes_E):
        x_RD = jnp.zeros((cell.R, cell.D), dy_RF.dtype)
        _, pull_back = jax.vjp(lambda x_RD: product.run(x_RD, w_EDF, group_sizes_E), x_RD)
        return pull_back(dy_RF)[0]

    def dw(rows, w_EDF, group_sizes_E):
        x_RD, dy_RF = rows
        _, pull_back = jax.vjp(lambda w_EDF: product.run(x_RD, w_EDF, group_sizes_E), w_EDF)
        return pull_back(dy_RF)[0]

    return Product(f"{product.name} {of}", dx if of == "dx" else dw, of=of)


def tile_schedule(cell: Cell) -> Callable | None:
    """The schedule alone that our product computes from the group sizes before it multiplies.

    None where the kernel does so inside.
    """
    dtype, sizes = activation_dtype(), (cell.R, cell.D, cell.F, cell.E)
    module = choose("grouped_matmul", None, (dtype, dtype, *sizes), interpret=False)
    match module.__name__.rpartition(".")[2]:
        case "reference":
            return lambda x_RD, w, sizes_E: reference.Groups.of(sizes_E, cell.R).arrays()
        case "tpu":
            block_R = module.candidates(*sizes, dtype, dtype)[0].block_R
            return lambda x_RD, w, sizes_E: tiles_by_block(sizes_E, cell.R, block_R)
        case "gpu":
            from pallas_kernels.grouped_matmul import gpu_schedule
            from pallas_kernels.mosaic_gpu import Mosaic

            tiling = module.default_tiling(*sizes, dtype)
            table = gpu_schedule.table_shape(cell.R, cell.E, tiling.tile_n)
            if gpu_schedule.fits_inside(table, tiling, dtype, dtype, 1):
                return None
            schedule = functools.partial(
                gpu_schedule.schedule, num_rows=cell.R, block=tiling.tile_n, mosaic=Mosaic()
            )
            return lambda x_RD, w, sizes_E: schedule(sizes_E)
    return None


def rows_of(R: int, columns: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return jnp.array(rng.standard_normal((R, columns), np.float32), activation_dtype())


def random_weights(cell: Cell, bits: int | None, seed: int):
    """An array, or a QTensor of random integers: quantizing would take too long."""
    rng = np.random.default_rng(seed)
    E, D, F = cell.E, cell.D, cell.F
    if bits is None:
        w_EDF = rng.standard_normal((E, D, F), np.float32)
        return jnp.array(w_EDF, activation_dtype())
    scales_EF1 = jnp.array(rng.uniform(0.5, 1.5, (E, F, 1)) / 2**bits, jnp.float32)
    if bits == 8:
        values = rng.integers(-128, 128, (E, F, D), np.int8)
        return QTensor(jnp.array(values), scales_EF1, bits)
    q = QTensor(jnp.array(rng.integers(0, 256, (E, F, D // 2), np.uint8)), scales_EF1, bits)
    return getattr(q, form_of_int4())()


def weight_bytes(cell: Cell, bits: int | None, experts: int) -> int:
    """Bytes of the matrices of `experts` experts, with their scales."""
    bits_of_one = bits or 8 * jnp.dtype(activation_dtype()).itemsize
    scales = 0 if bits is None else 4 * cell.F
    return experts * (cell.D * cell.F * bits_of_one // 8 + scales)


def contenders(cell: Cell, cache: dict, note: Callable[[str], Any] = print) -> list[Contender]:
    """The contenders, compiled, checked and ready to take turns.

    Args:
        cache: dictionary that keeps weights from one cell to the next of the same matrices.
        note: function that is told of each product left out for lack of device memory.

    Raises:
        RuntimeError: our product of unquantized weights, the first, does not fit.
    """
    found = []
    for product in products(cell):
        try:
            given = operands(cell, product.bits, cache, product.of)
            if product.run is dense:
                given = _of_one_matrix(given, cell)
            each = contender(product.name, product.run, given)
            each.step()
            each.error = relative_error(product, given)
        except jax.errors.JaxRuntimeError as error:
            if not found or OUT_OF_MEMORY not in str(error):
                raise
            note(f"{product.name} does not fit the device's memory, and is left out")
            continue
        each.of = product.of
        if product.of != "schedule":
            matrices = 1 if product.run is dense else cell.active
            each.weight_bytes = weight_bytes(cell, product.bits, matrices)
        found.append(each)
    return found


def contender(name: str, run, given: tuple[Any, list, list]) -> Contender:
    """A product of `operands`, compiled as this machine is best measured."""
    if jax.default_backend() == "cpu":
        return Contender(name, one_by_one(run, *given))
    step, calls = all_in_one_program(run, *given)
    return Contender(name, step, calls=calls)


def operands(
    cell: Cell, bits: int | None, cache: dict, of: str = "forward"
) -> tuple[Any, list, list]:
    """Rows, more weights than a cache holds together, sizes that use all their experts."""
    x_RD = rows_of(cell.R, cell.F if of == "dx" else cell.D)
    if of == "dw":
        x_RD = x_RD, rows_of(cell.R, cell.F, seed=1)
    sizes = [jnp.array(cell.group_sizes(first)) for first in range(0, cell.E, cell.active)]
    return x_RD, _weight_sets(cell, bits, cache), sizes


def _of_one_matrix(given: tuple[Any, list, list], cell: Cell) -> tuple[Any, list, list]:
    """Operands of `dense`: more single matrices than a cache holds."""
    x_RD, sets, sizes = given
    matrices = [w_EDF[e] for w_EDF in sets for e in range(cell.E)]
    return x_RD, matrices[: _rotated(cell, None, 1)], sizes


def _rotated(cell: Cell, bits: int | None, experts: int) -> int:
    """Number of sets of `experts` experts' matrices to read between two uses of one."""
    wanted = ROTATED_BYTES[jax.default_backend()]
    return math.ceil(wanted / weight_bytes(cell, bits, experts))


def _weight_sets(cell: Cell, bits: int | None, cache: dict) -> list:
    matrices = (cell.E, cell.D, cell.F)
    if cache.get("matrices") != matrices:
        cache.clear()  # of the last matrices, before these are made
        cache["matrices"] = matrices
    if bits not in cache:
        number = _rotated(cell, bits, cell.E)
        cache[bits] = [random_weights(cell, bits, seed) for seed in range(number)]
    return cache[bits]


def relative_error(product: Product, given: tuple[Any, list, list]) -> float | None:
    """The error of a sample against float64, in Euclidean length.

    With the first weights and sizes of `operands`: of some rows, or of the matrix of one expert
    in a pass `dw`. None for `dense` and for a schedule.
    """
    if product.run is dense or product.of == "schedule":
        return None
    x_RD, [weights, *_], [sizes_E, *_] = given
    found = jax.jit(product.run)(x_RD, weights, sizes_E)
    expert_R = np.repeat(np.arange(sizes_E.shape[0]), np.asarray(sizes_E))
    if product.of == "dw":
        e = expert_R[0]
        x_rD, dy_rF = (np.asarray(each, np.float64)[expert_R == e] for each in x_RD)
        return _relative(np.asarray(found[e], np.float64), x_rD.T @ dy_rF)
    row_i = np.linspace(0, x_RD.shape[0] - 1, CHECKED_ROWS).astype(int)
    y_iF = np.asarray(found[row_i], np.float64)
    x_iD = np.asarray(x_RD[row_i], np.float64)
    expected_iF = np.zeros_like(y_iF)
    for i, r in enumerate(row_i):
        e = int(expert_R[r])
        one = jax.tree.map(lambda array, e=e: array[e : e + 1], weights)
        w_DF = dequantize(one)[0] if isinstance(one, QTensor) else one[0]
        w_DF = np.asarray(w_DF, np.float64)
        expected_iF[i] = x_iD[i] @ (w_DF.T if product.of == "dx" else w_DF)
    return _relative(y_iF, expected_iF)


def _relative(found, expected) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@functools.cache
def compiled_weight_bytes(bits: int | None) -> int:
    """Bytes of weights given to a compiled product of 8 matrices 512x1024."""
    cell = Cell(512, 1024, 8, 8, 1)
    weights = random_weights(cell, bits, 0)
    product = grouped_matmul if bits is None else quantized_grouped_matmul
    x_RD = jnp.ones((cell.R, cell.D), activation_dtype())
    sizes_E = jnp.ones(8, jnp.int32)
    compiled = jax.jit(product).lower(x_RD, weights, sizes_E).compile()
    others = x_RD.size * x_RD.dtype.itemsize + 4 * 8
    scales = 0 if bits is None else 4 * 8 * 1024
    return compiled.memory_analysis().argument_size_in_bytes - others - scales
