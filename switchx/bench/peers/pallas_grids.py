# SPDX-License-Identifier: Apache-2.0
"""Others' Pallas kernels in a traced program: what their grids copy and multiply.

Our kernels record themselves (`pallas_kernels/launches.py`). For others the traced call has
the grid, the map from a grid step to each operand's block, and the body. The tile schedule is
an operand computed from the routing: only what it needs of the program is evaluated.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.launches import Launch, num_bytes
from switchx.compiled.jaxprs import programs_of, sum_of_trace

# Equations that run another program on their operands.
_CALLS = set(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat2 checkpoint "
    "shard_map".split()
)

# Equations about where an array lies or the order of execution, which keep the values.
_SAME_VALUES = set(
    "sharding_constraint mesh_cast reshard pvary pcast optimization_barrier".split()
)


def pallas_launches(jaxpr, arguments: Sequence[Any]) -> list[Launch]:
    """The Pallas calls of a program, counted for one routing.

    Args:
        jaxpr: the program's jaxpr, of `jax.jit(function).trace(...)`.
        arguments: values of its flat arguments; None for an unknown one, such as the
            weights of experts.

    Raises:
        ValueError: a kernel's schedule depends on values that are not known, or a kernel stands
            in a loop, whose schedule may change.
    """
    found: list[Launch] = []
    values = [_unknown if value is None else _constant(value) for value in arguments]
    _walk(jaxpr.jaxpr, jaxpr.consts, values, found)
    return found


def _unknown():
    raise ValueError("the schedule of a Pallas kernel depends on arguments that are not known")


def _constant(value):
    return lambda: value


def _walk(jaxpr, consts, arguments, found: list[Launch]) -> list[Callable]:
    """Functions that compute the results where something needs them; adds the kernels."""
    values = dict(zip(jaxpr.constvars, map(_constant, consts), strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)

    def value_of(variable):
        return _constant(variable.val) if hasattr(variable, "val") else values[variable]

    for equation in jaxpr.eqns:
        operands = [value_of(variable) for variable in equation.invars]
        values |= zip(equation.outvars, _results(equation, operands, found), strict=True)
    return [value_of(variable) for variable in jaxpr.outvars]


def _results(equation, operands, found: list[Launch]) -> list[Callable]:
    name = equation.primitive.name
    if name == "pallas_call":
        found.append(_launch(equation, operands))
        return [_unknown] * len(equation.outvars)
    if name in _SAME_VALUES:
        return operands
    inside = programs_of(equation)
    if name in _CALLS:
        called = inside[0]  # for a custom derivative, the function it is a derivative of
        program = getattr(called, "jaxpr", called)
        consts = getattr(called, "consts", ())
        return _walk(program, consts, operands, found)
    if any(sum_of_trace(one, _kernel) for one in inside):
        raise ValueError(f"a Pallas kernel stands in {name}; only straight code is counted")

    @functools.cache
    def computed():
        results = equation.primitive.bind(*(each() for each in operands), **equation.params)
        return list(results) if equation.primitive.multiple_results else [results]

    return [lambda i=i: computed()[i] for i in range(len(equation.outvars))]


def _kernel(equation) -> int | None:
    return 1 if equation.primitive.name == "pallas_call" else None


def _launch(equation, operands) -> Launch:
    """The launch of a call whose grid sizes and scalar operands are known."""
    mapping = equation.params["grid_mapping"]
    name = str(equation.params.get("name"))
    num_bounds = mapping.num_dynamic_grid_bounds
    num_scalars = num_bounds + mapping.num_index_operands
    known = [np.asarray(each()) for each in operands[:num_scalars]]
    bounds = iter(known[:num_bounds])
    grid = [size if isinstance(size, int) else int(next(bounds)) for size in mapping.grid]
    scalars = known[num_bounds:]
    arrays = [variable.aval for variable in equation.invars]
    results = [variable.aval for variable in equation.outvars]
    like = arrays[num_scalars:] + results
    moved = [
        _copied(grid, block, scalars, array)
        for block, array in zip(mapping.block_mappings, like, strict=True)
    ]
    read = [num_bytes(each.shape, each.dtype) for each in arrays[:num_scalars]]
    read += moved[: len(arrays) - num_scalars]
    written = moved[len(arrays) - num_scalars :]
    flops = math.prod(grid) * sum_of_trace(equation.params["jaxpr"], _product)
    specs = (
        tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in group)
        for group in (arrays, results)
    )
    return Launch(name, *specs, lambda sizes_E: (read, written), lambda sizes_E: flops)


def _copied(grid: Sequence[int], block, scalars, array) -> int:
    """Bytes that the pipeline copies of an array: a block whenever it is a different one."""
    shape = np.array([getattr(size, "block_size", 1) for size in block.block_shape])
    steps = np.indices(grid, np.int32).reshape(len(grid), -1)

    def start(*step):
        return block.compute_start_indices_interpret(step, *scalars)

    starts = np.stack([np.asarray(each) for each in jax.vmap(start)(*steps)], axis=1)
    is_new = np.append(True, np.any(starts[1:] != starts[:-1], axis=1))
    shapes = np.minimum(shape, np.array(array.shape) - starts[is_new])
    return int(np.sum(np.prod(shapes, axis=1, dtype=np.int64))) * array.dtype.itemsize


def _product(equation) -> int | None:
    """2 m n k of a product; None for another equation."""
    if equation.primitive.name != "dot_general":
        return None
    (contracted, _), _ = equation.params["dimension_numbers"]
    terms = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    return 2 * math.prod(equation.outvars[0].aval.shape) * terms
