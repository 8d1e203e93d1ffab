# SPDX-License-Identifier: Apache-2.0
"""Parts of `check accelerator` about decoding: times, command buffers, equal texts, exports.

Dims: B rows of a batch, M tokens of a source, T generated tokens
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from pallas_kernels import implementations
from pallas_kernels.bench.timing import Contender, speedup, take_turns
from switchx.bench import decode_programs, offload
from switchx.bench.accelerator.kernels import COMPILING
from switchx.bench.accelerator.parts import Session, row
from switchx.bench.accelerator.training import DENSE, TINY, sparse
from switchx.bench.peers import torch_peer
from switchx.inference.config import DecodingConfig
from switchx.inference.decode import run_until
from switchx.inference.export import Shapes, Target, export_model
from switchx.inference.generate import Generator, for_decoding
from switchx.inference.quantize import quantize_experts
from switchx.interop.huggingface import describe
from switchx.models.config import ModelConfig, Precision
from switchx.models.params import init_params
from switchx.models.unroll import unrolled
from switchx.partitioning.compiler_options import DECODING_OPTIONS

NO_END = -1  # no token ends a text: all have one length
# XLA's default options, and those of our programs.
OPTIONS = {"default": {}, "loops in command buffers": DECODING_OPTIONS["gpu"]}
ROUNDS = 5
WEIGHTS = {"bfloat16": None, "int8": 8, "int4": 4}


def model(session: Session, weights: str = "bfloat16", layers: int = 6, dtype="bfloat16"):
    """A sparse model of Switch-Base's widths, as it is decoded, and its parameters."""
    dense = dataclasses.replace(
        session.sized(DENSE, TINY),
        num_encoder_layers=session.sized(layers, 2),
        num_decoder_layers=session.sized(layers, 2),
        precision=Precision(params=dtype, compute=dtype),
        # With tied tables random weights repeat one token; these write different ones.
        tie_embeddings=False,
        init_scale=4.0,
    )
    config = sparse(dense, session.sized(8, 2), "gather")
    params = jax.jit(functools.partial(init_params, config))(jax.random.key(0))
    config, params = unrolled(config, params)
    if (bits := WEIGHTS[weights]) is not None:
        config, params, _, _ = quantize_experts(config, params, bits=bits, method="absmax")
    return for_decoding(config), params


@dataclasses.dataclass
class Decoded:
    """A way to decode: prefill, then the loop compiled with options of XLA.

    Attributes:
        texts: the tokens of the last call, `[B, L, T]`.
    """

    config: ModelConfig
    params: dict
    decoding: DecodingConfig
    source_BM: np.ndarray
    options: dict[str, str]
    texts: Any = None
    loop: Any = None

    @property
    def _program(self):
        return self.decoding.program_of(self.decoding.max_new_tokens)

    def begun(self):
        """The state before the first step."""
        return decode_programs.begun(self.config, self.params, self.decoding, self.source_BM)

    def compiled(self, state) -> float:
        """Compiles the loop for a state; returns the seconds that it took."""
        start = time.perf_counter()
        steps = np.int32(0), np.int32(self.decoding.max_new_tokens)
        lowered = run_until.lower(self.config, self._program, self.params, state, *steps)
        self.loop = lowered.compile(compiler_options=self.options)
        return time.perf_counter() - start

    def __call__(self) -> None:
        steps = np.int32(0), np.int32(self.decoding.max_new_tokens)
        state = self.loop(self.params, self.begun(), *steps)
        token_BLT, _ = state.hypotheses.results(state.rows)
        self.texts = np.asarray(token_BLT)


