# SPDX-License-Identifier: Apache-2.0
"""Pipeline MoE (Chen et al. 2023, arXiv:2304.11414), Table 2: tokens a second, as intervals.

The paper does not say all that a prediction needs, so each is an interval over what it leaves
open, and memory (`specs/v100.toml`) is enforced for every row:

- the batch: rows of 2048 tokens, from one a replica to GPT-3's, which the paper follows (Brown
  et al. 2020, Table 2.1: 0.5M tokens for Medium, 2M for 6.7B), by powers of two;
- its microbatches: the largest that fit (section 4.1), and those that are fastest;
- ZeRO, in the rows that the table marks: stage 1 or 2, as DeepSpeed has them for experts too:
  each replica keeps its share of the optimizer's state (and of gradients), of an expert those
  few that have it. Both send as much as one all-reduce;
- what stages send: whole activations, or each tensor rank its part, which the receiving node
  gathers (Narayanan et al. 2021, arXiv:2104.04473, section 4.1; in Megatron-LM, on which PPMoE
  is built, an option).

Logits are on the last stage, as Megatron-LM has them, and not split over the stages as here.

Experts of DPMoE that are tensor-parallel, too, are predicted in two ways: split over the tensor
ranks, and whole on each of them, as DeepSpeed had them before its pull request 2074. Ratios of
two rows are taken at equal batches. Block inputs are kept and the rest is computed again.
"""

import dataclasses
import functools
from collections.abc import Iterable

from experiments.planner_vs_papers.papers import Interval, gpt, paper_workload, with_dispatcher
from switchx.hardware.spec import load_hardware
from switchx.models.flops import flops_per_sequence
from switchx.partitioning.rules import Rules
from switchx.planner.layout import Layout, Workload, local_bytes
from switchx.planner.memory import memory_use, vocabulary_parts
from switchx.planner.step_comm import StepCollective, step_collectives
from switchx.planner.step_time import step_time

VOCABULARY = 51200  # the paper names none: GPT-2's, padded as Megatron-LM pads it
EXPERTS = 64
OPTIMIZER_BYTES = 14
SMALL = dict(layers=24, d_model=1024, heads=16, vocab_size=VOCABULARY)
LARGE = dict(layers=32, d_model=4096, heads=32, vocab_size=VOCABULARY)
# GPT-3's rows of 2048 tokens: 0.5M and 2M tokens.
SMALL_ROWS, LARGE_ROWS = 256, 1024
HARDWARE = load_hardware("v100")
LOGITS_OF_STAGES = ("outputs to all stages, for their logits", "gradients of the outputs")
REMATERIALIZED = 4  # passes through the blocks


