# SPDX-License-Identifier: Apache-2.0
"""Parts of `check accelerator` about kernels: the card's rates, variants, Triton's kernels.

Dims: R rows, D inputs, F outputs, E experts, J sets of sizes
"""

import concurrent.futures
import dataclasses
import importlib.metadata
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import card as rates
from pallas_kernels.bench.cells import Cell
from pallas_kernels.bench.timing import Contender, repeated, take_turns
from pallas_kernels.bench.variants import AS_IS, Variant, product, variants
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.mosaic_gpu import Mosaic
from pallas_kernels.quantization.qtensor import QTensor
from pallas_kernels.quantization.quantize import dequantize
from pallas_kernels.quantized_grouped_matmul.api import quantized_grouped_matmul
from switchx.bench.accelerator.parts import Session, row

ROUNDS = 7
WARM_S = 2
TOGETHER = 8  # products that take turns: results are reported before all are done
COMPILING = min(16, os.cpu_count() or 1)
# Bytes read between two uses of a weight: more than the 50 to 60 MB of a Hopper's cache.
ROTATED_BYTES = 2**27
PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy"),
    *("flatbuffers", "safetensors", "sentencepiece", "torch", "transformers"),
    *("gin-config", "grain", "tensorflow-datasets"),
)


def card(session: Session) -> Iterator[dict[str, Any]]:
    """Versions, the rates of the card, and the least time of a kernel."""
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        yield row(name, version, "version")
    copied = session.sized(2**30, 2**20)
    yield row("copy", rates.copy_bytes_per_s(copied) / 1e12, "TB/s")
    flops = rates.matrix_flops_per_s(session.sized(8192, 256))
    yield row("bfloat16 product", flops / 1e12, "TFLOP/s")
    floors = rates.kernel_floors(Mosaic(session.is_rehearsal), session.sized(ROUNDS, 1))
    for name, seconds in floors.items():
        yield row(name, 1e6 * seconds, "us")


