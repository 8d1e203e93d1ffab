# SPDX-License-Identifier: Apache-2.0
"""The planner's collectives are those of the compiled program: as many, as large, as far."""

import collections
import dataclasses
import json
import math

import numpy as np
import pytest

from pallas_kernels.aot import tpu_compiler
from switchx.compiled.collectives import HloCollective, collectives
from switchx.partitioning.mesh import AXES, MeshSpec
from switchx.planner.sparse_comm import SparseLayer, sparse_layer_collectives
from tests.data.refusals import refused
from tests.moe.sharded import (
    HOMES,
    PIPELINE_MOE,
    C,
    D,
    E,
    F,
    G,
    S,
    T,
    compiled_hlo,
    make_problem,
    name_of,
)
from tests.processes import script_with_compiler

LAYER = SparseLayer(G, T, S, C, E, D, F, is_gated=True, has_bias=True)


def groups_over(mesh, axes) -> frozenset:
    """Sets of devices that differ along `axes` alone."""
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    last = [AXES.index(axis) for axis in axes]
    order = [i for i in range(len(AXES)) if i not in last] + last
    size = int(np.prod([mesh.shape[axis] for axis in axes]))
    return frozenset(map(frozenset, ids.transpose(order).reshape(-1, size).tolist()))


def arrays_of(each: HloCollective) -> list[tuple[str, int]]:
    """Kind and bytes of the collectives of one array each that XLA made this one of.

    An all-to-all stays as it is: CPU takes its array apart into one a device.
    """
    if each.kind == "all-to-all":
        return [(each.kind, each.num_bytes)]
    sizes = [math.prod(shape) for _, shape in each.arrays]
    return [(each.kind, each.num_bytes * size // sum(sizes)) for size in sizes]


def counted(hlo: str) -> collections.Counter:
    return collections.Counter(
        (kind, frozenset(map(frozenset, each.groups)), num_bytes)
        for each in collectives(hlo)
        for kind, num_bytes in arrays_of(each)
    )


def planned_for(name: str, spec: MeshSpec, phases):
    """The planner's, in the form that a compiled program is counted in."""
    mesh = spec.build()
    found = collections.Counter()
    for each in sparse_layer_collectives(name, LAYER, mesh, spec.rules):
        kind, num_bytes = each.kind, each.num_bytes
        if kind == "ragged-all-to-all":  # CPU has none: an all-gather of all operands
            kind = "all-gather"
            num_bytes *= math.prod(mesh.shape[axis] for axis in each.axes)
        if each.phase in phases:
            found[kind, groups_over(mesh, each.axes), num_bytes] += 1
    return found


# Weights gathered, slots exchanged once and twice, tokens scattered; all others are slow tests.
BRIEF = (1, 4, 6, 13)
CASES = [
    pytest.param(
        *home, marks=() if i in BRIEF else pytest.mark.slow, id="-".join(map(name_of, home))
    )
    for i, home in enumerate(HOMES)
]


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_compiled_collectives_are_the_planned_ones(name, spec):
    forward, both = compiled_hlo(spec, name, make_problem())
    assert counted(forward) == planned_for(name, spec, ["forward"])
    assert counted(both) == planned_for(name, spec, ["forward", "backward"])


FOR_TPU = """
import json, sys, jax.numpy as jnp
from jax.experimental import topologies
from switchx.compiled.collectives import collectives
from tests.moe.sharded import HOMES, compiled_hlo, make_problem
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
found = {}
for i in map(int, sys.argv[1:]):
    name, spec = HOMES[i]
    _, both = compiled_hlo(spec, name, make_problem(), jnp.bfloat16, devices)
    found[i] = [(each.kind, each.num_bytes) for each in collectives(both)]
print(json.dumps(found))
"""


@pytest.mark.aot
def test_bfloat16_travels_as_such_where_it_is_compiled_for_tpu():
    """Collectives of activations; TPU casts weights first and turns small scatters around."""
    # With F or D split too, TPU combines the gates' all-reduce with those of small weights.
    homes = [
        i
        for i, (name, spec) in enumerate(HOMES)
        if name in ("all_to_all", "hierarchical", "sliced")
        and spec.fsdp == 1
        and (spec.model == 1 or name == "sliced")
    ]
    done = script_with_compiler(tpu_compiler, FOR_TPU, *map(str, homes))
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= 4
    for i, rows in found.items():
        name, spec = HOMES[int(i)]
        layer = dataclasses.replace(LAYER, activation_bytes=2)
        planned = sparse_layer_collectives(name, layer, spec.build(), spec.rules)
        want = collections.Counter(
            (each.kind, each.num_bytes) for each in planned if "w_" not in each.what
        )
        got = collections.Counter(map(tuple, rows))
        assert want and not want - got, name
        # Beside them, at most one all-reduce: of all weights' gradients.
        assert sum(got.values()) <= sum(want.values()) + 1, name


def test_tensor_sliced_has_the_all_reduces_of_a_dense_ffn_and_the_gates():
    # Pipeline MoE, section 3.3.4: one forward, one backward; of [tokens, D] each.
    spec = MeshSpec(data=1, model=8, rules=PIPELINE_MOE)
    planned = sparse_layer_collectives("sliced", LAYER, spec.build(), spec.rules)
    assert [(c.kind, c.what, c.phase, c.num_bytes) for c in planned] == [
        ("all-reduce", "outputs", "forward", G * T * D * 4),
        ("all-reduce", "gradients of tokens", "backward", G * T * D * 4),
        ("all-reduce", "gradient of gates", "backward", G * T * S * 4),
    ]
    with refused(
        "dispatcher='gather' leaves its communication to the compiler; use one of dropless, "
        "all_to_all, hierarchical, ragged_all_to_all, sliced, sliced_scatter"
    ):
        sparse_layer_collectives("gather", LAYER, MeshSpec().build(), PIPELINE_MOE)


def test_expert_parallel_forms_worked_by_hand():
    """8 groups over 8 devices, so one each: 8 experts, 4 slots, 8 numbers of 4 bytes."""
    spec = MeshSpec(node=2, expert=2)
    flat = sparse_layer_collectives("all_to_all", LAYER, spec.build(), spec.rules)
    flat = [c for c in flat if c.kind == "all-to-all"]
    assert [(c.axes, c.num_bytes) for c in flat] == [(("node", "expert"), 8 * 4 * 8 * 4)] * 4
    two = sparse_layer_collectives("hierarchical", LAYER, spec.build(), spec.rules)
    two = [c for c in two if c.kind == "all-to-all"]
    assert collections.Counter(c.axes for c in two) == {("node",): 4, ("expert",): 4}
    assert {c.num_bytes for c in two} == {8 * 4 * 8 * 4}


def test_shared_groups_worked_by_hand():
    """Two groups of 48 tokens, each on four devices: 24 choices, 8 slots of 4 experts' 4."""
    spec = MeshSpec(data=1, node=2, expert=4)
    layer = dataclasses.replace(LAYER, num_groups=2, tokens_per_group=48)
    planned = sparse_layer_collectives("all_to_all", layer, spec.build(), spec.rules)
    planned = [c for c in planned if "w_" not in c.what]
    row = D * 4
    assert [(c.kind, c.axes, c.num_bytes) for c in planned] == [
        ("all-gather", ("expert",), 4 * S * E * 4),
        ("all-gather", ("expert",), 4 * 24 * 4),
        ("ragged-all-to-all", ("expert",), 24 * row),
        ("ragged-all-to-all", ("expert",), 8 * row),
        ("ragged-all-to-all", ("expert",), 24 * row),
        ("ragged-all-to-all", ("expert",), 8 * row),
        *[("all-to-all", ("node",), 8 * row)] * 4,
    ]


def test_banks_of_slots_worked_by_hand():
    """8 experts and 4 copies on 4 devices: 4 + 2 of a device's travel, it has 12 / 4."""
    spec = MeshSpec(data=2, expert=4)
    layer = dataclasses.replace(LAYER, num_experts=8, is_gated=False, has_bias=False)

    def planned(**changes):
        layer_of = dataclasses.replace(layer, **changes)
        return sparse_layer_collectives("all_to_all", layer_of, spec.build(), spec.rules)

    with_copies, matrix = planned(num_slots=12), D * F * 4
    bank = [c for c in with_copies if c.what.endswith("of slots")]
    assert [(c.kind, c.phase, c.num_bytes) for c in bank] == [
        ("ragged-all-to-all", "forward", 6 * matrix),
        ("ragged-all-to-all", "backward", 3 * matrix),
    ] * 2
    # Exchanged slots and summed gradients are those of a layer of 12 experts.
    assert [c for c in with_copies if c not in bank] == planned(num_experts=12)
    # Of tasks no token travels.
    local = planned(num_slots=16, is_local=True)
    assert {c.kind for c in local} == {"ragged-all-to-all", "all-reduce"}
