# SPDX-License-Identifier: Apache-2.0
"""The parts of `check accelerator`, in the order of the decisions that depend on them.

A part is a generator of rows in a process of its own, so that one that hangs, or leaves the
card unusable, takes nothing with it: `python -m switchx.bench.accelerator.parts SETTINGS` runs
one, and prints each row as a line of JSON when it is measured.
"""

import dataclasses
import hashlib
import importlib
import importlib.metadata
import json
import math
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[3]
ROW = "row "
# The part that runs the tests that no other part ran.
REST = "all_kernel_tests"


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the measurements, which runs in one process.

    Attributes:
        seconds: seconds that it may take, including the start of its process.
        decides: the decision that depends on it.
        run: `module:function` of a function that takes a `Session` and yields rows.
        sources: files and folders whose code it measures.
        goes_on: whether the next call keeps the cases of a part that was ended, and measures
            the others; otherwise it begins anew.
        is_asked: whether it runs only if it is named.
    """

    name: str
    seconds: int
    decides: str
    run: str
    sources: tuple[str, ...]
    goes_on: bool = False
    is_asked: bool = False

    @property
    def code(self) -> str:
        """16 hex digits that change with the code that it measures, its own, and JAX."""
        module = self.run.partition(":")[0].replace(".", "/")
        digest = hashlib.sha256(importlib.metadata.version("jax").encode())
        for source in sorted({*self.sources, f"{module}.py"}):
            path = ROOT / source
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
        return digest.hexdigest()[:16]


_HERE, _OWN = "switchx.bench.accelerator", "switchx/bench/accelerator"
_KERNELS = ("pallas_kernels",)
_MODEL = (
    *_KERNELS,
    *("switchx/layers", "switchx/models", "switchx/moe", "switchx/partitioning"),
    "switchx/bench/peers/torch_peer.py",
)
_DECODING = (*_MODEL, "switchx/inference")
_TESTS = (*_KERNELS, "tests/kernels")
PARTS = (
    Part("card", 15, "the floor of a kernel; the schedule into the kernel if above 3 us",
         f"{_HERE}.kernels:card", _KERNELS),
    Part("profile", 45, "prepacked weights, the fence, or the prefetch first",
         f"{_HERE}.profile:profile", (*_KERNELS, f"{_OWN}/kernels.py")),
    Part("variants", 100, "what bounds few rows (docs/kernels.md)",
         f"{_HERE}.kernels:variants_of_kernels", _KERNELS, goes_on=True),
    Part("kernel_tests", 120, "whether the kernels may be released",
         f"{_HERE}.kernel_tests:first", _TESTS, goes_on=True),
    Part("triton", 25, "whether Triton's kernels stay on Hopper",
         f"{_HERE}.kernel_tests:triton", (*_TESTS, f"{_OWN}/kernels.py"), goes_on=True),
    Part("training", 240, "the default dispatcher on GPUs",
         f"{_HERE}.training:training",
         (*_MODEL, "switchx/training", "switchx/optim", "switchx/bench/train.py"),
         goes_on=True),
    Part("decoding", 120, "options of the compiler by default; a path for batch 1",
         f"{_HERE}.decoding:decoding", (*_DECODING, f"{_OWN}/training.py"), goes_on=True),
    Part("export", 20, "whether exports, slots and the host ring are claimed for GPUs",
         f"{_HERE}.decoding:export",
         (*_DECODING, f"{_OWN}/training.py", "switchx/bench/offload.py", "switchx/storage")),
    Part(REST, 480, "whether the kernels may be released, the whole of it",
         f"{_HERE}.kernel_tests:rest", _TESTS, goes_on=True),
    Part("ladder", 130, "what experts are worth at the sizes of a card (experiments/README.md)",
         f"{_HERE}.ladder:ladder", (*_MODEL, "switchx/training", "switchx/optim"),
         goes_on=True, is_asked=True),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Session:
    """The arguments of a part.

    Attributes:
        is_rehearsal: whether it runs tiny shapes on a CPU, through the same code.
        output: the folder of the run.
        done: cases that need not be measured again.
        rates: rates that the part `card` measured, by name; empty before it ran.
        limit_s: seconds after which the part is ended.
        ladder: the file of cells that the part `ladder` trains.
    """

    is_rehearsal: bool
    output: pathlib.Path
    done: frozenset[str] = frozenset()
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    limit_s: float = math.inf
    ladder: str | None = None

    def is_wanted(self, case: str) -> bool:
        return case not in self.done

    def sized(self, on_card: Any, in_rehearsal: Any) -> Any:
        return in_rehearsal if self.is_rehearsal else on_card


def row(case: str, measured: float | str | None, unit: str, **more: Any) -> dict[str, Any]:
    """A measured row. `measured` is None where `why` says why there is no number."""
    return {"case": case, "measured": measured, "unit": unit, **more}


def main(words: list[str]) -> None:
    """Runs the part that the settings describe, and prints its rows."""
    settings = json.loads(words[0])
    module, name = settings.pop("run").split(":")
    run = getattr(importlib.import_module(module), name)
    settings["output"] = pathlib.Path(settings["output"])
    settings["done"] = frozenset(settings["done"])
    for each in run(Session(**settings)):
        print(f"{ROW}{json.dumps(each)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
