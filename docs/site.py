# SPDX-License-Identifier: Apache-2.0
"""What `make docs` adds to docs/: README.md, the experiments, and references made of the code.

mkdocs calls `on_config`, `on_files` and `on_page_markdown` (mkdocs.yml). Links that lead out of
the site, to code, lead to the repository.
"""

import argparse
import ast
import contextlib
import dataclasses
import importlib
import inspect
import os
import pathlib
import posixpath
import re
import types
import typing

ROOT = pathlib.Path(__file__).parents[1]
# Page of the site -> the file that it is, where it has another name or stands elsewhere.
MOVED = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
# Dataclasses of modules that gin files import, which say what was found and set nothing.
RESULTS = (
    *("Account", "Alarm", "CorpusSource", "MetricResult", "OpenTask", "Schedule", "SpanCounts"),
    *("StepMetrics", "TrainState", "WrittenTeacher", "RoutingStats", "Choices", "TokenSums"),
    "LossDenominators",
)
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config):
    """The experiments and the references in the navigation."""
    sections = {"Experiments": experiments(), "Reference": [*references()]}
    for entry in config.nav:
        for name, pages in sections.items():
            if name in entry:
                entry[name] = pages
    return config


def experiments() -> list[str]:
    return sorted(
        (path.relative_to(ROOT).as_posix() for path in ROOT.glob("experiments/**/README.md")),
        key=lambda name: (name.count("/"), name),
    )


def references() -> dict[str, str]:
    """Text by page."""
    pages = {"reference/commands.md": commands_page(), "reference/gin.md": gin_page()}
    for package, modules in api_modules().items():
        lines = [f"# {package}", "", *(f"::: {module}\n" for module in modules)]
        pages[f"reference/api/{package}.md"] = "\n".join(lines)
    return pages


def on_files(files, *, config):
    from mkdocs.structure.files import File  # tests read the references without mkdocs

    for name, source in MOVED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    for name in experiments():
        folder = ROOT / posixpath.dirname(name)
        for path in (ROOT / name, *folder.glob("*.svg"), *folder.glob("*.png")):
            where = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, where, abs_src_path=str(path)))
    for name, text in references().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page, config, files) -> str:
    """Links of a page as they lead from its place in the site."""
    name = page.file.src_uri
    if name.startswith("reference/"):
        return markdown
    is_ours = name in MOVED or name.startswith("experiments/")
    source = MOVED.get(name, name) if is_ours else f"docs/{name}"
    pages = {path: page for page, path in MOVED.items()}

    def moved(link: re.Match) -> str:
        target, anchor = link[2], link[3] or ""
        if re.match(r"[a-z]+:", target):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        there = pages.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(there) is None:
            if files.get_file_from_path(f"{there}/README.md") is not None:
                there = f"{there}/README.md"
            else:
                if path.startswith("..") or not (ROOT / path).exists():
                    raise FileNotFoundError(
                        f"{source} links to {target}, and there is no {path}; correct the link"
                    )
                kind = "tree" if (ROOT / path).is_dir() else "blob"
                return f"{link[1]}{config.repo_url}/{kind}/main/{path}{anchor})"
        return f"{link[1]}{posixpath.relpath(there, posixpath.dirname(name) or '.')}{anchor})"

    return _LINK.sub(moved, markdown)


