# SPDX-License-Identifier: Apache-2.0
"""The translation model, its BLEU, throughput and cost: what README.md does step by step.

    make experiments EXPERIMENT=elephants DATA=FOLDER

Each step goes on where it was killed, cell by cell; nothing else should run beside it.
"""

import functools
import json
import shlex
import subprocess
import sys

from experiments.elephants.tables import change, shown, tables
from experiments.measured import Interval
from experiments.study import ROOT, Study, main

MODEL = "translation"
# Of Table 3, each with one and two beams.
BATCHES = (1, 8, 20, 32, 64, 96)
GIN_FILE = "configs/runs/translate_multi30k.gin"
# Over the quick bindings: a model that compiles in seconds.
SMALL = (
    "WARMUP_STEPS=1", "VOCAB_SIZE=500", "NUM_EXPERTS=2", "ModelConfig.d_model=16",
    "ModelConfig.d_ff=16", "ModelConfig.num_heads=1", "ModelConfig.num_encoder_layers=2",
)  # fmt: skip
FEW = ("--sentences=4", "--max_new_tokens=4")
HARDWARE = ("--usd_per_month=73.46", "--hardware=2 of the 16 vCPUs of an F16s")


def steps(study: Study) -> dict[str, tuple[str, ...]]:
    """Scripts of this folder that measure, in their order, with their arguments."""
    measured = (
        f"--model_dir={study.runs / MODEL}",
        f"--data_dir={study.data.absolute() / 'multi30k'}",
        f"--output={study.runs / 'measured'}",
    )
    found = {"quality": measured, "throughput": measured, "cost": HARDWARE}
    brief = {
        "quality": ("--directions=en_de", "--samples=20", *FEW),
        "throughput": ("--batches=4", "--rounds=1", *FEW),
        "cost": ("--batches=4",),
    }
    results = f"--results={study.runs / 'results.json'}"
    return {
        name: (*found[name], *(brief[name] if study.is_quick else ()), results)
        for name in found
    }


def found(quality: dict, throughput: dict) -> dict:
    """What was found.

    Args:
        quality, throughput: sections of results.json.
    """
    means = [row for row in quality["rows"] if row["direction"] == "mean"]
    measured = {(row["batch"], row["beams"]) for row in throughput["rows"]}
    missing = [
        (batch, beams)
        for batch in BATCHES
        for beams in (1, 2)
        if (batch, beams) not in measured
    ]
    text = " and ".join(
        f"int8 changes BLEU by {row['int8']['change']:+.3f} and int4 by "
        f"{row['int4']['change']:+.3f} with {row['beams']} beam{'s' * (row['beams'] > 1)}"
        for row in means
    )
    (int4,) = (row["int4"] for row in means if row["beams"] == 2)
    return {
        "because": f"On average over the directions {text}; {len(missing)} of "
        f"{2 * len(BATCHES)} cells of Table 3 are missing.",
        "effect": Interval(int4["change"], int4["low"], int4["high"]),
        "effect_of": "int4 over float32 with two beams, BLEU",
    }


def changes_of(quality: dict) -> dict[str, dict[str, float]]:
    """Of BLEU with two beams by direction and precision, for the picture."""
    return {
        f"{shown(row['direction'])}, {bits}": change(row[bits])
        for bits in ("int8", "int4")
        for row in quality["rows"]
        if row["beams"] == 2
    }


def judge(results: dict) -> dict:
    quality = results["quality"]
    return found(quality, results["throughput"]) | {
        "tables": tables(results),
        "intervals": changes_of(quality),
        "intervals_of": "BLEU over float32's, two beams",
    }


def run(study: Study) -> None:
    cells = study.cells()
    files = study.files("multi30k/*.gz")
    bindings = ["DATA_DIR='<data>/multi30k'", *(SMALL if study.is_quick else ())]
    study.train(cells, MODEL, [GIN_FILE], bindings)

    def script(name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"experiments.elephants.{name}", *arguments]
        print(f"[elephants] {shlex.join(command[1:])}", flush=True)
        status = subprocess.run(command, cwd=ROOT)
        if status.returncode:
            raise SystemExit(f"{name}: status {status.returncode}; {study.again()} goes on")

    for name, arguments in steps(study).items():
        cells.get({"script": name}, functools.partial(script, name, *arguments))
    found = json.loads((study.runs / "results.json").read_text())
    sections = {name: found[name] for name in steps(study)}
    study.publish(cells, files, judge, seeds=[0], **sections)


if __name__ == "__main__":
    main(__file__, __doc__, run)
