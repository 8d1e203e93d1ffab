# SPDX-License-Identifier: Apache-2.0
"""Splits of a model for generation over devices: bytes on each, and seconds of a decode step.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 3.1, step 4. A decode step reads the
weights and the cache once, so its time is their bytes on a device over the memory's bandwidth
(Kim et al. 2022, arXiv:2211.10017, section 3.4, has this bound), and its collectives. Weights
and cache are counted array by array, the buffers of reading a prompt by a formula.
Dims: B batch, L beams, M input length, Q places of a chunk, D model, H heads, K head size,
F ffn, V vocabulary
"""

import collections
import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from switchx import tree
from switchx.axes import dims_of
from switchx.fields import require, require_at_least
from switchx.hardware.spec import Hardware
from switchx.inference.offload.copy_times import most_slots, streamed_layers
from switchx.models.config import PREFILL_CHUNK, ModelConfig
from switchx.models.stored_experts import EXPERT_MATRICES, EXPERTS_PATH
from switchx.partitioning.mesh import AXES
from switchx.planner.layout import Layout, StateArray, local_bytes
from switchx.planner.step_time import collective_seconds
from switchx.planner.torus import divisors

MOST_DEVICES = 2**12
# Axes over which a served model is split.
SERVING_AXES = ("data", "expert", "model")
_SCALE_BYTES = 4
_LOGIT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A served model, and the batches that it serves.

    Attributes:
        weights: parameters of the model; see `weights_of`.
        batch_size: B, the number of texts at once.
        input_length: M, the maximum number of tokens of an input.
        max_new_tokens: maximum number of tokens of an output.
        num_beams: L, the number of beams.
    """

    config: ModelConfig
    weights: tuple[StateArray, ...]
    batch_size: int
    input_length: int
    max_new_tokens: int
    num_beams: int = 1

    def __post_init__(self):
        sizes = ("batch_size", "input_length", "max_new_tokens", "num_beams")
        require_at_least(self, 1, *sizes)


@dataclasses.dataclass(frozen=True)
class Split:
    """One way to split a model, and what a device has of it.

    Attributes:
        layout: layout over the axes `data`, `expert` and `model`.
        weights, cache, working: bytes of each; `working` is the largest buffers of a prompt.
        step_s: seconds of a decode step; 0 if the hardware is not known.
    """

    layout: Layout
    weights: float
    cache: float
    working: float
    step_s: float

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.working

    @property
    def sizes(self) -> dict[str, int]:
        """Axes of more than one device."""
        return {axis: size for axis, size in self.layout.shape.items() if size > 1}

    @property
    def name(self) -> str:
        """The split's axes as `--mesh` takes them: `expert=4,model=2`."""
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items()) or "data=1"


@dataclasses.dataclass(frozen=True)
class Ring:
    """A model on one device, whose experts stream to it in each call (SE-MoE, section 3.2).

    Attributes:
        slots: K, the number of layers of each stack whose experts are on the device at once.
        weights, cache, working: bytes on the device; `weights` includes two slots.
        streamed: number of layers of each stack that stream.
        layer_bytes: bytes of the experts of one layer.
    """

    slots: int
    weights: float
    cache: float
    working: float
    streamed: Mapping[str, int]
    layer_bytes: float

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.working

    @property
    def host(self) -> float:
        """Bytes in host memory."""
        return sum(self.streamed.values()) * self.layer_bytes


def weights_of(params, bits: int | None = None) -> tuple[StateArray, ...]:
    """The parameters as the planner reads them.

    Args:
        params: arrays or shape structs.
        bits: bits of a weight in the experts' matrices, each with a float32 scale for every
            output; None leaves them as they are.
    """
    found = []
    for name, leaf in tree.named_leaves(params).items():
        dims = dims_of(name.rpartition("/")[2], len(leaf.shape))
        size = np.dtype(leaf.dtype).itemsize
        if bits is not None and EXPERT_MATRICES in name:
            size = bits / 8
            scales, letters = (*leaf.shape[:-2], leaf.shape[-1]), dims[:-2] + dims[-1]
            found.append(StateArray(f"{name}/scales", letters, scales, _SCALE_BYTES, "params"))
        found.append(StateArray(name, dims, leaf.shape, size, "params"))
    return tuple(found)


