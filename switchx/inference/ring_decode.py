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

import collections
import dataclasses

import jax
import jax.numpy as jnp

from switchx import tree
from switchx.fields import require
from switchx.inference.chosen_experts import (
    ChosenExperts,
    check_slots,
    layer_path,
    on_host,
    split_experts,
    with_slots,
    without_aliases,
)
from switchx.inference.config import ExpertSlots
from switchx.inference.decode import goes_on, run_step
from switchx.inference.expert_source import EXPERTS, ReadExpert
from switchx.inference.quantize import packed
from switchx.inference.ring_program import Bank, RingProgram, copied_bytes, ring_program
from switchx.models.config import ModelConfig
from switchx.models.unroll import scanned_blocks
from switchx.moe.experts import WEIGHTS, AbsentExperts
from switchx.planner.hardware import Hardware
from switchx.planner.streaming import Streaming, streaming_of


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
        config, params = on_host(config, packed(params))
        layers, dense = split_experts(params)
        names = config.sparse_layer_names
        self._stacks = tuple(dict.fromkeys(name.split()[0] for name in names))
        self._banks = []
        for stack in self._stacks:
            own = [layers[f"{layer_path(name)}{EXPERTS}"] for name in names if stack in name]
            self._banks.append(Bank.of(own, slots))
        self._slots, self._num_calls, self._moved = slots, 0, 0
        # Bytes that a run of a program copies to the device.
        self._copied: dict[RingProgram, int] = {}
        # By stack and rows.
        self._calls: collections.Counter[tuple[str, int]] = collections.Counter()
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

    def streaming(self, hardware: Hardware) -> list[tuple[int, Streaming]]:
        """See `ChosenExperts.streaming`."""
        size = self._banks[0].layer_bytes / self.config.switch.num_experts
        return streaming_of(self.config, hardware, self._calls, size)

    def run(self, program, *settings, state=None, **arrays):
        """What a jitted program returns; see `ChosenExperts.run`."""
        arrays = arrays if state is None else arrays | {"state": without_aliases(state)}
        leaves, structure = jax.tree.flatten(arrays)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        ring = ring_program(self.config, program, settings, structure, shapes)
        arguments = ring.donated(leaves), ring.kept(leaves), self._banks
        if ring not in self._copied:
            self._copied[ring] = copied_bytes(ring.run.trace(*arguments).jaxpr.jaxpr)
        self._num_calls += 1
        self._moved += self._copied[ring]
        self._calls.update((self._stacks[number], R) for number, R in ring.rows)
        return ring.run(*arguments)

    def run_until(self, config, decoding, params, state, num_live, last_step=None):
        """`decode.run_until`, its loop on the host."""
        while goes_on(state, num_live, last_step):
            state = self.run(run_step, config, decoding, params=params, state=state)
        return state


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


# One choice of both.


def outside_of_device(
    config: ModelConfig, params: dict, asked: ExpertSlots, read: ReadExpert | None
) -> tuple[ModelConfig, dict, ChosenExperts | RingExperts]:
    """`chosen_experts.with_slots`, or with `asked.ring` a ring.

    Raises:
        ValueError: see there and `check_ring`; a ring has all experts in host memory.
    """
    if not asked.ring:
        return with_slots(config, params, asked, read)
    given = {"host_bytes": asked.host_bytes, "prefetch": asked.prefetch}
    wrong = [name for name, value in given.items() if value]
    require(
        not wrong,
        f"a ring with {' and '.join(wrong)}: it has all experts in host memory and streams "
        "them in order; leave that out, or use expert_slots without a ring",
    )
    ring = RingExperts(config, params, asked.slots)
    return ring.config, ring.params, ring
