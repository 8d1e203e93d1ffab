# SPDX-License-Identifier: Apache-2.0
"""The translation model, its BLEU, throughput and cost: what README.md does step by step.

    make experiments EXPERIMENT=elephants DATA=FOLDER

Each step goes on where it was killed, cell by cell; nothing else should run beside it.
"""

import functools
import os
import shlex
import subprocess
import sys

from experiments.study import ROOT, Study, main

MODEL = "translation"
GIN_FILE = "configs/runs/translate_multi30k.gin"
# Over the quick bindings: a model that compiles in seconds.
SMALL = (
    "WARMUP_STEPS=1", "VOCAB_SIZE=500", "NUM_EXPERTS=2", "ModelConfig.d_model=16",
    "ModelConfig.d_ff=16", "ModelConfig.num_heads=1", "ModelConfig.num_encoder_layers=2",
)  # fmt: skip
FEW = ("--sentences=4", "--max_new_tokens=4")
HARDWARE = ("--usd_per_month=73.46", "--hardware=2 of the 16 vCPUs of an F16s")


def steps(study: Study) -> dict[str, tuple[str, ...]]:
    """Scripts of this folder in their order, with their arguments."""
    measured = (
        f"--model_dir={study.runs / MODEL}",
        f"--data_dir={study.data.absolute() / 'multi30k'}",
        f"--output={study.runs / 'measured'}",
    )
    found = {"quality": measured, "throughput": measured, "cost": HARDWARE, "tables": ()}
    if not study.is_quick:
        return found | {"tables": ("--update",)}
    brief = {
        "quality": ("--directions=en_de", "--samples=20", *FEW),
        "throughput": ("--batches=4", "--rounds=1", *FEW),
        "cost": ("--batches=4",),
        "tables": (),
    }
    results = f"--results={study.runs / 'results.json'}"
    return {name: (*found[name], *brief[name], results) for name in found}


def run(study: Study) -> None:
    cells = study.cells()
    study.files("multi30k/*.gz")
    bindings = ["DATA_DIR='<data>/multi30k'", *(SMALL if study.is_quick else ())]
    study.train(cells, MODEL, [GIN_FILE], bindings)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

    def script(name: str, *arguments: str) -> None:
        command = [sys.executable, str(ROOT / f"experiments/elephants/{name}.py"), *arguments]
        print(f"[elephants] {shlex.join(command[1:])}", flush=True)
        status = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path})
        if status.returncode:
            raise SystemExit(f"{name}.py: status {status.returncode}; the same command goes on")

    by_script = steps(study)
    for name in ("quality", "throughput"):
        cells.get({"script": name}, functools.partial(script, name, *by_script[name]))
    script("cost", *by_script["cost"])
    script("tables", *by_script["tables"], f"--wall_seconds={round(cells.seconds)}")


if __name__ == "__main__":
    main(__file__, __doc__, run)
