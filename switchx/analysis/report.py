# SPDX-License-Identifier: Apache-2.0
"""The routing report: sections of text, plots and tables, on one self-contained HTML page.

The page and the notebook have the same sections, each made from the numbers of one run.

Dims: N Switch layers, E experts, T tokens of the sample, S experts selected by a token, V
vocabulary
"""

import base64
import dataclasses
import html
import io
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import numpy as np

from switchx.analysis import plots
from switchx.analysis.plots import Figure, write_svg
from switchx.analysis.routing import (
    RoutingHistory,
    Snapshot,
    TypicalToken,
    class_counts,
    comparable,
    layer_similarity,
    read_history,
    read_lines,
    read_snapshots,
    rows_to_shares,
    saturation_by_step,
    token_counts,
    transitions,
    typical_tokens,
)
from switchx.moe.config import SwitchConfig
from switchx.moe.load_evenness import DEAD_FRACTION, dead_experts, even_shares

NUM_TYPICAL_TOKENS = 8
_VISIBLE = str.maketrans({" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d"})


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of texts and numbers; numbers are right-aligned.

    Attributes:
        title: title under which the table is folded; without one it is open.
        codes: columns whose items, separated by newlines, are shown as code.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    title: str = ""
    codes: Sequence[str] = ()

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str | float]], **options) -> Self:
        """The table of rows whose keys are the columns."""
        return cls(
            list(rows[0]) if rows else [], [list(row.values()) for row in rows], **options
        )


@dataclasses.dataclass(frozen=True)
class Section:
    """One subject: what it is, how to read it, its pictures and tables.

    A notebook shows it as the page does.
    """

    title: str
    text: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()

    def _repr_html_(self) -> str:
        parts = [f"<h2>{html.escape(self.title)}</h2>", f"<p>{html.escape(self.text)}</p>"]
        parts += [_image(figure, self.title) for figure in self.figures]
        parts += [_table(table) for table in self.tables]
        return "\n".join(parts)


@dataclasses.dataclass(frozen=True)
class RoutingRun:
    """A run's records of its routing, and the classes and texts of its tokens.

    Attributes:
        snapshots: snapshots of the same tokens, by step; the last is the final one.
        num_others: number of snapshots with other tokens, which are left out.
        alarms: alarms that training raised, lines of `alarms.jsonl`.
        evaluations: checkpoints that `switchx eval --step=all` evaluated, by step.
        classes: names of token classes; `class_V` has the class of every token id.
        text_of: function that returns the text of a token id.
    """

    history: RoutingHistory
    snapshots: Sequence[Snapshot]
    num_others: int
    classes: Sequence[str]
    class_V: np.ndarray
    text_of: Callable[[int], str]
    alarms: Sequence[dict] = ()
    evaluations: Sequence[dict] = ()

    @property
    def final(self) -> Snapshot:
        return self.snapshots[-1]

    @property
    def layers(self) -> list[str]:
        return self.final.layers

    @property
    def switch(self) -> SwitchConfig:
        return self.final.switch


def read_run(
    folder: pathlib.Path,
    classes: Sequence[str],
    class_V: np.ndarray,
    text_of: Callable[[int], str],
) -> RoutingRun:
    """The routing of a run folder; the other arguments describe its vocabulary.

    Raises:
        ValueError: nothing was recorded (a dense model, no logged step, no evaluation), a
            file is damaged, or files differ in their layers.
    """
    history = read_history(folder / "metrics.jsonl")
    snapshots = read_snapshots(folder / "routing")
    kept = comparable(snapshots)
    num_layers = history.load.shape[1]
    if len(kept[-1].layers) != num_layers or kept[-1].num_experts != history.num_experts:
        raise ValueError(
            f"{folder}: metrics.jsonl has {num_layers} Switch layers of {history.num_experts} "
            f"experts, routing/ has {len(kept[-1].layers)} of {kept[-1].num_experts}; they are "
            "of two runs: restore the one that does not belong there"
        )
    alarms, evaluations = (
        read_lines(path) if path.exists() else []
        for path in (folder / "alarms.jsonl", folder / "evaluations.jsonl")
    )
    num_others = len(snapshots) - len(kept)
    return RoutingRun(history, kept, num_others, classes, class_V, text_of, alarms, evaluations)


def all_sections(run: RoutingRun) -> list[Section]:
    """Everything, in the order of the page."""
    kinds = (overview, balance, alarms, checkpoints, load, course)
    of_tokens = (saturation, transition, classes, tokens, similarity)
    return [section(run) for section in (*kinds, *of_tokens)]


