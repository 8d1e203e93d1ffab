# SPDX-License-Identifier: Apache-2.0
"""Contenders multiply what they are said to, and the check of their results can fail."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import QTensor, dequantize
from pallas_kernels.bench import products
from pallas_kernels.bench.cells import Cell
from tests.kernels import loops

CELL = Cell(8, 12, 4, 4, 3)


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setitem(products.ROTATED_BYTES, "cpu", 2**11)


def test_contenders_of_a_cpu():
    names = [product.name for product in products.products(CELL)]
    assert names == ["float32", "int8", "int4", "dequantize int8", "batched einsum"]
    skewed = dataclasses.replace(CELL, load="skewed")
    assert "batched einsum" not in [product.name for product in products.products(skewed)]


def test_contenders_of_an_accelerator(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    names = [product.name for product in products.products(CELL)]
    assert names == [
        "bfloat16", "int8", "int4", "dequantize int8", "dequantize int4", "ragged_dot bfloat16",
        "dense bfloat16",
    ]  # fmt: skip


@pytest.mark.parametrize("run", [products.ragged_dot, products.batched_einsum])
def test_what_we_compare_with_multiplies_the_same(run):
    x_RD, w_EDF = np.random.default_rng(0).normal(size=(12, 8)), np.zeros((4, 8, 12))
    w_EDF += np.random.default_rng(1).normal(size=w_EDF.shape)
    y_RF = run(jnp.array(x_RD), jnp.array(w_EDF), jnp.array(CELL.group_sizes()))
    expected_RF = loops.product(x_RD, w_EDF, CELL.group_sizes())
    np.testing.assert_allclose(np.asarray(y_RF), expected_RF, rtol=1e-4, atol=1e-4)


def test_every_contender_is_checked_and_right():
    for each in products.contenders(CELL, {}):
        assert each.error < 1e-6, each.name
        each.measure()
        assert each.weight_bytes == {
            "float32": 4 * 8 * 12 * 4, "batched einsum": 4 * 8 * 12 * 4,
            "int4": 4 * (4 * 12 + 4 * 12),
        }.get(each.name, 4 * (8 * 12 + 4 * 12))  # fmt: skip


def test_a_wrong_product_has_a_large_error():
    wrong = products.Product("wrong", lambda x_RD, w_EDF, sizes_E: x_RD @ w_EDF[0])
    x_RD = jnp.array(np.random.default_rng(0).normal(size=(12, 8)), jnp.float32)
    w_EDF = products.random_weights(CELL, None, 0)
    assert products.relative_error(wrong, x_RD, w_EDF, jnp.array(CELL.group_sizes())) > 0.5
    dense = products.Product("dense", products.dense)
    assert products.relative_error(dense, x_RD, w_EDF, jnp.array(CELL.group_sizes())) is None


def test_weights_rotate_and_stay_for_cells_of_the_same_matrices():
    cache = {}
    products.contenders(CELL, cache)
    sets = cache[8]
    assert sum(q.nbytes for q in sets) >= 2**11
    assert not np.array_equal(np.asarray(sets[0].values), np.asarray(sets[1].values))
    products.contenders(dataclasses.replace(CELL, tokens=1), cache)
    assert cache[8] is sets
    products.contenders(dataclasses.replace(CELL, F=4), cache)
    assert cache[8] is not sets


@pytest.mark.parametrize("bits", [8, 4])
def test_random_weights_are_of_magnitude_one(bits):
    q = products.random_weights(Cell(64, 32, 2, 2, 1), bits, 0)
    assert isinstance(q, QTensor)
    assert 0.1 < float(jnp.std(dequantize(q))) < 1


def test_bytes_of_weights_are_those_of_the_compiled_product():
    full = products.compiled_weight_bytes(None)
    assert full == 4 * 8 * 512 * 1024
    assert products.compiled_weight_bytes(8) * 4 == full
    assert products.compiled_weight_bytes(4) * 8 == full
