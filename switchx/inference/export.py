# SPDX-License-Identifier: Apache-2.0
"""Exporting a model as programs of fixed shapes, prefill and a step, with weights beside them.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 3.1, steps 3 to 6: the model as a static
graph (`jax.export`) for deployment on a platform: split over a mesh, with its communication and
the platform's kernels inside. `run_exported.py` runs it, without this package.

Dims: B batch, L length, M input length, P prompt, T new tokens
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax import export as jax_export
from jax.sharding import AbstractDevice, NamedSharding, PartitionSpec
from safetensors.flax import save_file

from pallas_kernels import QTensor
from pallas_kernels.tpu_chip import is_tpu_kind
from switchx import tree
from switchx.axes import dims_of
from switchx.fields import FieldError, require, require_at_least
from switchx.inference import run_exported
from switchx.inference.config import DecodingConfig
from switchx.inference.decode import Decoding, prefill, run_step
from switchx.inference.generate import check_tokens, for_decoding, positions_needed
from switchx.inference.logits_processors import Rows, RowSettings
from switchx.inference.model_mesh import ModelMesh
from switchx.inference.offload.chosen_experts import layer_path, without_bank
from switchx.inference.offload.cut_program import CutProgram, donated_leaves
from switchx.inference.offload.expert_slots import slotted
from switchx.inference.offload.ring_decode import check_ring
from switchx.inference.offload.ring_program import Bank, run_with_ring
from switchx.inference.quantize import in_bytes, native
from switchx.models.config import ModelConfig
from switchx.models.stored_experts import EXPERTS_PATH
from switchx.models.unroll import unrolled
from switchx.partitioning.compiler_options import CompilerOptions
from switchx.partitioning.mesh import MeshSpec, batch_parts
from switchx.whole_folders import give_mode_of_umask, new_folder, num_bytes, write_manifest

# JAX does not promise to run these in later versions: `run_exported` asks for this one.
UNSTABLE_CALLS = ("ragged_all_to_all", "__gpu$xla.gpu.triton")
# The platforms, and the kind of device whose kernels are used where none is named.
DEVICE_KINDS = {"cpu": "cpu", "tpu": "TPU v5 lite", "cuda": "NVIDIA H200"}

_KINDS = {"cpu": ("cpu",), "tpu": ("TPU",), "cuda": ("NVIDIA", "Tesla", "Quadro")}


@dataclasses.dataclass(frozen=True)
class Target:
    """The target that programs are exported for; this machine need not have it.

    Attributes:
        platform: one of `DEVICE_KINDS`.
        device_kind: the device's kind, as JAX names it; None is the kind in `DEVICE_KINDS`.
        mesh: the mesh; None means one device.
        compiler: XLA's options for the programs, which are compiled where they run.

    Raises:
        ValueError: no device of the platform has such a name.
    """

    platform: str
    device_kind: str | None = None
    mesh: MeshSpec | None = None
    compiler: CompilerOptions = CompilerOptions()

    def __post_init__(self):
        names = _KINDS[self.platform]
        is_tpu = self.platform == "tpu"
        is_known = is_tpu_kind(self.kind) if is_tpu else self.kind.startswith(names)
        require(
            is_known,
            f"device_kind={self.kind!r} of platform {self.platform!r}: no device of it is "
            f"called so, and kernels are chosen by the name; use that of jax.devices()[0]."
            f"device_kind there, which begins with {' or '.join(names)}, as "
            f"{DEVICE_KINDS[self.platform]!r}",
        )

    @property
    def kind(self) -> str:
        return self.device_kind or DEVICE_KINDS[self.platform]

    def devices(self) -> ModelMesh:
        spec = self.mesh or MeshSpec()
        cores = 1 if self.platform == "tpu" else None
        device = AbstractDevice(device_kind=self.kind, num_cores=cores, platform=self.platform)
        return ModelMesh(spec.abstract(device), spec.rules)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The fixed sizes: number of rows of a batch, and most tokens of an input."""

    batch_size: int
    input_length: int

    def __post_init__(self):
        require_at_least(self, 1, "batch_size", "input_length")


