# SPDX-License-Identifier: Apache-2.0
"""Collectives read off HLO: lines as XLA writes them, and a program that has known ones."""

import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from switchx.compiled.collectives import (
    HloCollective,
    collectives,
    executed_collectives,
    overlapped_exchanges,
)
from switchx.partitioning.mesh import MeshSpec

HEADER = "HloModule jit_f, replica_count=1, num_partitions=4\n"
PAIRS = ((0, 1), (2, 3))


def program_of(line: str) -> str:
    """A program of one instruction."""
    return f"{HEADER}\nENTRY %main (x: f32[2]) -> f32[2] {{\n  {line}\n}}\n"


def collective(text: str, groups) -> HloCollective:
    """Of its kind, the arrays that it gives, and its bytes."""
    kind, *arrays, num_bytes = text.split()
    found = tuple(
        (array.partition("[")[0], tuple(map(int, re.findall(r"\d+", array.partition("[")[2]))))
        for array in arrays
    )
    return HloCollective(kind, found, groups, int(num_bytes))


@pytest.mark.parametrize(
    ("line", "found", "groups"),
    [
        (
            "%r = f32[2,3]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, "
            "to_apply=%add",
            "all-reduce f32[2,3] 24",
            PAIRS,
        ),
        (
            "%r = (f32[2]{0}, bf16[3]{0}, s32[]) all-reduce-start(%x, %y, %z), "
            "replica_groups=[2,2]<=[4]",
            "all-reduce f32[2] bf16[3] s32[] 18",
            PAIRS,
        ),
        # Its operand, which is two times as large, is what is added up.
        (
            "ROOT %r = u8[5]{0} reduce-scatter(%x), replica_groups=[2,2]<=[2,2]T(1,0), ",
            "reduce-scatter u8[5] 10",
            ((0, 2), (1, 3)),
        ),
        (
            "%r = (bf16[2]{0:T(256)}, bf16[8]{0:T(256)}) all-gather-start(%x), "
            "replica_groups={}, dimensions={0}",
            "all-gather bf16[8] 16",
            ((0, 1, 2, 3),),
        ),
        (
            "%r = ((bf16[3,2], bf16[5,2], s32[2], s32[2], s32[2], s32[2]), bf16[5,2], u32[]) "
            "ragged-all-to-all-start(%a, %b, %c, %d, %e, %f), replica_groups={{0,1},{2,3}}",
            "ragged-all-to-all bf16[3,2] 12",
            PAIRS,
        ),
        # As the TPU compiler writes it, with two counters that are not sent.
        (
            "%r = (f32[80,2048]{1,0:T(8,128)}, f32[80,2048]{1,0:T(8,128)S(3)}, u32[]{:S(2)}, "
            "u32[]{:S(2)}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}",
            "collective-permute f32[80,2048] 655360",
            ((0, 1), (1, 0)),
        ),
        (
            "%r = ((bf16[4,2]{1,0}), bf16[4,2]{1,0:S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) "
            "all-to-all-start(%x), replica_groups={{0,1},{2,3}}",
            "all-to-all bf16[4,2] 16",
            PAIRS,
        ),
        (
            "%r = (u32[], u32[]) collective-permute-start(%x), "
            "source_target_pairs={{0,1},{1,0}}",
            "collective-permute u32[] 4",
            ((0, 1), (1, 0)),
        ),
        (
            "%r = (pred[1,4]{1,0}, pred[1,4]{1,0}) all-to-all(%a, %b), "
            "replica_groups={{0,1},{2,3}}",
            "all-to-all pred[1,4] pred[1,4] 8",
            PAIRS,
        ),
    ],
)
def test_one_instruction(line, found, groups):
    assert collectives(program_of(line)) == [collective(found, groups)]


@pytest.mark.parametrize(
    "line",
    [
        "%r = f32[2] all-reduce-done(%x)",
        "%all-reduce.1 = f32[2] add(%all-reduce, %y)",
        "%r = f32[2] get-tuple-element(%all-to-all.3), index=0",
        # Groups of one device.
        "%r = f32[2] all-reduce(%x), replica_groups={{0},{1},{2},{3}}, to_apply=%add",
    ],
)
def test_what_moves_nothing(line):
    assert collectives(program_of(line)) == []


