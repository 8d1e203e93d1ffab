# SPDX-License-Identifier: Apache-2.0
"""How gin files and bindings become a job: order, types, names that nothing reads."""

import pathlib
import subprocess
import sys

import pytest

from switchx.cli.config import building
from switchx.training.job import TrainingJob
from tests.integration.runs import SMALL
from tests.processes import ROOT
from tests.test_configs import RUNS, required_macros

BASE = ("FILES=a.txt",)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    building.gin.clear_config()


def job_of(*bindings: str, files=(str(SMALL),), search_paths=()) -> TrainingJob:
    building.parse_files(files, [*BASE, *bindings], search_paths)
    return building.build("JOB", TrainingJob)


def refusal(*bindings: str, **options) -> str:
    with pytest.raises(building.ConfigurationError) as error:
        job_of(*bindings, **options)
        building.require_effect("JOB", [*BASE, *bindings])
    return str(error.value)


def my_gin(text: str) -> tuple[str, str]:
    """The small run, and a file of this text on top of it."""
    pathlib.Path("my.gin").write_text(text)
    return str(SMALL), "my.gin"


def test_bindings_win_over_files_and_later_ones_over_earlier_ones():
    files = my_gin("TRAIN_STEPS = 5\nBATCH_SIZE = 5\n")
    job = job_of("BATCH_SIZE=6", "BATCH_SIZE=7", files=files)
    assert (job.train_steps, job.batch_size) == (5, 7)
    assert job_of(files=files[::-1]).train_steps == 12


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("some/where", "some/where"),
        ("'quo ted'", "quo ted"),
        ("a=b", "a=b"),
        ("two words", "two words"),
        ("c:\\x", "c:\\x"),
        ("3", "3"),
    ],
)
def test_text_needs_no_quotes(value, text):
    """But what reads as a Python literal is one: a folder called 3 does need them."""
    value = "'3'" if value == "3" else value
    assert job_of(f"DATA_DIR={value}").data_dir == text


def test_parameter_may_be_named_in_short_and_in_full():
    names = ("RouterConfig", "config.RouterConfig", "switchx.models.config.RouterConfig")
    for name in names:
        assert job_of(f"{name}.jitter=0.5").model.switch.router.jitter == 0.5


