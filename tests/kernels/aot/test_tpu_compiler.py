# SPDX-License-Identifier: Apache-2.0
"""The way to the compiler and back; `test_tpu_budgets.py` compiles."""

import pytest

from pallas_kernels.aot import tpu_compiler
from pallas_kernels.aot.case import Case

CASE = Case("grouped_matmul", 16, 128, 128, 2)


def test_unknown_target_raises():
    with pytest.raises(ValueError, match="target='v3' is not one of v4, v5e, v5p, v6e, tpu7x"):
        tpu_compiler.compile_cases("v3", [CASE])


def test_absent_compiler_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv(tpu_compiler.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no libtpu in .*run `make test-aot`"):
        tpu_compiler.compile_cases("v5e", [CASE])


def test_compiler_that_dies_is_reported(tmp_path, monkeypatch):
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv(tpu_compiler.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeError, match="ended with status 3 after 0 of 1 cases"):
        tpu_compiler.compile_cases("v5e", [CASE])


def test_compiler_is_on_the_path_of_the_child_alone():
    variables = tpu_compiler.child_variables("notes", ["package", "compiler"])
    assert variables["PYTHONPATH"].startswith("package")
    assert "compiler" in variables["PYTHONPATH"]
    assert variables["JAX_PLATFORMS"] == "cpu"
    assert "--xla_jf_dump_to=notes" in variables["LIBTPU_INIT_ARGS"]


def test_notes_of_the_compiler_are_read(tmp_path):
    # As libtpu writes them: of several programs, several notes each.
    (tmp_path / "1-copy.4-70-schedule-analysis_final_bundles.txt").write_text("else")
    (tmp_path / "1-multiply_rows.1-70-schedule-analysis_final_bundles.txt").write_text(
        "Schedule analysis:\n\ttotal scheduled bundles:    608\n\tempty scheduled bundles: 12\n"
    )
    (tmp_path / "1-multiply_rows.1-68-post-delay-converter.txt").write_text(
        "  #allocation2 [shape = 'u32[72,128]{1,0:T(1,128)}', space=vmem, size = 0x9000, x]\n"
        "  #allocation3 [shape = 'u8[512]{0}', space=smem, size = 0x200, scoped]\n"
        "    #allocation8 [shape = 'u8[65536]{0}', space=vmem, size = 0x10000, scoped]\n"
    )
    assert tpu_compiler.read_dump(tmp_path) == {"bundles": 608, "vmem_bytes": 0x19000}
