# SPDX-License-Identifier: Apache-2.0
"""The storage of a run's experts: the devices, host memory, or a disk.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2.
"""

import dataclasses
from typing import Literal

from switchx.fields import at_resume, check_choices, require, require_at_least
from switchx.storage import PolicyName


@dataclasses.dataclass(frozen=True)
class StorageSpec:
    """Where experts and their optimizer state are stored in training.

    It changes no number beyond rounding, so all of it may change when a run is resumed.

    Attributes:
        experts: `device`, with all other parameters; `host`, in the host's memory, from which a
            program copies the experts of a few periods to the device; or `disk`, one
            record for each expert, of which the host's memory caches some and the device holds
            the experts of a few periods.
        slots: periods, the blocks of a stack that repeat, whose experts are on the device at
            once.
        host_bytes: bytes of host memory for records, with `disk`; None is room for all of them.
        path: folder for the records, with `disk`; it belongs to this run only and is deleted
            when a run begins. None is a folder in the run folder. Checkpoints link to the
            records if they are on the same file system, and copy them otherwise.
        policy: replacement policy of the host's cache: which record makes room for another.
    """

    experts: Literal["device", "host", "disk"] = at_resume("device")
    slots: int = at_resume(2)
    host_bytes: int | None = at_resume(None)
    path: str | None = at_resume(None)
    policy: PolicyName = at_resume("next_use")

    def __post_init__(self):
        check_choices(self)
        require_at_least(self, 1, "host_bytes")
        require(
            self.slots >= 2,
            f"StorageSpec.slots={self.slots}: experts are moved to one slot while those in "
            "another are computed with; use at least 2",
        )
