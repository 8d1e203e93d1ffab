# SPDX-License-Identifier: Apache-2.0
"""The page of an atlas: sections of text, maps and tables, for one model or two.

A notebook shows the same sections: `sections([atlas])`.
Dims: R texts, K labels, E experts, N Switch layers
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from switchx.analysis import plots
from switchx.analysis.atlas import (
    LEAST_TIMES,
    NUM_PERMUTATIONS,
    Atlas,
    LayerAtlas,
    all_experts,
)
from switchx.analysis.atlas_picture import FEW_EXPERTS, picture
from switchx.analysis.drift import LayerDrift
from switchx.analysis.drops import FEW
from switchx.analysis.report import (
    TYPICAL,
    Section,
    Table,
    saturation_section,
    transition_section,
    typical_table,
    visible,
)
from switchx.analysis.routing import rows_to_shares
from switchx.moe.load_evenness import DEAD_FRACTION, dead_experts, even_shares

# Limits of what a page shows, so that it stays below 5 MiB; the tables have everything.
MOST_LABELS, MOST_EXPERTS, MOST_ROWS, MOST_MAPS = 24, 64, 2048, 32


def sections(
    atlases: Sequence[Atlas], drifts: Mapping[str, LayerDrift] | str | None = None
) -> list[Section]:
    """All sections, in the order of the page; those of two models are side by side.

    Args:
        atlases: atlases of one model, or of two.
        drifts: differences of two models' choices by layer (`analysis/drift.py`), or why there
            are none.
    """
    found = [overview(atlases), losses(atlases)]
    if drifts is not None:
        found.append(differences(drifts))
    of_one = (
        *(glance, specialization, knock_outs, coactivation, transition, vocabulary, examples),
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
    rows = []
    for atlas in atlases:
        for layer in atlas.layers:
            even_E, own = even_shares(layer.load_E), layer.specialization
            by_chance = f"({layer.vocabulary_by_chance:.0%} by chance)"
            rows.append(
                {
                    "model": atlas.name,
                    "layer": layer.layer,
                    "tokens": f"{layer.num_tokens:,}",
                    "effective experts": layer.effective_experts,
                    "busiest": float(even_E.max()),
                    "idlest": float(even_E.min()),
                    "dead": some(np.flatnonzero(dead_experts(layer.load_E))),
                    "dropped choices": f"{layer.dropped:.1%}",
                    "probability": layer.probability,
                    "margin": layer.margin,
                    "label information": f"{own.mutual / (own.labels or 1):.1%}",
                    "p": _p(own.p, atlas),
                    "vocabulary": f"{layer.vocabulary:.0%} {by_chance}",
                }
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
        tables=[Table.of(rows)],
    )


def losses(atlases: Sequence[Atlas]) -> Section:
    """The labels: how much text each has, and its loss."""
    labels = atlases[0].labels
    rows = [
        {"label": label, "texts": int(labels.texts_K[k])}
        | {f"loss of {atlas.name}": float(atlas.loss_K[k]) for atlas in atlases}
        for k, label in enumerate(labels.names)
    ]
    how = "; ".join(dict.fromkeys(atlas.how for atlas in atlases))
    few = [row["label"] for row in rows if row["texts"] < 5]
    warning = ""
    if len(rows) == 1:
        warning = " There is one label: nothing can be said of specialization in labels."
    elif few:
        warning = (
            f" Of {some(few)} there are fewer than 5 texts: permuted labels tell little; give "
            "shorter texts."
        )
    text = f"Loss is in nats a target token: {how}.{warning}"
    return Section("Labels", text, tables=[Table.of(rows)])


def differences(drifts: Mapping[str, LayerDrift] | str) -> Section:
    """The section on choices that differ between two models."""
    title = "Choices that differ"
    if isinstance(drifts, str):
        return Section(title, f"Choices cannot be compared token by token: {drifts}.")
    rows = [
        {
            "layer": layer,
            "other set": f"{each.differing_share:.2%}",
            "overlap": f"{each.overlap:.2%}",
        }
        for layer, each in drifts.items()
    ]
    return Section(
        title,
        "As `switchx drift` counts them, start tokens too: the share of tokens whose set of "
        "experts is another in the second model, and the mean share of the first's experts "
        "that it chose, too. "
        "Experts are compared by number: of two trainings both say nothing.",
        tables=[Table.of(rows)],
    )


def glance(atlas: Atlas) -> Section:
    """The section with the picture: drops by capacity factor, and knock-outs by label."""
    drops, tables = atlas.drops, []
    if isinstance(drops, str):
        text = f"There are no drops to predict: {drops}."
    else:
        rows = [
            {"factor": f"{factor:g}"}
            | {
                layer: f"{each.predicted_share:.2%} {each.measured_share:.2%} {each.differing}"
                for layer, each in errors.items()
            }
            for factor, errors in drops.errors.items()
        ]
        tables = [Table.of(rows, title="Predicted, measured, choices dropped in one alone")]
        text = (
            "Lines: choices that find no slot, predicted from one record. Dots: the model run "
            "at that factor. The first Switch layer's are exact; later layers read what drops "
            f"before them left. Shaded: slots saved where {FEW:.0%} may be dropped."
        )
    if atlas.knock_outs is not None:
        text += f" Beside it the {FEW_EXPERTS} removals that change a label's loss most."
    return Section("At a glance", text, [picture(atlas)], tables)


def specialization(atlas: Atlas) -> Section:
    """The section on the experts that tokens of each label choose."""
    shown, mapped = shown_labels(atlas), _mapped(atlas)
    shares, names = [], []
    for layer in mapped:
        own = layer.specialization
        shares.append(np.c_[own.share_EK[:, shown], layer.load_E / layer.num_tokens])
        labels = [f"{atlas.labels.names[k]} ({own.tokens_K[k]:,})" for k in shown]
        names.append([*labels, f"all ({layer.num_tokens:,})"])
    is_cut = len(atlas.labels.names) > MOST_LABELS
    cut = f" The {MOST_LABELS} labels of most tokens." * is_cut
    even = atlas.layers[0].even_share
    return Section(
        "Experts by label",
        "N(e, label) / N(label): of a label's tokens (how many there are stands behind it), "
        f"the percentage that choose each expert; an even share is {even:.1%}. The last column "
        f"is of all tokens.{cut}{_maps_cut(atlas)}",
        [plots.class_figure(shares, names, [each.layer for each in mapped])],
    )


def knock_outs(atlas: Atlas) -> Section:
    """The section on the loss without single experts."""
    title, removed = "Without single experts", atlas.knock_outs
    if removed is None:
        return Section(title, "No expert was removed (--knockouts).")
    shown = shown_labels(atlas)
    weight_K = removed.tokens_K / removed.tokens_K.sum()
    changes = {}
    for (name, e), change_K in zip(removed.experts, removed.change_XK, strict=True):
        if name not in changes:
            nothing = np.full((atlas.layers[0].num_experts, len(shown) + 1), np.nan)
            changes[name] = nothing
        changes[name][e] = [*change_K[shown], change_K @ weight_K]
    names = [each.layer for each in _mapped(atlas) if each.layer in changes]
    num_all = len(all_experts(atlas.layers))
    drawn = (
        " Grey experts were not removed: those that take most more of a label's tokens than of "
        "the others' were, and drawn ones." * (len(removed.experts) < num_all)
    )
    return Section(
        title,
        "The change of loss, in nats a target token, when one expert is removed: its logit is "
        "masked, and its tokens choose among the others, whose probabilities add up to 1. "
        f"{len(removed.experts)} of {num_all} experts, each alone, on "
        f"{int(removed.texts_K.sum()):,} texts.{drawn} White: no change, or a lower loss "
        "without it. The table has each label's specialist: the removal that hurts it most "
        "more than the others, found on half of the texts; its changes on the other half, "
        f"intervals of resampled texts, and p: the share of {NUM_PERMUTATIONS} permutations of "
        "the labels for which the label's change exceeds the others' by as much."
        f"{_maps_cut(atlas)}",
        [
            plots.knock_out_figure(
                [changes[name] for name in names],
                [*(atlas.labels.names[k] for k in shown), "all"],
                names,
            )
        ],
        [_specialists(atlas)],
    )


def _specialists(atlas: Atlas) -> Table:
    removed, tested, rows = atlas.knock_outs, atlas.knock_outs.held_out, []
    layers = {layer.layer: layer for layer in atlas.layers}
    for k, x in enumerate(removed.specialist_K):
        name, e = removed.experts[x]
        tokens_K = np.where(np.arange(len(tested.tokens_K)) == k, 0, tested.tokens_K)
        change_K = np.where(tokens_K > 0, tested.change_XK[x], 0.0)
        others = change_K @ tokens_K / max(tokens_K.sum(), 1)
        low, high = (_change(ends_XK[x, k]) for ends_XK in (tested.low_XK, tested.high_XK))
        rows.append(
            {
                "label": atlas.labels.names[k],
                "layer": name,
                "expert": e,
                "of its tokens": f"{layers[name].specialization.share_EK[e, k]:.1%}",
                "of all tokens": f"{layers[name].load_E[e] / layers[name].num_tokens:.1%}",
                "change of its loss": _change(tested.change_XK[x, k]),
                "95% interval": f"{low} to {high}" if low else "",
                "of the others'": f"{others:+.4f}",
                "p": _p(tested.p_XK[x, k], atlas),
            }
        )
    return Table.of(rows)


def _change(value: float) -> str:
    """A change of a loss; empty if too few texts are held out."""
    return "" if math.isnan(value) else f"{value:+.4f}"


def coactivation(atlas: Atlas) -> Section:
    """The section on experts that are chosen together."""
    title, first = "Chosen together", atlas.layers[0]
    if first.num_choices == 1:
        return Section(title, "A token chooses one expert: no two are chosen together.")
    shares = [each.coactivation_EE for each in _mapped(atlas)]
    pairs = [(each.layer, each.layer) for each in _mapped(atlas)]
    return Section(
        title,
        "N(i and j) / N(i): of the tokens that chose the row's expert, the percentage that "
        "chose the column's, too (OLMoE, arXiv:2409.02060). "
        f"By chance {first.together_by_chance:.1%}.{_maps_cut(atlas)}",
        [plots.transition_figure(shares, pairs)],
    )


def transition(atlas: Atlas) -> Section:
    """The section on tokens' transitions from an expert to one of the next Switch layer."""
    layers = [each for each in _mapped(atlas) if each.arrivals_EE is not None]
    shares = [rows_to_shares(each.arrivals_EE) for each in layers]
    pairs = [(each.previous, each.layer) for each in layers]
    return transition_section(shares, pairs, _maps_cut(atlas))


