# SPDX-License-Identifier: Apache-2.0
"""experiments/magic_numbers: ways to convert, machine code as it is read, and the rule."""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.magic_numbers import conversions, count
from experiments.magic_numbers.conversions import COMPILER, IN_16_BITS, IN_32_BITS
from experiments.magic_numbers.run import comparison, verdict
from experiments.pages import ROOT
from pallas_kernels.aot.case import Case

EVERY = np.arange(-128, 128, dtype=np.int8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_way_is_exact(dtype):
    dtype = jnp.dtype(dtype)
    for way in conversions.of_type(dtype.name):
        convert = conversions.BY_NAME[way]
        for integers, native in ((EVERY, jnp.int8), (EVERY[120:136], jnp.int4)):
            found = convert(jnp.array(integers).astype(native), dtype)
            np.testing.assert_array_equal(np.asarray(found), integers.astype(dtype), way)
        low, high = conversions.halves(jnp.arange(256, dtype=jnp.uint8), dtype, name=way)
        for got, nibble in ((low, np.arange(256) & 15), (high, np.arange(256) >> 4)):
            want = np.where(nibble < 8, nibble, nibble - 16).astype(dtype)
            np.testing.assert_array_equal(np.asarray(got), want, way)


# A loop of two instructions within one of six, as nvdisasm writes them: stalls 3 and 5.
NVDISASM = """
.L_x_0:
        /*0000*/     I2F.F16 R1, R2 ;      /* 0x0000000000000001 */
                                           /* 0x000fe20000000000 */
.L_x_1:
        /*0010*/     HMMA.16816.F32 R8, R12.reuse, R4, R8 ;  /* 0x0000000000000002 */
                                           /* 0x000fe60000000000 */
        /*0020*/     @P0 BRA `(.L_x_1) ;   /* 0x0000000000000003 */
                                           /* 0x000fea0000000000 */
        /*0030*/     @P1 BRA `(.L_x_0) ;   /* 0x0000000000000004 */
                                           /* 0x000fea0000000000 */
"""
MOSAIC = """
.L_x_1:
   -:-:1:Y:07        /*0010*/      HGMMA.64x16x16.F32.BF16 R24, R32, gdesc[UR16]
   -:-:1:Y:01        /*0020*/      I2F.S8 R1, R0
   1:-:-:Y:05        /*0030*/      @P1 BRA `(.L_x_1)
   -:-:-:Y:05        /*0040*/      @P1 BRA `(.L_x_2)
.L_x_2:
"""


def test_loops_are_read_as_both_tools_write_them():
    inner = count.loop_of_nvdisasm(NVDISASM)
    assert [stall for stall, _ in inner] == [3, 5] and "HMMA" in inner[0][1]
    assert count.products_of(inner) == 16 * 8 * 16
    found = count.loop_of_mosaic(MOSAIC)
    assert [stall for stall, _ in found] == [7, 1, 5]
    # 64 x 16 x 16, of four warps.
    assert count.products_of(found) == 64 * 16 * 16 // 4
    with pytest.raises(ValueError, match="a loop with products"):
        count.loop_of_mosaic(MOSAIC.replace("HGMMA", "FADD"))


def test_a_loop_is_counted_for_128_channels():
    case = Case("quantized_grouped_matmul", 256, 4096, 1024, 32, bits=8)
    # Tiles of 16 rows by 64 features, four warps: 2,048 products of each are 8 channels.
    body = [(3, "HMMA.16816.F32 R8"), (4, "I2F.S8 R1")]
    found = count.per_channels(case, "triton", body)
    assert found == {"instructions": 32, "stalls": 112, "conversions": 16, "cycles": 112}


def programs(few: dict[str, float], many: dict[str, float], dtype="float16", bits=8) -> list:
    return [
        {"bits": bits, "dtype": dtype, "rows": rows, "conversion": way, "cycles": cycles,
         "conversions": 0}
        for rows, costs in ((8, few), (256, many))
        for way, cycles in costs.items()
    ]  # fmt: skip


def test_magic_numbers_have_to_cost_less_with_few_rows_and_with_many():
    own = {COMPILER: 100, IN_16_BITS: 80, IN_32_BITS: 90}
    [row] = comparison("a chip", programs(own, own))
    assert row["costs less"] == row["magic is"] == IN_16_BITS
    assert (row["few: compiler's"], row["many: magic"]) == (100, 80)
    [other] = comparison(
        "a chip", programs(own, {COMPILER: 80, IN_16_BITS: 80, IN_32_BITS: 85})
    )
    assert other["costs less"] == COMPILER
    bfloat16 = comparison("a chip", programs(own, own, dtype="bfloat16", bits=4))
    found = verdict([row, *bfloat16])
    assert "in 1 of 1 products" in found["because"] and "int4 to bfloat16" in found["because"]
    assert found["effect"].low == pytest.approx(1.25)
    assert "in 1 of 2 products" in verdict([row, other])["because"]


def test_kernels_convert_as_the_counts_say():
    file = ROOT / "experiments/magic_numbers/results.json"
    tables = json.loads(file.read_text(encoding="utf-8"))["tables"]
    for row in (row for table in tables for row in table["rows"]):
        chip, _, compiler = row["chip"].partition(", ")
        uses_magic = row["costs less"] != COMPILER
        if not compiler:
            assert not uses_magic, row  # TPU kernels call `astype`
            continue
        back_end = {"Mosaic": "gpu", "Triton": "triton"}[compiler]
        kernel = importlib.import_module(f"pallas_kernels.quantized_grouped_matmul.{back_end}")
        is_int4, dtype = row["weights"] == "int4", jnp.dtype(row["rows are"])
        convert = kernel._halves if is_int4 and back_end == "triton" else kernel._converted
        stored = {"gpu": jnp.int4, "triton": jnp.uint8}[back_end] if is_int4 else jnp.int8
        # Hopper's kernel converts so what is in native order.
        native = (False, None) if back_end == "gpu" else ()
        traced = jax.make_jaxpr(lambda q, of=convert, to=(dtype, *native): of(q, *to))(
            jax.ShapeDtypeStruct((8, 8), stored)
        )
        assert ("bitcast_convert_type" in str(traced)) == uses_magic, row


def test_a_missing_compiler_is_named(tmp_path, monkeypatch):
    for name, variable in (("v5e", "SWITCHX_AOT_TPU"), ("A100, Triton", "SWITCHX_AOT_GPU")):
        monkeypatch.setenv(variable, str(tmp_path))
        with pytest.raises(ValueError, match=f"{name}: no .* in .*{variable}"):
            count.counts(name)
