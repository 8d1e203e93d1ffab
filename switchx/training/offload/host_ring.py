# SPDX-License-Identifier: Apache-2.0
"""A scan over stacked layers whose largest parameters are in host memory: a ring of slots.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), sections 2.2 and 3.2, for training and within one
compiled program. The device has `slots` layers of these parameters: one is computed with while
the following ones are copied. Backward continues where forward ended: it runs the layers from
the last to the first, recomputes each from its input, as remat `full` does, and writes the
gradients of these parameters to host memory, a layer at a time.

A loop's body has as many layers as there are slots, so that no slot is copied on the device.
The number of a layer is read from an array. Do not compute it from the loop's counter: XLA on
GPUs then takes the addresses of a loop in host memory for a stride, and may read the layers of
a reversed one forwards, without an error (openxla/xla#46231).

Dims: N layers, X fetches of forward and backward
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from switchx import tree
from switchx.optim.updates import squared_norm
from switchx.partitioning.mesh import HOST
from switchx.training.offload.host_stack import (
    HostStack,
    constrained,
    empty,
    is_host_stack,
    slice_at,
    to_device,
    to_host,
    with_slice,
)


def layer_numbers(num_layers: int) -> jax.Array:
    """`[0, 1, ...]` as an array whose elements the compiler does not know."""
    return jax.lax.optimization_barrier(jnp.arange(num_layers, dtype=jnp.int32))


def ring_scan(
    run: Callable,
    x,
    blocks,
    others,
    inputs,
    order_N,
    *,
    slots: int,
):
    """`x, y_n = run(x, blocks[n], others[n], inputs)` for all n of `order_N`, one by one.

    Like `jax.lax.scan`, which it equals to the last bit of rounding, but for what is in memory.

    Args:
        run: the function; it must not close over arrays that are differentiated.
        x: the loop's carry, arrays of floating types.
        blocks: parameters `[N, ...]`, of floating types, some of them `HostStack`s; `run` gets
            arrays of one layer.
        others: arrays `[N, ...]` that are not differentiated: keys.
        inputs: arrays that all layers read; the floating ones are differentiated.
        order_N: numbers of the layers, as `layer_numbers` returns them.
        slots: layers on the device at once, 2 to N.

    Returns:
        The last x, and all y stacked by the number of their layer.
    """
    ring, arrays = _Ring.of(run, blocks, inputs, len(order_N), slots)
    return _scan(ring, x, *arrays, others, _fetched(order_N, slots))


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The static part of a scan: how the arguments of `run` are put together."""

    run: Callable
    of_blocks: Any
    is_host: tuple[bool, ...]
    of_inputs: Any
    is_float: tuple[bool, ...]
    num_layers: int
    slots: int

    @classmethod
    def of(cls, run, blocks, inputs, num_layers: int, slots: int):
        """The ring, and (stacks, resident parameters, floating inputs, other inputs)."""
        leaves, of_blocks = jax.tree.flatten(blocks, is_leaf=is_host_stack)
        is_host = tuple(map(is_host_stack, leaves))
        read, of_inputs = jax.tree.flatten(inputs)
        is_float = tuple(map(_is_float, read))
        ring = cls(run, of_blocks, is_host, of_inputs, is_float, num_layers, slots)
        return ring, (*tree.parted(leaves, is_host), *tree.parted(read, is_float))

    def layer(self, x, slot, resident, floats, fixed, other):
        """One layer: its output, and y."""
        block = jax.tree.unflatten(self.of_blocks, _joined(slot, resident, self.is_host))
        inputs = jax.tree.unflatten(self.of_inputs, _joined(floats, fixed, self.is_float))
        return self.run(x, block, other, inputs)

    def sweep(self, fetch: Callable, step: Callable, carry, held):
        """`x, *rest = step((x, *rest), slot, i)` for i from 0 to N - 1.

        The slot of layer i is `fetch(rest, i)`, begun when the input of layer i - slots + 1 is
        there and not earlier: the compiler would begin all copies at once. At the end, those of
        the layers after the last one have been fetched.

        Args:
            held: slots of the first layers, `slots - 1` of them.

        Returns:
            the last (x, *rest), and the slots that are left.
        """

        def steps(carry, held, first, number):
            for j in range(number):
                ahead = jnp.asarray(first + j + self.slots - 1, jnp.int32)
                ahead, x = jax.lax.optimization_barrier((ahead, carry[0]))
                carry = x, *carry[1:]
                held = [*held, fetch(carry[1:], ahead)]
                carry, held = step(carry, held[0], first + j), held[1:]
            return carry, held

        turns, rest = divmod(self.num_layers, self.slots)
        carry, held = jax.lax.fori_loop(
            0,
            turns,
            lambda turn, state: steps(*state, turn * self.slots, self.slots),
            (carry, held),
        )
        return steps(carry, held, turns * self.slots, rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(ring: _Ring, x, stacks, resident, floats, fixed, others, number_X):
    return _scan_forward(ring, x, stacks, resident, floats, fixed, others, number_X)[0]


def _scan_forward(ring: _Ring, x, stacks, resident, floats, fixed, others, number_X):
    """The results, and for backward the inputs of all layers `[N, ...]` and the last slots."""
    N = ring.num_layers

    def fetch(_, i):
        return [to_device(stack.value, slice_at(number_X, i)) for stack in stacks]

    def layer(x, slot, n):
        return ring.layer(x, slot, slice_at(resident, n), floats, fixed, slice_at(others, n))

    def step(carry, slot, i):
        x, x_N, y_N = carry
        n = slice_at(number_X, i)
        x_N = with_slice(x_N, x, n)
        x, y = layer(x, slot, n)
        return x, x_N, with_slice(y_N, y, n)

    _, y = jax.eval_shape(lambda: layer(x, fetch(None, 0), 0))
    x_N, y_N = (_zeros(N, each) for each in (x, y))
    held = [fetch(None, i) for i in range(ring.slots - 1)]
    (x, x_N, y_N), held = ring.sweep(fetch, step, (x, x_N, y_N), held)
    return (x, y_N), (x_N, held, stacks, resident, floats, fixed, others, number_X)


def _scan_backward(ring: _Ring, kept, gradients):
    """The gradients of all arguments; None for arguments that are not differentiated."""
    x_N, held, stacks, resident, floats, fixed, others, number_X = kept
    d_x, d_y_N = gradients
    is_float = tuple(leaf.dtype != jax.dtypes.float0 for leaf in jax.tree.leaves(d_y_N))
    d_y_N, _ = tree.parted(jax.tree.leaves(d_y_N), is_float)

    def number(i):
        return slice_at(number_X, ring.num_layers + i)

    def fetch(_, i):
        return [to_device(stack.value, number(i)) for stack in stacks]

    def step(carry, slot, i):
        d_x, totals, squares, d_resident, d_floats = carry
        n = number(i)

        def layer(x, slot, resident, floats):
            x, y = ring.layer(x, slot, resident, floats, fixed, slice_at(others, n))
            return x, tree.parted(jax.tree.leaves(y), is_float)[0]

        _, transpose = jax.vjp(layer, slice_at(x_N, n), slot, slice_at(resident, n), floats)
        d_x, d_slot, d_own, d_read = transpose((d_x, slice_at(d_y_N, n)))
        d_slot = [
            constrained(d if stack.total is None else to_device(total, n) + d, stack.dims[1:])
            for stack, total, d in zip(stacks, totals, d_slot, strict=True)
        ]
        totals = [to_host(*each, n) for each in zip(totals, d_slot, strict=True)]
        squares = [s + squared_norm(d) for s, d in zip(squares, d_slot, strict=True)]
        d_floats = jax.tree.map(jnp.add, d_floats, d_read)
        return d_x, totals, squares, with_slice(d_resident, d_own, n), d_floats

    totals = [
        empty(stack.value, stack.dims) if stack.total is None else stack.total
        for stack in stacks
    ]
    squares = [jnp.zeros((), jnp.float32) for _ in stacks]
    carry = d_x, totals, squares, *jax.tree.map(jnp.zeros_like, (resident, floats))
    carry, _ = ring.sweep(fetch, step, carry, held)
    d_x, totals, squares, d_resident, d_floats = carry
    d_stacks = [
        dataclasses.replace(stack, value=total, squares=each, total=None)
        for stack, total, each in zip(stacks, totals, squares, strict=True)
    ]
    return d_x, d_stacks, d_resident, d_floats, None, None, None


_scan.defvjp(_scan_forward, _scan_backward)


def _fetched(order_N, slots: int):
    """Numbers of the layers as forward and backward fetch them, one after the other.

    An array of its own, which both read from beginning to end. At the end, `slots - 1` layers
    are fetched that nothing computes with.
    """
    after = jnp.broadcast_to(order_N[:1], (slots - 1,))
    return jax.lax.optimization_barrier(jnp.concatenate([order_N, order_N[::-1], after]))


def require_sound_ring(device) -> None:
    """Checks on a tiny stack that programs of a device read host memory in the right order.

    Raises:
        RuntimeError: the order is wrong; the gradients of a ring are not those of a scan.
    """
    mesh = jax.sharding.Mesh([device], ("x",))
    kinds = {memory.kind for memory in device.addressable_memories()}
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    host = whole.with_memory_kind(HOST) if HOST in kinds else whole
    w_ND = np.linspace(0.5, 1.5, 5 * 8, dtype=np.float32).reshape(5, 8)
    x_D = np.linspace(0.2, 0.9, 8, dtype=np.float32)

    def layer(x_D, w_D, *_):
        return jnp.sin(x_D * w_D), x_D

    def by_ring(w_ND, order_N):
        stack = HostStack.of(w_ND, "ND", slots=2)
        _, y_ND = ring_scan(layer, x_D, stack, None, None, order_N, slots=2)
        return jnp.sum(y_ND * y_ND)

    def by_scan(w_ND):
        _, y_ND = jax.lax.scan(layer, x_D, w_ND)
        return jnp.sum(y_ND * y_ND)

    on_host = jax.device_put(w_ND, host)
    ring = jax.jit(
        lambda w_ND: jax.grad(by_ring)(w_ND, layer_numbers(len(w_ND))),
        in_shardings=host,
        out_shardings=host,
    )
    got = np.asarray(ring(on_host))
    wanted = np.asarray(jax.jit(jax.grad(by_scan))(jax.device_put(w_ND, whole)))
    error = float(np.max(np.abs(got - wanted)))
    if not error <= 1e-5:
        raise RuntimeError(
            f"JAX {jax.__version__} on {device.device_kind} computes wrong gradients of layers "
            f"in host memory (off by {error:.1e} of {np.max(np.abs(wanted)):.1e}; some "
            "releases read them in the wrong order, openxla/xla#46231); use a newer JAX, or "
            "StorageSpec.experts='device' or 'disk'"
        )


def _zeros(num_layers: int, like):
    return jax.tree.map(lambda x: jnp.zeros((num_layers, *x.shape), x.dtype), like)


def _is_float(leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _joined(first, second, chosen: tuple[bool, ...]) -> list:
    """The inverse of `tree.parted`."""
    first, second = iter(first), iter(second)
    return [next(first if is_in else second) for is_in in chosen]
