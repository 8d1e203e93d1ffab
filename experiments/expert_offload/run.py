# SPDX-License-Identifier: Apache-2.0
"""Decoding with some experts of each layer on the device: tokens a second, memory and hits by
slots and bits (SE-MoE, Figure 10).

    make experiments EXPERIMENT=expert_offload

A model of 16 experts a layer with random weights, `switchx.bench.offload`. The time of decoding
is predicted from two measurements beside it, memory from sizes.
"""

import dataclasses
import math
import statistics
from typing import Any

from experiments.measured import Ratio, interval_of
from experiments.study import Study, main
from switchx.bench import offload

TIME, MEMORY = "time over predicted (95%)", "memory over predicted"
COPIES, ADDED = "copies, share of the time", "time added over copies' (95%)"
# Of the time: what slots have to move for their time to be told.
LEAST_COPIES = 0.05
BITS = ("bf16", "int8", "int4")
SLOTS = (2, 4, 8)
TURNS = 40


def row_of(weights: str, slots: int, turns: int) -> dict[str, Any]:
    """What was measured, and what the formulas say of it.

    Time is that of a model with as many experts as slots, which moves nothing, and of the
    copies: on a CPU they do not run beside products, so the two are added. Memory is the slots
    of all layers.
    """
    timed = offload.timed_turns(weights, slots, turns)
    config, _ = offload.model(weights)
    layers = len(config.sparse_layer_names)
    size = offload.bytes_of_expert(config, offload.FORMATS[weights])
    by_turn = list(
        zip(*(timed[f"{name}_s"] for name in ("decoding", "computing", "copies")), strict=True)
    )
    ratios = [decoding / (computing + copies) for decoding, computing, copies in by_turn]
    added = [(decoding - computing) / copies for decoding, computing, copies in by_turn]
    decoding_s = statistics.median(timed["decoding_s"])
    return {
        "weights": weights,
        "slots of 16": slots,
        "hits": timed["hits"],
        "tokens/s": offload.BATCH * offload.TIMED_TOKENS / decoding_s,
        TIME: dataclasses.asdict(interval_of(ratios, Ratio)),
        COPIES: statistics.median(copies / sum(rest) for _, *rest, copies in by_turn),
        ADDED: dataclasses.asdict(interval_of(added, Ratio)),
        "MiB on the device": timed["device_mib"],
        MEMORY: timed["device_mib"] / (layers * slots * size / 2**20),
        "memory over all experts'": slots / offload.NUM_EXPERTS,
    }


def found(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was found."""
    of_slots = [row for row in rows if row[COPIES] >= LEAST_COPIES]
    memory = max((row[MEMORY] for row in rows), key=lambda x: abs(math.log(x)))
    farthest = max((row[TIME]["mean"] for row in rows), key=lambda x: abs(math.log(x)))
    text = ", ".join(
        f"{row[ADDED]['mean']:.2f} ({row[ADDED]['low']:.2f} to {row[ADDED]['high']:.2f}) "
        f"in {row['weights']} with {row['slots of 16']} slots"
        for row in of_slots
    )
    most = max(of_slots or rows, key=lambda row: row[COPIES])
    return {
        "because": f"Farthest from the formulas are {farthest:.2f} of the time and "
        f"{memory:.2f} of the memory. What slots add to computing, over the time of the copies "
        f"where these are {LEAST_COPIES:.0%} of the time or more: {text or 'nowhere'}.",
        "effect": most[ADDED],
        "effect_of": "time that slots add over that of the copies, where copies are most",
    }


def judge(results: dict[str, Any]) -> dict[str, Any]:
    (table,) = results["tables"]
    rows = table["rows"]
    return found(rows) | {
        "intervals": cells_of(rows),
        "intervals_of": "time of decoding over predicted",
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
    study.publish(cells, {}, judge, seeds=[0], tables=[{"title": "", "rows": rows}])


def cells_of(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Time over predicted by weights and slots, for the picture."""
    return {f"{row['weights']}, {row['slots of 16']} slots": row[TIME] for row in rows}


if __name__ == "__main__":
    main(__file__, __doc__, run)
