# SPDX-License-Identifier: Apache-2.0
"""Gin files: where they are, what those of earlier versions call things, what switchx writes.

Files of earlier versions, such as the `operative_config.gin` of their run folders, name modules
that are elsewhere now: they are read as if they named today's.
"""

import dataclasses
import difflib
import itertools
import pathlib
import re
import textwrap
from collections.abc import Iterable, Sequence

# Module of an earlier version -> where its configurations are now.
MOVED = {
    "switchx.data.corpus_vocabulary": "switchx.data.vocabularies",
    "switchx.data.saved_vocabulary": "switchx.data.vocabularies",
    "switchx.data.span_corruption": "switchx.data.objectives",
    "switchx.data.token_ids": "switchx.data.tokenizers",
    "switchx.data.translation_mixture": "switchx.data.mixtures",
    "switchx.models.router_config": "switchx.moe.config",
    "switchx.models.switch_config": "switchx.moe.config",
    "switchx.partitioning.compiler_options": "switchx.partitioning.mesh",
    "switchx.training.adafactor": "switchx.optim.adafactor",
    "switchx.training.adamw": "switchx.optim.adamw",
    "switchx.training.retention": "switchx.checkpoint.checkpointer",
    "switchx.training.schedules": "switchx.optim.schedules",
}
# Bindings of earlier versions: a value that has another name, parameters without successors,
# which changed no mathematics.
_RENAMED = (
    (r"(SwitchConfig\.dispatcher = )(['\"])sort\2", r"\1\2gather\2"),
    (r"\b(saved_vocabulary|vocabularies)\.load_vocabulary\b", r"\1.SavedVocabulary"),
)
_GONE = ("StepConfig.factor_expert_gradients",)
_IMPORT = re.compile(r"^from +([\w.]+) +import +(\w+)(?: +as +(\w+))?", re.MULTILINE)

_MESH_IMPORTS = """\
from __gin__ import dynamic_registration
from switchx.models import config
from switchx.partitioning import mesh
from switchx.partitioning import rules
from switchx.partitioning import schedule
from switchx.training import job
"""
MODEL_FILE = "model.gin"
_MODEL_HEADER = """\
# The model of this folder, whole. It comes after a run file and takes the place of its model:
#
#   switchx train --gin_file=configs/runs/finetune.gin --gin_file=THIS_FOLDER/{file} \\
#     --gin.INIT_FROM=THIS_FOLDER --model_dir=DIR
#
# Dropout is the run file's.

from __gin__ import dynamic_registration
from switchx.models import config

MODEL = @config.ModelConfig()
"""
# A run's own, which decide nothing about what the parameters mean.
_OF_THE_RUN = ("dropout_rate", "expert_dropout_rate")
_STATEMENT = re.compile(r"^(?:(?P<scope>[\w/]+)/)?(?P<name>[\w.]+) = (?P<value>.*)$", re.DOTALL)


