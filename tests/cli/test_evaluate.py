# SPDX-License-Identifier: Apache-2.0
"""`switchx eval` on an untrained run: by the folder alone, with other settings, as JSON."""

import json

import pytest

from switchx.checkpoint.checkpointer import Checkpointer
from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.config import building
from switchx.cli.main import main
from switchx.training.job import TrainingJob
from switchx.training.loop import evaluate_job
from switchx.training.program import TrainingProgram
from switchx.training.resume import write_run_config
from tests.integration.runs import SMALL, write_corpus

pytestmark = pytest.mark.usefixtures("programs_compiled_once")


@pytest.fixture(scope="module")
def untrained(tmp_path_factory, session_cache):
    """A run folder with checkpoints at 0 and 5, step 0 the best; and its metrics."""
    base = tmp_path_factory.mktemp("untrained")
    run, files = RunFolder(base / "run").create(), write_corpus(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(session_cache))
        building.parse_files([str(SMALL)], [f"FILES={files}", "TrainingJob.eval_batches=3"])
        job = building.build("JOB", TrainingJob)
        run.operative_config.write_text(building.operative_config("JOB"))
        write_run_config(run, job)
        program = TrainingProgram(job)
        with program.scope(), Checkpointer(run, job.retention) as checkpointer:
            state = program.init_state()
            for step, score in ((0, -1.0), (5, -2.0)):
                checkpointer.save(step, state, metrics={"neg_log_perplexity": score})
            metrics = evaluate_job(job, program, state.params)
        yield run.root, metrics
    building.gin.clear_config()


def evaluated(capsys, *options) -> dict:
    assert main(["eval", "--json", *map(str, options)]) == 0
    captured = capsys.readouterr()
    assert "evaluating" in captured.err
    return json.loads(captured.out)


def test_folder_alone_says_what_to_evaluate(untrained, capsys, monkeypatch, tmp_path):
    folder, metrics = untrained
    monkeypatch.chdir(tmp_path)
    before = sorted(path for path in folder.rglob("*"))
    assert evaluated(capsys, f"--model_dir={folder}") == {"step": 5} | metrics
    assert evaluated(capsys, f"--model_dir={folder}", "--step=best")["step"] == 0
    assert evaluated(capsys, f"--model_dir={folder}", "--step=0") == {"step": 0} | metrics
    assert sorted(path for path in folder.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []


def test_other_data_batch_and_capacity_may_be_evaluated(untrained, capsys):
    folder, metrics = untrained
    options = ["BATCH_SIZE=16", "SwitchConfig.eval_capacity_factor=8.0", "SEED=4"]
    got = evaluated(capsys, f"--model_dir={folder}", *(f"--gin.{each}" for each in options))
    assert got["target_tokens"] > metrics["target_tokens"]
    assert got["dropped_fraction"] == 0.0 < metrics["dropped_fraction"]


def test_gin_files_may_be_given(untrained, capsys):
    folder, metrics = untrained
    files = [f"--gin_file={folder}/operative_config.gin", "--gin_file=meshes/data_expert.gin"]
    got = evaluated(capsys, *files, f"--model_dir={folder}")
    assert got["neg_log_perplexity"] == pytest.approx(metrics["neg_log_perplexity"], rel=1e-5)


def test_table_for_a_person(untrained, capsys):
    folder, metrics = untrained
    assert main(["eval", f"--model_dir={folder}"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["step", "5"]
    assert ["neg_log_perplexity", f"{metrics['neg_log_perplexity']:.4f}"] in lines
    assert ["target_tokens", f"{metrics['target_tokens']:,.0f}"] in lines
    assert lines[-2][:2] == ["encoder", "1"] and len(lines[-2]) == 10


def test_table_of_several_tasks(capsys):
    from switchx.cli.evaluate import _print

    tasks = {"a": {"neg_log_perplexity": -1.0, "accuracy": 0.5, "routing": {}}}
    _print(None, {"step": 1234, "neg_log_perplexity": -1.0, "tasks": tasks})
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["step", "1,234"],
        ["neg_log_perplexity", "-1.0000"],
        ["a:", "neg_log_perplexity", "-1.0000"],
        ["a:", "accuracy", "0.5000"],
    ]
