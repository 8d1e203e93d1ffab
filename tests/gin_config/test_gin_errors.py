# SPDX-License-Identifier: Apache-2.0
"""Gin's own errors as sentences, and where gin files are: what may be meant.

Each error is gin's, made by what a person would write.
"""

import pathlib
import re

import pytest

from switchx.gin_config import building, files
from tests.integration.runs import SMALL
from tests.processes import ROOT

HEAD = "from __gin__ import dynamic_registration\nfrom switchx.models import config\n"


pytestmark = pytest.mark.usefixtures("in_a_folder")


def message(*bindings: str, text: str | bytes = "") -> str:
    """What is said of a file with this text on top of the small run, and of bindings."""
    pathlib.Path("my.gin").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(building.ConfigurationError) as error:
        building.parse_files([str(SMALL), "my.gin"], ["FILES=a.txt", *bindings])
        building.build("JOB", object)
    return str(error.value).removeprefix("./")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "config.SwitchConfig.capacity_facto = 1.0",
            "my.gin:3: config.SwitchConfig has no parameter 'capacity_facto' (did you mean "
            "capacity_factor?); it has num_experts, ",
        ),
        (
            "config.SwitchConfg.capacity_factor = 1.0",
            "my.gin:3: switchx.models.config has no 'SwitchConfg' (did you mean SwitchConfig?)",
        ),
        (
            "from switchx.models import confg",
            "my.gin:3: there is no module 'switchx.models.confg' (did you mean config?)",
        ),
        (
            'include "runs/default.gin"',
            "my.gin:3: there is no gin file 'runs/default.gin' to include; did you mean "
            "configs/runs/defaults.gin?",
        ),
        ("\nBATCH_SIZE = = 8", "my.gin:4: Unable to parse value."),
        ("config.ModelConfig.d_model 3", "my.gin:3: Couldn't parse statement"),
        ("SIZES = 3, 4", "my.gin:3: the value is not one Python literal; decimals"),
        ("SIZES = [3", "my.gin:4: EOF in multi-line statement"),
        ("config.ModelConfig.d_model = %D_MODL", "the macro %D_MODL (did you mean MODEL?)"),
        (
            "MODEL = @config.ModelConfig\nMODEL = @ModelCnfig()",
            "my.gin:4: there is no 'ModelCnfig' (did you mean ModelConfig?)",
        ),
    ],
)
def test_mistake_in_a_file_is_told_with_file_and_line(lines, said):
    assert said in message(text=HEAD + lines + "\n")


def test_mistake_in_another_file_is_told_of_that_file():
    assert message(text=b"\xff\xfe").startswith("my.gin: 'utf-8' codec can't decode byte 0xff")
    pathlib.Path("inner.gin").write_text(HEAD + "SIZES = [3\n")
    said = message(text='\ninclude "inner.gin"\n')
    assert said == "inner.gin:4: EOF in multi-line statement"
    pathlib.Path("my.gin").write_text("A = 3\n", encoding="utf-8-sig")
    building.parse_files(["my.gin"], [])
    assert building.macro_names() == ["A"]


def test_files_that_include_each_other_are_named():
    pathlib.Path("inner.gin").write_text('include "my.gin"\n')
    said = message(text='include "inner.gin"\n')
    assert "my.gin includes ./inner.gin includes ./my.gin; take one of these lines" in said
    # A file that two others include is none that includes itself.
    pathlib.Path("inner.gin").write_text("A = 1\n")
    building.parse_files(["inner.gin", "inner.gin"], [])


@pytest.mark.parametrize("line", ["MODEL = @unregistered.Own()", "unregistered.Own.size = 8"])
def test_imports_without_registration_are_told_of_the_missing_line(line, monkeypatch):
    monkeypatch.syspath_prepend(".")
    pathlib.Path("unregistered.py").write_text("class Own: ...\n")
    pathlib.Path("my.gin").write_text(f"import unregistered\n{line}\n")
    with pytest.raises(building.ConfigurationError) as error:
        building.parse_files(["my.gin"], [])
    said = str(error.value)
    assert "my.gin:2: there is no 'unregistered.Own', as this file's imports name" in said
    assert "`from __gin__ import dynamic_registration`; write it above them" in said


@pytest.mark.parametrize(
    ("binding", "quoted"),
    [
        ("FILES=2024", """--gin.FILES='"2024"'"""),
        ("DATA_DIR=True", """--gin.DATA_DIR='"True"'"""),
        ("INIT_FROM=1e5", """--gin.INIT_FROM='"TEXT"'"""),
    ],
)
def test_a_name_that_reads_as_a_number_is_told_to_be_quoted(binding, quoted):
    with pytest.raises(building.ConfigurationError) as error:
        building.job_from_gin(str(SMALL), ["FILES=a.txt", binding])
    assert f"a text that reads as a number needs quotes, {quoted}" in str(error.value)
    name, _, value = binding.partition("=")
    job = building.job_from_gin(str(SMALL), ["FILES=a.txt", f'{name}="{value}"'])
    assert value in (job.source.corpus.path, job.data_dir, job.init_from)


