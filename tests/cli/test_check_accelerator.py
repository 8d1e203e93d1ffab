# SPDX-License-Identifier: Apache-2.0
"""`switchx check accelerator`: each part at its smallest, budgets, what is kept, refusals."""

import dataclasses
import json
import os
import pathlib
import signal
import stat
from contextlib import nullcontext
from unittest import mock

import pytest

from switchx.bench.accelerator import (
    cards,
    checks,
    command,
    decoding,
    kernel_tests,
    kernels,
    parts,
    profile,
    records,
    training,
)
from switchx.bench.accelerator.parts import Part, Session
from switchx.bench.peers import torch_peer
from switchx.cli.main import main
from switchx.inference.config import DecodingConfig
from switchx.models.config import ModelConfig, SwitchConfig
from tests.absent_devices import compute_cudnn_by_xla

SESSION = Session(is_rehearsal=True, output=pathlib.Path())
HERE = "tests.cli.accelerator_parts"


def part(name: str, seconds: int = 5, **fields) -> Part:
    return Part(name, seconds, "nothing", f"{HERE}:{name}", (), **fields)


@pytest.fixture
def use(monkeypatch):
    """`use(part, ...)` makes these the parts of the command."""

    def replace(*chosen: Part) -> None:
        monkeypatch.setattr(command, "PARTS", chosen)

    return replace


def run(output, **options):
    said = []
    outcome = command.run(output, is_rehearsal=True, note=said.append, **options)
    return outcome, "\n".join(said)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / records.RESULTS).read_text().splitlines()]


def test_what_a_part_measured_is_kept_when_it_hangs_or_dies(tmp_path, use, monkeypatch):
    use(part("measures"), part("hangs"), part("dies"))
    monkeypatch.setattr(command, "limit_of", lambda part, *_: 3.0)
    outcome, said = run(tmp_path / "out")
    assert [row["case"] for row in outcome.rows] == ["one", "two", "before", "before"]
    assert "was ended after 3 s" in outcome.failed["hangs"]
    assert outcome.failed["dies"] == "ended with status 134: an illegal memory access"
    assert "one: 1 us" in said
    statuses = {line["part"]: line["status"] for line in lines(tmp_path / "out")[1:]
                if "status" in line}  # fmt: skip
    assert statuses.keys() == {"measures", "hangs", "dies"} and statuses["measures"] == "done"


def test_a_later_call_goes_on_with_what_was_left(tmp_path, use, monkeypatch):
    use(part("measures", goes_on=True))
    run(tmp_path / "first")
    # As where the machine was lost: half a part, and half a line.
    file = tmp_path / "first" / records.RESULTS
    kept = file.read_text().splitlines()[:2]
    file.write_text("\n".join([*kept, '{"part": "meas']))
    outcome, _ = run(tmp_path / "second", after=tmp_path / "first")
    assert [row["case"] for row in outcome.rows] == ["one", "two"]
    _, said = run(tmp_path / "third", after=tmp_path / "second")
    assert "measures: measured before" in said
    # Other code: all is measured again.
    monkeypatch.setattr(Part, "code", "another")
    outcome, said = run(tmp_path / "fourth", after=tmp_path / "third")
    assert "measured before" not in said and len(outcome.rows) == 2
    assert {row["code"] for row in outcome.rows} == {"another"}


def test_a_full_disk_loses_nothing(tmp_path, use, capsys):
    use(part("measures"))
    (tmp_path / "out").mkdir()
    with mock.patch.object(records.os, "fsync", side_effect=OSError(28, "No space left")):
        words = [f"--output={tmp_path / 'out'}", "--rehearsal", "--json"]
        assert main(["check", "accelerator", *words]) == 1
    said = capsys.readouterr()
    assert "results.jsonl: cannot be written ([Errno 28] No space left)" in said.err
    rows = json.loads(said.out.splitlines()[-1])["results"]
    assert [row["case"] for row in rows] == ["one", "two"]