def close_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `known` that is spelt most like `name`, if any is much like it.

    Args:
        cutoff: likeness from which on, 0 to 1.
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
        FileNotFoundError: there is none.
    """
    package = pathlib.Path(__file__).parents[2]
    # A wheel has it inside the package; next to site-packages' switchx anything may be
    # called configs, so that is looked at last.
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
    """What to say of a gin file that is in none of `roots`: which one may be meant."""
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


def as_of_today(text: str) -> str:
    """A gin file's text in the names of today; lines keep their numbers.

    A module that moved is imported under the name that the rest of the file has for it.
    """

    def moved(match: re.Match) -> str:
        package, module, alias = match.groups()
        if (now := MOVED.get(f"{package}.{module}")) is None:
            return match[0]
        package, _, name = now.rpartition(".")
        bound = alias or module
        return f"from {package} import {name}" + (f" as {bound}" if bound != name else "")

    text = _IMPORT.sub(moved, text)
    for pattern, replacement in _RENAMED:
        text = re.sub(pattern, replacement, text)
    for name in _GONE:
        text = re.sub(rf"^[\w/.]*\b{re.escape(name)} = .*$", "", text, flags=re.MULTILINE)
    return text


def without_scopes(text: str) -> str:
    """Gin's operative configuration with each parameter bound once, outside of all scopes.

    Gin evaluates a macro in a scope of its name and writes down `MODEL/config.d_ff = 64`,
    which a later `config.d_ff = 32` would not change: nothing could be set on top of the
    file. A parameter with different values in several scopes keeps its scopes.

    Args:
        text: of `gin.operative_config_str()`; comments are left out.
    """
    statements = [s for s in re.split(r"\n(?=\S)", text) if s and not s.startswith("#")]
    values: dict[str, dict[str, None]] = {}
    for match in filter(None, map(_STATEMENT.match, statements)):
        values.setdefault(match["name"], {})[match["value"].strip()] = None
    lines: dict[str, str] = {}
    for statement in statements:
        match, line = _STATEMENT.match(statement), statement.strip()
        if match and len(values[match["name"]]) == 1:
            line = f"{match['name']} = {match['value'].strip()}"
        lines[line] = match["name"].rpartition(".")[0] if match else "imports"
    sections = itertools.groupby(lines, key=lines.get)
    return "\n\n".join("\n".join(section) for _, section in sections) + "\n"


def model_gin(model) -> str:
    """Every field of a `ModelConfig` as bindings, those with default values too."""
    return _MODEL_HEADER.format(file=MODEL_FILE) + "\n" + "\n".join(_bindings(model)) + "\n"


def _bindings(description) -> list[str]:
    """Lines of one configuration, then those of the ones in it."""
    name = type(description).__name__
    lines, nested = [], []
    for field in dataclasses.fields(description):
        value = getattr(description, field.name)
        if field.name in _OF_THE_RUN:
            continue
        if dataclasses.is_dataclass(value):
            nested += _bindings(value)
            value = f"@config.{type(value).__name__}()"
        else:
            value = repr(value)
        lines.append(f"config.{name}.{field.name} = {value}")
    return [*lines, "", *nested]


def mesh_gin(plan, hardware, command: str) -> str:
    """A plan's mesh, rules, schedule, dispatcher and tier, to be read after a run's own files.

    gin keeps what an earlier file bound, so every axis, every field of `Rules`, the
    pipeline's schedule and the tier of the experts are written, defaults too: a run's own
    rules (configs/meshes/pod.gin) are not what was predicted.

    Args:
        plan, hardware: a `planner.search.Plan`, and the `Hardware` that it is for.
        command: that made the plan, for the file's head.
    """
    from switchx.partitioning.mesh import AXES
    from switchx.partitioning.schedule import ScheduleSpec
    from switchx.planner.search import explain

    layout = plan.layout
    bound = {f"mesh.MeshSpec.{axis}": getattr(layout, axis) for axis in AXES}
    # The planner takes the bubble and the activations in flight of this schedule.
    for value, module in ((layout.rules, "rules"), (ScheduleSpec("1f1b"), "schedule")):
        for field in dataclasses.fields(value):
            name = f"{module}.{type(value).__name__}.{field.name}"
            bound[name] = getattr(value, field.name)
    bound["NUM_MICROBATCHES"] = layout.num_microbatches
    if layout.pipe > 1:
        bound["config.ModelConfig.scan_layers"] = True
    if layout.dispatcher is not None:
        bound["config.SwitchConfig.dispatcher"] = layout.dispatcher
    after = "from switchx.training"
    imports = _MESH_IMPORTS.replace(after, f"from switchx.storage import cache\n{after}")
    bound["cache.StorageSpec.experts"] = plan.storage.tier
    if plan.storage.tier != "device":
        bound["config.ModelConfig.scan_layers"] = True
    if not any(name.startswith("config.") for name in bound):
        imports = imports.replace("from switchx.models import config\n", "")
    why = textwrap.fill(
        explain(plan, hardware, plan), 93, initial_indent="# ", subsequent_indent="# "
    )
    lines = [
        f"# Made by {command}\n#\n{why}\n\n{imports}",
        "MESH = @mesh.MeshSpec()",
        "mesh.MeshSpec.rules = @rules.Rules()",
        "job.TrainingJob.pipeline = @schedule.ScheduleSpec()",
        "job.TrainingJob.storage = @cache.StorageSpec()",
        *(f"{name} = {_literal(value)}" for name, value in bound.items()),
    ]
    return "\n".join(lines) + "\n"


def _literal(value) -> str:
    """As the configs have it: double quotes, a table of rules with one a line."""
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "\n".join(["(", *(f"    {_literal(rule)}," for rule in value), ")"])
    return repr(value).replace("'", '"')
