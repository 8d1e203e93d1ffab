# SPDX-License-Identifier: Apache-2.0
"""The rules of the house, as functions from sources to what offends in them.

An offence is one line, as a person would want to read it. `ARROWS` is the map of the
packages: whoever adds a package adds its row. `test_architecture.py` applies the rules, and
shows that each is able to fail.
"""

import ast
import dataclasses
import functools
import graphlib
import pathlib
import re
from collections.abc import Iterable

SPDX = "# SPDX-License-Identifier: Apache-2.0"

# `a: (b, c)`: a imports b, c and whatever stands below them. A row of its own for one file
# of a package means that others may import that file and not the package.
ALL = "everything"
ARROWS = {
    "pallas_kernels": (),
    "axes": (),
    "tree": (),
    "partitioning": ("axes", "tree"),
    "hosts": (),
    "partitioning.schedule": (),
    "storage": ("partitioning", "tree"),
    "data": ("axes",),
    "layers": ("axes", "partitioning", "pallas_kernels"),
    "moe": ("layers", "partitioning", "pallas_kernels"),
    "moe.stats": ("axes", "tree"),
    "models": ("moe", "layers", "partitioning"),
    "models.config": (),
    "planner": ("models.config", "partitioning"),
    "interop": ("models", "tree"),
    "analysis": ("moe.stats", "partitioning.schedule"),
    "training": ("models", "moe", "data", "storage", "planner", "tree"),
    "inference": ("models", "moe", "layers", "storage", "planner", "tree"),
    "api": ("training", "inference", "interop", "analysis"),
    "text_evaluation": ("api",),
    "serving": ("api", "inference"),
    "bench": ("training", "inference", "interop", "analysis", "serving"),
    "cli": (ALL,),
    "__init__": ("api",),
    "__main__": ("cli",),
}

# Modules of others that only these may import; `switchx/x/` is a package, `.py` one file.
# PyTorch is what we measure ourselves against, in a process of its own.
ONLY_IN = {
    # Modules that own parameters; everything else is pure functions. T5X's index is Flax's.
    "flax": (
        "switchx/layers/",
        "switchx/moe/layer.py",
        "switchx/moe/experts.py",
        "switchx/moe/layer.py",
        "switchx/moe/attention.py",
        "switchx/models/",
        "switchx/interop/t5x_folder.py",
    ),
    "gin": ("switchx/cli/",),
    "matplotlib": ("switchx/analysis/plots.py", "switchx/analysis/plots.py"),
    "tensorflow_datasets": ("switchx/data/",),
    "tensorflow": (),
    # A program that the bench starts beside ours to compare with; nothing imports it.
    "torch": ("switchx/bench/torch_program.py", "switchx/bench/torch_generate_program.py"),
    "transformers": (
        "switchx/bench/torch_program.py",
        "switchx/bench/torch_generate_program.py",
    ),
    # HTTP; its extra need not be installed for anything else.
    "starlette": ("switchx/serving/",),
    "uvicorn": ("switchx/serving/",),
    "prometheus_client": ("switchx/serving/",),
    # A peer that whoever has it may measure beside ours.
    "flaxformer": ("switchx/bench/flaxformer_layer.py",),
    "tests": (),
    "experiments": (),
}

VAGUE = re.compile(r"^(utils?|common|helpers?|base|misc|lib|tools)$|_(utils?|lib|helpers?)$")
MAX_LINES = {"switchx": 400, "pallas_kernels": 500}
MAX_FUNCTION_LINES = 80

# Spelt in pieces so that this file does not offend.
UNFINISHED = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "XX" + r"X\b"]))
# Fictional people may live in a test's paths.
_FOLDERS = ("wo" + "rk/", "ro" + "ot/", "opt/", "mnt/", r"(?:home|Users)/(?!someone\b|user\b)")
MACHINE_PATH = re.compile(rf"(?<![\w.~])/(?:{'|'.join(_FOLDERS)})")


@dataclasses.dataclass(frozen=True)
class Source:
    """A file: its path from the top of the repository, with slashes, and its text."""

    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def module(self) -> str:
        """`switchx/moe/layer.py` -> `switchx.moe.layer`, `.../__init__.py` -> the package."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_init(self) -> bool:
        return self.path.endswith("__init__.py")


def imported_modules(source: Source, known: Iterable[str]) -> set[str]:
    """Modules that a file imports anywhere in it, `from a import b` as a.b where a.b is one."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in known else node.module)
        elif (
            isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
        ):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__"):
                found.add(str(node.args[0].value))
    return found


def modules_of(sources: Iterable[Source]) -> set[str]:
    return {source.module for source in sources}


