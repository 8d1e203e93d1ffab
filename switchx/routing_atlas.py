# SPDX-License-Identifier: Apache-2.0
"""The atlas of a model on labelled texts: one pass that records, knock-outs, and what follows.

    texts = read_labelled_texts(["code.txt", "prose.txt"])
    atlas = make_atlas(switchx.load("runs/mine"), texts, "folder", name="mine")

Long texts are several rows. An encoder reads a row, and the decoder gets a column of targets
where there is one; else the spans that are masked in the row, where the model was trained with
sentinels (T5's span corruption, drawn by the seed); else the row once more. A decoder-only
model reads the row alone.

Dims: R texts, K labels, B rows, X removed experts
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from switchx import api
from switchx.analysis import atlas as statistics
from switchx.analysis.atlas import KnockOuts, Labels, LayerAtlas
from switchx.analysis.atlas_page import Atlas, sections
from switchx.analysis.atlas_tables import TableFolder, layer_tables, model_tables
from switchx.analysis.report import page
from switchx.analysis.routing import comparable, read_snapshots, saturation_by_step
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.labelled_texts import LabelledTexts
from switchx.data.objectives import SpanCorruption
from switchx.fields import require
from switchx.files import write_atomically
from switchx.models.config import require_one_task
from switchx.models.knock_out import with_logit_biases, without_expert
from switchx.routing_record import RecordWriter, open_record

# Experts that are removed one by one where it is not said how many, and texts that are scored
# without them.
MOST_KNOCK_OUTS, KNOCK_OUT_TEXTS = 256, 64


@dataclasses.dataclass(frozen=True)
class TextRows:
    """Pairs that a model scores, which are parts of texts.

    Attributes:
        pairs: token ids of inputs and of targets.
        text_B: number of the text of each pair.
        how: what the stacks read, in words.
        num_too_short: texts without a row.
    """

    pairs: list[tuple[list[int], list[int]]]
    text_B: np.ndarray
    how: str
    num_too_short: int = 0


def make_atlas(
    model: api.Model,
    texts: LabelledTexts,
    folder: pathlib.Path,
    *,
    name: str,
    run_folder: str | None = None,
    knockouts: int | Literal["all", "none"] = MOST_KNOCK_OUTS,
    knockout_texts: int = KNOCK_OUT_TEXTS,
    max_tokens: int = 512,
    min_tokens: int = 100,
    batch_size: int = 32,
    dropless: bool = True,
    seed: int = 0,
    reporter=None,
) -> Atlas:
    """Records the routing of all texts and counts it; then scores without single experts.

    Writes `record_NAME.parquet` and `tables/*.parquet` into the folder.

    Args:
        name: name of the model, in tables and on the page.
        run_folder: run folder of the model, whose own samples (`routing/`) give saturation.
        knockouts: most experts that are removed, each alone: first each label's specialist,
            then others drawn by the seed; `all` removes each, `none` has none.
        knockout_texts: most texts of each label that are scored without them.
        max_tokens: largest number of a text's tokens in a row.
        min_tokens: least number of tokens that a label has.
        batch_size: largest number of rows at once.
        dropless: whether no token is dropped; else experts have the capacity of evaluation.
        seed: seed of masked spans, permutations, shuffles and draws.
        reporter: object with the methods `note`, `begin` and `counted`, or None.

    Raises:
        ValueError: the model has no Switch layers or no vocabulary, a label has too few tokens,
            or no expert can be removed.
    """
    require_readable(model, name)
    require_one_task(model.config)
    if knockouts != "none":
        with_logit_biases(model.config, model.params)  # refuses before anything is computed
    note = reporter.note if reporter is not None else lambda text: None
    rows = text_rows(model, texts, max_tokens, seed)
    labels = Labels(texts.labels, texts.label_R, rows.text_B)
    _require_tokens(rows, labels, min_tokens)
    note(f"{len(rows.pairs):,} rows: {_how(rows)}")
    path = folder / f"record_{name}.parquet"
    with RecordWriter(path, model.record_info("score", dropless)) as writer:
        scorer = model.scorer(batch_size=batch_size, dropless=dropless, record=writer)
        if reporter is not None:
            reporter.begin(0, len(rows.pairs))
        loss_B = _losses(scorer, rows.pairs, reporter)
    note(writer.summary().removeprefix(f"{folder}/"))
    record, layers = open_record(path), []
    piece = lambda token: model.vocabulary.piece(token).text  # noqa: E731
    with TableFolder(folder / "tables", name) as tables:
        for layer in statistics.read_layers(record, labels, seed):
            layer_tables(tables, layer, labels, piece)
            layers.append(layer.without_tokens())
            note(f"{layer.layer}: counted")
        removed = None
        if knockouts != "none":
            experts = _removed(layers, knockouts, seed)
            note(f"scoring without single experts, {len(experts)} of them")
            options = {"batch_size": batch_size, "dropless": dropless}
            removed = remove_experts(
                model, rows, labels, experts, knockout_texts, seed, reporter, **options
            )
        atlas = Atlas(
            name=name,
            labels=texts.labels,
            texts_K=np.bincount(texts.label_R, minlength=len(texts.labels)),
            layers=layers,
            how=_how(rows),
            loss_K=_loss_by_label(rows, labels, loss_B),
            knock_outs=removed,
            saturation=None if run_folder is None else _saturation(run_folder),
            text_of=model.vocabulary.decode,
            piece_of=piece,
            label_of=lambda text: texts.labels[texts.label_R[text]],
            record=path,
        )
        model_tables(tables, atlas)
    return atlas


def require_readable(model: api.Model, name: str) -> None:
    """Raises ValueError where a model has no Switch layers, or cannot read texts."""
    require(
        model.config.switch is not None,
        f"{name} is a dense model, which routes nothing; give one with Switch layers",
    )
    require(
        model.vocabulary is not None,
        f"{name} has no vocabulary, so it cannot read texts; convert it with its tokenizer",
    )


def text_rows(
    model: api.Model, texts: LabelledTexts, max_tokens: int, seed: int = 0
) -> TextRows:
    """What a model reads of texts, cut into rows of at most `max_tokens` of their tokens."""
    config, form, vocabulary = model.config, model.text_format, model.vocabulary
    if config.has_position_table:
        max_tokens = min(max_tokens, config.max_length - 1)  # and the end
    if not config.is_encoder_decoder:
        how = "the decoder reads the text"
        rows = (
            (r, [], part)
            for r, text in enumerate(texts.texts)
            for part in _parts(form.targets(vocabulary, text), max_tokens)
        )
    elif texts.targets is not None:
        how = "the encoder reads the text, the decoder the target"
        rows = _with_targets(form, vocabulary, texts, max_tokens)
    elif form.names_sentinels and vocabulary.num_sentinels:
        how = "the encoder reads the text with masked spans, the decoder the spans"
        rows = _corrupted(vocabulary, texts.texts, max_tokens, seed)
    else:
        how = "the encoder reads the text, and the decoder writes it once more"
        end = [vocabulary.eos_id]
        rows = (
            (r, part + end * form.inputs_end_with_eos, part + end)
            for r, text in enumerate(texts.texts)
            for part in _parts(vocabulary.encode(text), max_tokens)
        )
    text_B, pairs = [], []
    for text, inputs, targets in rows:
        text_B.append(text)
        pairs.append((inputs, targets))
    require(pairs, "no text has two tokens; give longer ones")
    num_too_short = len(texts.texts) - len(set(text_B))
    return TextRows(pairs, np.array(text_B, np.int32), how, num_too_short)


def _parts(tokens: Sequence[int], most: int) -> Iterator[list[int]]:
    """Tokens in order, in as few even parts as `most` allows."""
    number = math.ceil(len(tokens) / most)
    for part in np.array_split(np.array(tokens, np.int32), max(number, 1)):
        if len(part):
            yield part.tolist()


def _with_targets(form, vocabulary, texts: LabelledTexts, most: int):
    """Raises ValueError: a text or a target is longer than a row; neither can be cut."""
    for r, (text, target) in enumerate(zip(texts.texts, texts.targets, strict=True)):
        pair = form.inputs(vocabulary, text), form.targets(vocabulary, target)
        require(
            max(map(len, pair)) <= most,
            f"text {r + 1}, {text!r:.40}, has {len(pair[0])} tokens and its target "
            f"{len(pair[1])}; a row has {most}: raise --max_tokens, or shorten them",
        )
        yield r, *pair


def _corrupted(vocabulary, texts: Sequence[str], max_tokens: int, seed: int):
    objective = SpanCorruption()
    # Spans of 3 tokens in 15% of a row: each takes a sentinel.
    density = objective.noise_density / objective.mean_span_length
    max_tokens = min(max_tokens, int(vocabulary.num_sentinels / density))
    number = 0
    for r, text in enumerate(texts):
        for part in _parts(vocabulary.encode(text), max_tokens):
            if len(part) > 1:
                rng = np.random.default_rng((seed, number))
                row = objective.example(np.array(part, np.int32), vocabulary, None, rng)
                yield r, row.inputs.tolist(), row.targets.tolist()
            number += 1


def _how(rows: TextRows) -> str:
    if not rows.num_too_short:
        return rows.how
    return f"{rows.how}; {rows.num_too_short} texts of less than two tokens are left out"


def _require_tokens(rows: TextRows, labels: Labels, least: int) -> None:
    """Raises ValueError where labels have fewer tokens than `least`."""
    num_B = np.array([len(inputs) or len(targets) for inputs, targets in rows.pairs])
    num_K = np.bincount(
        labels.label_R[rows.text_B], weights=num_B, minlength=len(labels.names)
    ).astype(int)
    few = [
        f"{name} ({num})" for name, num in zip(labels.names, num_K, strict=True) if num < least
    ]
    require(
        not few,
        f"labels of fewer than {least} tokens: {', '.join(few[:8])}"
        f"{f' and {len(few) - 8} more' if len(few) > 8 else ''}; give more text of them, leave "
        "them out, or lower --min_tokens",
    )


def _losses(scorer, pairs, reporter=None) -> np.ndarray:
    """The negative log-likelihood of each pair's targets, in nats."""
    loss_B = np.zeros(len(pairs))
    for done, (number, score) in enumerate(scorer(pairs), 1):
        loss_B[number] = -score.log_likelihood
        if reporter is not None:
            reporter.counted(done)
    return loss_B


