# SPDX-License-Identifier: Apache-2.0
"""How gin files and bindings become a job: order, types, names that nothing reads."""

import collections
import dataclasses
import enum
import importlib
import math
import pathlib
import re
import sys

import numpy as np
import pytest

from switchx.cli.main import main
from switchx.gin_config import building, files
from switchx.gin_config.writing import model_gin, without_scopes
from switchx.models.config import ModelConfig, Precision
from switchx.training.job import TrainingJob
from tests.data.refusals import refused
from tests.gin_files import RUNS, describe_run, required_macros
from tests.integration.runs import SMALL
from tests.interop.folders import SWITCH, T5_1_1
from tests.processes import ROOT

BASE = ("FILES=a.txt",)


pytestmark = pytest.mark.usefixtures("in_a_folder")


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


def test_bindings_win_over_files_by_short_and_full_names():
    files = my_gin("TRAIN_STEPS = 5\nBATCH_SIZE = 5\n")
    job = job_of("BATCH_SIZE=6", "BATCH_SIZE=7", files=files)
    assert (job.train_steps, job.batch_size) == (5, 7)
    assert job_of(files=files[::-1]).train_steps == 12
    names = ("RouterConfig", "config.RouterConfig", "switchx.models.config.RouterConfig")
    for name in names:
        assert job_of(f"{name}.jitter=0.5").model.switch.router.jitter == 0.5


def test_a_later_binding_counts_and_that_is_said(caplog):
    assert job_of("TRAIN_STEPS=7", "TRAIN_STEPS=9", "LEARNING_RATE=0.5").train_steps == 9
    assert caplog.messages == ["--gin.TRAIN_STEPS=7: the later --gin.TRAIN_STEPS=9 counts"]


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


@pytest.mark.parametrize(
    ("value", "is_text"),
    [
        ("(@text_metrics.Accuracy(), @text_metrics.Bleu())", False),
        ("{'a': @tasks.Task()}", False),
        ("(%TEXT_COLUMN,)", False),
        ("50% of it", True),
        ("[%s]", True),
        ("{@x}", True),
        ("me@there", True),
    ],
)
def test_what_a_list_refers_to_needs_no_quotes(value, is_text):
    binding = f"A={value}"
    assert building._quoted(binding) == (f"A={value!r}" if is_text else binding)


