# SPDX-License-Identifier: Apache-2.0
"""Experts that never lie on the device as a whole: those that were chosen come into slots.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 3.2, keeps experts in host memory and
moves all of a layer to the device, a few layers ahead. A step of decoding chooses few of them,
so here the host reads which, and moves those that are not there yet. Each Switch layer has K
slots on the device. `storage.Cache` decides who leaves them, for each layer by itself. Where a
call chooses more than K experts of a layer, as a prompt does, their rows are computed in rounds
of K: each row has one expert, so rounds change no number.
Dims: R rows, D model, E experts, K slots of a layer
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sorted_rows import rows_of_groups
from switchx import tree
from switchx.fields import require
from switchx.inference.cut_program import CutProgram
from switchx.inference.decode import goes_on, run_step
from switchx.inference.quantize import is_quantized, model_bytes, native
from switchx.models.config import ModelConfig, require_our_blocks
from switchx.models.unroll import unrolled
from switchx.moe.dropless import sort_into_rows
from switchx.moe.experts import WEIGHTS, AbsentExperts, ExpertFFN
from switchx.storage.cache import FORWARD, Cache, Place, PolicyName, make_policy
from switchx.storage.trace import Trace, TraceLog

EXPERTS = "/experts/"
# Compiled ones that are kept: one for each length, batch size and setting.
MOST_PROGRAMS = 256
Weights = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ExpertTraffic:
    """What the slots have done so far, in all calls together.

    Attributes:
        num_layers, num_experts, slots: Switch layers, experts and slots of each.
        device_bytes: of all slots.
        expert_bytes: of all experts, in host memory.
        requested, hits: experts that calls have chosen, a layer and call each once, and how
            many of them were in a slot.
        moved_bytes: to the device.
        rounds: products with a bank; one a layer and call where K are enough.
    """

    num_layers: int
    num_experts: int
    slots: int
    device_bytes: int
    expert_bytes: int
    requested: int
    hits: int
    moved_bytes: int
    rounds: int

    def __str__(self) -> str:
        mib = 2**20
        rate = self.hits / self.requested if self.requested else 0.0
        return (
            f"experts: {self.slots} slots for {self.num_experts} in each of "
            f"{self.num_layers} layers, {self.device_bytes / mib:,.2f} of "
            f"{self.expert_bytes / mib:,.2f} MiB on the device; {self.requested:,} requested, "
            f"{rate:.1%} hits, {self.moved_bytes / mib:,.2f} MiB moved"
        )


class ChosenExperts:
    """A model whose experts are in host memory, and the programs that run it.

    For one thread.

    Attributes:
        params: all others of the model's parameters, `AbsentExperts` in the place of experts.
    """

    def __init__(
        self, config: ModelConfig, params: dict, slots: int, policy: PolicyName = "lru"
    ):
        """Takes the experts of `split_experts` or `on_host`, NumPy arrays that do not change.

        Args:
            config, params: of an unrolled model.
            slots: K, of each Switch layer.
            policy: of each layer's slots.

        Raises:
            ValueError: see `check_slots`.
        """
        check_slots(config, slots)
        layers, dense = _split(params)
        E = config.switch.num_experts
        names = [_path(layer) for layer in config.sparse_layer_names]
        absent = {f"{name}{WEIGHTS[0]}": AbsentExperts(n) for n, name in enumerate(names)}
        self.params = tree.nested(dense | absent)
        self._layers = [
            _LayerSlots(config, layers[name], slots, make_policy(policy, 1, E, sweeps=1))
            for name in names
        ]
        record_bytes = tree.num_bytes(self._layers[0].experts) // E
        self._log = TraceLog(config.sparse_layer_names, E, record_bytes)
        self._num_calls = 0

    def trace(self) -> Trace | None:
        """What was requested, the newest of it, a round a request; None before the first.

        Layers share no slots: a simulation takes one layer at a time.
        """
        return self._log.trace()

    @property
    def traffic(self) -> ExpertTraffic:
        layers = self._layers
        return ExpertTraffic(
            num_layers=len(layers),
            num_experts=layers[0].num_experts,
            slots=layers[0].cache.capacity,
            device_bytes=sum(model_bytes(each.bank) for each in layers),
            expert_bytes=sum(model_bytes(each.experts) for each in layers),
            requested=sum(each.cache.num_requested for each in layers),
            hits=sum(each.cache.num_hits for each in layers),
            moved_bytes=sum(each.moved_bytes for each in layers),
            rounds=sum(each.num_rounds for each in layers),
        )

    def run(self, program, *settings, state=None, **arrays):
        """What a jitted program returns, cut at its Switch layers.

        Args:
            settings: its static arguments, which are its first ones.
            state: an argument of this name whose arrays are not read after the call.
            arrays: its other arguments; `params` are `self.params`.
        """
        arrays = arrays if state is None else arrays | {"state": _without_aliases(state)}
        leaves, structure = jax.tree.flatten(arrays)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        self._num_calls += 1
        return _cut(program, settings, structure, shapes)(leaves, self.run_rows)

    def run_until(self, config, decoding, params, state, num_live, last_step=None):
        """`decode.run_until`, its loop on the host."""
        while goes_on(state, num_live, last_step):
            state = self.run(run_step, config, decoding, params=params, state=state)
        return state

    def run_rows(self, layer: int, x_RD, count_E):
        """Rows sorted by expert, each through its expert; `run` calls it at each cut."""
        slots = self._layers[layer]
        y_RD = jnp.zeros_like(x_RD)
        chosen = np.flatnonzero(np.asarray(count_E))  # waits for the router
        for experts in slots.rounds(chosen):
            place = Place(self._num_calls, FORWARD, layer)
            self._log.add(layer * slots.num_experts + experts, place)
            y_RD = slots.run_round(experts, place, x_RD, count_E, y_RD)
        return y_RD


class _LayerSlots:
    """The slots of one Switch layer, and who is in them.

    Attributes:
        experts: in host memory, `[E, ...]` by name.
        bank: on the device, `[K, ...]`.
        moved_bytes, num_rounds: see `ExpertTraffic`.
    """

    def __init__(self, config: ModelConfig, experts: Weights, slots: int, policy):
        self._config = slotted(config)
        self.experts, self.cache = experts, Cache(slots, policy)
        self.num_experts = config.switch.num_experts
        self.bank = _empty_bank(self._expert(0), slots)
        self.moved_bytes = self.num_rounds = 0
        self._slot_E = np.full(self.num_experts, slots, np.int32)  # K: in none
        self._free = list(range(slots))

    def rounds(self, chosen: np.ndarray) -> list[np.ndarray]:
        """At most K experts each; those that are there first, before they make room."""
        K = self.cache.capacity
        is_absent = self._slot_E[chosen] == K
        chosen = chosen[np.argsort(is_absent, kind="stable")]
        return [chosen[first : first + K] for first in range(0, len(chosen), K)]

    def run_round(self, experts: np.ndarray, place: Place, x_RD, count_E, y_RD):
        """`y_RD` with the rows of these experts, of rows sorted by expert."""
        self._fetch(experts, place)
        slot_E = np.full_like(self._slot_E, self.cache.capacity)
        slot_E[experts] = self._slot_E[experts]
        self.num_rounds += 1
        return _run_round(self._config, self.bank, x_RD, count_E, slot_E, y_RD)

    def _fetch(self, experts: np.ndarray, place: Place) -> None:
        """Moves those that are in no slot to one."""
        admission = self.cache.request(experts, place._replace(layer=0))
        self._free += self._slot_E[admission.evicted].tolist()
        self._slot_E[admission.evicted] = self.cache.capacity
        for number in admission.missed.tolist():
            slot, expert = self._free.pop(), self._expert(number)
            self.bank = _moved(self.bank, expert, np.int32(slot))
            self._slot_E[number] = slot
            self.moved_bytes += tree.num_bytes(expert)

    def _expert(self, number: int) -> Weights:
        """One expert, `[1, ...]`: parts of the host's arrays, which never change."""
        return jax.tree.map(lambda x: x[number : number + 1], self.experts)


