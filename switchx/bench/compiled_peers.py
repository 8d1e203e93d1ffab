# SPDX-License-Identifier: Apache-2.0
"""`switchx bench compiled`: our layers and peers', timed by the TPU compiler's own clock.

One sparse layer of Switch-Base as printed (Fedus et al. 2021, arXiv:2101.03961, Table 9:
d_model 768, GEGLU with d_ff 2048) in bfloat16, 8,192 tokens, with 8 to 256 experts, compiled
for a v5e and a v5p that need not be present, forward and backward: ours by dispatcher, and
those of peers whose code is given (`peers/layers.py`). FLOPs, bytes and seconds are counted in
the compiled program (`moved_bytes.py`; `peers/pallas_grids.py` for others' kernels) for two
fixed routings, balanced and Zipf. Nothing is run: the seconds are estimates.
Dims: R rows, B batch, L length, D model, F feed-forward, E experts
"""

import json
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from switchx.bench import compiled_layer, compiled_step
from switchx.bench.compiled_layer import (
    compiled_for,
    described_chip,
    group_sizes,
    in_direction,
    layer_bytes,
    layer_function,
    rates_of,
    rows_of_child,
)
from switchx.bench.peers.layers import (
    NEEDED,
    LayerShape,
    flaxformer_forward,
    flaxformer_layer,
    folder_on_path,
    has_peer,
    maxtext_forward,
    missing_of,
)
from switchx.bench.peers.pallas_grids import pallas_launches
from switchx.compiled.devices import describe_devices
from switchx.compiled.flops import matrix_flops
from switchx.compiled.moved_bytes import moved_bytes
from switchx.models.config import ModelConfig, Precision, RouterConfig, SwitchConfig
from switchx.partitioning.topology import Topology
from switchx.results import Check, Report

TARGETS = ("v5e:2x2", "v5p:2x2x1")
NUM_EXPERTS = (8, 64, 256)
BATCH, LENGTH, D_MODEL, D_FF = 16, 512, 768, 2048
R = BATCH * LENGTH
DEFAULT = SwitchConfig(8, every=1).dispatcher
# The layers that are compiled, and their capacity factors; None drops nothing.
OURS = {DEFAULT: (1.0, 1.25), "einsum": (1.25,), "dropless": (None,)}
PEERS = {"flaxformer": (1.0, 1.25), "maxtext": (1.25, None)}

# tokamax' published times of grouped products over the seconds that `switchx bench compiled`
# estimates for the same: forward, dx, dw, and the number of cases.
MEASURED_OVER_ESTIMATED = {
    "v5p": (1.03, 1.01, 0.94, 102),
    "v5e": (1.09, 1.44, 1.03, 16),
    "tpu7x": (1.47, 1.77, 0.97, 100),
}


def ideal_flops(shape: LayerShape, direction: str, capacity_factor: float | None) -> int:
    """FLOPs of the products of experts' slots and the router; backward has two more of each.

    Args:
        capacity_factor: slots over tokens; None for a slot for each token.
    """
    slots = R * (1.0 if capacity_factor is None else capacity_factor)
    matrices = 3 if shape.is_gated else 2
    experts = 2 * slots * matrices * shape.d_model * shape.d_ff
    router = 2 * R * shape.d_model * shape.num_experts
    return round((experts + router) * (3 if direction == "backward" else 1))


def our_config(name: str, shape: LayerShape) -> ModelConfig:
    """A model with one of our layers, given its dispatcher."""
    factor, router = shape.capacity_factor, RouterConfig()
    if factor is None:
        router = RouterConfig(overflow="dropless")
    switch = SwitchConfig(
        shape.num_experts,
        every=1,
        dispatcher=name,
        router=router,
        group_size=R,
        capacity_factor=factor or 1.0,
        eval_capacity_factor=factor or 1.0,
    )
    return ModelConfig(
        "decoder_only",
        vocab_size=8,
        d_model=shape.d_model,
        d_ff=shape.d_ff,
        num_heads=12,
        d_head=64,
        num_decoder_layers=1,
        activation="geglu" if shape.is_gated else "relu",
        switch=switch,
        precision=Precision(params=shape.dtype, compute=shape.dtype),
    )