def sources(batch: int, length: int, vocab_size: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(3, vocab_size, (batch, length)).astype(np.int32)


def decoding(session: Session) -> Iterator[dict[str, Any]]:
    """Rows of each batch, kind of weights and option; then texts that have to be equal.

    The programs of a batch are compiled, and then measured, before those of the next one are
    compiled: compiling needs the card, too, and takes most of the time.
    """
    tokens, length = session.sized((32, 32), (4, 8))
    few, many, searched = session.sized((1, 96, 16), (1, 2, 2))
    asked = [
        [("bfloat16", few, 1), ("bfloat16", many, 1)],
        [(weights, batch, 1) for weights in ("int8", "int4") for batch in (few, many)],
        [("bfloat16", searched, 4)],
    ]
    # On a CPU, options for GPUs change nothing.
    options = session.sized(OPTIONS, dict(list(OPTIONS.items())[:2]))
    models = functools.cache(functools.partial(model, session))
    config, _ = models("bfloat16")
    peer_sources = sources(max(many, searched), length, 256)
    with _torch(session, config, peer_sources, tokens) as peer:
        for batches in session.sized(asked, [asked[0][:1], asked[1][1:2], asked[2]]):
            ways, begun = {}, {}
            batches = [each for each in batches if session.is_wanted(_last_case(*each))]
            with concurrent.futures.ThreadPoolExecutor(COMPILING) as pool:
                for weights, batch, beams in batches:
                    config, params = models(weights)
                    source_BM = sources(batch, length, config.vocab_size)
                    settings = DecodingConfig(
                        tokens, beam_size=beams, eos_id=NO_END, pruning="none"
                    )
                    key = f"{weights}, batch {batch}, {beams} beams"
                    for name, chosen in options.items():
                        way = Decoded(config, params, settings, source_BM, chosen)
                        ways.setdefault(key, {})[name] = way
                        begun[key, name] = pool.submit(way.compiled, jax.eval_shape(way.begun))
                compile_s = {key: each.result() for key, each in begun.items()}
            for case, by_option in ways.items():
                yield from _rows_of(session, case, by_option, compile_s, peer, tokens)
    yield from texts(session)


def _last_case(weights: str, batch: int, beams: int) -> str:
    """The last of our rows for a batch: if it is there, all of them were measured."""
    return f"{weights}, batch {batch}, {beams} beams, {list(OPTIONS)[-1]}"


def _rows_of(session, case, by_option, compile_s, peer, tokens) -> Iterator[dict[str, Any]]:
    contenders = {name: Contender(name, way) for name, way in by_option.items()}
    theirs, [first, *_] = None, by_option.values()
    batch, beams = len(first.source_BM), first.decoding.beam_size
    if peer is not None and case.startswith("bfloat16"):
        step = functools.partial(peer.ask, f"{batch} {beams}")
        theirs = Contender("transformers", step)
    every = [*contenders.values(), *([theirs] if theirs else [])]
    take_turns(every, session.sized(ROUNDS, 1))
    for name, each in contenders.items():
        differing = np.any(by_option[name].texts[:, 0] != first.texts[:, 0], axis=-1)
        yield row(
            f"{case}, {name}",
            1e3 * each.median_s,
            "ms",
            tokens_per_s=batch * tokens / each.median_s,
            texts_differing=int(differing.sum()),
            vs_torch=speedup(each, theirs) if theirs else None,
            compile_s=compile_s[case, name],
        )
    if theirs:
        yield row(f"{case}, transformers", 1e3 * theirs.median_s, "ms")


@contextlib.contextmanager
def _torch(session: Session, config: ModelConfig, source_BM, tokens: int):
    """transformers' model of the same sizes on the card, with weights of its own; or None."""
    if not torch_peer.is_available():
        yield None
        return
    settings = {
        "task": "generate",
        "device": session.sized("cuda", "cpu"),
        "dtype": "bfloat16",
        "config": describe(_described(config))[0],
        "inputs": source_BM.tolist(),
        "new_tokens": tokens,
    }
    with torch_peer.TorchPeer(torch_peer.PROGRAM, settings) as peer:
        yield peer


def _described(config: ModelConfig) -> ModelConfig:
    """The model as transformers has it: with a capacity."""
    router = dataclasses.replace(config.switch.router, overflow="drop")
    switch = dataclasses.replace(config.switch, router=router, expert_capacity=None)
    switch = switch.with_dispatcher("gather")
    return dataclasses.replace(config, switch=switch, precision=Precision())


def texts(session: Session) -> Iterator[dict[str, Any]]:
    """Texts of a float32 model by our kernels, by XLA's products, and by the CPU."""
    tokens, length, batch = session.sized((32, 32, 16), (4, 8, 2))
    config, params = model(session, layers=2, dtype="float32")
    source_BM = sources(batch, length, config.vocab_size)
    settings = DecodingConfig(tokens, eos_id=NO_END, pruning="none")

    def texts_of(device, kernels) -> np.ndarray:
        placed = jax.device_put(params, device)
        with (
            jax.default_device(device),
            jax.default_matmul_precision("highest"),
            mock.patch.dict(implementations.KERNELS, kernels),
        ):
            way = Decoded(config, placed, settings, source_BM, {})
            jax.clear_caches()  # the prefill, too, is traced with these kernels
            way.compiled(jax.eval_shape(way.begun))
            way()
        return way.texts[:, 0]

    card, cpu = jax.devices()[0], jax.devices("cpu")[0]
    ours = texts_of(card, {})
    for name, theirs in (
        ("float32, our kernels and XLA's products", texts_of(card, {"gpu": ()})),
        ("float32, the card and the CPU", texts_of(cpu, {})),
    ):
        differing = int(np.any(ours != theirs, axis=-1).sum())
        yield row(name, differing, "texts differing", texts=batch)


def export(session: Session) -> Iterator[dict[str, Any]]:
    """Rows of an exported program (run by its own run.py), of slots and of the ring."""
    config, params = model(session, "int8", layers=2)
    tokens, length, batch = session.sized((16, 16, 8), (4, 8, 2))
    settings = DecodingConfig(tokens, eos_id=NO_END, pruning="none")
    inputs = sources(batch, length, config.vocab_size).tolist()
    answers = Generator(config, params, settings, batch)(inputs)
    resident = [hypotheses[0].tokens for _, hypotheses in sorted(answers)]
    try:
        yield _exported(session, config, params, settings, inputs, resident)
    except ImportError as error:
        yield row("texts differing of run.py", None, "texts differing", why=str(error))
    yield from _slots_and_ring()


def _exported(session, config, params, settings, inputs, resident) -> dict[str, Any]:
    """The row of a program that is exported and then run by its own run.py."""
    device = jax.devices()[0]
    platform = {"gpu": "cuda"}.get(device.platform, device.platform)
    target = Target(platform, None if platform == "cpu" else device.device_kind)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "exported"
        start = time.perf_counter()
        shapes = Shapes(len(inputs), len(inputs[0]))
        export_model(folder, config, params, settings, shapes, [target], {"rebuild": "export"})
        exported_s = time.perf_counter() - start
        start = time.perf_counter()
        env = os.environ | {"JAX_PLATFORMS": session.sized("cuda", "cpu")}
        env.pop("MOSAIC_GPU_RUNTIME_LIB_PATH", None)  # set here; a shell has none
        done = subprocess.run(
            [sys.executable, str(folder / "run.py")],
            input="\n".join(map(json.dumps, inputs)) + "\n",
            env=env,
            capture_output=True,
            text=True,
        )
    took = {"export_s": exported_s, "run_s": time.perf_counter() - start}
    name = "texts differing of run.py"
    if done.returncode:
        return row(name, None, "texts differing", why=done.stderr[-500:], **took)
    found = [json.loads(line)["tokens"] for line in done.stdout.splitlines()]
    differing = sum(a != b for a, b in zip(found, resident, strict=True))
    return row(name, differing, "texts differing", texts=len(inputs), **took)


def _slots_and_ring() -> Iterator[dict[str, Any]]:
    yield _compared("expert_slots=4", *offload.model("bf16"), offload.in_slots)
    timed = offload.timed_turns("bf16", offload.TIMED_SLOTS, 3)
    copies_s = float(np.median(timed["copies_s"]))
    rate = timed["moved_mib"] * 2**20 / copies_s / 1e9 if copies_s else None
    yield row(
        "copies into slots", rate, "GB/s", decoding_s=float(np.median(timed["decoding_s"]))
    )
    yield _compared("a ring of host memory", *offload.ring_model(), offload.in_ring)


def _compared(name: str, config, params, decode) -> dict[str, Any]:
    """A row that compares decoding with experts in host memory with the resident model."""
    resident = offload.decoded(config, params, 1)
    start = time.perf_counter()
    found, traffic = decode(config, params, beams=1)
    seconds = time.perf_counter() - start
    differing = int(np.sum(found != resident))
    return row(
        name, differing, "tokens differing", moved_mib=traffic.moved_bytes / 2**20, s=seconds
    )
