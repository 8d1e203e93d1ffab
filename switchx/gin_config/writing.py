# SPDX-License-Identifier: Apache-2.0
"""Gin files that switchx writes: of a job, of a model, of a planned mesh.

Every field of what they bind is bound, including defaults, so that a later version's defaults
change nothing.
"""

import dataclasses
import itertools
import os
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from switchx.fields import describe, require, without_gin
from switchx.gin_config.files import configs_dir, import_statement

_MESH_IMPORTS = """\
from __gin__ import dynamic_registration
from switchx.models import config
from switchx.partitioning import mesh
from switchx.partitioning import rules
from switchx.pipeline import schedule
from switchx.training import job
from switchx.training import step
"""
MODEL_FILE = "model.gin"
_MODEL_HEADER = """\
# The model of this folder, whole. INIT_FROM takes it; after a run file it takes the place of
# the run's model:
#
#   switchx train --gin_file=configs/runs/pretrain_tiny.gin --gin_file=THIS_FOLDER/{file} \\
#     --model_dir=DIR
#
# Dropout is the run file's.

from __gin__ import dynamic_registration
{imports}

"""
# Fields of a run's own, which do not affect what the parameters mean.
OF_THE_RUN = ("dropout_rate", "expert_dropout_rate")
_STATEMENT = re.compile(r"^(?:(?P<scope>[\w/]+)/)?(?P<name>[\w.]+) = (?P<value>.*)$", re.DOTALL)
# `job.TrainingJob.train_steps = %TRAIN_STEPS` of configs/runs/defaults.gin.
_MACRO = re.compile(r"^\w+\.(\w+)\.(\w+) = %([A-Z_]+)$", re.MULTILINE)


def job_gin(job) -> str:
    """A `TrainingJob` as a gin file that builds it again.

    It has the macros that every run honours (configs/runs/defaults.gin), so that
    `--gin.TRAIN_STEPS=100` and a further file such as configs/meshes/one_device.gin change it.

    Raises:
        ValueError: a value in it cannot be written; names it.
    """
    describe(job, "job")  # refuses what has no name to be imported by
    objects = _Objects()
    job_reference = objects.add(job)
    defaults = (configs_dir() / "runs/defaults.gin").read_text(encoding="utf-8")
    macros = {(cls, field): name for cls, field, name in _MACRO.findall(defaults)}
    values, sections = {}, []
    for cls, instances in objects.instances.items():
        for number, fields in enumerate(instances):
            name = objects.name(cls, number)
            lines = []
            for field, value in fields.items():
                macro = macros.get((cls.__name__, field)) if len(instances) == 1 else None
                if macro is not None:
                    values[macro] = value
                lines.append(f"{name}.{field} = {f'%{macro}' if macro else value}")
            sections.append("\n".join(lines))
    macro_lines = [f"{name} = {value}" for name, value in sorted(values.items())]
    head = "from __gin__ import dynamic_registration"
    parts = ["\n".join([head, *objects.imports()]), "\n".join(macro_lines), *sections]
    return "\n\n".join([*filter(None, parts), f"JOB = {job_reference}"]) + "\n"


class _Objects:
    """The dataclasses of a job, each once, and the names that a gin file has for them.

    Attributes:
        instances: instances of each class: by field, the text that gin reads for its value.
    """

    def __init__(self):
        self.instances: dict[type, list[dict[str, str]]] = {}
        self._modules: dict[str, str] = {}  # the name that it is bound to -> the module

    def add(self, value) -> str:
        """The text that gin reads for a value; dataclasses in it are added."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {
                field.name: self.add(getattr(value, field.name))
                for field in dataclasses.fields(value)
                if field.init
            }
            instances = self.instances.setdefault(type(value), [])
            if fields not in instances:
                instances.append(fields)
            return f"@{self.name(type(value), instances.index(fields))}()"
        if isinstance(value, list | tuple):
            comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
            inner = ", ".join(map(self.add, value)) + comma
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        if isinstance(value, dict):
            pairs = (f"{key!r}: {self.add(item)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, os.PathLike):
            return repr(os.fspath(value))
        if value is None or isinstance(value, bool | int | float | str):
            return _literal(value)
        value = without_gin(value)
        return f"@{self._bound(value.__module__)}.{value.__qualname__}"

    def name(self, cls: type, number: int) -> str:
        """The name of an instance in a gin file; all but the first of a class have a scope."""
        scope = f"{cls.__name__.lower()}_{number + 1}/" if number else ""
        return f"{scope}{self._bound(cls.__module__)}.{cls.__name__}"

    def _bound(self, module: str) -> str:
        """The last part of a module's name, with those before it if another module has it."""
        parts = module.split(".")
        for start in reversed(range(len(parts))):
            name = "_".join(parts[start:])
            if self._modules.setdefault(name, module) == module:
                return name
        raise ValueError(f"the modules {module} and {self._modules[name]} have one name in gin")

    def imports(self) -> list[str]:
        modules = sorted(self._modules.items(), key=lambda item: item[1])
        return [import_statement(module, name) for name, module in modules]


