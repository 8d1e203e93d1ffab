# SPDX-License-Identifier: Apache-2.0
"""What all tests share: eight simulated devices, strict ranks, child processes, data."""

import contextlib
import dataclasses
import fcntl
import gc
import importlib.util
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
import types
from collections.abc import Callable

from tests.processes import ROOT, child_environment, xla_flags

# They are read when JAX is imported. On a GPU: JAX_PLATFORMS=cuda,cpu pytest -m gpu.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags(devices=8)}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Simulated devices wait in threads for each other: `give_threads_to_simulated_devices`.
os.environ.setdefault("NPROC", "32")

import hypothesis
import jax
import pytest

from switchx.cli.main import main
from tests.compilation import T5, TINY_RUN, compiled_once, on_devices, traced_once
from tests.integration.runs import arguments, write_corpus
from tests.way import traced

pytest_plugins = ("tests.compile_seconds",)

START_S = time.monotonic()

# Broadcasting [D] against [B, D] unnoticed is how a wrong axis stays hidden.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Seconds are no property: the machine may be busy.
hypothesis.settings.register_profile("without_deadline", deadline=None)
hypothesis.settings.load_profile("without_deadline")


# Files that run commands one after another: begun last, they would keep one worker busy alone.
LONGEST = ("test_readme.py", "test_several_hosts.py", "test_train.py", "test_docs.py")


def pytest_collection_modifyitems(items):
    """The longest files first; all else stays in its order."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish():
    """Garbage collections leave out modules and tests, and do not come while JAX traces."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_terminal_summary(terminalreporter):
    """Says what all took: xdist's workers have ended, and count as children as theirs do."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu_s = sum(each.ru_utime + each.ru_stime for each in used)
    wall_s = time.monotonic() - START_S
    terminalreporter.write_line(f"{wall_s:,.0f} s wall, {cpu_s:,.0f} s CPU (user and system)")


def pytest_runtest_setup(item):
    """Skips what this machine cannot run, with the reason."""
    for marker in ("gpu", "tpu"):
        if item.get_closest_marker(marker) and jax.default_backend() != marker:
            pytest.skip(f"needs a {marker.upper()}; JAX runs on {jax.default_backend()}")
    if item.get_closest_marker("hf"):
        for module in ("torch", "transformers"):
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"needs {module}: pip install 'switchx[hf]', or make test-all")


# A process may have 65,530 memory maps (Linux' vm.max_map_count), and a program of XLA on a
# CPU takes up to a thousand of them; where there are no more, compiling ends in SIGSEGV.
MOST_MAPS, LOOK_EVERY_S = 30_000, 5.0
_looked_s = START_S


def pytest_runtest_teardown():
    """Lets go of compiled programs before there are too many of them."""
    global _looked_s
    maps = pathlib.Path("/proc/self/maps")
    if time.monotonic() - _looked_s < LOOK_EVERY_S or not maps.exists():
        return
    _looked_s = time.monotonic()
    with maps.open("rb") as lines:
        if sum(1 for _ in lines) > MOST_MAPS:
            jax.clear_caches()
            gc.collect()


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
def made_once(tmp_path_factory):
    """`made_once("name", make)`: a folder that `make(folder)` fills, once for all workers.

    Tests must not change what is in it.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name: str, make: Callable[[pathlib.Path], None] = lambda folder: None):
        folder, is_whole = base / name, base / f"{name}.is_whole"
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_whole.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                is_whole.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def session_cache(made_once) -> pathlib.Path:
    """The user's cache, for all workers and child processes: corpora, vocabularies, programs.

    What is compiled below `compiled` is compiled once, whichever test needs it first.
    """
    return made_once("session_cache")


@pytest.fixture(scope="module")
def programs_compiled_once(session_cache):
    """For files that compile the same programs again and again, under other settings."""
    with compiled_once(session_cache / "compiled"):
        yield


@pytest.fixture(scope="module")
def steps_traced_once(programs_compiled_once):
    """For files that train the same small models again and again; see `traced_once`."""
    with traced_once():
        yield


@pytest.fixture(scope="session")
def small_stdlib(made_once) -> pathlib.Path:
    """Some packages of Python's standard library: text enough, and prepared in no time."""

    def copy(folder):
        for name in ("email", "http", "json", "logging", "xml"):
            skip = shutil.ignore_patterns("__pycache__")
            root = pathlib.Path(sysconfig.get_path("stdlib"))
            shutil.copytree(root / name, folder / name, ignore=skip)

    return made_once("small_stdlib", copy)


