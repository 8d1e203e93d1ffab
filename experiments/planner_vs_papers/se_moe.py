# SPDX-License-Identifier: Apache-2.0
"""SE-MoE (Shen et al. 2022, arXiv:2205.10034), Tables 1 and 4 and section 5.3, against the
planner, on `specs/a100.toml`.

Table 1: 12 layers, all sparse, an expert and a row a GPU. DeepSpeed is the flat all-to-all
with dense parameters on every device, SE-MoE the hierarchical one with sliced dense
parameters (sections 2.1 and 4.2). No row length is given: 2048 is taken.
"""

import functools

from experiments.planner_vs_papers.papers import Cell, gpt, paper_workload
from switchx.hardware.spec import load_hardware
from switchx.models.flops import count_parameters
from switchx.planner.layout import Layout
from switchx.planner.search import Plan, predict

PAPER = "SE-MoE"
OPTIMIZER_BYTES = 12
BYTES_A_PARAMETER = 16  # 2 + 2 + 4 + 4 + 4; the paper's storage formula prints 2+2+2+2+4
VOCABULARY = 50304
SIZES = dict(layers=12, d_model=4096, heads=64, vocab_size=VOCABULARY)
GPUS_A_NODE = 8
# GPUs and experts: billions of parameters, tokens/s and GB of DeepSpeed and of SE-MoE.
TABLE_1 = {
    8: (13.9, 24165, 31085, 68.9, 56.8),
    16: (26.8, 43691, 59136, 66.2, 53.9),
    32: (52.6, 82957, 113456, 66.8, 54.5),
    64: (104.1, 157728, 209970, 66.3, 54.4),
    128: (207.2, 283706, 376968, 66.4, 54.3),
}
# Hidden size: GB without and with the partitioned embedding, tokens/s likewise; 8 V100.
TABLE_4 = {
    2048: (7.46, 5.78, 144159, 150161),
    4096: (12.80, 9.70, 86237, 95890),
    8192: (27.80, 20.49, 40605, 46938),
}


def cells() -> list[Cell]:
    """Every number of Tables 1 and 4 that a cost model can be asked for."""
    return [*_parameters(), *_speeds(), *_memory(), *_hierarchical(), *_embedding(),
            *_unpredictable()]  # fmt: skip


@functools.cache
def predicted(gpus: int, is_hierarchical: bool) -> Plan:
    """A step of Table 1."""
    nodes = gpus // GPUS_A_NODE
    name = "hierarchical" if is_hierarchical and nodes > 1 else "all_to_all"
    layout = Layout(expert=gpus, dispatcher=name)
    if name == "hierarchical":
        layout = Layout(node=nodes, expert=GPUS_A_NODE, dispatcher=name)
    model = gpt(**SIZES, experts=gpus, every=1, dispatcher=name, remat="none")
    workload = paper_workload(model, gpus, optimizer_bytes=OPTIMIZER_BYTES)
    return predict(workload, layout, load_hardware("a100"))


def _parameters() -> list[Cell]:
    return [
        Cell(PAPER, f"Table 1 parameters: {gpus} experts", row[0] * 1e9,
             count_parameters(gpt(**SIZES, experts=gpus, every=1)).total)
        for gpus, row in TABLE_1.items()
    ]  # fmt: skip


def _speeds() -> list[Cell]:
    found = []
    for gpus, (_, deepspeed, se_moe, _, _) in TABLE_1.items():
        flat, tree = predicted(gpus, False), predicted(gpus, True)
        found += [
            Cell(PAPER, f"Table 1 tokens/s: {gpus} GPUs, DeepSpeed", deepspeed,
                 flat.tokens_per_s),
            Cell(PAPER, f"Table 1 tokens/s: {gpus} GPUs, SE-MoE", se_moe, tree.tokens_per_s),
            Cell(PAPER, f"Table 1: SE-MoE over DeepSpeed, {gpus} GPUs", se_moe / deepspeed,
                 tree.tokens_per_s / flat.tokens_per_s,
                 "the planner has the all-to-all's part alone, not the other engineering"),
        ]  # fmt: skip
    few, many = TABLE_1[8], TABLE_1[128]
    for name, column, is_tree in (("DeepSpeed", 1, False), ("SE-MoE", 2, True)):
        ours = predicted(128, is_tree).tokens_per_s / predicted(8, is_tree).tokens_per_s / 16
        found.append(
            Cell(PAPER, f"Table 1: weak scaling 8 to 128 GPUs, {name}",
                 many[column] / few[column] / 16, ours)
        )  # fmt: skip
    return found


