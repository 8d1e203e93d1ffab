# SPDX-License-Identifier: Apache-2.0
"""`make docs`: every page is in the navigation, and references are what the code is."""

import ast
import contextlib
import dataclasses
import importlib.util
import re
import subprocess
import sys
import types

import pytest
import yaml

from switchx.fields import fits
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
        rows = [
            re.split(r" (?<!\\)\| ", line[2:]) for line in part.splitlines() if "| `" in line
        ]
        fields = [field for field in dataclasses.fields(cls) if field.init]
        assert [row[0] for row in rows] == [f"`{field.name}`" for field in fields]
        for (_, kind, default, *_), field in zip(rows, fields, strict=True):
            assert (default == "required") == (
                field.default is field.default_factory is dataclasses.MISSING
            )
            if isinstance(field.default, int | float | str | None):
                assert ast.literal_eval(default.strip("`")) == field.default
            if isinstance(field.type, type) and not hasattr(field.type, "__origin__"):
                assert kind == f"`{field.type.__name__}`"
        _, meanings = site.documented(cls)
        assert [field.name for field in dataclasses.fields(cls) if field.name not in meanings
                and field.init] == [], cls  # fmt: skip
    _, meanings = site.documented(RouterConfig)
    assert meanings["num_selected"].startswith("k, the number of experts")


def test_rows_of_the_gin_page_are_what_gin_sets(site):
    rows = set(site.gin_page().splitlines())
    for row in (
        "| `num_experts` | `int` | required |",
        "| `capacity_factor` | `float` | `1.25` |",
        "| `kind` | `Literal['top_k', 'expert_choice', 'hash', 'task']` | `'top_k'` |",
        "| `base` | `str \\| PathLike` | required |",
        "| `switch` | `SwitchConfig \\| None` | `None` |",
        "| `dataset` | `str` | required |",  # of downstream.task
        "| `LEARNING_RATE` | ",
    ):
        assert any(each.startswith(row) for each in rows), row


def test_bindings_in_the_text_of_pages_are_of_fields_and_fit_them(site):
    """`Class.field`, `Class.field=VALUE` and `field=VALUE`; snippets have their own test."""
    types_of = {
        cls.__name__: {
            field.name: field.type for field in dataclasses.fields(cls) if field.init
        }
        for cls in site.configured_classes()
    }
    wrong, with_values = [], 0
    for page in WRITTEN:
        for code in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")):
            binding = re.fullmatch(r"(?:--gin\.)?(?:(\w+)\.)?(\w+)(?: ?= ?(.+))?", code)
            name, field, value = binding.groups() if binding else (None, None, None)
            owners = [name] if name else [each for each in types_of if field in types_of[each]]
            if owners == [] or name and name not in types_of:
                continue
            hints = [types_of[each][field] for each in owners if field in types_of[each]]
            with contextlib.suppress(ValueError, SyntaxError):  # a letter stands for any value
                given = ast.literal_eval(re.sub(r"^'(.*)'$", r"\1", value)) if value else None
                with_values += value is not None
                hints = [hint for hint in hints if value is None or fits(given, hint)]
            wrong += [] if hints else [f"{page.name}: {code}"]
    assert wrong == [] and with_values > 15


def test_a_link_to_nothing_ends_the_build(site):
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="training.md"))
    config = types.SimpleNamespace(repo_url="https://host")
    files = types.SimpleNamespace(get_file_from_path=lambda path: None)

    def moved(text):
        return site.on_page_markdown(text, page=page, config=config, files=files)

    code = "switchx/training/loop.py"
    assert moved(f"[a](../{code})") == f"[a](https://host/blob/main/{code})"
    with pytest.raises(FileNotFoundError, match=r"docs/training.md links to ../no.py"):
        moved("[a](../no.py)")


WRITTEN = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/**/README.md")]


def anchors(page) -> set[str]:
    """Of the headings, as GitHub and mkdocs name them, and those that a page has itself."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text), re.M)
    slugs = (re.sub(r"[^\w\- ]", "", title.strip().lower()) for title in titles)
    return {slug.replace(" ", "-") for slug in slugs} | set(re.findall(r' id="([^"]+)"', text))


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_are_there(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    links = re.findall(r"\]\((?![a-z]+:)([^)\s#]*)(?:#([^)\s]+))?\)", text)
    dead = []
    for target, anchor in links:
        there = page.parent / target if target else page
        there = there / "README.md" if anchor and there.is_dir() else there
        if not there.exists() or (
            anchor and there.suffix == ".md" and anchor not in anchors(there)
        ):
            dead.append(f"{target}#{anchor}")
    assert dead == []


@pytest.mark.slow
def test_the_site_is_built_without_a_dead_link(site, tmp_path):
    pytest.importorskip("mkdocs", reason="needs mkdocs, of the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = (tmp_path / "reference/commands/index.html").read_text(encoding="utf-8")
    assert "switchx train" in said and "--model_dir" in said
    links = (tmp_path / "training/index.html").read_text(encoding="utf-8")
    assert "/blob/main/switchx/training/loop.py" in links