def _tokens_and_losses(rows: TextRows, loss_B: np.ndarray, num_texts: int):
    """Target tokens, and sums of losses, of each text."""
    tokens_B = [len(targets) for _, targets in rows.pairs]
    sums = (np.bincount(rows.text_B, x, minlength=num_texts) for x in (tokens_B, loss_B))
    return tuple(sums)


def _loss_by_label(rows: TextRows, labels: Labels, loss_B: np.ndarray) -> np.ndarray:
    tokens_R, loss_R = _tokens_and_losses(rows, loss_B, len(labels.label_R))
    value_RX = np.stack([loss_R, tokens_R], axis=1)
    sums_KX = statistics.sums_by_label(value_RX, labels.label_R, len(labels.names))
    return sums_KX[:, 0] / np.maximum(sums_KX[:, 1], 1)


def _removed(
    layers: Sequence[LayerAtlas], most: int | Literal["all"], seed: int
) -> list[tuple[str, int]]:
    """Layer and expert of each removal: all, or the labels' specialists and drawn ones."""
    every = [(layer.layer, e) for layer in layers for e in range(layer.num_experts)]
    if most == "all" or most >= len(every):
        return every
    first = list(dict.fromkeys(statistics.specialists(layers)))[:most]
    others = [each for each in every if each not in set(first)]
    drawn = np.random.default_rng(seed).permutation(len(others))[: most - len(first)]
    chosen = {*first, *(others[i] for i in drawn)}
    return [each for each in every if each in chosen]