@dataclasses.dataclass(frozen=True)
class WholeOnTensorRanks(Layout):
    """Each tensor-parallel rank has whole experts, and computes what all others do."""

    @property
    def rules(self) -> Rules:
        rules = Rules()
        whole = tuple(rule for rule in rules.expert_params if rule[0] != "F")
        return dataclasses.replace(rules, expert_params=whole)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of Table 2.

    Attributes:
        tokens_per_s: of one GPU.
        printed_ratio: to the slowest dense row.
    """

    name: str
    size: str
    layout: Layout
    tokens_per_s: float
    printed_ratio: float | None = None
    has_zero: bool = False

    @property
    def is_small(self) -> bool:
        return self.size == "small"

    @property
    def replicas(self) -> int:
        """Devices with rows of their own."""
        return self.layout.data * self.layout.expert

    @property
    def layouts(self) -> dict[str, Layout]:
        """By what is assumed of experts."""
        if self.layout.dispatcher is None or self.layout.model == 1 or self.layout.pipe > 1:
            return {"": self.layout}
        fields = {f.name: getattr(self.layout, f.name) for f in dataclasses.fields(Layout)}
        return {
            "experts split over tensor ranks": self.layout,
            "whole experts on each tensor rank": WholeOnTensorRanks(**fields),
        }


ROWS = (
    Row("0.3B dense TP8 PP4", "small", Layout(pipe=4, model=8), 3244),
    Row("0.3B dense DP4 TP8", "small", Layout(data=4, model=8), 4174, has_zero=True),
    Row("0.3B dense DP32", "small", Layout(data=32), 5120, has_zero=True),
    Row("6.7B DPMoE DP32", "small", Layout(expert=32, dispatcher="all_to_all"), 2147, 0.662,
        has_zero=True),
    Row("6.7B DPMoE DP4 TP8", "small", Layout(expert=4, model=8, dispatcher="all_to_all"),
        218, 0.067, has_zero=True),
    Row("6.7B PPMoE TP8 PP4", "small", Layout(pipe=4, model=8, dispatcher="sliced"),
        2708, 0.814),
    Row("6.7B dense TP8 PP16", "large", Layout(pipe=16, model=8), 356),
    Row("6.7B dense DP16 TP8", "large", Layout(data=16, model=8), 597, has_zero=True),
    Row("6.7B dense DP128", "large", Layout(data=128), 410, has_zero=True),
    Row("143B DPMoE DP256", "large", Layout(data=4, expert=64, dispatcher="all_to_all"),
        93, 0.261, has_zero=True),
    Row("143B DPMoE DP128 TP2", "large",
        Layout(data=2, expert=64, model=2, dispatcher="all_to_all"), 183, 0.514, has_zero=True),
    Row("143B DPMoE DP32 TP8", "large",
        Layout(expert=32, model=8, dispatcher="all_to_all"), 63, 0.177, has_zero=True),
    Row("143B PPMoE TP8 PP16", "large", Layout(pipe=16, model=8, dispatcher="sliced"),
        323, 0.907),
)  # fmt: skip
BY_NAME = {row.name: row for row in ROWS}


def workload_of(row: Row, rows: int | None = None) -> Workload:
    """The step of a row of the table; of GPT-3's batch where no number of rows is given."""
    model = gpt(
        **(SMALL if row.is_small else LARGE), experts=EXPERTS if row.layout.dispatcher else None
    )
    if row.layout.dispatcher:
        model = with_dispatcher(model, row.layout.dispatcher)
    most = SMALL_ROWS if row.is_small else LARGE_ROWS
    workload = paper_workload(model, rows or most, optimizer_bytes=OPTIMIZER_BYTES)
    if not row.has_zero:
        return workload
    state = (
        dataclasses.replace(each, itemsize=each.itemsize / copies_of(each.table, row.layout))
        if each.kind == "optimizer"
        else each
        for each in workload.state
    )
    return dataclasses.replace(workload, state=tuple(state))


def copies_of(table: str, layout: Layout) -> int:
    """The replicas of a parameter, which ZeRO divides its state among."""
    return layout.data * (1 if table == "expert_params" else layout.expert)


def needed_bytes(row: Row, workload: Workload, layout: Layout) -> float:
    """Bytes of a device's memory; of a row with ZeRO those of stage 2, the fewest."""
    use = memory_use(workload, layout)
    use = dataclasses.replace(use, logits=use.logits * layout.pipe)
    if not row.has_zero:
        return use.total
    sliced = sum(
        local_bytes(each, layout) / copies_of(each.table, layout)
        for each in workload.state
        if each.kind == "params"
    )
    return use.total - use.gradients + sliced * (2 if layout.num_microbatches > 1 else 1)


def step_seconds(workload: Workload, layout: Layout, is_scattered: bool = True) -> float:
    """Seconds of a step; gradients are added up before they are sent.

    Megatron's stages keep what they need to go backward, and wait where they have no op.
    """
    layout = dataclasses.replace(layout, is_ours=False)
    once = dataclasses.replace(layout, num_microbatches=1)
    found = [each for each in step_collectives(workload, layout) if each.part != "weights"]
    found += [each for each in step_collectives(workload, once) if each.part == "weights"]
    found = [each for each in found if each.what not in LOGITS_OF_STAGES]
    if is_scattered:
        found = scattered(found, layout)
    time = step_time(workload, layout, HARDWARE, found)
    seconds = time.step_s
    if layout.pipe > 1:
        flops = flops_per_sequence(workload.model, 0, workload.decoder_length).logits
        others = layout.size / layout.model * vocabulary_parts(workload, layout)
        more = 3 * flops * workload.batch_size * (layout.pipe - 1) / others
        seconds += more / HARDWARE.compute.flops_per_s / (1 - time.bubble)
    if isinstance(layout, WholeOnTensorRanks):
        flops = flops_per_sequence(workload.model, 0, workload.decoder_length).expert_slots
        again = REMATERIALIZED * flops * workload.batch_size * (layout.model - 1) / layout.size
        seconds += again / HARDWARE.compute.flops_per_s
    return seconds


