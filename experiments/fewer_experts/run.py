# SPDX-License-Identifier: Apache-2.0
"""Fewer experts by dropping and by merging, with and without distillation (SE-MoE, 3.1).

    make experiments EXPERIMENT=fewer_experts DATA=FOLDER

Of the 32 experts of experiments/pretraining. First nothing is trained; then models of 8 experts
go on, with the text alone or with the model of 32 as their teacher, too.
"""

import functools
import statistics
from collections.abc import Iterable
from typing import Any

from experiments.comparison import Trained, judge_of, run_comparison
from experiments.experiment import Comparison, Contender
from experiments.measured import Cells
from experiments.study import Study, main

MODEL, BEFORE = "32 experts", 32
EXPERTS, TRAINED = (16, 8, 4), 8
WAYS = {"merged": "merge", "dropped": "drop"}


def _goes_on(way: str, is_distilled: bool) -> Contender:
    bindings = [f"NUM_EXPERTS={TRAINED}", f"INIT_FROM='<run {way}_{TRAINED}>'"]
    if way == "merged":
        bindings.append("RouterConfig.counts_merged=True")
    if is_distilled:
        bindings += [
            "DISTILLATION=@Distillation()",
            f"Distillation.teacher='<pretrained {MODEL}>'",
            "Distillation.starts_from_teacher=False",
        ]
    return Contender(f"{way}, {'distilled' if is_distilled else 'trained'}", tuple(bindings))


COMPARISON = Comparison(
    contenders=tuple(_goes_on(way, is_distilled) for is_distilled in (False, True)
                     for way in WAYS),
    steps=150,
    times=False,
)  # fmt: skip


def reshaped(study: Study, cells: Cells, experts: Iterable[int]) -> list[dict[str, Any]]:
    """Loss and bytes of the model as it is and with fewer experts, untrained."""
    rows = []
    for way, reduce in WAYS.items():
        for number in experts:
            name = f"{way}_{number}"
            arguments = (
                f"--model_dir=<pretrained {MODEL}>", f"--output=<run {name}>",
                f"--experts={number}", f"--reduce={reduce}",
            )  # fmt: skip
            before, after = study.command(cells, name, "reshape", *arguments)["results"]
            if not rows:
                rows.append(_row("as it is", before, before))
            rows.append(_row(way, after, before))
    return rows


def _row(way: str, row: dict, before: dict) -> dict[str, Any]:
    return {
        "experts": row["experts"],
        "how": way,
        "MiB": row["bytes"] / 2**20,
        "bytes over all experts'": row["bytes"] / before["bytes"],
        "loss, nats per token": row["loss_nats"],
        "change of the loss": row["loss_nats"] - before["loss_nats"],
    }


def verdict(trained: Trained, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Section 3.1 prints no numbers, so there is no claim to judge: the loss against bytes, and
    what distillation gains over training on the text alone, are exploratory."""
    gains = {way: trained.gain(f"{way}, distilled", f"{way}, trained") for way in WAYS}
    change = {
        row["how"]: row["change of the loss"] for row in rows if row["experts"] == TRAINED
    }
    back = {
        way: statistics.mean(
            curve[max(curve)] - curve[0] for curve in trained.curves[f"{way}, distilled"]
        )
        for way in WAYS
    }
    said = ", ".join(f"{gain} {way}" for way, gain in gains.items())
    return {
        "verdict": "exploratory",
        "because": f"From {BEFORE} to {TRAINED} experts the loss rises by "
        f"{change['merged']:.3f} nats merged and {change['dropped']:.3f} dropped. After "
        f"{COMPARISON.steps} steps with distillation, evaluated with drops, it is "
        f"{back['merged']:.3f} and {back['dropped']:.3f} lower; distillation gains over "
        f"training on the text alone {said}.",
        "effect": gains["merged"],
        "effect_of": f"distillation of {TRAINED} merged experts over training, nats per token",
    }


def judge(results: dict[str, Any]) -> dict[str, Any]:
    rows = results["untrained"]
    judged = judge_of(functools.partial(verdict, rows=rows))(results)
    judged["tables"].append({"title": "Nothing trained:", "rows": rows})
    return judged


def run(study: Study) -> dict:
    rows = reshaped(study, study.cells(), (TRAINED,) if study.is_quick else EXPERTS)
    return run_comparison(study, COMPARISON, judge, untrained=rows)


if __name__ == "__main__":
    main(__file__, __doc__, run)