def remove_experts(
    model: api.Model,
    rows: TextRows,
    labels: Labels,
    experts: Sequence[tuple[str, int]],
    most_texts: int,
    seed: int = 0,
    reporter=None,
    **options,
) -> KnockOuts:
    """Scores texts with each of some experts removed alone, by one program a shape of batch.

    Args:
        experts: layer and number of each expert.
        most_texts: largest number of texts of each label, drawn by the seed.
        options: those of `Model.scorer`.
    """
    num_texts = len(labels.label_R)
    drawn = np.random.default_rng(seed).permutation(num_texts)
    is_drawn_R = np.zeros(num_texts, bool)
    for k in range(len(labels.names)):
        is_drawn_R[drawn[labels.label_R[drawn] == k][:most_texts]] = True
    kept = np.flatnonzero(is_drawn_R[rows.text_B])
    rows = TextRows([rows.pairs[i] for i in kept], rows.text_B[kept], rows.how)
    config, params = with_logit_biases(model.config, model.params)
    model = dataclasses.replace(model, config=config, params=params)

    def losses(params: dict) -> np.ndarray:
        scorer = dataclasses.replace(model, params=params).scorer(**options)
        loss_B = _losses(scorer, rows.pairs)
        return _tokens_and_losses(rows, loss_B, num_texts)[1]

    loss_R, loss_XR = losses(params), []
    if reporter is not None:
        reporter.begin(0, len(experts))
    for layer, expert in experts:
        loss_XR.append(losses(without_expert(config, params, layer, expert)))
        if reporter is not None:
            reporter.counted(len(loss_XR))
    tokens_R, _ = _tokens_and_losses(rows, np.zeros(len(rows.pairs)), num_texts)
    return statistics.knock_outs(
        experts,
        loss_R,
        np.reshape(loss_XR, (-1, num_texts)),
        tokens_R,
        labels,
        num_all=config.switch.num_experts * len(config.sparse_layer_names),
        seed=seed,
    )