def test_folder_called_as_a_configs_folder_is_not_in_the_way(tmp_path, monkeypatch):
    """Gin would take `runs/` for a Python package: it lies where `python -m` looks first."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "models").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    building.parse_files(["configs/runs/pretrain_tiny.gin"], [])


def test_search_paths_come_before_our_configs(tmp_path):
    (tmp_path / "mine/models").mkdir(parents=True)
    ours = (ROOT / "configs/models/switch_tiny.gin").read_text()
    mine = tmp_path / "mine/models/switch_tiny.gin"
    mine.write_text(ours.replace("NUM_EXPERTS = 8", "NUM_EXPERTS = 3"))
    assert job_of(search_paths=["mine"]).model.switch.num_experts == 3
    assert job_of().model.switch.num_experts == 8


@pytest.mark.parametrize(
    ("binding", "said"),
    [
        ("BATCH_SIZE=eight", "TrainingJob.batch_size='eight' is of type str; expected int"),
        ("BATCH_SIZE=8.0", "TrainingJob.batch_size=8.0 is of type float; expected int"),
        ("TRAIN_STEPS=True", "TrainingJob.train_steps=True is of type bool; expected int"),
        ("TRAIN_STEPS=None", "train_steps=None is of type NoneType; expected int"),
        ("BATCH_SIZE=(3", "TrainingJob.batch_size='(3' is of type str; expected int"),
        ("MODEL=3", "TrainingJob.model=3 is of type int; expected ModelConfig"),
        ("LEARNING_RATE=fast", "InverseSquareRoot.base='fast' is of type str; expected float"),
        ("TrainingJob.retention=3", "retention=3 is of type int; expected Retention"),
        ("Task.objective=@SpanCorruption", "objective is the class SpanCorruption itself"),
        ("Task.objective=@SpanCorruption", "write @SpanCorruption() with parentheses"),
        ("JOB=3", "JOB is a int; expected a TrainingJob"),
        ("FILES=", "--gin.FILES= has no value; write --gin.FILES=VALUE"),
        ("BATCH-SIZE=3", "'BATCH-SIZE' is no name of a macro or a parameter (did you mean"),
        ("TRAIN_STEP=3", "no gin file defines a macro TRAIN_STEP (did you mean TRAIN_STEPS?)"),
        ("TRAIN_STEP=3", "there are BATCH_SIZE, BEST_METRIC, "),
    ],
)
def test_wrong_binding_is_told_with_its_name_and_value(binding, said):
    assert said in refusal(binding)


def test_what_nothing_reads_is_refused():
    said = refusal("WARMUP=4", files=my_gin("WARMUP = 3\n"))
    assert "--gin.WARMUP has no effect" in said and "did you mean WARMUP_STEPS?" in said
    files = (str(SMALL), "optimizers/adamw.gin")
    said = refusal("Adafactor.decay_rate=0.7", "WARMUP_STEPS=1", files=files)
    assert "--gin.Adafactor.decay_rate has no effect: this configuration builds no Ad" in said
    # Gin reads a class in the scope of the macro that names it, and JOB's own in none.
    said = refusal("MODL/ModelConfig.dropout_rate=0.5")
    assert "builds no ModelConfig in the scope 'MODL' (did you mean MODEL?)" in said
    assert "write --gin.ModelConfig.dropout_rate, which is for all scopes" in said
    said = refusal("JOB/TrainingJob.train_steps=3")
    assert "builds no TrainingJob in the scope 'JOB'; write --gin.TrainingJob.train_s" in said
    said = refusal(files=my_gin("TRAIN_STEP = 3\n"))
    assert "sets TRAIN_STEP, which nothing reads (did you mean TRAIN_STEPS?)" in said


@pytest.mark.parametrize("name", RUNS)
def test_shipped_run_sets_nothing_that_is_taken_for_misspelt(name):
    """Macros that stay unread when a run takes another part are no mistakes."""
    describe_run(pathlib.Path("."))
    pathlib.Path("de.txt").write_text("ein Tor\n\nein Experte\n")
    values = {"FILES": ".", "FOLDER": ".", "INIT_FROM": ".", "TEACHER": "."}
    values |= {"LANGUAGES": ("de",), "VOCABULARY_FILE": "t5.model"}
    files = [name, "tasks/text_span_corruption.gin", "optimizers/adamw.gin"]
    required = set().union(*map(required_macros, files))
    bindings = [f"{macro}={values[macro]}" for macro in values if macro in required]
    building.parse_files(files, [*bindings, "WARMUP_STEPS=1"])
    building.build("JOB", TrainingJob)
    building.require_effect("JOB", [])


def test_scopes_of_files_and_the_end_of_a_run_file_are_said():
    files = my_gin("SOURCE/TextFiles.max_characters = 10\n")
    said = refusal("TextFiles.max_characters=20", files=files)
    assert "write --gin.SOURCE/TextFiles.max_characters" in said
    job = job_of("SOURCE/TextFiles.max_characters=20", files=files)
    assert job.source.corpus.max_characters == 20
    building.parse_files(["models/switch_tiny.gin"], [])
    with pytest.raises(building.ConfigurationError, match=r"JOB = @job.TrainingJob\(\)"):
        building.build("JOB", TrainingJob)


def test_operative_config_builds_the_same_job_and_takes_bindings():
    job = job_of("RouterConfig.jitter=0.5", "DATA_DIR=x y")
    pathlib.Path("operative.gin").write_text(building.operative_config("JOB"))
    building.parse_files(["operative.gin"], [])
    assert building.build("JOB", TrainingJob) == job
    building.parse_files(["operative.gin"], ["RouterConfig.jitter=0.25", "BATCH_SIZE=4"])
    changed = building.build("JOB", TrainingJob)
    assert (changed.model.switch.router.jitter, changed.batch_size) == (0.25, 4)


def test_file_of_ones_own_may_name_modules_that_moved():
    text = (
        "from __gin__ import dynamic_registration\n"
        "from switchx.partitioning import schedule  # now in pipeline\n"
        "from switchx.storage import cache as kept\n"
        "from switchx.training import job\n"
        "schedule.ScheduleSpec.kind = 'gpipe'\n"
        "job.TrainingJob.storage = @kept.StorageSpec()\n"
        "job.TrainingJob.pipeline = @schedule.ScheduleSpec()\n"
        "kept.StorageSpec.experts = 'host'\n"
        "from switchx.partitioning import mesh as places\n\n"
        "places.MeshSpec.data = 1\n"
        "places.CompilerOptions.gpu = ('xla_a=1',)\n"
    )
    assert files.as_of_today(text).count("\n") == text.count("\n")
    job = job_of(files=my_gin(text))
    assert (job.mesh.data, job.compiler.gpu) == (1, ("xla_a=1",))
    assert job_of(files=my_gin(text.replace("\n\n", "\n"))) == job
    assert (job.pipeline.kind, job.storage.experts) == ("gpipe", "host")
    said = refusal(files=my_gin("import switchx.partitioning.schedule\n"))
    assert "my.gin:1: there is no module 'switchx.partitioning.schedule'" in said
    assert "it is switchx.pipeline.schedule now" in said


@pytest.mark.parametrize("name, now", files.MOVED.items())
def test_modules_that_moved_are_where_the_table_says(name, now):
    configurations = {
        name
        for name, value in vars(importlib.import_module(now)).items()
        if isinstance(value, type) and value.__module__ == now
    }
    try:
        old = importlib.import_module(name)
    except ModuleNotFoundError:
        return
    assert configurations and not configurations & vars(old).keys()


OWN = """
import dataclasses

