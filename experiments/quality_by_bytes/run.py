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
MODEL, EXPERTS, HALF = "as it is", 8, 4
SCORES = ("frequency", "ean", "mean_norm", "reap", "aimer", "brute_force")
MERGED, NOVICES, COPIES = f"{HALF} merged", f"{HALF} and novices", f"{2 * EXPERTS} copies"
DROPPED = f"{HALF} dropped by frequency"
VECTORS_MIB = 4 * 128 * 4 / 2**20  # a novice in each of 4 Switch layers, D = 128, float32
# What `switchx reshape` is asked for.
WAYS = {
    MERGED: f"--experts={HALF}",
    "2 merged": "--experts=2",
    **{f"{HALF} dropped by {s}": f"--experts={HALF} --reduce=drop --score={s}" for s in SCORES},
    "2 dropped by frequency": "--experts=2 --reduce=drop",
    NOVICES: f"--experts={HALF} --reduce=drop --novice",
    "2 and novices": "--experts=2 --reduce=drop --novice",
    "dense, merged": "--experts=0",
    COPIES: f"--experts={2 * EXPERTS}",
}
# What trains on, with bindings for the model's form.
REPAIRED = {
    MODEL: (),
    MERGED: (f"NUM_EXPERTS={HALF}", "RouterConfig.counts_merged=True"),
    DROPPED: (f"NUM_EXPERTS={HALF}",),
    NOVICES: ("SwitchConfig.expert_bias=True",),
    COPIES: (f"NUM_EXPERTS={2 * EXPERTS}", "RouterConfig.counts_merged=True"),
}
# Nothing is dropped where quality is measured; in training as it was.
COMMON = (f"TRAIN_STEPS={STEPS}", f"EVAL_EVERY={STEPS}", f"CHECKPOINT_EVERY={STEPS}",
          "SwitchConfig.eval_capacity_factor=64.0", "INIT_OPTIMIZER=True")  # fmt: skip


def points_of(study: Study) -> list[dict[str, Any]]:
    """Bytes and losses of each model."""
    cells = study.cells()
    study.train(cells, "pretrained", (GIN_FILE,), ())
    ways = dict(list(WAYS.items())[:1]) if study.is_quick else WAYS
    points: list[dict[str, Any]] = []
    for way, words in ways.items():
        asked = ("--model_dir=<run pretrained>", f"--output=<run {way}>", *words.split())
        before, after = study.command(cells, way, "reshape", *asked)["results"]
        if not points:
            points.append(_point(MODEL, before))
        (seconds,) = (e["seconds"] for e in cells.lines if e["cell"].get("command") == way)
        points.append(_point(way, after) | {"seconds": seconds})
    by_name = {point["model"]: point for point in points}
    for way, bindings in REPAIRED.items():
        if way in by_name:
            begin = f"INIT_FROM='<run {'pretrained' if way == MODEL else way}>'"
            found = study.train(
                cells, f"{way} trained", (GIN_FILE,), (*COMMON, begin, *bindings)
            )
            curve = found["curve"]
            by_name[way] |= {
                "loss after": -curve[max(curve, key=int)],
                "training_seconds": found["seconds"],
            }
    if NOVICES in by_name:  # a novice counts as its vector, not as matrices of zeros
        for few in (HALF, 2):
            dropped, novices = (
                by_name[f"{few} dropped by frequency"],
                by_name[f"{few} and novices"],
            )
            novices["MiB"] = dropped["MiB"] + (EXPERTS - few) * VECTORS_MIB
    return points


def _point(way: str, row: dict) -> dict[str, Any]:
    return {
        "model": way, "MiB": row["bytes"] / 2**20, "loss": row["loss_nats"],
        "loss after": None, "seconds": None, "training_seconds": None,
    }  # fmt: skip


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """One run and one seed: nothing is judged, whatever comes out. What is said: at half the
    experts, what each way costs at once and after repair, over the whole model trained as long;
    which scores cost less than frequency; whether copies are ahead."""
    points = {point["model"]: point for point in results["points"]}
    whole = points[MODEL]

    def cost(way: str, loss: str) -> float:
        return points[way][loss] - whole[loss]

    costs = ", ".join(
        f"{cost(way, 'loss'):.3f} and {cost(way, 'loss after'):+.3f} ({way})"
        for way in (MERGED, DROPPED, NOVICES, COPIES)
    )
    gain = points[DROPPED]["loss after"] - points[MERGED]["loss after"]
    by_score = {score: cost(f"{HALF} dropped by {score}", "loss") for score in SCORES}
    ordered = ", ".join(f"{s} {by_score[s]:.3f}" for s in sorted(by_score, key=by_score.get))
    rows = [
        {
            "model": name,
            "MiB": each["MiB"],
            "loss, nats per token": each["loss"],
            "change of the loss": cost(name, "loss"),
            f"loss after {STEPS} steps": each["loss after"],
            "seconds": each["seconds"],
            "seconds of training": each["training_seconds"],
        }
        for name, each in points.items()
    ]
    return {
        "verdict": "exploratory",
        "because": f"Over the whole model, at once and after {STEPS} steps of both, in nats: "
        f"{costs}. Dropped to {HALF} at once, by score: {ordered}.",
        "effect": Interval(gain, gain, gain),
        "effect_of": f"{HALF} merged over {HALF} dropped experts after {STEPS} steps, nats per "
        "token",
        "tables": [{"title": "", "rows": rows}],
    }


def run(study: Study) -> dict:
    points = points_of(study)
    return study.publish(study.cells(), {}, judge, seeds=[0], steps=STEPS, points=points)


if __name__ == "__main__":
    main(__file__, __doc__, run)
