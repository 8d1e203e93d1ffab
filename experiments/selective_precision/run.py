# SPDX-License-Identifier: Apache-2.0
"""float32, and bfloat16 with a float32 router, with a bfloat16 one, and in the parameters too.

make experiments EXPERIMENT=selective_precision DATA=FOLDER

Steps are compiled for a TPU, too; SWITCHX_AOT_TPU names the folder of its compiler.
"""

import dataclasses
import functools
import json
from typing import Any

from experiments.comparison import Trained, judge_of, run_comparison
from experiments.experiment import Comparison, Contender
from experiments.measured import Cells
from experiments.study import Study, main
from switchx.bench import compiled_step
from switchx.bench.compiled_layer import rows_of_child
from switchx.models.config import Precision

PRECISIONS = {
    "float32": Precision(),
    "selective": Precision(compute="bfloat16"),
    # The router alone differs from `selective`.
    "bfloat16": Precision(compute="bfloat16", router="bfloat16"),
    "bfloat16 parameters": Precision("bfloat16", "bfloat16", "bfloat16"),
}
# For one of its chips a step of Switch-Base is compiled, 16 rows; nothing is run there.
CHIP = "v5p:2x2x1"


def _bindings(precision: Precision) -> tuple[str, ...]:
    names = ("params", "compute", "router")
    settings = (f"config.Precision.{name}='{getattr(precision, name)}'" for name in names)
    return ("ModelConfig.precision=@config.Precision()", *settings)


COMPARISON = Comparison(
    contenders=tuple(Contender(name, _bindings(each)) for name, each in PRECISIONS.items()),
    # A run that diverges is a result.
    bindings=("TrainingJob.max_skipped_in_a_row=1000000",),
    times=False,
)


def found(trained: Trained) -> dict:
    """What was found."""
    names = ("selective", "bfloat16", "bfloat16 parameters")
    gains = {name: trained.gain(name, "float32") for name in names}
    said = ", ".join(
        f"{name} {str(gain)[:-1]}, {trained.skipped[name]} steps skipped)"
        for name, gain in gains.items()
    )
    return {
        "because": f"Nats per token over float32: {said}.",
        "effect": gains["bfloat16"],
        "effect_of": "bfloat16 with a bfloat16 router over float32, nats per token",
    }


def judge(results: dict[str, Any]) -> dict[str, Any]:
    judged = judge_of(found)(results)
    title = f"A training step of Switch-Base, 16 rows, compiled for a chip of {CHIP}, not run:"
    judged["tables"].append({"title": title, "rows": results["compiled"]})
    return judged


def compiled_row(name: str) -> dict[str, Any]:
    """The compiler's own estimate of a step of Switch-Base in a precision.

    Raises:
        ValueError: the compiler is not there; says how to get it.
    """
    settings = json.dumps(dataclasses.asdict(PRECISIONS[name]))
    (row,) = rows_of_child(compiled_step.__name__, CHIP, settings)
    if "not_run" in row:
        raise ValueError(row["not_run"])
    return {
        "precision": name,
        "estimated ms": 1e3 * row["estimated_s"],
        "GB moved": row["hbm_bytes"] / 1e9,
        "GB of temporaries": row["temporary_bytes"] / 1e9,
    }


def compiled_rows(cells: Cells) -> list[dict[str, Any]]:
    """The paper's speeds were of TPUs: by the compiled program, as a CPU says nothing of it."""
    return [
        cells.get({"compiled": name, "for": CHIP}, functools.partial(compiled_row, name))
        for name in PRECISIONS
    ]


def run(study: Study) -> None:
    compiled = [] if study.is_quick else compiled_rows(study.cells())
    run_comparison(study, COMPARISON, judge, compiled=compiled)


if __name__ == "__main__":
    main(__file__, __doc__, run)