@dataclasses.dataclass(frozen=True)
class Staircase:
    height: float = 0.5

    def __call__(self, step):
        return self.height
"""
OWN_GIN = (
    "from __gin__ import dynamic_registration\n"
    "from my_tasks import schedules\n"
    "SCHEDULE = @schedules.Staircase()\n"
)


@pytest.mark.parametrize("maker", ["optax.lion", "my_makers.lion"])
def test_a_function_that_is_bound_is_refused(tmp_path, monkeypatch, maker):
    """A run folder has its name alone, so another value would go unnoticed on resume."""
    monkeypatch.syspath_prepend(str(tmp_path))
    pathlib.Path("my_makers.py").write_text("from optax import adam\ndef lion(learning_rate, "
        "b1=0.9):\n    return adam(learning_rate, b1)\n")  # fmt: skip
    text = (
        f"from __gin__ import dynamic_registration\nimport {maker.split('.')[0]}\n"
        "from switchx.optim import protocol\nfrom switchx.training import job\n"
        "job.TrainingJob.optimizer = @protocol.Optax()\n"
        f"protocol.Optax.make = @{maker}\n"
    )
    assert job_of(files=my_gin(text)).optimizer.make.__name__ == "lion"
    said = refusal(files=my_gin(text + f"{maker}.b1 = 0.8\n"))
    assert f"{maker} is bound (b1)" in said
    sys.modules.pop("my_makers", None)


@pytest.fixture
def my_tasks(tmp_path, monkeypatch):
    """A package of a user's own in the working directory, which is not on the module path."""
    (tmp_path / "my_tasks").mkdir()
    (tmp_path / "my_tasks/schedules.py").write_text(OWN)
    (tmp_path / "my.gin").write_text(OWN_GIN)
    path = [each for each in sys.path if each not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", path)
    yield tmp_path / "my_tasks"
    for name in [name for name in sys.modules if name.split(".")[0] == "my_tasks"]:
        del sys.modules[name]


def test_modules_of_the_working_directory_can_be_imported(my_tasks, capsys):
    """By the console script too, whose module path begins with the folder of the script."""
    words = ["plan", f"--gin_file={SMALL}", "--gin_file=my.gin", "--gin.FILES=a.txt"]
    assert main([*words, "--hardware=v5e", "--devices=1"]) == 0, capsys.readouterr().err
    job = building.build("JOB", TrainingJob)
    assert type(job.schedule).__module__ == "my_tasks.schedules"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "my.gin:2: there is no module 'my_tasks.schedules'; modules are looked up on"),
        ("\nx = wrong", "schedules.py:2 failed with NameError: name 'wrong' is not defined"),
        ("def f(:", "my.gin: importing <any>/schedules.py:1 failed with SyntaxError: "),
        ("import torchy", "schedules.py:1 failed with ModuleNotFoundError: there is no module "
         "'torchy'<any>run the command in the folder that has it, or add that folder"),
    ],
)  # fmt: skip
def test_module_that_cannot_be_imported_is_told_with_the_way_out(my_tasks, capsys, text, said):
    file = my_tasks / "schedules.py"
    file.unlink() if text is None else file.write_text(text)
    words = ["plan", f"--gin_file={SMALL}", "--gin_file=my.gin", "--gin.FILES=a.txt"]
    assert main([*words, "--hardware=v5e", "--devices=1"]) == 2
    pattern = ".*".join(map(re.escape, said.split("<any>")))
    assert re.search(pattern, capsys.readouterr().err)


