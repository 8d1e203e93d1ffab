# SPDX-License-Identifier: Apache-2.0
"""Every TPU kernel compiled for every chip, within the budget of the table."""

import functools

import pytest

from pallas_kernels.aot import tpu_budgets, tpu_compiler
from pallas_kernels.aot.case import Case
from pallas_kernels.grouped_matmul import tpu

# Another compiler than that of the table schedules a little differently.
SLACK = 1.1
VMEM = {"v4": 16 << 20, "v5e": 128 << 20, "v5p": 64 << 20, "v6e": 128 << 20, "tpu7x": 64 << 20}

each_target = pytest.mark.parametrize("target", tpu_compiler.TOPOLOGIES)


@functools.cache
def measured(target: str) -> dict[str, dict]:
    return tpu_budgets.measure(target)


@pytest.fixture
def compiler():
    try:
        tpu_compiler.compiler_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_table_has_every_case_of_every_target():
    table = tpu_budgets.load()
    assert set(table) == set(tpu_compiler.TOPOLOGIES)
    for rows in table.values():
        assert set(rows) == set(tpu_budgets.cases())
        assert all(set(row) == set(tpu_budgets.RESOURCES) for row in rows.values())


@pytest.mark.aot
@pytest.mark.timeout(1800)
@each_target
def test_kernels_compile_within_budget(compiler, target):
    budget = tpu_budgets.load()[target]
    found = measured(target)
    assert {name: row["error"] for name, row in found.items() if "error" in row} == {}
    over = [
        f"{name}: {resource} {row[resource]} is over the budget of {budget[name][resource]}"
        for name, row in found.items()
        for resource in ("vmem_bytes", "bundles")
        if row[resource] > SLACK * budget[name][resource]
    ]
    assert over == []


@pytest.mark.aot
@pytest.mark.timeout(1800)
@each_target
def test_kernels_fit_vector_memory(compiler, target):
    assert max(row["vmem_bytes"] for row in measured(target).values()) < VMEM[target]


@pytest.mark.aot
@pytest.mark.timeout(1800)
@each_target
def test_temporaries_hold_no_dequantized_weights(compiler, target):
    cases = tpu_budgets.cases()
    quantized = {name: row for name, row in measured(target).items() if cases[name].bits}
    assert quantized
    for name, row in quantized.items():
        # Less than a single expert's matrix in bfloat16, of 32.
        assert row["temp_bytes"] < 2 * cases[name].D * cases[name].F, name


@pytest.mark.aot
@each_target
def test_what_is_refused_does_not_compile(compiler, target):
    case = Case("grouped_matmul", 16, 128, 128, 2, dtype="float16")
    [result] = tpu_compiler.compile_cases(target, [case])
    assert "legalize" in result["error"] or "float16" in result["error"]
    assert "float16" in tpu.refusal("float16", "float16", 16, 128, 128, 2)


@pytest.mark.aot
def test_sizes_that_do_not_divide_compile(compiler):
    tiling = {"block_R": 32, "block_D": 512, "block_F": 256}
    sizes = {"R": 250, "D": 1000, "F": 700, "E": 8, "tiling": tiling}
    cases = [
        Case("grouped_matmul", **sizes),
        Case("grouped_matmul", **sizes, direction="weight_gradient"),
        Case("quantized_grouped_matmul", **sizes, bits=4, epilogue=True),
        Case("quantized_grouped_matmul", **sizes | {"tiling": None}, bits=8),
        Case("grouped_matmul", 3, 50, 70, 4, dtype="float32"),
    ]
    assert [result["error"] for result in tpu_compiler.compile_cases("v5e", cases)] == [
        None
    ] * 5
