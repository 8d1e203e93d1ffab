# SPDX-License-Identifier: Apache-2.0
"""The layout: which module imports which, no cycles, sizes, headers, paths.

`python -m tests.test_architecture` prints the picture for docs/architecture.md.
"""

import ast
import graphlib
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]

# `a: (b, c)`: a imports b, c and whatever stands below them. A row of its own for one file
# of a package means that others may import that file and not the package.
ALL = "everything"
ARROWS = {
    "pallas_kernels": (),
    "axes": (),
    "tree": (),
    "own_code": (),
    "npz": ("fields", "object_store"),
    "characters": (),
    "fields": ("own_code",),
    "distributed": (),
    "files": (),
    "malloc": ("fields",),
    "object_store": (),
    "whole_folders": ("tree", "object_store"),
    "partitioning": ("axes", "tree", "fields"),
    "pipeline": ("partitioning",),
    "pipeline.schedule": ("fields",),
    "storage": ("whole_folders", "npz", "fields", "files"),
    "storage.cache": ("fields",),
    "data": ("axes", "fields", "files", "object_store", "characters"),
    "optim": ("axes", "tree", "fields", "partitioning"),
    "layers": ("axes", "partitioning", "pallas_kernels"),
    "moe": ("layers", "partitioning", "pallas_kernels"),
    "moe.dispatcher_traits": (),
    "moe.config": ("fields", "moe.dispatcher_traits"),
    "moe.stats": ("axes", "tree"),
    "moe.load_evenness": (),
    "routing_record": ("moe", "fields"),
    "models": ("moe", "layers", "partitioning", "pipeline"),
    "models.config": ("moe.config", "fields"),
    "hardware": ("fields",),
    "models.flops": ("models.config",),
    "models.stored_experts": ("models.config",),
    "inference.offload.copy_times": ("models.flops", "hardware"),
    "planner": (
        *("models.flops", "models.stored_experts", "inference.offload.copy_times"),
        *("pipeline", "partitioning"),
    ),
    "interop": ("models", "tree", "whole_folders", "data"),
    "analysis": ("routing_record", "moe", "pipeline.schedule", "npz"),
    "checkpoint": ("partitioning", "tree", "whole_folders", "storage", "models", "data"),
    "training": (
        *("models", "moe", "data", "optim", "checkpoint", "tree", "routing_record"),
        "malloc",
    ),
    "inference": (
        *("models", "moe", "layers", "checkpoint", "hardware", "tree", "storage"),
        "routing_record",
    ),
    "gin_config": ("training",),
    "progress": ("training",),
    "shipped": (),
    "api": ("gin_config", "training", "inference", "interop", "analysis", "shipped"),
    "generated_evaluation": ("api",),
    "routing_atlas": ("api", "analysis", "progress"),
    "results": ("fields", "whole_folders", "malloc"),
    "compiled": ("training", "planner", "results"),
    "deploy": ("api", "compiled"),
    "serving": ("api", "inference"),
    "client": (),
    "bench": (
        *("api", "training", "inference", "interop", "analysis", "serving", "whole_folders"),
        *("client", "compiled"),
    ),
    "cli": (ALL,),
    "harness": ("api", "gin_config"),
    "jobs": ("generated_evaluation", "progress"),
    "sweep": ("jobs",),
    "model_evaluation": ("generated_evaluation", "progress"),
    "__init__": ("api", "jobs", "model_evaluation"),
    "__main__": ("cli", "own_code"),
}

# Modules of others that only these files import: Flax where parameters are owned, gin at the
# edge, PyTorch in processes that `bench` starts beside ours.
ONLY_IN = {
    "flax": (
        "switchx/layers/",
        "switchx/moe/layer.py",
        "switchx/moe/experts.py",
        "switchx/moe/attention.py",
        "switchx/models/",
        "switchx/interop/t5x.py",
        # Layers of others, which are modules of Flax.
        "switchx/bench/peers/layers.py",
    ),
    "gin": ("switchx/gin_config/",),
    "matplotlib": tuple(
        f"switchx/analysis/{name}.py" for name in ("plots", "comparison_plots", "atlas_picture")
    ),
    "tensorflow_datasets": ("switchx/data/",),
    "tensorflow": (),
    "torch": ("switchx/bench/peers/torch_peer.py",),
    "transformers": ("switchx/bench/peers/torch_peer.py",),
    "starlette": ("switchx/serving/",),
    "uvicorn": ("switchx/serving/",),
    "prometheus_client": ("switchx/serving/",),
    "httpx2": ("switchx/client.py",),
    "ctranslate2": ("switchx/bench/peers/ctranslate2_peer.py",),
    "flaxformer": ("switchx/bench/peers/layers.py",),
    "maxtext": ("switchx/bench/peers/layers.py",),
    "wandb": ("switchx/training/telemetry/metric_writers.py",),
    "tests": (),
    "experiments": (),
}