def peer_function(name: str, shape: LayerShape, direction: str, device):
    """A peer's layer as a function of parameters and rows, and the shapes of its arguments."""
    x_BLD = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.d_model), shape.dtype)
    if name == "maxtext":
        forward, params = maxtext_forward(shape, device)
    else:
        forward, params = flaxformer_forward(
            flaxformer_layer(shape, group_size=shape.batch * shape.length), x_BLD
        )
    # Flaxformer's parameters are float32, rounded in every step; here all are bfloat16.
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, shape.dtype), params)
    return in_direction(forward, params, x_BLD, direction)


def recorded_routing(arguments, shape: LayerShape, sizes_E: np.ndarray) -> list:
    """Values of a layer's flat arguments that route `sizes_E` rows to experts, else None.

    A token is its expert's unit vector, and the router's matrix is the identity.
    """
    expert_R = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes_E)), sizes_E))
    x_RD = 8 * np.eye(shape.d_model, dtype=np.float32)[expert_R]
    values = [None] * len(arguments)
    inputs = (shape.batch, shape.length, shape.d_model)
    first = next(i for i, each in enumerate(arguments) if each.shape == inputs)
    values[first] = jnp.array(x_RD.reshape(inputs), arguments[first].dtype)
    for i, each in enumerate(arguments):
        if each.shape == (shape.d_model, shape.num_experts):
            values[i] = jnp.eye(*each.shape, dtype=each.dtype)
    return values