def splits(served: ServedModel, devices: int, hardware: Hardware | None) -> list[Split]:
    """Every split over `devices` devices that divides the model and the batch, best first.

    The best takes the least time per step; if the hardware is not known, the fewest bytes.
    """
    found = []
    for expert in divisors(devices):
        for model in divisors(devices // expert):
            layout = Layout(data=devices // expert // model, expert=expert, model=model)
            if _mesh_refusal(served, layout) is None:
                found.append(_split(served, layout, hardware))
    return sorted(found, key=lambda split: (split.step_s, split.total))


def choose_split(
    served: ServedModel,
    devices: int,
    memory_bytes: float | None = None,
    hardware: Hardware | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Split:
    """The best split whose parts fit.

    Args:
        memory_bytes: memory of a device in bytes; None is no limit.
        sizes: sizes of the axes that the split must have; None allows any.

    Raises:
        ValueError: no split divides model and batch, or none fits; says how much is needed,
            and on how many devices it fits.
    """
    found = splits(served, devices, hardware)
    if sizes is not None:
        wanted = Layout(**(dict.fromkeys(AXES, 1) | dict(sizes)))
        require(
            not (reason := _mesh_refusal(served, wanted)),
            f"{reason}, or leave the mesh to the planner",
        )
        found = [split for split in found if split.layout == wanted]
    require(
        bool(found),
        f"devices={devices}: no split divides {_divided(served)}; use "
        f"{_near(served, devices)}, or another batch_size",
    )
    limit = math.inf if memory_bytes is None else memory_bytes
    fitting = [split for split in found if split.total <= limit]
    if fitting:
        return fitting[0]
    least = min(found, key=lambda split: split.total)
    doubled = (devices << n for n in range(1, (MOST_DEVICES // devices).bit_length()))
    more = next(
        (n for n in doubled if any(s.total <= limit for s in splits(served, n, None))), None
    )
    way_out = f"use {more} devices, " if more else "use "
    raise ValueError(
        f"a device of {limit / 2**30:,.3g} GiB is too small: split over {devices} "
        f"({least.name}) the model needs {least.total / 2**30:,.3g} GiB a device, "
        f"{least.weights / 2**30:,.3g} of it weights; {way_out}more memory, fewer experts, "
        "fewer bits, or a smaller batch"
    )


def choose_ring(served: ServedModel, memory_bytes: float) -> Ring:
    """The ring with the most slots that fits one device: each slot saves copying a layer.

    Raises:
        ValueError: not even two slots fit; says how much is needed.
    """
    for slots in range(most_slots(served.config), 1, -1):
        ring = _ring(served, slots)
        if ring.total <= memory_bytes:
            return ring
    (whole,) = splits(served, 1, None)
    raise ValueError(
        f"a device of {memory_bytes / 2**30:,.3g} GiB is too small: the model needs "
        f"{whole.total / 2**30:,.3g} GiB a device, and with all experts in host memory and a "
        f"ring of 2 slots {ring.total / 2**30:,.3g}, {ring.weights / 2**30:,.3g} of it "
        "weights; use more memory, more devices, fewer bits, or a smaller batch"
    )


def _ring(served: ServedModel, slots: int) -> Ring:
    (whole,) = splits(served, 1, None)
    config = served.config
    experts = sum(
        local_bytes(array, Layout()) for array in served.weights if EXPERTS_PATH in array.name
    )
    layer = experts / len(config.sparse_layer_names)
    streams = streamed_layers(config, slots)
    stacks = [config.sparse_layer_names[number].split()[0] for number in streams]
    # With 8 and 4 bits, a slot has packed words and the matrices that are made from them.
    is_packed = any("/scales" in array.name for array in served.weights)
    on_device = whole.weights - (len(streams) - (4 if is_packed else 2)) * layer
    return Ring(
        slots, on_device, whole.cache, whole.working, collections.Counter(stacks), layer
    )


def _near(served: ServedModel, devices: int) -> str:
    """The nearest numbers of devices, below and above, for which a split exists."""
    below = next(n for n in range(devices, 0, -1) if n == 1 or splits(served, n, None))
    above = next((n for n in range(devices, 2 * devices + 1) if splits(served, n, None)), None)
    return f"{below} or {above} devices" if above else f"{below} devices"


def _divided(served: ServedModel) -> str:
    """The numbers that a mesh has to divide, in words."""
    config, switch = served.config, served.config.switch
    text = f"{served.batch_size} rows, {config.num_heads} heads, F={config.d_ff}"
    return text if switch is None else f"{text} and {switch.num_experts} experts"


def _mesh_refusal(served: ServedModel, layout: Layout) -> str | None:
    """Why a model cannot be split this way, with axes that work; None if it can."""
    for axis, size in layout.shape.items():
        if size > 1 and axis not in SERVING_AXES:
            return (
                f"mesh axis {axis!r} of size {size}: a model in use is split over "
                f"{', '.join(SERVING_AXES)}; use these"
            )
    config, switch = served.config, served.config.switch
    split_rows = layout.data * layout.expert
    for name, number, axis, size in (
        ("num_experts", 1 if switch is None else switch.num_experts, "expert", layout.expert),
        ("batch_size", served.batch_size, "data x expert", split_rows),
        ("num_heads", config.num_heads, "model", layout.model),
        *(("d_ff", d_ff, "model", layout.model) for d_ff in _ffn_sizes(config)),
    ):
        if number % size:
            way_out = ", ".join(map(str, divisors(number)))
            return (
                f"{name}={number} is not divisible by mesh axis {axis!r} of size {size}; use "
                f"a size of {way_out}"
            )
    return None


def _ffn_sizes(config: ModelConfig) -> list[int]:
    """Hidden sizes of the dense blocks and the experts."""
    switch = config.switch
    own = () if switch is None else (switch.d_ff, switch.shared_d_ff)
    return [config.d_ff, *(size for size in own if size is not None)]


def _split(served: ServedModel, layout: Layout, hardware: Hardware | None) -> Split:
    weights = sum(local_bytes(array, layout) for array in served.weights)
    cache, working = _cache_bytes(served, layout), _working_bytes(served, layout)
    step_s = 0.0
    if hardware is not None:
        step_s = (weights + cache) / hardware.memory.achieved_bytes_per_s
        step_s += _collectives_s(served, layout, hardware)
    return Split(layout, weights, cache, working, step_s)


def _rows(served: ServedModel, layout: Layout) -> int:
    return served.batch_size // (layout.data * layout.expert)


def _cache_bytes(served: ServedModel, layout: Layout) -> float:
    """Keys and values of the decoder's self-attention, and of its attention to the encoder."""
    config = served.config
    # The encoder's output, or the prompt; the start token takes the place of a new token.
    places = served.max_new_tokens * served.num_beams + served.input_length
    elements = 2 * _rows(served, layout) * places * layout.kv_heads(config) * config.d_head
    return elements * config.num_decoder_layers * config.precision.compute_dtype.itemsize


def _working_bytes(served: ServedModel, layout: Layout) -> float:
    """The bytes of one block's activations while it reads a chunk of the prompts, and of the
    logits."""
    config, rows = served.config, _rows(served, layout)
    M, heads = served.input_length, config.num_heads // layout.model
    Q = M if config.is_encoder_decoder else min(PREFILL_CHUNK, M)
    hidden = (3 if config.is_gated else 2) * _widest_ffn(config) // layout.model
    projected = 2 * (heads + layout.kv_heads(config)) * config.d_head
    per_token = 4 * config.d_model + projected + hidden
    block = rows * Q * per_token * config.precision.compute_dtype.itemsize
    scores = rows * heads * Q * M * _LOGIT_BYTES
    logits = rows * served.num_beams * config.vocab_size * _LOGIT_BYTES
    return block + scores + logits


def _widest_ffn(config: ModelConfig) -> int:
    """F that a token passes through in the widest block: a dense one's, or that of the token's
    experts and the shared one."""
    switch = config.switch
    if switch is None:
        return config.d_ff
    experts = switch.router.num_selected * (switch.d_ff or config.d_ff)
    is_all = config.num_sparse_layers == config.num_encoder_layers + config.num_decoder_layers
    return max(experts + (switch.shared_d_ff or 0), 0 if is_all else config.d_ff)


def _collectives_s(served: ServedModel, layout: Layout, hardware: Hardware) -> float:
    """Seconds per step of sums after sublayers and exchanges around Switch layers."""
    config = served.config
    sublayers = config.num_decoder_layers * (3 if config.is_encoder_decoder else 2)
    tokens = _rows(served, layout) * served.num_beams
    size = tokens * config.d_model * config.precision.compute_dtype.itemsize
    one_sum = collective_seconds("all-reduce", size, ("model",), layout, hardware)
    exchange = collective_seconds("all-to-all", size, ("expert",), layout, hardware)
    return sublayers * one_sum + 2 * config.num_sparse_layers_of("decoder") * exchange
