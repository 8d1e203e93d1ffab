# SPDX-License-Identifier: Apache-2.0
"""`switchx tune kernels`, of one small product."""

import json

import pytest

from pallas_kernels.bench import products, tune
from pallas_kernels.bench.cells import Cell
from pallas_kernels.tiling.tuned import read
from switchx.cli.main import main


@pytest.fixture
def file(monkeypatch, tmp_path):
    path = tmp_path / "folder" / "tilings.json"
    monkeypatch.setenv("SWITCHX_KERNEL_TILINGS", str(path))
    monkeypatch.setattr(tune, "cells_to_tune", lambda: [Cell(8, 12, 4, 4, 3)])
    monkeypatch.setitem(products.ROTATED_BYTES, "cpu", 2**11)
    return path


def test_rows_are_printed_and_tilings_written(file, capsys):
    assert main(["tune", "kernels", "--rounds=1", "--json"]) == 0
    output = capsys.readouterr()
    printed = json.loads(output.out.splitlines()[-1])
    assert printed["command"] == "tune kernels"
    assert [row["weights"] for row in printed["results"]] == ["float32", "int8", "int4"]
    assert len(read(file)) == 3
    assert "written to" in output.err


def test_a_damaged_file_is_named_and_kept(file, capsys):
    file.parent.mkdir()
    file.write_text("{")
    assert main(["tune", "kernels", "--rounds=1"]) == 2
    assert "holds no tuned tilings" in capsys.readouterr().err
    assert file.read_text() == "{"


def test_nonsense_is_refused(capsys):
    assert main(["tune", "kernels", "--rounds=0"]) == 2
    assert "--rounds=0; use at least 1" in capsys.readouterr().err
    assert main(["tune", "kernel"]) == 2
    assert "kernels" in capsys.readouterr().err