def export_model(
    folder,
    config: ModelConfig,
    params: dict,
    decoding: DecodingConfig,
    shapes: Shapes,
    targets: list[Target],
    about: dict[str, Any],
    add_files: Callable[[pathlib.Path], None] = lambda folder: None,
    *,
    ring_slots: int | None = None,
) -> tuple[dict[str, Any], int]:
    """Writes a folder of programs and weights, whole or not at all.

    Args:
        config, params: the model, as it was trained or quantized. No token is dropped, and
            finished rows take part in no Switch layer.
        targets: targets with different platforms and the same mesh.
        about: JSON for the manifest: where the model comes from and how to repeat the export.
        add_files: writes further files; called with the folder.
        ring_slots: K: the experts of all but K - 2 layers of each stack are arguments in host
            memory and stream to the device in each call (`ring_decode.py`); None keeps all
            experts on the device.

    Returns:
        The manifest, and the size of all files in bytes.

    Raises:
        ValueError: the shapes do not fit the model or the mesh, or there is a ring on a mesh;
            see also `check_ring` and `whole_folders.new_folder`.
    """
    decoding = dataclasses.replace(decoding, pruning="experts")
    config = for_decoding(config)
    _check_settings(config, decoding, shapes)
    if ring_slots is not None:
        config, params = _for_ring(config, params, ring_slots, targets)
    programs = {
        target.platform: _export(config, params, decoding, shapes, target, ring_slots)
        for target in targets
    }
    files = {}
    for platform, described in programs.items():
        for name in ("prefill", "step"):
            described[name]["file"] = file = f"{name}.{platform}.jax_export"
            files[file] = described[name].pop("program")
    content = {
        "format": run_exported.FORMAT,
        "format_version": run_exported.FORMAT_VERSION,
        "layout_version": QTensor.LAYOUT_VERSION,
        "versions": {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "calling_convention": max(p.calling_convention_version for p in files.values()),
        },
        "about": about,
        "model": dataclasses.asdict(config),
        "decoding": dataclasses.asdict(decoding),
        **dataclasses.asdict(shapes),
        "num_outputs": [decoding.num_samples, decoding.num_return_sequences],
        "mesh": dict(targets[0].devices().mesh.shape),
        "ring": _ring(ring_slots, next(iter(programs.values()))["weights"]),
        "programs": programs,
    }
    with new_folder(folder) as partial:
        save_file(tree.named_leaves(in_bytes(params)), at := partial / run_exported.WEIGHTS)
        give_mode_of_umask(at)
        for file, program in files.items():
            (partial / file).write_bytes(program.serialize())
        (partial / "run.py").write_bytes(pathlib.Path(run_exported.__file__).read_bytes())
        add_files(partial)
        content = write_manifest(partial, run_exported.MANIFEST, content, "sha256")
        return content, num_bytes(partial)


def _check_settings(config: ModelConfig, decoding: DecodingConfig, shapes: Shapes) -> None:
    """Raises ValueError: settings do not fit the model, or are not possible in an export."""
    check_tokens(config, decoding)
    if decoding.stop:
        way_out = "an export has token ids alone, no texts; leave it out, and cut the texts"
        raise FieldError(decoding, "stop", way_out)
    if decoding.num_samples > shapes.batch_size:
        way_out = f"use batch_size={shapes.batch_size} at most, or a larger one"
        field = "num_return_sequences" if decoding.best_of is None else "best_of"
        raise FieldError(decoding, field, way_out)
    needed = positions_needed(config, shapes.input_length, decoding.max_new_tokens)
    if needed is not None and needed > config.max_length:
        raise ValueError(
            f"input_length={shapes.input_length} and max_new_tokens={decoding.max_new_tokens} "
            f"need {needed} positions, the model has {config.max_length}; use less"
        )


def _for_ring(config: ModelConfig, params: dict, slots: int, targets: list[Target]):
    """The unrolled model, in the form for tracing programs cut at its Switch layers."""
    require(
        all(target.mesh is None for target in targets),
        f"ring_slots={slots} with a mesh: experts stream to one device; leave out one of the "
        "two",
    )
    check_ring(config, slots)
    config, params = unrolled(config, params)
    return slotted(config), params


