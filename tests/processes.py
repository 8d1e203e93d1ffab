# SPDX-License-Identifier: Apache-2.0
"""What child processes of the tests, and the tests themselves, run with."""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def xla_flags(devices: int) -> str:
    """Simulated devices; quick compilation, as tests compile much and compute little.

    Without the fusion emitters, a model's gradient compiles in a third of the time. XLA ends
    the process over a flag it does not know, and from JAX 0.11 on it does not know that one.
    """
    version = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
    emitters = "--xla_cpu_use_fusion_emitters=false " if version < (0, 11) else ""
    return (
        f"--xla_backend_optimization_level=0 {emitters}"
        f"--xla_force_host_platform_device_count={devices}"
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


# Says before each command which it is, so that the last one said is the one that failed.
_IN_TURN = """
import json, sys
from switchx.cli.main import main
for words in json.loads(sys.argv[1]):
    print("$ switchx", *words, file=sys.stderr, flush=True)
    try:
        status = main(words)
    except SystemExit as end:  # --help
        status = end.code
    if status:
        sys.exit(status)
"""


def run_in_turn(
    commands: list[list[str]], cwd: pathlib.Path, cache: pathlib.Path, devices: int = 1
) -> subprocess.CompletedProcess:
    """Runs switchx commands, each its arguments, in one child, up to the first that fails.

    Importing JAX takes longer than most small commands, and they share what was compiled.
    """
    return subprocess.run(
        [sys.executable, "-c", _IN_TURN, json.dumps(commands)],
        cwd=cwd,
        env=child_environment(cache, devices),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
