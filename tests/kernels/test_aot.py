# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for TPUs and an H200 that are not there, within the budgets of the tables.

Tests marked `aot` compile; the others hold the tables, and the way to the compilers and back.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import os
import subprocess
import sys

import pytest

from pallas_kernels.aot import gpu_compiler, gpu_cost, install, tpu_compiler
from pallas_kernels.aot.case import Case, epilogue_cases
from pallas_kernels.bench import timing
from pallas_kernels.grouped_matmul import tpu
from pallas_kernels.tiling.gpu import SHARED_BYTES, Tiling


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


@functools.cache
def measured_on_tpu(target: str) -> dict[str, dict]:
    return tpu_compiler.COMPILER.measure(target)


@pytest.fixture
def needs_libtpu():
    try:
        tpu_compiler.compiler_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))


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
    budget = tpu_compiler.COMPILER.budgets()[target]
    found = measured_on_tpu(target)
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
def test_tpu_kernels_fit_vector_memory(needs_libtpu, target):
    assert max(row["vmem_bytes"] for row in measured_on_tpu(target).values()) < VMEM[target]


@pytest.mark.aot
@pytest.mark.timeout(1800)
@each_target
def test_temporaries_of_tpus_hold_no_dequantized_weights(needs_libtpu, target):
    cases = tpu_compiler.budget_cases()
    quantized = {name: row for name, row in measured_on_tpu(target).items() if cases[name].bits}
    assert quantized
    for name, row in quantized.items():
        # Less than a single expert's matrix in bfloat16, of 32.
        assert row["temp_bytes"] < 2 * cases[name].D * cases[name].F, name


@pytest.mark.aot
@each_target
def test_what_is_refused_for_tpus_does_not_compile(needs_libtpu, target):
    case = Case("grouped_matmul", 16, 128, 128, 2, dtype="float16")
    [result] = tpu_compiler.COMPILER.compile(target, [case])
    assert "legalize" in result["error"] or "xf16" in result["error"]
    assert "float16" in tpu.refusal("float16", "float16", 16, 128, 128, 2)


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
        Case("quantized_grouped_matmul", **sizes, bits=8, is_float8=True, epilogue=True),
    ]
    assert [result["error"] for result in tpu_compiler.COMPILER.compile("v5e", cases)] == [
        None
    ] * 6


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


def test_unknown_tpu_raises():
    with pytest.raises(ValueError, match="target='v3' is not one of v4, v5e, v5p, v6e, tpu7x"):
        tpu_compiler.COMPILER.compile("v3", [CASE])


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


@pytest.fixture
def needs_cuda():
    try:
        gpu_compiler.compiler_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@functools.cache
def measured_on_h200() -> dict[str, dict]:
    return gpu_compiler.COMPILER.measure("h200")


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_gpu_kernels_compile_within_budget(needs_cuda):
    budget, found = gpu_compiler.COMPILER.budgets()["h200"], measured_on_h200()
    assert {name: row["error"] for name, row in found.items() if "error" in row} == {}
    # These vary a little with JAX and ptxas.
    slack = {"instructions": 1.15, "loop_latency": 1.15}
    over = [
        f"{name}: {resource} {row[resource]} is over the budget of {budget[name][resource]}"
        for name, row in found.items()
        for resource in (
            "registers",
            "spill_bytes",
            "shared_bytes",
            "instructions",
            "temp_bytes",
            "kernels",
            "loop_latency",
        )
        if row[resource] > slack.get(resource, 1) * budget[name][resource]
    ]
    assert over == []
    assert all(row["hgmma"] for row in found.values())


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_temporaries_of_gpus_hold_no_dequantized_weights(needs_cuda):
    for name, case in gpu_compiler.budget_cases().items():
        if case.bits:
            one_expert = case.D * case.F * 2
            assert measured_on_h200()[name]["temp_bytes"] < one_expert / 2, name


