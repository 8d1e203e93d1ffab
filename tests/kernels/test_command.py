# SPDX-License-Identifier: Apache-2.0
"""`python -m pallas_kernels`: what it prints, and what it refuses."""

import json

import pytest

from pallas_kernels import __main__ as command
from pallas_kernels.bench import kernels, tune


def test_rows_and_checks_are_printed(monkeypatch, capsys):
    row, check = (
        {"matrix": "64x128", "us": 12.3456},
        {"name": "error", "value": 0.0, "bound": "<=1"},
    )

    def bench(rounds, note):
        assert rounds == 3
        note("measuring")
        return [row], [check]

    monkeypatch.setattr(kernels, "run", bench)
    assert command.main(["bench", "--rounds=3", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"command": "bench", "results": [row], "checks": [check]}
    assert err == "measuring\n"
    assert command.main(["bench", "--rounds=3"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "matrix=64x128  us=12.35"


def test_it_says_where_tilings_are_written(monkeypatch, capsys, tilings_file):
    monkeypatch.setattr(tune, "run", lambda rounds, note: [{"rounds": rounds}])
    assert command.main(["tune"]) == 0
    out, err = capsys.readouterr()
    assert out == "rounds=7\n" and err == f"written to {tilings_file}\n"


def test_no_rounds_are_refused(capsys):
    for rounds in ("0", "many"):
        with pytest.raises(SystemExit, match="2"):
            command.main(["tune", f"--rounds={rounds}"])
        assert f"{rounds} is no number of turns; use 1 or more" in capsys.readouterr().err
