# SPDX-License-Identifier: Apache-2.0
"""`make docs`: every page is in the navigation, and references are what the code is."""

import dataclasses
import importlib.util
import re
import subprocess
import sys

import pytest
import yaml

from switchx.moe.config import RouterConfig
from switchx.training.job import TrainingJob
from tests.processes import ROOT


class _Loader(yaml.SafeLoader):
    """A loader that reads the names of Python objects as texts."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *name: name[1])
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)


def pages_of(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, dict) else nav
    return [page for item in items for page in pages_of(item)]


def test_every_page_stands_once_in_the_navigation():
    there = {path.name for path in (ROOT / "docs").glob("*.md")}
    pages = pages_of(CONFIG["nav"])
    moved = {"index.md", "changelog.md", "contributing.md"}
    assert sorted(pages) == sorted(there | moved)


def test_pages_have_at_most_25000_words_that_are_written_by_hand():
    """What commands and tests make stands between two marks."""
    words = 0
    for path in (ROOT / "docs").glob("*.md"):
        page = path.read_text(encoding="utf-8")
        assert page.count("<!-- made of ") == page.count("<!-- end -->"), path
        by_hand = re.sub(r"<!-- made of .*?<!-- end -->", "", page, flags=re.DOTALL)
        words += len(by_hand.split())
    assert words <= 25_000


@pytest.fixture(scope="module")
def site():
    pytest.importorskip("mkdocs", reason="needs mkdocs, of the extra docs")
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs/site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gin_page_has_the_parameters_of_the_dataclasses(site):
    classes = site.configured_classes()
    assert {TrainingJob, RouterConfig} <= set(classes)
    page = site.gin_page()
    for cls in classes:
        part = page.partition(f"## {cls.__name__}\n\n`{cls.__module__}`")[2].partition("\n## ")[
            0
        ]
        rows = [line.split("|")[1].strip() for line in part.splitlines() if line[:3] == "| `"]
        assert rows == [f"`{field.name}`" for field in dataclasses.fields(cls) if field.init]
        _, meanings = site.documented(cls)
        assert [field.name for field in dataclasses.fields(cls) if field.name not in meanings
                and field.init] == [], cls  # fmt: skip
    _, meanings = site.documented(RouterConfig)
    assert meanings["num_selected"].startswith("k, the number of experts")


@pytest.mark.slow
def test_the_site_is_built_without_a_dead_link(site, tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = (tmp_path / "reference/commands/index.html").read_text(encoding="utf-8")
    assert "switchx train" in said and "--model_dir" in said
    links = (tmp_path / "training/index.html").read_text(encoding="utf-8")
    assert "/blob/main/switchx/training/loop.py" in links