def _ring(slots: int | None, weights: dict[str, dict[str, Any]]) -> dict[str, int] | None:
    """The number of slots and the bytes in host memory, which are alike on all platforms."""
    if slots is None:
        return None
    host_bytes = sum(
        math.prod(each["shape"]) * jnp.dtype(each["dtype"]).itemsize
        for each in weights.values()
        if "memory" in each
    )
    return {"slots": slots, "host_bytes": host_bytes}


def _export(config: ModelConfig, params, decoding, shapes: Shapes, target: Target, ring_slots):
    """Exports a target's two programs, which take and return flat dictionaries of arrays."""
    devices = target.devices()
    parts = batch_parts(devices.mesh, devices.rules)
    if shapes.batch_size % parts:
        raise ValueError(
            f"batch_size={shapes.batch_size} is not divisible by the {parts} devices that the "
            f"mesh splits rows over; use a multiple of {parts}, or a smaller mesh"
        )
    devices.check(config, params)
    params = jax.eval_shape(lambda params: native(params, target.platform), params)
    params = devices.abstract(params)
    bound = _Resident(params)
    if ring_slots is not None:
        bound = _Streamed(config, params, ring_slots, devices.mesh)
    inputs, weights = _split(devices, _inputs(config, shapes)), bound.weights
    # All rows ask for the same: their settings are constants of the program.
    program = decoding.program_of(decoding.max_new_tokens)
    settings = RowSettings.of([decoding] * shapes.batch_size).fitted(program)

    def read(weights, inputs):
        names = "sentence_B", "is_live_B", "max_new_tokens_B"
        rows = Rows(*(inputs[name] for name in names), jax.tree.map(jnp.array, settings))
        texts = {name: x for name, x in inputs.items() if name.endswith(("_BP", "_BM"))}
        return bound.run(prefill, (config, program), weights, rows=rows, **texts)

    def first(weights, inputs):
        return _outputs(read(weights, inputs))

    with devices.use():
        form = jax.eval_shape(read, weights, inputs)

    def step(weights, state):
        state = tree.map_named(lambda name, _: state[name], form)
        state = bound.run(run_step, (config, program), weights, state=state)
        return _outputs(state)

    state = _split(devices, tree.named_leaves(form))
    programs = {
        "prefill": _lowered(first, inputs, weights, target, devices),
        "step": _lowered(step, state, weights, target, devices),
    }
    texts = [each["program"].mlir_module() for each in programs.values()]
    calls = [f"custom_call @{call}" for call in UNSTABLE_CALLS]
    return {
        "device_kind": target.kind,
        "compiler_options": target.compiler.for_decoding(target.platform, target.kind),
        "needs_same_jax": any(call in text for text in texts for call in calls),
        "weights": bound.described(),
        **programs,
    }


class _Resident:
    """A model whose weights are on the devices.

    Attributes:
        weights: shape structs by name, the first argument of a program.
    """

    def __init__(self, params: dict):
        self._params, self.weights = params, tree.named_leaves(params)

    def run(self, program, settings: tuple, weights, **arrays):
        """Runs a jitted program and returns its results; it is called while tracing."""
        params = tree.map_named(lambda name, _: weights[name], self._params)
        return program(*settings, params=params, **arrays)

    def described(self) -> dict[str, dict[str, Any]]:
        return _described(self.weights)


