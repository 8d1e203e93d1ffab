# SPDX-License-Identifier: Apache-2.0
import pathlib

import pytest

from switchx.cli.config import files

ROOT = pathlib.Path(__file__).parents[2]


def test_checkout_uses_the_folder_at_its_top():
    assert files.configs_dir() == ROOT / "configs"


def installed(tmp_path, monkeypatch, *folders):
    """Pretends that switchx is installed in `tmp_path`, beside and with these folders."""
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(files, "__file__", str(tmp_path / "switchx/cli/config/files.py"))


def test_installed_copy_wins_over_a_stranger_beside_the_package(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch, "switchx/configs/models", "configs/models")
    assert files.configs_dir() == tmp_path / "switchx/configs"


def test_missing_configurations_say_how_to_install(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch, "configs/something_else")
    with pytest.raises(FileNotFoundError) as error:
        files.configs_dir()
    assert str(error.value) == (
        "switchx was installed without its configurations: there is no "
        f"{tmp_path}/switchx/configs and no {tmp_path}/configs; install it from a wheel, or "
        "with `pip install --editable` in a checkout"
    )


def test_names_are_looked_up_here_then_in_search_paths_then_among_ours(tmp_path):
    assert files.config_roots([str(tmp_path)]) == [
        pathlib.Path("."), tmp_path, ROOT / "configs", ROOT,
    ]  # fmt: skip


def test_search_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for missing in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(ValueError) as error:
            files.config_roots([str(missing)])
        assert str(error.value) == (
            f"--gin_search_paths: there is no folder {str(missing)!r}; name folders that "
            "exist, separated by commas"
        )


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
def test_missing_file_says_which_may_be_meant(name, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/my_run.gin").write_text("")
    assert files.missing_file(name, files.config_roots()) == (
        f"no gin file {name!r} in ., {ROOT / 'configs'}, {ROOT}; {hint} (--gin_search_paths "
        "adds folders)"
    )
