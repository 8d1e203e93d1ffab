# SPDX-License-Identifier: Apache-2.0
"""int8 and int4 experts, by output feature and by group, on log-likelihood of held-out text.

    make experiments EXPERIMENT=quantization DATA=FOLDER

Of the 32 experts of experiments/pretraining. A text is a held-out paragraph; intervals are over
texts, the same ones for every precision.
"""

import dataclasses

import numpy as np

import switchx
from experiments.measured import Cells, Interval, bootstrap
from experiments.study import Study, main, pretrained
from switchx.data.corpora.text_files import TextFiles

FILES = ("openstax/*.txt.gz", "movie_reviews/*.txt.gz")
MODEL = "32 experts"
# Bits and inputs that share a scale; 0 is all of them.
PRECISIONS = {
    "int8": (8, 0), "int4": (4, 0),
    "int4, groups of 64": (4, 64), "int4, groups of 32": (4, 32),
}  # fmt: skip
TEXTS, CHARACTERS = 400, 400


def log_likelihoods(study: Study, cells: Cells, precision: str) -> dict[str, list[float]]:
    """Of every text: nats, and tokens."""
    settings = {"precision": precision, "texts": 8 if study.is_quick else TEXTS}
    return cells.get(settings, lambda: _measured(study, cells, precision, settings["texts"]))


def _measured(study: Study, cells: Cells, precision: str, num_texts: int) -> dict:
    folder = pretrained(study, MODEL).root
    if precision != "float32":
        bits, group = PRECISIONS[precision]
        name = precision.replace(",", "").replace(" ", "_")
        folder = study.runs / name
        arguments = [
            f"--model_dir=<pretrained {MODEL}>",
            f"--output=<run {name}>",
            f"--bits={bits}",
        ]
        if group:
            arguments.append(f"--group_size={group}")
        study.command(cells, name, "quantize", *arguments)
    model = switchx.load(folder)
    paths = tuple(map(str, study.files(*FILES).values()))
    corpus = TextFiles(path=paths, max_characters=CHARACTERS).open("validation", None)
    texts = [corpus[i]["text"] for i in range(num_texts)]
    scores = model.score([""] * num_texts, texts)
    return {
        "nats": [float(score.log_likelihood) for score in scores],
        "tokens": [int(score.num_tokens) for score in scores],
    }


def change(base: dict, other: dict) -> Interval:
    """Of the log-likelihood, nats a token: the mean over texts, the same for both."""
    tokens, before, after = (
        np.array(each) for each in (base["tokens"], base["nats"], other["nats"])
    )
    # Weighted so that the mean over texts is the mean over tokens.
    return bootstrap((after - before) / tokens.mean())


def verdict(changes: dict[str, Interval]) -> dict:
    """Reproduced (Table 2: 0.007 BLEU by int8, 0.167 by int4, both a scale an output feature):
    int8 changes less than 0.001 nats a token and int4 less than 0.02, a quarter of what 32
    experts gain over a dense model in 300 steps."""
    int8, int4, grouped = (changes[name] for name in ("int8", "int4", "int4, groups of 32"))
    is_reproduced = abs(int8.mean) < 0.001 and abs(int4.mean) < 0.02
    hurts = [name for name, each in changes.items() if each.high < -0.001]
    return {
        "verdict": "reproduced" if is_reproduced else "not reproduced",
        "because": f"int8 changes the log-likelihood by {int8.mean:+.4f} nats a token, "
        f"int4 by {int4.mean:+.4f} and by {grouped.mean:+.4f} with groups of 32; it "
        f"hurts first with {hurts[0] if hurts else 'none'}.",
        "effect": int4,
        "effect_of": "int4 over float32, nats a token",
    }


def run(study: Study) -> None:
    cells = study.cells()
    names = list(PRECISIONS)[:1] if study.is_quick else list(PRECISIONS)
    base = log_likelihoods(study, cells, "float32")
    changes = {name: change(base, log_likelihoods(study, cells, name)) for name in names}
    rows = [
        {
            "experts": name,
            "change of the log-likelihood, nats a token (95%)": dataclasses.asdict(each),
        }
        for name, each in changes.items()
    ]
    judged = {"verdict": "undecided", "because": "a quick run", "effect": changes["int8"],
              "effect_of": "int8"} if study.is_quick else verdict(changes)  # fmt: skip
    study.publish(
        cells,
        study.files(*FILES),
        **judged,
        seeds=[0],
        tables=[{"title": f"{len(base['nats'])} texts, {sum(base['tokens']):,} tokens:",
                 "rows": rows}],
        intervals={name: dataclasses.asdict(each) for name, each in changes.items()},
    )  # fmt: skip


if __name__ == "__main__":
    main(__file__, __doc__, run)