def without_scopes(text: str) -> str:
    """Gin's operative configuration with each parameter bound once, outside all scopes.

    Gin evaluates a macro in a scope of its name and writes `MODEL/config.d_ff = 64`, which a
    later `config.d_ff = 32` would not change: nothing could be set on top of the file. A
    parameter with different values in several scopes keeps its scopes.

    Args:
        text: text that `gin.operative_config_str()` returned; comments are left out.
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
    """Every field of a `ModelConfig` as bindings, including those with default values.

    A user's own class is imported from its module.
    """
    parts = list(_nested(model))
    imports = "\n".join(map(import_statement, dict.fromkeys(map(_module_of, parts))))
    lines = [f"MODEL = @{_class_name(model)}()", ""]
    for each in parts:
        for field in dataclasses.fields(each):
            value = getattr(each, field.name)
            is_part = dataclasses.is_dataclass(value)
            text = f"@{_class_name(value)}()" if is_part else _literal(value)
            if field.init and field.name not in OF_THE_RUN:
                lines.append(f"{_class_name(each)}.{field.name} = {text}")
        lines.append("")
    head = _MODEL_HEADER.format(file=MODEL_FILE, imports=imports)
    return head + "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    """A value as gin reads it: numbers and texts of other types, such as those of NumPy and
    enumerations, become plain ones."""
    require(value == value, "a job has NaN, which gin cannot read; give a number")
    kinds = [each for each in (bool, int, float, str) if isinstance(value, each)]
    text = kinds[0].__repr__(value) if kinds else repr(value)
    return {"inf": "1e999", "-inf": "-1e999"}.get(text, text)


def _nested(description) -> Iterator:
    """A configuration, and the configurations in it."""
    yield description
    for field in dataclasses.fields(description):
        value = getattr(description, field.name)
        if dataclasses.is_dataclass(value):
            yield from _nested(value)


def _module_of(description) -> str:
    """The module in which a gin file finds the class; our models' classes are in one module."""
    module = type(description).__module__
    is_ours = module in ("switchx.models.config", "switchx.moe.config")
    return "switchx.models.config" if is_ours else module


def _class_name(description) -> str:
    return f"{_module_of(description).rpartition('.')[2]}.{type(description).__name__}"


def mesh_gin(plan, why: str, command: str) -> str:
    """A plan's mesh, rules, schedule, dispatcher and tier, to be read after a run's own files.

    Gin keeps what an earlier file bound, so every axis, every field of `Rules`, the pipeline's
    schedule and the tier of the experts are written, including defaults: a run's own rules
    (configs/meshes/pod.gin) are not what was predicted.

    Args:
        plan: a `planner.search.Plan`.
        why: explanation of the planner, for the file's head.
        command: command that made the plan, for the file's head.
    """
    from switchx.moe.dispatcher_traits import DISPATCHERS
    from switchx.partitioning.mesh import AXES
    from switchx.pipeline.schedule import ScheduleSpec

    layout = plan.layout
    bound = {f"mesh.MeshSpec.{axis}": getattr(layout, axis) for axis in AXES}
    # The planner assumes the bubble and the activations in flight of this schedule.
    for value, module in ((layout.rules, "rules"), (ScheduleSpec("1f1b"), "schedule")):
        for field in dataclasses.fields(value):
            name = f"{module}.{type(value).__name__}.{field.name}"
            bound[name] = getattr(value, field.name)
    bound["NUM_MICROBATCHES"] = layout.num_microbatches
    bound["step.StepConfig.bucket_bytes"] = None  # buckets are not planned
    if layout.pipe > 1:
        bound["config.ModelConfig.scan_layers"] = True
    if layout.dispatcher is not None:
        bound["config.SwitchConfig.dispatcher"] = layout.dispatcher
        if not DISPATCHERS[layout.dispatcher].exchanges_slots:
            bound["config.SwitchConfig.exchange_parts"] = 1
    imports = f"{_MESH_IMPORTS}from switchx.training.offload import storage_spec\n"
    bound["storage_spec.StorageSpec.experts"] = plan.storage.tier
    if plan.storage.tier != "device":
        bound["config.ModelConfig.scan_layers"] = True
    if not any(name.startswith("config.") for name in bound):
        imports = imports.replace("from switchx.models import config\n", "")
    why = textwrap.fill(why, 93, initial_indent="# ", subsequent_indent="# ")
    lines = [
        f"# Made by {command}\n#\n{why}\n\n{imports}",
        "MESH = @mesh.MeshSpec()",
        "mesh.MeshSpec.rules = @rules.Rules()",
        "job.TrainingJob.pipeline = @schedule.ScheduleSpec()",
        "job.TrainingJob.storage = @storage_spec.StorageSpec()",
        *(f"{name} = {_as_in_configs(value)}" for name, value in bound.items()),
    ]
    return "\n".join(lines) + "\n"


def _as_in_configs(value) -> str:
    """A value with double quotes, and a table of rules with one rule per line."""
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "\n".join(["(", *(f"    {_as_in_configs(rule)}," for rule in value), ")"])
    return repr(value).replace("'", '"')
