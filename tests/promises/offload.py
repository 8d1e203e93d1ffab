# SPDX-License-Identifier: Apache-2.0
"""Decoding with a few experts of each layer on the device: tokens and bytes.

Tokens are compared with the resident model's, bytes on the device and bytes moved with what
slots and choices imply; also with experts in files, a quarter in host memory, and in a ring.
"""

import dataclasses
import gc
import itertools
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import numpy as np

from switchx.bench.offload import (
    FORMATS,
    NUM_EXPERTS,
    RING_SLOTS,
    bytes_of_expert,
    decoded,
    in_ring,
    model,
    ring_model,
)
from switchx.inference.artifact import open_artifact, write_artifact
from switchx.inference.config import ExpertSlots
from switchx.inference.offload.chosen_experts import (
    ChosenExperts,
    on_host,
    slices_of,
    with_slots,
)
from switchx.models.config import Precision
from switchx.models.unroll import unrolled
from switchx.storage.simulation import run_policy
from switchx.storage.trace import Trace

SLOTS, BEAMS = (1, 4, 16), (1, 4)


def decoding() -> Iterator[tuple]:
    """Decodes the same sentences with each weight format, number of beams and of slots."""
    moved = dict.fromkeys(FORMATS, 0)
    for weights, beams in itertools.product(FORMATS, BEAMS):
        config, params = model(weights)
        # In bfloat16 XLA keeps more bits within what it fuses, and slots split a program.
        # There, with 4 beams, 15 of 192 tokens differed at int8 and 56 at int4.
        config = dataclasses.replace(config, precision=Precision(params="bfloat16"))
        resident = decoded(config, params, beams)
        for slots in SLOTS:
            for row in slotted(config, params, weights, beams, slots, resident):
                moved[weights] += row[2] if row[0] == "moved_bytes" else 0
                yield row
        if beams == BEAMS[-1]:
            yield from in_files(config, params, weights, resident)
    yield "int4_vs_bf16_bytes_moved", "all", moved["int4"] / moved["bf16"]
    yield from ring()


def slotted(config, params, weights: str, beams: int, slots: int, resident) -> Iterator[tuple]:
    """Rows of decoding with slots."""
    config, params = on_host(config, params)
    before = device_bytes()
    experts = ChosenExperts(config, params, slots)
    found = decoded(config, experts.params, beams, experts)
    used, traffic = device_bytes() - before, experts.traffic
    size = bytes_of_expert(config, FORMATS[weights])
    what = f"{weights}, {beams} beams, {slots} slots"
    yield "tokens_differing", what, np.sum(found != resident)
    yield "hits", what, traffic.hits / traffic.requested
    yield "moved_bytes", what, traffic.moved_bytes
    in_slots = traffic.num_layers * slots * size
    yield "device_expert_bytes_vs_slots", what, used / in_slots
    of_trace = misses(experts.trace(), slots) * size
    yield "bytes_moved_vs_formula", what, traffic.moved_bytes / of_trace


def in_files(config, params, weights: str, resident) -> Iterator[tuple]:
    """Rows of decoding with experts in a file, a quarter of them in host memory, and
    predictions."""
    config, params = unrolled(config, params)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model"
        write_artifact(path, config, params, about={})
        artifact = open_artifact(path)
        num_experts = NUM_EXPERTS * len(config.sparse_layer_names)
        host_bytes = num_experts * bytes_of_expert(config, FORMATS[weights]) // 4
        asked = ExpertSlots(max(1, NUM_EXPERTS // 8), prefetch=True, host_bytes=host_bytes)
        read = slices_of(config, artifact.params)
        config, _, experts = with_slots(config, artifact.params, asked, read)
        found = decoded(config, experts.params, BEAMS[-1], experts)
    traffic, stored = experts.traffic, experts.traffic.stored
    what = f"{weights}, in files, {BEAMS[-1]} beams, {asked.slots} slots"
    yield "tokens_differing", what, np.sum(found != resident)
    yield "hits", what, traffic.hits / traffic.requested
    yield "predicted_chosen", what, traffic.correct / max(traffic.predicted, 1)
    yield "host_hits", what, stored.hits / stored.requested
    yield "read_bytes", what, stored.read_bytes


def ring() -> Iterator[tuple]:
    """Rows of decoding with layers of experts streamed through slots; bytes over those of a
    ring that loads all layers in each step, as the paper's does."""
    config, params = ring_model()
    found, traffic = in_ring(config, params, beams=1)
    what = f"a ring of {RING_SLOTS} slots"
    yield "tokens_differing", what, np.sum(found != decoded(config, params, 1))
    # A call runs one stack: the encoder for the prompt, the decoder for a step.
    all_layers = traffic.calls * traffic.expert_bytes // 2
    yield "pinned_ring_vs_ring_bytes", what, traffic.moved_bytes / all_layers


def device_bytes() -> int:
    """Bytes of all live arrays."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def misses(trace: Trace, slots: int) -> int:
    """Simulated misses of a run's requests; layers share no slots."""
    total, E = 0, trace.num_experts
    for layer in range(len(trace.layers)):
        is_its_T = trace.key_T // E == layer
        of_layer = {name: getattr(trace, name)[is_its_T] for name in ("step_T", "sweep_T")}
        one = dataclasses.replace(
            trace,
            key_T=trace.key_T[is_its_T] % E,
            request_T=trace.request_T[is_its_T],
            layers=(trace.layers[layer],),
            **of_layer,
        )
        hit_T, _ = run_policy(one, slots, "lru")
        total += int(np.sum(~hit_T))
    return total