def test_folder_called_as_a_configs_folder_is_not_in_the_way(tmp_path):
    """Gin would take `runs/` for a Python package: it lies where `python -m` looks first."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "models").mkdir()
    code = (
        "from switchx.cli import gin_edge\n"
        "gin_edge.parse_files(['configs/runs/pretrain_tiny.gin'], [])\n"
        "print('parsed')"
    )
    process = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT)!r})\n{code}"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert process.stdout == "parsed\n", process.stderr


def test_search_paths_come_before_our_configs(tmp_path):
    (tmp_path / "mine/models").mkdir(parents=True)
    ours = (ROOT / "configs/models/switch_tiny.gin").read_text()
    mine = tmp_path / "mine/models/switch_tiny.gin"
    mine.write_text(ours.replace("NUM_EXPERTS = 8", "NUM_EXPERTS = 3"))
    assert job_of(search_paths=["mine"]).model.switch.num_experts == 3
    assert job_of().model.switch.num_experts == 8


@pytest.mark.parametrize(
    ("bindings", "said"),
    [
        (["BATCH_SIZE=eight"], "TrainingJob.batch_size='eight' is of type str; expected int"),
        (["BATCH_SIZE=8.0"], "TrainingJob.batch_size=8.0 is of type float; expected int"),
        (["TRAIN_STEPS=True"], "TrainingJob.train_steps=True is of type bool; expected int"),
        (
            ["TRAIN_STEPS=None"],
            "TrainingJob.train_steps=None is of type NoneType; expected int",
        ),
        (["BATCH_SIZE=(3"], "TrainingJob.batch_size='(3' is of type str; expected int"),
        (["MODEL=3"], "TrainingJob.model=3 is of type int; expected ModelConfig"),
        (
            ["LEARNING_RATE=fast"],
            "InverseSquareRoot.base='fast' is of type str; expected float",
        ),
        (
            ["TrainingJob.retention=3"],
            "TrainingJob.retention=3 is of type int; expected Retention",
        ),
        (
            ["Task.objective=@SpanCorruption"],
            "TrainingJob.source.objective is the class SpanCorruption itself; expected "
            "SpanCorruption | PrefixLM | CausalLM | InputsToTargets: write @SpanCorruption() "
            "with parentheses to build one",
        ),
        (["JOB=3"], "JOB is a int; expected a TrainingJob"),
    ],
)
def test_wrong_type_is_told_with_its_field(bindings, said):
    assert refusal(*bindings) == said


@pytest.mark.parametrize(
    ("binding", "said"),
    [
        (
            "FILES=",
            "--gin.FILES= has no value; write --gin.FILES=VALUE (is a shell variable not set?)",
        ),
        (
            "BATCH-SIZE=3",
            "--gin.BATCH-SIZE=3: 'BATCH-SIZE' is no name of a macro or a parameter (did you "
            "mean BATCH_SIZE?); write --gin.MACRO=VALUE or --gin.CLASS.PARAMETER=VALUE",
        ),
    ],
)
def test_binding_that_is_none_is_refused(binding, said):
    assert refusal(binding) == said


def test_macro_that_no_file_defines_is_refused():
    said = refusal("TRAIN_STEP=3")
    assert said.startswith(
        "--gin.TRAIN_STEP: no gin file defines a macro TRAIN_STEP (did you mean TRAIN_STEPS?); "
        "there are BATCH_SIZE, CHECKPOINT_EVERY, "
    )


def test_binding_that_nothing_reads_is_refused():
    files = my_gin("WARMUP = 3\n")
    assert refusal("WARMUP=4", files=files) == (
        "--gin.WARMUP has no effect: nothing in this configuration reads WARMUP (did you mean "
        "WARMUP_STEPS?); leave it out, or add the gin file that reads it"
    )
    files = (str(SMALL), "optimizers/adamw.gin")
    assert refusal("Adafactor.decay_rate=0.7", files=files) == (
        "--gin.Adafactor.decay_rate has no effect: this configuration builds no Adafactor; "
        "leave it out, or add the gin file that does"
    )


def test_misspelt_macro_in_a_file_is_refused():
    assert refusal(files=my_gin("TRAIN_STEP = 3\n")) == (
        "a gin file sets TRAIN_STEP, which nothing reads (did you mean TRAIN_STEPS?); rename "
        "it, or take it out"
    )


@pytest.mark.parametrize("name", RUNS)
def test_shipped_run_sets_nothing_that_is_taken_for_misspelt(name, monkeypatch):
    """Macros that stay unread when a run takes another part are no mistakes."""
    from switchx.data.tokenizers import ByteVocabulary
    from switchx.data.vocabularies import save_vocabulary

    save_vocabulary(ByteVocabulary(), pathlib.Path("."))
    values = {"FILES": ".", "INIT_FROM": ".", "VOCABULARY_FILE": "t5.model"}
    for part in ("tasks/text_span_corruption.gin", "optimizers/adamw.gin"):
        required = required_macros(name) | required_macros(part)
        bindings = [f"{macro}={values[macro]}" for macro in values if macro in required]
        building.parse_files([name, part], bindings)
        building.build("JOB", TrainingJob)
        building.require_effect("JOB", [])


def test_parameter_that_files_set_in_scopes_is_asked_for_by_scope():
    files = my_gin("SOURCE/TextFiles.max_characters = 10\n")
    assert refusal("TextFiles.max_characters=20", files=files) == (
        "--gin.TextFiles.max_characters would not change what the gin files set in scopes; "
        "write --gin.SOURCE/TextFiles.max_characters"
    )
    job = job_of("SOURCE/TextFiles.max_characters=20", files=files)
    assert job.source.corpus.max_characters == 20


def test_operative_config_builds_the_same_job_and_takes_bindings():
    job = job_of("RouterConfig.jitter=0.5", "DATA_DIR=x y")
    pathlib.Path("operative.gin").write_text(building.operative_config("JOB"))
    building.parse_files(["operative.gin"], [])
    assert building.build("JOB", TrainingJob) == job
    building.parse_files(["operative.gin"], ["RouterConfig.jitter=0.25", "BATCH_SIZE=4"])
    changed = building.build("JOB", TrainingJob)
    assert (changed.model.switch.router.jitter, changed.batch_size) == (0.25, 4)


def test_files_without_a_job_say_how_a_run_file_ends():
    building.parse_files(["models/switch_tiny.gin"], [])
    with pytest.raises(building.ConfigurationError) as error:
        building.build("JOB", TrainingJob)
    assert str(error.value) == (
        "the gin files define no macro JOB; a run file ends in `JOB = @job.TrainingJob()`; "
        "give one from configs/runs"
    )
