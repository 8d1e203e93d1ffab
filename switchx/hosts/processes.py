# SPDX-License-Identifier: Apache-2.0
"""Which of several processes this one is, and where they meet."""

import dataclasses

# The last there is; the one after the coordinator's port is needed, too.
MAX_PORT = (1 << 16) - 1


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that train one model together.

    Attributes:
        coordinator: `HOST:PORT` at which process 0 listens; the others reach it there, and at
            the port after it `jax.distributed`.
        count: processes.
        index: of this one, from 0.
    """

    coordinator: str
    count: int
    index: int

    def __post_init__(self):
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < MAX_PORT:
            raise ValueError(
                f"coordinator={self.coordinator!r} is no HOST:PORT with a port of 1 to "
                f"{MAX_PORT - 1}; give the address of process 0 as the others see it, as "
                "node001:8476"
            )
        if self.count < 1:
            raise ValueError(f"num_processes={self.count}; use at least 1")
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"process_id={self.index} is not one of num_processes={self.count}; use 0 to "
                f"{self.count - 1}, each once"
            )

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])

    @property
    def jax_port(self) -> int:
        """Where `jax.distributed` listens: known before, so that a firewall can open it."""
        return self.port + 1

    @property
    def jax_coordinator(self) -> str:
        return f"{self.coordinator.rpartition(':')[0]}:{self.jax_port}"

    @property
    def is_first(self) -> bool:
        return self.index == 0
