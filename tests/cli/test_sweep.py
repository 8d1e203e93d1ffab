# SPDX-License-Identifier: Apache-2.0
"""`switchx sweep`: cells are trained once, go on, fail alone; the optimum has its place."""

import json
import math
import os
import pathlib
import shutil
import signal
import time

import pytest

from switchx import sweep as sweeps
from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.main import main
from tests.integration.runs import SMALL, lines, numbers, write_corpus

WORDS = ["sweep", f"--gin_file={SMALL}"]
RATES = "--gin.LEARNING_RATE=0.01,0.1"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.1,0.3", ["0.1", "0.3"]),
        ("(1, 2), [3,4]", ["(1, 2)", "[3,4]"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ('"it\'s, so"', ['"it\'s, so"']),
        ("@x.Y(),None", ["@x.Y()", "None"]),
        ("1,", ["1", ""]),
    ],
)
def test_values_are_split_outside_of_brackets_and_quotes(text, values):
    assert sweeps.split_values(text) == values


def optimum(losses: dict[tuple[str, ...], list[float]], num_seeds=1):
    sweep = sweeps.Sweep(None, [], [], {"A": [], "B": []}, num_seeds)
    rows = [
        {"values": {"A": a, "B": b}, "losses": dict(enumerate(values)), "low": 0, "high": 0}
        | {"mean": sum(values) / max(len(values), 1)}
        for (a, b), values in losses.items()
    ]
    found = sweeps.optimum_of(sweep, rows)
    return found, sweeps.sentence_of(found)


def test_an_optimum_is_interior_where_both_neighbours_are_worse():
    bowl = {(a, "x"): [abs(float(a) - 0.3)] for a in ("0.1", "3e-1", "1")}
    found, said = optimum(bowl)
    assert found["values"] == {"A": "3e-1", "B": "x"}
    assert found["places"] == {"A": "interior", "B": "unordered"}
    assert said.endswith("; inside the grid in A; without an order in B.")
    # One that diverged is worse; one that is not finished or differs elsewhere says nothing.
    for other, place in (([], "edge"), ([float("nan")], "interior"), ([math.inf], "interior")):
        assert optimum(bowl | {("1", "x"): other})[0]["places"]["A"] == place
    assert optimum({("1", "x"): [float("nan")]})[0] is None
    elsewhere = {k: v for k, v in bowl.items() if k[0] != "1"} | {("1", "y"): [0.7]}
    assert "try values beyond it, in A" in optimum(elsewhere)[1]
    assert optimum({("1", "x"): []}) == (None, sweeps.sentence_of(None))
    few = {("1", "x"): [1.0, 2.0], ("2", "x"): [0.1]}  # a seed is missing
    assert optimum(few, num_seeds=2)[0]["values"]["A"] == "1"


def run(capsys, *words) -> tuple[int, str, str]:
    words = [*WORDS, "--gin.TRAIN_STEPS=4", *words, "--output=s"]
    return main(words), *capsys.readouterr()


def test_axes_in_another_order_name_the_same_cells(in_a_folder):
    write_corpus(in_a_folder)
    files = [str(SMALL)]
    given = ["FILES=corpus.txt", "NUM_EXPERTS=4,8", "LEARNING_RATE=1,3"]
    names = []
    for bindings in (given, [given[0], given[2], given[1]]):
        swept = sweeps.parse_sweep("s", files, bindings, num_seeds=2)
        names.append({cell.name for cell in sweeps.cells_of(swept)})
        pathlib.Path("s").mkdir(exist_ok=True)
        pathlib.Path("s/sweep.json").write_text(json.dumps(swept.common))
    assert names[0] == names[1] and len(names[0]) == 8
    assert "NUM_EXPERTS=4,LEARNING_RATE=1,seed=0" in names[0]
    # A file system's names are short.
    values = [f"('corpus.txt', '{'x' * 300}{each}')" for each in "ab"]
    swept = sweeps.parse_sweep("new", files, [f"FILES={','.join(values)}"])
    (one, other) = (cell.log.name for cell in sweeps.cells_of(swept))
    assert one != other and max(len(one), len(other)) <= 255