@dataclasses.dataclass(frozen=True)
class TimedProduct:
    """A product of the table of variants.

    Attributes:
        bits: bits of a weight, 4 or 8; None for bfloat16.
        variant: variant of the kernel for quantized weights.
        way: `ours`, `triton`, or `dense`: one product with as many FLOPs, cuBLAS' on GPUs.
    """

    cell: Cell
    bits: int | None
    variant: Variant = Variant(AS_IS)
    way: str = "ours"

    @property
    def case(self) -> str:
        cell = self.cell
        words = [] if self.way == "ours" else [self.way]
        words.append(f"int{self.bits}" if self.bits else "bfloat16")
        words += [] if self.variant.name == AS_IS else [self.variant.name]
        active = f", {cell.active} of {cell.E} experts" if cell.active < cell.E else ""
        return f"{' '.join(words)}, {cell.D}x{cell.F}, rows {cell.tokens}{active}"

    @property
    def num_matrices(self) -> int:
        """Matrices that a call reads."""
        return 1 if self.way == "dense" else self.cell.active

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a call reads."""
        return self.num_matrices * self.cell.D * self.cell.F * (self.bits or 16) // 8

    def function(self, mosaic: Mosaic) -> Callable:
        """`(x_RD, weights, group_sizes_E)`, to be traced within `variant.replaced`."""
        interpret, cell = mosaic.is_interpreted, self.cell
        if self.way == "dense":
            return lambda x_RD, w_EDF, sizes_E: x_RD @ w_EDF[0]
        if self.way == "triton":
            matmul = grouped_matmul if self.bits is None else quantized_grouped_matmul
            return lambda *given: matmul(*given, implementation="triton", interpret=interpret)
        if self.bits is None:
            return lambda *given: gpu.forward(*given, interpret=interpret)
        return product(self.variant, (cell.R, cell.D, cell.F, cell.E), self.bits, mosaic)

    def weight_sets(self) -> list:
        """Random matrices, more than a cache holds together."""
        cell = self.cell
        E = 1 if self.way == "dense" else cell.E
        one = E * cell.D * cell.F * (self.bits or 16) // 8
        keys = jax.random.split(jax.random.key(0), math.ceil(ROTATED_BYTES / one))
        if jax.default_backend() == "cpu":
            keys = keys[:1]
        return [self._weights(key, E) for key in keys]

    def _weights(self, key, E: int):
        D, F = self.cell.D, self.cell.F
        if self.bits is None:
            return jax.random.normal(key, (E, D, F), jnp.bfloat16)
        byte_EFX = jax.random.bits(key, (E, F, D * self.bits // 8), jnp.uint8)
        scales_EF1 = jax.random.uniform(key, (E, F, 1), minval=0.5) / 2**self.bits
        if self.bits == 8:
            byte_EFX = jax.lax.bitcast_convert_type(byte_EFX, jnp.int8)
        weights = QTensor(byte_EFX, scales_EF1, self.bits)
        if self.way == "triton":
            return weights
        return weights.fragments() if self.variant.is_in_fragments else weights.native()


def table(session: Session) -> list[TimedProduct]:
    """The products, the most important ones first."""
    E, D, F = session.sized((32, 1024, 4096), (2, 512, 128))
    quantized, all_bits = (4, 8), (None, 8, 4)

    def cell(tokens, D=D, F=F, active=E):
        return Cell(D, F, active, E, tokens)

    found = [TimedProduct(cell(4), bits) for bits in all_bits]
    by_name = {each.name: each for each in variants()}
    tried = ["native order", "schedule outside", "copy only", "wgmma without convert"]
    for bits in quantized:
        # Steps of 256 channels are those that int4 has.
        names = [*tried, *(["load-ahead", "256 channels"] if bits == 8 else []), "512 channels"]
        found += [TimedProduct(cell(4), bits, by_name[name]) for name in names]
    # An interpreted product takes seconds, however many rows it has.
    all_bits = session.sized(all_bits, (8,))
    found += [TimedProduct(cell(n), bits) for n in (1, 16) for bits in all_bits]
    found += [TimedProduct(cell(4, F, D), bits) for bits in all_bits]
    for active in session.sized((1, 2, 4), (1,)):
        found += [TimedProduct(cell(8, active=active), bits) for bits in all_bits]
        in_parts = by_name["in parts"]
        found += [TimedProduct(cell(8, active=active), 8, in_parts)]
    many = cell(session.sized(256, 32))
    found += [TimedProduct(many, None), TimedProduct(many, None, way="dense")]
    if not session.is_rehearsal:
        found += [TimedProduct(many, 8), TimedProduct(many, 8, by_name["no load-ahead"])]
        found += [TimedProduct(many, 4)]
    return found


def variants_of_kernels(session: Session) -> Iterator[dict[str, Any]]:
    """The table of variants."""
    yield from timed(session, table(session))


def timed(session: Session, products: Sequence[TimedProduct]) -> Iterator[dict[str, Any]]:
    """Compiles the wanted products in parallel, then times them, a few at a time in turns."""
    mosaic = Mosaic(session.is_rehearsal)
    kept = {}
    begun = []
    wanted = [each for each in products if session.is_wanted(each.case)]
    with concurrent.futures.ThreadPoolExecutor(COMPILING) as pool:
        for each in wanted:
            given = _operands(each, kept)
            try:
                # A replaced kernel affects all that is traced meanwhile: one at a time.
                with each.variant.replaced(mosaic):
                    lowered, calls = _lowered(each.function(mosaic), given, session)
            except (ValueError, NotImplementedError) as error:
                yield row(each.case, None, "us", why=f"{type(error).__name__}: {error}"[:300])
                continue
            begun.append((each, given, calls, pool.submit(_compiled, lowered)))
        contenders = []
        for each, given, calls, future in begun:
            try:
                program, compile_s = future.result()
            except jax.errors.JaxRuntimeError as error:
                yield row(each.case, None, "us", why=str(error)[:300])
                continue
            step = _step(program, given)
            contenders.append((each, Contender(each.case, step, calls), given, compile_s))
    if contenders and not session.is_rehearsal:
        _warm(contenders[0][1])
    for first in range(0, len(contenders), TOGETHER):
        some = contenders[first : first + TOGETHER]
        if not session.is_rehearsal:
            take_turns([contender for _, contender, *_ in some], ROUNDS)
        for each, contender, given, compile_s in some:
            yield _measured(each, contender, given, compile_s)


def _warm(contender: Contender) -> None:
    """Runs until an idle card is at its full clock: the first turns took 5% longer."""
    end = time.perf_counter() + WARM_S
    while time.perf_counter() < end:
        contender.step()


def _measured(each: TimedProduct, contender: Contender, given, compile_s) -> dict[str, Any]:
    start = time.perf_counter()
    results = contender.step()
    if not contender.times_s:  # in a rehearsal
        contender.times_s.append((time.perf_counter() - start) / contender.calls)
    seconds = contender.median_s
    return row(
        each.case,
        1e6 * seconds,
        "us",
        p10=1e6 * contender.percentile_s(10),
        p90=1e6 * contender.percentile_s(90),
        weight_tb_per_s=each.weight_bytes / seconds / 1e12,
        tflop_per_s=each.cell.flops / seconds / 1e12,
        error=error_of(each, given, results) if each.variant.is_right else None,
        compile_s=compile_s,
    )


def _operands(each: TimedProduct, kept: dict) -> tuple[Any, tuple, Any]:
    """Rows, weights that are made only once, and group sizes that use all of these weights."""
    cell = each.cell
    key = cell.D, cell.F, each.bits, each.way, each.variant.is_in_fragments
    if key not in kept:
        kept[key] = tuple(each.weight_sets())
    x_RD = jax.random.normal(jax.random.key(1), (cell.R, cell.D), jnp.bfloat16)
    sizes = [cell.group_sizes(first) for first in range(0, cell.E, cell.active)]
    return x_RD, kept[key], jnp.asarray(np.stack(sizes))


def _lowered(function: Callable, given: tuple, session: Session):
    """A program that multiplies many times, and gives the product of the first operands."""
    _, sets, table_JE = given
    if session.is_rehearsal:

        def run(x_RD, sets, table_JE):
            return function(x_RD, sets[0], table_JE[0])

        return jax.jit(run).lower(*given), 1
    repeats, calls = repeated(function, len(sets), len(table_JE))

    def run_all(x_RD, sets, table_JE):
        return function(x_RD, sets[0], table_JE[0]), repeats(x_RD, sets, table_JE)

    return jax.jit(run_all).lower(*given), calls + 1


def _compiled(lowered) -> tuple[Any, float]:
    start = time.perf_counter()
    return lowered.compile(), time.perf_counter() - start


def _step(program, given: tuple) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(program(*given))


def error_of(each: TimedProduct, given: tuple, results) -> float:
    """The relative error, in Euclidean length, of the first expert's rows against float64."""
    x_RD, [w, *_], table_JE = given
    y_RF = results[0] if isinstance(results, tuple) else results
    size = len(x_RD) if each.way == "dense" else int(table_JE[0][0])
    first = jax.tree.map(lambda leaf: leaf[:1], w)
    w_DF = dequantize(first)[0] if isinstance(first, QTensor) else first[0]
    x_rD, w_DF, y_rF = (np.asarray(a, np.float64) for a in (x_RD[:size], w_DF, y_RF[:size]))
    expected_rF = x_rD @ w_DF
    return float(np.linalg.norm(y_rF - expected_rF) / np.linalg.norm(expected_rF))


def triton(session: Session) -> Iterator[dict[str, Any]]:
    """Times of Triton's kernels, forced, beside those of the table of variants."""
    E, D, F = session.sized((32, 1024, 4096), (2, 64, 32))
    cells = [Cell(D, F, E, E, tokens) for tokens in session.sized((4, 256), (4,))]
    yield from timed(
        session,
        [TimedProduct(cell, bits, way="triton") for cell in cells for bits in (None, 8, 4)],
    )
