# SPDX-License-Identifier: Apache-2.0
"""Experts by the names of their parameters; whether they can be in host memory or on a disk.

The other settings of a job that exclude this are in `training/offload/exclusions.py`.
"""

from collections.abc import Mapping
from typing import Literal

from switchx.models.config import ModelConfig

# Parts of the names of the parameters of experts, and of their matrices.
EXPERTS_PATH = "/experts/"
EXPERT_MATRICES = f"{EXPERTS_PATH}w_"

Tier = Literal["device", "host", "disk"]
# Also in `training/offload/exclusions.py`, for a job; here for a workload alone.
TEACHER_IN_STORAGE = (
    "a teacher reads the batch beside the whole step of a student on the devices"
)


def storage_refusal(
    model: ModelConfig,
    tier: Tier,
    slots: int,
    sizes: Mapping[str, int],
    *,
    bucket_bytes: int | None = None,
) -> str | None:
    """Why experts cannot be in a tier, with the way out; or None.

    Args:
        sizes: sizes of the mesh's axes, by name.
        bucket_bytes: `StepConfig.bucket_bytes`.
    """
    if tier == "device":
        return None
    where = f"with StorageSpec.experts={tier!r}"
    if model.switch is None:
        return f"a dense model {where}: it has no experts; use experts='device'"
    if model.switch.has_named_layers:
        return (
            f"sparse blocks that are named {where}: one program runs all periods of blocks, "
            "which are to be alike; use experts='device', and a mesh that splits experts or D"
        )
    if not model.scan_layers:
        return (
            f"ModelConfig.scan_layers=False {where}: one program runs all periods of blocks, "
            "whose parameters are stacked; use scan_layers=True (a run may change it when it "
            "is resumed)"
        )
    if bucket_bytes is not None:
        return (
            f"StepConfig.bucket_bytes={bucket_bytes} {where}: buckets are gathered in one "
            "program for all layers; use bucket_bytes=None"
        )
    if reason := _slots_refusal(model, tier, slots):
        return reason
    if (stages := sizes.get("pipe", 1)) > 1:
        return (
            f"mesh axis 'pipe' of size {stages} {where}: a stage has its layers on the device; "
            "use pipe=1, and expert or fsdp for the devices"
        )
    return None


def _slots_refusal(model: ModelConfig, tier: Tier, slots: int) -> str | None:
    """Why there are too many slots: with a disk the model has them, with a ring each stack."""
    stacks = ("encoder", "decoder") if model.is_encoder_decoder else ("decoder",)
    periods = {stack: getattr(model, f"num_{stack}_layers") // model.period for stack in stacks}
    numbers = {f"the {s}": n for s, n in periods.items() if model.num_sparse_layers_of(s)}
    of_stacks = ""
    if tier == "disk":
        numbers = {"the model": sum(periods.values())}
        of_stacks = f" ({' and '.join(stacks)})"
    for name, number in numbers.items():
        if slots > number:
            way = f"at most {number}" if number > 1 else "experts='device': all are needed"
            return (
                f"StorageSpec.slots={slots}, but {name} has {number} "
                f"period{'s' * (number > 1)} of blocks{of_stacks}; use {way}"
            )
    return None
