# SPDX-License-Identifier: Apache-2.0
"""Accelerators that are not there, to trace programs for."""

import inspect

from jax.sharding import AbstractDevice, AbstractMesh


def mesh_of(kind: str, platform: str) -> AbstractMesh:
    """A mesh of one device, for `jax.sharding.use_abstract_mesh`."""
    described = {"device_kind": kind, "num_cores": 1 if platform == "tpu" else None}
    if "platform" in inspect.signature(AbstractDevice).parameters:  # JAX 0.12
        described["platform"] = platform
    return AbstractMesh((), (), abstract_device=AbstractDevice(**described))
