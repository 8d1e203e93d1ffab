# SPDX-License-Identifier: Apache-2.0
"""Exported programs whose experts are arguments in host memory: tokens, memory kinds, bytes."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest
from jax import export as jax_export

from pallas_kernels.aot import gpu_compiler, tpu_compiler
from pallas_kernels.quantization.qtensor import pack_int4
from switchx import tree
from switchx.deploy.compiled import compile_programs, slice_for
from switchx.inference.config import DecodingConfig
from switchx.inference.export import Shapes, Target, export_model
from switchx.inference.offload.ring_program import Stored
from switchx.inference.run_exported import ExportedModel, form_of, host_form, host_memory_kind
from switchx.models.config import ModelConfig, Precision, SwitchConfig
from switchx.models.params import init_params
from switchx.partitioning.mesh import MeshSpec
from tests.data.refusals import refused
from tests.inference.ring_models import INPUTS, MODEL, E, L, T, model, resident
from tests.processes import skip_without

SLOW = pytest.mark.slow
SHAPES = Shapes(batch_size=4, input_length=4)
# Of sizes that kernels take.
WIDE = ModelConfig(
    "encoder_decoder", 12, 128, 256, 2, 64, L, L, switch=SwitchConfig(E, every=1),
    precision=Precision(params="bfloat16", compute="bfloat16"),
)  # fmt: skip
# Of memory, as JAX types it.
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def export(folder, made, slots, platforms=("cpu",), shapes=SHAPES, beam_size=1):
    decoding = DecodingConfig(T, beam_size=beam_size, eos_id=-1)
    targets = [Target(platform) for platform in platforms]
    about = {"rebuild": "switchx export"}
    return export_model(folder, *made, decoding, shapes, targets, about, ring_slots=slots)[0]


CASES = [(None, 1, L), (8, 1, 2), (4, 2, 2), (None, 2, 2)]


@pytest.mark.parametrize(
    "bits, beam_size, slots", [pytest.param(*case, marks=SLOW) for case in CASES]
)
def test_tokens_are_those_of_the_resident_model(tmp_path, bits, beam_size, slots):
    manifest = export(tmp_path / "e", model(bits), slots, beam_size=beam_size)
    with pytest.warns(UserWarning, match="kinds of memory have no effect here") as said:
        exported = ExportedModel(tmp_path / "e")
    assert len(said) == 1
    got = [[each["tokens"] for each in beams] for beams in exported.generate(INPUTS)]
    assert got == resident(bits, beam_size)
    experts = sum(
        leaf.nbytes for name, leaf in tree.named_leaves(model(bits)[1]).items()
        if "/experts/" in name
    )  # fmt: skip
    assert manifest["ring"] == {
        "slots": slots, "host_bytes": experts * (L - slots + 2) // L,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_programs_have_experts_in_host_memory_and_copy_them(tmp_path, bits):
    """StableHLO for a TPU and an H200: typed arguments, and a copy of each array of a layer."""
    decoder = dataclasses.replace(WIDE, architecture="decoder_only", num_encoder_layers=0)
    slots, made = L, model(bits, decoder)
    manifest = export(tmp_path / "e", made, slots, ("tpu", "cuda"))
    for platform in ("tpu", "cuda"):
        programs = manifest["programs"][platform]
        described = programs["weights"]
        streamed = {name for name, each in described.items() if "memory" in each}
        # Three matrices of a gated layer, quantized with their scales.
        arrays = 3 if bits is None else 6
        assert len(streamed) == arrays
        for name in ("prefill", "step"):
            file = tmp_path / "e" / programs[name]["file"]
            program = jax_export.deserialize(bytearray(file.read_bytes()))
            (weights, inputs), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
            in_host = {name for name, x in weights.items() if x.memory_space == HOST}
            assert in_host == streamed
            assert {x.memory_space for x in inputs.values()} == {DEVICE}
            text = program.mlir_module()
            (main,) = (line for line in text.splitlines() if "func public @main" in line)
            assert main.count('mhlo.memory_kind = "pinned_host"') == arrays
            copies = text.count('_xla_buffer_placement = "device"')
            # Of the L - K + 2 layers that stream; no prompt is read by the last one's experts.
            assert copies == {"prefill": 1, "step": 2}[name] * arrays


@pytest.mark.aot
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_experts_leave_the_memory_of_a_device(tmp_path, bits, platform):
    """Compiled for a v5e and an H200: bytes of arguments in its host's memory and its own."""
    skip_without({"tpu": tpu_compiler, "cuda": gpu_compiler}[platform])
    kind = {"tpu": "TPU v5 lite", "cuda": "NVIDIA H200"}[platform]
    layers, switch = 8, SwitchConfig(8, every=1)
    sizes = {"d_model": 256, "d_ff": 2048, "num_decoder_layers": layers - L}
    made = model(bits, dataclasses.replace(WIDE, switch=switch, **sizes))
    topology, found = slice_for(kind, 1), {}
    for slots in (2, None):
        folder = tmp_path / str(slots)
        manifest = export(folder, made, slots, (platform,), Shapes(8, 16))
        found[slots] = compile_programs(folder, platform, topology)
    experts = layers * 8 * 3 * 256 * 2048 * (bits or 16) // 8
    for name in ("prefill", "step"):
        ring, all_ = found[2][name], found[None][name]
        assert all_["host_bytes"] == 0
        assert experts <= ring["host_bytes"] <= 1.03 * experts  # with scales
        # All leave the device but two slots; of words there are also the matrices. Some MiB
        # that were in vector memory are in the device's now.
        slots = (2 if bits is None else 4) * experts / layers
        left = all_["needed_bytes"] - ring["needed_bytes"]
        assert left > experts - slots - 2**24
    assert manifest["ring"] is None