def _saturation(run_folder: str):
    """Steps and saturation by step and layer, of a run's own samples; None without two."""
    folder = RunFolder(run_folder).routing
    if not any(folder.glob("step_*")):
        return None
    snapshots = comparable(read_snapshots(folder))
    if len(snapshots) < 2:
        return None
    steps = np.array([each.step for each in snapshots])
    return steps, saturation_by_step(snapshots), snapshots[-1].layers


def write_page(path: pathlib.Path, atlases: Sequence[Atlas]) -> dict:
    """Writes the HTML page of one model, or of two; returns the numbers that sum it up."""
    flips = None
    if len(atlases) > 1:
        flips = statistics.flips(*(open_record(atlas.record) for atlas in atlases))
    names = " and ".join(atlas.name for atlas in atlases)
    first = atlases[0]
    facts = {
        "model": names,
        "Switch layers": f"{len(first.layers)} of {first.layers[0].num_experts} experts",
        "texts": f"{int(first.texts_K.sum()):,} of {len(first.labels)} labels",
    }
    text = page(f"Atlas of {names}", facts, sections(atlases, flips))
    write_atomically(path, text.encode())
    return {"models": [_summary(atlas) for atlas in atlases]}


def _summary(atlas: Atlas) -> dict:
    """The loss of each label, and what its specialist's removal does."""
    found = []
    for k, (layer, expert) in enumerate(statistics.specialists(atlas.layers)):
        each = {"label": atlas.labels[k], "loss": float(atlas.loss_K[k])}
        x = None if atlas.knock_outs is None else atlas.knock_outs.row(layer, expert)
        if x is not None:
            each |= {
                "layer": layer,
                "expert": expert,
                "change": float(atlas.knock_outs.change_XK[x, k]),
                "p": float(atlas.knock_outs.p_XK[x, k]),
            }
        found.append(each)
    return {"name": atlas.name, "labels": found}
