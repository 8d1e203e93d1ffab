# SPDX-License-Identifier: Apache-2.0
"""What both papers have in common: cells of their tables, and their GPT models.

Float16 parameters and activations, Adam in float32, 2048 tokens a row (Pipeline MoE,
arXiv:2304.11414, section 4.1; SE-MoE, arXiv:2205.10034, section 5.1 names no length, so GPT-3's
is taken), tied embeddings, learned positions.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from switchx import tree
from switchx.axes import dims_of
from switchx.models.config import ModelConfig, Precision, RouterConfig, SwitchConfig
from switchx.models.params import abstract_params
from switchx.moe.capacity import layer_shape
from switchx.planner.layout import StateArray, Workload

LENGTH = 2048
HALF = Precision(params="float16", compute="float16")


class Interval(NamedTuple):
    """What a number may be, by what is left open."""

    low: float
    high: float

    def __truediv__(self, other: "Interval") -> "Interval":
        return Interval(self.low / other.high, self.high / other.low)

    @classmethod
    def around(cls, intervals: Iterable["Interval"]) -> "Interval | None":
        """The interval that has all of these; None of none."""
        every = list(intervals)
        if not every:
            return None
        return cls(min(each.low for each in every), max(each.high for each in every))


@dataclasses.dataclass(frozen=True)
class Cell:
    """A number that a paper prints, and what the planner says instead.

    Attributes:
        paper: `PPMoE` or `SE-MoE`.
        cell: table, row and column.
        published: as the paper prints it; what it prints wrongly is in `note`.
        predicted: a number, or an interval over what the paper leaves open; None where a cost
            model cannot say it.
        note: why it cannot, or what is a misprint or an assumption.
    """

    paper: str
    cell: str
    published: float
    predicted: float | Interval | None
    note: str = ""

    @property
    def error(self) -> float | None:
        """The prediction's error, relative to what is published; 0 within an interval."""
        if self.predicted is None:
            return None
        nearest = self.predicted
        if isinstance(nearest, Interval):
            nearest = min(max(self.published, nearest.low), nearest.high)
        return nearest / self.published - 1

    def row(self) -> dict[str, Any]:
        """The cell as one object of a report; of a number both ends are the number."""
        is_interval = isinstance(self.predicted, Interval)
        low, high = self.predicted if is_interval else (self.predicted, self.predicted)
        return {
            "paper": self.paper,
            "cell": self.cell,
            "published": self.published,
            "predicted_low": low,
            "predicted_high": high,
            "relative_error": self.error,
            "note": self.note,
        }


def gpt(
    layers: int,
    d_model: int,
    heads: int,
    vocab_size: int,
    *,
    experts: int | None = None,
    every: int = 2,
    dispatcher: str = "all_to_all",
    remat: str = "full",
) -> ModelConfig:
    """A GPT whose every `every`-th FFN has experts, top-1, each as large as the dense FFN."""
    switch = None
    if experts is not None:
        # DeepSpeed-MoE's default capacity factor; Pipeline MoE's own dispatcher has none.
        switch = SwitchConfig(
            experts,
            every=every,
            capacity_factor=1.0,
            group_size=LENGTH,
            expert_bias=True,
            dispatcher=dispatcher,
            router=RouterConfig(jitter=0.0),
        )
    return ModelConfig(
        "decoder_only",
        vocab_size,
        d_model,
        4 * d_model,
        heads,
        d_model // heads,
        layers,
        activation="gelu",
        norm="layer",
        positions="learned",
        max_length=LENGTH,
        use_bias=True,
        scale_attention=True,
        scale_tied_logits=False,
        scan_layers=True,
        remat=remat,
        switch=switch,
        precision=HALF,
    )


def paper_workload(model: ModelConfig, rows: int, *, optimizer_bytes: int) -> Workload:
    """A step of `rows` rows of 2048 tokens.

    Args:
        optimizer_bytes: a parameter's, beside its two and its gradient's two: 14 make the
            18 of Pipeline MoE (section 4.1), 12 the 16 of SE-MoE (section 2.1).
    """
    state = []

    def add(name, leaf):
        dims = dims_of(name.rsplit("/", 1)[-1], len(leaf.shape))
        state.append(StateArray(name, dims, leaf.shape, 2, "params"))
        state.append(StateArray(name, dims, leaf.shape, optimizer_bytes, "optimizer"))

    tree.map_named(add, abstract_params(model))
    routing = functools.partial(layer_shape, model.switch)
    return Workload(
        model, 0, LENGTH, rows, tuple(state), routing, lambda *_: None, has_whole_logits=True
    )


def with_dispatcher(model: ModelConfig, dispatcher: str) -> ModelConfig:
    """The same model by another dispatcher."""
    switch = dataclasses.replace(model.switch, dispatcher=dispatcher)
    return dataclasses.replace(model, switch=switch)
