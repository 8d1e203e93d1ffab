# SPDX-License-Identifier: Apache-2.0
"""FLOPs and expert slots counted in programs, against those counted by hand."""

import dataclasses
import functools
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest

from switchx.compiled.computed_rows import executed_slots
from switchx.compiled.flops import has_uncounted_products, matrix_flops
from switchx.models.params import abstract_params, forward
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from tests.training.jobs import DENSE, ENCODER_DECODER, LENGTH, SWITCH, make_batch


def flops(function, *arguments) -> int:
    return matrix_flops(jax.jit(function).lower(*arguments).compile().as_text())


A, B = jnp.ones((6, 5)), jnp.ones((5, 7))


def test_a_product_and_a_batch_of_products():
    assert flops(lambda a, b: a @ b, A, B) == 2 * 6 * 5 * 7
    assert flops(lambda a, b: jnp.einsum("gij,gjk->gik", a, b), A[None] * jnp.ones((3, 1, 1)),
                 B[None] * jnp.ones((3, 1, 1))) == 3 * 2 * 6 * 5 * 7  # fmt: skip
    assert flops(lambda a: a + 1, A) == 0


@pytest.mark.parametrize(
    ("target", "is_seen"),
    [
        ("mosaic_gpu_v2", False),
        ("__gpu$xla.gpu.triton", False),
        ("__cudnn$fmhaSoftmax", False),
        ("__cublas$gemm", False),
        ("tpu_custom_call", True),
        ("MoveToHost", True),
    ],
)
def test_products_that_say_no_flops_are_known(target, is_seen):
    call = f'%y = f32[8]{{0}} custom-call(%x), custom_call_target="{target}"'
    assert has_uncounted_products(call) is not is_seen


def test_every_turn_of_a_loop_counts():
    def loop(a, b):
        return jax.lax.fori_loop(0, 4, lambda _, x: x @ b @ b.T, a)

    assert flops(loop, A, B) == 4 * 2 * 2 * 6 * 5 * 7
    once = jax.jit(loop).lower(A, B).compile().cost_analysis()["flops"]
    assert once < 2 * 2 * 2 * 6 * 5 * 7  # what XLA says: one turn


def test_a_loop_that_the_data_ends():
    def loop(a, b):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ b @ b.T, a)

    with pytest.raises(ValueError, match="has no known trip count"):
        flops(loop, A, B)
    hlo = jax.jit(loop).lower(A, B).compile().as_text()
    assert matrix_flops(hlo, trips=9) == 9 * 2 * 2 * 6 * 5 * 7


def test_of_nested_loops_that_the_data_ends_the_innermost_turns_count():
    """Rows of experts: a product for each row, and one for each expert, at most one a row."""

    def rows(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ B @ B.T, x)

    def experts(x):
        return jax.lax.while_loop(lambda x: x[0, 1] < 9, lambda x: rows(x) @ B @ B.T, x)

    hlo = jax.jit(experts).lower(A).compile().as_text()
    assert matrix_flops(hlo, trips=9) == (9 + 9) * 2 * 2 * 6 * 5 * 7


def test_a_tpus_convolutions_count_what_they_multiply():
    """Lines as the TPU compiler writes them: a product, and a batch of 2 x 4 with holes."""
    hlo = """HloModule m

%fused (p.0: bf16[2,64,256], p.1: bf16[256,512]) -> bf16[2,64,512] {
  %p.0 = bf16[2,64,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = bf16[2,64,512]{2,1,0} convolution(%p.0, %b), window={size=1}, dim_labels=0bf_io0->0bf
  %b = bf16[256,512,1]{1,0,2} bitcast(%p.1)
}

%scores (q: bf16[2,64,4,64], k: bf16[2,64,4,64]) -> f32[2,4,64,64] {
  %q = bf16[2,64,4,64]{3,1,2,0:T(8,128)(2,1)} parameter(0)
  %k = bf16[2,64,4,64]{3,1,2,0:T(8,128)(2,1)} parameter(1)
  ROOT %s = f32[2,4,64,64]{2,3,1,0} convolution(%q, %k), window={size=2x4 stride=1x3 lhs_dilate=2x4}, dim_labels=0b1f_0o1i->01bf
}

%less (t: (s32[], f32[])) -> pred[] {
  %n = s32[]{:T(128)} constant(12)
  %t = (s32[]{:T(128)}, f32[]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %l = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%body (t: (s32[], f32[])) -> (s32[], f32[]) {
  %f = bf16[2,64,512] fusion(%x, %y), kind=kOutput, calls=%fused
  %t.1 = (s32[]{:T(128)}, f32[]) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%t.1), index=0
  %two = s32[]{:T(128)} constant(2)
  %i.2 = s32[]{:T(128)} add(%i.1, %two)
  %z.1 = f32[] get-tuple-element(%t.1), index=1
  ROOT %t.2 = (s32[]{:T(128)}, f32[]) tuple(%i.2, %z.1)
}

ENTRY %main () -> f32[] {
  %three = s32[]{:T(128)} constant(3)
  %copy = s32[]{:T(128)} copy(%three)
  %z = f32[] constant(0)
  %t.3 = (s32[], f32[]) tuple(%copy, %z)
  %w = (s32[], f32[]) while(%t.3), condition=%less, body=%body
  %a = f32[2,4,64,64] fusion(%x, %y), kind=kOutput, calls=%scores
}
"""  # noqa: E501
    product, scores = 2 * (2 * 64) * 256 * 512, (2 * 4) * 2 * 64 * 64 * 64
    assert matrix_flops(hlo) == 5 * product + scores  # from 3 in twos, below 12
    for data in ("%copy = s32[]{:T(128)} parameter(0)", "%two = s32[]{:T(128)} parameter(1)"):
        name = data.partition(" = ")[0]
        other = re.sub(rf"{name} = .*", data, hlo)
        with pytest.raises(ValueError):
            matrix_flops(other)