def test_a_cell_that_diverged_is_worse_than_others_and_not_trained_again(
    in_a_folder, one_device, steps_traced_once, capsys
):
    write_corpus(in_a_folder)
    words = ["--gin.FILES=corpus.txt", "--gin.LEARNING_RATE=0.01,0.1,1e38", "--json"]
    words.append("--gin.job.TrainingJob.max_skipped_in_a_row=2")
    for done in (0, 3):
        status, out, err = run(capsys, *words)
        assert status == 0 and f"3 cells, {done} of them done before" in err
        found = json.loads(out)
        *_, last = found["results"]
        assert (last["losses"], last["mean"], found["failed"]) == ({"0": None}, None, {})
        if not done:
            assert "LEARNING_RATE=1e38,seed=0: validation loss nan (it diverged: s/logs/" in err
    better = min(found["results"][:2], key=lambda row: row["mean"])
    where = "interior" if better is found["results"][1] else "edge"
    assert found["optimum"]["places"] == {"LEARNING_RATE": where}


def test_cells_are_trained_once_and_go_on(in_a_folder, one_device, steps_traced_once, capsys):
    """Files differ, so that cells share their programs."""
    text = write_corpus(in_a_folder).read_text()
    (in_a_folder / "other.txt").write_text(text[: len(text) // 2])
    files, every = "--gin.FILES=corpus.txt,other.txt", ["--gin.CHECKPOINT_EVERY=2"]
    every += [f"--gin.RoutingAlarms.{n}" for n in ("first_lines=1", "lines_in_a_row=1")]
    every.append("--gin.RoutingAlarms.least_information=9.0")  # an alarm of each line
    status, out, err = run(capsys, files, *every, "--json")
    assert status == 0, err
    found = json.loads(out)
    cells = [in_a_folder / f"s/FILES={name}.txt,seed=0" for name in ("corpus", "other")]
    losses = [-lines(cell / "validation.jsonl")[-1]["neg_log_perplexity"] for cell in cells]
    assert [row["losses"]["0"] for row in found["results"]] == losses
    assert err.count("alarm: encoder 0: a token tells") == 2
    assert all(lines(cell / "alarms.jsonl")[0]["kind"] == "information" for cell in cells)
    # Losses of other files do not compare.
    assert losses[0] != losses[1] and found["optimum"] is None
    # One as it is when it is killed after its second step, and one that is done.
    before = [numbers(cell / "metrics.jsonl") for cell in cells]
    stamp = (cells[0] / "metrics.jsonl").stat().st_mtime_ns
    shutil.rmtree(cells[1] / "checkpoints/4")
    # A value is added, whose cell fails.
    status, out, err = run(capsys, f"{files},none.txt", *every, "--json")
    assert status == 1 and "3 cells, 1 of them done before" in err
    assert json.loads(out)["results"][:2] == found["results"]
    assert [numbers(cell / "metrics.jsonl") for cell in cells] == before
    assert (cells[0] / "metrics.jsonl").stat().st_mtime_ns == stamp
    (failed,) = json.loads(out)["failed"]
    assert f"{failed}: failed: switchx train: error: " in err and "none.txt" in failed
    (paragraph,) = (in_a_folder / f"s/logs/{failed}.log").read_text().splitlines()
    assert paragraph.startswith("switchx train: error: ")
    assert run(capsys, f"{files},none.txt", *every, "--traceback")[1].endswith(
        "\nValidation sets differ (files, objective, vocabulary), so losses do not compare.\n"
    )
    assert "Traceback" in (in_a_folder / f"s/logs/{failed}.log").read_text()
    # One that another process trains is left to it.
    shutil.rmtree(cells[1] / "checkpoints/4")
    stamp, log = (cells[1] / "metrics.jsonl").stat().st_mtime_ns, in_a_folder / "s/logs"
    (log := log / f"{cells[1].name}.log").write_text("its own line\n")
    for workers in (1, 2):
        with RunFolder(cells[1]).locked():
            status, out, err = run(capsys, files, *every, "--json", f"--workers={workers}")
        (why,) = json.loads(out)["failed"].values()
        assert status == 1 and f"is being trained by process {os.getpid()} on" in why
        assert "failed: model_dir=" in err and log.read_text() == "its own line\n"
        assert (cells[1] / "metrics.jsonl").stat().st_mtime_ns == stamp
    for words, said in (
        ((files,), "'bindings'"),
        (("--gin.NUM_EXPERTS=2,4", *every), "'axes'"),
    ):
        status, out, err = run(capsys, *words)
        assert (status, out) == (2, "") and f"the folder of another sweep, with {{{said}" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing is swept over: give a name several values"),
        (["--gin.LEARNING_RAT=1,2"], "(did you mean LEARNING_RATE?)"),
        (["--gin.LEARNING_RATE=0.1,,1"], "has an empty value, or one twice"),
        (["--gin.LEARNING_RATE=0.1,1e-1"], "are the same configuration; drop a value"),
        (["--gin.LEARNING_RATE=1", RATES], "--gin.LEARNING_RATE is given twice"),
        (["--gin.SEED=1,2"], "use --seeds=N instead"),
        ([RATES, "--seeds=0"], "is no whole number of at least 1"),
        ([RATES, "--output=gs://bucket/s"], "gs://bucket/s is in a store; give a path on this"),
        ([RATES, "--output=."], "is no folder of a sweep: found corpus.txt; give a new one"),
    ],
)
def test_bad_input_does_nothing(words, said, in_a_folder, capsys):
    write_corpus(in_a_folder)
    status = main([*WORDS, "--gin.FILES=corpus.txt", "--output=s", *words])
    assert status == 2 and said in capsys.readouterr().err
    assert not (in_a_folder / "s").exists()


