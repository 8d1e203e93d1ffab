# SPDX-License-Identifier: Apache-2.0
"""Which code runs an operation: plain JAX, or a kernel of a TPU, a Hopper GPU or other GPUs."""

import functools
import importlib.util
import warnings
from types import ModuleType

import jax

REFERENCE = "reference"
# In the order in which a platform's kernels are tried.
KERNELS = {"tpu": ("tpu",), "gpu": ("gpu", "triton")}
NAMES = (REFERENCE, *(name for names in KERNELS.values() for name in names))
HOPPER = "9.0"  # the compute capability with wgmma; later ones do not have it
AMPERE = 8.0  # the first one with bfloat16
TRITON = "jax.experimental.pallas.triton"


def choose(
    op: str, implementation: str | None, refusal_operands: tuple, *, interpret: bool
) -> ModuleType:
    """The module that runs `pallas_kernels.<op>`.

    None is the platform's kernel if it takes these operands, otherwise the reference, which
    takes all; on an accelerator a warning says why, once. The platform is that of the abstract
    device that `jax.sharding.use_abstract_mesh` sets (compiling for hardware that is not
    there), else of `jax.default_device`, else of `jax.default_backend`: it is chosen while
    tracing, and not by `jax.lax.platform_dependent`, which would lower every kernel for every
    platform. A function that is jitted for CPU on a machine with a GPU has to name the
    reference.

    Args:
        implementation: one of `NAMES`, or None.
        refusal_operands: arguments of the kernel's `refusal`.
        interpret: run a kernel by interpretation, on any machine and slowly.

    Raises:
        ValueError: an unknown name, a kernel that this machine cannot run or that does not
            take the operands, `interpret` without the name of a kernel.
    """
    if implementation is not None and implementation not in NAMES:
        raise ValueError(f"implementation={implementation!r}; use None or one of {NAMES}")
    if interpret and implementation in (None, REFERENCE):
        raise ValueError(
            f"interpret=True with implementation={implementation!r}: only kernels are "
            f"interpreted; name one of {NAMES[1:]}"
        )
    device = current_device()

    def reason_against(name: str) -> str | None:
        reason = None if interpret else unable(name, device)
        return reason or _module(op, name).refusal(*refusal_operands)

    if implementation is not None:
        if implementation != REFERENCE and (reason := reason_against(implementation)):
            raise ValueError(f"implementation={implementation!r} cannot run {op}: {reason}")
        return _module(op, implementation)
    reasons = []
    for name in KERNELS.get(device.platform, ()):
        if (reason := reason_against(name)) is None:
            return _module(op, name)
        reasons.append(f"{name}: {reason}")
    if device.platform != "cpu":  # where the reference is meant to run
        warn_once(
            f"{op} runs without its kernel, by jax.lax.ragged_dot, which XLA may compute with "
            f"every expert's matrix for every row: "
            + ("; ".join(reasons) or f"there is none for {device.platform}")
        )
    return _module(op, REFERENCE)


@functools.cache
def warn_once(text: str) -> None:
    """Gives a warning once per process, whatever the filters are."""
    warnings.warn(text, stacklevel=4)


class Device:
    """Platform (`tpu`, `gpu`, `cpu`, ..), kind and compute capability, known or None."""

    def __init__(self, platform: str, kind: str, compute_capability: str | None):
        self.platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
        self.is_nvidia = platform == "cuda" or "NVIDIA" in kind
        self.kind = kind
        self.compute_capability = compute_capability


def current_device() -> Device:
    """The device for which programs that are being traced are compiled."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        kind = abstract.device_kind
        # JAX before 0.12 does not give the platform of an abstract device.
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
    """The reason why a device cannot run the kernels `name`, and what to do; None if it can."""
    way_out = f"use implementation=None or {REFERENCE!r}, or interpret=True to test it slowly"
    platform = next(key for key, names in KERNELS.items() if name in names)
    if device.platform != platform:
        return f"it needs a {platform.upper()}, and JAX runs on {device.platform}; {way_out}"
    has = f"and {device.kind} has {device.compute_capability}; {way_out}"
    if name == "gpu" and device.compute_capability != HOPPER:
        return f"it needs a GPU of compute capability {HOPPER} (Hopper), {has}"
    if name == "triton" and not _is_from_ampere(device):
        return f"it needs an NVIDIA GPU of compute capability {AMPERE} or later, {has}"
    if name == "triton" and importlib.util.find_spec(TRITON) is None:
        return f"JAX {jax.__version__} has no {TRITON}; {way_out}"
    return None


def _is_from_ampere(device: Device) -> bool:
    try:
        return device.is_nvidia and float(device.compute_capability or AMPERE) >= AMPERE
    except ValueError:  # not that of an NVIDIA GPU
        return False


def form_of_int4(platform: str | None = None) -> str:
    """The method of `QTensor` that gives weights the form that quantized 16-bit products read.

    It matters for 4 bits, and on a Hopper for 8.

    Args:
        platform: platform of another machine, whose GPU is a Hopper and gets values in the
            order of channels; None is the device in use.
    """
    if platform is not None:
        return "packed" if platform == "cpu" else "native"
    device = current_device()
    if device.platform == "gpu":
        return "fragments" if unable("gpu", device) is None else "packed"
    return "packed" if device.platform == "cpu" else "native"


def _module(op: str, name: str) -> ModuleType:
    # Imported when it is used: the compiler of the other hardware is not needed.
    return importlib.import_module(f"pallas_kernels.{op}.{name}")
