# SPDX-License-Identifier: Apache-2.0
"""What child processes of the tests, and the tests themselves, run with."""

import importlib.metadata
import os
import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def xla_flags(devices: int) -> str:
    """Simulated devices; quick compilation, as tests compile much and compute little.

    In one piece, not in 32, a program takes a tenth less work. Without the fusion emitters, a
    model's gradient compiles in a third of the time. XLA ends the process over a flag it does
    not know, and from JAX 0.11 on it does not know that one.
    """
    version = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
    emitters = "--xla_cpu_use_fusion_emitters=false " if version < (0, 11) else ""
    return (
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
        f"{emitters}--xla_force_host_platform_device_count={devices}"
    )


def child_environment(cache: pathlib.Path, devices: int) -> dict[str, str]:
    """The environment of a child that sees neither the user's cache nor their data."""
    environment = dict(os.environ)
    environment.pop("SWITCHX_DATA_DIR", None)
    return environment | {
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(cache),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(devices),
        # Many children run the same program: the first one compiles it.
        "JAX_COMPILATION_CACHE_DIR": str(cache / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def free_port() -> int:
    """A port at which process 0 of several may listen."""
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


def peak_rss_bytes() -> int:
    """The most that this process ever had, of Linux.

    Not `ru_maxrss`: a process begins with that of the one which started it.
    """
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[1]) * 2**10


def run_together(
    commands: Sequence[Sequence[str]], environment: dict[str, str]
) -> list[tuple[int, str]]:
    """The exit status and the output of processes that run at the same time."""
    processes = [
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        return [(p.returncode, output) for p, output in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()


def skip_without(*compilers) -> None:
    """Skips the test where one of `pallas_kernels.aot`'s compilers is not installed."""
    for compiler in compilers:
        try:
            compiler.compiler_folder()
        except FileNotFoundError as error:
            pytest.skip(str(error))


def script_with_compiler(compiler, script: str, *arguments: str) -> subprocess.CompletedProcess:
    """What a script prints that sees a compiler of devices which are not there.

    Skips the test where the compiler is not installed.

    Args:
        compiler: `pallas_kernels.aot.tpu_compiler` or `gpu_compiler`.
    """
    skip_without(compiler)
    variables = compiler.compiler_variables()
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | variables | {"XLA_FLAGS": ""},
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip


def dry_run(*targets: str) -> subprocess.CompletedProcess:
    """What make would run, free of the make that may have started the tests."""
    return subprocess.run(
        ["make", "--dry-run", *targets],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