def check_slots(config: ModelConfig, slots: int) -> None:
    """Raises ValueError where a model cannot be run with so many slots a Switch layer."""
    switch = config.switch
    require(
        switch is not None and switch.has_ffn,
        f"expert_slots={slots} with a dense model, which has no experts to move; leave "
        "expert_slots out",
    )
    require_our_blocks(config, "moving chosen experts")
    require(
        not switch.has_attention,
        f"expert_slots={slots} with SwitchConfig.sublayers={switch.sublayers!r}: experts of "
        "self-attention are not moved; leave expert_slots out",
    )
    E = switch.num_experts
    require(
        1 <= slots <= E,
        f"expert_slots={slots} of a model with {E} experts a layer; use 1 to {E}, or leave "
        "expert_slots out to have all on the device",
    )


def slotted(config: ModelConfig) -> ModelConfig:
    """The configuration as programs with slots are traced with: the same numbers, of layers
    that are not in a scan and experts that run rows."""
    switch = dataclasses.replace(config.switch, dispatcher="dropless", buffer_factor=None)
    return dataclasses.replace(config, switch=switch, remat="none")


def on_host(config: ModelConfig, params: dict) -> tuple[ModelConfig, dict]:
    """An unrolled model, its experts NumPy arrays, all else on the default device.

    Args:
        params: wherever they are; on a CPU, experts are not copied.
    """
    config, params = unrolled(config, params)

    def placed(name, leaf):
        array = np.asarray(leaf)
        return array if EXPERTS in name else jnp.array(array)

    return config, tree.map_named(placed, params)


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _cut(program, settings: tuple, structure, shapes: tuple) -> CutProgram:
    """A program for arguments of these shapes and dtypes, of any model."""
    leaves = [jax.ShapeDtypeStruct(*each) for each in shapes]
    arrays = jax.tree.unflatten(structure, leaves)
    is_donated = [
        name == "state" for name, each in sorted(arrays.items()) for _ in jax.tree.leaves(each)
    ]
    return CutProgram(program.trace(*settings, **arrays), is_donated)


