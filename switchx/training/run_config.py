# SPDX-License-Identifier: Apache-2.0
"""A job's description in its run folder, and what may change when the run is resumed."""

import dataclasses
import json
import typing
from typing import Any

from switchx.data.saved_vocabulary import load_vocabulary, save_vocabulary
from switchx.models.config import ModelConfig, Precision, SwitchConfig
from switchx.training.job import TrainingJob
from switchx.training.run_folder import RunFolder

# How long, how often, where and on what a run goes on: none of it changes what a step does.
MAY_CHANGE = (
    "train_steps", "log_every", "eval_every", "checkpoint_every", "eval_batches", "retention",
    "max_skipped_in_a_row", "data_dir", "mesh", "prefetch",
)  # fmt: skip


def describe(value) -> Any:
    """Nested dataclasses as what JSON can hold; a dataclass keeps its type's name."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        fields.pop("data_dir", None) if not isinstance(value, TrainingJob) else None
        return {"type": type(value).__name__} | fields
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    return value


def write_run_config(run: RunFolder, job: TrainingJob) -> None:
    """Writes `config.json` and the vocabulary into a new run folder."""
    save_vocabulary(job.vocabulary, run.root)
    run.config.write_text(json.dumps(describe(job), indent=2) + "\n", encoding="utf-8")


def check_same_run(run: RunFolder, job: TrainingJob) -> None:
    """Checks that a folder that already holds a run holds this one.

    Raises:
        ValueError: fields differ that may not change on resume (all are listed), or the
            vocabulary is another one.
    """
    saved = _flat(read_config(run))
    current = _flat(json.loads(json.dumps(describe(job))))
    different = [
        f"{name}: {saved.get(name)!r} there, {current.get(name)!r} here"
        for name in sorted(saved.keys() | current.keys())
        if saved.get(name) != current.get(name) and name.split(".")[0] not in MAY_CHANGE
    ]
    if different:
        raise ValueError(
            f"model_dir={str(run.path)!r} belongs to another configuration "
            f"({'; '.join(different)}); give another model_dir, or the configuration it was "
            f"made with. On resume these may change: {', '.join(MAY_CHANGE)}"
        )
    if job.vocabulary.fingerprint() != load_vocabulary(run.root).fingerprint():
        raise ValueError(
            f"the vocabulary is not the one that model_dir={str(run.path)!r} was trained with; "
            f"its copy is in that folder: use it, or give another model_dir"
        )


def read_config(run: RunFolder) -> dict[str, Any]:
    """`config.json` of a run folder.

    Raises:
        ValueError: it is missing or damaged.
    """
    try:
        return json.loads(run.config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{run.root} is not a run folder, its config.json cannot be read ({error}): "
            f"{run.found()}; give the model_dir of a run"
        ) from error


def read_model_config(run: RunFolder) -> ModelConfig:
    """The model's configuration in a run folder.

    Raises:
        ValueError: it is missing, or has fields that no ModelConfig has.
    """
    return _from_description(ModelConfig, read_config(run)["model"], str(run.config))


def _from_description(cls: type, description: dict[str, Any], where: str):
    description = {name: item for name, item in description.items() if name != "type"}
    known = {field.name for field in dataclasses.fields(cls)}
    if extra := sorted(description.keys() - known):
        raise ValueError(
            f"{where}: {cls.__name__} has no {', '.join(extra)}; it was written by another "
            "version of switchx"
        )
    nested = {"switch": SwitchConfig, "precision": Precision}
    for name, item in description.items():
        if name in nested and item is not None and name in typing.get_type_hints(cls):
            description[name] = _from_description(nested[name], item, where)
    return cls(**description)


def _flat(value, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = ((str(i), item) for i, item in enumerate(value))
    else:
        return {prefix: value}
    return {
        name: leaf
        for key, item in items
        for name, leaf in _flat(item, f"{prefix}.{key}" if prefix else key).items()
    }
