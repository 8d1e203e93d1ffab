# SPDX-License-Identifier: Apache-2.0
"""Experts in host memory of which a call streams whole layers or moves the chosen ones.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 3.2, streams all layers in every call. Here
the formula of `copy_times.py` decides for each call: a prompt has tokens enough to
hide the copies of whole layers behind its products, a decode step has few tokens and chooses
few experts. Both run the same traced programs of the same parameters, and both read the one
stack of experts in host memory.
Dims: R rows
"""

import dataclasses
from collections.abc import Sequence

import jax

from switchx.hardware.spec import Hardware, hardware_of, load_hardware
from switchx.inference.config import ExpertSlots
from switchx.inference.offload.chosen_experts import (
    ChosenExperts,
    ExpertTraffic,
    check_slots,
    with_slots,
)
from switchx.inference.offload.copy_times import CallKind, streaming
from switchx.inference.offload.cut_program import kind_of, rows_of
from switchx.inference.offload.expert_source import HostExperts, ReadExpert, Weights
from switchx.inference.offload.ring_decode import RingExperts, RingTraffic
from switchx.inference.offload.ring_program import Bank
from switchx.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class BothTraffic:
    """Counts of what calls of both kinds have done so far."""

    ring: RingTraffic
    chosen: ExpertTraffic
    calls_streamed: int
    calls_chosen: int

    def __str__(self) -> str:
        return (
            f"experts: {self.calls_streamed:,} calls streamed whole layers, "
            f"{self.calls_chosen:,} moved chosen experts\n{self.ring}\n{self.chosen}"
        )


class BankExperts(HostExperts):
    """The experts that a ring streams, one by one; see `ExpertSource`.

    They are parts of the ring's own stack: host memory has no second copy.
    """

    def __init__(self, bank: Bank):
        self._bank = bank
        self.like = jax.eval_shape(lambda: bank.expert(bank.numbers[0], 0))
        self.expert_bytes = bank.expert_bytes

    def expert(self, layer: int, expert: int) -> Weights:
        return self._bank.expert(layer, expert)


class RingOrChosen:
    """A model whose experts are in host memory; each call streams layers or moves chosen
    experts.

    Layers that are resident in the ring have no slots of chosen experts: all of their experts
    are on the device.

    Attributes:
        config, params: see `RingExperts`.
        ring, chosen: the two ways, over the same parameters and the same bank.
    """

    def __init__(self, ring: RingExperts, asked: ExpertSlots, hardware: Hardware):
        """Adds slots to a ring.

        Raises:
            ValueError: see `ChosenExperts`; or the hardware's spec does not describe its host.
        """
        self.config, self.params = ring.config, ring.params
        self.ring = ring
        self.chosen = ChosenExperts(
            ring.config,
            ring.params,
            asked.slots,
            asked.policy,
            prefetch=asked.prefetch,
            source=BankExperts(ring.bank),
            resident=ring.bank.resident,
        )
        self._hardware = hardware
        self._is_streamed([(number, 1) for number in ring.bank.numbers])  # raises early

    @property
    def traffic(self) -> BothTraffic:
        ring = self.ring.traffic
        return BothTraffic(ring, self.chosen.traffic, ring.calls, self.chosen.num_calls)

    def kinds(self, hardware: Hardware) -> list[CallKind]:
        """See `ChosenExperts.kinds`."""
        kinds = [*self.ring.kinds(hardware), *self.chosen.kinds(hardware)]
        return sorted(kinds, key=lambda kind: -kind.streaming.num_tokens)

    def run(self, program, *settings, shape: tuple = (), options=(), **arrays):
        """Runs a jitted program and returns its results; see `ChosenExperts.run`."""
        rows = rows_of(program, settings, kind_of(arrays))
        experts = self.ring if self._is_streamed(rows) else self.chosen
        return experts.run(program, *settings, shape=shape, options=options, **arrays)

    def _is_streamed(self, rows: Sequence[tuple[int, int]]) -> bool:
        """Whether the formula streams whole layers, of the stack that reads the most tokens."""
        if not rows:  # a call that meets no Switch layer
            return False
        number, R = max(rows, key=lambda row: row[1])
        stack = self.config.sparse_layer_names[number].split()[0]
        tokens = R // self.config.switch.router.num_selected
        size = self.ring.bank.expert_bytes
        return streaming(self.config, self._hardware, stack, tokens, size).mode == "ring"


# One choice of all.

OutsideExperts = ChosenExperts | RingExperts | RingOrChosen


def outside_of_device(
    config: ModelConfig, params: dict, asked: ExpertSlots, read: ReadExpert | None
) -> tuple[ModelConfig, dict, OutsideExperts]:
    """The unrolled configuration, its parameters with experts outside of the device, and what
    brings them there; see `chosen_experts.with_slots`.

    Raises:
        ValueError: see there, `check_ring` and `RingOrChosen`.
    """
    if asked.ring_slots is None:
        return with_slots(config, params, asked, read)
    if asked.slots is None:
        experts = RingExperts(config, params, asked.ring_slots)
        return experts.config, experts.params, experts
    check_slots(config, asked.slots)
    if asked.hardware is None:
        hardware = hardware_of(jax.devices()[0].device_kind)
    else:
        hardware = load_hardware(asked.hardware)
    ring = RingExperts(config, params, asked.ring_slots)
    experts = RingOrChosen(ring, asked, hardware)
    return experts.config, experts.params, experts