def test_words_are_rows_together():
    rng = np.random.default_rng(0)
    int8 = rng.integers(-128, 128, (2, 6, 3)).astype(np.int8)
    word = host_form(int8, "int8")
    assert form_of(int8.shape, "int8") == (word.shape, str(word.dtype)) == ((2, 2, 3), "int32")
    assert word[1, 0, 2].tobytes() == int8[1, :4, 2].tobytes()
    assert word[1, 1, 2].tobytes() == int8[1, 4:, 2].tobytes() + b"\0\0"
    int4 = rng.integers(-8, 8, (2, 8, 4))
    word = host_form(np.asarray(pack_int4(int4)), "int4")
    assert form_of(int4.shape, "int4")[0] == word.shape == (2, 1, 4)
    word = int(word[0, 0, 1]) & (2**32 - 1)
    assert [word >> 4 * place & 15 for place in range(8)] == [
        int(x) & 15 for x in int4[0, :, 1]
    ]
    for dtype, packed, want in (("int8", int8, int8), ("int4", pack_int4(int4), int4)):
        form = host_form(np.asarray(packed), dtype)
        stored = Stored(jax.numpy.array(form), want.shape[1:], dtype)
        np.testing.assert_array_equal(np.asarray(stored.parameter(), np.int8), want)
    float8 = Stored(
        jax.numpy.array(host_form(int8.view(np.uint8), "float8_e4m3fn")), int8.shape[1:],
        "float8_e4m3fn",
    ).parameter()  # fmt: skip
    assert float8.dtype == "float8_e4m3fn"
    np.testing.assert_array_equal(np.asarray(float8).view(np.int8), int8)


def test_what_is_refused(tmp_path):
    config, params = MODEL, init_params(MODEL, jax.random.key(0))
    mesh = MeshSpec(data=1, expert=2)
    arguments = DecodingConfig(T), SHAPES, [Target("cpu", mesh=mesh)], {}
    with refused("ring_slots=2 with a mesh: experts stream to one device"):
        export_model(tmp_path / "e", config, params, *arguments, ring_slots=2)
    with refused(f"a ring of {L + 1} slots, but the encoder has {L} Switch layers"):
        export(tmp_path / "e", (config, params), L + 1)
    assert list(tmp_path.iterdir()) == []


def test_an_accelerator_needs_the_kind_of_memory():
    class Device:
        platform, device_kind = "tpu", "TPU v1"

        def addressable_memories(self):
            return []

    with refused("TPU v1 has no memory of kind pinned_host"):
        host_memory_kind(Device(), "or leave the ring out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert host_memory_kind(jax.devices()[0], "") is None
