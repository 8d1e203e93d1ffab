# SPDX-License-Identifier: Apache-2.0
"""Experts that stream to the device layer by layer, in one program a call: a ring of slots.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 3.2, Figure 5. The device has slots for the
experts of K layers; while one layer is computed, those of a later one are copied. The paper's
ring loads all L layers in each step. Here K - 2 layers keep their slots, and L - K + 2 stream
through the other two. It is for prompts and large batches, which choose most experts anyway
(`planner/streaming.py` says when copies hide); decoding steps move less with `ChosenExperts`.

A program is traced as it is, with `AbsentExperts`, layers scanned. Where its scan over layers
asks for experts, the body of the scan runs with the bank of a slot. There is no second decoder.
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
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)

from switchx import tree
from switchx.fields import require
from switchx.inference.chosen_experts import (
    MOST_PROGRAMS,
    check_slots,
    layer_path,
    split_experts,
    without_aliases,
)
from switchx.inference.decode import goes_on, run_step
from switchx.inference.expert_source import EXPERTS, Weights
from switchx.inference.quantize import model_bytes, native
from switchx.models.config import ModelConfig
from switchx.models.unroll import scanned_blocks, unrolled
from switchx.moe.experts import WEIGHTS, AbsentExperts, ExpertFFN, absent_rows_p

HOST = "pinned_host"


@dataclasses.dataclass(frozen=True)
class RingTraffic:
    """What the ring has done so far, in all calls together.

    Attributes:
        slots: K, of each stack.
        device_bytes: of all slots.
        expert_bytes: of all experts.
        calls: of programs.
        moved_bytes: to the device.
    """

    slots: int
    device_bytes: int
    expert_bytes: int
    calls: int
    moved_bytes: int

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"experts: a ring of {self.slots} layers, {self.device_bytes / mib:,.2f} of "
            f"{self.expert_bytes / mib:,.2f} MiB on the device; {self.calls:,} calls, "
            f"{self.moved_bytes / mib:,.2f} MiB moved"
        )


class RingExperts:
    """A model whose experts are in host memory, and the programs that stream them.

    Attributes:
        config: scanned.
        params: all others of the model's parameters, `AbsentExperts` in the place of experts.
    """

    def __init__(self, config: ModelConfig, params: dict, slots: int):
        """Takes a model with all its experts, scanned or not, wherever they are.

        Args:
            slots: K, layers of each stack whose experts are on the device at once.

        Raises:
            ValueError: see `check_ring`.
        """
        check_ring(config, slots)
        config, params = unrolled(config, params)
        layers, dense = split_experts(params)
        names = config.sparse_layer_names
        self._stacks = tuple(dict.fromkeys(name.split()[0] for name in names))
        self._banks = []
        for stack in self._stacks:
            own = [layers[f"{layer_path(name)}{EXPERTS}"] for name in names if stack in name]
            self._banks.append(_Bank.of(own, slots))
        self._slots, self._num_calls, self._moved = slots, 0, 0
        dense = scanned_blocks(tree.nested(dense), config.period, jnp.stack)
        absent = {
            f"{stack}/blocks/layer_{config.period - 1}/ffn{EXPERTS}{WEIGHTS[0]}": (
                AbsentExperts(number)
            )
            for number, stack in enumerate(self._stacks)
        }
        self.params = tree.nested(tree.named_leaves(dense) | absent)
        self.config = dataclasses.replace(config, scan_layers=True)

    @property
    def traffic(self) -> RingTraffic:
        return RingTraffic(
            slots=self._slots,
            device_bytes=sum(self._slots * bank.layer_bytes for bank in self._banks),
            expert_bytes=sum(bank.num_layers * bank.layer_bytes for bank in self._banks),
            calls=self._num_calls,
            moved_bytes=self._moved,
        )

    def run(self, program, *settings, state=None, **arrays):
        """What a jitted program returns; see `ChosenExperts.run`."""
        arrays = arrays if state is None else arrays | {"state": without_aliases(state)}
        leaves, structure = jax.tree.flatten(arrays)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        ring = _ring_program(self.config, program, settings, structure, shapes)
        self._num_calls += 1
        self._moved += sum(self._banks[number].streamed_bytes for number in ring.stacks)
        return ring.run(ring.given(leaves), ring.kept(leaves), self._banks)

    def run_until(self, config, decoding, params, state, num_live, last_step=None):
        """`decode.run_until`, its loop on the host."""
        while goes_on(state, num_live, last_step):
            state = self.run(run_step, config, decoding, params=params, state=state)
        return state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Bank:
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
    def of(cls, layers: Sequence[Weights], slots: int) -> "_Bank":
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

    @property
    def streamed_bytes(self) -> int:
        return jax.tree.leaves(self.streamed)[0].shape[0] * self.layer_bytes


def check_ring(config: ModelConfig, slots: int) -> None:
    """Raises ValueError where a model's experts cannot stream through so many slots."""
    if config.switch is None or not config.switch.has_ffn or config.switch.has_attention:
        check_slots(config, slots)
    period = config.period
    require(
        not config.switch.has_named_layers,
        "a ring with SwitchConfig.encoder_layers or decoder_layers: it scans over runs of "
        "blocks that are alike; use expert_slots, which moves chosen experts",
    )
    for stack in ("encoder", "decoder"):
        number = config.num_sparse_layers_of(stack)
        require(
            not number or 2 <= slots <= number,
            f"a ring of {slots} slots, but the {stack} has {number} Switch layers (one in "
            f"{period} blocks); use 2 to {number} slots"
            if number > 1
            else f"a ring of {slots} slots, but the {stack} has one Switch layer; use "
            "expert_slots, which moves chosen experts",
        )


