# SPDX-License-Identifier: Apache-2.0
"""How a run stores its experts, as its gin file says it; docs/storage.md."""

import dataclasses

from switchx.fields import at_resume, check_choices, require_at_least
from switchx.storage.cache import PolicyName


@dataclasses.dataclass(frozen=True)
class StorageSpec:
    """The cache of experts in host memory. No field changes a number.

    Attributes:
        host_bytes: of host memory for records; None is room for all of them.
        policy: which record makes room for another.
    """

    host_bytes: int | None = at_resume(None)
    policy: PolicyName = at_resume("next_use")

    def __post_init__(self):
        check_choices(self)
        require_at_least(self, 1, "host_bytes")