# With one set of sizes and of weights: nothing but the result before tells two calls apart.
COUNTED = """
import jax, jax.numpy as jnp
from pallas_kernels.aot.gpu_compiler import described_gpu
from pallas_kernels.bench.timing import UNROLLED, repeated
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul.gpu_schedule import schedule
from pallas_kernels.mosaic_gpu import Mosaic
sharding = jax.sharding.SingleDeviceSharding(described_gpu("h200"))
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
    """Of a product two kernels, the tile schedule's and its own, and of the schedule one."""
    found = subprocess.run(
        [sys.executable, "-c", COUNTED], env=os.environ | gpu_compiler.compiler_variables(),
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.split() == [str(2 * timing.UNROLLED), str(timing.UNROLLED)]


FLOAT8 = Case("quantized_grouped_matmul", 256, 1024, 4096, 32, bits=8, is_float8=True)


@pytest.mark.aot
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float8_takes_fewer_instructions_than_int8_on_gpus(needs_cuda, dtype):
    float8 = dataclasses.replace(FLOAT8, dtype=dtype)
    cases = [float8, dataclasses.replace(float8, is_float8=False)]
    found, of_int8 = gpu_compiler.COMPILER.compile("h200", cases)
    assert (found["error"], found["spill_bytes"], found["temp_bytes"]) == (None, 0, 2816)
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


def test_the_table_of_gpus_spills_nothing_and_multiplies_on_tensor_cores():
    [table] = gpu_compiler.COMPILER.budgets().values()
    assert list(table) == list(gpu_compiler.budget_cases())
    for row in table.values():
        assert set(row) == set(gpu_compiler.RESOURCES)
        assert row["spill_bytes"] == 0
        assert row["registers"] <= 168
        assert row["shared_bytes"] <= SHARED_BYTES
        assert row["hgmma"] > 0


def test_the_schedule_of_a_product_is_one_kernel():
    [table] = gpu_compiler.COMPILER.budgets().values()
    for name, case in gpu_compiler.budget_cases().items():
        # The product, its schedule, the gates by tile; rows are padded to 8, and sums in parts
        # are added up.
        has_parts = "8 rows" in name or "one row" in name
        expected = 2 + case.epilogue + has_parts + (case.R % 8 > 0)
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
        "instructions": 6, "loop_instructions": 4, "loop_latency": 30 + 8 + 1 + 5,
        "loop_hgmma": 1,
        "epilogue_instructions": 1, "epilogue_latency": 5,
    }  # fmt: skip
    # One product may still run: it waits for the load, not for the product.
    behind = gpu_cost.read_loop(SASS.replace("gsb0, 0x0", "gsb0, 0x1"))
    assert behind["loop_latency"] == 30 + 1 + 1 + 5
    # The L2 cache takes longer to answer; a load that nothing waits for takes no time.
    assert gpu_cost.read_loop(SASS.replace("LDS", "LDG.E"))["loop_latency"] == 300 + 8 + 1 + 5
    unused = gpu_cost.read_loop(SASS.replace("1:-:-:Y:01", "-:-:-:Y:01"))
    assert unused["loop_latency"] == 7 + 8 + 1 + 5
    with pytest.raises(ValueError, match="a loop with HGMMA"):
        gpu_cost.read_loop(SASS.replace("HGMMA", "IMMA"))


def test_products_that_ptxas_serializes_are_refused():
    note = (
        "ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to non wgmma instructions defining input registers of a wgmma\n"
    )
    with pytest.raises(ValueError, match="C7513"):
        gpu_compiler.read_resources(PTXAS + note, SASS, PASSES)


