# SPDX-License-Identifier: Apache-2.0
"""Which code runs an operation: plain JAX, or the kernel of a TPU or of a Hopper GPU."""

import functools
import importlib
import warnings
from types import ModuleType

import jax

REFERENCE = "reference"
KERNELS = ("tpu", "gpu")
NAMES = (REFERENCE, *KERNELS)
HOPPER = "9.0"  # the compute capability with wgmma; later ones do not have it


def choose(
    op: str, implementation: str | None, refusal_operands: tuple, *, interpret: bool
) -> ModuleType:
    """The module that runs `pallas_kernels.<op>`.

    None is the kernel of the platform where it takes these operands, otherwise the
    reference, which takes all; on an accelerator a warning says once why. The platform is that
    of the abstract device that `jax.sharding.use_abstract_mesh` sets (compiling for hardware
    that is not there), else of `jax.default_device`, else of `jax.default_backend`: it is
    chosen while tracing, and not by `jax.lax.platform_dependent`, which would lower every
    kernel for every platform. A function that is jitted for CPU on a machine with a GPU names
    the reference.

    Args:
        implementation: one of `NAMES`, or None.
        refusal_operands: what the kernel's `refusal` is asked with.
        interpret: run a kernel by interpretation, on any machine and slowly.

    Raises:
        ValueError: an unknown name, a kernel that this machine cannot run or that does not
            take the operands, `interpret` without the name of a kernel.
    """
    if implementation is not None and implementation not in NAMES:
        raise ValueError(f"implementation={implementation!r}; use None or one of {NAMES}")
    if interpret and implementation not in KERNELS:
        raise ValueError(
            f"interpret=True with implementation={implementation!r}: only kernels are "
            f"interpreted; name one of {KERNELS}"
        )
    device = current_device()
    name = implementation
    if name is None:
        name = device.platform
        reason = unable(name, device) or _module(op, name).refusal(*refusal_operands)
        if reason:
            name = REFERENCE
            if device.platform != "cpu":  # whose way the reference is
                warn_once(
                    f"{op} runs without its kernel, by jax.lax.ragged_dot, which XLA may "
                    f"compute with every expert's matrix for every row: {reason}"
                )
    elif name in KERNELS:
        reason = None if interpret else unable(name, device)
        reason = reason or _module(op, name).refusal(*refusal_operands)
        if reason:
            raise ValueError(f"implementation={name!r} cannot run {op}: {reason}")
    return _module(op, name)


@functools.cache
def warn_once(text: str) -> None:
    """A warning that is given once in a process, whatever the filters are."""
    warnings.warn(text, stacklevel=4)


class Device:
    """Platform (`tpu`, `gpu`, `cpu`, ..), kind and compute capability, known or None."""

    def __init__(self, platform: str, kind: str, compute_capability: str | None):
        self.platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
        self.kind = kind
        self.compute_capability = compute_capability


def current_device() -> Device:
    """The device that programs which are traced now are compiled for."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        kind = abstract.device_kind
        # JAX before 0.12 does not say the platform of an abstract device.
        by_kind = "tpu" if "TPU" in kind else "gpu" if "NVIDIA" in kind else "cpu"
        hopper = HOPPER if any(name in kind for name in ("H100", "H200", "GH200")) else None
        return Device(getattr(abstract, "platform", None) or by_kind, kind, hopper)
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):
        default = jax.devices(default)[0]
    return Device(
        default.platform, default.device_kind, getattr(default, "compute_capability", None)
    )


def unable(name: str, device: Device) -> str | None:
    """Why a device cannot run the kernels `name`, with the way out; None if it can."""
    way_out = f"use implementation=None or {REFERENCE!r}, or interpret=True to test it slowly"
    if name not in KERNELS or device.platform != name:
        return f"it needs a {name.upper()}, and JAX runs on {device.platform}; {way_out}"
    if name == "gpu" and device.compute_capability != HOPPER:
        return (
            f"it needs a GPU of compute capability {HOPPER} (Hopper), and {device.kind} has "
            f"{device.compute_capability}; {way_out}"
        )
    return None


def _module(op: str, name: str) -> ModuleType:
    # Imported when it is used: the compiler of the other hardware is not needed.
    return importlib.import_module(f"pallas_kernels.{op}.{name}")
