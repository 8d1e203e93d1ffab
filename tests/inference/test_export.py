# SPDX-License-Identifier: Apache-2.0
"""What is exported says what it is, has the kernels of its platform, and its mesh."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from jax import export as jax_export
from safetensors import safe_open

from switchx import tree
from switchx.inference.export import DEVICE_KINDS, Shapes, Target
from switchx.models.config import ModelConfig, Precision, SwitchConfig
from switchx.models.params import init_params
from tests.cases import slow_unless
from tests.data.refusals import refused
from tests.inference import exports
from tests.inference.exports import MESH, export
from tests.inference.tiny import CONFIG, trained

# Of sizes that kernels take; an H200's multiply bfloat16.
WIDE = ModelConfig(
    "encoder_decoder", 12, 128, 256, 2, 64, 1, 1, switch=SwitchConfig(4, every=1),
    precision=Precision(compute="bfloat16"),
)  # fmt: skip
KERNELS = {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu_v2"}


def program(folder, manifest, platform, name) -> jax_export.Exported:
    file = folder / manifest["programs"][platform][name]["file"]
    return jax_export.deserialize(bytearray(file.read_bytes()))


def sizes(described) -> dict:
    return {name: (tuple(x["shape"]), x["dtype"]) for name, x in described.items()}


@pytest.fixture(scope="module")
def for_accelerators(tmp_path_factory):
    """int4 for both, on a machine that is neither."""
    folder = tmp_path_factory.mktemp("exports") / "int4"
    model = trained(4, WIDE, rest="bfloat16")
    return folder, export(folder, model, ("tpu", "cuda"))


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_programs_are_for_their_platform_with_its_kernels(for_accelerators, platform):
    folder, manifest = for_accelerators
    for name in ("prefill", "step"):
        exported = program(folder, manifest, platform, name)
        assert (exported.platforms, exported.nr_devices) == ((platform,), 1)
        text = exported.mlir_module()
        # Two products of a layer, also of a gated one, whose first has both matrices: the
        # encoder's, which prefill reads, or the decoder's. Rows are few: no schedule beside.
        assert text.count(f"custom_call @{KERNELS[platform]}") == 2
        assert "ragged_dot" not in text
    assert manifest["programs"][platform]["device_kind"] == DEVICE_KINDS[platform]


def test_what_goes_in_and_out_is_described(for_accelerators):
    folder, manifest = for_accelerators
    programs = manifest["programs"]["tpu"]
    for name in ("prefill", "step"):
        exported = program(folder, manifest, "tpu", name)
        (weights, inputs), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
        outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
        for got, want in (
            (programs["weights"], weights),
            (programs[name]["in"], inputs),
            *zip(programs[name]["out"], outputs, strict=True),
        ):
            leaves = tree.named_leaves(want)
            assert sizes(got) == {n: (x.shape, str(x.dtype)) for n, x in leaves.items()}
    # A step reads what a step and prefill give.
    state = sizes(programs["step"]["in"])
    assert state == sizes(programs["step"]["out"][0]) == sizes(programs["prefill"]["out"][0])
    assert sizes(programs["prefill"]["out"][1]) == {
        "token_BLT": ((4, 1, 5), "int32"),
        "score_BL": ((4, 1), "float32"),
        "is_live_B": ((4,), "bool"),
    }


def test_float32_for_gpus_needs_the_jax_that_made_it(tmp_path):
    """Its products are Triton's kernels, which JAX may change."""
    config, params = trained()
    in_encoder = dataclasses.replace(config.switch, stacks="encoder")
    in_encoder = dataclasses.replace(config, switch=in_encoder)
    for model, places in (
        ((config, params), ["prefill", "step"]),
        ((in_encoder, init_params(in_encoder, jax.random.key(0))), ["prefill"]),
    ):
        manifest = export(folder := tmp_path / str(len(places)), model, ("cuda",))
        assert manifest["programs"]["cuda"]["needs_same_jax"]
        texts = {n: program(folder, manifest, "cuda", n) for n in ("prefill", "step")}
        texts = {name: each.mlir_module() for name, each in texts.items()}
        call = "custom_call @__gpu$xla.gpu.triton"
        assert [name for name, text in texts.items() if call in text] == places