def vocabulary(atlas: Atlas) -> Section:
    """The section on the token ids that tell most about each expert."""
    tables = []
    for layer in atlas.layers:
        typical = {e: layer.typical[e] for e in shown_experts(atlas, layer)}
        tables.append(typical_table(layer.layer, typical, layer.load_E, atlas.piece_of))
    return Section("Vocabulary", f"{TYPICAL}{_cut(atlas)}", tables=tables)


def examples(atlas: Atlas) -> Section:
    """The section on example tokens with their neighbours."""
    tables = []
    for layer in atlas.layers:
        rows = [
            {
                "expert": e,
                "label": atlas.label_of(each.text),
                "before": visible(atlas.text_of(each.before)),
                "token": visible(atlas.piece_of(each.token)),
                "after": visible(atlas.text_of(each.after)),
                "gate": each.gate,
            }
            for e in shown_experts(atlas, layer)
            for each in layer.examples[e]
        ]
        tables.append(Table.of(rows, title=layer.layer, codes=("token",)))
    return Section(
        "Examples",
        "The tokens that an expert took with its largest gates, one of each token id, with "
        f"their neighbours.{_cut(atlas)}",
        tables=tables,
    )


def saturation(atlas: Atlas) -> Section:
    """The section on how early the final routing is reached."""
    return saturation_section(atlas.snapshots, " Of these texts it says nothing.")


