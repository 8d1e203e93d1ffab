# SPDX-License-Identifier: Apache-2.0
"""int8 and int4 experts, by output feature and by group, over models of several seeds.

    make experiments EXPERIMENT=quantization DATA=FOLDER

The models are the 16 experts on the second rung of experiments/switch_vs_dense; nothing is
trained. Quality is the log-likelihood of held-out paragraphs, the same ones for all.
"""

from typing import Any

import numpy as np

import switchx
from experiments import rules
from experiments.experiment import ENGLISH, run_name
from experiments.ladder import R1, intervals
from experiments.measured import Cells
from experiments.rules import OF_COMPUTE, Rule
from experiments.statistics import difference
from experiments.study import Study, main
from experiments.switch_vs_dense.run import SECOND, SEEDS
from switchx.data.corpora.text_files import TextFiles

EXACT = "float32"
# What `switchx quantize` is asked for.
EXPERTS = {
    EXACT: "",
    "int8": "--bits=8",
    "int4": "--bits=4",
    # The paper's scale: the largest weight is the largest integer.
    "int4, range": "--bits=4 --method=absmax",
    "int4, groups of 32": "--bits=4 --group_size=32",
}
TEXTS, CHARACTERS = 400, 400
_SHARED = {"looks": (4,), "seeds": SEEDS[:4], "expected": 0.0, "rates_from": None}
RULES = tuple(
    Rule(f"{name} experts cost nothing", difference(name, EXACT), "equivalent", margin=margin,
         runs=name, **_SHARED)
    for name, margin in {"int8": 0.001, "int4": OF_COMPUTE}.items()
)  # fmt: skip


def quality(study: Study, cells: Cells, seed: int, experts: str, texts: list[str]) -> float:
    """Nats per token of the texts by a seed's model with experts of a precision."""
    source = f"<pretrained {run_name(SECOND.contenders[-1].name + R1.suffix, seed)}>"
    name = run_name(experts, seed)
    if EXPERTS[experts]:
        asked = (f"--model_dir={source}", f"--output=<run {name}>", *EXPERTS[experts].split())
        study.command(cells, name, "quantize", *asked)

    def score() -> float:
        (folder,) = study.placed((f"<run {name}>" if EXPERTS[experts] else source,))
        scores = switchx.load(folder).score([""] * len(texts), texts)
        return float(
            np.sum([each.log_likelihood for each in scores])
            / np.sum([each.num_tokens for each in scores])
        )

    return cells.get({"model": source, "experts": experts, "texts": len(texts)}, score)


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """By the rules; each precision is compared by itself, as their variances differ."""
    parts = {
        name: {"seeds": results["seeds"], "curves": {n: results["curves"][n]
                                                     for n in (EXACT, name)}}
        for name in results["curves"] if name != EXACT
    }  # fmt: skip
    changes = {name: intervals(part)[name] for name, part in parts.items()}
    rows = [
        {"experts": name, f"over {EXACT}, thousandths of a nat per token (95%)":
         {key: 1000 * value for key, value in change.items()}}
        for name, change in changes.items()
    ]  # fmt: skip
    return rules.judged(RULES, results | parts) | {
        "tables": [{"title": "", "rows": rows}],
        "intervals": changes,
        "intervals_of": f"over {EXACT}, nats per token of paragraphs",
    }


def run(study: Study) -> None:
    cells, files = study.cells(), study.files(*ENGLISH)
    corpus = TextFiles(path=tuple(map(str, files.values())), max_characters=CHARACTERS)
    opened = corpus.open("validation", None)
    texts = [opened[i]["text"] for i in range(8 if study.is_quick else TEXTS)]
    seeds = (0,) if study.is_quick else RULES[0].seeds_at(study.look)
    curves = {
        experts: [{"1": quality(study, cells, seed, experts, texts)} for seed in seeds]
        for experts in EXPERTS
    }
    study.publish(cells, files, judge, seeds=list(seeds), curves=curves)


if __name__ == "__main__":
    main(__file__, __doc__, run)
