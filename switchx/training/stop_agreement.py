# SPDX-License-Identifier: Apache-2.0
"""Several processes agree on the step after which they stop.

A signal reaches them at different steps, or one of them alone (a preempted machine). If each
stopped at its own, the others would wait in a collective for ever.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class StopAgreement:
    """Called once a step by all processes; true in all of them, or in none.

    The answer is one step old where there are several: nobody waits for the step that runs.
    """

    def __init__(self, stop: threading.Event, mesh: Mesh):
        """Asks nothing yet.

        Args:
            stop: set when this process is asked to stop.
            mesh: of the devices that vote, those of all processes.
        """
        self._stop = stop
        self._asked: jax.Array | None = None
        self._size = mesh.size
        self._one_each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._is_any_set = jax.jit(jnp.any, out_shardings=everywhere)

    def __call__(self) -> bool:
        if jax.process_count() == 1:
            return self._stop.is_set()
        before, self._asked = self._asked, self._ask()
        return before is not None and bool(before)

    def _ask(self) -> jax.Array:
        vote = np.array([self._stop.is_set()])
        votes = jax.make_array_from_callback((self._size,), self._one_each, lambda _: vote)
        return self._is_any_set(votes)
