# SPDX-License-Identifier: Apache-2.0
"""`switchx bench decode`: output tokens per second, against transformers with equal weights.

It also measures what pruning of finished sentences gains, what int4 experts save, what sampling
and a record of routing cost, what drafted tokens gain, what experts in slots cost, a dense T5
against CTranslate2 where it is installed, and, with the extra `serve`, a server's requests per
second and what it gains from inputs that join a running batch.
Dims: B rows of a batch, M tokens of a source
"""

import dataclasses
import functools
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.timing import Contender, speedup, take_turns
from switchx import api
from switchx.bench import continuous_batching, decode_programs, offload, serving, speculation
from switchx.bench.peers import ctranslate2_peer, torch_peer
from switchx.bench.train import DENSE, MEBIBYTE, in_ms, needed_bytes, switch_model
from switchx.inference.config import DecodingConfig
from switchx.inference.decode import run_until
from switchx.inference.generate import Generator, Hypothesis, for_decoding
from switchx.inference.quantize import quantize_experts
from switchx.interop import huggingface
from switchx.models.params import init_params
from switchx.results import Check, Report

BATCH, INPUTS, NEW_TOKENS = 16, 32, 32
NUM_EXPERTS = (8, 64)
# (batch, beams), name of the check, its bound: our tokens over transformers'.
CASES = (
    ((16, 1), "greedy_b16_vs_torch", 2.2),
    ((1, 1), "greedy_b1_vs_torch", 5.0),
    ((16, 4), "beam4_vs_torch", 2.0),
    ((1, 4), "beam4_b1_vs_torch", 4.0),
)
# The same, over the faster of transformers as it is and with its model compiled.
BEST_BOUND = 1.0
PRUNED_BATCH = 32
PRUNINGS = ("none", "experts", "compact")
NO_END = -1


def inputs(number: int) -> list[list[int]]:
    """Random tokens, as speed does not depend on them."""
    tokens = np.random.default_rng(0).integers(3, DENSE.vocab_size, (number, INPUTS))
    return tokens.tolist()


@dataclasses.dataclass
class Decoder:
    """Decodes the same inputs at each call, and keeps the last outputs."""

    generator: Generator
    sentences: list[list[int]]
    token_limits: list[int] | None = None
    hypotheses: dict[int, list[Hypothesis]] = dataclasses.field(default_factory=dict)

    def __call__(self) -> None:
        self.hypotheses = dict(self.generator(self.sentences, self.token_limits))

    @property
    def tokens(self) -> list[list[int]]:
        return [self.hypotheses[number][0].tokens for number in range(len(self.sentences))]


def decoder(config, params, batch: int, beams: int) -> Decoder:
    """A decoder of `NEW_TOKENS` tokens for each of `batch` inputs."""
    # No token ends a sentence: all are equally long, on both sides.
    decoding = DecodingConfig(NEW_TOKENS, beam_size=beams, eos_id=NO_END, pruning="none")
    return Decoder(Generator(config, params, decoding, batch), inputs(batch))


def run(rounds: int) -> Report:
    """Measures 8 and 64 experts, pruning, bytes of int4, and a server where it is available."""
    rows, ratios = [], {}
    for num_experts in NUM_EXPERTS:
        found, speedups = against_torch(num_experts, rounds)
        rows += found
        for name, value in speedups.items():
            # A bound holds for both numbers of experts, so the worse one counts.
            ratios[name] = min(value, ratios.get(name, value))
    bounds = {name: least for _, name, least in CASES}
    bounds |= {best_of(name): BEST_BOUND for name in bounds}
    checks = [
        Check(name, ratios[name], f">={least}")
        for name, least in bounds.items()
        if name in ratios
    ]
    parts = [pruning(rounds), quantized_bytes(), decode_programs.sampling(rounds)]
    tiny = api.load("tiny")
    parts += [decode_programs.recording(rounds, tiny=(tiny.config, tiny.params))]
    parts += [speculation.speculation(rounds), offload.step_times()]
    if serving.is_available():
        config = switch_model(NUM_EXPERTS[0])
        params = init_params(config, jax.random.key(0))
        parts.append(serving.serving(config, params, inputs(PRUNED_BATCH), rounds))
        parts.append(continuous_batching.inflight(config, params, rounds))
    parts.append(ctranslate2_peer.ratios(DENSE, inputs(BATCH), NEW_TOKENS, decoder, rounds))
    for found, more in parts:
        rows, checks = rows + found, checks + more
    return Report("bench decode", rows, checks)


def best_of(check: str) -> str:
    """The name of the check against PyTorch's best."""
    return check.replace("_vs_torch", "_vs_best_torch")


