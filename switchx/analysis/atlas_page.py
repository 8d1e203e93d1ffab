# SPDX-License-Identifier: Apache-2.0
"""The page of an atlas: sections of words, maps and tables, of one model or of two.

A notebook shows the same sections: `sections([atlas])`.
Dims: R texts, K labels, E experts, N Switch layers
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from switchx.analysis import plots
from switchx.analysis.atlas import (
    LEAST_TIMES,
    NUM_PERMUTATIONS,
    Flips,
    KnockOuts,
    LayerAtlas,
    specialists,
)
from switchx.analysis.report import Section, Table, visible
from switchx.analysis.routing import rows_to_shares
from switchx.moe.balance import DEAD_FRACTION, dead_experts, even_shares

# What a page shows, so that it stays below 5 MiB; tables have all.
MOST_LABELS, MOST_EXPERTS, MOST_ROWS, MOST_MAPS = 24, 64, 2048, 32


@dataclasses.dataclass(frozen=True)
class Atlas:
    """What was counted and measured of a model on labelled texts.

    Attributes:
        name: name of the model.
        labels: names of the labels, K of them; `texts_K` texts each.
        layers: Switch layers, without the counts of all token ids.
        how: what the stacks read.
        loss_K: nats a target token, by label.
        knock_outs: losses without single experts; None where none was removed.
        saturation: steps, saturation by step and layer, and layers, of the run's own samples;
            None where there are none.
        text_of, piece_of: text of a list of token ids, and of one.
        label_of: label of a text by its number.
        record: file of the routing record.
    """

    name: str
    labels: tuple[str, ...]
    texts_K: np.ndarray
    layers: Sequence[LayerAtlas]
    how: str
    loss_K: np.ndarray
    knock_outs: KnockOuts | None
    saturation: tuple[np.ndarray, np.ndarray, list[str]] | None
    text_of: Callable[[list[int]], str]
    piece_of: Callable[[int], str]
    label_of: Callable[[int], str]
    record: pathlib.Path

    @property
    def shown_labels(self) -> np.ndarray:
        """The labels that maps show: those of most tokens, in their order."""
        tokens_K = self.layers[0].specialization.tokens_K
        return np.sort(np.argsort(-tokens_K, kind="stable")[:MOST_LABELS])

    def shown_experts(self, layer: LayerAtlas) -> list[int]:
        """The experts that tables of the page show: the busiest, in their order."""
        most = min(MOST_EXPERTS, max(MOST_ROWS // len(self.layers), 4))
        return sorted(np.argsort(-layer.load_E, kind="stable")[:most].tolist())


def sections(
    atlases: Sequence[Atlas], flips: Sequence[Flips] | str | None = None
) -> list[Section]:
    """Everything, in the order of the page; what is of one model stands beside the other's.

    Args:
        atlases: one model, or two.
        flips: differences of two models' choices, or why there are none.
    """
    found = [overview(atlases), losses(atlases)]
    if flips is not None:
        found.append(differences(flips))
    of_one = (
        load,
        specialization,
        knock_outs,
        coactivation,
        transition,
        vocabulary,
        examples,
        saturation,
    )
    for section in of_one:
        for atlas in atlases:
            each = section(atlas)
            title = each.title if len(atlases) == 1 else f"{each.title}: {atlas.name}"
            found.append(dataclasses.replace(each, title=title))
    return found


def overview(atlases: Sequence[Atlas]) -> Section:
    """Every Switch layer in numbers."""
    columns = (
        *("model", "layer", "tokens", "effective experts", "busiest", "idlest", "dead"),
        *("dropped", "probability", "margin", "label information", "p", "vocabulary"),
    )
    rows = []
    for atlas in atlases:
        for layer in atlas.layers:
            even_E, own = even_shares(layer.load_E), layer.specialization
            dead = np.flatnonzero(dead_experts(layer.load_E))
            told = own.mutual / own.labels if own.labels else 0.0
            rows.append(
                (
                    *(atlas.name, layer.layer, f"{layer.num_tokens:,}"),
                    *(layer.effective_experts, float(even_E.max()), float(even_E.min())),
                    _some(dead.tolist()),
                    *(f"{layer.dropped:.1%}", layer.probability, layer.margin),
                    *(f"{told:.1%}", _p(own.p, len(atlas.labels))),
                    f"{layer.vocabulary:.0%} ({layer.vocabulary_by_chance:.0%} by chance)",
                )
            )
    return Section(
        "Layers",
        f"Loads are in even shares; a dead expert has less than {DEAD_FRACTION:.0%} of one. As "
        "many effective experts, evenly loaded, would have the load's entropy. Probability and "
        "margin are means: of the first choice's probability, and of the last choice's score "
        "over the next expert's. Label information is I(expert; label) / H(label) of a choice; "
        "p is the share of permuted labels whose information is as large. Vocabulary is the "
        "share of a token id's tokens that chose its most frequent expert, of ids seen "
        f"at least {LEAST_TIMES} times, by chance with choices shuffled over tokens.",
        tables=[Table(columns, rows)],
    )


def losses(atlases: Sequence[Atlas]) -> Section:
    """The labels: how much text there is of each, and its loss."""
    first = atlases[0]
    columns = ["label", "texts", *(f"loss of {atlas.name}" for atlas in atlases)]
    rows = [
        (label, int(first.texts_K[k]), *(float(atlas.loss_K[k]) for atlas in atlases))
        for k, label in enumerate(first.labels)
    ]
    how = "; ".join(dict.fromkeys(atlas.how for atlas in atlases))
    few = [label for k, label in enumerate(first.labels) if first.texts_K[k] < 5]
    warning = ""
    if len(first.labels) == 1:
        warning = " There is one label: nothing can be said of specialization in labels."
    elif few:
        warning = (
            f" Of {_some(few)} there are fewer than 5 texts: permuted labels tell little; give "
            "shorter texts."
        )
    return Section(
        "Labels",
        f"Loss is in nats a target token: {how}.{warning}",
        tables=[Table(columns, rows)],
    )


def differences(flips: Sequence[Flips] | str) -> Section:
    """The section on choices that differ between two models."""
    title = "Choices that differ"
    if isinstance(flips, str):
        return Section(title, f"Choices cannot be compared token by token: {flips}.")
    rows = [(each.layer, f"{each.differing:.2%}", f"{each.overlap:.2%}") for each in flips]
    return Section(
        title,
        "Of the same tokens, the share whose set of experts is another in the second model, "
        "and the mean share of its experts that the first chose, too. Experts are compared by "
        "number: of two trainings both say nothing.",
        tables=[Table(("layer", "other set", "overlap"), rows)],
    )


def load(atlas: Atlas) -> Section:
    """Loads of experts, the busiest first."""
    rows = []
    for layer in atlas.layers:
        even_E = even_shares(layer.load_E)
        order = np.argsort(-even_E, kind="stable")[:MOST_EXPERTS]
        rows.append((layer.layer, "\n".join(f"{e}: {even_E[e]:.2f}" for e in order.tolist())))
    return Section(
        "Load",
        f"Experts in the order of their load, in even shares{_cut(atlas, MOST_EXPERTS)}.",
        tables=[Table(("layer", "expert: load"), rows, codes=("expert: load",))],
    )


def specialization(atlas: Atlas) -> Section:
    """The section on the experts that tokens of each label choose."""
    title, shown = "Experts by label", atlas.shown_labels
    shares, names = [], []
    tokens_K = atlas.layers[0].specialization.tokens_K
    for layer in _mapped(atlas):
        own = layer.specialization
        all_E = layer.load_E / layer.num_tokens
        shares.append(np.c_[own.share_EK[:, shown], all_E])
        names.append(
            [
                *(f"{atlas.labels[k]} ({own.tokens_K[k]:,})" for k in shown),
                f"all ({layer.num_tokens:,})",
            ]
        )
    cut = f" The {MOST_LABELS} labels of most tokens." if len(tokens_K) > MOST_LABELS else ""
    even = atlas.layers[0].even_share
    return Section(
        title,
        "N(e, label) / N(label): of a label's tokens (how many there are stands behind it), "
        f"the percentage that choose each expert; an even share is {even:.1%}. The last column "
        f"is of all tokens.{cut}{_maps_cut(atlas)}",
        [plots.class_figure(shares, names, [each.layer for each in _mapped(atlas)])],
    )


def knock_outs(atlas: Atlas) -> Section:
    """The section on the loss without single experts."""
    title, removed = "Without single experts", atlas.knock_outs
    if removed is None:
        return Section(title, "No expert was removed (--knockouts).")
    shown, labels = atlas.shown_labels, [*(atlas.labels[k] for k in atlas.shown_labels), "all"]
    tokens_K = removed.tokens_K
    changes, layers = [], [each for each in _mapped(atlas) if each.layer in removed.layers]
    for layer in layers:
        change_EK = np.full((layer.num_experts, len(labels)), np.nan)
        for x, (name, e) in enumerate(zip(removed.layers, removed.experts, strict=True)):
            if name == layer.layer:
                change_K = removed.change_XK[x]
                all_labels = change_K @ tokens_K / tokens_K.sum()
                change_EK[e] = [*change_K[shown], all_labels]
        changes.append(change_EK)
    number = f"{len(removed.layers)} of {removed.num_all}"
    drawn = (
        " Grey experts were not removed: each label's specialist was, and others were drawn."
        if len(removed.layers) < removed.num_all
        else ""
    )
    return Section(
        title,
        f"The change of loss, in nats a target token, when one expert is removed: its logit is "
        "masked, and its tokens choose among the others, whose probabilities add up to 1. "
        f"{number} experts, each alone, on {int(removed.texts_K.sum()):,} texts.{drawn} White: "
        "no change, or a lower loss without it. The table has each label's specialist, the "
        "expert that takes most more of its tokens than of the others'; p is the share of "
        f"{NUM_PERMUTATIONS} permutations of the labels among texts for which the label's "
        f"change exceeds the others' by as much.{_maps_cut(atlas)}",
        [plots.knock_out_figure(changes, labels, [each.layer for each in layers])],
        [_specialists(atlas, removed)],
    )


def _specialists(atlas: Atlas, removed: KnockOuts) -> Table:
    columns = (
        *("label", "layer", "expert", "of its tokens", "of all tokens"),
        *("change of its loss", "of the others'", "p"),
    )
    by_name, rows = {layer.layer: layer for layer in atlas.layers}, []
    for k, (name, e) in enumerate(specialists(atlas.layers)):
        layer, x = by_name[name], removed.row(name, e)
        shares = (layer.specialization.share_EK[e, k], layer.load_E[e] / layer.num_tokens)
        of_change = ("not removed", "", "")
        if x is not None:
            tokens_K = np.where(np.arange(len(atlas.labels)) == k, 0, removed.tokens_K)
            others = removed.change_XK[x] @ tokens_K / max(tokens_K.sum(), 1)
            p = _p(removed.p_XK[x, k], len(atlas.labels))
            of_change = (f"{removed.change_XK[x, k]:+.4f}", f"{others:+.4f}", p)
        rows.append((atlas.labels[k], name, e, *(f"{each:.1%}" for each in shares), *of_change))
    return Table(columns, rows)


def coactivation(atlas: Atlas) -> Section:
    """The section on experts that are chosen together."""
    title, first = "Chosen together", atlas.layers[0]
    if first.num_choices == 1:
        return Section(title, "A token chooses one expert: no two are chosen together.")
    chance = (first.num_choices - 1) / max(first.num_experts - 1, 1)
    layers = _mapped(atlas)
    return Section(
        title,
        "N(i and j) / N(i): of the tokens that chose the row's expert, the percentage that "
        f"chose the column's, too (OLMoE, arXiv:2409.02060). By chance {chance:.1%}."
        f"{_maps_cut(atlas)}",
        [
            plots.transition_figure(
                [each.coactivation_EE for each in layers],
                [(each.layer, each.layer) for each in layers],
            )
        ],
    )


def transition(atlas: Atlas) -> Section:
    """The section on tokens' transitions from an expert to one of the next Switch layer."""
    layers = [each for each in _mapped(atlas) if each.arrivals_EE is not None]
    title = "From expert to expert"
    if not layers:
        return Section(title, "No stack has two Switch layers: there is no way between them.")
    return Section(
        title,
        "Of the tokens of an expert, the percentage that goes to each expert of the next "
        f"Switch layer. Grey: no tokens.{_maps_cut(atlas)}",
        [
            plots.transition_figure(
                [rows_to_shares(each.arrivals_EE) for each in layers],
                [(each.previous, each.layer) for each in layers],
            )
        ],
    )