def room_of(module: str) -> str:
    """The row of ARROWS a module belongs to: its package, `moe` of `switchx.moe.layer`."""
    parts = module.split(".")
    if parts[0] == "pallas_kernels":
        return "pallas_kernels"
    return parts[1] if len(parts) > 1 else "__init__"


def below(room: str) -> set[str]:
    """All that stands below a room, in ARROWS' names."""
    direct = ARROWS.get(room, ())
    if ALL in direct:
        return set(ARROWS)
    return set(direct).union(*(below(other) for other in direct))


def wrong_arrows(sources: Iterable[Source]) -> list[str]:
    known, offences = modules_of(sources), []
    for source in sources:
        room = room_of(source.module)
        if room not in ARROWS:
            offences.append(f"{source.path}: {room} has no row in ARROWS; add one")
            continue
        allowed = below(room) | {room}
        for module in sorted(imported_modules(source, known)):
            if module.split(".")[0] not in ("switchx", "pallas_kernels"):
                continue
            file = module.partition(".")[2]
            if room_of(module) not in allowed and file not in allowed:
                names = ", ".join(sorted(allowed - {room})) or "nothing of ours"
                offences.append(f"{source.path} imports {module}; {room} may import {names}")
    return offences


def import_cycles(sources: Iterable[Source]) -> list[str]:
    known = modules_of(sources)
    graph = {s.module: (imported_modules(s, known) & known) - {s.module} for s in sources}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def wrong_places(sources: Iterable[Source]) -> list[str]:
    return [
        f"{source.path} imports {module}; only {', '.join(ONLY_IN[top]) or 'nothing'} may"
        for source in sources
        for module in sorted(imported_modules(source, ()))
        if (top := module.split(".")[0]) in ONLY_IN and not source.path.startswith(ONLY_IN[top])
    ]


def roundabout_imports(sources: Iterable[Source]) -> list[str]:
    """Relative imports, and imports that only a type checker sees."""
    offences = []
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                offences.append(f"{source.path}:{node.lineno} imports relatively")
            if isinstance(node, ast.Name | ast.alias) and "TYPE_CHECKING" in (
                getattr(node, "id", ""), getattr(node, "name", "")
            ):  # fmt: skip
                offences.append(f"{source.path}:{node.lineno} hides an import in TYPE_CHECKING")
    return offences


def oversized(sources: Iterable[Source]) -> list[str]:
    offences = []
    for source in sources:
        cap, lines = MAX_LINES[source.path.split("/")[0]], source.text.count("\n")
        if lines > cap:
            offences.append(f"{source.path} has {lines} lines; the cap is {cap}: split it")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    offences.append(
                        f"{source.path}:{node.lineno} {node.name} has {lines} lines; the cap "
                        f"is {MAX_FUNCTION_LINES}: split it"
                    )
    return offences


def missing_headers(sources: Iterable[Source]) -> list[str]:
    """Python files without the licence line; those of the packages without their concept."""
    offences = []
    for source in sources:
        if source.text and source.text.partition("\n")[0] != SPDX:
            offences.append(f"{source.path} does not start with {SPDX!r}")
        is_test = source.path.startswith("tests/")
        if not (is_test or source.is_init) and not ast.get_docstring(source.tree):
            offences.append(f"{source.path} has no docstring that says its concept")
    return offences


def vague_names(paths: Iterable[str]) -> list[str]:
    return [
        f"{path}: {part!r} says nothing; name the concept"
        for path in paths
        for part in pathlib.PurePosixPath(path).with_suffix("").parts
        if VAGUE.search(part)
    ]


def unmirrored(package_paths: Iterable[str], test_paths: Iterable[str]) -> list[str]:
    """Package files without their test file.

    `switchx/moe/layer.py` has `tests/moe/test_layer.py`; the implementations of a kernel,
    `pallas_kernels/<op>/*.py`, may share `tests/kernels/test_<op>.py`.
    """
    tests, offences = set(test_paths), []
    for path in map(pathlib.PurePosixPath, package_paths):
        if path.stem == "__init__":
            continue
        top, *folders = path.parts[:-1]
        where = ["tests", *(["kernels"] if top == "pallas_kernels" else []), *folders]
        expected = ["/".join([*where, f"test_{path.stem}.py"])]
        if top == "pallas_kernels" and folders:
            expected.append(f"tests/kernels/test_{folders[0]}.py")
        if not tests & set(expected):
            offences.append(f"{path} has no {' or '.join(expected)}")
    return offences


def unfinished_or_local(texts: Iterable[Source]) -> list[str]:
    return [
        f"{text.path}:{number} {what}: {line.strip()}"
        for text in texts
        for number, line in enumerate(text.text.splitlines(), 1)
        for pattern, what in ((UNFINISHED, "is unfinished"), (MACHINE_PATH, "names a machine"))
        if pattern.search(line)
    ]
