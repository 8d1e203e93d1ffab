# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for TPUs and an H200 that are not there, within the budgets of the tables.

Tests marked `aot` compile; the others hold the tables, and the way to the compilers and back.
"""

import dataclasses
import importlib.metadata
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from pallas_kernels.aot import gpu_compiler, gpu_cost, install, tpu_compiler
from pallas_kernels.aot.case import Case, epilogue_cases
from pallas_kernels.aot.gpu_simulation import Instruction, loop_cycles
from pallas_kernels.bench import timing
from pallas_kernels.grouped_matmul import tpu
from pallas_kernels.quantized_grouped_matmul import gpu as quantized_gpu
from pallas_kernels.tiling.gpu import SHARED_BYTES
from tests.processes import ROOT, skip_without


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "matmul"}, "is not one of grouped_matmul"),
        ({"direction": "sideways"}, "is not one of forward"),
        ({"bits": 4}, "others None"),
        ({"op": "quantized_grouped_matmul"}, "4 or 8 bits"),
        ({"op": "quantized_grouped_matmul", "bits": 4, "is_float8": True}, "have bits=8"),
        ({"dtype": "float8_e4m3fn"}, "use op='quantized_grouped_matmul'"),
        (
            {"op": "quantized_grouped_matmul", "bits": 8, "direction": "weight_gradient"},
            "have no gradient",
        ),
    ],
)
def test_nonsense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Case(**{"op": "grouped_matmul", "R": 8, "D": 64, "F": 32, "E": 4, **changes})


# Another compiler than that of the table schedules a little differently.
SLACK = 1.1
VMEM = {"v4": 16 << 20, "v5e": 128 << 20, "v5p": 64 << 20, "v6e": 128 << 20, "tpu7x": 64 << 20}

each_target = pytest.mark.parametrize("target", tpu_compiler.TOPOLOGIES)


@pytest.fixture
def needs_libtpu():
    skip_without(tpu_compiler)


@pytest.fixture
def needs_cuda():
    skip_without(gpu_compiler)


def test_the_table_of_tpus_has_every_case_of_every_target():
    table = tpu_compiler.COMPILER.budgets()
    assert set(table) == set(tpu_compiler.TOPOLOGIES)
    for rows in table.values():
        assert set(rows) == set(tpu_compiler.budget_cases())
        assert all(set(row) == set(tpu_compiler.COMPILER.resources) for row in rows.values())


@pytest.mark.aot
@pytest.mark.timeout(1800)
@each_target
def test_tpu_kernels_compile_within_budget(needs_libtpu, target):
    """They fit vector memory too, and temporaries hold no dequantized weights."""
    budget = tpu_compiler.COMPILER.budgets()[target]
    found = tpu_compiler.COMPILER.measure(target)
    assert {name: row["error"] for name, row in found.items() if "error" in row} == {}
    over = [
        f"{name}: {resource} {row[resource]} is over the budget of {budget[name][resource]}"
        for name, row in found.items()
        for resource in ("vmem_bytes", "bundles")
        if row[resource] > SLACK * budget[name][resource]
    ]
    assert over == []
    assert max(row["vmem_bytes"] for row in found.values()) < VMEM[target]
    quantized = {name: each for name, each in tpu_compiler.budget_cases().items() if each.bits}
    assert quantized
    for name, case in quantized.items():
        # Less than a single expert's matrix in bfloat16, of 32.
        assert found[name]["temp_bytes"] < 2 * case.D * case.F, name


@pytest.mark.aot
@each_target
def test_what_is_refused_for_tpus_does_not_compile(needs_libtpu, target):
    case = Case("grouped_matmul", 16, 128, 128, 2, dtype="float16")
    one_row = Case("grouped_matmul", 16, 1, 128, 2, direction="input_gradient")
    found = tpu_compiler.COMPILER.compile(target, [case, one_row])
    assert "legalize" in found[0]["error"] or "xf16" in found[0]["error"]
    assert "float16" in tpu.refusal("float16", "float16", 16, 128, 128, 2)
    assert "same element type" in found[1]["error"]
    assert "matrix of one row" in tpu.refusal("bfloat16", "bfloat16", 16, 1, 128, 2)


@pytest.mark.aot
def test_sizes_of_tpus_that_do_not_divide_compile(needs_libtpu):
    tiling = {"block_R": 32, "block_D": 512, "block_F": 256}
    sizes = {"R": 250, "D": 1000, "F": 700, "E": 8, "tiling": tiling}
    cases = [
        Case("grouped_matmul", **sizes),
        Case("grouped_matmul", **sizes, direction="weight_gradient"),
        Case("quantized_grouped_matmul", **sizes, bits=4, epilogue=True),
        Case("quantized_grouped_matmul", **sizes | {"tiling": None}, bits=8),
        Case("grouped_matmul", 3, 50, 70, 4, dtype="float32"),
        Case("grouped_matmul", 3, 50, 70, 4, direction="weight_gradient"),
        Case("grouped_matmul", 3, 1, 70, 4, direction="weight_gradient"),  # a bias's
        Case("quantized_grouped_matmul", **sizes, bits=8, is_float8=True, epilogue=True),
    ]
    assert [result["error"] for result in tpu_compiler.COMPILER.compile("v5e", cases)] == [
        None
    ] * 8


# The first product of a layer with many rows, as inference and as training compile it.
_, MANY, _ = EPILOGUES = list(epilogue_cases().values())


@pytest.mark.aot
def test_gated_units_compile_for_tpus_within_vector_memory(needs_libtpu):
    for result in tpu_compiler.COMPILER.compile("v5e", EPILOGUES):
        assert result["error"] is None
        assert result["vmem_bytes"] < VMEM["v5e"]


@pytest.mark.aot
def test_gated_units_compile_for_gpus_and_spill_nothing(needs_cuda):
    for result in gpu_compiler.COMPILER.compile("h200", EPILOGUES):
        assert (result["error"], result["spill_bytes"]) == (None, 0)
        assert result["hgmma"] > 0


CASE = Case("grouped_matmul", 16, 128, 128, 2)


def test_what_is_unknown_is_refused():
    with pytest.raises(ValueError, match="target='v3' is not one of v4, v5e, v5p, v6e, tpu7x"):
        tpu_compiler.COMPILER.compile("v3", [CASE])
    with pytest.raises(ValueError, match="target='b200' is not one of h200"):
        gpu_compiler.COMPILER.compile("b200", [])
    with pytest.raises(ValueError, match="back_end='rocm' is not one of tpu, gpu"):
        install.requirements("rocm")


def test_absent_libtpu_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv(tpu_compiler.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no libtpu in .*run `make test-aot`"):
        tpu_compiler.COMPILER.compile("v5e", [CASE])


def test_libtpu_that_dies_is_reported(tmp_path, monkeypatch):
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv(tpu_compiler.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeError, match="ended with status 3 after 0 of 1 cases"):
        tpu_compiler.COMPILER.compile("v5e", [CASE])


def test_libtpu_is_on_the_path_of_the_child_alone(tmp_path, monkeypatch):
    (tmp_path / "libtpu").mkdir()
    monkeypatch.setenv(tpu_compiler.FOLDER_VARIABLE, str(tmp_path))
    variables = tpu_compiler.child_variables("notes")
    assert str(tmp_path) in variables["PYTHONPATH"]
    assert variables["JAX_PLATFORMS"] == "cpu"
    assert "--xla_jf_dump_to=notes" in variables["LIBTPU_INIT_ARGS"]


def test_notes_of_libtpu_are_read(tmp_path):
    # As libtpu writes them: of several programs, several notes each.
    (tmp_path / "1-copy.4-70-schedule-analysis_final_bundles.txt").write_text("else")
    (tmp_path / "1-multiply_rows.1-70-schedule-analysis_final_bundles.txt").write_text(
        "Schedule analysis:\n\ttotal scheduled bundles:    608\n\tempty scheduled bundles: 12\n"
    )
    (tmp_path / "1-multiply_rows.1-68-post-delay-converter.txt").write_text(
        "  #allocation2 [shape = 'u32', space=vmem, size = 0x9000, offset = 0, scoped]\n"
        "  #allocation3 [shape = 'u8[512]', space=smem, size = 0x200, offset = 0, scoped]\n"
        # Of two branches, at one address.
        "  #allocation8 [shape = 'u8', space=vmem, size = 0x10000, offset = 0x9000, scoped]\n"
        "  #allocation9 [shape = 'u8', space=vmem, size = 0x1000, offset = 0x9000, scoped]\n"
    )
    assert tpu_compiler.read_dump(tmp_path) == {"bundles": 608, "vmem_bytes": 0x19000}


# This Python's JAX, and those that machines with cards have.
JAX = ("0.10", "0.11", "0.12")
NEWER = pathlib.Path(os.environ.get("SWITCHX_AOT_JAX", ".venv/aot_jax"))


def compiled_by(jax: str, cases: list[Case]) -> list[dict]:
    """What the compiler of a JAX says of cases for an H200, one for each, in order.

    Skips the test where it is not installed.
    """
    folder = NEWER.absolute() / jax
    python, compiler = folder / "env/bin/python", folder / "gpu"
    if jax == JAX[0]:
        python, compiler = sys.executable, gpu_compiler.compiler_folder()
    elif not compiler.is_dir():
        pytest.skip(f"no JAX {jax} in {folder}; run `make test-aot`, which installs it")
    found = subprocess.run(
        [python, "-m", "pallas_kernels.aot.gpu_compiler", "h200"],
        input=json.dumps([dataclasses.asdict(case) for case in cases]),
        # Not the flags of XLA that this JAX has.
        env={
            "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT),
            gpu_compiler.FOLDER_VARIABLE: str(compiler),
        },
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    return [json.loads(line) for line in found.stdout.splitlines()]


HELD = "registers spill_bytes shared_bytes instructions temp_bytes kernels loop_cycles".split()


@pytest.mark.aot
@pytest.mark.timeout(900)
@pytest.mark.parametrize("jax", JAX)
def test_gpu_kernels_compile_within_budget(needs_cuda, jax):
    """Temporaries hold no dequantized weights."""
    budget = gpu_compiler.COMPILER.budgets()[f"h200 jax {jax}"]
    cases = gpu_compiler.budget_cases()
    found = dict(zip(cases, compiled_by(jax, list(cases.values())), strict=True))
    assert {name: row["error"] for name, row in found.items() if row["error"]} == {}
    # These vary a little with JAX and ptxas.
    slack = {"instructions": 1.15, "loop_cycles": 1.15}
    over = [
        f"{name}: {resource} {row[resource]} is over the budget of {budget[name][resource]}"
        for name, row in found.items()
        for resource in HELD
        if row[resource] > slack.get(resource, 1) * budget[name][resource]
    ]
    assert over == []
    assert all(row["hgmma"] for row in found.values())
    for name, case in cases.items():
        # Less than half of a single expert's matrix in bfloat16.
        assert not case.bits or found[name]["temp_bytes"] < case.D * case.F, name


# Instructions in the loop by JAX, where they differ by more than 15%, and the cause. The list
# may only shrink.
DIFFERENT = {
    f"bfloat16 weight_gradient {matrix} {load}": counts
    for load in ("few", "many")
    for matrix, counts in {
        # From 0.11 on the loop loads its masks of rows with a quarter of the index arithmetic.
        "1024x4096": (329, 281, 281), "4096x1024": (325, 277, 277),
        "768x3072": (312, 264, 264), "4096x14336": (312, 264, 264),
    }.items()
}  # fmt: skip


def test_what_is_tested_is_what_runs():
    """Loops are as long with every JAX that is supported."""
    tables = [gpu_compiler.COMPILER.budgets()[f"h200 jax {jax}"] for jax in JAX]
    different = {}
    for name in gpu_compiler.budget_cases():
        counts = tuple(table[name]["loop_instructions"] for table in tables)
        if max(counts) > 1.15 * min(counts):
            different[name] = counts
    assert different == DIFFERENT


@pytest.mark.aot
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("jax", JAX)
def test_no_candidate_of_tune_spills(needs_cuda, jax):
    cases, (D, F), E = {}, (1024, 4096), 32
    for rows, bits, group_size in itertools.product((4, 8, 32, 256), (8, 4), (None, 128)):
        sizes = {"R": rows * E, "D": D, "F": F, "E": E, "bits": bits, "group_size": group_size}
        for tiling in quantized_gpu.candidates(**sizes):
            # Panels and stages are numbers in the same code.
            code = dataclasses.replace(tiling, panel=1, stages=0), bits, group_size
            cases[code] = Case(
                "quantized_grouped_matmul", **sizes, tiling=dataclasses.asdict(tiling)
            )
    found = [
        (row["case"], row["error"] or row["spill_bytes"])
        for row in compiled_by(jax, list(cases.values()))
        if row["error"] or row["spill_bytes"]
    ]
    assert found == []


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_a_rehearsal_in_an_environment_as_cards_have_it(tmp_path):
    """Python 3.12 or newer, JAX 0.11, neither gin, Grain nor TFDS, and no installation."""
    python = NEWER.absolute() / "0.11/env/bin/python"
    if not python.exists():
        pytest.skip(f"no JAX 0.11 in {NEWER}; run `make test-aot`, which installs it")
    words = ["-m", "switchx.bench.accelerator", "--rehearsal", "--json"]
    found = subprocess.run(
        [python, *words, f"--output={tmp_path / 'out'}"], cwd=ROOT, capture_output=True,
        text=True, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    rows = json.loads(found.stdout.splitlines()[-1])["results"]
    versions = {row["case"]: row["measured"] for row in rows if row["unit"] == "version"}
    assert versions["jax"].startswith("0.11.")
    assert versions["gin-config"] == versions["grain"] == "missing"
    peers = [row["why"] for row in rows if row["case"] == "transformers, AdamW"]
    assert peers == ["no torch and transformers here"]


# With one set of sizes and of weights: nothing but the result before tells two calls apart.
COUNTED = """
import jax, jax.numpy as jnp
from pallas_kernels.aot.gpu_compiler import described_gpus
from pallas_kernels.bench.timing import UNROLLED, repeated
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul.gpu_schedule import schedule
from pallas_kernels.mosaic_gpu import Mosaic
sharding = jax.sharding.SingleDeviceSharding(described_gpus("h200")[0])
bfloat16 = [((64, 128), jnp.bfloat16), ((4, 128, 256), jnp.bfloat16)]
x_RD, w_EDF, table_JE = (
    jax.ShapeDtypeStruct(*each, sharding=sharding) for each in [*bfloat16, ((1, 4), jnp.int32)]
)
for function in (gpu.forward, lambda x_RD, w, sizes_E: schedule(sizes_E, 64, 8, Mosaic())):
    run, calls = repeated(function, 1, 1)
    program = jax.jit(run).lower(x_RD, (w_EDF,), table_JE).compile().as_text()
    # The body of the loop has so many calls; what follows it has none.
    assert calls % UNROLLED == 0
    print(program.count('custom_call_target="mosaic_gpu'))