def overview(run: RoutingRun) -> Section:
    """The last logged steps in numbers."""
    history = run.history
    last = history.load[-1], run.switch.router.num_tasks
    even_NE, dead_NE = even_shares(*last), dead_experts(*last)
    rows = [
        (
            layer,
            float(even_NE[n].max()),
            float(even_NE[n].min()),
            ", ".join(map(str, np.flatnonzero(dead_NE[n]))) or "none",
            f"{history.dropped[-1, n]:.1%}",
            float(history.entropy[-1, n]),
            float(history.gate[-1, n]),
        )
        for n, layer in enumerate(run.layers)
    ]
    columns = (
        "layer",
        "busiest expert",
        "idlest expert",
        "dead experts",
        "dropped choices",
        "entropy",
        "gate",
    )
    return Section(
        "At the end",
        f"Means over the last logged steps of training, up to {history.steps[-1]}. Loads are "
        f"in even shares. A dead expert has less than {DEAD_FRACTION:.0%} of an even share.",
        tables=[Table(columns, rows)],
    )


# Columns of the table of `balance`, by their names in `metrics.jsonl`.
BALANCE = {
    "max_violation": "MaxVio",
    "effective_experts": "effective experts",
    "load_entropy": "load entropy",
    "expected_dropped": "drops of a balanced router",
    "information": "information",
    "gate_mass": "gate mass",
    "margin": "margin",
    "bias": "mean bias",
}


def balance(run: RoutingRun) -> Section:
    """How even the load is, how certain the router is, and what the fewest drops would be."""
    title, history = "Balance and margin", run.history
    known = [name for name in BALANCE if name in history.others]
    if not known:
        return Section(title, "This run was trained before these were logged.")
    rows = [
        (layer, *(float(history.others[name][-1, n]) for name in known))
        for n, layer in enumerate(run.layers)
    ]
    drawn = {
        "max_violation": plots.Course("MaxVio", history.others["max_violation"]),
        "effective_experts": plots.Course(
            "effective experts", history.others["effective_experts"], history.num_experts
        ),
        "information": plots.Course("information (nats)", history.others["information"]),
    }
    return Section(
        title,
        "MaxVio is the load of the busiest expert in even shares, less 1, the mean of batches. "
        "Effective experts are the exponential of the load's entropy; dotted: all experts. "
        "Information is what a token tells about its expert, in nats: 0 for a router that is "
        "uniform or the same for all. Gate mass is the probability of the chosen experts "
        "together, margin the score of the last chosen one less the next. Drops are shares of "
        "choices, of a router that is balanced and chooses for each token by itself.",
        [plots.course_figure(history.steps, list(drawn.values()), run.layers)],
        [Table(("layer", *(BALANCE[name] for name in known)), rows)],
    )


def alarms(run: RoutingRun) -> Section:
    """The alarms that training raised."""
    title = "Alarms"
    if not run.alarms:
        return Section(title, "None was raised.")
    rows = [(each["step"], each["kind"], each["text"]) for each in run.alarms]
    return Section(
        title,
        "An alarm stands at the first step at which it held, and not again while it did.",
        tables=[Table(("step", "alarm", "what was seen"), rows)],
    )


def checkpoints(run: RoutingRun) -> Section:
    """The validation metrics of all checkpoints that were evaluated after training."""
    title = "Checkpoints"
    if not run.evaluations:
        return Section(title, "None was evaluated: `switchx eval --step=all` does.")
    names = ("neg_log_perplexity", "accuracy", "dropped_fraction")
    rows = [
        (line["step"], *(_number(line[name]) for name in names), _largest_violation(line))
        for line in run.evaluations
    ]
    rows = [(*row[:3], f"{row[3]:.1%}", row[4]) for row in rows]
    columns = ("step", "neg. log perplexity", "accuracy", "dropped choices", "largest MaxVio")
    return Section(
        title,
        "Of the validation set, evaluated after training. MaxVio is that of all its tokens "
        "together, of a mixture those of each task, in the layer where it is largest.",
        tables=[Table(columns, rows)],
    )


def _number(value: float | None) -> float:
    """A number from a JSON file, which has null for one that is not finite."""
    return math.nan if value is None else float(value)


def _largest_violation(evaluation: dict) -> float:
    tasks = evaluation.get("tasks", {"": evaluation}).values()
    return float(max(max(task["routing"]["max_violation"]) for task in tasks))


def load(run: RoutingRun) -> Section:
    """Load of every expert over training."""
    even = even_shares(run.history.load, run.switch.router.num_tasks)
    return Section(
        "Load per expert",
        "Tokens that asked for each expert, before capacity. A balanced router is evenly "
        "light; a dark row is an expert that many tokens choose, a white one gets hardly any.",
        [plots.load_figure(run.history.steps, even, run.layers)],
    )


