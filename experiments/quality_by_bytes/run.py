# SPDX-License-Identifier: Apache-2.0
"""Quality against bytes: fewer and more experts of one small run, at once and after repair.

    make experiments EXPERIMENT=quality_by_bytes DATA=FOLDER

The run is that of configs/runs/pretrain_shipped.gin, whose model ships; DATA is not read.
"""

from typing import Any

from experiments.measured import Interval
from experiments.study import Study, main

GIN_FILE = "configs/runs/pretrain_shipped.gin"
STEPS = 200
MODEL, EXPERTS = "as it is", 8
SCORES = ("frequency", "ean", "mean_norm", "reap", "aimer", "brute_force")
DROPPED = "4 dropped by frequency"
# What `switchx reshape` is asked for.
WAYS = {
    "4 merged": "--experts=4",
    "2 merged": "--experts=2",
    **{f"4 dropped by {s}": f"--experts=4 --reduce=drop --score={s}" for s in SCORES},
    "2 dropped by frequency": "--experts=2 --reduce=drop --score=frequency",
    "4 and novices": "--experts=4 --reduce=drop --novice --score=frequency",
    "2 and novices": "--experts=2 --reduce=drop --novice --score=frequency",
    "dense, merged": "--experts=0",
    "16 copies": "--experts=16",
}
# What trains on, with bindings for the model's form.
REPAIRED = {
    MODEL: (),
    "4 merged": ("NUM_EXPERTS=4", "RouterConfig.counts_merged=True"),
    DROPPED: ("NUM_EXPERTS=4",),
    "4 and novices": ("SwitchConfig.expert_bias=True",),
    "16 copies": ("NUM_EXPERTS=16", "RouterConfig.counts_merged=True"),
}
# Nothing is dropped where quality is measured; in training as it was.
COMMON = (f"TRAIN_STEPS={STEPS}", f"EVAL_EVERY={STEPS}", f"CHECKPOINT_EVERY={STEPS}",
          "SwitchConfig.eval_capacity_factor=64.0", "INIT_OPTIMIZER=True")  # fmt: skip
VECTORS_MIB = 4 * 128 * 4 / 2**20  # a novice in each of 4 Switch layers, D = 128, float32


def points_of(study: Study) -> list[dict[str, Any]]:
    """Bytes and losses of each model."""
    cells = study.cells()
    nothing = dict.fromkeys(("loss after", "seconds", "training_seconds"))
    study.train(cells, "pretrained", (GIN_FILE,), ())
    points: dict[str, dict[str, Any]] = {}
    for way, words in list(WAYS.items())[: 1 if study.is_quick else None]:
        asked = ("--model_dir=<run pretrained>", f"--output=<run {way}>", *words.split())
        rows = study.command(cells, way, "reshape", *asked)["results"]
        for name, row in zip((MODEL, way), rows, strict=True):
            measured = {"model": name, "MiB": row["bytes"] / 2**20, "loss": row["loss_nats"]}
            points.setdefault(name, measured | nothing)
        (seconds,) = (e["seconds"] for e in cells.lines if e["cell"].get("command") == way)
        points[way]["seconds"] = seconds
        if "novices" in way:  # each counts as its vector, not as matrices of zeros
            dropped = points[f"{way[0]} dropped by frequency"]["MiB"]
            points[way]["MiB"] = dropped + (EXPERTS - int(way[0])) * VECTORS_MIB
    for way in [way for way in REPAIRED if way in points]:
        begin = f"INIT_FROM='<run {'pretrained' if way == MODEL else way}>'"
        bindings = (*COMMON, begin, *REPAIRED[way])
        found = study.train(cells, f"{way} trained", (GIN_FILE,), bindings)
        points[way]["loss after"] = -found["curve"][max(found["curve"], key=int)]
        points[way]["training_seconds"] = found["seconds"]
    return list(points.values())


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """One run and one seed: nothing is judged, whatever comes out. What is said: at half the
    experts, what each way costs at once and after repair, over the whole model trained as long;
    the order of the scores; whether copies are ahead."""
    points = {point["model"]: point for point in results["points"]}

    def cost(way: str, loss: str) -> float:
        return points[way][loss] - points[MODEL][loss]

    costs = ", ".join(
        f"{cost(way, 'loss'):.3f} and {cost(way, 'loss after'):+.3f} ({way})"
        for way in list(REPAIRED)[1:]
    )
    gain = points[DROPPED]["loss after"] - points["4 merged"]["loss after"]
    by_score = sorted((cost(f"4 dropped by {score}", "loss"), score) for score in SCORES)
    rows = [
        point | {"change of the loss": cost(name, "loss")} for name, point in points.items()
    ]
    return {
        "verdict": "exploratory",
        "because": f"Over the whole model, at once and after {STEPS} steps of both, in nats: "
        f"{costs}. Dropped to 4 at once, by score: "
        f"{', '.join(f'{score} {loss:.3f}' for loss, score in by_score)}.",
        "effect": Interval(gain, gain, gain),
        "effect_of": f"4 merged over 4 dropped experts after {STEPS} steps, nats per token",
        "tables": [{"title": "", "rows": rows}],
    }


def run(study: Study) -> dict:
    points = points_of(study)
    return study.publish(study.cells(), {}, judge, seeds=[0], steps=STEPS, points=points)


if __name__ == "__main__":
    main(__file__, __doc__, run)