def compiled_row(
    topology: Topology, layer: str, shape: LayerShape, direction: str, device
) -> list[dict]:
    """Compiles a layer once, and counts it for each routing."""
    if layer in PEERS:
        function, arguments = peer_function(layer, shape, direction, device)
    else:
        function, arguments = layer_function(our_config(layer, shape), direction, BATCH, LENGTH)
    traced, compiled, launches = compiled_for(device, function, arguments)
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    products = matrix_flops(hlo, kernel_share=Fraction(0))
    found = []
    for split, sizes_E in group_sizes(R, shape.num_experts).items():
        if layer in PEERS:
            with jax.default_device(jax.devices("cpu")[0]):
                values = recorded_routing(jax.tree.leaves(arguments), shape, sizes_E)
                launches = pallas_launches(traced.jaxpr, values)
        moved = moved_bytes(hlo, launches, sizes_E, rates_of(topology.kind))
        flops, factor = products + moved.pallas_flops, shape.capacity_factor
        of_F = R * shape.d_ff * (factor or 1.0)
        matrix = shape.num_experts * shape.d_model * shape.d_ff
        ideal = layer_bytes(matrix, R * shape.d_model, of_F, shape.is_gated, direction)
        slots = R if factor is None else -(-R * factor // shape.num_experts)
        found.append(
            {
                "layer": layer,
                "target": str(topology),
                "experts": shape.num_experts,
                "pass": direction,
                "capacity_factor": factor,
                "rows_by_expert": split,
                "dropped_share": float(np.maximum(sizes_E - slots, 0).sum()) / R,
                "flops": flops,
                "hbm_bytes": moved.num_bytes,
                "temporary_bytes": memory.temp_size_in_bytes,
                "kernels": moved.kernels,
                "pallas_kernels": moved.pallas_kernels,
                "estimated_s": moved.estimated_s,
                "compiler_share_of_s": moved.compiler_s / moved.estimated_s,
                "roofline_s": moved.roofline_s,
                "flops_vs_ideal": flops / ideal_flops(shape, direction, factor),
                "flops_vs_one_slot_a_token": flops / ideal_flops(shape, direction, None),
                "bytes_vs_ideal": moved.num_bytes / ideal,
            }
        )
    return found


def compiled_rows(
    topology: Topology, is_quick: bool, note: Callable[[str], None]
) -> list[dict]:
    """Rows of all layers, or the reason why a peer fails; needs a process with the compiler."""
    device, rows = describe_devices(topology)[0], []
    peers = {name: factors for name, factors in PEERS.items() if has_peer(name)}
    with described_chip(topology, device):
        for num_experts in NUM_EXPERTS[1:2] if is_quick else NUM_EXPERTS:
            for layer, factors in (OURS | peers).items():
                for factor in factors[-1:] if is_quick and layer in OURS else factors:
                    for direction in compiled_layer.DIRECTIONS:
                        shape = LayerShape(
                            num_experts, D_MODEL, D_FF, BATCH, LENGTH, True, factor, "bfloat16"
                        )
                        cell = topology, layer, shape, direction
                        note(f"{topology} {layer} {num_experts} {factor} {direction}")
                        try:
                            rows += compiled_row(*cell, device)
                        except Exception as error:
                            if layer in OURS:
                                raise
                            why = f"{type(error).__name__}: {error}"[:300]
                            rows.append(_not_compared(layer, str(topology), why, *cell[2:]))
    return rows


def _not_compared(layer, target, why, shape=None, direction=None) -> dict:
    row = {"layer": layer, "target": target, "not_compared": why}
    if shape is not None:
        row |= {"experts": shape.num_experts, "pass": direction}
        row |= {"capacity_factor": shape.capacity_factor}
    return row


def run(note=print, peers: Sequence[str] = (), *, is_quick: bool = False) -> Report:
    """All of `switchx bench compiled`: `compiled_layer.py`'s rows, and these.

    Args:
        peers: clones of projects whose layers are compared.
        is_quick: whether to compile only 64 experts on a v5e, with the larger of our
            capacities, and no training step.

    Raises:
        ValueError: one of the folders is not a clone of a known project.
    """
    folders = [folder_on_path(each) for each in peers]
    note(estimates_vs_times())
    report, rows = compiled_layer.run(note), []
    targets = TARGETS[:1] if is_quick else TARGETS
    for target in targets:
        note(f"compiling layers of Switch-Base for {target}")
        rows += rows_of_child(__name__, target, str(int(is_quick)), *folders)
        if not is_quick:
            rows += rows_of_child(compiled_step.__name__, target)
    rows += [
        _not_compared(name, target, _why_absent(name, target, folders, rows))
        for name in NEEDED
        for target in targets
        if not any((row.get("layer"), row["target"]) == (name, target) for row in rows)
    ]
    rows = with_ratios(rows)
    return Report(report.command, report.results + rows, report.checks + checks(rows))


def _why_absent(name: str, target: str, folders: list[str], rows: list[dict]) -> str:
    """The reason why a peer has no row for a target."""
    missing = missing_of(name, folders)
    if name in missing:
        return "its code was not given; clone it and use --peer=FOLDER"
    if missing:
        return f"needs {', '.join(missing)}; install it as docs/compiled.md says"
    not_run = (row["not_run"] for row in rows if row["target"] == target and "not_run" in row)
    return next(not_run, "the compiler's process does not find its code")


def estimates_vs_times() -> str:
    """Says how far estimated seconds were off where others have published times."""
    found = [
        f"{chip} {min(ratios):.2f} to {max(ratios):.2f} ({cases} cases)"
        for chip, (*ratios, cases) in MEASURED_OVER_ESTIMATED.items()
    ]
    return (
        "Estimated seconds are no times: tokamax' published ones over the same estimator's are "
        f"{', '.join(found)}. tokamax has SparseCore gathers and tables tuned by shape; "
        "switchx has not."
    )


def with_ratios(rows: list[dict]) -> list[dict]:
    """The rows, where our default's have its seconds over the quickest peer's in the same cell.

    Such a peer has the same capacity factor, or drops nothing.
    """
    found = []
    for row in rows:
        same = [
            other["estimated_s"]
            for other in rows
            if other.get("layer") in PEERS
            and "estimated_s" in other
            and all(other[key] == row.get(key) for key in _CELL)
            and other["capacity_factor"] in (row["capacity_factor"], None)
        ]
        if row.get("layer") == DEFAULT and same:
            row = row | {"seconds_vs_best_peer": row["estimated_s"] / min(same)}
        found.append(row)
    return found


_CELL = ("target", "experts", "pass", "rows_by_expert")


def checks(rows: list[dict]) -> list[Check]:
    """The worst row of our default dispatcher; none where nothing was compiled."""
    bounds = {
        "flops_vs_ideal": "<=1.10",
        "bytes_vs_ideal": "<=1.5",
        "seconds_vs_best_peer": "<=0.9",
    }
    ours = [row for row in rows if row.get("layer") == DEFAULT]
    return [
        Check(name, max(row[name] for row in ours if name in row), bound)
        for name, bound in bounds.items()
        if any(name in row for row in ours)
    ]


if __name__ == "__main__":
    target, is_quick, *folders = sys.argv[1:]
    sys.path += folders

    def to_stderr(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    found = compiled_rows(Topology.parse(target), is_quick == "1", to_stderr)
    print(json.dumps(found))
