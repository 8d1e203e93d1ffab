# SPDX-License-Identifier: Apache-2.0
"""CTranslate2 on the same cores, with the weights of a dense T5 of ours.

CTranslate2 (https://opennmt.net/CTranslate2) runs only dense models; it has no Switch layers.
The first half is our side: `ratios` writes the model as a transformers checkpoint and measures
both in turns. The second half is the program of the other process: it converts the checkpoint
by CTranslate2's own converter, which needs PyTorch and transformers, and decodes once for each
line that it is sent. Quantized, CTranslate2 has int8 matrices; ours are float32 in both
comparisons, since switchx has int8 only for experts.
Dims: B rows of a batch, T generated tokens
"""

import functools
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

PROGRAM = pathlib.Path(__file__)
# (batch, beams)
CASES = ((16, 1), (1, 1), (16, 4), (1, 4))
CHECKS = {"float32": "ctranslate2_ratio", "int8": "ctranslate2_ratio_int8"}
BOUND = "<=1.3"
NEEDED = ("ctranslate2", "torch", "transformers")


def missing() -> str | None:
    """Why nothing can be compared; None if the extra `ctranslate2` is installed."""
    absent = [name for name in NEEDED if not importlib.util.find_spec(name)]
    return f"not run: {', '.join(absent)} not installed" if absent else None


def ratios(config, inputs: list[list[int]], new_tokens: int, decoder, rounds: int):
    """Returns rows, and for each type of their weights our time over theirs in the worst case.

    Args:
        config: configuration of a dense encoder-decoder, whose weights are random.
        inputs: token ids, as many as the largest batch.
        decoder: `decoder(config, params, batch, beams)` returns our decoder, which decodes
            `new_tokens` tokens of each of the first inputs and keeps them as `tokens`.
    """
    if why := missing():
        return [{"peer": "CTranslate2", "status": why}], []
    import jax

    from pallas_kernels.bench.timing import Contender, speedup, take_turns
    from switchx.bench.peers.torch_peer import TorchPeer
    from switchx.bench.train import in_ms
    from switchx.inference.generate import for_decoding
    from switchx.interop import huggingface
    from switchx.models.params import init_params
    from switchx.results import Check

    params = init_params(config, jax.random.key(0))
    rows: list[dict[str, Any]] = []
    worst = dict.fromkeys(CHECKS, 0.0)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        huggingface.write_checkpoint(folder, config, params)
        settings = {"folder": name, "inputs": inputs, "new_tokens": new_tokens}
        with TorchPeer(PROGRAM, settings) as peer:
            for batch, beams in CASES:
                case = f"dense T5, batch {batch}, {beams} beams"
                decode = decoder(for_decoding(config), params, batch, beams)
                ours = Contender(f"ours, {case}", decode)
                theirs = {
                    dtype: Contender(
                        f"CTranslate2 {dtype}, {case}",
                        functools.partial(peer.ask, f"{batch} {beams} {dtype}"),
                    )
                    for dtype in CHECKS
                }
                take_turns([ours, *theirs.values()], rounds)
                rows.append({"peer": ours.name, **in_ms(ours)})
                for dtype, each in theirs.items():
                    ratio = speedup(each, ours)  # our time over theirs
                    worst[dtype] = max(worst[dtype], ratio)
                    texts = json.loads((folder / f"{batch}_{beams}_{dtype}.json").read_text())
                    pairs = zip(decode.tokens, texts, strict=True)
                    same = sum(a == b for a, b in pairs) / batch
                    row = {"peer": each.name, **in_ms(each), "our_time_over_theirs": ratio}
                    rows.append(row | {"same_texts": same})
    return rows, [Check(CHECKS[dtype], ratio, BOUND) for dtype, ratio in worst.items()]


def main(settings: dict[str, Any]) -> None:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    folder = pathlib.Path(settings["folder"])
    _write_tokenizer(folder)
    translators = {}
    for dtype in CHECKS:
        output = folder / dtype
        TransformersConverter(str(folder)).convert(str(output), quantization=dtype)
        translators[dtype] = ctranslate2.Translator(
            str(output), compute_type=dtype, inter_threads=1, intra_threads=_num_cores()
        )
    inputs = [[_name(token) for token in tokens] for tokens in settings["inputs"]]
    for line in sys.stdin:
        batch, beams, dtype = line.split()
        # As on our side, no text ends before it has all tokens.
        results = translators[dtype].translate_batch(
            inputs[: int(batch)],
            beam_size=int(beams),
            min_decoding_length=settings["new_tokens"],
            max_decoding_length=settings["new_tokens"],
        )
        outputs = [[_token(name) for name in each.hypotheses[0]] for each in results]
        (folder / f"{batch}_{beams}_{dtype}.json").write_text(json.dumps(outputs))
        print("done", flush=True)


# CTranslate2 reads and writes tokens as texts. Its converter takes the tokenizer's, and calls
# those that the model has beyond them <extra_id_0>, <extra_id_1> and so on.
SPECIAL = ("<pad>", "</s>", "<unk>")


def _name(token: int) -> str:
    return SPECIAL[token] if token < len(SPECIAL) else f"<extra_id_{token - len(SPECIAL)}>"


def _token(name: str) -> int:
    if name in SPECIAL:
        return SPECIAL.index(name)
    return len(SPECIAL) + int(name.removeprefix("<extra_id_").removesuffix(">"))


def _write_tokenizer(folder: pathlib.Path) -> None:
    """Writes a tokenizer that has only the special tokens."""
    vocabulary = {name: number for number, name in enumerate(SPECIAL)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    empty = "truncation padding normalizer pre_tokenizer post_processor decoder".split()
    values = {"version": "1.0", "added_tokens": [], "model": model} | dict.fromkeys(empty)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
