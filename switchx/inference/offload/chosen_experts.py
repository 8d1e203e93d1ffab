# SPDX-License-Identifier: Apache-2.0
"""Experts that never lie on the device as a whole: those that were chosen come into slots.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 3.2, keeps experts in host memory and
moves all of a layer to the device, a few layers ahead. A step of decoding chooses few of them,
so here the host reads which, and moves those that are not there yet. Each Switch layer has K
slots on the device. `storage.Cache` decides who leaves them, for each layer by itself. Where a
call chooses more than K experts of a layer, as a prompt does, their rows are computed in rounds
of K: each row has one expert, so rounds change no number.

With `prefetch` the router of the next Switch layer, applied to what the experts of this one
read, predicts which experts it chooses; those are moved while this layer is computed. A wrong
prediction costs a copy, and changes no number.
Dims: R rows, D model, E experts, S choices of a row, K slots of a layer
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from switchx import tree
from switchx.checkpoint.items import RECORDS, has_records
from switchx.fields import require
from switchx.hardware.spec import Hardware
from switchx.inference.config import ExpertSlots
from switchx.inference.offload.copy_times import CallKind, kinds_of_call
from switchx.inference.offload.cut_program import cut_program
from switchx.inference.offload.expert_slots import LayerSlots, predicted, run_layer
from switchx.inference.offload.expert_source import (
    ExpertSource,
    HostExperts,
    ReadExpert,
    StoredExperts,
    StoredTraffic,
    Weights,
    expert_of_snapshot,
    slice_of,
)
from switchx.inference.quantize import is_quantized, model_bytes, packed
from switchx.models.config import ModelConfig, require_our_blocks
from switchx.models.params import abstract_params
from switchx.models.stored_experts import EXPERTS_PATH
from switchx.models.unroll import unrolled
from switchx.moe.experts import WEIGHTS, AbsentExperts
from switchx.object_store import Folder
from switchx.storage import PolicyName
from switchx.storage.cache import FORWARD, Moment, make_policy
from switchx.storage.trace import Trace, TraceLog


@dataclasses.dataclass(frozen=True)
class ExpertTraffic:
    """Counts of what the slots have done so far, in all calls together.

    Attributes:
        num_layers, num_experts, slots: number of Switch layers, and of experts and slots in
            each.
        device_bytes: bytes of all slots.
        expert_bytes: bytes of all experts, in host memory or files.
        requested, hits: experts that calls have chosen, counted once for each layer and call,
            and how many of them were in a slot.
        moved_bytes: bytes copied to the device.
        rounds: products with a bank; one for each layer and call where K slots are enough.
        predicted, correct: experts that were prefetched or kept for the next layer, and how
            many of them it chose.
        stored: traffic of experts that are read from files; None where all are in host memory.
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
    predicted: int = 0
    correct: int = 0
    stored: StoredTraffic | None = None

    def __str__(self) -> str:
        mib = 2**20
        rate = self.hits / self.requested if self.requested else 0.0
        more = ""
        if self.predicted:
            share = self.correct / self.predicted
            more = f"; {share:.1%} of {self.predicted:,} predicted were chosen"
        if self.stored is not None:
            more += f"; {self.stored}"
        return (
            f"experts: {self.slots} slots for {self.num_experts} in each of "
            f"{self.num_layers} layers, {self.device_bytes / mib:,.2f} of "
            f"{self.expert_bytes / mib:,.2f} MiB on the device; {self.requested:,} requested, "
            f"{rate:.1%} hits, {self.moved_bytes / mib:,.2f} MiB moved{more}"
        )