def test_each_of_several_names_is_checked():
    with pytest.raises(building.ConfigurationError, match="expected str | Sequence"):
        building.job_from_gin(str(SMALL), ["FILES=('a.txt', 2024)"])


@pytest.mark.parametrize(
    ("binding", "said"),
    [
        ("SwitchConfig.groupsize=8", "no parameter 'groupsize' (did you mean group_size?)"),
        ("SwitchConfg.group_size=8", "there is no 'SwitchConfg' (did you mean SwitchConfig?)"),
        ("MODEL=@config.ModelConfg()", "no 'config.ModelConfg' (did you mean ModelConfig?)"),
        ("LEARNING_RATE=0,1", "--gin.LEARNING_RATE=0,1: the value is not one Python literal"),
        ("LEARNING_RATE=0,1", "several values belong to `switchx sweep`"),
        ("TRAIN_STEPS=-1", "train_steps=-1; use at least 0 (while building TrainingJob)"),
        ("LossConfig.balance_weight=1e999", "LossConfig.balance_weight=inf; use at least 0"),
    ],
)
def test_mistake_in_a_binding_is_told_with_its_value(binding, said):
    assert said in message(binding)


def test_a_class_is_found_where_a_file_names_it():
    """The way out that is said of a class whose module alone is imported is one."""
    said = message("LinearWarmup.peak=0.5", text="from switchx.optim import schedules\n")
    assert "no 'LinearWarmup'" in said and "has to import its module and to name it, as" in said
    pathlib.Path("my.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom switchx.optim import schedules\n"
        "SCHEDULE = @schedules.LinearWarmup()\nschedules.LinearWarmup.warmup_steps = 3\n"
    )
    bindings = ["FILES=a.txt", "LinearWarmup.peak=0.5"]
    assert building.parse_job([str(SMALL), "my.gin"], bindings).schedule.peak == 0.5


def test_all_that_is_required_is_asked_for_at_once():
    for names, required in (
        (["runs/finetune.gin", "tasks/text_span_corruption.gin"], ["INIT_FROM", "FILES"]),
        ([str(SMALL)], ["FILES"]),
    ):
        with pytest.raises(building.ConfigurationError) as error:
            building.parse_files(names, [])
            building.build("JOB", object)
        flags = " ".join(f"--gin.{name}=VALUE" for name in required)
        assert str(error.value).startswith(f"{', '.join(required)} ")
        assert str(error.value).endswith(f"give {flags}")


# Where gin files are.


def installed(tmp_path, monkeypatch, *folders):
    """Pretends that switchx is installed in `tmp_path`, beside and with these folders."""
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(files, "__file__", str(tmp_path / "switchx/gin_config/files.py"))


def test_an_installed_copy_wins_and_without_one_installing_is_said(tmp_path, monkeypatch):
    assert files.configs_dir() == ROOT / "configs"  # of the checkout
    installed(tmp_path, monkeypatch, "configs/something_else")
    with pytest.raises(FileNotFoundError, match="pip install --editable") as error:
        files.configs_dir()
    assert f"no {tmp_path}/switchx/configs and no {tmp_path}/configs" in str(error.value)
    installed(tmp_path, monkeypatch, "switchx/configs/models", "configs/models")
    assert files.configs_dir() == tmp_path / "switchx/configs"


def test_names_are_looked_up_here_then_in_search_paths_then_among_ours(tmp_path):
    roots = [pathlib.Path("."), tmp_path, ROOT / "configs", ROOT]
    assert files.config_roots([str(tmp_path)]) == roots
    (tmp_path / "file").write_text("")
    for missing in (tmp_path / "none", tmp_path / "file"):
        said = re.escape(f"--gin_search_paths: there is no folder {str(missing)!r}")
        with pytest.raises(ValueError, match=said):
            files.config_roots([str(missing)])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("configs/runs/pretrain_tinny.gin", "did you mean configs/runs/pretrain_tiny.gin?"),
        ("runs/pretrain_gpt_tiny", "did you mean configs/runs/pretrain_gpt_tiny.gin?"),
        ("mine/my_rnu.gin", "did you mean mine/my_run.gin?"),
        ("quite_another_thing.gin", "runs to start from: configs/runs"),
        ("a.gin,b.gin", "repeat --gin_file for each file"),
        ("mine", "that is a folder; name a file in it"),
    ],
)
def test_missing_file_says_which_may_be_meant(name, hint, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/my_run.gin").write_text("")
    said = files.missing_file(name, files.config_roots())
    assert said.startswith(f"no gin file {name!r} in ., {ROOT / 'configs'}, {ROOT}; {hint} (")
