# SPDX-License-Identifier: Apache-2.0
import pathlib

import pytest

from switchx.cli import config_files

ROOT = pathlib.Path(__file__).parents[2]


def test_checkout_uses_the_folder_at_its_top():
    assert config_files.configs_dir() == ROOT / "configs"


def installed(tmp_path, monkeypatch, *folders):
    """Pretends that switchx is installed in `tmp_path`, beside and with these folders."""
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(config_files, "__file__", str(tmp_path / "switchx/cli/config_files.py"))


def test_installed_copy_wins_over_a_stranger_beside_the_package(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch, "switchx/configs/models", "configs/models")
    assert config_files.configs_dir() == tmp_path / "switchx/configs"


def test_missing_configurations_say_how_to_install(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch, "configs/something_else")
    with pytest.raises(FileNotFoundError) as error:
        config_files.configs_dir()
    assert str(error.value) == (
        "switchx was installed without its configurations: there is no "
        f"{tmp_path}/switchx/configs and no {tmp_path}/configs; install it from a wheel, or "
        "with `pip install --editable` in a checkout"
    )