class ChosenExperts:
    """A model whose experts are in host memory or files, and the programs that run it.

    One thread alone may use it.

    Attributes:
        params: the model's parameters, with `AbsentExperts` in the place of experts.
        source: the experts' source, in host memory or files.
        num_calls: number of calls of programs.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        slots: int,
        policy: PolicyName = "lru",
        *,
        prefetch: bool = False,
        source: ExpertSource | None = None,
        resident: Mapping[int, Weights] | None = None,
    ):
        """Takes the experts of `on_host`, NumPy arrays that do not change, or of a source.

        Args:
            config, params: an unrolled model.
            slots: K, the number of slots of each Switch layer.
            policy: eviction policy of each layer's slots.
            prefetch: whether the next layer's choices are predicted.
            source: the experts' source; None takes them from `params`.
            resident: all experts of some Switch layers, by the layer's number: these are on the
                device, without slots.

        Raises:
            ValueError: see `check_slots`.
        """
        check_slots(config, slots)
        self._resident = resident or {}
        self.params, layers = without_bank(config, params)
        E, names = config.switch.num_experts, config.sparse_layer_names
        self.source = source or HostExperts(layers)
        self._layers = {
            n: LayerSlots(config, self.source, n, slots, make_policy(policy, 1, E, sweeps=1))
            for n in range(len(names))
            if n not in self._resident
        }
        self._config = config
        self._routers = {}
        if prefetch:
            self._routers = _next_routers(config, tree.named_leaves(self.params))
        self._log = TraceLog(names, E, self.source.expert_bytes)
        self.num_calls = 0
        # Number of calls, by the call's Switch layers and their rows.
        self._calls: collections.Counter[tuple[tuple[int, int], ...]] = collections.Counter()

    def trace(self) -> Trace | None:
        """The trace of the newest requests, one for each round; None before the first.

        Layers share no slots: a simulation takes one layer at a time.
        """
        return self._log.trace()

    @property
    def traffic(self) -> ExpertTraffic:
        layers = list(self._layers.values())
        return ExpertTraffic(
            num_layers=len(layers),
            num_experts=layers[0].num_experts,
            slots=layers[0].cache.capacity,
            device_bytes=sum(model_bytes(each.bank) for each in layers),
            expert_bytes=len(layers) * layers[0].num_experts * self.source.expert_bytes,
            requested=sum(each.num_requested for each in layers),
            hits=sum(each.num_hits for each in layers),
            moved_bytes=sum(each.moved_bytes for each in layers),
            rounds=sum(each.num_rounds for each in layers),
            predicted=sum(each.num_predicted for each in layers),
            correct=sum(each.num_correct for each in layers),
            stored=self.source.stored,
        )

    def kinds(self, hardware: Hardware) -> list[CallKind]:
        """The kinds of calls so far, and whether streaming whole layers hides their copies on
        this hardware; those with the most tokens first.

        Raises:
            ValueError: see `streaming.streaming`.
        """
        traffic, size = self.traffic, self.source.expert_bytes
        hits = traffic.hits / traffic.requested if traffic.requested else 0.0
        return kinds_of_call(self._config, hardware, self._calls, size, "chosen", hits)

    def run(self, program, *settings, shape: tuple = (), options=(), state=None, **arrays):
        """Runs a jitted program, cut at its Switch layers, and returns its results.

        Args:
            settings: the program's static arguments, which are its first ones.
            shape: the key by which `Programs.holds` finds the program.
            options: compiler options, for all programs but those of single experts.
            state: an argument of this name whose arrays are not read after the call.
            arrays: the program's other arguments; `params` are `self.params`.
        """
        arrays = arrays if state is None else arrays | {"state": without_aliases(state)}
        self.num_calls += 1
        cut = cut_program(program, settings, arrays, shape, options)
        self._calls[cut.rows] += 1
        return cut(jax.tree.leaves(arrays), self.run_rows)

    def run_rows(self, layer: int, x_RD, count_E):
        """Rows sorted by expert, each through its expert; `run` calls it at each cut."""
        if layer in self._resident:
            return run_layer(self._config, self._resident[layer], x_RD, count_E)
        slots = self._layers[layer]
        y_RD = jnp.zeros_like(x_RD)
        chosen = np.flatnonzero(np.asarray(count_E))  # waits for the router
        slots.compare(chosen)
        moment, guess_E = Moment(self.num_calls, FORWARD, layer), None
        if layer in self._routers:
            # Begins before the experts do, so that it is there while they run.
            guess_E = predicted(self._config, *self._routers[layer], x_RD, count_E)
        for experts in slots.rounds(chosen):
            self._log.add(layer * slots.num_experts + experts, moment)
            y_RD = slots.run_round(experts, moment, x_RD, count_E, y_RD)
        if guess_E is not None and layer + 1 in self._layers:
            self._layers[layer + 1].prefetch(np.asarray(guess_E), moment)
        return y_RD


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


def with_slots(
    config: ModelConfig, params: dict, asked: ExpertSlots, read: ReadExpert | None = None
) -> tuple[ModelConfig, dict, ChosenExperts]:
    """Returns the unrolled configuration, its parameters without experts on the device, and the
    object that moves the experts.

    Args:
        params: parameters with experts, on any device; or without experts, or with
            `FileArray`s, where `read` reads them.

    Raises:
        ValueError: see `check_slots` and `StoredExperts`.
    """
    check_slots(config, asked.slots)
    source = None
    if read is None:
        config, params = on_host(config, packed(params))
    else:
        if config.scan_layers:
            config, params = unrolled(config, params)
        leaves = tree.named_leaves(abstract_params(config))
        _, dense = split_experts(params)
        experts = {name: leaf for name, leaf in leaves.items() if EXPERTS_PATH in name}
        params = tree.nested({n: jnp.array(leaf) for n, leaf in dense.items()} | experts)
        source = StoredExperts(config, read, asked.host_bytes, asked.slots, asked.policy)
    experts = ChosenExperts(
        config, params, asked.slots, asked.policy, prefetch=asked.prefetch, source=source
    )
    return config, params, experts


def slices_of(config: ModelConfig, params: dict) -> ReadExpert:
    """Returns the reader of the experts of parameters whose experts are `FileArray`s."""
    found, _ = split_experts(params)
    layers = [
        found[f"{layer_path(layer)}{EXPERTS_PATH}"] for layer in config.sparse_layer_names
    ]
    return lambda layer, expert: slice_of(layers[layer], expert)


def experts_of_checkpoint(config: ModelConfig, checkpoint: Folder, slots: int) -> ReadExpert:
    """Returns the reader of the experts in the records of a run's checkpoint.

    Raises:
        ValueError: the checkpoint has no records, or the model takes no such slots.
    """
    check_slots(config, slots)
    require(
        has_records(checkpoint),
        f"host_bytes with {checkpoint}, which has its experts in arrays of whole layers: an "
        "expert cannot be read from them by itself; use the folder of `switchx quantize`, or "
        "train on with configs/storage/disk.gin, or leave host_bytes (or "
        "--expert_cache, which has it) out",
    )
    return expert_of_snapshot(checkpoint / RECORDS, config)


def on_host(config: ModelConfig, params: dict) -> tuple[ModelConfig, dict]:
    """An unrolled model, its experts NumPy arrays, all else on the default device.

    Args:
        params: the parameters, on any device; experts on a CPU are not copied.
    """
    config, params = unrolled(config, params)

    def placed(name, leaf):
        array = np.asarray(leaf)
        return array if EXPERTS_PATH in name else jnp.array(array)

    return config, tree.map_named(placed, params)


def layer_path(layer: str) -> str:
    """`decoder 1` -> what the names of its parameters begin with."""
    stack, number = layer.split()
    return f"{stack}/blocks/layer_{number}/ffn"


def _next_routers(config: ModelConfig, dense: dict[str, Any]) -> dict[int, tuple]:
    """Weights and bias of the router of the Switch layer after each, where it is in the same
    stack and chooses by weights."""
    router, names, found = config.switch.router, config.sparse_layer_names, {}
    if not router.has_weights or router.has_choosing_experts:
        return {}
    for n, (layer, following) in enumerate(zip(names, names[1:], strict=False)):
        if layer.split()[0] == following.split()[0]:
            path = layer_path(following)
            bias_E = dense.get(f"{path}/router_bias_E")
            found[n] = dense[f"{path}/w_router_DE"], bias_E
    return found


def without_bank(config: ModelConfig, params: dict) -> tuple[dict, list[Weights]]:
    """Parameters of an unrolled model with `AbsentExperts` in the place of experts, and the
    experts of each Switch layer, where `params` has them."""
    layers, dense = split_experts(params)
    paths = [f"{layer_path(layer)}{EXPERTS_PATH}" for layer in config.sparse_layer_names]
    absent = {f"{path}{WEIGHTS[0]}": AbsentExperts(n) for n, path in enumerate(paths)}
    return tree.nested(dense | absent), [layers[path] for path in paths if path in layers]


def split_experts(params: dict) -> tuple[dict[str, Weights], dict[str, Any]]:
    """Weights of the experts of each Switch layer by the layer's path, and all else by path."""
    layers: dict[str, Weights] = {}
    dense = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        name = tree.path_name(path)
        if EXPERTS_PATH in name:
            prefix, _, weight = name.rpartition("/")
            layers.setdefault(f"{prefix}/", {})[weight] = leaf
        else:
            dense[name] = leaf
    return layers, dense


def without_aliases(state):
    """A copy of the state in which no two leaves are one array, as each is donated once."""
    seen: set[int] = set()

    def own(leaf):
        if id(leaf) in seen:
            return jnp.array(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, state)
