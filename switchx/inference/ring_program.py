# SPDX-License-Identifier: Apache-2.0
"""A traced program whose scans over layers run with the banks of a ring's slots.

`inference/ring_decode.py` says what for. Equations are evaluated in their order within one
jitted function; those that ask for no experts as they are.
Dims: R rows, D model, E experts, N layers of a stack
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from switchx import tree
from switchx.inference.chosen_experts import MOST_PROGRAMS
from switchx.inference.cut_program import donated_leaves, function_of, variables
from switchx.inference.expert_source import Weights
from switchx.inference.quantize import model_bytes, native
from switchx.models.config import ModelConfig
from switchx.moe.experts import WEIGHTS, ExpertFFN, absent_rows_p
from switchx.partitioning.host_stack import HOST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bank:
    """The experts of a stack's layers, `[layers, E, ...]` by name.

    Attributes:
        resident: on the device, of the first K - 2 layers.
        streamed: in host memory, of the others.
        num_layers, layer_bytes: of all, and of one.
    """

    resident: Weights
    streamed: Weights
    num_layers: int = dataclasses.field(metadata={"static": True})
    layer_bytes: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, layers: Sequence[Weights], slots: int) -> "Bank":
        layers = [native(layer) for layer in layers]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
        kept = slots - 2
        device = jax.devices()[0]
        kinds = {memory.kind for memory in device.addressable_memories()}
        # On a CPU the kinds of memory are one.
        kind = HOST if HOST in kinds and device.platform != "cpu" else None
        host = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        return cls(
            jax.tree.map(lambda x: jnp.array(x[:kept]), stacked),
            jax.tree.map(lambda x: jax.device_put(x[kept:].copy(), host), stacked),
            len(layers),
            model_bytes(layers[0]),
        )


@dataclasses.dataclass(frozen=True)
class RingProgram:
    """A compiled program for arguments of some shapes.

    Attributes:
        run: (donated leaves, other leaves, banks) -> its results.
        is_donated: of each leaf.
        rows: of each stack whose layers it runs the number, and R.
    """

    run: Callable
    is_donated: tuple[bool, ...]
    rows: tuple[tuple[int, int], ...]

    def donated(self, leaves) -> list:
        return [x for x, is_dead in zip(leaves, self.is_donated, strict=True) if is_dead]

    def kept(self, leaves) -> list:
        return [x for x, is_dead in zip(leaves, self.is_donated, strict=True) if not is_dead]


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def ring_program(config, program, settings, structure, shapes) -> RingProgram:
    arrays = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*each) for each in shapes])
    is_donated = donated_leaves(arrays)
    traced = program.trace(*settings, **arrays)
    closed, results = traced.jaxpr, jax.tree.structure(traced.out_info)

    def run(donated, kept, banks):
        donated, kept = iter(donated), iter(kept)
        leaves = [next(donated if is_dead else kept) for is_dead in is_donated]
        found = _evaluate(closed.jaxpr, closed.consts, leaves, _Rings(config, banks))
        return jax.tree.unflatten(results, found)

    rows = tuple(dict(_asked(closed.jaxpr)).items())
    return RingProgram(jax.jit(run, donate_argnums=0), is_donated, rows)


@dataclasses.dataclass(frozen=True)
class _Rings:
    """Runs what asks for experts: scans over layers, with the banks of their stacks.

    Attributes:
        banks: by number of the stack.
        bank: of the layer that is computed; None outside of a scan.
    """

    config: ModelConfig
    banks: Sequence[Bank]
    bank: Weights | None = None

    def rows(self, inputs) -> list:
        """The rows of a layer, of its `bank`."""
        weights = (self.bank.get(name) for name in WEIGHTS)
        return [ExpertFFN.of(self.config, *weights, key=None).run_rows(*inputs)]

    def scan(self, equation: JaxprEqn, inputs) -> list:
        """A scan over the layers of a stack: those that are resident, then the ring.

        Each of the S layers that stream is copied once: into one slot while the layer in the
        other is computed. A turn of the loop has two layers, so that no slot is copied on the
        device.
        """
        body, given = equation.params["jaxpr"], equation.params
        num_consts, num_carry = given["num_consts"], given["num_carry"]
        consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
        # Shapes of weights that are absent are scanned over, too, and never read.
        read = variables(atom for eqn in body.jaxpr.eqns for atom in eqn.invars)
        read |= variables(body.jaxpr.outvars)
        of_xs = body.jaxpr.invars[num_consts + num_carry :]
        is_read = [var in read for var in of_xs]
        every = zip(inputs[num_consts + num_carry :], is_read, strict=True)
        xs = [x for x, is_used in every if is_used]
        ((stack, _),) = _asked(body.jaxpr)
        own = self.banks[stack]

        def layer(carry, bank, x):
            rings, parts = dataclasses.replace(self, bank=bank), iter(x)
            x = [next(parts) if is_used else None for is_used in is_read]
            found = _evaluate(body.jaxpr, body.consts, [*consts, *carry, *x], rings)
            return found[:num_carry], found[num_carry:]

        def fetch(n, carry):
            """A slot with layer n, and the carry: a copy begins when that is there. Do not
            simplify: the compiler would begin all copies at once."""
            n, carry = jax.lax.optimization_barrier((jnp.asarray(n, jnp.int32), carry))

            def copy(leaf):
                part = jax.lax.dynamic_index_in_dim(leaf, n, keepdims=False)
                return jax.device_put(part, jax.memory.Space.Device)

            return jax.tree.map(copy, own.streamed), carry

        S = jax.tree.leaves(own.streamed)[0].shape[0]
        kept, turns = own.num_layers - S, (S - 1) // 2
        ys = []
        if kept:
            first = [x[:kept] for x in xs]
            carry, y = jax.lax.scan(lambda c, n: layer(c, *n), carry, (own.resident, first))
            ys.append(y)

        def turn(state, each):
            carry, one = state
            n, x = each
            other, carry = fetch(n + 1, carry)
            carry, y_0 = layer(carry, one, [leaf[0] for leaf in x])
            one, carry = fetch(n + 2, carry)
            carry, y_1 = layer(carry, other, [leaf[1] for leaf in x])
            return (carry, one), [jnp.stack(pair) for pair in zip(y_0, y_1, strict=True)]

        slot, carry = fetch(0, carry)
        if turns:
            pairs = [x[kept : kept + 2 * turns].reshape(turns, 2, *x.shape[1:]) for x in xs]
            (carry, slot), y = jax.lax.scan(turn, (carry, slot), (2 * jnp.arange(turns), pairs))
            ys.append([leaf.reshape(2 * turns, *leaf.shape[2:]) for leaf in y])
        for n in range(2 * turns, S):
            following = None
            if n + 1 < S:
                following, carry = fetch(n + 1, carry)
            carry, y = layer(carry, slot, [x[kept + n] for x in xs])
            ys.append([leaf[None] for leaf in y])
            slot = following
        return [*carry, *(jnp.concatenate(parts) for parts in zip(*ys, strict=True))]


def _evaluate(jaxpr: Jaxpr, consts, inputs, rings: _Rings) -> list:
    """The results of equations, those that ask for experts by `rings`."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for asks, equations in itertools.groupby(jaxpr.eqns, _asks):
        if not asks:
            values.update(_run(jaxpr, list(equations), values))
            continue
        for equation in equations:
            given = [read(atom) for atom in equation.invars]
            if equation.primitive is absent_rows_p:
                found = rings.rows(given)
            elif equation.primitive.name == "scan":
                found = rings.scan(equation, given)
            else:
                (inner,) = _inner(equation)
                found = _evaluate(inner.jaxpr, inner.consts, given, rings)
            values.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _run(jaxpr: Jaxpr, equations: list[JaxprEqn], values: dict) -> dict:
    """What neighbouring equations of a program give to the rest of it, by variable."""
    made = {var for equation in equations for var in equation.outvars}
    read = variables(atom for eqn in equations for atom in eqn.invars)
    inputs = [var for var in read if var not in made]
    later = variables(atom for eqn in jaxpr.eqns for atom in eqn.invars)
    later |= variables(jaxpr.outvars)
    outputs = [var for eqn in equations for var in eqn.outvars if var in later]
    found = function_of(equations, inputs, outputs)(*(values[var] for var in inputs))
    return dict(zip(outputs, found, strict=True))


def _asks(equation: JaxprEqn) -> bool:
    """Whether an equation asks for experts, or one inside of it does."""
    is_rows = equation.primitive is absent_rows_p
    return is_rows or any(_asked(inner.jaxpr) for inner in _inner(equation))


def _asked(jaxpr: Jaxpr) -> list[tuple[int, int]]:
    """The stacks whose experts a program asks for, by number, and R of each."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive is absent_rows_p:
            found.append((equation.params["layer"], equation.invars[0].aval.shape[0]))
        for inner in _inner(equation):
            found += _asked(inner.jaxpr)
    return found


def copied_bytes(jaxpr: Jaxpr) -> int:
    """Bytes that a run of a program puts on the device; of loops as often as they turn."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            total += tree.num_bytes([var.aval for var in equation.outvars])
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * sum(copied_bytes(inner.jaxpr) for inner in _inner(equation))
    return total


def _inner(equation: JaxprEqn) -> list[Any]:
    """Closed programs that an equation runs."""
    values = equation.params.values()
    flat = [x for each in values for x in (each if isinstance(each, tuple) else (each,))]
    return [each for each in flat if hasattr(each, "jaxpr") and hasattr(each, "consts")]
