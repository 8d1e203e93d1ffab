# SPDX-License-Identifier: Apache-2.0
r"""What int8 and int4 experts cost in BLEU: Table 2 of Kim et al. 2022 (arXiv:2211.10017).

    python -m experiments.elephants.quality --model_dir=runs/elephants \
        --output=runs/elephants_measured

Translates Multi30K's 2016 test set at each precision, direction and number of beams. The
interval of a change is a paired bootstrap's over test sentences, of the same resampled
sentences with and without quantization and in all directions, whose captions are of the same
pictures. Interrupted, the same command goes on. Writes the section `quality` of results.json.
"""

import functools
import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np
from sacrebleu.metrics import BLEU

from experiments.elephants.precision import (
    PRECISIONS,
    arguments_parser,
    open_model,
    read_sentences,
    with_experts,
)
from experiments.elephants.sections import write_section
from experiments.measured import Cells
from switchx.data.mixtures import multi30k_directions
from switchx.generated_evaluation import answer

FOUR = ("en_de", "de_en", "en_fr", "fr_en")
BEAMS = (1, 2)
SAMPLES = 1000


def bootstrap_indices(num_sentences: int, samples: int) -> np.ndarray:
    """`[samples, sentences]`: the sentences that each sample has in place of the test set."""
    shape = (samples, num_sentences)
    return np.random.default_rng(0).integers(0, num_sentences, shape)


def resampled_bleu(texts: Sequence[str], targets: Sequence[str], indices) -> list[float]:
    """BLEU of the whole, then of every sample; by sacreBLEU's statistics of sentences."""
    metric = BLEU()
    statistics_SN = np.array(metric._extract_corpus_statistics(texts, [targets]))
    sums = [statistics_SN.sum(0), *(statistics_SN[index].sum(0) for index in indices)]
    return [metric._compute_score_from_stats(each.tolist()).score for each in sums]


def change_and_interval(base: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Of `resampled_bleu`s of the same indices: the whole's difference, 95% of the samples'."""
    change, *sampled = (b - a for a, b in zip(base, other, strict=True))
    low, high = np.percentile(sampled, (2.5, 97.5))
    return {"change": change, "low": float(low), "high": float(high)}


def translate(arguments, model, finished: Cells) -> dict[tuple[str, int, str], dict]:
    """Texts and how many were cut off, by direction, beams and precision."""
    questions = {
        direction: read_sentences(model, direction, arguments.data_dir, arguments.sentences)
        for direction in arguments.directions
    }
    found = {}
    for precision in PRECISIONS:
        variant = functools.cache(functools.partial(with_experts, model, precision))
        for beams in BEAMS:
            jax.clear_caches()  # a process has only so many memory maps, programs take them
            for direction, asked in questions.items():
                cell = {
                    "model": model.fingerprint, "direction": direction, "beams": beams,
                    "precision": precision, "sentences": len(asked.prompts),
                    "max_new_tokens": arguments.max_new_tokens,
                }  # fmt: skip
                value = finished.get(
                    cell,
                    lambda beams=beams, asked=asked, variant=variant: _translate_cell(
                        arguments, variant(), beams, asked
                    ),
                )
                print(f"{direction} beam {beams} {precision}: {value['seconds']:.0f} s")
                found[direction, beams, precision] = value | {"targets": asked.examples.targets}
    return found


def _translate_cell(arguments, model, beams: int, asked) -> dict:
    generator = model.generator(
        batch_size=arguments.batch_size,
        beam_size=beams,
        max_new_tokens=arguments.max_new_tokens,
    )
    start = time.perf_counter()
    answers = answer(model, generator, asked)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "unfinished": answers.num_unfinished, "texts": answers.texts}


def tabulate(found: dict[tuple[str, int, str], dict], samples: int) -> list[dict]:
    """A row for each direction and number of beams, then their averages (`mean`)."""
    directions = list(dict.fromkeys(direction for direction, _, _ in found))
    num_sentences = len(next(iter(found.values()))["texts"])
    indices, scores = bootstrap_indices(num_sentences, samples), {}
    for cell, value in found.items():
        scores[cell] = resampled_bleu(value["texts"], value["targets"], indices)
    for beams in BEAMS:
        for precision in PRECISIONS:
            each = [scores[direction, beams, precision] for direction in directions]
            scores["mean", beams, precision] = list(
                map(statistics.fmean, zip(*each, strict=True))
            )
    rows = []
    for direction in [*directions, "mean"]:
        for beams in BEAMS:
            base = scores[direction, beams, "float32"]
            row = {"direction": direction, "beams": beams, "float32": base[0]}
            for precision in list(PRECISIONS)[1:]:
                row[precision] = change_and_interval(base, scores[direction, beams, precision])
            if direction != "mean":
                cells = {name: found[direction, beams, name] for name in PRECISIONS}
                row["unfinished"] = {name: each["unfinished"] for name, each in cells.items()}
            rows.append(row)
    return rows


def signature() -> str:
    """Of a score that is not resampled: what is resampled is said beside it."""
    metric = BLEU()
    metric.corpus_score(["a"], [["a"]])  # counts the references
    return str(metric.get_signature())


def main(arguments: list[str] | None = None) -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument(
        "--directions",
        type=lambda text: text.split(","),
        default=FOUR,
        help=f"such as {','.join(FOUR)} (the default), or all for all twelve",
    )
    parser.add_argument("--sentences", type=int, help="first of the test set; default: all")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of the bootstrap")
    arguments = parser.parse_args(arguments)
    model = open_model(arguments.model_dir, arguments.step, arguments.output)
    if arguments.directions == ["all"]:
        tasks = multi30k_directions(model.vocabulary).tasks
        arguments.directions = [task.name.removeprefix("multi30k_") for task in tasks]
    finished = Cells(arguments.output / "translations.jsonl")
    found = translate(arguments, model, finished)
    section = {
        "step": model.step,
        "params": model.num_params,
        "sentences": len(next(iter(found.values()))["texts"]),
        "max_new_tokens": arguments.max_new_tokens,
        "bootstrap_samples": arguments.samples,
        "signature": signature(),
        "rows": tabulate(found, arguments.samples),
    }
    write_section(arguments.results, "quality", section)


if __name__ == "__main__":
    main()
