# SPDX-License-Identifier: Apache-2.0
"""A program of a model whose layers of experts stream from host memory through two slots.

`ring_decode.py` says what for. A program is traced with `AbsentExperts` and cut where
its Switch layers are, as by `ChosenExperts`; here the parts are one compiled program again, and
between two of them stands a layer whose experts are resident or in a slot. The copy into a slot
begins when the layer that was in it has been computed, so that it runs beside the other slot's.
Dims: R rows, D model, E experts, N layers that stream, C columns of a
matrix, W words of its rows
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from switchx import tree
from switchx.inference.offload.copy_times import streamed_layers
from switchx.inference.offload.cut_program import CutProgram, donated_leaves, kind_of, traced
from switchx.inference.offload.expert_slots import run_layer
from switchx.inference.offload.expert_source import Weights
from switchx.inference.program_cache import PROGRAMS
from switchx.inference.quantize import native
from switchx.inference.run_exported import form_of, host_form, host_memory_kind
from switchx.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """One parameter of layers of experts, in the form of `run_exported.host_form`.

    Attributes:
        array: `[N, E, ...]`, without the dimensions N and E that are already indexed.
        shape: shape of one expert's parameter.
        dtype: dtype of the parameter.
    """

    array: jax.Array
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    def parameter(self):
        """`[E, ...]` of an array `[E, ...]`."""
        E, dtype = self.array.shape[0], jnp.dtype(self.dtype)
        if self.array.dtype == dtype:
            return self.array.reshape(E, *self.shape)
        rows, columns = self.shape
        parts = jax.lax.bitcast_convert_type(self.array, dtype)  # [E, W, C, 4 or 8]
        return jnp.moveaxis(parts, -1, -2).reshape(E, -1, columns)[:, :rows]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bank:
    """The experts of all Switch layers.

    Attributes:
        resident: the experts on the device, by the number of their layer.
        streamed: the experts of the other layers, in host memory: `Stored` arrays
            `[N, E, ...]`.
        numbers: numbers of the layers in `streamed`.
    """

    resident: Mapping[int, Weights]
    streamed: Weights
    numbers: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, config: ModelConfig, layers: Sequence[Weights], slots: int) -> "Bank":
        """The bank of a model's Switch layers, NumPy arrays, with K = `slots` of each stack."""
        numbers, device = streamed_layers(config, slots), jax.devices()[0]
        kind = host_memory_kind(device, "or leave the ring out")
        host = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)

        def stacked(like, *leaves):
            forms = [host_form(np.asarray(leaf), str(like.dtype)) for leaf in leaves]
            return Stored(
                jax.device_put(np.stack(forms), host), like.shape[1:], str(like.dtype)
            )

        # Stored bytes are read as a device's, so channels keep their order.
        ordered = functools.partial(native, in_order=True)
        like = jax.eval_shape(ordered, layers[0])
        streamed = jax.tree.map(stacked, like, *(layers[number] for number in numbers))
        resident = {
            number: jax.tree.map(jnp.array, ordered(layer))
            for number, layer in enumerate(layers)
            if number not in numbers
        }
        return cls(resident, streamed, numbers)

    @classmethod
    def abstract(
        cls, config: ModelConfig, layers: Sequence[Weights], slots: int, host
    ) -> "Bank":
        """The bank of shape structs, as programs read them.

        Args:
            host: the sharding of what streams.
        """

        def stacked(leaf):
            shape, dtype = form_of(leaf.shape, str(leaf.dtype))
            struct = jax.ShapeDtypeStruct((len(numbers), *shape), dtype, sharding=host)
            return Stored(struct, leaf.shape[1:], str(leaf.dtype))

        numbers = streamed_layers(config, slots)
        streamed = jax.tree.map(stacked, layers[numbers[0]])
        kept = {n: layer for n, layer in enumerate(layers) if n not in numbers}
        return cls(kept, streamed, numbers)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's experts."""
        return self.host_bytes // len(self.numbers)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, as it is copied."""
        return self.layer_bytes // jax.tree.leaves(self.streamed)[0].shape[1]

    @property
    def host_bytes(self) -> int:
        return tree.num_bytes(self.streamed)

    @property
    def device_bytes(self) -> int:
        """Bytes of the resident layers and of two slots."""
        return (len(self.resident) + 2) * self.layer_bytes

    def fetch(self, number: int, after) -> Weights:
        """A layer's experts on the device.

        Args:
            after: an array that is there before the copy begins; None does not wait.
        """
        n = jnp.int32(self.numbers.index(number))
        n = n if after is None else n + _zero_of(after)
        return _on_device(jax.tree.map(lambda x: _slice(x, n), self.streamed))

    def expert(self, number: int, expert: int) -> Weights:
        """One expert `[1, ...]` of a layer that streams, on the device."""
        return _expert(self.streamed, np.int32(self.numbers.index(number)), np.int32(expert))