def _memory() -> list[Cell]:
    """DeepSpeed's with dense state whole; SE-MoE saves what slicing it over the GPUs does."""
    found = []
    for gpus, (_, _, _, deepspeed, se_moe) in TABLE_1.items():
        count = count_parameters(gpt(**SIZES, experts=gpus, every=1))
        whole = predicted(gpus, False).memory.total / 1e9
        saved = BYTES_A_PARAMETER * count.dense * (1 - 1 / gpus) / 1e9
        found += [
            Cell(PAPER, f"Table 1 GB: {gpus} GPUs, DeepSpeed", deepspeed, whole),
            Cell(PAPER, f"Table 1 GB: {gpus} GPUs, SE-MoE", se_moe, whole - saved),
            Cell(PAPER, f"Table 1 GB saved: {gpus} GPUs", deepspeed - se_moe, saved),
        ]
    return found


def hierarchical_saving(gpus: int = 32) -> float:
    """Part of all communication's time that the hierarchical all-to-all saves."""
    flat, tree = predicted(gpus, False).time, predicted(gpus, True).time
    return 1 - tree.communication_s / flat.communication_s


def exchange_saving(gpus: int = 32) -> float:
    """The same of the all-to-alls' time alone."""
    flat, tree = predicted(gpus, False).time, predicted(gpus, True).time
    return 1 - tree.collectives_s["exchange"] / flat.collectives_s["exchange"]


def _hierarchical() -> list[Cell]:
    note = "of 80.7B parameters, whose sizes are not given; here Table 1's of 32 GPUs"
    flat, tree = predicted(32, False), predicted(32, True)
    whole = flat.time.step_s / tree.time.step_s - 1
    return [
        Cell(PAPER, "Section 5.3: communication saved by hierarchical all-to-all, 4 nodes",
             0.155, hierarchical_saving(), note),
        Cell(PAPER, "Section 5.3: the same of the all-to-alls alone, 4 nodes", 0.155,
             exchange_saving(), "if Figure 11's communication leaves gradients out"),
        Cell(PAPER, "Section 5.3: end to end by hierarchical all-to-all, 4 nodes", 0.103,
             whole, note),
    ]  # fmt: skip


def _embedding() -> list[Cell]:
    """Of V h parameters each of 8 GPUs keeps an eighth."""
    found = []
    for hidden, (whole, partitioned, slow, fast) in TABLE_4.items():
        saved = BYTES_A_PARAMETER * VOCABULARY * hidden * 7 / 8 / 1e9
        found += [
            Cell(PAPER, f"Table 4 parameters: hidden size {hidden}",
                 {2048: 100, 4096: 300, 8192: 700}[hidden] * 1e6, None,
                 f"the table itself has {VOCABULARY * hidden / 1e6:.0f}M; what else is in the "
                 "model is not given"),
            Cell(PAPER, f"Table 4 GB saved: hidden size {hidden}", whole - partitioned, saved),
            Cell(PAPER, f"Table 4 speed: hidden size {hidden}", fast / slow, None,
                 "layers, row length and optimizer are not given"),
        ]  # fmt: skip
    return found


def _unpredictable() -> list[Cell]:
    return [
        Cell(PAPER, "Section 4.2: part of the saving that rails make", 0.155, None,
             "what crosses spine switches between rails is slower, the paper gives no "
             "bandwidths; the planner has messages and bytes alone"),
        Cell(PAPER, "Table 3: speed of elastic training", 74.0 / 62.6, None,
             "its batches of tasks are misprinted (312, 230, 120 and 120 are not 1024)"),
    ]  # fmt: skip