@contextlib.contextmanager
def working_in(folder: pathlib.Path, cache: pathlib.Path, stdlib: pathlib.Path):
    """Commands called in this process work in a folder, and see no data of the user's."""
    library = types.SimpleNamespace(get_path=lambda name: str(stdlib))
    with pytest.MonkeyPatch.context() as patch, compiled_once(cache / "compiled"):
        patch.setattr("switchx.data.corpora.python_stdlib.sysconfig", library)
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.delenv("SWITCHX_DATA_DIR", raising=False)
        yield


@pytest.fixture
def in_a_folder(tmp_path, session_cache, small_stdlib):
    """`tmp_path`, where commands called in this process work."""
    with working_in(tmp_path, session_cache, small_stdlib):
        yield tmp_path


@pytest.fixture(scope="session")
def tiny_run(made_once, session_cache, small_stdlib) -> pathlib.Path:
    """The run folder that `make train` leaves, of a small model and two steps; to be copied."""

    def train(base: pathlib.Path) -> None:
        with working_in(base, session_cache, small_stdlib), on_devices(1):
            assert main([*TINY_RUN, "--model_dir=run", *T5]) == 0

    return made_once("tiny_run", train) / "run"


@pytest.fixture
def one_device():
    """Commands called in this process train and evaluate on one device."""
    with on_devices(1):
        yield


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run folder, the corpus it read, what the command printed, and its way (`way.py`)."""

    folder: pathlib.Path
    files: pathlib.Path
    stdout: str
    stderr: str
    way: dict[str, list[str]]


@pytest.fixture(scope="session")
def finished_run(made_once, session_cache, small_stdlib) -> FinishedRun:
    """The small run of 12 steps on one device, uninterrupted; tests must not change it."""

    def train(base: pathlib.Path) -> None:
        words = arguments(base / "run", write_corpus(base))
        with (
            working_in(base, session_cache, small_stdlib),
            on_devices(1),
            (base / "stdout").open("w") as out,
            (base / "stderr").open("w") as err,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            traced() as files,
        ):
            assert main(["train", *words]) == 0
        way = {moment: sorted(found) for moment, found in files.items()}
        (base / "way.json").write_text(json.dumps(way))

    base = made_once("finished_run", train)
    texts = [(base / name).read_text() for name in ("stdout", "stderr")]
    way = json.loads((base / "way.json").read_text())
    return FinishedRun(base / "run", base / "corpus.txt", *texts, way)


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """`cli("eval", "--model_dir=...")` runs a command in this process."""

    capsys: pytest.CaptureFixture

    def __call__(self, *words, status: int | None = 0):
        """What it printed, `out` and `err`, once it has ended with this status (None: any)."""
        self.capsys.readouterr()  # of commands before it
        ended = main(list(map(str, words)))
        said = self.capsys.readouterr()
        assert status in (None, ended), said.err
        return said

    def json(self, *words, status: int | None = 0):
        """The JSON on the last line of its standard output."""
        return json.loads(self(*words, status=status).out.splitlines()[-1])

    def refused(self, *words) -> str:
        """What it says of wrong input, on standard error alone."""
        said = self(*words, status=2)
        assert said.out == ""
        return said.err


@pytest.fixture
def cli(capsys) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def start_cli(session_cache, tmp_path):
    """`start_cli("train", "--model_dir=...")` -> a running `Popen`.

    It works in `tmp_path`, sees neither the user's cache nor the user's data folder, and
    writes both its outputs to the file `process.log`. `program` is Python that takes the
    place of the command. What still runs at the end of the test is killed.
    """
    processes = []

    def start(*words, program=None, devices=1, env=None) -> subprocess.Popen:
        log = tmp_path / f"cli_{len(processes)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    sys.executable,
                    *(["-c", program] if program else ["-m", "switchx"]),
                    *map(str, words),
                ],
                cwd=tmp_path,
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

    def run(*words, cwd=tmp_path, devices=1, env=None, timeout=240):
        return subprocess.run(
            [sys.executable, "-m", "switchx", *map(str, words)],
            cwd=cwd,
            env=child_environment(session_cache, devices) | (env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run
