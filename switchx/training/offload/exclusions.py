# SPDX-License-Identifier: Apache-2.0
"""Settings that exclude experts in host memory or on a disk: one table for all commands.

Reasons that depend only on the model and the mesh are in `models/stored_experts.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from switchx.models.stored_experts import TEACHER_IN_STORAGE
from switchx.optim.adafactor import Adafactor
from switchx.optim.adamw import AdamW

# Optimizers that compute nothing over several layers or several experts.
PER_EXPERT = (AdamW, Adafactor)


class Exclusion(NamedTuple):
    """A setting that experts in storage exclude.

    Attributes:
        name: name of the setting, such as `StepConfig.ema_decay`.
        value: function that returns the setting of a job.
        is_free: function of the value that returns whether experts may be in storage with it.
        reason: the reason why they may not otherwise.
        way_out: the value to use instead; the other way out is experts='device'.
        tiers: storage tiers that the exclusion is about.
    """

    name: str
    value: Callable[[Any], Any]
    is_free: Callable[[Any], bool]
    reason: str
    way_out: str
    tiers: tuple[str, ...] = ("host", "disk")


def _is_none(value) -> bool:
    return value is None


_APART = "experts in storage are updated apart from all else, without it"
_TEXTS = "texts are generated where all parameters are on the devices"
EXCLUSIONS = (
    Exclusion(
        "model",
        lambda job: job.model if job.model.build is not None else None,
        _is_none,
        "a module of your own is not run block by block",
        "a ModelConfig",
    ),
    Exclusion(
        "StepConfig.rate_multipliers",
        lambda job: job.step.rate_multipliers,
        lambda multipliers: not multipliers,
        _APART,
        "()",
    ),
    Exclusion("StepConfig.ema_decay", lambda job: job.step.ema_decay, _is_none, _APART, "None"),
    Exclusion(
        "StepConfig.log_rms",
        lambda job: job.step.log_rms,
        lambda is_logged: not is_logged,
        _APART,
        "False",
    ),
    Exclusion(
        "Rules.optimizer_slices",
        lambda job: job.mesh.rules.optimizer_slices,
        lambda axes: not axes,
        "experts in storage are updated where their parameters are",
        "()",
    ),
    Exclusion(
        "TrainingJob.optimizer",
        lambda job: job.optimizer,
        lambda optimizer: isinstance(optimizer, PER_EXPERT),
        "it may compute over several layers or experts, which are not in one place together",
        " or ".join(each.__name__ for each in PER_EXPERT),
    ),
    Exclusion(
        "SwitchConfig.num_replicas",
        lambda job: 0 if job.model.switch is None else job.model.switch.num_replicas,
        lambda number: number == 0,
        "copies of experts are on the devices",
        "0",
    ),
    Exclusion(
        "RouterConfig.replay",
        lambda job: job.model.switch is not None and job.model.switch.router.replay,
        lambda replay: not replay,
        "choices are given to layers that run in one program on the devices",
        "False",
    ),
    Exclusion(
        "TrainingJob.distillation",
        lambda job: job.distillation,
        _is_none,
        TEACHER_IN_STORAGE,
        "None",
    ),
    Exclusion(
        "TrainingJob.text_evaluation",
        lambda job: job.text_evaluation,
        _is_none,
        _TEXTS,
        "None (--gin.TEXT_EVALUATION=None), and `switchx eval` on the checkpoints",
    ),
    Exclusion(
        "Retention.local_dir",
        lambda job: job.retention.local_dir,
        _is_none,
        "a copy has the state that the devices hold, and these experts' records are on a disk",
        "None",
        ("disk",),
    ),
    Exclusion(
        "InitConfig.optimizer",
        lambda job: job.init.optimizer,
        lambda is_taken: not is_taken,
        "records of experts begin with a fresh optimizer",
        "False",
        ("disk",),
    ),
)


def exclusion_of(job, tier: str) -> str | None:
    """Why a job cannot have its experts in a tier, with the way out; or None."""
    for name, value_of, is_free, reason, way_out, tiers in EXCLUSIONS:
        value = value_of(job)
        if tier in tiers and not is_free(value):
            shown = f"@{type(value).__name__}()" if dataclasses.is_dataclass(value) else value
            shown = repr(shown) if isinstance(value, str | tuple) else shown
            return (
                f"{name}={shown} with StorageSpec.experts={tier!r}: {reason}; use "
                f"{way_out}, or experts='device'"
            )
    return None
