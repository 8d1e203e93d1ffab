# SPDX-License-Identifier: Apache-2.0
"""PyTorch's Switch Transformer on the same cores, in a process of its own.

Nothing in the package imports PyTorch: this file starts a program that does
(`torch_program.py`), and asks first whether it could.
"""

import contextlib
import importlib.util
import json
import pathlib
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).with_name("torch_program.py")


def is_available() -> bool:
    """Whether the extra `hf` is installed."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


class TorchPeer:
    """The other process; `step()` takes one training step there and waits for it."""

    def __init__(self, num_experts: int, batch: int, inputs: int, targets: int):
        settings = {
            "num_experts": num_experts,
            "batch": batch,
            "inputs": inputs,
            "targets": targets,
        }
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2):  # the first steps allocate
            self.step()

    def step(self) -> None:
        try:
            self._process.stdin.write("step\n")
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
