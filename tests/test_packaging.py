# SPDX-License-Identifier: Apache-2.0
"""What is installed: every package, every configuration, the command, the extras."""

import configparser
import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml

from tests import release
from tests.release import PACKAGES

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def entries(config, section: str, name: str) -> list[str]:
    lines = config[section][name].splitlines()
    return [line.strip() for line in lines if line.strip()]


def folders_with_python() -> set[str]:
    """Every folder of the packages that holds a Python file, as a dotted name."""
    files = [file for top in PACKAGES for file in ROOT.glob(f"{top}/**/*.py")]
    folders = {file.parent.relative_to(ROOT).parts for file in files}
    return {".".join(parts) for parts in folders if "build" not in parts}


def package_files() -> set[str]:
    """Everything in the packages that is not made by Python: code and what it reads."""
    files = [file for top in PACKAGES for file in ROOT.glob(f"{top}/**/*") if file.is_file()]
    files = [file.relative_to(ROOT) for file in files if file.parent.name != "__pycache__"]
    # What `pip install ./pallas_kernels` reads, and leaves behind.
    own = ("pyproject.toml", "README.md")
    return {
        file.as_posix()
        for file in files
        if not (file.parts[0] == "pallas_kernels" and file.parts[1] in own)
        and not any(part == "build" or part.endswith(".egg-info") for part in file.parts)
    }


def gin_files() -> set[str]:
    files = (ROOT / "configs").rglob("*.gin")
    return {file.relative_to(ROOT).as_posix() for file in files}


def test_every_package_is_one_and_is_installed(config):
    packages = entries(config, "options", "packages")
    assert set(packages) == folders_with_python() | {"switchx.configs"}
    assert packages == sorted(packages)
    names = folders_with_python()
    missing = [
        name for name in names if not (ROOT / name.replace(".", "/") / "__init__.py").exists()
    ]
    assert missing == []


def test_configurations_are_installed_below_switchx(config):
    assert entries(config, "options", "package_dir") == ["switchx.configs = configs"]
    assert entries(config, "options.package_data", "switchx.configs") == ["**/*.gin"]
    # The place that the installed copy goes to is free in a checkout.
    assert not (ROOT / "switchx/configs").exists()
    others = {path.suffix for path in (ROOT / "configs").rglob("*") if path.is_file()}
    assert others == {".gin"}


def test_files_beside_the_code_are_installed(config):
    for file in map(pathlib.PurePosixPath, package_files()):
        [folder, *_] = (up for up in file.parents if (ROOT / up / "__init__.py").exists())
        package = ".".join(folder.parts)
        patterns = config["options.package_data"].get(package, "").split()
        assert file.suffix == ".py" or any(map(file.match, patterns)), (
            f"{file} would not be installed; name it under [options.package_data] {package}"
        )


def test_python_and_jax_are_those_that_are_promised(config):
    assert config["options"]["python_requires"] == ">=3.11"
    requirements = entries(config, "options", "install_requires")
    assert "jax>=0.10.2,<0.13" in requirements
    assert "flax>=0.12.8" in requirements
    assert not [name for name in requirements if name.startswith(("tensorflow=", "torch"))]
    extras = set(config["options.extras_require"])
    assert extras >= {"tpu", "gpu", "hf", "serve", "notebooks", "dev"}
    for extra in ("tpu", "gpu", "gpu12"):
        assert config["options.extras_require"][extra].endswith(">=0.10.2,<0.13")


