# SPDX-License-Identifier: Apache-2.0
"""Pipeline MoE (Chen et al. 2023, arXiv:2304.11414), Tables 1 to 3, against the planner.

On the paper's own cluster, `specs/v100.toml`. The paper gives no batch: GPT-3's, which it
follows (Brown et al. 2020, Table 2.1: 0.5M tokens for Medium, 2M for 6.7B), is taken. Nor
does it say how many microbatches a pipeline has: those the planner finds fastest are taken,
and what the other reading of section 4.1 gives (as large as memory allows) stands beside.
Block inputs are kept and the rest is computed again, for all rows alike (6.7B does not fit
otherwise).
"""

import dataclasses
import functools

from papers import Cell, gpt, paper_workload, with_dispatcher

from switchx.planner.hardware import Hardware, load_hardware
from switchx.planner.layout import Layout, Workload
from switchx.planner.memory import memory_use
from switchx.planner.model_cost import count_parameters, flops_per_sequence
from switchx.planner.step_comm import StepCollective, step_collectives
from switchx.planner.step_time import collective_seconds, step_time

PAPER = "PPMoE"
VOCABULARY = 51200  # the paper names none: GPT-2's, padded as Megatron-LM pads it
EXPERTS = 64
OPTIMIZER_BYTES = 14
SMALL = dict(layers=24, d_model=1024, heads=16, vocab_size=VOCABULARY)
LARGE = dict(layers=32, d_model=4096, heads=32, vocab_size=VOCABULARY)
# Rows of 2048 tokens: 0.5M and 2M tokens.
SMALL_ROWS, LARGE_ROWS = 256, 1024


@dataclasses.dataclass(frozen=True)
class Table2Row:
    """A row of Table 2: tokens a second and GPU, and its printed ratio to the slowest dense."""

    name: str
    size: str
    layout: Layout
    tokens_per_s: float
    printed_ratio: float | None = None

    @property
    def is_small(self) -> bool:
        return self.size == "small"


TABLE_2 = (
    Table2Row("0.3B dense TP8 PP4", "small", Layout(pipe=4, model=8), 3244),
    Table2Row("0.3B dense DP4 TP8", "small", Layout(data=4, model=8), 4174),
    Table2Row("0.3B dense DP32", "small", Layout(data=32), 5120),
    Table2Row("6.7B DPMoE DP32", "small", Layout(expert=32, dispatcher="all_to_all"),
              2147, 0.662),
    Table2Row("6.7B DPMoE DP4 TP8", "small",
              Layout(expert=4, model=8, dispatcher="all_to_all"), 218, 0.067),
    Table2Row("6.7B PPMoE TP8 PP4", "small", Layout(pipe=4, model=8, dispatcher="sliced"),
              2708, 0.814),
    Table2Row("6.7B dense TP8 PP16", "large", Layout(pipe=16, model=8), 356),
    Table2Row("6.7B dense DP16 TP8", "large", Layout(data=16, model=8), 597),
    Table2Row("6.7B dense DP128", "large", Layout(data=128), 410),
    Table2Row("143B DPMoE DP256", "large",
              Layout(data=4, expert=64, dispatcher="all_to_all"), 93, 0.261),
    Table2Row("143B DPMoE DP128 TP2", "large",
              Layout(data=2, expert=64, model=2, dispatcher="all_to_all"), 183, 0.514),
    Table2Row("143B DPMoE DP32 TP8", "large",
              Layout(expert=32, model=8, dispatcher="all_to_all"), 63, 0.177),
    Table2Row("143B PPMoE TP8 PP16", "large", Layout(pipe=16, model=8, dispatcher="sliced"),
              323, 0.907),
)  # fmt: skip
NOTES = {
    "6.7B DPMoE DP4 TP8": "eight tensor-parallel ranks share one node's port in redundant "
    "all-to-alls; the planner has the bytes, not the contention"
}
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
        *_forward_shares(),
        *_equations(),
        *_unpredictable(),
    ]


@functools.cache
def predicted_tokens_per_s(name: str) -> float:
    """Tokens a second and GPU of a row of Table 2, by the planner."""
    row = next(row for row in TABLE_2 if row.name == name)
    hardware = load_hardware("v100")
    workload = table_2_workload(row)
    layout = _filled(workload, row.layout, hardware)
    return workload.tokens / _seconds(workload, layout, hardware) / layout.size


def _seconds(workload: Workload, layout: Layout, hardware: Hardware) -> float:
    collectives = scattered(step_collectives(workload, layout), layout)
    return step_time(workload, layout, hardware, collectives).step_s


def scattered(collectives: list[StepCollective], layout: Layout) -> list[StepCollective]:
    """Between stages as Megatron-LM 2.6 sends, which PPMoE is built on.

    Each tensor-parallel rank sends its part of what all of them have, and gathers the whole
    inside of the receiving node (Narayanan et al. 2021, arXiv:2104.04473, section 4.1).
    """
    found = []
    for each in collectives:
        if each.kind == "collective-permute" and layout.model > 1:
            part = each.num_bytes / layout.model
            found.append(dataclasses.replace(each, num_bytes=part))
            found.append(dataclasses.replace(each, kind="all-gather", axes=("model",)))
        else:
            found.append(each)
    return found


