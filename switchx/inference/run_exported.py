# SPDX-License-Identifier: Apache-2.0
"""Runs what `switchx export` wrote, with JAX, NumPy and safetensors alone.

Every export has a copy of this file, `run.py`:

  echo "[69, 70, 258, 1]" | python DIR/run.py

reads one JSON list of token ids per line and writes one object per line: tokens, score,
is_finished (or `outputs`, a list of these, where several outputs per input were exported).
From Python, `ExportedModel(DIR).generate([[69, 70, 258, 1]])`. A decoder-only model's inputs
begin with its start token, `decoding.start_id` of `export.json`, unless that is null.

Dims: B batch, L hypotheses, M input length, P prompt, T new tokens
"""

import argparse
import contextlib
import hashlib
import importlib
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
HOST = "pinned_host"  # a kind of memory, as JAX names it
# Bits of values of a byte or less.
_BITS = {"int4": 4, "int8": 8, "uint8": 8, "float8_e4m3fn": 8}
LANES = 128  # columns of a tile of a TPU's memory


class ExportedModel:
    """The programs and weights of an export, on the devices of this process.

    Attributes:
        manifest: contents of `export.json`.
        batch_size, input_length, max_new_tokens: sizes that it was exported for; inputs may be
            fewer and shorter.
        num_samples, num_outputs: for each input, number of rows of the batch, and of outputs
            that `main` writes.
    """

    def __init__(self, folder):
        """Reads and places everything; programs are compiled at their first use.

        Raises:
            ValueError: a file is missing, cut short or changed; the export is for another
                platform, another number of devices or a later JAX. It says how to export again.
        """
        self.folder = pathlib.Path(folder).expanduser().absolute()
        self.manifest = _read_manifest(self.folder)
        self._require_jax()
        platform, devices = self._platform(), self._devices()
        if platform == "cuda":
            # Importing this tells XLA where the runtime of Hopper's kernels is.
            with contextlib.suppress(ImportError):
                importlib.import_module("jax.experimental.mosaic.gpu")
        for name, (size, sha256) in self.manifest["files"].items():
            self._check_file(name, size, sha256)
        self.batch_size = self.manifest["batch_size"]
        self.input_length = self.manifest["input_length"]
        self.max_new_tokens = self.manifest["decoding"]["max_new_tokens"]
        self.num_samples, self.num_outputs = self.manifest.get("num_outputs", (1, 1))
        axes, kinds = self.manifest["mesh"], (AxisType.Auto,) * len(self.manifest["mesh"])
        devices_of_mesh = np.array(devices).reshape(tuple(axes.values()))
        self._mesh = Mesh(devices_of_mesh, tuple(axes), axis_types=kinds)
        self._programs = self.manifest["programs"][platform]
        self._host_kind = None
        if self.manifest["ring"] is not None:
            self._host_kind = host_memory_kind(devices[0], f"or {self._again} without the ring")
            if self._host_kind is None:
                what = "experts are the device's: kinds of memory have no effect here"
                warnings.warn(f"{self.folder.name}: {what}", stacklevel=2)
        how = {"compiler_options": self._programs.get("compiler_options")}  # of XLA
        self._prefill, step = jax.jit(self._program("prefill"), **how), self._program("step")

        def steps(weights, state, found):
            return jax.lax.while_loop(
                lambda last: jnp.any(last[1]["is_live_B"]),
                lambda last: tuple(step(weights, last[0])),
                (state, found),
            )

        # A step's state is not read again: the next state takes its memory.
        self._step, self._loop = (jax.jit(f, donate_argnums=1, **how) for f in (step, steps))
        self._weights = self._read_weights()

    def generate(
        self, inputs, max_new_tokens: int | None = None, *, first_number: int = 0, **asked
    ) -> list[list[dict]]:
        """Returns each input's hypotheses, the best first, or samples in their order, with:
        tokens, score, is_finished; token_logprobs and top_logprobs where these were exported,
        including the end's.

        Args:
            inputs: lists of token ids, at most `batch_size` divided by the number of samples.
            max_new_tokens: most new tokens, up to the export's number, which None takes.
            first_number: number of earlier inputs; samples depend on an input's number.
            asked: other settings, such as `repetition_penalty`, which have to be the export's.

        Raises:
            ValueError: too many inputs, or one that is empty, too long or has ids outside the
                vocabulary; too many new tokens; a setting not exported. Nothing has run.
        """
        for name, value in json.loads(json.dumps(asked)).items():  # in which tuples are lists
            if value != (own := self.manifest["decoding"].get(name)):
                what = f"{name}={value!r:.60}, exported with {own!r:.60}"
                raise ValueError(f"{what}; leave it out, or {self._again} with --{name}")
        inputs = [_token_list(tokens, i) for i, tokens in enumerate(inputs)]
        if len(inputs) > (most := self.batch_size // self.num_samples):
            what = f"got {len(inputs)} inputs, exported for batches of {most}; give no more"
            raise ValueError(f"{what} at once, or export again with a larger --batch_size")
        limit = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        if not 1 <= limit <= self.max_new_tokens:
            way_out = f"use 1 to {self.max_new_tokens}, or export again with a larger"
            raise ValueError(f"max_new_tokens={limit}; {way_out} --max_new_tokens")
        if first_number < 0:
            raise ValueError(f"first_number={first_number}; use 0, or how many came before")
        for i, tokens in enumerate(inputs):
            if fault := self.fault(tokens):
                raise ValueError(f"input {i} {fault}")
        if not inputs:
            return []
        rows = [tokens for tokens in inputs for _ in range(self.num_samples)]
        at = {name: self._sharding(x) for name, x in self._programs["prefill"]["in"].items()}
        arrays = self._arrays(rows, first_number * self.num_samples, limit)
        begun = self._prefill(self._weights, jax.device_put(arrays, at))
        found = jax.device_get(self._decoded(*begun))
        answers = [[] for _ in inputs]
        for b, beam in np.argwhere(np.isfinite(found["score_BL"][: len(rows)])):  # were found
            answers[b // self.num_samples].append(self._hypothesis(found, (b, beam), limit))
        for number, each in enumerate(answers, first_number):
            if not each:
                raise ValueError(f"input {number} has no answer whose score is a number")
        if self.manifest["decoding"].get("best_of") is not None:
            answers = [sorted(each, key=lambda found: -found["score"]) for each in answers]
        return answers

    def _decoded(self, state: dict, found: dict) -> dict:
        """The outputs at the end; the host waits only for these, not for each token."""
        if self.manifest["ring"] is None:
            return self._loop(self._weights, state, found)[1]
        # No backend has been seen to stream experts from host memory inside a loop.
        while np.any(found["is_live_B"]):
            state, found = self._step(self._weights, state)
        return found

    def lowered_step(self):
        """The lowered step for these devices; `.compile()` reports its costs."""
        state = {
            name: jax.ShapeDtypeStruct(x["shape"], x["dtype"], sharding=self._sharding(x))
            for name, x in self._programs["step"]["in"].items()
        }
        return self._step.lower(self._weights, state)

    def fault(self, tokens: list[int]) -> str | None:
        """The reason why an input cannot be read, to follow its name in a message; or None."""
        V, most = self.manifest["model"]["vocab_size"], self.input_length
        if not tokens:
            return "is empty; give at least one token"
        if len(tokens) > most:
            what = f"has {len(tokens)} tokens, exported for {most} at most"
            return f"{what}; shorten it, or export again with a larger --input_length"
        wrong = [token for token in tokens if not 0 <= token < V]
        return f"has token id {wrong[0]}, the vocabulary has 0 to {V - 1}" if wrong else None

    def _arrays(self, inputs, first_number: int, limit: int) -> dict[str, np.ndarray]:
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
        number_B = np.where(np.arange(B) < n, np.arange(B) + first_number, -1)
        arrays = {"sentence_B": number_B.astype(np.int32), "is_live_B": number_B >= 0}
        arrays["max_new_tokens_B"] = np.full(B, limit, np.int32)
        if not has_encoder:
            return arrays | {"prompt_BP": token_BM, "is_prompt_BP": is_token_BM}
        arrays |= {"source_BM": token_BM, "is_source_BM": is_token_BM}
        start_B1 = np.full((B, 1), decoding["start_id"], np.int32)
        return arrays | {"prompt_BP": start_B1, "is_prompt_BP": np.ones((B, 1), bool)}

    def _hypothesis(self, found: dict, place: tuple[int, int], limit: int) -> dict:
        token_T, decoding = found["token_BLT"][place][:limit], self.manifest["decoding"]
        eos_ids = decoding["eos_id"], *decoding.get("other_eos_ids", ())
        ends = np.flatnonzero(np.isin(token_T, eos_ids))
        length = int(ends[0]) if len(ends) else len(token_T)
        values = {"tokens": token_T[:length].tolist(), "score": float(found["score_BL"][place])}
        values["is_finished"] = is_finished = bool(len(ends))
        if (number := decoding.get("logprobs")) is None:
            return values
        length += is_finished
        names = "likeliest_BLTS", "log_prob_BLTS"
        top = [found[name][place][:length, :number].tolist() for name in names]
        if number:
            values["top_logprobs"] = [dict(zip(*each)) for each in zip(*top)]  # noqa: B905
        return values | {"token_logprobs": found["chosen_BLT"][place][:length].tolist()}

    def _sharding(self, described: dict) -> NamedSharding:
        spec = PartitionSpec(*map(tuple, described["axes"]))
        kind = self._host_kind if described.get("memory") == HOST else None
        return NamedSharding(self._mesh, spec, memory_kind=kind)

    def _program(self, name: str):
        file = self.folder / self._programs[name]["file"]
        try:
            exported = export.deserialize(bytearray(file.read_bytes()))
        except Exception as error:
            what = f"{file} cannot be read by jax {jax.__version__} ({error})"
            raise ValueError(f"{what}; {self._again}") from error
        return exported.call

    def _read_weights(self) -> dict:
        """Reads one array after the other; each device gets its part."""
        weights = {}
        with safe_open(self.folder / WEIGHTS, framework="np") as file:
            for name, described in self._programs["weights"].items():
                if "layers" in described:  # a stack in host memory
                    layers = map(file.get_tensor, described["layers"])
                    dtype = described["dtype_of_layers"]
                    array = np.stack([host_form(layer, dtype) for layer in layers])
                else:
                    array = jnp.array(file.get_tensor(name))
                    if (dtype := described["dtype"]) in ("int4", "float8_e4m3fn"):  # in bytes
                        array = jax.lax.bitcast_convert_type(array, dtype)
                        array = array.reshape(described["shape"])
                weights[name] = jax.device_put(array, self._sharding(described))
        return weights

    @property
    def _again(self) -> str:
        return f"make the export again: {self.manifest['about']['rebuild']}"

    def _require_jax(self) -> None:
        made_by, programs = self.manifest["versions"], self.manifest["programs"]
        low = export.minimum_supported_calling_convention_version
        high = export.maximum_supported_calling_convention_version
        is_same = programs.get(_platform_name(), {}).get("needs_same_jax", False)
        theirs, ours = tuple(map(int, made_by["jax"].split(".")[:2])), jax.__version_info__[:2]
        is_read = theirs == ours if is_same else theirs <= ours
        if not (is_read and low <= made_by["calling_convention"] <= high):
            later = "" if is_same else " or a later one that reads it"
            raise ValueError(
                f"{self.folder} was exported by jax {made_by['jax']}, calling convention "
                f"{made_by['calling_convention']}; this is jax {jax.__version__}, which reads "
                f"{low} to {high}: install jax {made_by['jax']}{later}, or {self._again}"
            )

    def _platform(self) -> str:
        platform, programs = _platform_name(), self.manifest["programs"]
        if platform not in programs:
            raise ValueError(
                f"{self.folder} was exported for {', '.join(programs)}, JAX runs on {platform} "
                f"here; run it there, set JAX_PLATFORMS, or {self._again} --platform={platform}"
            )
        kind = programs[platform]["device_kind"]
        if platform != "cpu" and (here := jax.devices()[0].device_kind) != kind:
            what = f"exported for {kind!r}, this is {here!r}: its kernels may not run"
            warnings.warn(f"{what} or be slow here; export with --device_kind", stacklevel=3)
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
        _require_no_pointer(file)
        if file.stat().st_size != size:
            raise ValueError(f"{file} has {file.stat().st_size} bytes, not {size}; {again}")
        with file.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != sha256:
                raise ValueError(f"{file} has changed since it was written; {again}")


def host_memory_kind(device, way_out: str) -> str | None:
    """The kind of host memory that programs read; None on a CPU, where kinds have no effect.
    Raises ValueError on an accelerator without such memory."""
    if device.platform == "cpu":
        return None
    if HOST not in {memory.kind for memory in device.addressable_memories()}:
        what = f"{device.device_kind} has no memory of kind {HOST}, where experts are to be"
        raise ValueError(f"{what}; use another device, {way_out}")
    return HOST


def form_of(shape, dtype: str) -> tuple[tuple[int, ...], str]:
    """The shape and dtype that an array `[E, ...]` has in host memory.

    Matrices of 4 or 8 bits `[E, X, C]` become int32 `[E, W, C]`: X / W consecutive rows form
    one row of words. The TPU compiler slices these in host memory, and copies all of a stack of
    a smaller type. Others of few columns become rows: a device would pad the columns.
    """
    if dtype in _BITS:
        E, rows, columns = shape
        return (E, -(-rows * _BITS[dtype] // 32), columns), "int32"
    return (tuple(shape) if shape[-1] >= LANES else (shape[0], math.prod(shape[1:]))), dtype


def host_form(array: np.ndarray, dtype: str) -> np.ndarray:
    """Converts an array from the file, of a dtype that programs read, to `form_of`'s form.

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
    """The platform's name in `jax.export`."""
    return {"gpu": "cuda"}.get(name := jax.devices()[0].platform, name)


def _require_no_pointer(file: pathlib.Path) -> None:
    """Raises ValueError for the pointer that a clone without Git LFS has in a file's place."""
    with file.open("rb") as opened:
        if opened.read(23) == b"version https://git-lfs":
            what = f"{file} is a pointer of Git LFS and not the file itself"
            raise ValueError(f"{what}: run `git lfs pull` in the clone")


def _read_manifest(folder: pathlib.Path) -> dict:
    file = folder / MANIFEST
    if file.is_file():
        _require_no_pointer(file)
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
        return [operator.index(None if isinstance(x, bool) else x) for x in tokens]
    except TypeError:
        what = f"input {index} is {tokens!r:.40}"
        raise ValueError(f"{what}; expected a list of token ids") from None


def main(argv: list[str] | None = None) -> int:
    """Turns lines of standard input into lines of standard output, a batch at a time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    here = pathlib.Path(__file__).parent
    parser.add_argument("folder", nargs="?", default=here, help="of `switchx export`")
    parser.add_argument("--max_new_tokens", type=int, help="less than was exported for")
    arguments = parser.parse_args(argv)
    try:
        model = ExportedModel(arguments.folder)
        inputs = []
        for number, line in enumerate(sys.stdin, 1):
            try:
                inputs.append(_token_list(json.loads(line), number - 1))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} is no JSON list of ids ({error})") from None
            if fault := model.fault(inputs[-1]):
                raise ValueError(f"line {number} {fault}")
        size = model.batch_size // model.num_samples
        for first in range(0, len(inputs), size):
            batch = inputs[first : first + size]
            for answers in model.generate(batch, arguments.max_new_tokens, first_number=first):
                many = {"outputs": answers[: model.num_outputs]}
                print(json.dumps(answers[0] if model.num_outputs == 1 else many), flush=True)
    except (ValueError, jax.errors.JaxRuntimeError) as error:  # such as an unknown option
        print(f"run.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