MAX_FUNCTION_LINES = 80
SPDX = "# SPDX-License-Identifier: Apache-2.0"

# Spelt in pieces, so that this file does not offend.
UNFINISHED = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "XX" + r"X\b"]))
_FOLDERS = ("wo" + "rk/", "ro" + "ot/", "opt/", "mnt/", r"(?:home|Users)/(?!someone\b|user\b)")
MACHINE_PATH = re.compile(rf"(?<![\w.~])/(?:{'|'.join(_FOLDERS)})")

FOUND = [*ROOT.glob("switchx/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]
# `pip install ./pallas_kernels` leaves a copy there.
PATHS = sorted(path for path in FOUND if "build" not in path.relative_to(ROOT).parts)
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in PATHS}
MODULES = {
    path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in TREES
}


def imported_modules(tree: ast.Module, modules=MODULES) -> set[str]:
    """Modules that a file imports anywhere in it; `from a import b` is a.b where a.b is one."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & modules.keys()) or {node.module}
    return found


IMPORTS = {module: imported_modules(TREES[path]) for module, path in MODULES.items()}


def package_of(module: str) -> str:
    """The row of ARROWS: `moe` of `switchx.moe.layer`."""
    top, *rest = module.split(".")
    return top if top == "pallas_kernels" else rest[0] if rest else "__init__"


def below(package: str) -> set[str]:
    """All that stands below a package, in ARROWS' names."""
    direct = ARROWS[package]
    if ALL in direct:
        return set(ARROWS)
    return set(direct).union(*map(below, direct))


def test_arrows():
    wrong = []
    for module, imports in IMPORTS.items():
        package = package_of(module)
        allowed = below(package) | {package}
        wrong += [
            f"{module} imports {other}; {package} may import {', '.join(sorted(allowed))}"
            for other in imports
            if other.split(".")[0] in ("switchx", "pallas_kernels")
            and package_of(other) not in allowed
            and other.removeprefix("switchx.") not in allowed
        ]
    assert wrong == []


# What a training step, a stack and a plain program know nothing of (docs/architecture.md).
TIERS = re.compile(
    r"offload|distillation|pipeline|expert_copies|copy_placement|programs\b|tasks"
)


def test_tiers_are_not_imported_where_their_seams_are():
    for module in ("training.step", "models.stack", "training.program"):
        assert list(filter(TIERS.search, IMPORTS[f"switchx.{module}"])) == [], module
    assert TIERS.search("switchx.training.offload.host_step")


def test_the_planner_is_a_leaf():
    importers = {
        package_of(module)
        for module, imports in IMPORTS.items()
        if any(each.startswith("switchx.planner") for each in imports)
    }
    assert importers - {"planner"} == {"cli", "deploy", "compiled"}


def test_no_cycles():
    graph = {module: imports & MODULES.keys() - {module} for module, imports in IMPORTS.items()}
    graphlib.TopologicalSorter(graph).prepare()
    graphlib.TopologicalSorter(
        {package: set(direct) - {ALL} for package, direct in ARROWS.items()}
    ).prepare()
    assert "inference" not in below("training") and "training" not in below("inference")


def test_experiments_have_no_cycles():
    trees = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
        for path in ROOT.glob("experiments/**/*.py")
    }
    assert {"experiments.study", "experiments.pretrained"} <= trees.keys()
    graph = {module: imported_modules(tree, trees) for module, tree in trees.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_modules_of_others_are_imported_in_their_places():
    wrong = [
        f"{path} imports {other}; only {', '.join(ONLY_IN[top]) or 'nothing'} may"
        for module, path in MODULES.items()
        for other in IMPORTS[module]
        if (top := other.split(".")[0]) in ONLY_IN and not path.startswith(ONLY_IN[top])
    ]
    assert wrong == []


def names_at_the_top(tree: ast.Module) -> set[str]:
    """Names that a module has once it is imported."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(each.asname or each.name).partition(".")[0] for each in node.names}
    return found


def test_what_is_taken_of_a_module_is_there():
    """A part for a card is run on none here: a name that was moved away is found before."""
    has = {module: names_at_the_top(TREES[path]) for module, path in MODULES.items()}
    wrong = []
    for path, tree in TREES.items():
        imported, stored = {}, set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for each in node.names:
                    whole = f"{node.module}.{each.name}"
                    if whole in has:
                        imported[each.asname or each.name] = whole
                    elif node.module in has and each.name not in has[node.module]:
                        wrong.append(f"{path}:{node.lineno} {whole}")
            elif isinstance(node, ast.arg):
                stored.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                stored.add(node.id)
        wrong += [
            f"{path}:{node.lineno} {imported[node.value.id]}.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if (name := node.value.id) in imported and name not in stored
            if node.attr not in has[imported[name]]
            and not node.attr.startswith("__")
            and f"{imported[name]}.{node.attr}" not in has
        ]
    assert wrong == []


def test_no_function_takes_the_place_of_another():
    """A linter sees it only where nothing stands between them that calls the first."""
    for path, tree in TREES.items():
        for scope in ast.walk(tree):
            plain = [
                each.name for each in ast.iter_child_nodes(scope)
                if isinstance(scope, ast.Module | ast.ClassDef)
                and isinstance(each, ast.FunctionDef) and not each.decorator_list
            ]  # fmt: skip
            assert len(plain) == len({*plain}), (path, sorted(plain))


def test_sizes_and_headers():
    wrong = []
    for path, tree in TREES.items():
        wrong += [
            f"{path}:{node.lineno} {node.name} has more than {MAX_FUNCTION_LINES} lines"
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and lines_of_code(node) > MAX_FUNCTION_LINES
        ]
    assert wrong == []
    wrong = [
        path
        for path, tree in TREES.items()
        if (ROOT / path).read_text().partition("\n")[0] != SPDX
        or not (path.endswith("__init__.py") or ast.get_docstring(tree))
    ]
    assert wrong == []


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without the docstring."""
    docstring = ast.get_docstring(function, clean=False)
    return function.end_lineno - function.lineno + 1 - len((docstring or "").splitlines())


def test_nothing_is_unfinished_or_bound_to_a_machine():
    folders = ("switchx", "pallas_kernels", "tests", "configs", "experiments", "docs", ".ci")
    paths = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*")]
    suffixes = (".py", ".gin", ".md", ".cfg", ".toml", ".json", ".ipynb")
    wrong = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in [*paths, *ROOT.glob("*")]
        if "unfinished" not in path.parts  # runs of experiments, where they go on
        if path.is_file() and (path.suffix in suffixes or path.name in ("Makefile", "run"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if UNFINISHED.search(line) or MACHINE_PATH.search(line)
    ]
    assert wrong == []


def test_no_test_module_is_imported_by_another():
    """What tests share is a fixture, or stands in a file that is no test."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in ROOT.glob("tests/**/*.py")
    }
    wrong = []
    for module, path in paths.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = imported_modules(tree, paths)
        for node in ast.walk(tree):  # programs of child processes are strings
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                imported.update(re.findall(r"(?:from|import) (tests\.[\w.]+)", node.value))
        wrong += [
            f"{module} imports {other}; move what they share to a file that is no test"
            for other in imported - {module}
            if other.rpartition(".")[2].startswith("test_")
        ]
    assert wrong == []


def drawing() -> str:
    """The packages and their arrows, those left out that follow from others (Mermaid)."""
    graph = {package_of(module): set() for module in MODULES}
    for module, imports in IMPORTS.items():
        ours = {package_of(other) for other in imports if other in MODULES}
        graph[package_of(module)] |= ours - {package_of(module)}

    def reachable(package):
        return graph[package].union(*map(reachable, graph[package]))

    lines = ["graph TD"]
    for package in sorted(graph.keys() - {"__init__", "__main__"}):
        indirect = set().union(*map(reachable, graph[package]))
        lines += [f"    {package} --> {other}" for other in sorted(graph[package] - indirect)]
    return "\n".join(lines)


PAGE = ROOT / "docs/architecture.md"


def test_the_picture_is_what_the_imports_are():
    (picture,) = re.findall(r"```mermaid\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert picture == drawing(), "python -m tests.test_architecture prints the picture of today"


def defined_in(path: pathlib.Path) -> set[str]:
    """Classes, functions, their methods and fields, and constants of a Python file."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else []
        for each in [node, *inner]:
            targets = getattr(each, "targets", [getattr(each, "target", each)])
            found = {getattr(target, "id", getattr(target, "name", None)) for target in targets}
            names |= found if each is node else {f"{node.name}.{name}" for name in found}
    return names


def test_questions_have_their_answers_where_the_page_says():
    section = PAGE.read_text().partition("\n## Where would I ...\n")[2].partition("\n## ")[0]
    _, *rows = re.findall(r"^\| (\w.*?) \| (.*?) \|$", section, re.MULTILINE)
    assert len(rows) >= 15
    for question, answer in rows:
        symbols = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/.]+)\)", answer)
        assert symbols, question
        for symbol, file in symbols:
            assert (ROOT / file).exists(), file
            if file.endswith(".py"):
                assert symbol in defined_in(ROOT / file), f"{symbol} in {file}"


def test_links_of_pages_lead_to_the_files_that_they_name():
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        text = page.read_text()
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", text):
            assert (page.parent / link).exists(), f"{link} in {page.name}"
        for label, link in re.findall(r"\[`?([\w/]+\.py)`?\]\(([^)#]+\.py)\)", text):
            assert link.endswith(label), f"[{label}]({link}) in {page.name}"


if __name__ == "__main__":
    print(drawing())