def test_what_ends_the_command_ends_the_part(tmp_path, use):
    use(part("ends_its_parent"))
    begun, real = [], command.subprocess.Popen

    def begin(*words, **options):
        begun.append(real(*words, **options))
        return begun[-1]

    with (
        mock.patch.object(command.subprocess, "Popen", begin),
        pytest.raises(SystemExit, match="143"),
    ):
        run(tmp_path / "out")
    assert [each.returncode for each in begun] == [-signal.SIGKILL]


def test_a_part_has_what_earlier_ones_left_over():
    first, second, long = part("one", 10), part("two", 30), part("three", 480)
    limit = command.limit_of
    assert limit(first, [second, long], 100.0, False) == 70.0
    assert limit(second, [long], 25.0, False) is None
    assert limit(long, [], 490.0, False) == 490.0
    assert limit(first, [long], 3.0, True) == 3.0


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """`nvidia_smi(line)` puts a program on the path that says the line."""

    def make(line: str, status: int = 0) -> None:
        file = tmp_path / "bin" / "nvidia-smi"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\necho '{line}'\nexit {status}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")

    return make


H200 = "NVIDIA H200, 580.95.05, 9.0"
OTHER_CARD = '{"card": "NVIDIA H100", "driver": "580", "date": "2026-11-26"}\n'


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        (None, 0, "no accelerator here: there is no nvidia-smi; run with --rehearsal"),
        ("No devices were found", 6, "nvidia-smi says 'No devices were found'"),
        ("Tesla V100-SXM2-16GB, 580.95.05, 7.0", 0, "capability 7.0; the kernels need 8.0"),
        ("NVIDIA H200, 580.95.05, [N/A]", 0, "names no card, driver and capability: 'NVIDIA"),
        ("NVIDIA H200, 535.183.06, 9.0", 0, "JAX here brings CUDA 13, which needs 580"),
    ],
)
def test_what_is_no_card_for_it(nvidia_smi, monkeypatch, tmp_path, cli, line, status, message):
    monkeypatch.setenv("PATH", "/nowhere")
    if line is not None:
        nvidia_smi(line, status)
        monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}/bin")
    monkeypatch.setattr(cards, "toolkit", lambda: 13)
    assert message in cli.refused("check", "accelerator", f"--output={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds=10"], "--seconds=10: the first part, card, takes 20"),
        (["--only=card,ladders"], "--only=ladders: no such part; use card, profile"),
        (
            ["--only=ladder"],
            "--only=ladder and --ladder=FILE of `python -m experiments.card` go",
        ),
        (["--only=ladder", "--ladder=x"], "--ladder=x is no file that `python -m exper"),
        (["--output=full"], "--output=full has something in it"),
        (["--after=nowhere"], "--after=nowhere: nowhere/results.jsonl cannot be read"),
        (["--after=other"], "was measured on NVIDIA H100, this is rehearsal; cards are never"),
        (["--after=damaged"], "cannot be read (a line has no measured, unit)"),
        (["--sample"], "--sample with accelerator"),
    ],
)
def test_bad_input_is_named(tmp_path, monkeypatch, cli, words, message):
    monkeypatch.chdir(tmp_path)
    damaged = f'{OTHER_CARD}{{"part": "card", "code": "0", "case": "copy"}}\n'
    texts = {"full": "{}\n{}\n", "other": OTHER_CARD, "damaged": damaged}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / records.RESULTS).write_text(text)
    words = ["check", "accelerator", "--rehearsal", "--output=out", *words]
    assert message in cli.refused(*words)
    assert not (tmp_path / "out").exists()


# Each part at its smallest, by the functions that the card runs.


def named(name: str) -> kernels.TimedProduct:
    [found] = [each for each in kernels.table(SESSION) if each.case.startswith(name)]
    return found