def test_weights_are_stored_packed_and_the_manifest_says_what_made_them(for_accelerators):
    folder, manifest = for_accelerators
    content = json.loads((folder / "export.json").read_text())
    assert content.keys() - manifest.keys() == {"sha256"}
    files = {path.name for path in folder.iterdir()}
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # the umask's
    assert set(content["files"]) | {"export.json"} == files
    assert content["versions"]["jax"] == jax.__version__
    assert content["about"]["rebuild"] == exports.REBUILD
    weights = content["programs"]["tpu"]["weights"]
    with safe_open(folder / "weights.safetensors", framework="np") as file:
        assert set(file.keys()) == weights.keys()
        for name, described in weights.items():
            shape = file.get_slice(name).get_shape()
            is_packed = described["dtype"] == "int4"
            assert math.prod(shape) * (2 if is_packed else 1) == math.prod(described["shape"])
    assert sum(each["dtype"] == "int4" for each in weights.values()) == 6


def test_a_mesh_that_is_not_here_is_in_the_program(tmp_path):
    """Of 32 devices; on this platform the exchange is one of XLA's, in the program."""
    mesh = dataclasses.replace(MESH, data=1, expert=4, model=8)
    config = dataclasses.replace(CONFIG, num_heads=8)
    manifest = export(tmp_path / "m", trained(None, config), ("tpu",), mesh=mesh)
    assert manifest["mesh"] == {
        "pipe": 1, "data": 1, "fsdp": 1, "node": 1, "expert": 4, "model": 8,
    }  # fmt: skip
    programs = manifest["programs"]["tpu"]
    assert programs["needs_same_jax"]
    step = program(tmp_path / "m", manifest, "tpu", "step")
    assert step.nr_devices == 32
    text = step.mlir_module()
    assert "ragged_all_to_all" in text and "all_reduce" in text
    experts = programs["weights"]["decoder/blocks/layer_0/ffn/experts/w_in_EDF"]
    assert experts["axes"] == [["expert"], [], ["model"]]
    cache = programs["step"]["in"]["cache/0/past/key_BHKM"]
    assert cache["axes"] == [["expert"], ["model"], [], []]


@pytest.mark.parametrize(
    ("bits", "platform"),
    [
        slow_unless((bits, platform) == (4, "tpu"), bits, platform)
        for bits in (None, 8, 4)
        for platform in ("tpu", "cuda")
    ],
)
def test_kernels_run_on_meshes_too(tmp_path, bits, platform):
    options = {} if bits is None else {"rest": "bfloat16"}
    manifest = export(tmp_path / "m", trained(bits, WIDE, **options), (platform,), mesh=MESH)
    step = program(tmp_path / "m", manifest, platform, "step")
    assert f"custom_call @{KERNELS[platform]}" in step.mlir_module()


def test_the_kind_of_a_device_decides_its_kernels_and_shapes_are_positive():
    for kind, name in (("NVIDIA A100", "triton"), ("NVIDIA H100", "gpu")):
        from pallas_kernels.implementations import choose

        operands = (np.dtype("bfloat16"), np.dtype("bfloat16"), 8, 128, 256, 4)
        with Target("cuda", kind).devices().use():
            module = choose("grouped_matmul", None, operands, interpret=False)
        assert module.__name__.endswith(name)
    with refused("Shapes.input_length=0"):
        Shapes(1, 0)


@pytest.mark.parametrize(
    ("shapes", "changes", "mesh", "said"),
    [
        (
            Shapes(3, 6), {}, MESH,
            "batch_size=3 is not divisible by the 4 devices that the mesh splits rows over",
        ),
        (
            Shapes(4, 6), {"positions": "learned", "max_length": 5}, None,
            "input_length=6 and max_new_tokens=5 need 6 positions, the model has 5",
        ),
        (
            Shapes(4, 3), {"positions": "tupe", "max_length": 5, "scale_attention": True}, None,
            "input_length=3 and max_new_tokens=5 need 6 positions, the model has 5",
        ),
        (
            Shapes(8, 6), {"d_ff": 33}, MESH,
            "mlp dimension F=33 is not divisible by mesh axis 'model' of size 2",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_written(
    tmp_path, monkeypatch, shapes, changes, mesh, said
):
    monkeypatch.setattr(exports, "SHAPES", shapes)
    model = trained(None, dataclasses.replace(CONFIG, **changes))
    with refused(said):
        export(tmp_path / "a", model, ("cpu",), mesh=mesh)
    assert list(tmp_path.iterdir()) == []