def course(run: RoutingRun) -> Section:
    """Drops, entropy, gate and dead experts over training."""
    history, (gate, entropy) = run.history, ignorant(run.switch)
    is_dead = dead_experts(history.load, run.switch.router.num_tasks)
    levels = {"entropy": entropy, "gate": gate}.items()
    known = ", ".join(f"{name} {level:.3g}" for name, level in levels if level is not None)
    dotted = f" Dotted: a router that knows nothing: {known}." * bool(known)
    rows = [
        plots.Course("dropped choices", history.dropped),
        plots.Course("router entropy (nats)", history.entropy, entropy, False),
        plots.Course("gate of 1st choice", history.gate, gate),
        plots.Course("dead experts", is_dead.sum(axis=-1).astype(float)),
    ]
    return Section(
        "Drops, entropy, gate, dead experts",
        "A graph a Switch layer, named by its block, later blocks darker. Dropped choices "
        f"found their expert full.{dotted}",
        [plots.course_figure(history.steps, rows, run.layers)],
    )


def ignorant(switch: SwitchConfig) -> tuple[float | None, float | None]:
    """The gate of the first choice and the entropy of a router whose logits are equal.

    Both are None if there are no logits or an expert counts several times, and the gate also
    if experts choose.
    """
    router, W = switch.router, switch.num_candidates
    if not router.has_weights or router.counts_merged:
        return None, None
    score = {"softmax": 1 / W, "sigmoid": 0.5, "sqrt_softplus": math.sqrt(math.log(2))}
    gate = 1 / router.num_selected if router.gate == "normalized" else score[router.score]
    gate = None if router.has_choosing_experts else router.gate_scale * gate
    return gate, math.log(W)


def saturation(run: RoutingRun) -> Section:
    """The section on how early the final routing is reached."""
    others = f" {run.num_others} evaluations of other tokens are left out." * bool(
        run.num_others
    )
    return saturation_section(run.snapshots, others)


def saturation_section(snapshots: Sequence[Snapshot], note: str = "") -> Section:
    """The saturation of a run's own samples; says so if there are not two."""
    title = "Saturation"
    if len(snapshots) < 2:
        return Section(
            title, "This takes a run folder with two evaluations of the same tokens."
        )
    final = snapshots[-1]
    steps = np.array([each.step for each in snapshots])
    chosen = np.concatenate([stack.expert_NTS.ravel() for stack in final.stacks])
    tokens = sum(math.prod(stack.expert_NTS.shape[:2]) for stack in final.stacks)
    chance = np.sum(chosen < final.num_experts) / tokens / final.switch.num_candidates
    rows = [plots.Course("saturation", saturation_by_step(snapshots), chance)]
    return Section(
        title,
        f"Share of the run's sampled choices that are already those of step {steps[-1]}, where "
        f"it is 1 by definition (OLMoE, arXiv:2409.02060). Dotted: chance.{note}",
        [plots.course_figure(steps, rows, final.layers, markers=True)],
    )


def transition(run: RoutingRun) -> Section:
    """The section on tokens' transitions from an expert to one of the next Switch layer."""
    shares, pairs = [], []
    for stack in run.final.stacks:
        shares += list(rows_to_shares(transitions(stack.expert_NTS, run.final.num_experts)))
        pairs += list(zip(stack.layers, stack.layers[1:], strict=False))
    return transition_section(shares, pairs)


def transition_section(
    shares: Sequence[np.ndarray], pairs: Sequence[tuple[str, str]], note: str = ""
) -> Section:
    """Transitions `[E, E]` between pairs of layers; see `plots.transition_figure`."""
    title = "From expert to expert"
    if not pairs:
        return Section(title, "No stack has two Switch layers: there is no way between them.")
    return Section(
        title,
        "Of the tokens that an expert gets, the percentage that goes to each expert of the "
        "next Switch layer. Rows alike: the second layer does not care where a token comes "
        "from. One dark cell a row: an expert's tokens stay together. Grey: no tokens."
        f"{note}",
        [plots.transition_figure(shares, pairs)],
    )


def classes(run: RoutingRun) -> Section:
    """The section on the kinds of tokens that an expert gets."""
    shares, names = [], []
    for stack in run.final.stacks:
        class_T = run.class_V[stack.token_T]
        sizes = np.bincount(class_T, minlength=len(run.classes))
        shown = np.flatnonzero(sizes)
        labels = [f"{run.classes[i]} ({sizes[i]:,})" for i in shown]
        for expert_TS in stack.expert_NTS:
            counts = class_counts(expert_TS, class_T, run.final.num_experts, len(run.classes))
            counts = np.c_[counts[:, shown], counts.sum(axis=1)]
            shares.append(counts / np.r_[sizes[shown], len(class_T)])
            names.append([*labels, f"all ({len(class_T):,})"])
    return Section(
        "Token classes",
        "Of the sample's tokens of a class (how many there are stands behind it), the "
        "percentage that each expert gets; the last column is of all tokens. A cell darker "
        "than that is what the expert is for. A decoder routes its inputs: special is mostly "
        "the padding that begins a text.",
        [plots.class_figure(shares, names, run.layers)],
    )