def test_of_a_compiled_program():
    mesh = MeshSpec(data=2, expert=4).build()

    def body(x):
        y = jax.lax.psum(x, "data")
        z = jax.lax.psum_scatter(
            jax.lax.all_gather(y, "expert", tiled=True), "expert", tiled=True
        )
        return jax.lax.all_to_all(z, "expert", 0, 0, tiled=True)

    spec = PartitionSpec(("data", "expert"))
    sharded = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=PartitionSpec("expert"))
    hlo = jax.jit(sharded).lower(jnp.ones((32, 4, 3))).compile().as_text()
    found = {each.kind: (len(each.groups[0]), each.num_bytes) for each in collectives(hlo)}
    row = 4 * 3 * 4
    assert found["all-reduce"] == (2, 4 * row)
    assert found["all-gather"] == (4, 16 * row)
    assert found["all-to-all"][0] == 4
    assert found["reduce-scatter"][0] == 4


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        ("'axis_0'", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("'axis_1'", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("'axis_0','axis_1'", ((0, 1, 2, 3, 4, 5, 6, 7),)),
    ],
)
def test_groups_along_the_axes_of_a_mesh(axes, groups):
    """As the TPU compiler writes them."""
    line = (
        "%r = bf16[4]{0:T(8)S(3)} all-gather(%x), channel_id=9, "
        f"replica_groups=mesh['axis_0'=2,'axis_1'=4] {{{axes}}}, dimensions={{0}}"
    )
    [found] = collectives(program_of(line))
    assert found.groups == groups


@pytest.mark.parametrize(
    ("mesh", "groups"),
    [
        # Of numbers [[0, 4], [1, 5], [2, 6], [3, 7]].
        ("['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}",
         ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}",
         ((0, 4), (1, 5), (2, 6), (3, 7))),
        # Of numbers [[0, 1, 4, 5], [2, 3, 6, 7]].
        ("['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(1,0,2)) {'axis_1'}",
         ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("['axis_0'=2,'axis_1'=2], device_ids=(0,2,1,3) {'axis_1'}", ((0, 2), (1, 3))),
    ],
)  # fmt: skip
def test_groups_along_a_mesh_whose_devices_are_in_another_order(mesh, groups):
    line = f"%r = f32[4] all-reduce(%x), channel_id=9, replica_groups=mesh{mesh}, to_apply=%a"
    [found] = collectives(program_of(line))
    assert found.groups == groups


# Of a training step for v5e:2x4; layouts and backend_config left out.
REDUCE_SCATTERS = """\
HloModule jit_train_step, num_partitions=8

%all-reduce-scatter.6 (input_0: f32[1024,8,128], input_1: f32[2048,64]) -> \
(f32[128,8,128], f32[256,64]) {
  %input_0 = f32[1024,8,128]{2,1,0:T(8,128)} parameter(0)
  %input_1 = f32[2048,64]{1,0:T(8,128)} parameter(1)
  %all-reduce.108 = (f32[1024,8,128]{2,1,0:T(8,128)}, f32[2048,64]{1,0:T(8,128)}) \
all-reduce(%input_0, %input_1), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, \
to_apply=%add.5
  %get-tuple-element.870 = f32[1024,8,128]{2,1,0:T(8,128)} \
get-tuple-element(%all-reduce.108), index=0
  %dynamic-slice.72 = f32[128,8,128]{2,1,0:T(8,128)} \
dynamic-slice(%get-tuple-element.870, %multiply.1, %constant.6, %constant.6), \
dynamic_slice_sizes={128,8,128}
  %get-tuple-element.871 = f32[2048,64]{1,0:T(8,128)} \
get-tuple-element(%all-reduce.108), index=1
  %dynamic-slice.73 = f32[256,64]{1,0:T(8,128)} \
dynamic-slice(%get-tuple-element.871, %multiply.2, %constant.6), dynamic_slice_sizes={256,64}
  ROOT %tuple.9 = (f32[128,8,128]{2,1,0:T(8,128)}, f32[256,64]{1,0:T(8,128)}) \
tuple(%dynamic-slice.72, %dynamic-slice.73)
}

%all-reduce-scatter.7 (input_0: f32[1024]) -> f32[128] {
  %input_0 = f32[1024]{0:T(1024)} parameter(0)
  %all-reduce.109 = f32[1024]{0:T(1024)} all-reduce(%input_0), channel_id=2, \
replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add.5
  ROOT %dynamic-slice.74 = f32[128]{0:T(128)} dynamic-slice(%all-reduce.109, %multiply.3), \
dynamic_slice_sizes={128}
}

ENTRY %main (x: f32[1024,8,128], y: f32[2048,64], z: f32[1024]) -> f32[128] {
  %fusion.382 = (f32[128,8,128]{2,1,0:T(8,128)}, f32[256,64]{1,0:T(8,128)}) \
fusion(%x, %y), kind=kCustom, calls=%all-reduce-scatter.6
  %fusion.383 = f32[128]{0:T(128)} fusion(%z), kind=kCustom, calls=%all-reduce-scatter.7
  %all-reduce.3 = f32[128]{0:T(128)} all-reduce(%fusion.383), channel_id=3, \
replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add.5
}
"""


