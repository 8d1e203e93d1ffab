# SPDX-License-Identifier: Apache-2.0
"""Decoding with some experts of each layer on the device: tokens a second, memory and hits by
slots and bits (SE-MoE, Figure 10).

    make experiments EXPERIMENT=expert_offload

A model of 16 experts a layer with random weights, `switchx.bench.offload`. The time of decoding
is predicted from two measurements beside it, memory from sizes.
"""

import math
import statistics
from typing import Any

from experiments.measured import Ratio, interval_of
from experiments.study import Study, main
from switchx.bench import offload

ADDED = "time added over copies'"
# Share of the time below which noise of the rest hides the copies.
LEAST_COPIES = 0.05
BITS, SLOTS, TURNS = ("bf16", "int8", "int4"), (2, 4, 8), 7


def row_of(weights: str, slots: int, turns: int) -> dict[str, Any]:
    """What was measured, and what the formulas say of it.

    Time is that of a model with as many experts as slots, which moves nothing, and of the
    copies: on a CPU they do not run beside products, so the two are added. Memory is the slots
    of all layers.
    """
    timed = offload.step_times(weights, slots, turns)
    config, _ = offload.model(weights)
    layers = len(config.sparse_layer_names)
    size = offload.bytes_of_expert(config, offload.FORMATS[weights])
    predicted = timed["computing_s"] + timed["copies_s"]
    memory = layers * slots * size / 2**20
    return {
        "weights": weights,
        "slots of 16": slots,
        "hits": timed["hits"],
        "tokens/s": timed["tokens_per_s"],
        "time over predicted": timed["decoding_s"] / predicted,
        "computing, share": timed["computing_s"] / predicted,
        ADDED: added(timed["decoding_s"] / predicted, timed["computing_s"] / predicted),
        "MiB on the device": timed["device_mib"],
        "memory over predicted": timed["device_mib"] / memory,
        "memory over all experts'": slots / offload.NUM_EXPERTS,
    }


def added(time: float, computing: float) -> float | None:
    """What slots add to computing over the copies, of shares of the predicted time; None where
    the copies are too little of it to tell."""
    return (time - computing) / (1 - computing) if 1 - computing >= LEAST_COPIES else None


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Reproduced: in every cell time is within 20% and memory within 5% of the formula, and so
    is, within 20%, what slots add to computing where the copies are LEAST_COPIES of the time or
    more; elsewhere computing alone would be near enough."""
    keys = ("time over predicted", "memory over predicted")
    time, memory = (
        max((row[key] for row in rows), key=lambda x: abs(math.log(x))) for key in keys
    )
    of_slots = [row[ADDED] for row in rows if row[ADDED] is not None]
    holds = abs(time - 1) <= 0.2 and abs(memory - 1) <= 0.05
    holds &= all(abs(each - 1) <= 0.2 for each in of_slots)
    said = f"In no cell are copies {LEAST_COPIES:.0%} of the time."
    effect, effect_of = Ratio(time, time, time), "time over the formula's, the farthest cell"
    if of_slots:
        effect = Ratio(statistics.mean(of_slots), min(of_slots), max(of_slots))
        effect_of = "time that slots add over that of the copies, mean and range of cells"
        said = (
            f"What slots add to computing is {effect.low:.2f} to {effect.high:.2f} times the "
            f"time of the copies, where these are {LEAST_COPIES:.0%} of the time or more."
        )
    return {
        "verdict": "reproduced" if holds else "not reproduced",
        "because": f"Farthest from the formulas are {time:.2f} of the time and {memory:.2f} of "
        f"the memory. {said}",
        "effect": effect,
        "effect_of": effect_of,
    }


def run(study: Study) -> None:
    cells = study.cells()
    bits, slots, turns = (("int8",), (4,), 1) if study.is_quick else (BITS, SLOTS, TURNS)
    rows = [
        cells.get(
            {"weights": weights, "slots": number, "turns": turns},
            lambda weights=weights, number=number: row_of(weights, number, turns),
        )
        for weights in bits
        for number in slots
    ]
    study.publish(
        cells,
        {},
        **verdict(rows),
        seeds=[0],
        tables=[{"title": "", "rows": rows}],
        intervals=cells_of(rows),
        intervals_of="time of decoding over predicted",
    )


def cells_of(rows: list[dict[str, Any]]) -> dict[str, Ratio]:
    """Time over predicted by weights and slots, for the picture."""
    return {
        f"{row['weights']}, {row['slots of 16']} slots": interval_of(
            [row["time over predicted"]], Ratio
        )
        for row in rows
    }


if __name__ == "__main__":
    main(__file__, __doc__, run)