def scattered(collectives: list[StepCollective], layout: Layout) -> list[StepCollective]:
    """Between stages each tensor rank sends its part, and the receiving node gathers them."""
    found = []
    for each in collectives:
        if each.kind == "collective-permute" and layout.model > 1:
            part = each.num_bytes / layout.model
            found.append(dataclasses.replace(each, num_bytes=part))
            found.append(dataclasses.replace(each, kind="all-gather", axes=("model",)))
        else:
            found.append(each)
    return found


def splits_that_fit(row: Row, layout: Layout, rows: int | None = None) -> list[Layout]:
    """The layout with every number of microbatches that fits, the largest ones first."""
    workload = workload_of(row, rows)
    own = workload.batch_size // row.replicas
    layouts = (
        dataclasses.replace(layout, num_microbatches=2**n) for n in range(own.bit_length())
    )
    usable = HARDWARE.memory.usable_bytes
    return [each for each in layouts if needed_bytes(row, workload, each) <= usable]


@functools.cache
def throughputs(name: str, assumed: str) -> dict[int, Interval]:
    """Tokens a second and GPU, by rows of the batch; {} where nothing fits."""
    row = BY_NAME[name]
    layout, found = row.layouts[assumed], {}
    most = SMALL_ROWS if row.is_small else LARGE_ROWS
    for rows in (2**n for n in range(most.bit_length())):
        fitting = splits_that_fit(row, layout, rows) if rows >= row.replicas else []
        if not fitting:
            continue
        workload = workload_of(row, rows)
        speeds = [
            [workload.tokens / step_seconds(workload, each, way) / layout.size for way in ways]
            for ways in [(True, False) if layout.pipe > 1 else (True,)]
            for each in fitting
        ]
        found[rows] = Interval(min(speeds[0]), max(map(max, speeds)))
    return found


def least_needed_bytes(row: Row, layout: Layout) -> float:
    """Bytes of a device with a row a replica."""
    return needed_bytes(row, workload_of(row, row.replicas), layout)


def of_all_batches(name: str, assumed: str) -> Interval | None:
    """Tokens a second and GPU of a row; None where nothing fits."""
    return Interval.around(throughputs(name, assumed).values())


def ratio(name: str, over: str) -> Interval | None:
    """The throughput of one row over another's at equal batches; None where none fits both.

    Of experts both is assumed.
    """
    found = [
        mine[rows] / other[rows]
        for mine in (throughputs(name, each) for each in BY_NAME[name].layouts)
        for other in (throughputs(over, each) for each in BY_NAME[over].layouts)
        for rows in mine.keys() & other.keys()
    ]
    return Interval.around(found)


def fastest_ratio(of: str, over: str) -> Interval:
    """The same of both rows at their best.

    With the fastest microbatches, parts sent by tensor ranks, and split experts.
    """
    mine, other = (throughputs(name, next(iter(BY_NAME[name].layouts))) for name in (of, over))
    ratios = [mine[rows].high / other[rows].high for rows in mine.keys() & other.keys()]
    return Interval(min(ratios), max(ratios))


def orders() -> Iterable[tuple[str, str, float, Interval | None]]:
    """(faster, slower, measured ratio, predicted one) of all pairs of rows of a setting."""
    for row in ROWS:
        for other in ROWS:
            if row.size == other.size and row.tokens_per_s > other.tokens_per_s:
                measured = row.tokens_per_s / other.tokens_per_s
                yield row.name, other.name, measured, ratio(row.name, other.name)