"""


@pytest.mark.aot
def test_the_bench_makes_every_call_on_gpus(needs_cuda):
    """Of a product its own kernel, and of the schedule one."""
    found = subprocess.run(
        [sys.executable, "-c", COUNTED], env=os.environ | gpu_compiler.compiler_variables(),
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.split() == [str(timing.UNROLLED)] * 2


FLOAT8 = Case("quantized_grouped_matmul", 256, 1024, 4096, 32, bits=8, is_float8=True)


@pytest.mark.aot
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float8_takes_fewer_instructions_than_int8_on_gpus(needs_cuda, dtype):
    float8 = dataclasses.replace(FLOAT8, dtype=dtype)
    # Of int8 in the order of channels, in which float8 is.
    cases = [float8, dataclasses.replace(float8, is_float8=False, is_native=True)]
    found, of_int8 = gpu_compiler.COMPILER.compile("h200", cases)
    assert (found["error"], found["spill_bytes"], found["temp_bytes"]) == (None, 0, 0)
    assert found["loop_instructions"] < of_int8["loop_instructions"]


@pytest.mark.aot
def test_an_a100_has_one_kernel_for_each_product_and_no_temporaries(needs_cuda):
    cases = [
        dataclasses.replace(case, tiling=None)
        for name, case in gpu_compiler.budget_cases().items()
        if " 1024x4096 " in name and "one row" not in name
    ]
    cases += [*EPILOGUES, dataclasses.replace(MANY, dtype="float32"), FLOAT8]
    for case, row in zip(cases, gpu_compiler.COMPILER.compile("a100", cases), strict=True):
        # `jax.lax.ragged_dot` has the rows once for every expert there.
        assert (row["error"], row["kernels"], row["temp_bytes"]) == (None, 1, 0), case


@pytest.mark.aot
def test_what_does_not_compile_says_so(needs_cuda):
    tiling = {"tile_m": 64, "tile_n": 24, "tile_k": 64}
    refused = Case("grouped_matmul", 8, 128, 64, 2, tiling=tiling)
    padded = Case("grouped_matmul", 8, 100, 64, 2)
    errors = [row["error"] for row in gpu_compiler.COMPILER.compile("h200", [refused, padded])]
    assert "tile_m=64, tile_n=24; expected" in errors[0] and errors[1] is None


@pytest.mark.parametrize("jax", JAX)
def test_the_table_of_gpus_spills_nothing_and_multiplies_on_tensor_cores(jax):
    table = gpu_compiler.COMPILER.budgets()[f"h200 jax {jax}"]
    assert list(table) == list(gpu_compiler.budget_cases())
    for row in table.values():
        assert set(row) == set(gpu_compiler.RESOURCES)
        assert row["spill_bytes"] == 0
        assert row["registers"] <= 168
        assert row["shared_bytes"] <= SHARED_BYTES
        assert row["hgmma"] > 0


@pytest.mark.parametrize("jax", JAX)
def test_the_schedule_of_a_product_is_one_kernel(jax):
    table = gpu_compiler.COMPILER.budgets()[f"h200 jax {jax}"]
    for name, case in gpu_compiler.budget_cases().items():
        # The product, the gates up to the last tile's end; the schedule of many rows and of the
        # weights' gradient; rows are padded to 8, and sums in parts are added up.
        has_parts = name == "bfloat16 forward 4096x1024 8 rows"
        has_schedule = "many" in name or case.direction == "weight_gradient" or has_parts
        expected = 1 + has_schedule + case.epilogue + has_parts + (case.R % 8 > 0)
        assert table[name]["kernels"] == expected, name


HLO = """ENTRY %main (s: s32[4]) -> bf16[8,64] {
  %s = s32[4]{0} parameter(0), sharding={replicated}
  %k = (s32[128]{0}, /*index=1*/s32[128]{0}) custom-call(%s), custom_call_target="mosaic_gpu_v2"
  %one = s32[128]{0} get-tuple-element(%k), index=0
  ROOT %y = bf16[8,64]{1,0} fusion(%one), kind=kLoop, calls=%sum
}
"""


def test_launched_kernels_are_counted():
    assert gpu_compiler.count_kernels(HLO) == 2
    with pytest.raises(ValueError, match="ENTRY"):
        gpu_compiler.count_kernels("")


PTXAS = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
    0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""
SASS = """        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
   -:-:1:Y:07        /*0010*/      LDS R32, [R2]
   1:-:-:Y:01        /*0020*/      HGMMA.64x16x16.F32.BF16 R24, R32, gdesc[UR16], gsb0
   -:-:-:Y:01        /*0030*/      WARPGROUP.DEPBAR.LE gsb0, 0x0
   -:-:-:Y:05        /*0040*/      @P1 BRA `(.L_x_1)
   -:-:-:Y:05        /*0050*/      @P1 BRA `(.L_x_2)
