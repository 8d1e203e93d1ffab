# SPDX-License-Identifier: Apache-2.0
"""The learning rate of each model of the ladder, swept on a seed that judges nothing.

make experiments EXPERIMENT=rates DATA=FOLDER
"""

import dataclasses
import math
from typing import Any

from experiments.experiment import ENGLISH, QUICK
from experiments.ladder import DENSE, R0, R1, Rung, flops_of, print_plan
from experiments.measured import Cells, Interval
from experiments.side_by_side import num_cores, on_each_core
from experiments.statistics import open_sides, parabola
from experiments.study import Study, main

SEED = 900  # no other experiment has it
# D of R1 over that of R0: AdamW's rate is predicted to fall by it.
WIDTH = 96 / 64
ADAMW = (0.002, 0.004, 0.008, 0.016, 0.032)
ADAFACTOR = (0.03, 0.06, 0.12, 0.24, 0.48)
MOST_ADDED = 3  # rates, two times apart, on a side where the best is at the edge


@dataclasses.dataclass(frozen=True)
class Swept:
    """A model whose rate is sought.

    Attributes:
        bindings: gin bindings over the rung's file.
    """

    name: str
    bindings: tuple[str, ...] = ()
    rates: tuple[float, ...] = ADAMW
    rung: Rung = R0


BOTH = (Swept("dense", (DENSE,)), Swept("16 experts"))
FAN = tuple(Swept(f"{n} experts", (f"NUM_EXPERTS={n}",)) for n in (2, 4, 32))
_PAPERS = ("OPTIMIZER=@adafactor.Adafactor()",)
GATE = (
    Swept("dense, Adafactor", (DENSE, *_PAPERS), ADAFACTOR),
    Swept("16 experts, Adafactor", _PAPERS, ADAFACTOR),
)
# k 2 of half the width: two experts of F/2, FLOPs of one of F; top-2 MoE has two of F.
TWO_CHOICES = ("RouterConfig.num_selected=2", "RouterConfig.gate='normalized'")
OF_TWO = (
    Swept("16 experts, 2 choices", TWO_CHOICES),
    Swept("16 experts, 2 of half the width",
          ("RouterConfig.num_selected=2", "SwitchConfig.d_ff=192")),
)  # fmt: skip


def next_rung(rates: dict[str, float]) -> tuple[Swept, ...]:
    """Dense and 16 experts on the next rung, three rates each about the predicted one."""
    return tuple(
        Swept(
            name + R1.suffix,
            bindings,
            tuple(rates[name] / WIDTH * 2**i for i in (-1, 0, 1)),
            R1,
        )
        for name, bindings in {"dense": (DENSE,), "16 experts": ()}.items()
    )


def sweep(study: Study, cells: Cells, swept: Swept) -> dict[str, float]:
    """Validation negative log perplexity by rate, with rates added where the best is at the
    edge."""
    # A quick one has two steps.
    rates = list(swept.rates)
    quick = (*QUICK, "WARMUP_STEPS=1") * study.is_quick
    name = swept.name.replace(",", "").replace(" ", "_")
    for _ in range(MOST_ADDED + 1):
        found = study.command(
            cells,
            f"{name}_sweep",
            "sweep",
            f"--gin_file={swept.rung.gin_file}",
            f"--gin.FILES=<data {' '.join(ENGLISH)}>",
            f"--gin.SEED={SEED}",
            *(f"--gin.{binding}" for binding in (*swept.bindings, *quick)),
            f"--gin.LEARNING_RATE={','.join(f'{rate:.4g}' for rate in rates)}",
            f"--output=<run {name}>",
        )
        quality = {
            row["values"]["LEARNING_RATE"]: loss and -loss  # null where it diverged
            for row in found["results"]
            for loss in (row["losses"][str(SEED)],)
        }
        sides = open_sides([*map(float, quality)], [*quality.values()])
        if study.is_quick or not sides:
            break
        rates = sorted({*rates, *(min(rates) / 2,) * ("lower" in sides),
                        *(max(rates) * 2,) * ("higher" in sides)})  # fmt: skip
    return quality


def run(study: Study) -> None:
    """Sweeps stage by stage, what the first claims take first, and publishes after each."""
    files, cells = study.files(*ENGLISH), study.cells()
    found: dict[str, dict[str, float]] = {}

    def stage(all_swept: tuple[Swept, ...]) -> None:
        texts = f"FILES=<data {' '.join(ENGLISH)}>"
        flops = {
            each: flops_of(study, each.rung, (*each.bindings, texts))[1] for each in all_swept
        }
        print_plan({f"{e.name} at {r:.4g}": flops[e] for e in all_swept for r in e.rates})
        measured = on_each_core(lambda each: sweep(study, cells, each), all_swept)
        found.update(zip((each.name for each in all_swept), measured, strict=True))
        seconds = round(cells.seconds / num_cores())
        study.publish(cells, files, judge, seeds=[SEED], quality=found, wall_seconds=seconds)

    if study.is_quick:
        stage(BOTH[:1])
        return
    stage(BOTH)
    stage(FAN)
    rates = {each.name: found_rate(found[each.name]).rate for each in BOTH}
    if all(rates.values()):
        stage(next_rung(rates))
    stage(GATE)
    stage(OF_TWO)


def found_rate(quality: dict[str, float]):
    """The parabola of one model."""
    return parabola([*map(float, quality)], [*quality.values()])


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """Nothing is claimed: rates that are not interior are said not to be found."""
    fits = {name: found_rate(quality) for name, quality in results["quality"].items()}
    best = {
        name: max(value for value in each.values() if value is not None)
        for name, each in results["quality"].items()
    }
    rows = [
        {
            "model": name,
            "rate": fit.rate,
            "vertex": fit.vertex,
            "error of the vertex, a factor": fit.error and math.exp(fit.error),
            "nats lost at twice the rate": fit.curvature * math.log(2) ** 2,
            "residual, nats": fit.residual,
            "best, nats": best[name],
            "problem": fit.problem,
        }
        for name, fit in fits.items()
    ]
    gains = {
        optimizer: best["16 experts" + suffix] - best["dense" + suffix]
        for optimizer, suffix in (("AdamW", ""), ("Adafactor", ", Adafactor"))
        if "16 experts" + suffix in best
    }
    missing = [name for name, fit in fits.items() if fit.problem]
    because = "Every rate is interior" if not missing else f"No rate is found of {missing}"
    because += ". At their best rates 16 experts are over dense " + " and ".join(
        f"{gain:+.3f} nats by {optimizer}" for optimizer, gain in gains.items()
    )
    if len(gains) > 1:
        agree = "agree" if min(gains.values()) * max(gains.values()) > 0 else "disagree"
        because += f": the optimizers {agree} on the sign"
    tried = [{"model": name} | quality for name, quality in results["quality"].items()]
    by_rate = [
        {"model": row["model"], "rate": rate, "negative log perplexity": value}
        for row in tried for rate, value in row.items() if rate != "model"
    ]  # fmt: skip
    return {
        "verdict": "reported",
        "because": because + ".",
        "effect": Interval(*[gains["AdamW"]] * 3),
        "effect_of": "16 experts over dense, each at its own rate, one seed, nats per token",
        "tables": [{"title": "", "rows": rows}, {"title": "All runs:", "rows": by_rate}],
    }


if __name__ == "__main__":
    main(__file__, __doc__, run)
