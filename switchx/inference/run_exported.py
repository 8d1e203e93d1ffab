# SPDX-License-Identifier: Apache-2.0
"""Runs what `switchx export` wrote, with JAX, NumPy and safetensors alone.

Every export has a copy of this file, `run.py`:

  echo "[69, 70, 258, 1]" | python DIR/run.py

reads a JSON list of token ids a line and writes an object a line: tokens, score, is_finished.
From Python, `ExportedModel(DIR).generate([[69, 70, 258, 1]])`. A decoder-only model's inputs
begin with the start token, 0.

Dims: B batch, L hypotheses, M input length, P prompt, T new tokens
"""

import argparse
import hashlib
import json
import math
import operator
import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open

FORMAT = "switchx exported model"
FORMAT_VERSION = 3
MANIFEST = "export.json"
WEIGHTS = "weights.safetensors"
# The kind of memory, as JAX names it.
HOST = "pinned_host"
# Of integers of a byte or less.
_BITS = {"int4": 4, "int8": 8, "uint8": 8}
# Columns of a tile of a TPU's memory.
LANES = 128


class ExportedModel:
    """The programs and weights of an export, on the devices of this process.

    Attributes:
        manifest: what `export.json` says.
        batch_size, input_length, max_new_tokens: what it was exported for; inputs may be
            fewer and shorter.
    """

    def __init__(self, folder):
        """Reads and places everything; compiles when it is first used.

        Raises:
            ValueError: a file is missing, cut short or changed; the export is for another
                platform, another number of devices or a later JAX. Says how to make it anew.
        """
        self.folder = pathlib.Path(folder).expanduser().absolute()
        self.manifest = _read_manifest(self.folder)
        self._require_jax()
        platform, devices = self._platform(), self._devices()
        for name, (size, sha256) in self.manifest["files"].items():
            self._check_file(name, size, sha256)
        self.batch_size = self.manifest["batch_size"]
        self.input_length = self.manifest["input_length"]
        self.max_new_tokens = self.manifest["decoding"]["max_new_tokens"]
        axes = self.manifest["mesh"]
        self._mesh = Mesh(
            np.array(devices).reshape(tuple(axes.values())),
            tuple(axes),
            axis_types=(AxisType.Auto,) * len(axes),
        )
        self._programs = self.manifest["programs"][platform]
        self._host_kind = None
        if self.manifest["ring"] is not None:
            self._host_kind = host_memory_kind(devices[0], f"or {self._again} without the ring")
            if self._host_kind is None:
                warnings.warn(
                    f"{self.folder.name} keeps experts in host memory, which on a CPU is the "
                    "device's: kinds of memory have no effect here",
                    stacklevel=2,
                )
        self._prefill, self._step = self._program("prefill"), self._program("step")
        self._weights = self._read_weights()

    def generate(self, inputs, max_new_tokens: int | None = None) -> list[list[dict]]:
        """Of each input its hypotheses, the best first: tokens, score, is_finished.

        Args:
            inputs: lists of token ids, `batch_size` of them at most.
            max_new_tokens: less than was exported for; None is that.

        Raises:
            ValueError: too many inputs; one that is empty, too long or has ids that are not
                the vocabulary's; too many new tokens. Nothing has been run.
        """
        inputs = [_token_list(tokens, i) for i, tokens in enumerate(inputs)]
        if len(inputs) > self.batch_size:
            raise ValueError(
                f"got {len(inputs)} inputs, exported for batches of {self.batch_size}; give no "
                "more at once, or export again with a larger --batch_size"
            )
        limit = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        if not 1 <= limit <= self.max_new_tokens:
            raise ValueError(
                f"max_new_tokens={limit}; use 1 to {self.max_new_tokens}, or export again with "
                "a larger --max_new_tokens"
            )
        for i, tokens in enumerate(inputs):
            if fault := self.fault(tokens):
                raise ValueError(f"input {i} {fault}")
        if not inputs:
            return []
        described = self._programs["prefill"]["in"]
        arrays = {
            name: jax.device_put(x, self._sharding(described[name]))
            for name, x in self._arrays(inputs, limit).items()
        }
        state, said = self._prefill(self._weights, arrays)
        while np.any(said["is_live_B"]):
            state, said = self._step(self._weights, state)
        token_BLT, score_BL = np.asarray(said["token_BLT"]), np.asarray(said["score_BL"])
        return [
            [
                self._hypothesis(token_BLT[b, beam, :limit], float(score_BL[b, beam]))
                for beam in np.flatnonzero(np.isfinite(score_BL[b]))  # those that were found
            ]
            for b in range(len(inputs))
        ]

    def lowered_step(self):
        """The step for these devices, to be compiled: `.compile()` says what it takes."""
        state = {
            name: jax.ShapeDtypeStruct(
                each["shape"], each["dtype"], sharding=self._sharding(each)
            )
            for name, each in self._programs["step"]["in"].items()
        }
        return self._step.lower(self._weights, state)

    def fault(self, tokens: list[int]) -> str | None:
        """Why an input cannot be read, to be said after its name; or None."""
        V = self.manifest["model"]["vocab_size"]
        if not tokens:
            return "is empty; give at least one token"
        if len(tokens) > self.input_length:
            return (
                f"has {len(tokens)} tokens, exported for {self.input_length} at most; shorten "
                "it, or export again with a larger --input_length"
            )
        if wrong := [token for token in tokens if not 0 <= token < V]:
            return f"has token id {wrong[0]}, the vocabulary has 0 to {V - 1}"
        return None

    def _arrays(self, inputs, limit: int) -> dict[str, np.ndarray]:
        B, M, n = self.batch_size, self.input_length, len(inputs)
        decoding = self.manifest["decoding"]
        has_encoder = "source_BM" in self._programs["prefill"]["in"]
        token_BM = np.full((B, M), decoding["pad_id"], np.int32)
        is_token_BM = np.zeros((B, M), bool)
        for b, tokens in enumerate(inputs):
            # An encoder's inputs are padded on the right, prompts on the left.
            places = slice(len(tokens)) if has_encoder else slice(M - len(tokens), None)
            token_BM[b, places], is_token_BM[b, places] = tokens, True
        is_token_BM[n:, 0 if has_encoder else -1] = True
        arrays = {
            "sentence_B": np.where(np.arange(B) < n, np.arange(B), -1).astype(np.int32),
            "is_live_B": np.arange(B) < n,
            "max_new_tokens_B": np.full(B, limit, np.int32),
            "prompt_BP": token_BM,
            "is_prompt_BP": is_token_BM,
        }
        if has_encoder:
            arrays |= {
                "source_BM": token_BM,
                "is_source_BM": is_token_BM,
                "prompt_BP": np.full((B, 1), decoding["start_id"], np.int32),
                "is_prompt_BP": np.ones((B, 1), bool),
            }
        return arrays

    def _hypothesis(self, token_T, score: float) -> dict:
        ends = np.flatnonzero(token_T == self.manifest["decoding"]["eos_id"])
        length = int(ends[0]) if len(ends) else len(token_T)
        return {
            "tokens": token_T[:length].tolist(), "score": score, "is_finished": bool(len(ends))
        }  # fmt: skip

    def _sharding(self, described: dict) -> NamedSharding:
        spec = PartitionSpec(*map(tuple, described["axes"]))
        kind = self._host_kind if described.get("memory") == HOST else None
        return NamedSharding(self._mesh, spec, memory_kind=kind)

    def _program(self, name: str):
        file = self.folder / self._programs[name]["file"]
        try:
            exported = export.deserialize(bytearray(file.read_bytes()))
        except Exception as error:
            raise ValueError(
                f"{file} cannot be read by jax {jax.__version__} ({error}); {self._again}"
            ) from error
        # A step's state is not read again: its memory is the next one's.
        return jax.jit(exported.call, donate_argnums=() if name == "prefill" else (1,))

    def _read_weights(self) -> dict:
        """One array after the other, each device with its part."""
        weights = {}
        with safe_open(self.folder / WEIGHTS, framework="np") as file:
            for name, described in self._programs["weights"].items():
                if "layers" in described:  # a stack in host memory
                    layers = map(file.get_tensor, described["layers"])
                    dtype = described["dtype_of_layers"]
                    array = np.stack([host_form(layer, dtype) for layer in layers])
                else:
                    array = jnp.array(file.get_tensor(name))
                    if described["dtype"] == "int4":  # stored two in a byte
                        nibbles = jax.lax.bitcast_convert_type(array, jnp.int4)
                        array = nibbles.reshape(described["shape"])
                weights[name] = jax.device_put(array, self._sharding(described))
        return weights

    @property
    def _again(self) -> str:
        return f"make the export again: {self.manifest['about']['rebuild']}"

    def _require_jax(self) -> None:
        made_by = self.manifest["versions"]
        low = export.minimum_supported_calling_convention_version
        high = export.maximum_supported_calling_convention_version
        programs = self.manifest["programs"].get(_platform_name(), {})
        is_same = programs.get("needs_same_jax", False)
        theirs = tuple(map(int, made_by["jax"].split(".")[:2]))
        ours = jax.__version_info__[:2]
        is_read = theirs == ours if is_same else theirs <= ours
        if not (is_read and low <= made_by["calling_convention"] <= high):
            later = "" if is_same else " or a later one that reads it"
            raise ValueError(
                f"{self.folder} was exported by jax {made_by['jax']}, calling convention "
                f"{made_by['calling_convention']}; this is jax {jax.__version__}, which reads "
                f"{low} to {high}: install jax {made_by['jax']}{later}, or {self._again}"
            )

    def _platform(self) -> str:
        device, platform = jax.devices()[0], _platform_name()
        programs = self.manifest["programs"]
        if platform not in programs:
            raise ValueError(
                f"{self.folder} was exported for {', '.join(programs)}, JAX runs on {platform} "
                f"here; run it there, set JAX_PLATFORMS, or {self._again} --platform={platform}"
            )
        kind = programs[platform]["device_kind"]
        if platform != "cpu" and device.device_kind != kind:
            warnings.warn(
                f"exported for {kind!r}, this is {device.device_kind!r}: its kernels may not "
                "run or be slow here; export with --device_kind",
                stacklevel=3,
            )
        return platform

    def _devices(self) -> list:
        devices, axes = jax.devices(), self.manifest["mesh"]
        needed = int(np.prod(list(axes.values())))
        if needed == 1:
            return devices[:1]
        if len(devices) != needed:
            text = " x ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)
            raise ValueError(
                f"{self.folder} was exported for the mesh {text}, {needed} devices, but there "
                f"are {len(devices)} ({devices[0].platform}); run it on {needed}, or "
                f"{self._again} with another --mesh"
            )
        return devices

    def _check_file(self, name: str, size: int, sha256: str) -> None:
        file, again = self.folder / name, f"copy the folder again, or {self._again}"
        if file.parent != self.folder or name in ("", ".", ".."):
            raise ValueError(f"{MANIFEST} names {name!r}, which is not in {self.folder}")
        if not file.is_file():
            raise ValueError(f"{file} is missing; {again}")
        if file.stat().st_size != size:
            raise ValueError(f"{file} has {file.stat().st_size} bytes, not {size}; {again}")
        with file.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != sha256:
                raise ValueError(f"{file} has changed since it was written; {again}")