.L_x_2:
"""
PASSES = "gpu.launch dynamic_shared_memory_size %c213072_i32 {"


def test_resources_are_read_off_the_stages():
    assert gpu_compiler.read_resources(PTXAS, SASS, PASSES) == {
        "registers": 168, "spill_bytes": 20, "shared_bytes": 213072, "hgmma": 1,
        "instructions": 6, "loop_instructions": 4,
        # 29 of the load, 8 and 33 of the product, stalls of 1 and 5; two warps hide each other.
        "loop_cycles": 77, "loop_latency": 76,
        "loop_hgmma": 1, "epilogue_instructions": 1, "epilogue_latency": 5,
    }  # fmt: skip
    with pytest.raises(ValueError, match="a loop with HGMMA"):
        gpu_cost.read_loop(SASS.replace("HGMMA", "IMMA"))


def simulated(*lines: str, warps: int = 1) -> int:
    """Cycles of a loop; each line has waits, reads, writes, stall and text, apart by `:`."""
    return loop_cycles([Instruction(*line.split(":", 4)) for line in lines], warps)


def test_simulated_cycles_by_hand():
    # One scheduler issues an instruction a cycle, of either warp.
    assert simulated("-:-:-:1:MOV", "-:-:-:1:MOV", warps=2) == 4
    # The integer unit takes two cycles for each; a stall of one warp hides behind the other.
    assert simulated("-:-:-:1:PRMT", "-:-:-:1:LOP3", warps=2) == 8
    assert simulated("-:-:-:4:MOV", warps=1) == simulated("-:-:-:4:MOV", warps=2) == 4
    # What is loaded is there after 29 cycles; the port is busy for four of each load.
    assert simulated("-:-:1:1:LDS", "1:-:-:1:MOV") == 30
    assert simulated("-:-:-:1:SHFL", "-:-:-:1:LDS", warps=2) == 16
    # 64 x 16 x 16 products take 8 cycles, and are done 33 later.
    product = "-:-:-:1:HGMMA.64x16x16 gsb0"
    assert simulated(product, "-:-:-:1:WARPGROUP.DEPBAR.LE gsb0, 0x0") == 42
    # One may still run: the next ones come every 8 cycles, and each warp has every other.
    behind = simulated(product, "-:-:-:1:WARPGROUP.DEPBAR.LE gsb0, 0x1")
    assert behind < 42 / 1.5


def test_products_that_ptxas_serializes_are_refused():
    note = (
        "ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to non wgmma instructions defining input registers of a wgmma\n"
    )
    with pytest.raises(ValueError, match="C7513"):
        gpu_compiler.read_resources(PTXAS + note, SASS, PASSES)


def test_the_launch_is_fitted_and_says_of_each_cell_what_was_measured():
    assert 1e-5 < gpu_cost.launch_s() < 2e-5
    rows = gpu_cost.left_out()
    assert len(rows) == 9
    # By the fit to the eight others.
    assert max(abs(row["ratio"] - 1) for row in rows) < 0.15


def test_a_prediction_by_hand(monkeypatch):
    monkeypatch.setattr(gpu_cost, "launch_s", lambda: 10e-6)
    # Tiles of 256 features: 16 of each of 32 experts, for 132 SMs. 128 channels are 8 HGMMA of
    # each half.
    case = Case("quantized_grouped_matmul", 128, 1024, 4096, 32, bits=8)
    assert gpu_cost.tiling_of(case).tile_m == 128
    found = gpu_cost.predict({"loop_hgmma": 16, "loop_cycles": 2100}, case)
    assert found.tiles == 4
    assert found.products_s == pytest.approx(4 * 8 * 2100 / 1.98e9)
    assert found.memory_s == pytest.approx(32 * 1024 * 4096 / 4.5e12)
    assert (found.bound, found.seconds) == ("products", 10e-6 + found.products_s)
    # An H100 reads more slowly.
    found = gpu_cost.predict({"loop_hgmma": 16, "loop_cycles": 2100}, case, "H100")
    assert found.seconds == 10e-6 + 32 * 1024 * 4096 / 2.95e12


def test_every_shape_of_table_1_has_a_prediction():
    rows = gpu_cost.predictions()
    assert len(rows) == 4 * 3
    assert all(row["expected_us"] >= max(row["products_us"], row["memory_us"]) for row in rows)
    for bits in (None, 8, 4):
        name = f"int{bits} 1024x4096 few" if bits else "bfloat16 forward 1024x4096 few"
        [row] = (row for row in rows if row["product"] == name)
        seconds = gpu_cost.predicted_s(256, 1024, 4096, 32, bits)
        assert 1e6 * seconds == row["expected_us"]
    # No case is compiled with the tile that 256 rows an expert have.
    assert gpu_cost.predicted_s(8192, 1024, 4096, 32, 8) is None


def test_epilogues_are_read_to_the_end_of_the_loop_over_tiles():
    lines = [
        ".L_x_0:", "HGMMA.64x16x16.F32.BF16 R24", ".L_x_1:", "HGMMA.64x256x16.F32.BF16 R24",
        "@P1 BRA `(.L_x_1)",  # the loop: 2 instructions
        "STS [R1], R2", "@!P0 BRA `(.L_x_2)", "UTMASTG.2D [UR1]", ".L_x_2:",
        "@!P1 BRA `(.L_x_3)", "UTMASTG.2D [UR1]", "NOP", ".L_x_3:",  # a second part: jumped
        "STS [R1], R3", "@!P0 BRA `(.L_x_4)", "UTMASTG.2D [UR2]", ".L_x_4:",
        "@P2 BRA `(.L_x_0)", "EXIT",
    ]  # fmt: skip
    sass = "\n".join(
        line if line.startswith(".L") else f"   -:-:-:Y:02        /*0010*/   {line} ;"
        for line in lines
    )
    found = gpu_cost.read_loop(sass)
    assert (found["loop_instructions"], found["loop_hgmma"]) == (2, 1)
    assert (found["epilogue_instructions"], found["epilogue_latency"]) == (8, 16)


@pytest.mark.parametrize("without", [0, 1, 2])
def test_silent_stages_are_no_resources(without):
    texts = [PTXAS, SASS, PASSES]
    texts[without] = ""
    with pytest.raises(ValueError, match="other versions of these tools"):
        gpu_compiler.read_resources(*texts)


def test_a_missing_cuda_plugin_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(gpu_compiler.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="run `make test-aot`"):
        gpu_compiler.COMPILER.compile("h200", [])
    (tmp_path / "jax_cuda13_plugin").mkdir()
    (tmp_path / "jax_cuda13_plugin-0.1.dist-info").mkdir()
    with pytest.raises(FileNotFoundError, match="JAX is"):
        gpu_compiler.compiler_folder()


def test_versions_are_those_of_the_installed_jax():
    version = importlib.metadata.version("jax")
    gpu = install.requirements("gpu")
    assert gpu[:2] == [f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}"]
    assert "nvidia-cuda-nvdisasm>=13,<14" in gpu
    [tpu] = install.requirements("tpu")
    assert tpu.startswith("libtpu==")


def test_libtpu_is_found_among_what_jax_requires():
    of_jax = [
        "numpy>=2.0",
        'jaxlib<=0.10.2,>=0.10.2; extra == "tpu"',
        'libtpu==0.0.42.*; extra == "tpu"',
        'libtpu==9; extra == "other"',
    ]
    assert install.libtpu_requirement(of_jax) == "libtpu==0.0.42.*"


def test_installs_once_apart_from_the_environment(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, check: commands.append(command) or check
    )
    assert install.install("gpu", tmp_path)
    assert not install.install("gpu", tmp_path)
    [command] = commands
    assert command[command.index("--target") + 1] == str(tmp_path)
    assert "--no-deps" in command
    # Another JAX asks for others.
    monkeypatch.setattr(install, "requirements", lambda back_end: ["libtpu==1"])
    assert install.install("gpu", tmp_path)
    assert commands[1][-1] == "libtpu==1"