def against_torch(
    num_experts: int, rounds: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows, and for each check transformers' time over ours, where it is installed."""
    if not torch_peer.is_available():
        config = switch_model(num_experts)
        config, params = for_decoding(config), init_params(config, jax.random.key(0))
        return _measured(config, params, num_experts, rounds, None, None)
    with tempfile.TemporaryDirectory() as name:
        described, _ = huggingface.describe(switch_model(num_experts))
        settings = {
            "task": "generate",
            "folder": name,
            "config": described,
            "inputs": inputs(BATCH),
            "new_tokens": NEW_TOKENS,
        }
        with torch_peer.TorchPeer(torch_peer.PROGRAM, settings) as peer:
            peer.ask("1 1")  # the weights are written by then
            checkpoint = huggingface.read_checkpoint(name, overflow="dropless")
            params = jax.tree.map(jnp.array, checkpoint.params)
            config = for_decoding(checkpoint.config)
            folder = pathlib.Path(name)
            return _measured(config, params, num_experts, rounds, peer, folder)


def _measured(config, params, num_experts, rounds, peer, folder):
    """Measures our side and, in turns, the peer's where there is one."""
    rows, speedups = [], {}
    for (batch, beams), check, _ in CASES:
        name = f"{num_experts} experts, batch {batch}, {beams} beams"
        decode = decoder(config, params, batch, beams)
        ours = Contender(f"ours, {name}", decode)
        theirs = []
        refused = []
        if peer is not None:
            theirs, refused = _of_torch(peer, f"{batch} {beams}", name)
        take_turns([ours, *theirs], rounds)
        first = (theirs or [ours])[0]
        found = [_row(each, first, batch * NEW_TOKENS) for each in (ours, *theirs)]
        if peer is not None:
            speedups[check] = speedup(ours, first)
            best = min(theirs, key=lambda each: each.median_s)
            speedups[best_of(check)] = speedup(ours, best)
            tokens = np.load(folder / f"tokens_{batch}_{beams}.npy").tolist()
            same = sum(a == b for a, b in zip(decode.tokens, tokens, strict=True))
            found[0]["same_texts"] = same / batch
        rows += found + refused
    return rows, speedups


def _of_torch(peer, line: str, name: str) -> tuple[list[Contender], list[dict[str, Any]]]:
    """transformers as it is and, where that works, compiled; else a row that says why not."""
    ways = [Contender(f"transformers, {name}", functools.partial(peer.ask, line))]
    compiled = Contender(
        f"transformers compiled, {name}", functools.partial(peer.ask, f"{line} compiled")
    )
    try:
        compiled.step()
    except torch_peer.TaskFailedError as error:
        return ways, [{"decoding": compiled.name, "failed": str(error)}]
    return [*ways, compiled], []


def sentence_lengths(number: int) -> list[int]:
    """Lengths distributed like those of captions: 13 tokens on average, give or take 5."""
    lengths = np.random.default_rng(0).lognormal(np.log(12), 0.4, number)
    return np.clip(np.rint(lengths), 1, NEW_TOKENS).astype(int).tolist()


def pruning(rounds: int) -> tuple[list[dict[str, Any]], list[Check]]:
    """Decodes sentences of different lengths in one batch, with and without pruning."""
    config = switch_model(NUM_EXPERTS[0])
    config, params = for_decoding(config), init_params(config, jax.random.key(0))
    token_limits = sentence_lengths(PRUNED_BATCH)
    contenders = {}
    for name in PRUNINGS:
        decoding = DecodingConfig(NEW_TOKENS, eos_id=NO_END, pruning=name)
        generator = Generator(config, params, decoding, PRUNED_BATCH)
        decode = Decoder(generator, inputs(PRUNED_BATCH), token_limits)
        contenders[name] = Contender(f"pruning {name}, batch {PRUNED_BATCH}", decode)
    take_turns(list(contenders.values()), rounds)
    rows = [_row(each, contenders["none"], sum(token_limits)) for each in contenders.values()]
    first, *others = (each.step.tokens for each in contenders.values())
    is_same = all(tokens == first for tokens in others)
    return rows, [
        Check("pruning_gain", speedup(contenders["compact"], contenders["none"]), ">=1.15"),
        Check("pruning_tokens_identical", float(is_same), "==1"),
    ]


def quantized_bytes() -> tuple[list[dict[str, Any]], list[Check]]:
    """Compares arguments and temporaries of the compiled loop with float32 and int4 experts."""
    config = switch_model(NUM_EXPERTS[-1])
    config, params = for_decoding(config), init_params(config, jax.random.key(0))
    _, quantized, _, _ = quantize_experts(config, params, bits=4)
    found = {"float32": loop_bytes(config, params), "int4": loop_bytes(config, quantized)}
    rows = [
        {"decoding": f"{name} experts, {NUM_EXPERTS[-1]} of them", "mib": size / MEBIBYTE}
        for name, size in found.items()
    ]
    return rows, [Check("int4_bytes_vs_f32", found["int4"] / found["float32"], "<=0.25")]


def loop_bytes(config, params) -> int:
    """Bytes of the arguments and temporaries of a loop that decodes one sentence."""
    decoding = DecodingConfig(NEW_TOKENS, eos_id=NO_END)
    begin = functools.partial(decode_programs.begun, config, decoding=decoding)
    state = jax.eval_shape(begin, params, source_BM=jnp.array(inputs(1)))
    program = decoding.program_of(NEW_TOKENS)
    loop = run_until.lower(config, program, params, state, 0, NEW_TOKENS)
    return needed_bytes(loop.compile())


def _row(each: Contender, baseline: Contender, tokens: int) -> dict[str, Any]:
    return {
        "decoding": each.name,
        **in_ms(each),
        "tokens_per_s": tokens / each.median_s,
        "vs_baseline": speedup(each, baseline),
    }
