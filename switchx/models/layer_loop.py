# SPDX-License-Identifier: Apache-2.0
"""The loop over the layers of a scanned stack, and where another one takes its place.

Parameters that are not on the devices come layer by layer by a loop of their own
(`training/offload/host_ring.py`).
Dims: N repeats of a run of blocks, B batch, L length, D model
"""

import contextlib
import dataclasses
from collections.abc import Callable

import jax


def scan_layers(run: Callable, x_BLD, blocks, others, inputs):
    """`x, y_n = run(x, blocks[n], others[n], inputs)` for all n: x, and all y stacked."""

    def body(x_BLD, layer):
        return run(x_BLD, *layer, inputs)

    return jax.lax.scan(body, x_BLD, (blocks, others))


@dataclasses.dataclass(frozen=True)
class LayerLoop:
    """The two functions by which a stack runs its layers.

    Attributes:
        remat: function of the stack's parameters and the configured `ModelConfig.remat` that
            returns the remat of its blocks.
        scan: function with the arguments of `scan_layers`.
    """

    remat: Callable = lambda blocks, configured: configured
    scan: Callable = scan_layers


# A user context, so that a program that was traced with another loop is traced again.
_loop = jax.make_user_context(LayerLoop())


@contextlib.contextmanager
def use_layer_loop(loop: LayerLoop):
    """Stacks that are traced in the block run their layers by `loop`."""
    with _loop(loop):
        yield


def layer_loop() -> LayerLoop:
    """The loop in use."""
    return _loop.value