def tokens(run: RoutingRun) -> Section:
    """The tokens that tell most about each expert."""
    tables, E = [], run.final.num_experts
    for stack in run.final.stacks:
        for layer, expert_TS in zip(stack.layers, stack.expert_NTS, strict=True):
            counts = token_counts(expert_TS, stack.token_T, E)
            typical = {e: typical_tokens(counts, e, NUM_TYPICAL_TOKENS) for e in range(E)}
            load_E = np.bincount(expert_TS.reshape(-1), minlength=E)
            tables.append(typical_table(layer, typical, load_E, run.text_of))
    return Section("Typical tokens", TYPICAL, tables=tables)


TYPICAL = (
    "Tokens that each expert gets often and more often than the others do, with the share of "
    "the token's choices that are this expert's."
)


def typical_table(
    layer: str,
    typical: Mapping[int, Sequence[TypicalToken]],
    load_E: np.ndarray,
    text_of: Callable[[int], str],
) -> Table:
    """The typical tokens of a layer's experts."""
    rows = [
        (
            e,
            int(load_E[e]),
            "\n".join(f"{visible(text_of(t.token))} {t.share:.0%}" for t in own),
        )
        for e, own in typical.items()
    ]
    return Table(("expert", "choices", "typical"), rows, title=layer, codes=("typical",))


def similarity(run: RoutingRun) -> Section:
    """The section on how much one layer's routing tells about another's."""
    stacks = [stack for stack in run.final.stacks if len(stack.layers) > 1]
    title = "Likeness of layers"
    if run.switch.router.has_choosing_experts:
        text = "Experts choose their tokens here: a token has no first choice to compare."
        return Section(title, text)
    if not stacks:
        return Section(title, "No stack has two Switch layers to compare.")
    similarities = [layer_similarity(s.expert_NTS, run.final.num_experts) for s in stacks]
    names = [(s.layers[0].split()[0], *s.layers) for s in stacks]
    return Section(
        title,
        "Normalised mutual information of the layers' first choices, in percent: 100 when one "
        "layer's expert tells the other's, 0 when it tells nothing.",
        [plots.similarity_figure(similarities, names, "shared information")],
    )


def visible(text: str) -> str:
    text = text.translate(_VISIBLE)
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 66em; margin: 2em auto; padding: 0 1.5em; }}
h1 {{ font-size: 1.5em; }}
h2 {{ font-size: 1.15em; margin: 2.2em 0 .3em; }}
p {{ max-width: 46em; margin: .3em 0 .8em; }}
img {{ display: block; max-width: 100%; height: auto; margin: .6em 0; }}
table {{ border-collapse: collapse; margin: .6em 0; font-size: .9em; }}
th, td {{ padding: .15em .9em .15em 0; text-align: left; vertical-align: top; }}
th {{ border-bottom: 1px solid #888; font-weight: 600; }}
td.number, th.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
summary {{ cursor: pointer; }}
code {{ background: #f0f0f0; padding: 0 .25em; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def page(title: str, facts: Mapping[str, str], sections: Sequence[Section]) -> str:
    """The whole page.

    Args:
        facts: about the run, shown first.
    """
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in facts.items()
    )
    body = "\n".join([f"<table>{rows}</table>", *(each._repr_html_() for each in sections)])
    return PAGE.format(title=html.escape(title), body=body)


def _image(figure: Figure, title: str) -> str:
    # A separate image: the names inside one SVG never clash with those of another.
    content = io.BytesIO()
    write_svg(figure, content)
    data = base64.b64encode(content.getvalue()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{data}">'


def _table(table: Table) -> str:
    is_number = [
        all(isinstance(row[i], float | int) for row in table.rows)
        for i in range(len(table.columns))
    ]

    def cell(tag: str, i: int, value) -> str:
        kind = ' class="number"' if is_number[i] else ""
        if tag == "td" and table.columns[i] in table.codes:
            items = [f"<code>{html.escape(item)}</code>" for item in value.split("\n") if item]
            return f"<td>{' '.join(items)}</td>"
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
        return f"<{tag}{kind}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", i, name) for i, name in enumerate(table.columns))
    rows = (
        "<tr>" + "".join(cell("td", i, value) for i, value in enumerate(row)) + "</tr>"
        for row in table.rows
    )
    text = f"<table><tr>{head}</tr>{''.join(rows)}</table>"
    if table.title:
        text = f"<details><summary>{html.escape(table.title)}</summary>{text}</details>"
    return text