def host_memory_kind(device, way_out: str) -> str | None:
    """The kind of host memory that programs read; None on a CPU, where kinds have no effect.

    Raises:
        ValueError: an accelerator without.
    """
    if device.platform == "cpu":
        return None
    if HOST not in {memory.kind for memory in device.addressable_memories()}:
        raise ValueError(
            f"{device.device_kind} has no memory of kind {HOST}, where experts are to be; use "
            f"another device, {way_out}"
        )
    return HOST


def form_of(shape, dtype: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype that an array `[E, ...]` has in host memory.

    Matrices of 4 or 8 bits `[E, X, C]` are int32 `[E, W, C]`: X / W rows that follow each other
    are a word. The TPU compiler slices these in host memory, and copies all of a stack of a
    smaller type. Of others, those of few columns are rows: a device would fill the columns up.
    """
    if dtype in _BITS:
        E, rows, columns = shape
        return (E, -(-rows * _BITS[dtype] // 32), columns), "int32"
    return (tuple(shape) if shape[-1] >= LANES else (shape[0], math.prod(shape[1:]))), dtype


def host_form(array: np.ndarray, dtype: str) -> np.ndarray:
    """An array as the file has it, of a dtype that programs read, in the form of `form_of`.

    The first row of a word is in its lowest bits; zeros fill up the last one.
    """
    if dtype not in _BITS:
        return array.reshape(form_of(array.shape, dtype)[0])
    bits, part = _BITS[dtype], array.view(np.uint8)
    if bits == 4:  # stored two in a byte
        part = np.stack([part & 15, part >> 4], axis=-1).reshape(*part.shape[:-1], -1)
    E, rows, columns = part.shape
    size = 32 // bits
    part = np.pad(part, ((0, 0), (0, -rows % size), (0, 0)))
    part = part.reshape(E, -1, size, columns).astype(np.uint32)
    word = np.zeros((E, part.shape[1], columns), np.uint32)
    for place in range(size):
        word |= part[:, :, place] << np.uint32(bits * place)
    return word.view(np.int32)


def _platform_name() -> str:
    """As `jax.export` names it."""
    name = jax.devices()[0].platform
    return {"gpu": "cuda"}.get(name, name)


def _read_manifest(folder: pathlib.Path) -> dict:
    file = folder / MANIFEST
    again = "give a folder of `switchx export`, copied whole"
    try:
        content = json.loads(file.read_bytes())
        claimed = content.pop("sha256")
        for name, own in (("format", FORMAT), ("format_version", FORMAT_VERSION)):
            if content[name] != own:
                raise ValueError(f"its {name} is {content[name]!r}, this program reads {own!r}")
        text = json.dumps(content, sort_keys=True)
        if claimed != hashlib.sha256(text.encode()).hexdigest():
            raise ValueError("it has changed since it was written")
    except FileNotFoundError:
        raise ValueError(f"{file} is missing; {again}") from None
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read ({error!s:.300}); {again}") from error
    return content


def _token_list(tokens, index: int) -> list[int]:
    try:
        return list(map(operator.index, tokens))
    except TypeError:
        raise ValueError(
            f"input {index} is {tokens!r:.40}; expected a list of token ids"
        ) from None


def main(argv: list[str] | None = None) -> int:
    """Lines of standard input to lines of standard output, a batch at a time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "folder", nargs="?", default=pathlib.Path(__file__).parent, help="of `switchx export`"
    )
    parser.add_argument("--max_new_tokens", type=int, help="less than was exported for")
    arguments = parser.parse_args(argv)
    try:
        model = ExportedModel(arguments.folder)
        inputs = []
        for number, line in enumerate(sys.stdin, 1):
            try:
                inputs.append(_token_list(json.loads(line), number - 1))
            except ValueError as error:
                raise ValueError(f"line {number} is no JSON list of ids ({error})") from None
            if fault := model.fault(inputs[-1]):
                raise ValueError(f"line {number} {fault}")
        for first in range(0, len(inputs), model.batch_size):
            batch = inputs[first : first + model.batch_size]
            for best, *_ in model.generate(batch, arguments.max_new_tokens):
                print(json.dumps(best), flush=True)
    except ValueError as error:
        print(f"run.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