GIN = """\
from __gin__ import dynamic_registration
from switchx.models import config

# Macros:
# ======
BATCH_SIZE = 16
MODEL = @config.ModelConfig()

# Parameters for MODEL/config.ModelConfig:
# ======
MODEL/config.ModelConfig.activation = 'relu # not a comment'
MODEL/config.ModelConfig.sizes = \\
    [1,
     2]

# Parameters for SOURCE/corpus.Text:
# ======
SOURCE/corpus.Text.path = 'a'
SOURCE/corpus.Text.fraction = 0.05

# Parameters for VOCABULARY/deep/corpus.Text:
# ======
VOCABULARY/deep/corpus.Text.path = 'b'
VOCABULARY/deep/corpus.Text.fraction = 0.05

# Parameters for job.Job:
# ======
job.Job.model = %MODEL
"""


def test_parameters_are_bound_once_unless_their_values_differ():
    assert (
        without_scopes(GIN)
        == """\
from __gin__ import dynamic_registration
from switchx.models import config

BATCH_SIZE = 16
MODEL = @config.ModelConfig()

config.ModelConfig.activation = 'relu # not a comment'
config.ModelConfig.sizes = \\
    [1,
     2]

SOURCE/corpus.Text.path = 'a'
corpus.Text.fraction = 0.05
VOCABULARY/deep/corpus.Text.path = 'b'

job.Job.model = %MODEL
"""
    )
    once = without_scopes(GIN)
    assert without_scopes(once) == once


def test_named_tuples_stay_what_they_are():
    pair = collections.namedtuple("Pair", "a b", defaults=(0,))(1, (2,))
    assert building._plain_functions([pair]) == [pair]


HALF = dataclasses.replace(T5_1_1, precision=Precision(compute="bfloat16"), init_scale=0.1)


@pytest.mark.parametrize("model", [SWITCH, HALF], ids=["sparse", "dense"])
def test_the_model_is_built_again_alone_and_after_a_run_file(tmp_path, model):
    model = dataclasses.replace(model, dropout_rate=0.0)
    file = tmp_path / "model.gin"
    file.write_text(model_gin(model))
    other = dataclasses.replace(model)
    kinds = (enum.IntEnum("A", "one").one, "1"), (enum.StrEnum("B", "two").two, "'two'")
    texts = (np.float64(0.5), "0.5"), (np.str_("it's"), '"it\'s"'), (math.inf, "1e999")
    for value, text in (*kinds, *texts, (True, "True")):
        vars(other)["norm_epsilon"] = value
        assert f"config.ModelConfig.norm_epsilon = {text}\n" in model_gin(other)
    vars(other)["norm_epsilon"] = np.float64("nan")
    with refused("a job has NaN, which gin cannot read; give a number"):
        model_gin(other)
    building.parse_files([str(file)], [])
    assert building.build("MODEL", ModelConfig) == model

    building.parse_files(["runs/pretrain_tiny.gin", str(file)], [])
    job = building.build("JOB", TrainingJob)
    assert job.model == dataclasses.replace(model, dropout_rate=job.model.dropout_rate)
