# SPDX-License-Identifier: Apache-2.0
"""The choice of a back end, for devices that this machine has and for others."""

import types
import warnings

import jax
import pytest

from pallas_kernels import implementations
from pallas_kernels.implementations import choose, current_device, unable
from tests.absent_devices import mesh_of

OPERANDS = ("bfloat16", "bfloat16", 1, 2, 3, 4)
Device = implementations.Device
V5E = Device("tpu", "TPU v5 lite", None)
H200 = Device("cuda", "NVIDIA H200", "9.0")
A100 = Device("cuda", "NVIDIA A100-SXM4-80GB", "8.0")


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that refuse F=3 where `refuses` names them."""
    refuses, asked = set(), []

    def module(op, name):
        def refusal(*operands):
            asked.append(operands)
            return "F=3 is no multiple of 8; pad it to 8" if name in refuses else None

        return types.SimpleNamespace(__name__=f"{op}.{name}", refusal=refusal)

    monkeypatch.setattr(implementations, "_module", module)
    return types.SimpleNamespace(refuses=refuses, asked=asked)


def chosen(monkeypatch, device, implementation=None, interpret=False):
    monkeypatch.setattr(implementations, "current_device", lambda: device)
    return choose("grouped_matmul", implementation, OPERANDS, interpret=interpret).__name__


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (Device("cpu", "cpu", None), "reference"),
        (V5E, "tpu"),
        (H200, "gpu"),
        (A100, "triton"),
        (Device("cuda", "NVIDIA B200", "10.0"), "triton"),
        (Device("gpu", "NVIDIA L4", None), "triton"),
        (Device("cuda", "Tesla T4", "7.5"), "reference"),
        (Device("rocm", "MI300", "gfx942"), "reference"),
    ],
)
@pytest.mark.filterwarnings("ignore:grouped_matmul runs without its kernel")
def test_none_is_the_platforms_kernel_or_the_reference(kernels, monkeypatch, device, name):
    assert chosen(monkeypatch, device) == f"grouped_matmul.{name}"


def test_none_is_the_reference_where_the_kernel_refuses_and_says_so_once(kernels, monkeypatch):
    implementations.warn_once.cache_clear()
    kernels.refuses.add("tpu")
    with pytest.warns(UserWarning, match="without its kernel, .*: F=3 is no multiple") as said:
        assert chosen(monkeypatch, V5E) == "grouped_matmul.reference"
        assert chosen(monkeypatch, V5E) == "grouped_matmul.reference"
    assert len(said) == 1
    assert kernels.asked == [OPERANDS] * 2
    kernels.refuses.add("triton")
    with pytest.warns(UserWarning, match="9.0 .*NVIDIA A100.*; triton: F=3 is no multiple"):
        assert chosen(monkeypatch, A100) == "grouped_matmul.reference"
    with warnings.catch_warnings(action="error"):
        assert chosen(monkeypatch, H200) == "grouped_matmul.gpu"
        assert chosen(monkeypatch, Device("cpu", "cpu", None)) == "grouped_matmul.reference"


def test_what_hoppers_kernel_refuses_is_the_others(kernels, monkeypatch):
    kernels.refuses.add("gpu")
    assert chosen(monkeypatch, H200) == "grouped_matmul.triton"


def test_a_named_one_is_taken_or_refused(kernels, monkeypatch):
    assert chosen(monkeypatch, V5E, "reference") == "grouped_matmul.reference"
    assert chosen(monkeypatch, V5E, "tpu") == "grouped_matmul.tpu"
    for device, name, reason in (
        (V5E, "gpu", "it needs a GPU, and JAX runs on tpu; use implementation=None or 'ref"),
        (A100, "gpu", "compute capability 9.0 .Hopper., and NVIDIA A100-SXM4-80GB has 8.0"),
        (H200, "tpu", "it needs a TPU, and JAX runs on gpu"),
        (V5E, "triton", "it needs a GPU, and JAX runs on tpu"),
        (Device("cuda", "Tesla T4", "7.5"), "triton", "8.0 or later, and Tesla T4 has 7.5"),
    ):
        with pytest.raises(ValueError, match=reason):
            chosen(monkeypatch, device, name)
        # By interpretation it runs anywhere.
        assert chosen(monkeypatch, device, name, interpret=True) == f"grouped_matmul.{name}"
    kernels.refuses.add("tpu")
    for interpret in (False, True):
        with pytest.raises(ValueError, match="'tpu' cannot run grouped_matmul: F=3 is no mul"):
            chosen(monkeypatch, V5E, "tpu", interpret=interpret)


def test_this_machine_is_seen_and_others_can_be_described():
    assert current_device().platform == jax.devices()[0].platform
    with jax.sharding.use_abstract_mesh(mesh_of("TPU v5 lite", "tpu")):
        assert (current_device().platform, unable("tpu", current_device())) == ("tpu", None)
    with jax.default_device(jax.devices("cpu")[0]):
        assert current_device().platform == "cpu"


def test_the_reference_of_both_operations_is_found():
    for op in ("grouped_matmul", "quantized_grouped_matmul"):
        module = choose(op, "reference", OPERANDS, interpret=False)
        assert module.__name__ == f"pallas_kernels.{op}.reference"