ROWS = 16


def count(config, spec: MeshSpec | None = None) -> float:
    batch = make_batch(config, ROWS)
    run = jax.jit(functools.partial(forward, config, is_training=True))
    arguments = abstract_params(config), batch
    if spec is None:
        return executed_slots(run.trace(*arguments).jaxpr, config)
    with use_mesh(spec.build(), spec.rules):
        return executed_slots(run.trace(*arguments).jaxpr, config)


def with_switch(**changes):
    switch = dataclasses.replace(SWITCH, **changes)
    return dataclasses.replace(ENCODER_DECODER, switch=switch)


@pytest.mark.parametrize("changes", [{}, {"scan_layers": True}, {"activation": "geglu"}])
def test_groups_of_eight_tokens_and_two_slots_for_each_of_eight_experts(changes):
    config = dataclasses.replace(ENCODER_DECODER, **changes)
    # One sparse block in each stack, a group a row, 8 experts of 2 slots.
    assert count(config) == 2 * ROWS * 8 * 2


def test_rounding_up_to_one_slot_is_seen():
    """Capacity 1 of 16 experts for 8 tokens: two slots a token."""
    config = with_switch(num_experts=16, capacity_factor=1.0)
    assert count(config) == 2 * ROWS * LENGTH * 2


@pytest.mark.parametrize(
    "spec", [MeshSpec(expert=4), MeshSpec(data=2, expert=2, model=2)], ids=str
)
def test_on_a_mesh_all_devices_together(spec):
    assert count(with_switch(dispatcher="all_to_all"), spec) == 2 * ROWS * 8 * 2
    assert count(with_switch(dispatcher="einsum"), spec) == 2 * ROWS * 8 * 2


@pytest.mark.parametrize(
    ("activation", "d_ff", "spec"),
    [
        ("relu", 16, None),
        ("geglu", 16, None),
        ("relu", 32, MeshSpec(data=2, expert=2, model=2)),
        ("geglu", 64, MeshSpec(expert=2, model=4)),
    ],
)
def test_a_part_of_f_as_long_as_d_counts_once(activation, d_ff, spec):
    """The product with w_out then looks like that with w_in."""
    config = dataclasses.replace(
        with_switch(dispatcher="all_to_all" if spec else "gather"),
        activation=activation, d_ff=d_ff,
    )  # fmt: skip
    assert config.d_model == 16
    assert count(config, spec) == pytest.approx(2 * ROWS * 8 * 2, rel=1e-9)


def test_without_equal_blocks_there_are_none():
    assert count(with_switch(dispatcher="dropless")) == 0


def test_dense_products_are_no_slots():
    dense = dataclasses.replace(DENSE, switch=SWITCH)
    assert count(dense) == ROWS * 8 * 2


def test_stages_do_not_have_tokens_of_their_own():
    config = with_switch(dispatcher="all_to_all", group_size=LENGTH)
    assert count(config, MeshSpec(pipe=2, expert=4)) == 2 * ROWS * 8 * 2


KERNELS = """\
HloModule jit_train_step

ENTRY %main (x: f32[16,64], w: f32[8,64,128]) -> f32[16,128] {
  %multiply_rows.1 = f32[16,128]{1,0:T(8,128)} custom-call(%x, %w), \
custom_call_target="tpu_custom_call", operand_layout_constraints={f32[16,64]{1,0}}, \
backend_config={"flag_configs":[],"custom_call_config":{"body":"TUzvUg==",\
"cost_estimate":{"flops":"262144","transcendentals":"0","bytes_accessed":"274432"}}}
  ROOT %other = f32[16,128]{1,0:T(8,128)} custom-call(%x), \
custom_call_target="AssumeGatherIndicesInBound", backend_config={"flops":"7"}
}
"""


def test_a_tpus_kernel_counts_as_it_says():
    """2 R D F; of which the rows that have tokens are a share."""
    assert matrix_flops(KERNELS) == 2 * 16 * 64 * 128
    assert matrix_flops(KERNELS, kernel_share=Fraction(1, 4)) == 2 * 4 * 64 * 128
