# SPDX-License-Identifier: Apache-2.0
"""What all tests share: eight simulated devices, strict ranks, child processes, data."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

from tests.processes import ROOT, child_environment, xla_flags

# Both are read when JAX is imported. On an accelerator: JAX_PLATFORMS=cuda pytest -m gpu.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags(devices=8)}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from switchx.cli.config import building
from tests.compilation import compiled_once

# Broadcasting [D] against [B, D] unnoticed is how a wrong axis stays hidden.
jax.config.update("jax_numpy_rank_promotion", "raise")


# Files that run commands one after another: begun last, they would keep one worker busy alone.
LONGEST = ("test_readme.py", "test_elephants.py", "test_docs.py", "test_next_commands.py")


def pytest_collection_modifyitems(items):
    """The longest files first; all else stays in its order."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_runtest_setup(item):
    """Skips what this machine cannot run, with the reason."""
    for marker in ("gpu", "tpu"):
        if item.get_closest_marker(marker) and jax.default_backend() != marker:
            pytest.skip(f"needs a {marker.upper()}; JAX runs on {jax.default_backend()}")
    if item.get_closest_marker("hf"):
        for module in ("torch", "transformers"):
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"needs {module}: pip install 'switchx[hf]', or make test-all")


@pytest.fixture
def key():
    """A PRNG key; tests fold or split it, and expect no particular numbers from it."""
    return jax.random.key(0)


@pytest.fixture(scope="session")
def shared_dir(tmp_path_factory) -> pathlib.Path:
    """A copy of the real data beside the checkout, `../shared/data`, below `data`.

    A copy, because corpora are prepared where they lie. Skips the test where it is absent.
    """
    data = ROOT.parent / "shared" / "data"
    if not data.is_dir():
        pytest.skip(f"needs the folder shared/data with real data beside {ROOT.name}/")
    copy = tmp_path_factory.mktemp("shared")
    shutil.copytree(data, copy / "data", copy_function=shutil.copyfile)
    return copy


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory) -> pathlib.Path:
    """The cache of all child processes: a corpus is prepared once a session.

    Workers that run beside each other share its corpora and vocabularies, which are written
    whole or not at all; each keeps its own compiled programs, which are not.
    """
    cache = tmp_path_factory.mktemp("session_cache")
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "prepared"
    shared.mkdir(exist_ok=True)
    (cache / "switchx").symlink_to(shared)
    return cache


@pytest.fixture(scope="module")
def programs_compiled_once(session_cache):
    """For files that compile the same programs again and again, under other settings."""
    with compiled_once(session_cache / "compiled"):
        yield


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch, session_cache):
    """Commands called in this process work in `tmp_path`, and see no data of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(session_cache))
    monkeypatch.delenv("SWITCHX_DATA_DIR", raising=False)
    with compiled_once(session_cache / "compiled"):
        yield tmp_path
    building.gin.clear_config()


@pytest.fixture
def start_cli(session_cache, tmp_path):
    """`start_cli("train", "--model_dir=...", devices=1)` -> a running `Popen`.

    It works in `tmp_path` unless `cwd` is given, sees neither the user's cache nor the
    user's data folder, and writes both its outputs to the file `process.log`. What still
    runs at the end of the test is killed.
    """
    processes = []

    def start(*arguments, cwd=tmp_path, devices=1, env=None) -> subprocess.Popen:
        log = tmp_path / f"cli_{len(processes)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "switchx", *map(str, arguments)],
                cwd=cwd,
                env=child_environment(session_cache, devices) | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        process.log = log
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def run_cli(session_cache, tmp_path):
    """`run_cli("eval", "--model_dir=...")` -> a finished `CompletedProcess` with its texts.

    The same surroundings as `start_cli`; a non-zero exit status does not raise.
    """

    def run(*arguments, cwd=tmp_path, devices=1, env=None, timeout=240):
        return subprocess.run(
            [sys.executable, "-m", "switchx", *map(str, arguments)],
            cwd=cwd,
            env=child_environment(session_cache, devices) | (env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run