def _slice(stack, n):
    return jax.lax.dynamic_index_in_dim(stack, n, keepdims=False, allow_negative_indices=False)


@jax.jit
def _expert(streamed: Weights, n, expert) -> Weights:
    def take(x):
        rest = (0,) * (x.ndim - 2)
        return jax.lax.dynamic_slice(x, (n, expert, *rest), (1, 1, *x.shape[2:]))[0]

    return _on_device(jax.tree.map(take, streamed))


def _on_device(weights: Weights) -> Weights:
    """Arrays that are in host memory."""
    placed = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), weights)

    def parameter(leaf):
        return leaf.parameter()

    return jax.tree.map(parameter, placed, is_leaf=lambda leaf: isinstance(leaf, Stored))


def _zero_of(array):
    """0, which the compiler does not know before the array is there.

    Do not simplify: an `optimization_barrier` is gone before copies are scheduled, and all of
    them would begin at once, each with a slot of its own.
    """
    first = array[(0,) * array.ndim].astype(jnp.float32)
    zeros = jax.lax.clz(jax.lax.bitcast_convert_type(first, jnp.int32))  # 0 to 32
    return jnp.minimum(zeros, 0)


def run_with_ring(config: ModelConfig, cut: CutProgram, bank: Bank, leaves: Sequence):
    """Runs a program's parts and the experts between them, and returns its results; is traced.

    Args:
        leaves: the leaves of the program's arguments.
    """
    order = [number for number, _ in cut.rows if number in bank.numbers]
    slots = {number: bank.fetch(number, None) for number in order[:2]}
    following = dict(zip(order, order[2:], strict=False))

    def run_rows(number: int, x_RD, count_E):
        is_streamed = number in slots
        weights = slots.pop(number) if is_streamed else bank.resident[number]
        y_RD = run_layer(config, weights, x_RD, count_E)
        if is_streamed and number in following:
            slots[following[number]] = bank.fetch(following[number], y_RD)
        return y_RD

    return cut(leaves, run_rows)


# Compiled programs.


@dataclasses.dataclass(frozen=True)
class RingProgram:
    """A compiled program for arguments of some shapes.

    Attributes:
        run: `(donated leaves, other leaves, bank)` -> the program's results.
        is_donated: for each leaf, whether it is donated.
        rows: see `CutProgram`.
        copied_bytes: bytes that a run copies to the device.
    """

    run: Callable
    is_donated: tuple[bool, ...]
    rows: tuple[tuple[int, int], ...]
    copied_bytes: int

    def __call__(self, leaves: Sequence, bank: Bank):
        """Runs the program and returns its results.

        Args:
            leaves: the leaves of the program's arguments.
        """
        return self.run(*tree.parted(leaves, self.is_donated), bank)


def ring_program(
    config: ModelConfig, bank: Bank, program, settings: tuple, arrays: dict, shape, options
) -> RingProgram:
    """The program of `cut_program` with the ring in it; `PROGRAMS` keeps it."""
    kind = kind_of(arrays)

    def make():
        cut, is_donated = traced(program, settings, kind), donated_leaves(arrays)

        def run(donated, kept, bank):
            donated, kept = iter(donated), iter(kept)
            leaves = [next(donated if is_dead else kept) for is_dead in is_donated]
            return run_with_ring(config, cut, bank, leaves)

        jitted = jax.jit(run, donate_argnums=0, compiler_options=dict(options))
        arguments = tree.parted(jax.tree.leaves(arrays), is_donated)
        copied = copied_bytes(jitted.trace(*arguments, bank).jaxpr.jaxpr)
        return RingProgram(jitted, is_donated, cut.rows, copied), 1

    key = program, settings, shape, options, kind, config, kind_of(bank)
    return PROGRAMS.kept(key, make)


def copied_bytes(jaxpr) -> int:
    """Bytes that a run of a program puts on the device; of loops as often as they turn."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            total += tree.num_bytes([var.aval for var in equation.outvars])
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * sum(copied_bytes(inner.jaxpr) for inner in _inner(equation))
    return total


def _inner(equation) -> list:
    """Closed programs that an equation runs."""
    values = equation.params.values()
    flat = [x for each in values for x in (each if isinstance(each, tuple) else (each,))]
    return [each for each in flat if hasattr(each, "jaxpr") and hasattr(each, "consts")]
