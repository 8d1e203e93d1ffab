# SPDX-License-Identifier: Apache-2.0
"""A job's description in its run folder, and what may change when the run is resumed."""

import dataclasses
import json
import os
from typing import Any

from switchx.checkpoint.run_folder import RunFolder
from switchx.data.data_dir import write_atomically
from switchx.data.vocabularies import load_vocabulary, save_vocabulary
from switchx.models.config import ModelConfig, model_from_description
from switchx.training.job import TrainingJob

# How long, how often, where and on what a run goes on: none of it changes what a step does.
MAY_CHANGE = (
    "train_steps", "log_every", "eval_every", "checkpoint_every", "eval_batches", "retention",
    "max_skipped_in_a_row", "data_dir", "mesh", "pipeline", "prefetch", "compiler",
)  # fmt: skip
# What of the model an evaluation may choose; all else decides what the parameters mean.
MODEL_MAY_CHANGE = (
    "model.dropout_rate", "model.init_scale", "model.max_length", "model.precision",
    "model.remat", "model.switch.buffer_factor", "model.switch.capacity_factor",
    "model.switch.capacity_rounding",
    "model.switch.dispatcher", "model.switch.eval_capacity_factor",
    "model.switch.expert_capacity",
    "model.switch.expert_dropout_rate", "model.switch.group_size",
    "model.switch.min_capacity", "model.switch.router.balance_counts",
    "model.switch.router.balance_scope", "model.switch.router.exploration",
    "model.switch.router.input_dropout_rate", "model.switch.router.jitter",
    "model.switch.router.max_rounds", "model.switch.router.overflow",
    "model.switch.router.padding", "model.switch.router.priority",
    "model.switch.router.temperature", "model.switch.router_init_scale",
)  # fmt: skip


def describe(value) -> Any:
    """Nested dataclasses as what JSON can hold; a dataclass keeps its type's name.

    Below the job itself `data_dir` is left out, which says where data lies and not what it
    is, and so are a task's `metrics`, which nothing in training reads.
    """
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        if not isinstance(value, TrainingJob):
            names = [name for name in names if name not in ("data_dir", "metrics")]
        fields = {name: describe(getattr(value, name)) for name in names}
        return {"type": type(value).__name__} | fields
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def flat_description(job: TrainingJob) -> dict[str, Any]:
    """A job's settings by dotted name, as `model.switch.num_experts`: numbers and texts."""
    return _flat(json.loads(json.dumps(describe(job))))


def write_run_config(run: RunFolder, job: TrainingJob) -> None:
    """Writes the vocabulary and then `config.json` into a new run folder, each whole."""
    save_vocabulary(job.vocabulary, run.root)
    write_atomically(run.config, (json.dumps(describe(job), indent=2) + "\n").encode())


def check_same_run(run: RunFolder, job: TrainingJob) -> None:
    """Checks that a folder that already holds a run holds this one.

    Raises:
        ValueError: fields differ that may not change on resume (all are listed), or the
            vocabulary is another one.
    """
    saved = _flat(read_config(run))
    current = flat_description(job)
    different = [
        f"{name}: {saved.get(name)!r} there, {current.get(name)!r} here"
        for name in sorted(saved.keys() | current.keys())
        if name.split(".")[0] not in MAY_CHANGE and saved.get(name) != current.get(name)
    ]
    if different:
        raise ValueError(
            f"model_dir={str(run.path)!r} belongs to another configuration "
            f"({'; '.join(different)}); give another model_dir, or the configuration it was "
            f"made with. On resume these may change: {', '.join(MAY_CHANGE)}"
        )
    _check_vocabulary(run, job)


def check_same_model(run: RunFolder, job: TrainingJob) -> None:
    """Checks that a run's parameters and token ids mean to a job what they were trained to.

    Raises:
        ValueError: fields of the model differ (all are listed), or the vocabulary does.
    """
    different = [
        each for each in _differences(run, job, MODEL_MAY_CHANGE) if each.startswith("model.")
    ]
    if different:
        raise ValueError(
            f"model_dir={str(run.path)!r} holds another model ({'; '.join(different)}); use "
            f"the configuration that it was trained with. These may be others: "
            f"{', '.join(MODEL_MAY_CHANGE)}, and all that is not of the model"
        )
    _check_vocabulary(run, job)


def _differences(run: RunFolder, job: TrainingJob, but: tuple[str, ...]) -> list[str]:
    """Fields that a run and a job have with other values, those of or below `but` apart."""
    saved = _flat(read_config(run))
    current = flat_description(job)
    return [
        f"{name}: {saved.get(name)!r} there, {current.get(name)!r} here"
        for name in sorted(saved.keys() | current.keys())
        if saved.get(name) != current.get(name)
        and not any(f"{name}.".startswith(f"{each}.") for each in but)
    ]


def _check_vocabulary(run: RunFolder, job: TrainingJob) -> None:
    there, here = load_vocabulary(run.root), job.vocabulary
    if here.fingerprint() != there.fingerprint():
        raise ValueError(
            f"model_dir={str(run.path)!r} was trained with another vocabulary: "
            f"{there.size} ids there, {here.size} here, or other pieces; the same ids would "
            f"mean other things. Its copy is in that folder: use it, or give another model_dir"
        )


def read_config(run: RunFolder) -> dict[str, Any]:
    """`config.json` of a run folder.

    Raises:
        ValueError: it is missing or damaged.
    """
    try:
        config = json.loads(run.config.read_text(encoding="utf-8"))
        if not (isinstance(config, dict) and isinstance(config.get("model"), dict)):
            raise ValueError("it describes no model")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{run.root} is not a run folder, its config.json cannot be read ({error}): "
            f"{run.found()}; give the model_dir of a run"
        ) from error
    return config


def read_model_config(run: RunFolder) -> ModelConfig:
    """The model's configuration in a run folder.

    Raises:
        ValueError: it is missing, or its fields are not those of a ModelConfig.
    """
    return model_from_description(read_config(run)["model"], str(run.config))


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
