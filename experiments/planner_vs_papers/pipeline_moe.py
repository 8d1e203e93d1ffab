# SPDX-License-Identifier: Apache-2.0
"""Pipeline MoE (Chen et al. 2023, arXiv:2304.11414), Tables 1 to 3, against the planner.

On the paper's own cluster, `specs/v100.toml`. Of Table 2, `table_2.py`, the throughputs, their
ratios and their order; of Tables 1 and 3 the shares of the forward time.
"""

import dataclasses
import functools

from experiments.planner_vs_papers import table_2
from experiments.planner_vs_papers.papers import Cell, Interval, gpt
from experiments.planner_vs_papers.table_2 import EXPERTS, LARGE, SMALL
from switchx.hardware.spec import Hardware, load_hardware
from switchx.models.flops import count_parameters, flops_per_sequence
from switchx.planner.layout import Layout, Workload
from switchx.planner.step_comm import step_collectives
from switchx.planner.step_time import collective_seconds

PAPER = "PPMoE"
# Tables 1 and 3, in milliseconds.
TABLE_1 = {"total": 7617, "MoE": 6294, "1st all-to-all": 2566, "2nd all-to-all": 2423,
           "gating": 156}  # fmt: skip
TABLE_3 = {"total": 6257, "MoE": 2393, "gating": 491, "experts": 437, "MoE all-reduce": 1294,
           "FFN": 1714, "FFN all-reduce": 1176}  # fmt: skip


def cells() -> list[Cell]:
    """Every number of Tables 1 to 3 that a cost model can be asked for."""
    return [
        *_parameters(),
        *_throughputs(),
        *_headlines(),
        *_orders(),
        *_forward_shares(),
        *_equations(),
        *_unpredictable(),
    ]


def _parameters() -> list[Cell]:
    found = []
    for name, published, sizes, experts in (
        ("GPT-3 Medium (printed 0.3B)", 0.35e9, SMALL, None),
        ("small PPMoE and DPMoE", 6.7e9, SMALL, EXPERTS),
        ("GPT-3 6.7B", 6.7e9, LARGE, None),
        ("large PPMoE and DPMoE", 143e9, LARGE, EXPERTS),
    ):
        count = count_parameters(gpt(**sizes, experts=experts)).total
        note = "its sizes have 0.35B" * ("printed" in name)
        found.append(Cell(PAPER, f"parameters: {name}", published, count, note))
    return found


def _throughputs() -> list[Cell]:
    found = []
    for row in table_2.ROWS:
        for assumed, layout in row.layouts.items():
            predicted = table_2.of_all_batches(row.name, assumed)
            note = assumed
            if predicted is None:
                needed = table_2.least_needed_bytes(row, layout) / 1e9
                usable = table_2.HARDWARE.memory.usable_bytes / 1e9
                note = f"{assumed}: needs {needed:.1f} of {usable:.1f} GB".lstrip(": ")
            name = f"Table 2 tokens/s/GPU: {row.name}{f', {assumed}' if assumed else ''}"
            found.append(Cell(PAPER, name, row.tokens_per_s, predicted, note))
    return found


AFTER = "microbatches and what stages send: chosen so after the first results were seen"
HEADLINES = {
    "PPMoE over the best DPMoE, small": (
        "6.7B PPMoE TP8 PP4", "6.7B DPMoE DP32",
        "the paper prints +24.6% where its throughputs give +26.1%",
    ),
    "PPMoE over the best DPMoE, 143B": ("143B PPMoE TP8 PP16", "143B DPMoE DP128 TP2", ""),
    "PPMoE over the slowest dense, small": (
        "6.7B PPMoE TP8 PP4", "0.3B dense TP8 PP4", "printed as 81.4%",
    ),
    "PPMoE over the slowest dense, 143B": (
        "143B PPMoE TP8 PP16", "6.7B dense TP8 PP16", "54% of the fastest dense one",
    ),
}  # fmt: skip


def speedup(what: str) -> tuple[float, Interval]:
    """(measured, predicted) of one of `HEADLINES`."""
    name, over, _ = HEADLINES[what]
    rows = table_2.BY_NAME
    return rows[name].tokens_per_s / rows[over].tokens_per_s, table_2.ratio(name, over)


def _headlines() -> list[Cell]:
    found = []
    for what, (name, over, note) in HEADLINES.items():
        measured, predicted = speedup(what)
        found.append(Cell(PAPER, what, measured, predicted, note))
        best = table_2.fastest_ratio(name, over)
        found.append(Cell(PAPER, f"{what}, both at their best", measured, best, AFTER))
    return found


def _orders() -> list[Cell]:
    """Pairs of rows whose order the planner has the other way round, or leaves open."""
    found = []
    for faster, slower, measured, predicted in table_2.orders():
        if predicted is None:
            note = "no batch fits both"
        elif predicted.low > 1:
            continue
        else:
            best = table_2.fastest_ratio(faster, slower)
            verdict = "inverted" if best.high < 1 else "as measured" if best.low > 1 else "open"
            note = "inverted" if predicted.high < 1 else f"open; both at their best: {verdict}"
        found.append(Cell(PAPER, f"order: {faster} over {slower}", measured, predicted, note))
    return found


