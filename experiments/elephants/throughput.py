# SPDX-License-Identifier: Apache-2.0
r"""Input tokens a second by batch and beams: Table 3 of Kim et al. 2022 (arXiv:2211.10017).

    python -m experiments.elephants.throughput --model_dir=runs/elephants \
        --output=runs/elephants_measured

PyTorch's `generate` with the same weights (where `switchx[hf]` is installed, in a process of
its own), switchx with float32, int8 and int4 experts, and float32 with less or no pruning, all
taking turns on the same sentences. No side drops tokens. Interrupted, the same command goes on
with the next batch. Writes the section `throughput` of results.json.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import statistics
import tempfile

import jax

from experiments.elephants.precision import (
    arguments_parser,
    open_model,
    read_sentences,
    with_experts,
)
from experiments.elephants.sections import write_section
from experiments.measured import Cells
from pallas_kernels.bench.timing import Contender, take_turns
from switchx.bench.decode import Decoder
from switchx.bench.peers import torch_peer
from switchx.inference.generate import without_capacity
from switchx.interop.huggingface import write_checkpoint

BATCHES = (1, 8, 20, 32, 64, 96)
BEAMS = (1, 2)
# Column -> experts, pruning of finished sentences. The columns after it are compared with the
# first, and have to say what it says but for rounding.
OURS = {
    "float32": ("float32", "compact"),
    "int8": ("int8", "compact"),
    "int4": ("int4", "compact"),
    "float32, experts pruned": ("float32", "experts"),
    "float32, no pruning": ("float32", "none"),
}
TORCH = "torch"


@dataclasses.dataclass(frozen=True)
class Sentences:
    """What all translate, the longest first: both sides then have the same batches."""

    prompts: list[list[int]]
    num_tokens: int
    num_words: int


@dataclasses.dataclass(frozen=True)
class TorchSide:
    """The other process, and the folder that both know."""

    peer: torch_peer.TorchPeer
    folder: pathlib.Path

    def said(self) -> list[list[int]]:
        return json.loads((self.folder / "said.json").read_text())


def sentences_of(model, asked) -> Sentences:
    """Tokens and words are of the sentences alone, without prefix and end."""
    prompts = sorted(asked.prompts, key=len, reverse=True)
    texts = asked.examples.inputs
    num_tokens = sum(len(model.vocabulary.encode(text)) for text in texts)
    return Sentences(prompts, num_tokens, sum(len(text.split()) for text in texts))


@contextlib.contextmanager
def torch_side(model, sentences: Sentences, max_new_tokens: int):
    """PyTorch with the model's weights, or None where it is not installed."""
    if not torch_peer.is_available():
        yield None
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_checkpoint(folder, without_capacity(model.config), model.params)
        (folder / "sentences.json").write_text(json.dumps(sentences.prompts))
        settings = {"folder": name, "max_new_tokens": max_new_tokens}
        script = pathlib.Path(__file__).with_name("torch_translate.py")
        with torch_peer.TorchPeer(script, settings) as peer:
            yield TorchSide(peer, folder)


def peer_versions() -> dict[str, str]:
    """Of PyTorch and transformers; none where they are not installed."""
    names = ("torch", "transformers") if torch_peer.is_available() else ()
    return {name: importlib.metadata.version(name) for name in names}


def measure(arguments, models, sentences: Sentences, batch: int, beams: int, torch) -> dict:
    """Seconds of a pass over all sentences by column, and the share of the same texts."""
    jax.clear_caches()  # a process has only so many memory maps, programs take them
    decoders = {}
    for column, (precision, pruning) in OURS.items():
        generator = models[precision].generator(
            batch_size=batch,
            beam_size=beams,
            max_new_tokens=arguments.max_new_tokens,
            pruning=pruning,
        )
        decoders[column] = Decoder(generator, sentences.prompts)
    contenders = [Contender(name, decode) for name, decode in decoders.items()]
    if torch is not None:
        ask = functools.partial(torch.peer.ask, f"{batch} {beams}")
        contenders.append(Contender(TORCH, ask))
    take_turns(contenders, arguments.rounds)
    load_average = os.getloadavg()[0]  # of the last minute: other programs too
    found = {name: decode.tokens for name, decode in decoders.items()}
    if torch is not None:
        found[TORCH] = torch.said()
    return {
        "seconds": {each.name: each.times_s for each in contenders},
        "load_average": load_average,
        "same_texts": {
            name: statistics.fmean(a == b for a, b in zip(found["float32"], texts, strict=True))
            for name, texts in found.items()
        },
    }


def row_of(batch: int, beams: int, sentences: Sentences, value: dict) -> dict:
    """One batch and number of beams, as results.json has it."""
    medians = {name: statistics.median(each) for name, each in value["seconds"].items()}
    ours = value["seconds"]["float32"]
    return {
        "batch": batch,
        "beams": beams,
        "input_tokens_per_s": {n: sentences.num_tokens / each for n, each in medians.items()},
        # Medians over rounds of the ratio within a round.
        "float32_is_faster": {
            name: statistics.median(b / a for a, b in zip(ours, each, strict=True))
            for name, each in value["seconds"].items()
        },
        "words_per_s": {n: sentences.num_words / each for n, each in medians.items()},
        "batch_latency_ms": {
            name: 1e3 * each / -(-len(sentences.prompts) // batch)
            for name, each in medians.items()
        },
        "same_texts_as_float32": value["same_texts"],
        "load_average": value["load_average"],
    }


def measure_all(arguments, model, sentences: Sentences) -> list[dict]:
    finished = Cells(arguments.output / "throughput.jsonl")
    models = {name: with_experts(model, name) for name in ("float32", "int8", "int4")}
    rows = []
    with torch_side(model, sentences, arguments.max_new_tokens) as torch:
        for batch in arguments.batches:
            for beams in BEAMS:
                cell = {
                    "model": model.fingerprint, "direction": arguments.direction,
                    "batch": batch, "beams": beams, "sentences": len(sentences.prompts),
                    "max_new_tokens": arguments.max_new_tokens, "rounds": arguments.rounds,
                    "torch": torch is not None,
                }  # fmt: skip
                value = finished.get(
                    cell,
                    lambda batch=batch, beams=beams: measure(
                        arguments, models, sentences, batch, beams, torch
                    ),
                )
                rows.append(row_of(batch, beams, sentences, value))
                speeds = rows[-1]["input_tokens_per_s"].items()
                shown = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds)
                print(f"batch {batch}, beam {beams}: {shown} input tokens/s", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--direction", default="en_de")
    parser.add_argument(
        "--batches",
        type=lambda text: tuple(map(int, text.split(","))),
        default=BATCHES,
        help="default: the paper's, 1,8,20,32,64,96",
    )
    parser.add_argument(
        "--sentences", type=int, default=192, help="first of the test set (default 192)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each column")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    arguments = parser.parse_args(arguments)
    model = open_model(arguments.model_dir, arguments.step, arguments.output)
    asked = read_sentences(model, arguments.direction, arguments.data_dir, arguments.sentences)
    sentences = sentences_of(model, asked)
    section = {
        "step": model.step,
        "params": model.num_params,
        "direction": arguments.direction,
        "sentences": len(sentences.prompts),
        "input_tokens": sentences.num_tokens,
        "words": sentences.num_words,
        "max_new_tokens": arguments.max_new_tokens,
        "rounds": arguments.rounds,
        "peers": peer_versions(),
        "rows": measure_all(arguments, model, sentences),
    }
    write_section(arguments.results, "throughput", section)


if __name__ == "__main__":
    main()