def test_command_leads_to_main_and_kernels_are_a_distribution_of_their_own(config):
    project = tomllib.loads((ROOT / "pallas_kernels/pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]
    assert packages == [name for name in sorted(folders_with_python()) if "switchx" not in name]
    needed = project["project"]["dependencies"]
    assert set(needed) == {"jax>=0.10.2,<0.13", "numpy"}
    assert needed[0] in entries(config, "options", "install_requires")
    assert project["project"]["requires-python"] == config["options"]["python_requires"]
    module, _, function = project["project"]["scripts"]["pallas-kernels"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    (command,) = entries(config, "options.entry_points", "console_scripts")
    name, _, target = command.partition(" = ")
    module, _, function = target.partition(":")
    assert name == "switchx"
    assert callable(getattr(importlib.import_module(module), function))


def test_versions_and_addresses_are_the_same_everywhere(config):
    project = tomllib.loads((ROOT / "pallas_kernels/pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    about = config["metadata"]
    assert about["version"] == project["version"] == citation["version"]
    assert about["url"] == project["urls"]["Homepage"] == citation["repository-code"]
    assert about["author"] == project["authors"][0]["name"] == citation["authors"][0]["name"]
    assert f"## [{about['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_long_descriptions_have_absolute_links_alone():
    url = "https://host"
    page = "[![a](https://b)](c) [![d](e.svg)](f.md) ![g](h.svg) [i](#j)"
    assert release.with_absolute_links(page, url, "1") == (
        "[![a](https://b)](https://host/blob/v1/c) "
        "[![d](https://host/raw/v1/e.svg)](https://host/blob/v1/f.md) "
        "![g](https://host/raw/v1/h.svg) [i](#j)"
    )
    pages = [(ROOT / name).read_text() for name in ("README.md", "pallas_kernels/README.md")]
    pages[0] = release.with_absolute_links(pages[0], url, "1")
    assert [link for page in pages for link in re.findall(r"\]\((?!https://)[^)]*", page)] == []


@pytest.mark.slow
def test_the_kernels_alone_are_installed_and_run(tmp_path):
    """Without switchx, gin, Orbax, Flax, and away from the checkout."""
    source, target, elsewhere = (tmp_path / name for name in ("source", "site", "elsewhere"))
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "pallas_kernels", source, ignore=skip)
    elsewhere.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    install += ["--no-build-isolation", "--target", target, source]
    subprocess.run(install, check=True)
    readme = (ROOT / "pallas_kernels/README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    program = (
        "import sys\n"
        "for name in ('switchx', 'flax', 'gin', 'orbax', 'optax'):\n"
        "    sys.modules[name] = None\n"
        f"{block}import pallas_kernels; print(pallas_kernels.__file__)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(target)}

    def run(*command) -> str:
        return subprocess.run(
            [sys.executable, *command], cwd=elsewhere, env=environment,
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    shapes, where = run("-c", program).splitlines()
    assert shapes.startswith("(12, 128) (12, 128) 0.1")
    assert where == str(target / "pallas_kernels/__init__.py")
    assert "PALLAS_KERNELS_TILINGS" in run("-m", "pallas_kernels", "--help")


def test_parts_of_check_accelerator_need_no_package_that_cards_lack():
    """Machines that cards are lent with have no gin, Grain or TFDS."""
    program = (
        "import importlib, sys\n"
        "for name in ('gin', 'grain', 'tensorflow_datasets'):\n"
        "    sys.modules[name] = None\n"
        "from switchx.bench.accelerator.parts import PARTS\n"
        "for part in PARTS:\n"
        "    importlib.import_module(part.run.partition(':')[0])\n"
        "print(len(PARTS))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "10\n", done.stderr


def test_build_backend_ci_and_licence():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text()).keys() == {"build-system"}
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "set -euo pipefail"
    assert lines[2:] == ["make lint test"]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["ci"]["steps"][-1] == {"run": ".ci/run"}
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "APPENDIX: How to apply the Apache License to your work." in text


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """A wheel built from a copy: building leaves folders behind."""
    base = tmp_path_factory.mktemp("wheel")
    release.build(release.copied(base / "source"), base, "--wheel")
    (path,) = base.glob("*.whl")
    return path


@pytest.mark.slow
def test_wheel_holds_all_code_and_configurations_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        (about,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        about = archive.read(about).decode()
    assert names == package_files() | {f"switchx/{name}" for name in gin_files()}
    assert len(licences) == 1
    assert re.search(r"\]\((?!https://)", about) is None  # README.md's links are absolute
    assert "(https://github.com/switchx/switchx/raw/v" in about


@pytest.mark.slow
def test_wheel_finds_its_configurations_away_from_the_checkout(wheel, tmp_path):
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, target, wheel], check=True)
    program = (
        "from switchx.gin_config import building, files\n"
        "from switchx.training.job import TrainingJob\n"
        "print(files.configs_dir())\n"
        "for name in ('configs/runs/pretrain_tiny.gin', 'runs/pretrain_tiny.gin'):\n"
        "    building.parse_files([name], [], [])\n"
        "    print(building.build('JOB', TrainingJob).model.switch.num_experts)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(target / "switchx/configs"), "8", "8"]