def vocabulary(atlas: Atlas) -> Section:
    """The section on the token ids that tell most about each expert."""
    tables = []
    for layer in atlas.layers:
        rows = []
        for e in atlas.shown_experts(layer):
            shown = [
                f"{visible(atlas.piece_of(t.token))} {t.share:.0%}" for t in layer.typical[e]
            ]
            rows.append((e, int(layer.load_E[e]), "\n".join(shown)))
        columns = ("expert", "choices", "typical tokens")
        tables.append(Table(columns, rows, title=layer.layer, codes=("typical tokens",)))
    return Section(
        "Vocabulary",
        "Tokens that each expert gets often and more often than the others do, with the share "
        f"of the token's choices that are this expert's{_cut(atlas)}.",
        tables=tables,
    )


def examples(atlas: Atlas) -> Section:
    """The section on tokens among their neighbours."""
    tables = []
    for layer in atlas.layers:
        rows = []
        for e in atlas.shown_experts(layer):
            for each in layer.examples[e]:
                before, after = map(atlas.text_of, (each.before, each.after))
                token = visible(atlas.piece_of(each.token))
                label = atlas.label_of(each.text)
                rows.append((e, label, visible(before), token, visible(after), each.gate))
        columns = ("expert", "label", "before", "token", "after", "gate")
        tables.append(Table(columns, rows, title=layer.layer, codes=("token",)))
    return Section(
        "Examples",
        "The tokens that an expert took with its largest gates, one of each token id, with "
        f"their neighbours{_cut(atlas)}.",
        tables=tables,
    )


