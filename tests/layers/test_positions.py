# SPDX-License-Identifier: Apache-2.0
"""Buckets of relative positions by hand; TUPE's scores against JAX's own attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from switchx.layers.attention import Attention, attend
from switchx.layers.positions import UntiedPositions, relative_buckets
from switchx.models.config import ModelConfig
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules, param_shardings
from tests.layers.weights import numbers_for, with_params


def bucket(distance: int, is_bidirectional: bool) -> int:
    """Bucket of a key `distance` positions before the query (negative: after it)."""
    size = 2 * abs(distance) + 1
    buckets_LM = relative_buckets(
        size, size, is_bidirectional=is_bidirectional, num_buckets=32, max_distance=128
    )
    query = size // 2
    return int(buckets_LM[query, query - distance]) if distance else int(buckets_LM[0, 0])


def test_causal_buckets():
    # 32 buckets: 16 exact, then 16 + floor(16 * ln(d / 16) / ln(8)), at most 31.
    for distance in range(16):
        assert bucket(distance, False) == distance
    assert bucket(16, False) == 16
    assert bucket(20, False) == 17  # 16 * ln(1.25) / 2.079 = 1.72
    assert bucket(32, False) == 21  # 16 * ln(2) / 2.079 = 5.33
    assert bucket(100, False) == 30  # 16 * ln(6.25) / 2.079 = 14.1
    assert bucket(128, False) == bucket(400, False) == 31
    assert bucket(-3, False) == bucket(-200, False) == 0


def test_bidirectional_buckets():
    # 16 a side: 8 exact, then 8 + floor(8 * ln(d / 8) / ln(16)); keys after the query: +16.
    for distance in range(8):
        assert bucket(distance, True) == distance
        assert bucket(-distance, True) == (16 + distance if distance else 0)
    assert bucket(10, True) == 8  # 8 * ln(1.25) / 2.77 = 0.64
    assert bucket(12, True) == 9  # 8 * ln(1.5) / 2.77 = 1.17
    assert bucket(64, True) == 14  # 8 * ln(8) / 2.77 = 6.0
    assert bucket(200, True) == 15
    assert bucket(-200, True) == 31


def test_one_step_of_decoding_is_a_row_of_the_table():
    arguments = dict(is_bidirectional=False, num_buckets=32, max_distance=128)
    table_LM = relative_buckets(40, 40, **arguments)
    row_LM = relative_buckets(1, 40, first_query=33, **arguments)
    np.testing.assert_array_equal(row_LM[0], table_LM[33])


D, H, K, MAX_LENGTH = 6, 2, 4, 9
CONFIG = ModelConfig(
    "encoder_decoder", 9, D, 8, H, K, 1, 1, positions="tupe", max_length=MAX_LENGTH,
    scale_attention=True,
)  # fmt: skip
POSITION_BL = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
B, L = POSITION_BL.shape


def untied():
    module = nnx.eval_shape(lambda: UntiedPositions(CONFIG, key=jax.random.key(0)))
    params = numbers_for(module, scale=0.7)
    return with_params(module, params), params


def test_scores_are_those_of_one_product_of_words_and_positions_side_by_side():
    """Eq. 7 is dot-product attention with heads of size 2 K: (word, position)."""
    module = nnx.eval_shape(
        lambda: Attention(CONFIG, num_correlations=2, key=jax.random.key(0))
    )
    words = with_params(module, numbers_for(module, scale=0.7))
    positions, params = untied()
    x_BLD = np.random.default_rng(0).normal(size=(B, L, D)).astype(np.float32)
    value_BMHK = np.random.default_rng(1).normal(size=(B, L, H, K)).astype(np.float32)
    mask_BLM = np.random.default_rng(2).random((B, L, L)) < 0.6
    mask_BLM[:, :, 0] = True
    memory = dataclasses.replace(
        words.project_memory(x_BLD), value_BHMK=np.swapaxes(value_BMHK, 1, 2)
    )
    w_query_DHK = words.w_query_DHK[...] * words.score_scale
    query_BLHK = np.einsum("BLD,DHK->BLHK", x_BLD, w_query_DHK)
    bias_BHLM = positions(POSITION_BL, POSITION_BL)
    mask_BLM = jnp.array(mask_BLM)
    out_BHLK = attend(query_BLHK, memory, row_bias_BHLM=bias_BHLM, mask_BLM=mask_BLM)
    got_BLHK = jnp.swapaxes(out_BHLK, 1, 2)

    def both(name):
        word = np.einsum("BLD,DHK->BLHK", x_BLD, words.__dict__[f"w_{name}_DHK"][...])
        table = np.einsum("LD,DHK->LHK", params["positions_LD"], params[f"w_{name}_DHK"])
        return np.concatenate([word, table[POSITION_BL]], axis=-1)

    want = jax.nn.dot_product_attention(
        both("query"), both("key"), np.concatenate([value_BMHK] * 2, axis=-1),
        mask=mask_BLM[:, None],
    )  # fmt: skip
    np.testing.assert_allclose(got_BLHK, want[..., :K], rtol=1e-5, atol=1e-5)


def test_a_packed_example_has_the_positions_it_has_alone():
    positions, _ = untied()
    packed = positions(POSITION_BL, POSITION_BL)
    alone = positions(np.arange(4)[None], np.arange(4)[None])
    np.testing.assert_allclose(packed[0, :, 3:, 3:], alone[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(packed[1, :, :4, :4], alone[0], rtol=1e-6, atol=1e-6)


def test_padding_may_lie_beyond_the_table():
    positions, _ = untied()
    long_BL = np.arange(16)[None]
    bias_BHLM = positions(long_BL, long_BL)
    assert np.all(np.isfinite(bias_BHLM))
    want = positions(long_BL[:, :MAX_LENGTH], long_BL[:, :MAX_LENGTH])
    np.testing.assert_allclose(bias_BHLM[:, :, :MAX_LENGTH, :MAX_LENGTH], want, rtol=1e-6)


def test_first_scores_have_the_variance_of_those_of_words():
    """Half of it each: divided by sqrt(2 K) both."""
    config = ModelConfig(
        "encoder_decoder", 9, 64, 8, 8, 16, 1, 1, positions="tupe", max_length=64,
        scale_attention=True,
    )  # fmt: skip
    position_BL = np.arange(64)[None]
    bias_BHLM = UntiedPositions(config, key=jax.random.key(0))(position_BL, position_BL)
    assert abs(np.var(bias_BHLM) - 0.5) < 0.05


def test_rows_and_heads_are_split_over_a_mesh():
    module = nnx.eval_shape(lambda: UntiedPositions(CONFIG, key=jax.random.key(0)))
    params = numbers_for(module, scale=0.7)
    want_BHLM = with_params(module, params)(POSITION_BL, POSITION_BL)
    mesh = MeshSpec(data=2, model=2).build(jax.devices()[:4])
    shardings = param_shardings(Rules(), mesh, params)
    assert shardings["w_key_DHK"].spec[1] == "model"
    with use_mesh(mesh, Rules()):
        run = jax.jit(lambda params: with_params(module, params)(POSITION_BL, POSITION_BL))
        got_BHLM = run(jax.device_put(params, shardings))
    np.testing.assert_allclose(got_BHLM, want_BHLM, rtol=1e-5, atol=1e-5)
    assert {shard.data.shape for shard in got_BHLM.addressable_shards} == {(1, 1, L, L)}
