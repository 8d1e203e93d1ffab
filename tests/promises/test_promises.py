# SPDX-License-Identifier: Apache-2.0
"""Every promise holds: a few cases of some by default, all of them in the slow tests."""

import json
import re

import pytest

from pallas_kernels.aot import tpu_compiler
from tests.processes import ROOT
from tests.promises import planned_bytes
from tests.promises.__main__ import main
from tests.promises.compiled_steps import on_tpu
from tests.promises.promises import PROMISES, WHAT, judged

BRIEF = [each for each in PROMISES if each.brief is not None]
SLOW = [each for each in PROMISES if each.brief is not each.measure]


def assert_holds(rows, bounds) -> None:
    named, checks = judged(rows, bounds)
    failed = [check for check in checks if not check.holds]
    assert not failed, [row for row in named if row["promise"] in {c.name for c in failed}]


@pytest.mark.parametrize("promise", BRIEF, ids=lambda promise: promise.name)
def test_a_few_cases_hold(promise, session_cache):
    assert_holds(promise.brief(), promise.bounds)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("promise", SLOW, ids=lambda promise: promise.name)
def test_all_cases_hold(promise, session_cache):
    assert_holds(promise.measure(), promise.bounds)


@pytest.mark.aot
def test_planned_bytes_hold_on_a_tpu():
    names = (
        "dense fsdp=8, bfloat16",
        "all_to_all fsdp=2 expert=4, float32",
        "1f1b pipe=2 data=2 expert=2, float32",
    )
    rows = list(on_tpu(planned_bytes.__name__, *names))
    if not rows:
        pytest.skip("needs the TPU compiler: python -m pallas_kernels.aot.install tpu")
    (promise,) = (each for each in PROMISES if each.measure is planned_bytes.everywhere)
    assert_holds(rows, promise.bounds)
    kinds = {name: value for name, case, value in rows if case.startswith("dense")}
    assert kinds["compiled reduce-scatter bytes"] > kinds["compiled all-reduce bytes"]


def test_what_is_left_out_is_said(tmp_path, monkeypatch, capsys):
    """A compiler is found by its variable or in its own folder."""
    monkeypatch.setenv(tpu_compiler.FOLDER_VARIABLE, str(tmp_path))
    assert list(on_tpu("x")) == []
    assert "x on v5e:2x4 left out: " in (said := capsys.readouterr().err)
    assert "SWITCHX_AOT_TPU" in said
    monkeypatch.delenv(tpu_compiler.FOLDER_VARIABLE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / tpu_compiler.DEFAULT_FOLDER / "libtpu").mkdir(parents=True)
    assert tpu_compiler.compiler_folder()


def test_the_command_prints_names_values_and_bounds(capsys):
    assert main(["imbalance", "torus", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["name"] for each in printed["checks"]] == [
        "torus_contiguous",
        "imbalance_zipf1",
    ]
    assert all(each["holds"] for each in printed["checks"])
    assert main(["imbalance"]) == 0
    assert "imbalance_zipf1 1.001 <=1.05: holds" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["promises", "storage"])
def test_bounds_of_the_pages_are_those_of_the_promises(name):
    """All promises are on their own page, some in the table of a chapter."""
    bounds = {name: bound for promise in PROMISES for name, bound in promise.bounds.items()}
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`.*\| ([<=>]=) (\S+) \|", page, re.MULTILINE)
    written = {name: sign + number for name, sign, number in rows if name in bounds}
    assert written == (bounds if name == "promises" else {n: bounds[n] for n in written})
    assert len(written) > 1


def test_the_page_has_the_table_of_the_checks(capsys):
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"| `{name}` |" in listed for name in WHAT)
    assert listed in (ROOT / "docs/promises.md").read_text(encoding="utf-8")


def test_a_name_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["imbalence"])
    assert "there is no promise 'imbalence'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bound", "values", "value"),
    [("<=1", [0.5, 2, 1], 2), (">=1", [3, 0, 1], 0), ("==1", [1, 0.5, 1.2], 0.5)],
)
def test_the_farthest_row_decides(bound, values, value):
    _, [check] = judged([("x", "", each) for each in values], {"x": bound})
    assert (check.value, check.holds) == (value, False)
    for place in range(3):  # Python's `max` takes a NaN or not, depending on its position
        rows = [("x", "", float("nan") if n == place else 1.0) for n in range(3)]
        assert not judged(rows, {"x": bound})[1][0].holds


def test_a_check_without_a_row_is_no_success():
    with pytest.raises(ValueError, match="y: nothing was measured"):
        judged([("x", "", 1.0)], {"y": "==1"})
    assert not judged([("x", "", 0.0)], {"x": "<=1.05"})[1][0].holds