def shown_labels(atlas: Atlas) -> np.ndarray:
    """The labels that maps show: those with most tokens, in their order."""
    tokens_K = atlas.layers[0].specialization.tokens_K
    return np.sort(np.argsort(-tokens_K, kind="stable")[:MOST_LABELS])


def shown_experts(atlas: Atlas, layer: LayerAtlas) -> list[int]:
    """The experts that tables of the page show: the busiest, in their order."""
    most = min(MOST_EXPERTS, max(MOST_ROWS // len(atlas.layers), 4))
    return sorted(np.argsort(-layer.load_E, kind="stable")[:most].tolist())


def _mapped(atlas: Atlas) -> list[LayerAtlas]:
    """The layers that maps show: all, or evenly spaced ones."""
    last = len(atlas.layers) - 1
    shown = np.linspace(0, last, min(last + 1, MOST_MAPS)).round().astype(int)
    return [atlas.layers[i] for i in shown]


def _maps_cut(atlas: Atlas) -> str:
    if len(atlas.layers) <= MOST_MAPS:
        return ""
    return f" Maps of {MOST_MAPS} of {len(atlas.layers)} layers; tables/ has all."


def _cut(atlas: Atlas) -> str:
    """A note where not all experts are shown."""
    layer = atlas.layers[0]
    shown = len(shown_experts(atlas, layer))
    if shown >= layer.num_experts:
        return ""
    return f" The {shown} busiest of {layer.num_experts}; tables/ has all."


def some(items: Sequence, most: int = 8) -> str:
    """The first items, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more or "none"


def _p(p: float, atlas: Atlas) -> str:
    return "" if len(atlas.labels.names) < 2 else f"{p:.3f}"