def table_2_workload(row: Table2Row) -> Workload:
    """The step of a row of Table 2."""
    sizes = SMALL if row.is_small else LARGE
    model = gpt(**sizes, experts=EXPERTS if row.layout.dispatcher else None)
    if row.layout.dispatcher:
        model = with_dispatcher(model, row.layout.dispatcher)
    rows = SMALL_ROWS if row.is_small else LARGE_ROWS
    return paper_workload(model, rows, optimizer_bytes=OPTIMIZER_BYTES)


def _filled(workload: Workload, layout: Layout, hardware: Hardware) -> Layout:
    """A pipeline's layout with the microbatches that fit and take the least time.

    Without stages a microbatch more or less changes no bytes, and gradients are summed once.
    """
    if layout.pipe == 1:
        return layout
    fitting = [
        filled
        for filled in _splits(workload, layout)
        if memory_use(workload, filled).total <= hardware.memory.usable_bytes
    ]
    return min(fitting, key=lambda each: _seconds(workload, each, hardware))


def fewest_microbatches(workload: Workload, layout: Layout, hardware: Hardware) -> Layout:
    """The other reading of section 4.1: microbatches as large as memory allows."""
    return next(
        filled
        for filled in _splits(workload, layout)
        if memory_use(workload, filled).total <= hardware.memory.usable_bytes
    )


def _splits(workload: Workload, layout: Layout) -> list[Layout]:
    powers = (2**n for n in range(workload.batch_size.bit_length()))
    return [dataclasses.replace(layout, num_microbatches=n) for n in powers]


def _parameters() -> list[Cell]:
    found = []
    for name, published, sizes, experts in (
        ("GPT-3 Medium (printed 0.3B)", 0.35e9, SMALL, None),
        ("small PPMoE and DPMoE", 6.7e9, SMALL, EXPERTS),
        ("GPT-3 6.7B", 6.7e9, LARGE, None),
        ("large PPMoE and DPMoE", 143e9, LARGE, EXPERTS),
    ):
        count = count_parameters(gpt(**sizes, experts=experts)).total
        found.append(Cell(PAPER, f"parameters: {name}", published, count))
    return found


def _throughputs() -> list[Cell]:
    return [
        Cell(
            PAPER,
            f"Table 2 tokens/s/GPU: {row.name}",
            row.tokens_per_s,
            predicted_tokens_per_s(row.name),
            NOTES.get(row.name, ""),
        )
        for row in TABLE_2
    ]


def speedup(over: str, of: str) -> tuple[float, float]:
    """(measured, predicted) throughput of one row of Table 2 over another's."""
    rows = {row.name: row.tokens_per_s for row in TABLE_2}
    measured = rows[of] / rows[over]
    return measured, predicted_tokens_per_s(of) / predicted_tokens_per_s(over)


def _headlines() -> list[Cell]:
    found = []
    for what, over, of, note in (
        ("PPMoE over the best DPMoE, small", "6.7B DPMoE DP32", "6.7B PPMoE TP8 PP4",
         "the paper prints +24.6% where its throughputs give +26.1%"),
        ("PPMoE over the best DPMoE, 143B", "143B DPMoE DP128 TP2", "143B PPMoE TP8 PP16",
         ""),
        ("PPMoE over the slowest dense, small", "0.3B dense TP8 PP4", "6.7B PPMoE TP8 PP4",
         "printed as 81.4%"),
        ("PPMoE over the slowest dense, 143B", "6.7B dense TP8 PP16", "143B PPMoE TP8 PP16",
         "54% of the fastest dense one"),
    ):  # fmt: skip
        measured, predicted = speedup(over, of)
        found.append(Cell(PAPER, what, measured, predicted, note))
    measured, _ = speedup("143B DPMoE DP128 TP2", "143B PPMoE TP8 PP16")
    found.append(
        Cell(PAPER, "PPMoE over the best DPMoE, 143B, fewest microbatches", measured,
             _with_fewest() / predicted_tokens_per_s("143B DPMoE DP128 TP2"),
             "the other reading: its bubble decides")
    )  # fmt: skip
    return found


def _with_fewest() -> float:
    row = next(row for row in TABLE_2 if row.name == "143B PPMoE TP8 PP16")
    hardware, workload = load_hardware("v100"), table_2_workload(row)
    layout = fewest_microbatches(workload, row.layout, hardware)
    return workload.tokens / _seconds(workload, layout, hardware) / layout.size


def forward_seconds(workload: Workload, layout: Layout, hardware: Hardware) -> dict:
    """Seconds of the parts of a forward pass, on one device of an average stage."""
    model = dataclasses.replace(workload.model, remat="none")
    workload = dataclasses.replace(workload, model=model)
    flops = flops_per_sequence(model, 0, workload.decoder_length)
    rate = hardware.compute.flops_per_s * layout.size / workload.batch_size
    seconds = {
        "attention": (flops.attention + flops.scores + flops.weighted_values) / rate,
        "FFN": flops.dense_ffn / rate,
        "experts": flops.experts / rate,
        "gating": flops.router * layout.model / rate,
        "logits": flops.logits * layout.pipe / rate,
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
    rows = {row.name: row for row in TABLE_2}
    dp, pp = rows["143B DPMoE DP256"], rows["6.7B PPMoE TP8 PP4"]
    first = forward_seconds(table_2_workload(dp), dp.layout, hardware)
    workload = table_2_workload(pp)
    third = forward_seconds(workload, _filled(workload, pp.layout, hardware), hardware)
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