SAVED = "killed/*/checkpoints/[1-9]*"


@pytest.mark.slow
@pytest.mark.timeout(900)  # four sweeps, one after another
def test_two_at_a_time_are_killed_and_go_on_to_the_same_losses(start_cli, tmp_path):
    write_corpus(tmp_path)
    words = [*WORDS, RATES, "--seeds=2", "--gin.FILES=corpus.txt", "--gin.TRAIN_STEPS=40"]

    def swept(output: str, workers: int):
        return start_cli(*words, f"--output={output}", f"--workers={workers}", "--json")

    whole = swept("whole", 1)
    assert whole.wait(200) == 0
    ends = []
    for kill in (signal.SIGTERM, signal.SIGKILL):
        before, found = {*tmp_path.glob(SAVED)}, set()
        process = swept("killed", 2)
        while not found and process.poll() is None:  # a checkpoint
            found = {*tmp_path.glob(SAVED)} - before
            time.sleep(0.05)
        process.send_signal(kill)
        ends.append((process.wait(60), process.log.read_text().endswith("interrupted\n")))
    assert ends == [(130, True), (-signal.SIGKILL, False)]
    again = swept("killed", 2)
    assert again.wait(200) == 0
    ends = [each.log.read_text().splitlines()[-1] for each in (whole, again)]
    assert json.loads(ends[0]) == json.loads(ends[1])


@pytest.mark.slow
def test_the_end_of_a_sweep_by_sigkill_ends_its_cells(start_cli, tmp_path):
    write_corpus(tmp_path)
    words = [*WORDS, RATES, "--gin.FILES=corpus.txt", "--gin.TRAIN_STEPS=100000"]
    sweep = start_cli(*words, "--output=killed", "--workers=2")
    while len([*tmp_path.glob(SAVED)]) < 2 and sweep.poll() is None:
        time.sleep(0.05)
    cells = [RunFolder(folder) for folder in tmp_path.glob("killed/*,seed=0")]
    pids = [json.loads(cell.lock_file.read_text())["pid"] for cell in cells]
    sweep.kill()
    logs, deadline = [*tmp_path.glob("killed/logs/*")], time.monotonic() + 60
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(pids) == len(logs) == 2
    for log in logs:
        assert "SIGTERM: stopping after this step" in log.read_text()
