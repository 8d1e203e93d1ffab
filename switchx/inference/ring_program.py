# SPDX-License-Identifier: Apache-2.0
"""A program of a model whose layers of experts stream from host memory through two slots.

`inference/ring_decode.py` says what for. A program is traced with `AbsentExperts` and cut where
its Switch layers are, as by `ChosenExperts`; here the parts are one compiled program again, and
between two of them stands a layer whose experts are resident or in a slot. The copy into a slot
begins when the layer that was in it has been computed, so that it runs beside the other slot's.
Dims: R rows, D model, E experts, N layers that stream, X rows of a matrix, W words of rows
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from switchx import tree
from switchx.inference.chosen_experts import MOST_PROGRAMS
from switchx.inference.cut_program import CutProgram
from switchx.inference.expert_slots import run_layer
from switchx.inference.expert_source import Weights
from switchx.inference.quantize import native
from switchx.inference.run_exported import bits_of, host_memory_kind, host_words
from switchx.models.config import ModelConfig
from switchx.planner.streaming import streamed_layers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Words:
    """A stack of matrices of 4 or 8 bits, as host memory holds it: 32 bits of the rows of X
    that follow each other are one word.

    Do not simplify: of arrays of 8 bits and less the TPU compiler copies the whole stack to the
    device to take a slice, since their layouts differ in host and device memory.

    Attributes:
        word_NEWX: int32, `[N, E, W, ...]`, N and E as often as they are indexed.
        rows: X.
        dtype: of the matrices.
    """

    word_NEWX: jax.Array
    rows: int = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    def matrices(self):
        """What the words are of, `[E, X, ...]`, of words `[E, W, ...]`."""
        E, _, columns = self.word_NEWX.shape
        parts = jax.lax.bitcast_convert_type(self.word_NEWX, jnp.dtype(self.dtype))
        return jnp.moveaxis(parts, -1, -2).reshape(E, -1, columns)[:, : self.rows]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bank:
    """The experts of all Switch layers.

    Attributes:
        resident: by number of the layer; on the device.
        streamed: of the others, `[N, E, ...]`, in host memory; matrices of less than 16 bits
            are `Words`.
        numbers: of the layers in `streamed`.
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
        streamed = jax.tree.map(
            lambda *leaves: _stacked(leaves, lambda x: jax.device_put(x, host)),
            *(native(layers[number]) for number in numbers),
        )
        resident = {
            number: jax.tree.map(jnp.array, native(layer))
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

        def struct(shape, dtype):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=host)

        def stacked(leaf):
            if leaf.dtype.itemsize > 1:
                return struct((len(numbers), *leaf.shape), leaf.dtype)
            E, rows, columns = leaf.shape
            words = math.ceil(rows / (32 // bits_of(leaf.dtype)))
            shape = len(numbers), E, words, columns
            return Words(struct(shape, jnp.int32), rows, str(leaf.dtype))

        numbers = streamed_layers(config, slots)
        streamed = jax.tree.map(stacked, layers[numbers[0]])
        kept = {n: layer for n, layer in enumerate(layers) if n not in numbers}
        return cls(kept, streamed, numbers)

    @property
    def layer_bytes(self) -> int:
        """Of a layer's experts."""
        return self.host_bytes // len(self.numbers)

    @property
    def expert_bytes(self) -> int:
        """Of one expert, as it is moved."""
        return self.layer_bytes // jax.tree.leaves(self.streamed)[0].shape[1]

    @property
    def host_bytes(self) -> int:
        return tree.num_bytes(self.streamed)

    @property
    def device_bytes(self) -> int:
        """Of the resident layers and of two slots."""
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


def _stacked(leaves: Sequence, place: Callable):
    """Matrices of layers in host memory, by `place`."""
    leaves = [np.asarray(leaf) for leaf in leaves]
    if leaves[0].dtype.itemsize > 1:
        return place(np.stack(leaves))
    words = place(np.stack([host_words(leaf) for leaf in leaves]))
    return Words(words, leaves[0].shape[-2], str(leaves[0].dtype))


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

    def matrices(leaf):
        return leaf.matrices() if isinstance(leaf, Words) else leaf

    return jax.tree.map(matrices, placed, is_leaf=lambda leaf: isinstance(leaf, Words))


def _zero_of(array):
    """0, which the compiler does not know before the array is there.

    Do not simplify: an `optimization_barrier` is gone before copies are scheduled, and all of
    them would begin at once, each with a slot of its own.
    """
    first = array[(0,) * array.ndim].astype(jnp.float32)
    zeros = jax.lax.clz(jax.lax.bitcast_convert_type(first, jnp.int32))  # 0 to 32
    return jnp.minimum(zeros, 0)


def run_with_ring(config: ModelConfig, cut: CutProgram, bank: Bank, leaves: Sequence):
    """What a program returns; to be traced.

    Args:
        leaves: of the program's arguments.
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
        run: (donated leaves, other leaves, bank) -> its results.
        is_donated: of each leaf.
    """

    run: Callable
    is_donated: tuple[bool, ...]

    def donated(self, leaves) -> list:
        return [x for x, is_dead in zip(leaves, self.is_donated, strict=True) if is_dead]

    def kept(self, leaves) -> list:
        return [x for x, is_dead in zip(leaves, self.is_donated, strict=True) if not is_dead]


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def ring_program(
    config: ModelConfig, cut: CutProgram, is_donated: tuple[bool, ...]
) -> RingProgram:
    """A program of `cut_program` with the ring in it."""

    def run(donated, kept, bank):
        donated, kept = iter(donated), iter(kept)
        leaves = [next(donated if is_dead else kept) for is_dead in is_donated]
        return run_with_ring(config, cut, bank, leaves)

    return RingProgram(jax.jit(run, donate_argnums=0), is_donated)


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