def _path(layer: str) -> str:
    """`decoder 1` -> what the names of its experts' weights begin with."""
    stack, number = layer.split()
    return f"{stack}/blocks/layer_{number}/ffn{EXPERTS}"


def _split(params: dict) -> tuple[dict[str, Weights], dict[str, Any]]:
    """Weights of the experts of each Switch layer by the layer's path, and all else by path."""
    layers: dict[str, Weights] = {}
    dense = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        name = tree.path_name(path)
        if EXPERTS in name:
            prefix, _, weight = name.rpartition("/")
            layers.setdefault(f"{prefix}/", {})[weight] = leaf
        else:
            dense[name] = leaf
    return layers, dense


def _without_aliases(state):
    """The same state, where no two leaves are one array: each is given away once."""
    seen: set[int] = set()

    def own(leaf):
        if id(leaf) in seen:
            return jnp.array(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, state)


def _empty_bank(expert: Weights, slots: int) -> Weights:
    def zeros(leaf):
        return jnp.zeros((slots, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(zeros, jax.eval_shape(native, expert))


@functools.partial(jax.jit, donate_argnames="bank")
def _moved(bank: Weights, expert: Weights, slot) -> Weights:
    """The bank with an expert `[1, ...]` in a slot."""

    def put(bank_K, new_1):
        return jax.lax.dynamic_update_slice_in_dim(bank_K, new_1, slot, axis=0)

    return jax.tree.map(put, bank, native(expert))


@functools.partial(jax.jit, static_argnames="config", donate_argnames="y_RD")
def _run_round(config: ModelConfig, bank: Weights, x_RD, count_E, slot_E, y_RD):
    """`y_RD` with the rows of those experts that have a slot in this round.

    Args:
        x_RD, count_E: rows sorted by expert.
        slot_E: K where an expert is in none, or not of this round.
    """
    R, K = len(x_RD), jax.tree.leaves(bank)[0].shape[0]
    expert_R, is_used_R = rows_of_groups(count_E, R)
    slot_R = jnp.where(is_used_R, slot_E[expert_R], K)
    rows = sort_into_rows(slot_R, K, rows=R)
    experts = ExpertFFN.of(config, *(bank.get(name) for name in WEIGHTS), key=None)
    sorted_RD = x_RD.at[rows.choice_R].get(mode="fill", fill_value=0)
    found_RD = experts.run_rows(sorted_RD, rows.count_E)
    found_RD = found_RD.at[rows.row_X].get(mode="fill", fill_value=0)
    return jnp.where((slot_R < K)[:, None], found_RD, y_RD)
