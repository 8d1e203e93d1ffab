# SPDX-License-Identifier: Apache-2.0
"""The rules of the house hold, and every rule finds what it is for."""

import functools
import graphlib
import pathlib

import pytest

from tests.house_rules import (
    ALL,
    ARROWS,
    SPDX,
    Source,
    below,
    import_cycles,
    missing_headers,
    oversized,
    roundabout_imports,
    unfinished_or_local,
    unmirrored,
    vague_names,
    wrong_arrows,
    wrong_places,
)

ROOT = pathlib.Path(__file__).parents[1]


@functools.cache
def package_sources() -> tuple[Source, ...]:
    paths = [*ROOT.glob("switchx/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]
    return tuple(
        Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(paths)
    )


@functools.cache
def all_texts() -> tuple[Source, ...]:
    """Every text of the repository that is ours; not the licence, nor runs and data."""
    folders = ("switchx", "pallas_kernels", "tests", "configs", "experiments", "docs", ".ci")
    paths = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*")]
    paths += ROOT.glob("*")
    suffixes = (".py", ".gin", ".md", ".cfg", ".toml", ".json", ".ipynb")
    names = ("Makefile", ".gitignore", "run")
    return tuple(
        Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(paths)
        if path.is_file() and (path.suffix in suffixes or path.name in names)
    )


def python_files(folder: str) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in ROOT.glob(f"{folder}/**/*.py")]


@pytest.mark.parametrize(
    "rule",
    [wrong_arrows, import_cycles, wrong_places, roundabout_imports, oversized],
)
def test_packages_keep(rule):
    assert rule(package_sources()) == []


def test_python_files_have_licence_and_concept():
    assert missing_headers(text for text in all_texts() if text.path.endswith(".py")) == []


def test_names_say_something():
    paths = [source.path for source in package_sources()] + python_files("tests")
    assert vague_names(paths) == []


def test_every_file_has_its_test():
    assert (
        unmirrored((source.path for source in package_sources()), python_files("tests")) == []
    )


def test_nothing_is_unfinished_or_bound_to_a_machine():
    assert unfinished_or_local(all_texts()) == []


def test_arrows_have_no_cycle_and_the_siblings_stay_apart():
    graphlib.TopologicalSorter(
        {room: set(direct) - {ALL} for room, direct in ARROWS.items()}
    ).prepare()
    assert "inference" not in below("training")
    assert "training" not in below("inference")
    assert below("partitioning") == {"axes", "tree"}


# From here on: every rule finds what it is for.


@pytest.mark.parametrize(
    ("path", "text", "offence"),
    [
        (
            "switchx/moe/router.py",
            "import switchx.models.config",
            "moe may import axes, layers",
        ),
        ("switchx/training/loop.py", "from switchx import inference", "switchx.inference"),
        ("switchx/inference/decode.py", "from switchx.training import step", "training.step"),
        ("switchx/data/loader.py", "def f():\n    import switchx.tree", "data may import axes"),
        ("switchx/planner/search.py", "from switchx.models import stack", "models.stack"),
        ("switchx/analysis/routing.py", "from switchx.moe.layer import SwitchFFN", "moe.layer"),
        ("switchx/axes.py", "import switchx.tree", "axes may import nothing of ours"),
        ("switchx/moe/plan.py", "import switchx", "imports switchx;"),
        ("pallas_kernels/grouped_matmul/api.py", "import switchx.axes", "nothing of ours"),
        ("switchx/storage/cache.py", "importlib.import_module('switchx.cli')", "switchx.cli"),
        ("switchx/attic/box.py", "", "attic has no row in ARROWS"),
    ],
)
def test_wrong_arrow_is_found(path, text, offence):
    others = {Source(f"switchx/{name}.py", "") for name in ("models/stack", "training/step")}
    others |= {Source("switchx/inference/__init__.py", "")}
    (found,) = wrong_arrows([Source(path, text), *others])
    assert path in found
    assert offence in found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("switchx/planner/search.py", "from switchx.models.config import ModelConfig"),
        ("switchx/planner/search.py", "from switchx.models import config"),
        ("switchx/training/job.py", "from switchx.partitioning.mesh import MeshSpec"),
        ("switchx/cli/train.py", "from switchx.training.loop import train\nimport gin"),
        ("switchx/__main__.py", "from switchx.cli.main import main"),
        ("switchx/moe/experts.py", "import pallas_kernels.grouped_matmul"),
    ],
)
def test_arrows_of_the_design_are_allowed(path, text):
    assert wrong_arrows([Source(path, text), Source("switchx/models/config.py", "")]) == []


