# SPDX-License-Identifier: Apache-2.0
"""Experts that stream to the device layer by layer, in one program a call: a ring of slots.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 3.2, Figure 5. The device has slots for the
experts of K layers; while one layer is computed, those of a later one are copied. The paper's
ring loads all L layers in each step. Here K - 2 layers keep their slots, and L - K + 2 stream
through the other two. It is for prompts and large batches, which choose most experts anyway
(`copy_times.py` says when copies hide); decoding steps move less with `ChosenExperts`.

A program is traced as it is, with `AbsentExperts`; where it asks for a layer's experts, those
that are resident or in a slot compute (`ring_program.py`). There is no second decoder.
Dims: R rows, D model, E experts
"""

import collections
import dataclasses

import jax

from switchx.fields import require
from switchx.hardware.spec import Hardware
from switchx.inference.offload.chosen_experts import (
    check_slots,
    on_host,
    without_aliases,
    without_bank,
)
from switchx.inference.offload.copy_times import CallKind, kinds_of_call
from switchx.inference.offload.ring_program import Bank, ring_program
from switchx.inference.quantize import packed
from switchx.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class RingTraffic:
    """Counts of what the ring has done so far, in all calls together.

    Attributes:
        slots: K, the number of slots of each stack.
        device_bytes: bytes of the resident layers and of two slots.
        host_bytes: bytes of the layers that stream.
        expert_bytes: bytes of all experts.
        calls: number of calls of programs.
        moved_bytes: bytes copied to the device.
        advice: text of what would be better with so many slots; empty where nothing would.
    """

    slots: int
    device_bytes: int
    host_bytes: int
    expert_bytes: int
    calls: int
    moved_bytes: int
    advice: str = ""

    def __str__(self) -> str:
        mib = 2**20
        text = (
            f"experts: a ring of {self.slots} layers, {self.device_bytes / mib:,.2f} of "
            f"{self.expert_bytes / mib:,.2f} MiB on the device, "
            f"{self.host_bytes / mib:,.2f} in host memory; {self.calls:,} calls, "
            f"{self.moved_bytes / mib:,.2f} MiB moved"
        )
        return f"{text}; {self.advice}" if self.advice else text


class RingExperts:
    """A model whose experts are in host memory, and the programs that stream them.

    Attributes:
        config: unrolled.
        params: all others of the model's parameters, `AbsentExperts` in the place of experts.
        bank: the experts.
    """

    def __init__(self, config: ModelConfig, params: dict, slots: int):
        """Takes a model with all its experts, scanned or not, wherever they are.

        Args:
            slots: K, layers of each stack whose experts are on the device at once.

        Raises:
            ValueError: see `check_ring`, and `run_exported.host_memory_kind`.
        """
        check_ring(config, slots)
        self.config, params = on_host(config, packed(params))
        self.params, layers = without_bank(self.config, params)
        self.bank = Bank.of(self.config, layers, slots)
        self._slots, self._num_calls, self._moved = slots, 0, 0
        # Number of calls, by the call's Switch layers and their rows.
        self._calls: collections.Counter[tuple[tuple[int, int], ...]] = collections.Counter()

    @property
    def traffic(self) -> RingTraffic:
        bank = self.bank
        return RingTraffic(
            slots=self._slots,
            device_bytes=bank.device_bytes,
            host_bytes=bank.host_bytes,
            expert_bytes=len(self.config.sparse_layer_names) * bank.layer_bytes,
            calls=self._num_calls,
            moved_bytes=self._moved,
            advice=ring_advice(self.config, self._slots),
        )

    def kinds(self, hardware: Hardware) -> list[CallKind]:
        """See `ChosenExperts.kinds`."""
        size = self.bank.expert_bytes
        return kinds_of_call(self.config, hardware, self._calls, size, "ring")

    def run(self, program, *settings, shape: tuple = (), options=(), state=None, **arrays):
        """Runs a jitted program and returns its results; see `ChosenExperts.run`."""
        arrays = arrays if state is None else arrays | {"state": without_aliases(state)}
        ring = ring_program(self.config, self.bank, program, settings, arrays, shape, options)
        self._num_calls += 1
        self._moved += ring.copied_bytes
        self._calls[ring.rows] += 1
        return ring(jax.tree.leaves(arrays), self.bank)


def check_ring(config: ModelConfig, slots: int) -> None:
    """Raises ValueError where a model's experts cannot stream through so many slots."""
    if config.switch is None or not config.switch.has_ffn or config.switch.has_attention:
        check_slots(config, slots)
    numbers = {stack: config.num_sparse_layers_of(stack) for stack in ("encoder", "decoder")}
    # The stack with the fewest layers says how many slots there can be.
    fewest = min(filter(numbers.get, numbers), key=numbers.get)
    number = numbers[fewest]
    has = "one Switch layer" if number == 1 else f"{number} Switch layers"
    way_out = {
        1: "expert_slots, which moves chosen experts",
        2: "2 slots, or expert_slots, which moves chosen experts",
    }.get(number, f"2 to {number} slots")
    require(
        2 <= slots <= number,
        f"a ring of {slots} slot{'s' * (slots != 1)}, but the {fewest} has {has}; use "
        f"{way_out}",
    )


def ring_advice(config: ModelConfig, slots: int) -> str:
    """Advice on what is better than a ring of so many slots; empty where nothing is."""
    most = max(config.num_sparse_layers_of(stack) for stack in ("encoder", "decoder"))
    if slots < most:
        return ""
    return (
        f"{slots} slots have room for all {most} layers of a stack, and two of them are still "
        "copied in every call: a resident model is better"
    )
