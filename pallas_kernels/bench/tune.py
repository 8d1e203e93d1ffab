# SPDX-License-Identifier: Apache-2.0
"""`pallas-kernels tune`: the quickest of a back end's candidate tilings, into the cache.

A candidate that does not compile, for lack of memory or any other reason, is dropped before
anything is run; one whose result differs from float64 is refused. On CPU the loops of the
reference are tuned.
Dims: R rows, D inputs, F outputs, E experts
"""

import dataclasses
import functools
import inspect
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench import products
from pallas_kernels.bench.cells import ACTIVE_OF_EXPERTS, MATRICES, TOKENS, Cell
from pallas_kernels.bench.products import Product, activation_dtype
from pallas_kernels.bench.timing import speedup, take_turns
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.implementations import choose
from pallas_kernels.quantized_grouped_matmul.api import quantized_grouped_matmul
from pallas_kernels.tiling.tuned import Key, user_file, write

# A smaller gain is noise: the default stays.
LEAST_GAIN = 1.03
LARGEST_ERROR = 1e-2


def cells_to_tune() -> list[Cell]:
    """The cells to tune, with all experts active; on CPU as many as take a minute."""
    if jax.default_backend() == "cpu":
        return [Cell(1024, 4096, 8, 8, tokens) for tokens in (1, 16, 64)]
    full = sorted({E for active, E in ACTIVE_OF_EXPERTS if active == E})
    return [Cell(D, F, E, E, tokens) for D, F in MATRICES for E in full for tokens in TOKENS]


def run(
    rounds: int,
    cells: Sequence[Cell] | None = None,
    note: Callable[[str], Any] = print,
    path: pathlib.Path | None = None,
) -> list[dict[str, Any]]:
    """Tunes the products of float, int8 and int4 weights and writes the quickest tilings.

    Args:
        cells: cells to tune; None is the grid for this machine.
        path: path of the file of tuned tilings; None is the user's file.

    Returns:
        One row for each product: the best tiling, its time and the default's time.
    """
    rows = []
    cache = {}
    path = path or user_file()
    for cell in cells_to_tune() if cells is None else cells:
        for bits in (None, 8, 4):
            key, tiling, row = tune_one(cell, bits, rounds, cache)
            # At once: after an interruption, finished work stays.
            write(path, {key: tiling})
            rows.append(row)
            note(
                f"{row['matrix']} {row['rows']} rows, {row['weights']}: {row['tiling']}, "
                f"{row['speedup']:.2f} times the default's speed"
            )
    return rows


def tune_one(cell: Cell, bits: int | None, rounds: int, cache: dict):
    """The key, the best tiling and a row to show, for one product."""
    op = "grouped_matmul" if bits is None else "quantized_grouped_matmul"
    dtype = activation_dtype()
    R, D, F, E = cell.R, cell.D, cell.F, cell.E
    asked = (dtype, dtype, R, D, F, E) if bits is None else (dtype, bits, R, D, F, E, None)
    module = choose(op, None, asked, interpret=False)
    tilings = candidates(module, (R, D, F, E), dtype, bits)
    given = products.operands(cell, bits, cache)
    operation = grouped_matmul if bits is None else quantized_grouped_matmul
    contenders, dropped = {}, []
    for tiling in tilings:
        run_it = functools.partial(operation, tiling=tiling)
        try:
            each = products.contender(str(tiling), run_it, given)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            dropped.append(f"{tiling}: {error}")
            continue
        error = products.relative_error(Product("", run_it), given)
        if not error <= LARGEST_ERROR:
            raise RuntimeError(f"{op} with {tiling} has a relative error of {error}: a bug")
        contenders[tiling] = each
    if tilings[0] not in contenders:
        raise RuntimeError(f"the default tiling of {op} does not compile: {dropped[0]}")
    take_turns(list(contenders.values()), rounds)
    default = contenders[tilings[0]]
    best = max(contenders, key=lambda tiling: speedup(contenders[tiling], default))
    if best != tilings[0]:  # the fastest of many is lucky, too: both are measured anew
        for each in (default, contenders[best]):
            each.times_s.clear()
        take_turns([default, contenders[best]], 2 * rounds)
    if speedup(contenders[best], default) < LEAST_GAIN:
        best = tilings[0]
    name = module.__name__.rpartition(".")[2]
    row = {
        "matrix": f"{D}x{F}",
        "experts": E,
        "rows": R,
        "weights": f"int{bits}" if bits else jnp.dtype(dtype).name,
        "implementation": name,
        "tiling": json.dumps(dataclasses.asdict(best)),
        "us": 1e6 * contenders[best].median_s,
        "default_us": 1e6 * default.median_s,
        "speedup": speedup(contenders[best], default),
        "measured": len(contenders),
        "did_not_compile": len(dropped),
    }
    return Key.of(op, name, dtype, bits, None, R, D, F, E), best, row


def candidates(module, sizes: tuple[int, int, int, int], dtype, bits: int | None) -> list:
    """The candidates of a back end, its default first, by the options that it takes."""
    options = {"x_dtype": dtype, "w_dtype": dtype, "dtype": dtype, "bits": bits}
    known = inspect.signature(module.candidates).parameters
    return module.candidates(*sizes, **{k: v for k, v in options.items() if k in known})
