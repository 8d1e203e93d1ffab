# SPDX-License-Identifier: Apache-2.0
"""Accelerators that are not there, to trace programs for."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def mesh_of(kind: str, platform: str, axes: dict[str, int] | None = None) -> AbstractMesh:
    """A mesh for `jax.sharding.use_abstract_mesh`, of one device where no axes are named."""
    axes = axes or {}
    device = AbstractDevice(
        device_kind=kind, num_cores=1 if platform == "tpu" else None, platform=platform
    )
    return AbstractMesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        abstract_device=device,
    )


def compute_cudnn_by_xla(monkeypatch) -> list[str]:
    """Has XLA compute what is asked of cuDNN, in any dtype; an entry a call is returned."""
    calls, asked = [], jax.nn.dot_product_attention

    def answered(*arguments, implementation, **options):
        calls.append(implementation)
        return asked(*arguments, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", answered)
    monkeypatch.setattr("switchx.layers.attention._require_cudnn", lambda *arguments: None)
    return calls