# The program.


@dataclasses.dataclass(frozen=True)
class _RingProgram:
    """A compiled program for arguments of some shapes.

    Attributes:
        run: (donated leaves, other leaves, banks) -> its results.
        is_donated: of each leaf.
        stacks: numbers of the stacks whose layers it runs.
    """

    run: Callable
    is_donated: tuple[bool, ...]
    stacks: tuple[int, ...]

    def given(self, leaves) -> list:
        return [x for x, is_given in zip(leaves, self.is_donated, strict=True) if is_given]

    def kept(self, leaves) -> list:
        return [x for x, is_given in zip(leaves, self.is_donated, strict=True) if not is_given]


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _ring_program(config, program, settings, structure, shapes) -> _RingProgram:
    arrays = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*each) for each in shapes])
    is_donated = tuple(
        name == "state" for name, each in sorted(arrays.items()) for _ in jax.tree.leaves(each)
    )
    traced = program.trace(*settings, **arrays)
    closed, results = traced.jaxpr, jax.tree.structure(traced.out_info)

    def run(given, kept, banks):
        given, kept = iter(given), iter(kept)
        leaves = [next(given if is_given else kept) for is_given in is_donated]
        found = _evaluate(closed.jaxpr, closed.consts, leaves, _Rings(config, banks))
        return jax.tree.unflatten(results, found)

    return _RingProgram(
        jax.jit(run, donate_argnums=0), is_donated, tuple(_stacks_of(closed.jaxpr))
    )


@dataclasses.dataclass(frozen=True)
class _Rings:
    """Runs what asks for experts: scans over layers, with the banks of their stacks.

    Attributes:
        banks: by number of the stack.
        bank: of the layer that is computed; None outside of a scan.
    """

    config: ModelConfig
    banks: Sequence[_Bank]
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
        read = {atom for eqn in body.jaxpr.eqns for atom in eqn.invars if isinstance(atom, Var)}
        of_xs = body.jaxpr.invars[num_consts + num_carry :]
        is_read = [var in read for var in of_xs]
        every = zip(inputs[num_consts + num_carry :], is_read, strict=True)
        xs = [x for x, is_used in every if is_used]
        (stack,) = _stacks_of(body.jaxpr)
        own = self.banks[stack]

        def layer(carry, bank, x):
            rings, parts = dataclasses.replace(self, bank=bank), iter(x)
            x = [next(parts) if is_used else None for is_used in is_read]
            found = _evaluate(body.jaxpr, body.consts, [*consts, *carry, *x], rings)
            return found[:num_carry], found[num_carry:]

        def fetch(n):
            def copy(leaf):
                part = jax.lax.dynamic_index_in_dim(leaf, n, keepdims=False)
                return jax.device_put(part, jax.memory.Space.Device)

            return jax.tree.map(copy, own.streamed)

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
            other = fetch(n + 1)
            carry, y_0 = layer(carry, one, [leaf[0] for leaf in x])
            one = fetch(n + 2)
            carry, y_1 = layer(carry, other, [leaf[1] for leaf in x])
            return (carry, one), [jnp.stack(pair) for pair in zip(y_0, y_1, strict=True)]

        slot = fetch(0)
        if turns:
            pairs = [x[kept : kept + 2 * turns].reshape(turns, 2, *x.shape[1:]) for x in xs]
            (carry, slot), y = jax.lax.scan(turn, (carry, slot), (2 * jnp.arange(turns), pairs))
            ys.append([leaf.reshape(2 * turns, *leaf.shape[2:]) for leaf in y])
        for n in range(2 * turns, S):
            following = fetch(n + 1) if n + 1 < S else None
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
    read = dict.fromkeys(
        atom for eqn in equations for atom in eqn.invars if not isinstance(atom, Literal)
    )
    inputs = [var for var in read if var not in made]
    later = {atom for eqn in jaxpr.eqns for atom in eqn.invars if not isinstance(atom, Literal)}
    later |= {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    outputs = [var for eqn in equations for var in eqn.outvars if var in later]
    names = DebugInfo("ring", "part", ("",) * len(inputs), ("",) * len(outputs))
    part = ClosedJaxpr(Jaxpr([], inputs, outputs, equations, debug_info=names), [])
    found = jaxpr_as_fun(part)(*(values[var] for var in inputs))
    return dict(zip(outputs, found, strict=True))


def _asks(equation: JaxprEqn) -> bool:
    """Whether an equation asks for experts, or one inside of it does."""
    return any(True for _ in _stacks_in(equation))


def _stacks_of(jaxpr: Jaxpr) -> list[int]:
    """Numbers of the stacks whose experts are asked for, in order, each once."""
    return list(dict.fromkeys(n for eqn in jaxpr.eqns for n in _stacks_in(eqn)))


def _stacks_in(equation: JaxprEqn):
    if equation.primitive is absent_rows_p:
        yield equation.params["layer"]
    for inner in _inner(equation):
        yield from _stacks_of(inner.jaxpr)


def _inner(equation: JaxprEqn) -> list[Any]:
    """Closed programs that an equation runs."""
    values = equation.params.values()
    flat = [x for each in values for x in (each if isinstance(each, tuple) else (each,))]
    return [each for each in flat if hasattr(each, "jaxpr") and hasattr(each, "consts")]