def test_cycles_by_hand():
    # K of 16 by two warpgroups of 64 features, 32 rows: 64 KB of products, 2,048 a cycle.
    tiling = Tiling(tile_m=64, tile_n=32, tile_k=64)
    loop = {"loop_instructions": 30, "loop_latency": 50, "loop_hgmma": 1}
    tiling = dataclasses.replace(tiling, stages=6)
    cycles = gpu_cost.predict(loop, tiling, None)
    assert (cycles.issue, cycles.latency, cycles.tensor) == (60, 50, 32)
    # Five stages are under way for 1,000 cycles, of two stages one is.
    assert cycles.copies == 200
    # 128 x 16 weights of 2 bytes; 4.8e12 bytes a second over 132 SMs of 1.98e9 cycles.
    assert cycles.memory == pytest.approx(4096 / (4.8e12 / 1.98e9 / 132))
    assert (cycles.bound, cycles.bandwidth_share) == ("memory", 1)
    two_stages = dataclasses.replace(tiling, stages=2)
    assert gpu_cost.predict(loop, two_stages, None).bound == "copies"
    # A quarter of the bytes.
    cycles = gpu_cost.predict(loop | {"loop_latency": 250}, tiling, 4)
    assert cycles.bound == "latency"
    assert cycles.bandwidth_share == pytest.approx(1024 / (4.8e12 / 1.98e9 / 132) / 250)


def test_every_shape_of_table_1_has_a_prediction():
    rows = gpu_cost.predictions()
    assert len(rows) == 4 * 3
    assert all(0 < row["bandwidth_share"] <= 1 for row in rows)
    for bits in (None, 8, 4):
        name = f"int{bits} 1024x4096 few" if bits else "bfloat16 forward 1024x4096 few"
        [row] = (row for row in rows if row["product"] == name)
        share = gpu_cost.predicted_share(256, 1024, 4096, 32, bits)
        assert share == row["bandwidth_share"]
    # No case is compiled with the tile that 256 rows an expert have.
    assert gpu_cost.predicted_share(8192, 1024, 4096, 32, 8) is None


def test_cycles_of_a_tile_by_hand():
    # Two warpgroups, 256 rows, 1,024 channels: 16 runs of 4 HGMMA, 512 cycles each.
    case = Case("grouped_matmul", 8192, 1024, 4096, 32)
    row = {
        "loop_instructions": 54, "loop_latency": 512, "loop_hgmma": 4,
        "epilogue_instructions": 400, "epilogue_latency": 700,
    }  # fmt: skip
    cycles = gpu_cost.tile_cycles(row, case)
    assert (cycles.products, cycles.epilogue) == (16 * 2 * 512, 800)
    # Rows and 128 features are 786,432 bytes, of 6.65e12 a second for 132 SMs of 1.98e9 cycles;
    # with tiles of half of the rows the features are copied twice.
    bytes_per_cycle = 6.65e12 / 1.98e9 / 132
    assert cycles.total == cycles.l2 == pytest.approx(786_432 / bytes_per_cycle)
    assert cycles.ping_pong == pytest.approx(1_048_576 / bytes_per_cycle)
    # As many bytes in the time of products and epilogue.
    assert cycles.even_l2_bytes_per_s == pytest.approx(1_048_576 * 132 * 1.98e9 / 17_184)


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


def test_ping_pong_pays_for_no_product_with_many_rows():
    rows = gpu_cost.tiles()
    assert len(rows) == 4 * 3 + 3
    for row in rows:
        assert row["ping_pong"] > row["total"], row["product"]


def test_few_active_experts_occupy_the_chip():
    found = {(row["product"], row["active"]): row for row in gpu_cost.occupancies()}
    assert len(found) == 4 * 3 * 5
    for weights, matrix in itertools.product(
        ("bfloat16", "int8", "int4"), ("1024x4096", "4096x1024")
    ):
        for active in (1, 2, 4, 8, 32):
            row = found[f"{weights} {matrix}", active]
            assert row["busy_sms"] == 128
            assert row["steps"] <= row["whole_steps"]
    # One expert's 8 tiles of 32 steps are 128 of 2; each has a store, which counts as a step.
    row = found["bfloat16 4096x1024", 1]
    assert (row["parts"], row["whole_busy_sms"]) == (16, 8)
    assert (row["steps"], row["whole_steps"]) == (3, 33)


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


def test_unknown_gpu_is_refused():
    with pytest.raises(ValueError, match="target='b200' is not one of h200"):
        gpu_compiler.COMPILER.compile("b200", [])


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


def test_unknown_back_end_raises():
    with pytest.raises(ValueError, match="back_end='rocm' is not one of tpu, gpu"):
        install.requirements("rocm")


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