def api_modules() -> dict[str, list[str]]:
    """Modules with something public to say, by package."""
    found: dict[str, list[str]] = {}
    for top in ("switchx", "pallas_kernels"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if path.name.startswith("__") or not _has_public(path):
                continue
            package = ".".join(parts[:2] if len(parts) > 2 else parts[:1])
            found.setdefault(package, []).append(".".join(parts))
    return found


def _has_public(path: pathlib.Path) -> bool:
    kinds = ast.FunctionDef | ast.ClassDef
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(
        isinstance(node, kinds) and not node.name.startswith("_") and ast.get_docstring(node)
        for node in body
    )


def commands_page() -> str:
    """Every command with its help."""
    from switchx.cli.main import COMMANDS, DESCRIPTION, _parser

    os.environ["COLUMNS"] = "96"
    parser = _parser()
    (commands,) = (
        each for each in parser._actions if isinstance(each, argparse._SubParsersAction)
    )
    assert len(commands.choices) >= len(COMMANDS)
    lines = ["# Commands", "", "```text", DESCRIPTION.strip(), "```", ""]
    for name, each in _all_commands("switchx", commands):
        lines += [f"## {name}", "", "```text", each.format_help().strip(), "```", ""]
    return "\n".join(lines)


def _all_commands(prefix: str, commands):
    for name, each in commands.choices.items():
        further = [a for a in each._actions if isinstance(a, argparse._SubParsersAction)]
        if not further:
            yield f"{prefix} {name}", each
        for action in further:
            yield from _all_commands(f"{prefix} {name}", action)


def gin_page() -> str:
    """Every parameter that gin files set, with type, default and meaning."""
    lines = [
        "# Gin parameters",
        "",
        "A gin file imports the module of a class and binds its parameters, "
        "`config.SwitchConfig.capacity_factor = 1.25`. These are the classes that "
        "configurations are made of, by their modules. `required` has no default.",
        "",
    ]
    for cls in configured_classes():
        about, meanings = documented(cls)
        lines += [f"## {cls.__name__}", "", f"`{cls.__module__}`: {about}", ""]
        fields = [field for field in dataclasses.fields(cls) if field.init]
        if not fields:
            continue
        lines += ["| parameter | type | default | meaning |", "|---|---|---|---|"]
        for field in fields:
            cells = (f"`{field.name}`", f"`{_type(field.type)}`", _default(field))
            meaning = meanings.get(field.name, "")
            lines.append(f"| {' | '.join(map(_cell, (*cells, meaning)))} |")
        lines.append("")
    for function in configured_functions():
        about, meanings = documented(function)
        lines += [f"## {function.__name__}", "", f"`{function.__module__}`: {about}", ""]
        lines += ["| parameter | type | default | meaning |", "|---|---|---|---|"]
        for each in inspect.signature(function).parameters.values():
            is_required = each.default is inspect.Parameter.empty
            default = "required" if is_required else f"`{each.default!r}`"
            cells = (f"`{each.name}`", f"`{_type(each.annotation)}`", default)
            lines.append(f"| {' | '.join(map(_cell, (*cells, meanings.get(each.name, ''))))} |")
        lines.append("")
    return "\n".join([*lines, *_macros()])


def configured_functions() -> list[types.FunctionType]:
    """Functions of ours that gin files call or bind."""
    found = set()
    for path in (ROOT / "configs").rglob("*.gin"):
        text = path.read_text(encoding="utf-8")
        imported = r"^from (switchx[\w.]*) import (\w+)(?: as (\w+))?"
        for package, module, alias in re.findall(imported, text, re.M):
            there = vars(importlib.import_module(f"{package}.{module}"))
            names = re.findall(rf"(?<![\w.]){alias or module}\.(\w+)(?:\(|\.\w+ =)", text)
            found |= {each for name in names if inspect.isfunction(each := there.get(name))}
    return sorted(found, key=lambda each: (each.__module__, each.__name__))


def _macros() -> typing.Iterator[str]:
    """A table of the names in capitals that gin files define: `--gin.NAME=VALUE` sets them."""
    values, sets = {}, {}
    for path in sorted((ROOT / "configs").rglob("*.gin")):
        text = path.read_text(encoding="utf-8")
        where = path.relative_to(ROOT / "configs").as_posix()
        for name, value in re.findall(r"^([A-Z][A-Z0-9_]*) = (.*)$", text, re.M):
            value = "(...)" if value == "(" else value.partition("  #")[0].partition(" # ")[0]
            values.setdefault(name, {}).setdefault(value, where)
        for parameter, name in re.findall(r"^([\w./]+) = %([A-Z][A-Z0-9_]*)$", text, re.M):
            found = sets.setdefault(name, [])
            found += [parameter] * (parameter not in found)
    yield from ("## Macros", "")
    yield "Names that configurations share. A later file or `--gin.NAME=VALUE` sets one again."
    yield from ("", "| macro | value, and the first file that has it | sets |", "|---|---|---|")
    for name in sorted(values):
        shown = [f"`{value}` ({where})" for value, where in values[name].items()]
        more = f"; {len(shown) - 3} other values" if len(shown) > 3 else ""
        cells = f"`{name}`", ", ".join(shown[:3]) + more
        parameters = ", ".join(f"`{each}`" for each in sets.get(name, ()))
        yield f"| {' | '.join(map(_cell, (*cells, parameters)))} |"


def configured_classes() -> list[type]:
    """Dataclasses of ours that a `TrainingJob` is made of, and those that gin files name."""
    from switchx.training.job import TrainingJob

    found: dict[type, None] = {}

    def add(value) -> None:
        for part in typing.get_args(value):
            add(part)
        is_ours = dataclasses.is_dataclass(value) and value.__module__.startswith("switchx.")
        if not inspect.isclass(value) or not is_ours or value in found:
            return
        found[value] = None
        for hint in _hints(value).values():
            add(hint)

    add(TrainingJob)
    for path in sorted((ROOT / "configs").rglob("*.gin")):
        text = path.read_text(encoding="utf-8")
        for package, module in re.findall(r"^from (switchx[\w.]*) import (\w+)", text, re.M):
            there = importlib.import_module(f"{package}.{module}")
            for name, cls in vars(there).items():
                if inspect.isclass(cls) and cls.__module__ == there.__name__ and name[0] != "_":
                    add(cls)
    settings = (cls for cls in found if cls.__name__ not in RESULTS)
    return sorted(settings, key=lambda cls: (cls.__module__, cls.__name__))


def _hints(cls: type) -> dict:
    with contextlib.suppress(NameError, TypeError):
        return typing.get_type_hints(cls)
    return {}


def documented(cls: type | types.FunctionType) -> tuple[str, dict[str, str]]:
    """The first paragraph of a class or a function, and the meaning of each attribute, its
    bases' among them, or argument."""
    meanings: dict[str, str] = {}
    for each in reversed(getattr(cls, "__mro__", (cls,))):
        meanings |= _attributes(inspect.cleandoc(each.__doc__ or ""))
    first = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]
    return " ".join(first.split()), meanings


def _attributes(text: str) -> dict[str, str]:
    found, names = {}, ()
    section = re.split(r"^(?:Attributes|Args):\n", text, maxsplit=1, flags=re.M)[-1]
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        if (entry := re.match(r"^ {4}([\w, ]+): (.*)$", line)) and not line.startswith(" " * 5):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        else:
            for name in names:
                found[name] += f" {line.strip()}"
    return found


def _type(hint) -> str:
    if isinstance(hint, str):
        return hint
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        return hint.__name__
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])|typing\.|collections\.abc\.", "", str(hint))


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
        name = getattr(value, "__name__", None)
        return f"`{name or repr(value)}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory.__name__}()`"
    return "required"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