def test_a_variant_is_the_product():
    found = list(kernels.timed(SESSION, [named("int8 native order, 512x128"), named("dense")]))
    assert [row["case"] for row in found] == [
        "int8 native order, 512x128, rows 4",
        "dense bfloat16, 512x128, rows 32",
    ]
    assert all(0 < row["error"] < 5e-3 and row["measured"] > 0 for row in found)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("tests/a.py::b FAILED [ 50%]\\ntests/a.py::c PASSED\\nFAILED tests/a.py::b - x", 3),
        ("No module named pytest", 1),
    ],
)
def test_a_test_is_counted_once_and_no_test_is_no_success(monkeypatch, text, rows):
    said = [kernel_tests.sys.executable, "-c", f"print('{text}'); exit(1)"]
    real = kernel_tests.subprocess.Popen
    monkeypatch.setattr(kernel_tests.subprocess, "Popen", lambda _, **how: real(said, **how))
    found = []
    with nullcontext() if rows > 1 else pytest.raises(RuntimeError, match="No module named"):
        found.extend(kernel_tests.first(SESSION))
    assert len(found) == rows


@pytest.mark.slow  # a whole rehearsal has them
def test_tritons_kernels_are_tested_and_timed():
    found = list(kernel_tests.triton(SESSION))
    assert [row["measured"] for row in found if row["unit"] == "test"] == ["passed"] * 4
    times = [row for row in found if row["unit"] == "us"]
    assert [row["case"] for row in times][:2] == [
        "triton bfloat16, 64x32, rows 4", "triton int8, 64x32, rows 4"
    ]  # fmt: skip
    assert all(0 < row["error"] < 5e-3 for row in times)


TINY = ModelConfig("encoder_decoder", 64, 16, 32, 2, 8, 1, 1, activation="relu")
SPARSE = dataclasses.replace(TINY, switch=SwitchConfig(2, every=1, dispatcher="dropless"))


@pytest.mark.slow  # a whole rehearsal has it
def test_a_training_step_is_timed(monkeypatch):
    monkeypatch.setattr(torch_peer, "is_available", lambda: False)
    shapes = training.Shapes(2, 8, 4)
    step = training.compiled("2 experts", SPARSE, shapes.batch(SPARSE))
    [found] = training._against(SESSION, shapes, step, [step])
    assert found["measured"] > 0 and found["vs_dense"] > 0 and found["peak_gib"] > 0
    [row] = training.against_torch(SESSION, shapes, step)
    assert row["measured"] is None and row["why"] == "no torch and transformers here"
    compute_cudnn_by_xla(monkeypatch)
    dense = training.compiled("dense", TINY, shapes.batch(TINY))
    on_card = Session(False, pathlib.Path())
    timed, losses = training.by_cudnn(on_card, shapes, dense)
    assert timed["vs_dense"] > 0 and losses["measured"] < 1e-4