def forward_seconds(workload: Workload, layout: Layout, hardware: Hardware) -> dict:
    """Seconds of the parts of a forward pass, on one device of an average stage."""
    layout = dataclasses.replace(layout, is_ours=False)
    model = dataclasses.replace(workload.model, remat="none")
    workload = dataclasses.replace(workload, model=model)
    flops = flops_per_sequence(model, 0, workload.decoder_length)
    rate = hardware.compute.flops_per_s * layout.size / workload.batch_size
    seconds = {
        "attention": (flops.attention + flops.scores + flops.weighted_values) / rate,
        "FFN": flops.dense_ffn / rate,
        "experts": flops.experts / rate,
        "gating": flops.router * layout.model / rate,
        "logits": flops.logits / rate,
    }
    names = {
        "FFN outputs": "FFN all-reduce",
        "attention outputs": "attention all-reduce",
        "outputs": "MoE all-reduce",
        "tokens to experts": "1st all-to-all",
        "results to tokens": "2nd all-to-all",
    }
    for each in step_collectives(workload, layout):
        if each.what in names:
            one = collective_seconds(each.kind, each.num_bytes, each.axes, layout, hardware)
            name = names[each.what]
            seconds[name] = seconds.get(name, 0.0) + each.count * one
    return seconds


def _forward_shares() -> list[Cell]:
    hardware = load_hardware("v100")
    rows = table_2.BY_NAME
    dp, pp = rows["143B DPMoE DP256"], rows["6.7B PPMoE TP8 PP4"]
    first = forward_seconds(table_2.workload_of(dp), dp.layout, hardware)
    workload = table_2.workload_of(pp)
    # Of GPT-3's batch, in the microbatches that are fastest.
    splits = table_2.splits_that_fit(pp, pp.layout)
    fastest = min(splits, key=functools.partial(table_2.step_seconds, workload))
    third = forward_seconds(workload, fastest, hardware)
    found = []
    note = "the paper does not say on how many GPUs; Table 2's 256"
    both = first["1st all-to-all"] + first["2nd all-to-all"]
    moe = both + first["gating"] + first["experts"]
    total = sum(first.values())
    measured = TABLE_1["1st all-to-all"] + TABLE_1["2nd all-to-all"]
    for what, published, predicted in (
        ("both all-to-alls of forward", measured / TABLE_1["total"], both / total),
        ("both all-to-alls of the MoE layers", measured / TABLE_1["MoE"], both / moe),
        ("MoE layers of forward", TABLE_1["MoE"] / TABLE_1["total"], moe / total),
        ("gating of forward", TABLE_1["gating"] / TABLE_1["total"], first["gating"] / total),
    ):
        found.append(Cell(PAPER, f"Table 1 share: {what}", published, predicted, note))
    total = sum(third.values())
    moe = third["MoE all-reduce"] + third["gating"] + third["experts"]
    ffn = third["FFN"] + third["FFN all-reduce"]
    parts = {"MoE": moe, "gating": third["gating"], "experts": third["experts"],
             "MoE all-reduce": third["MoE all-reduce"], "FFN": ffn,
             "FFN all-reduce": third["FFN all-reduce"]}  # fmt: skip
    for what, seconds in parts.items():
        published = TABLE_3[what] / TABLE_3["total"]
        found.append(Cell(PAPER, f"Table 3 share: {what}", published, seconds / total))
    ratios = (
        ("MoE all-reduce over FFN all-reduce",
         TABLE_3["MoE all-reduce"] / TABLE_3["FFN all-reduce"],
         third["MoE all-reduce"] / third["FFN all-reduce"]),
        ("experts over dense FFNs, products",
         TABLE_3["experts"] / (TABLE_3["FFN"] - TABLE_3["FFN all-reduce"]),
         third["experts"] / third["FFN"]),
    )  # fmt: skip
    return found + [Cell(PAPER, f"Table 3: {what}", a, b) for what, a, b in ratios]


def _equations() -> list[Cell]:
    """Equations 2 and 5 with the paper's constants, against the usual formulas at its peaks."""
    peak, fast, slow = 125e12, 300e9, 12.5e9
    return [
        Cell(PAPER, "Eq. 2: all-to-all over FFN, E=64, h=4096",
             63 * 64 * peak / (16 * slow * 4096),
             (2 * 4096 * 63 / 64 / (slow / 8)) / (16 * 4096**2 / peak),
             "the paper sends everything once for each rank; pairwise each byte travels once"),
        Cell(PAPER, "Eq. 5: all-reduce over FFN, T=8, h=1000", 35 / 6,
             (2 * 7 / 8 * 2 * 1000 / fast) / (16 * 1000**2 / 8 / peak),
             "the paper leaves 1/T out of a ring's bytes"),
    ]  # fmt: skip


def _unpredictable() -> list[Cell]:
    why = {
        "Table 3: gating (ms)": (
            TABLE_3["gating"],
            "kernels that wait for memory and launches; the planner counts products"),
        "Tables 1 and 3: total forward (ms)": (
            TABLE_1["total"], "the batch of one forward step is not given"),
    }  # fmt: skip
    return [Cell(PAPER, cell, value, None, note) for cell, (value, note) in why.items()]
