# SPDX-License-Identifier: Apache-2.0
"""Another loop in place of the scan over the layers of a stack.

Parameters that are not on the devices arrive layer by layer, in a loop of their own
(`training/offload/host_ring.py`).
"""

import contextlib
import dataclasses
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True)
class LayerLoop:
    """The two functions with which a stack runs its layers.

    Attributes:
        remat: function of the stack's parameters and the configured `ModelConfig.remat` that
            returns the remat of its blocks.
        scan: function with the arguments of `stack.scan_layers`; None uses that one.
    """

    remat: Callable = lambda blocks, configured: configured
    scan: Callable | None = None


# A user context, so that a program that was traced with another loop is traced again.
_loop = jax.make_user_context(LayerLoop())


@contextlib.contextmanager
def use_layer_loop(loop: LayerLoop):
    """Makes stacks that are traced in the block run their layers by `loop`."""
    with _loop(loop):
        yield


def layer_loop() -> LayerLoop:
    """The loop in use."""
    return _loop.value