def saturation(atlas: Atlas) -> Section:
    """The section on how early the routing is the final one."""
    title = "Saturation over training"
    if atlas.saturation is None:
        return Section(title, "This takes a run folder with samples of two evaluations.")
    steps, values, layers = atlas.saturation
    even = atlas.layers[0].even_share
    return Section(
        title,
        f"Share of the choices of step {steps[-1]} that were already made before (OLMoE, "
        "arXiv:2409.02060), of the samples that training recorded, not of these texts. Dotted: "
        "chance.",
        [
            plots.course_figure(
                steps, [plots.Course("saturation", values, even)], layers, markers=True
            )
        ],
    )


def _mapped(atlas: Atlas) -> list[LayerAtlas]:
    """The layers that maps show: all, or evenly spaced ones."""
    layers = list(atlas.layers)
    if len(layers) <= MOST_MAPS:
        return layers
    return [layers[i] for i in np.linspace(0, len(layers) - 1, MOST_MAPS).round().astype(int)]


def _maps_cut(atlas: Atlas) -> str:
    if len(atlas.layers) <= MOST_MAPS:
        return ""
    return f" Maps of {MOST_MAPS} of {len(atlas.layers)} layers; tables/ has all."


def _cut(atlas: Atlas, most: int | None = None) -> str:
    """Says where not all experts are shown."""
    layer = atlas.layers[0]
    shown = len(atlas.shown_experts(layer)) if most is None else most
    if shown >= layer.num_experts:
        return ""
    return f"; of the {shown} busiest of {layer.num_experts} (tables/ has all)"


def _some(items: Sequence, most: int = 8) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more or "none"


def _p(p: float, num_labels: int) -> str:
    return "" if num_labels < 2 else f"{p:.3f}"