class _Streamed:
    """A model whose experts stream through a ring; see `_Resident`."""

    def __init__(self, config: ModelConfig, params: dict, slots: int, mesh):
        self._config, self._params = config, params
        _, layers = without_bank(config, params)
        host = NamedSharding(mesh, PartitionSpec(), memory_kind=run_exported.HOST)
        self._bank = Bank.abstract(config, layers, slots, host)
        # By the name of each stack, the names of its layers' arrays, and their dtype.
        paths = [layer_path(config.sparse_layer_names[n]) for n in self._bank.numbers]
        like = tree.named_leaves(layers[self._bank.numbers[0]])
        stacks = tree.named_leaves({"streamed": self._bank.streamed})
        self._layers = {
            stack: ([f"{path}{EXPERTS_PATH}{name}" for path in paths], str(leaf.dtype))
            for stack, (name, leaf) in zip(stacks, like.items(), strict=True)
        }
        streamed = {name for names, _ in self._layers.values() for name in names}
        named = tree.named_leaves(params)
        self.weights = {n: x for n, x in named.items() if n not in streamed} | stacks

    def run(self, program, settings: tuple, weights, **arrays):
        params = tree.map_named(lambda name, x: weights.get(name, x), self._params)
        absent, layers = without_bank(self._config, params)
        streamed = {"streamed": self._bank.streamed}
        streamed = tree.map_named(lambda name, _: weights[name], streamed)["streamed"]
        resident = {number: layers[number] for number in self._bank.resident}
        bank = dataclasses.replace(self._bank, resident=resident, streamed=streamed)
        arrays |= {"params": absent}
        structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        cut = CutProgram(program.trace(*settings, **structs), donated_leaves(arrays))
        return run_with_ring(self._config, cut, bank, jax.tree.leaves(arrays))

    def described(self) -> dict[str, dict[str, Any]]:
        """Describes the weights, with the file's arrays that form the stacks in host memory."""
        found = _described(self.weights)
        for stack, (names, dtype) in self._layers.items():
            memory = {"memory": run_exported.HOST, "layers": names, "dtype_of_layers": dtype}
            found[stack] |= memory
        return found


def _lowered(function, arguments, weights, target: Target, devices: ModelMesh):
    """Exports one program, with descriptions of its inputs and outputs."""
    with devices.use():
        outputs = _split(devices, jax.eval_shape(function, weights, arguments))
        is_split = devices.mesh.size > 1
        shardings = jax.tree.map(lambda leaf: leaf.sharding, outputs) if is_split else None
        exported = jax_export.export(
            jax.jit(function, out_shardings=shardings),
            platforms=[target.platform],
            disabled_checks=[*map(jax_export.DisabledSafetyCheck.custom_call, UNSTABLE_CALLS)],
        )(weights, arguments)
    return {
        "program": exported,
        "in": _described(arguments),
        "out": [_described(each) for each in outputs],
    }


def _outputs(state: Decoding):
    """The state, and the outputs so far."""
    token_BLT, score_BL = state.hypotheses.results(state.rows)
    outputs = {"token_BLT": token_BLT, "score_BL": score_BL}
    if (log_probs := state.hypotheses.result_log_probs) is not None:
        outputs |= vars(log_probs)
    return tree.named_leaves(state), outputs | {"is_live_B": state.rows.is_live_B}


def _inputs(config: ModelConfig, shapes: Shapes) -> dict[str, jax.ShapeDtypeStruct]:
    B, M = shapes.batch_size, shapes.input_length
    P = 1 if config.is_encoder_decoder else M
    forms = {name: (B,) for name in ("sentence_B", "is_live_B", "max_new_tokens_B")}
    forms |= {"prompt_BP": (B, P), "is_prompt_BP": (B, P)}
    if config.is_encoder_decoder:
        forms |= {"source_BM": (B, M), "is_source_BM": (B, M)}
    return {
        name: jax.ShapeDtypeStruct(shape, bool if name.startswith("is_") else jnp.int32)
        for name, shape in forms.items()
    }


def _split(devices: ModelMesh, arrays):
    """Shape structs with the shardings of activations, by the letters in their names."""
    if devices.mesh.size == 1:
        return arrays

    def split(name, leaf):
        dims = dims_of(name.rsplit("/", 1)[-1], len(leaf.shape))
        spec = devices.rules.spec(dims, leaf.shape, devices.mesh, table="activations")
        sharding = NamedSharding(devices.mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return tree.map_named(split, arrays)


def _described(arrays) -> dict[str, dict[str, Any]]:
    """Describes arrays by name: shape, dtype, and the mesh axes that split each dimension."""

    def axes(leaf) -> list[list[str]]:
        is_split = leaf.sharding is not None and leaf.sharding.mesh.size > 1
        entries = tuple(leaf.sharding.spec) if is_split else (None,) * len(leaf.shape)
        return [[each] if isinstance(each, str) else list(each or ()) for each in entries]

    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "axes": axes(leaf)}
        for name, leaf in tree.named_leaves(arrays).items()
    }