def test_import_cycle_is_found():
    sources = [
        Source("switchx/moe/a.py", "from switchx.moe import b"),
        Source("switchx/moe/b.py", "def f():\n    from switchx.moe.a import g"),
        Source("switchx/moe/__init__.py", ""),
    ]
    assert len(import_cycles(sources)) == 1
    assert import_cycles(sources[::2]) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("switchx/moe/router.py", "from flax import nnx"),
        ("switchx/training/job.py", "import gin"),
        ("switchx/analysis/routing.py", "import matplotlib.pyplot as plt"),
        ("switchx/interop/huggingface.py", "def f():\n    import torch"),
        ("switchx/bench/train.py", "from transformers import T5Config"),
        ("switchx/data/corpora/c4.py", "import tensorflow as tf"),
        ("switchx/training/loop.py", "import tensorflow_datasets as tfds"),
        ("switchx/bench/moe.py", "from experiments.switch_vs_dense import run"),
    ],
)
def test_import_in_the_wrong_place_is_found(path, text):
    assert [line.split()[0] for line in wrong_places([Source(path, text)])] == [path]


def test_import_in_its_place_is_allowed():
    assert wrong_places([Source("switchx/moe/layer.py", "from flax import nnx")]) == []


@pytest.mark.parametrize(
    "text",
    ["from . import plan", "from ..layers import ffn", "from typing import TYPE_CHECKING"],
)
def test_roundabout_import_is_found(text):
    assert len(roundabout_imports([Source("switchx/moe/router.py", text)])) == 1


def test_oversized_file_and_function_are_found():
    function = "def long():\n" + "    pass\n" * 79
    assert oversized([Source("switchx/a.py", function)]) == []
    assert "has 81 lines" in oversized([Source("switchx/a.py", function + "    pass\n")])[0]
    assert oversized([Source("switchx/a.py", "\n" * 400)]) == []
    assert "the cap is 400" in oversized([Source("switchx/a.py", "\n" * 401)])[0]
    assert oversized([Source("pallas_kernels/a.py", "\n" * 500)]) == []
    assert "the cap is 500" in oversized([Source("pallas_kernels/a.py", "\n" * 501)])[0]


@pytest.mark.parametrize(
    ("path", "text", "count"),
    [
        ("switchx/a.py", f'{SPDX}\n"""A concept."""\n', 0),
        ("switchx/a.py", f"{SPDX}\n", 1),
        ("switchx/a.py", '"""A concept."""\n', 1),
        ("switchx/moe/__init__.py", f"{SPDX}\n", 0),
        ("tests/test_a.py", f"{SPDX}\n", 0),
        ("tests/test_a.py", "import a\n", 1),
        ("tests/__init__.py", "", 0),
    ],
)
def test_missing_header_is_found(path, text, count):
    assert len(missing_headers([Source(path, text)])) == count


@pytest.mark.parametrize(
    "path",
    ["switchx/utils.py", "switchx/common/a.py", "tests/test_utils.py", "switchx/moe_lib.py"],
)
def test_vague_name_is_found(path):
    assert len(vague_names([path])) == 1


def test_file_without_its_test_is_found():
    packages = [
        "switchx/tree.py",
        "switchx/moe/layer.py",
        "switchx/__main__.py",
        "pallas_kernels/grouped_matmul/tpu.py",
        "pallas_kernels/quantized/gpu.py",
    ]
    tests = [
        "tests/test_tree.py",
        "tests/kernels/test_grouped_matmul.py",
        "tests/test_layer.py",
    ]
    assert unmirrored(packages, tests) == [
        "switchx/moe/layer.py has no tests/moe/test_layer.py",
        "switchx/__main__.py has no tests/test___main__.py",
        "pallas_kernels/quantized/gpu.py has no tests/kernels/quantized/test_gpu.py or "
        "tests/kernels/test_quantized.py",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "# TO" + "DO: later",
        "x = 1  # FIX" + "ME",
        'p = "/wo' + 'rk/main"',
        "cd /home" + "/me/x",
    ],
)
def test_unfinished_or_local_line_is_found(line):
    assert len(unfinished_or_local([Source("docs/a.md", f"fine\n{line}\n")])) == 1


def test_ordinary_lines_are_neither():
    lines = "see docs/ and experiments/run/x, https://a.org/home/b, ../shared, ~/opt/x\n"
    assert unfinished_or_local([Source("docs/a.md", lines)]) == []