def test_an_all_reduce_in_a_fusion_with_slices_of_it_is_a_reduce_scatter():
    """So the TPU compiler writes them; an all-reduce stands outside of such fusions."""
    of_all = tuple(range(8))
    two, one, whole = collectives(REDUCE_SCATTERS)
    arrays = (("f32", (128, 8, 128)), ("f32", (256, 64)))
    num_bytes = 4 * (1024 * 8 * 128 + 2048 * 64)
    assert two == HloCollective("reduce-scatter", arrays, (of_all,), num_bytes)
    slices = (("f32", (128,)),)
    assert one == HloCollective("reduce-scatter", slices, (of_all,), 4 * 1024)
    assert whole == HloCollective("all-reduce", slices, (of_all,), 4 * 128)
    assert executed_collectives(REDUCE_SCATTERS) == {two: 1, one: 1, whole: 1}


def test_a_gather_beside_several_products_is_one():
    """The TPU compiler writes it in each computation that it goes on in (chain_id)."""
    gather = "f32[8] all-gather(%x), replica_groups={{0,1}}"
    computations = [("start", gather + ', frontend_attributes={chain_id="3"}'),
                    ("goes_on", gather + ', frontend_attributes={chain_id="3"}'),
                    ("other", gather)]  # fmt: skip
    hlo = "".join(
        f"%{name} (x: f32[4]) -> f32[8] {{\n  %g = {line}\n"
        + '  ROOT %s = (f32[4]) custom-call(%g), custom_call_target="AsyncCollectiveStart"\n'
        * (name == "start")
        + "}\n"
        for name, line in computations
    )
    calls = "".join(f"  %{n}.1 = f32[8] fusion(%x), calls=%{n}\n" for n, _ in computations)
    hlo += "ENTRY %main (x: f32[4]) -> f32[8] {\n" + calls + "}\n"
    assert sum(executed_collectives(hlo).values()) == len(collectives(hlo)) == 2


EXCHANGES = """\
%products (x: f32[2]) -> f32[2] {
  %c = f32[2] convolution(%x, %x)
}

%other (x: f32[2]) -> f32[2] {
  %c = f32[2] add(%x, %x)
}

ENTRY %main () -> f32[2] {
  %start.1 = ((f32[2]), f32[2], u32[], u32[]) all-to-all-start(%a)
  %start.2 = ((f32[2]), f32[2], u32[], u32[]) all-to-all-start(%b)
  %done.1 = f32[2] all-to-all-done(%start.1)
  %y = f32[2] fusion(%done.1), kind=kOutput, calls=%NAME, metadata={op_name="jit/OP/dot"}
  %done.2 = f32[2] all-to-all-done(%start.2)
  %start.3 = ((f32[2]), f32[2], u32[], u32[]) all-to-all-start(%y)
  %done.3 = f32[2] all-to-all-done(%start.3)
}
"""


@pytest.mark.parametrize(
    ("name", "op", "number"),
    [("products", "RD,DF", 1), ("other", "RD,DF", 0), ("products", "BL,LM", 0)],
)
def test_an_exchange_under_way_while_experts_compute_is_overlapped(name, op, number):
    hlo = EXCHANGES.replace("NAME", name).replace("OP", op)
    assert overlapped_exchanges(hlo, "RD,DF") == number


def test_a_conditional_that_a_table_decides_counts_by_its_share():
    mesh = MeshSpec(data=8).build()

    def local(x, is_run_T):
        def tick(x, is_run):
            with jax.named_scope("if_table_says"):
                x = jax.lax.cond(is_run, lambda x: jax.lax.psum(x, "data") * 0.5, jnp.sin, x)
            return x, None

        return jax.lax.scan(tick, x, is_run_T)[0]

    spec, whole = PartitionSpec("data"), PartitionSpec()
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, whole), out_specs=spec, check_vma=False
    )
    hlo = jax.jit(sharded).lower(jnp.ones((16, 3)), jnp.ones(6, bool)).compile().as_text()
    assert sum(executed_collectives(hlo).values()) == 6
    shares = {"if_table_says": Fraction(2, 3)}
    assert sum(executed_collectives(hlo, shares).values()) == 4