@pytest.mark.slow  # a whole rehearsal has it
def test_decoding_with_options_of_the_compiler(monkeypatch):
    monkeypatch.setattr(decoding, "TINY", TINY)
    config, params = decoding.model(SESSION, "int8")
    source_BM = decoding.sources(2, 4, config.vocab_size)
    settings = DecodingConfig(3, eos_id=decoding.NO_END, pruning="none")
    ways, compile_s = {}, {}
    for name, options in list(decoding.OPTIONS.items())[:2]:
        ways[name] = decoding.Decoded(config, params, settings, source_BM, options)
        compile_s["x", name] = ways[name].compiled(ways[name].begun())
    found = list(decoding._rows_of(SESSION, "x", ways, compile_s, None, 3))
    assert [row["texts_differing"] for row in found] == [0, 0]
    assert ways["default"].texts.shape == (2, 1, 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_whole_rehearsal(tmp_path, cli):
    words = ["check", "accelerator", "--rehearsal", f"--output={tmp_path / 'out'}", "--json"]
    printed = cli.json(*words)
    wanted = {part.name for part in command.parts_named(())}  # the ladder is not run unasked
    assert {row["part"] for row in printed["results"]} == wanted
    values = {check["name"]: check["value"] for check in printed["checks"]}
    assert values["kernel_tests_failed"] == values["texts_differing"] == 0
    assert {check["holds"] for check in printed["checks"]} == {None}
    differing = [row for row in printed["results"] if row["unit"].endswith("differing")]
    assert len(differing) == 5 and not any(row["measured"] for row in differing)


# As Nsight Compute writes the page `source` of two kernels, shortened.
SOURCE_PAGE = """"Kernel Name","grouped_matmul_int8",
"Address","Source","# Samples","stall_barrier","stall_long_sb","stall_long_sb (Not Issued)"
"0x7f00","      LDG.E R2, [R4.64] ","1,000","0","1,000","900"
"0x7f10","      BAR.SYNC 0x1 ","3,000","3,000","0","0"
"Kernel Name","grouped_matmul",
"Address","Source","# Samples","stall_barrier","stall_long_sb","stall_long_sb (Not Issued)"
"0x7f00","      HGMMA ","0","0","0","0"
"""


def test_what_the_profiler_says_is_read():
    int8, plain = profile.stalls(SOURCE_PAGE)
    found = {row["case"]: row for row in profile.rows_of_kernel("int8", int8)}
    assert found["int8: barrier"]["measured"] == 0.75
    assert found["int8: long_sb"]["measured"] == 0.25
    assert found["int8: instruction 1"]["text"] == "BAR.SYNC 0x1"
    assert found["int8: instruction 1"]["reason"] == "barrier"
    [row] = profile.rows_of_kernel("bfloat16", plain)
    assert row["why"] == "no samples"
    assert profile.stalls("==ERROR== no permission\n") == []


def test_checks_are_of_the_cards_own_rates():
    def row(part, case, measured, unit="us", **more):
        return {"part": part, "case": case, "measured": measured, "unit": unit} | more

    shape = "1024x4096, rows"
    rows = [row("card", "copy", 4.0, "TB/s")]
    for n in (1, 4, 16):
        rows.append(row("variants", f"bfloat16, {shape} {n}", 80.0, weight_tb_per_s=3.6))
        rows.append(row("variants", f"int8, {shape} {n}", 50.0))
    rows.append(row("variants", f"int4, {shape} 4", None, why="did not compile"))
    rows += [row("variants", f"{way}bfloat16, {shape} 256", us)
             for way, us in (("", 125.0), ("dense ", 100.0))]  # fmt: skip
    rows += [row("kernel_tests", "tests/a", "failed", "test")]
    rows += [row("training", "8 experts, gather", 1e5, vs_dense=0.8)]
    rows += [row("training", "8 experts, dropless", 1e5, vs_dense=0.9)]
    rows += [row("training", "8 experts, AdamW", 1e5, vs_torch=2.5)]
    case = "bfloat16, batch 1, 1 beams, loops in command buffers"
    rows += [row("decoding", case, 9.0, "ms", vs_torch=6.0, texts_differing=1)]
    rows += [row("decoding", "float32, the card and the CPU", 2, "texts differing")]
    assert checks.values_of(rows) == {
        "kernel_tests_failed": 1.0, "texts_differing": 2.0, "bf16_vs_copy": 0.9,
        "bf16_vs_cublas_256": 0.8, "int8_vs_bf16_rows1": 1.6, "int8_vs_bf16_rows4": 1.6,
        "int8_vs_bf16_rows16": 1.6, "switch8_vs_dense_card": 0.9, "switch8_vs_torch_card": 2.5,
        "decode_b1_vs_torch_card": 6.0,
    }  # fmt: skip


def test_predictions_are_of_cases_that_a_card_measures():
    on_card = Session(is_rehearsal=False, output=pathlib.Path())
    cases = {each.case for each in kernels.table(on_card)}
    for by_part in command.PREDICTIONS.values():
        assert by_part.keys() <= {part.name for part in parts.PARTS}
        assert by_part.get("variants", {}).keys() <= cases
    case = "int8, 1024x4096, rows 4"
    assert command.predicted("NVIDIA H200", "variants", case) == 40.5
    assert command.predicted("NVIDIA A100", "variants", case) is None
