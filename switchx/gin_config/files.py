# SPDX-License-Identifier: Apache-2.0
"""Gin files: where they are, and the names in those of earlier versions.

Files of earlier versions, such as the `operative_config.gin` of their run folders, name modules
that have moved since: they are read as if they named today's.
"""

import difflib
import pathlib
import re
from collections.abc import Iterable, Sequence

from switchx.object_store import way_out

# Module of an earlier version -> where its configurations are now.
MOVED = {
    "switchx.training.telemetry.alarms": "switchx.training.telemetry.routing_alarms",
    "switchx.partitioning.schedule": "switchx.pipeline.schedule",
    "switchx.storage.cache": "switchx.training.offload.storage_spec",
    "switchx.training.distillation": "switchx.training.distillation.soft_loss",
}
# Module -> its classes that have moved -> the modules that they are in now.
MOVED_CLASSES = {
    "switchx.partitioning.mesh": {"CompilerOptions": "switchx.partitioning.compiler_options"}
}
_IMPORT = re.compile(r"^from +([\w.]+) +import +(\w+)(?: +as +(\w+))?", re.MULTILINE)


def close_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `known` that is spelt most like `name`, if any is similar enough.

    Args:
        cutoff: minimum similarity, from 0 to 1.
    """
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` (did you mean X?)` to follow `name` in a sentence, or nothing."""
    found = close_match(name, known, cutoff)
    return f" (did you mean {found}?)" if found else ""


def configs_dir() -> pathlib.Path:
    """The folder `configs`, of a checkout or installed, which holds `models/`, `runs/`, ...

    Raises:
        FileNotFoundError: there is no such folder.
    """
    package = pathlib.Path(__file__).parents[1]
    # A wheel has it inside the package; beside site-packages' switchx anything may be
    # called configs, so that is tried last.
    places = (package / "configs", package.parent / "configs")
    for place in places:
        if (place / "models").is_dir():
            return place
    raise FileNotFoundError(
        f"switchx was installed without its configurations: there is no {places[0]} and no "
        f"{places[1]}; install it from a wheel, or with `pip install --editable` in a checkout"
    )


def config_roots(search_paths: Iterable[str] = ()) -> list[pathlib.Path]:
    """Folders in which a gin file's name is looked up, in this order.

    The last two are ours: both `runs/x.gin` and `configs/runs/x.gin` are names.

    Raises:
        ValueError: a folder of `search_paths` does not exist.
    """
    folders = list(map(pathlib.Path, search_paths))
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(
                f"--gin_search_paths: there is no folder {str(folder)!r}; name folders that "
                "exist, separated by commas"
            )
    return [pathlib.Path("."), *folders, configs_dir(), configs_dir().parent]


def missing_file(name: str, roots: Sequence[pathlib.Path]) -> str:
    """The message about a gin file that is in none of `roots`: which one may be meant."""
    hint = close_file(name, roots)
    if "," in name:
        hint = "repeat --gin_file for each file"
    elif any((root / name).is_dir() for root in roots):
        hint = "that is a folder; name a file in it"
    places = ", ".join(map(str, roots))
    return f"no gin file {name!r} in {places}; {hint} (--gin_search_paths adds folders)"


def close_file(name: str, roots: Iterable[pathlib.Path]) -> str:
    """`did you mean ...?`: files beside where `name` would be, and the shipped ones."""
    known, ours = {}, configs_dir().parent
    for root in roots:
        if root.is_relative_to(ours) and root.is_absolute():
            continue
        for path in sorted((root / name).parent.glob("*.gin")):
            known.setdefault(path.stem, str(path))
    for path in sorted(configs_dir().rglob("*.gin")):
        known.setdefault(path.stem, path.relative_to(ours).as_posix())
    close = close_match(pathlib.Path(name).stem, known)
    return f"did you mean {known[close]}?" if close else "runs to start from: configs/runs"


def configuration_of(folder) -> str:
    """The gin file of a run folder, which says what it was trained with.

    Args:
        folder: a `RunFolder`.

    Raises:
        ValueError: the folder is not a run folder; the message says what is there.
    """
    if not folder.operative_config.is_file():
        give = "give the model_dir of a run, or --gin_file (in Python a job)"
        if folder.model_gin.is_file():  # converted, or reshaped
            give = (
                "say what is to be read, as with --gin_file=configs/runs/finetune.gin "
                "--gin_file=configs/tasks/pairs.gin --gin.FILES=FILES "
                f"--gin.INIT_FROM={folder.path} (in Python by a job)"
            )
        raise ValueError(
            f"{folder.root} is not a run folder, it has no {folder.operative_config.name}: "
            f"{folder.found()}; {way_out(folder.root, give)}"
        )
    return str(folder.operative_config)


def as_of_today(text: str) -> str:
    """A gin file's text in the names of today.

    A module that moved is imported under the name that the rest of the file uses. Lines keep
    their numbers, except if a class moved and no blank line follows the imports.
    """

    def moved(match: re.Match) -> str:
        package, module, alias = match.groups()
        now = MOVED.get(f"{package}.{module}")
        return match[0] if now is None else import_statement(now, alias or module)

    text = _IMPORT.sub(moved, text)
    for old in _IMPORT.finditer(text):
        for cls, now in MOVED_CLASSES.get(f"{old[1]}.{old[2]}", {}).items():
            name = now.rpartition(".")[2]
            used = rf"(?<![\w.]){old[3] or old[2]}\.{cls}\b"
            text, num_uses = re.subn(used, f"{name}.{cls}", text)
            # After the imports around the old one, in place of a blank line there.
            imports = rf"^({re.escape(old[0])}\b.*\n(?:(?:from|import|#).*\n)*)\n?"
            added = rf"\1{import_statement(now)}\n"
            if num_uses:
                text = re.sub(imports, added, text, count=1, flags=re.MULTILINE)
    return text


def import_statement(module: str, name: str = "") -> str:
    """The import of a module, bound to a name that may differ from its last part."""
    package, _, last = module.rpartition(".")
    statement = f"from {package} import {last}" if package else f"import {last}"
    return f"{statement} as {name}" if name not in ("", last) else statement
