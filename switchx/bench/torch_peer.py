# SPDX-License-Identifier: Apache-2.0
"""PyTorch's Switch Transformer on the same cores, in a process of its own.

Nothing that `switchx` imports needs PyTorch: this file starts a program that does, where it is
installed.
"""

import contextlib
import importlib.util
import json
import pathlib
import subprocess
import sys
from typing import Any

from switchx.interop.huggingface import describe
from switchx.models.config import ModelConfig

PROGRAM = pathlib.Path(__file__).with_name("torch_program.py")


def is_available() -> bool:
    """Whether the extra `hf` is installed."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def config_of(model: ModelConfig) -> dict[str, Any]:
    """Arguments of transformers' configuration of the same model, which drops no token."""
    return describe(model)[0]


class TorchPeer:
    """The other process; `ask(line)` makes it do what the line says, and waits for its end."""

    def __init__(self, program: pathlib.Path, settings: dict[str, Any]):
        self._process = subprocess.Popen(
            [sys.executable, str(program), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> None:
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:  # it had ended before it was asked
            answer = ""
        if answer != "done\n":
            raise RuntimeError("the PyTorch peer ended; its error stands above")

    def __enter__(self) -> "TorchPeer":
        return self

    def __exit__(self, *exception) -> None:
        with contextlib.suppress(BrokenPipeError):  # closing writes what is left
            self._process.stdin.close()
        self._process.wait()
