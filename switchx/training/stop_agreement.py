# SPDX-License-Identifier: Apache-2.0
"""Several processes agree on the step after which they stop.

A signal reaches them at different steps, or one of them alone (a preempted machine). If each
stopped at its own, the others would wait in a collective for ever.
"""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class StopAgreement:
    """Called once a step by all processes; true in all of them, or in none.

    The answer is one step old where there are several: nobody waits for the step that runs.
    """

    def __init__(self, stop: threading.Event):
        """Args: stop: set when this process is asked to stop."""
        self._stop = stop
        self._asked: jax.Array | None = None

    def __call__(self) -> bool:
        if jax.process_count() == 1:
            return self._stop.is_set()
        before, self._asked = self._asked, self._ask()
        return before is not None and bool(before)

    def _ask(self) -> jax.Array:
        devices, is_any_set = _program()
        sharding = NamedSharding(devices, PartitionSpec("process"))
        votes = np.full(jax.local_device_count(), self._stop.is_set())
        return is_any_set(jax.make_array_from_process_local_data(sharding, votes))


@functools.cache
def _program():
    devices = Mesh(np.array(jax.devices()), "process")
    everywhere = NamedSharding(devices, PartitionSpec())
    return devices, jax.jit(jnp.any, out_shardings=everywhere)
