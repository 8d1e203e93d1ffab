# SPDX-License-Identifier: Apache-2.0
"""Compilers of other hardware, each in a process of its own, and tables of what kernels take.

    python -m pallas_kernels.aot.tpu_compiler v5e < cases.json

reads a JSON list of cases (`case.py`) and prints a line of JSON for each: its resources, or
`error`, what was said instead. With `--budgets` it compiles the cases of the back end's table
and writes the rows that tests hold the kernels to. A process of its own, because a JAX that
finds libtpu or a CUDA plugin takes the machine for one with that hardware.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pallas_kernels.aot.case import Case

# Tells a process that it is the child, and where its compiler leaves its notes.
DUMP_VARIABLE = "SWITCHX_AOT_DUMP"
# The packages of the repository, for the child.
ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Compiler:
    """The compiler of one back end.

    Attributes:
        back_end: `tpu` or `gpu`; the child runs `pallas_kernels.aot.<back_end>_compiler`.
        targets: hardware that it compiles for.
        cases: the table's cases, by name.
        resources: names of the resources that the table has for each case.
        variables: returns the child's environment variables, given the folder for notes. It
            raises FileNotFoundError if the compiler is not installed.
        compile_here: returns the resources, given target, case and the folder for notes; it
            runs in the child.
        is_by_jax: whether the code depends on the version of JAX, so that the table has rows
            for each version.
    """

    back_end: str
    targets: Iterable[str]
    cases: Mapping[str, Case]
    resources: tuple[str, ...]
    variables: Callable[[str], dict[str, str]]
    compile_here: Callable[[str, Case, pathlib.Path], dict[str, int]]
    is_by_jax: bool = False

    def key(self, target: str) -> str:
        """The table's key for the rows of a target, as this JAX compiles for it."""
        version = importlib.metadata.version("jax").split(".")
        return f"{target} jax {'.'.join(version[:2])}" if self.is_by_jax else target

    @property
    def table(self) -> pathlib.Path:
        return pathlib.Path(__file__).with_name(f"{self.back_end}_budgets.json")

    def budgets(self) -> dict[str, dict[str, dict[str, int]]]:
        """The table: resources by `key` and name of the case."""
        return json.loads(self.table.read_text())

    def compile(self, target: str, cases: Iterable[Case]) -> list[dict[str, Any]]:
        """Compiles cases in a child process, one result for each, in order.

        Returns:
            Dictionaries with `case` and `error`; where `error` is None also the resources.

        Raises:
            ValueError: an unknown target.
            FileNotFoundError: the compiler is not installed; says how to install it.
            RuntimeError: the child ended before it was done; with the end of its output.
        """
        if target not in self.targets:
            raise ValueError(f"target={target!r} is not one of {', '.join(self.targets)}")
        cases = list(cases)
        with tempfile.TemporaryDirectory() as dump:
            variables = self.variables(dump) | {DUMP_VARIABLE: dump}
            child = subprocess.run(
                [sys.executable, "-m", f"pallas_kernels.aot.{self.back_end}_compiler", target],
                env=os.environ | variables,
                input=json.dumps([dataclasses.asdict(case) for case in cases]),
                capture_output=True,
                text=True,
            )
        lines = [line for line in child.stdout.splitlines() if line.startswith('{"case"')]
        if len(lines) != len(cases):
            raise RuntimeError(
                f"the compiler for {target} ended with status {child.returncode} after "
                f"{len(lines)} of {len(cases)} cases: {child.stderr[-2000:]}"
            )
        return [json.loads(line) for line in lines]

    def measure(self, target: str) -> dict[str, dict[str, Any]]:
        """Resources of every case of the table by its name, or its error instead."""
        results = zip(self.cases, self.compile(target, self.cases.values()), strict=True)
        return {
            name: {key: row[key] for key in (("error",) if row["error"] else self.resources)}
            for name, row in results
        }

    def main(self) -> None:
        """Does what the module says, in the parent or in the child."""
        parser = argparse.ArgumentParser()
        parser.add_argument("target", choices=list(self.targets))
        parser.add_argument("--budgets", action="store_true")
        arguments = parser.parse_args()
        if arguments.budgets:
            self._write_budgets(arguments.target)
            return
        cases = [Case(**fields) for fields in json.load(sys.stdin)]
        if DUMP_VARIABLE not in os.environ:
            for result in self.compile(arguments.target, cases):
                print(json.dumps(result))
            return
        dump = pathlib.Path(os.environ[DUMP_VARIABLE])
        for case in cases:
            result = {"case": dataclasses.asdict(case), "error": None}
            try:
                result |= self.compile_here(arguments.target, case, dump)
            except Exception as error:  # Any compiler error is this case's result.
                result["error"] = f"{type(error).__name__}: {error}"[:1500]
            print(json.dumps(result), flush=True)
            for file in dump.iterdir():
                file.unlink()

    def _write_budgets(self, target: str) -> None:
        """Measures a target and puts its rows into the table, one case per line."""
        targets = []
        found = self.budgets() | {self.key(target): self.measure(target)}
        for name, rows in sorted(found.items()) if self.is_by_jax else found.items():
            lines = (f"    {json.dumps(case)}: {json.dumps(row)}" for case, row in rows.items())
            targets.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
        self.table.write_text("{\n" + ",\n".join(targets) + "\n}\n")


def compiler_folder(variable: str, default: str, package: str) -> pathlib.Path:
    """The folder in which a compiler was installed.

    Args:
        variable: the environment variable that names the folder.
        default: the folder if the variable is not set; ends in the name of the back end.
        package: the package that has to be in the folder.

    Raises:
        FileNotFoundError: the compiler is not there; the message says how to install it.
    """
    folder = pathlib.Path(os.environ.get(variable, default)).absolute()
    if not (folder / package).is_dir():
        raise FileNotFoundError(
            f"no {package} in {folder}; run `make test-aot`, which installs it, or `python -m "
            f"pallas_kernels.aot.install {default.rpartition('_')[2]} {default}`; if it is "
            f"elsewhere, name its folder in {variable}"
        )
    return folder
