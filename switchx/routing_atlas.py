# SPDX-License-Identifier: Apache-2.0
"""The atlas of a model on labelled texts: a recorded pass, capacities, and knock-outs.

    texts = read_labelled_texts(["code.txt", "prose.txt"])
    atlas = make_atlas(switchx.load("runs/mine"), texts, "folder", name="mine")

Long texts are cut into several rows. An encoder reads a row, and the decoder gets the target
column if there is one; otherwise the spans masked in the row, if the model was trained with
sentinels (T5's span corruption, drawn by the seed); otherwise the row again. A decoder-only
model reads only the row.

Dims: R texts, K labels, B rows, X removed experts
"""

import collections
import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from switchx import api
from switchx.analysis import atlas as statistics
from switchx.analysis.atlas import Atlas, KnockOuts, Labels, LayerAtlas
from switchx.analysis.atlas_page import sections, some
from switchx.analysis.atlas_picture import picture
from switchx.analysis.atlas_tables import TableFolder, layer_tables, model_tables
from switchx.analysis.drift import LayerDrift, drift
from switchx.analysis.drops import Drops, DropsByFactor, prediction_errors
from switchx.analysis.plots import write_svg
from switchx.analysis.report import page
from switchx.analysis.routing import Snapshot, comparable, read_snapshots
from switchx.analysis.slots import setting_of
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.labelled_texts import LabelledTexts
from switchx.data.objectives import SpanCorruption
from switchx.fields import require
from switchx.files import write_atomically
from switchx.models.config import require_one_task
from switchx.models.knock_out import with_logit_biases, without_each
from switchx.progress import SilentReporter
from switchx.routing_record import RecordWriter, RoutingRecord, open_record

# Default number of experts that are removed one by one, and of texts that are scored without
# them.
MOST_KNOCK_OUTS, KNOCK_OUT_TEXTS = 256, 64


@dataclasses.dataclass(frozen=True)
class TextRows:
    """Pairs of token sequences, cut from texts, that a model scores.

    Attributes:
        pairs: token ids of inputs and of targets.
        text_B: number of the text of each pair.
        how: description of what the stacks read and what is left out.
    """

    pairs: list[tuple[list[int], list[int]]]
    text_B: np.ndarray
    how: str


def make_atlas(
    model: api.Model,
    texts: LabelledTexts,
    folder: pathlib.Path,
    *,
    name: str,
    run_folder: str | None = None,
    knockouts: int = MOST_KNOCK_OUTS,
    knockout_texts: int = KNOCK_OUT_TEXTS,
    max_tokens: int = 512,
    min_tokens: int = 100,
    batch_size: int = 32,
    dropless: bool = True,
    factors: Sequence[float] = (0.5, 1.0, 1.5, 2.0),
    seed: int = 0,
    reporter=None,
) -> Atlas:
    """Records and counts the routing of all texts; then scores them at other capacities and
    without single experts.

    Writes `record_NAME.parquet` and `tables/NAME/*.parquet` into the folder.

    Args:
        name: name of the model, in tables and on the page.
        run_folder: run folder of the model, whose own samples (`routing/`) give saturation.
        knockouts: most experts to remove, one at a time: first those whose share of a label's
            tokens most exceeds that of the other labels', then random ones; 0 removes none.
        knockout_texts: largest number of texts per label that are scored without them.
        max_tokens: largest number of a text's tokens in a row.
        min_tokens: least number of tokens that a label must have.
        batch_size: largest number of rows at once.
        dropless: whether no token is dropped; otherwise experts have their evaluation capacity.
        factors: capacity factors at which drops are measured, each by a pass over the texts.
        seed: seed of masked spans, permutations, shuffles, resamples and draws.
        reporter: a `Reporter` of `switchx/progress.py`, or None.

    Raises:
        ValueError: the model has no Switch layers or no vocabulary, a factor is invalid, a
            label has too few tokens, or no expert can be removed.
    """
    require_readable(model, name)
    factors = tuple(map(float, factors))
    require(
        all(0 < each < math.inf for each in factors),
        f"factors={factors}: capacity factors are finite and above 0; leave the others out",
    )
    if knockouts:
        with_logit_biases(model.config, model.params)  # refuses before anything is computed
    reporter = reporter or SilentReporter(0)
    rows = text_rows(model, texts, max_tokens, seed)
    labels = Labels(texts.labels, texts.label_R, rows.text_B)
    _require_tokens(rows, labels, min_tokens)
    reporter.note(f"{len(rows.pairs):,} rows: {rows.how}")
    path = folder / f"record_{name}.parquet"
    options = {"batch_size": batch_size, "dropless": dropless}
    with RecordWriter(path, model.record_info("score", dropless)) as writer:
        loss_B, tokens_B = np.zeros((2, len(rows.pairs)))
        reporter.begin(0, len(loss_B))
        scored = model.scorer(**options, record=writer)(rows.pairs)
        for done, (b, score) in enumerate(scored, 1):
            loss_B[b], tokens_B[b] = -score.log_likelihood, score.num_tokens
            reporter.counted(done)
    reporter.note(writer.summary().removeprefix(f"{folder}/"))
    record = open_record(path)
    layers = []
    removed = None
    piece = lambda token: model.vocabulary.piece(token).text  # noqa: E731
    with TableFolder(folder / "tables", name) as tables:
        for layer in statistics.read_layers(record, labels, seed, model.ids.start_id):
            layer_tables(tables, layer, labels, piece)
            layers.append(layer.without_tokens())
            reporter.note(f"{layer.layer}: counted")
        reporter.note(f"measuring drops at {', '.join(f'{each:g}' for each in factors)}")
        dropped = drops_by_factor(model, rows, record, factors, batch_size)
        if knockouts:
            experts = _removed(layers, knockouts, seed)
            reporter.note(f"scoring without single experts, {len(experts)} of them")
            removed = remove_experts(
                model, rows, labels, experts, knockout_texts, seed, reporter, **options
            )
        loss_K, tokens_K = (
            labels.by_label(labels.by_text(value_B)) for value_B in (loss_B, tokens_B)
        )
        atlas = Atlas(
            name=name,
            labels=labels,
            layers=layers,
            how=rows.how,
            loss_K=loss_K / np.maximum(tokens_K, 1),
            drops=dropped,
            knock_outs=removed,
            snapshots=[] if run_folder is None else _snapshots(run_folder),
            text_of=model.vocabulary.decode,
            piece_of=piece,
            record=path,
        )
        model_tables(tables, atlas)
    return atlas


def require_readable(model: api.Model, name: str) -> None:
    """Raises ValueError if a model has no Switch layers or cannot read texts."""
    require(
        model.config.switch is not None,
        f"{name} is a dense model, which routes nothing; give one with Switch layers",
    )
    require(
        model.vocabulary is not None,
        f"{name} has no vocabulary, so it cannot read texts; convert it with its tokenizer",
    )
    require_one_task(model.config)


def text_rows(
    model: api.Model, texts: LabelledTexts, max_tokens: int, seed: int = 0
) -> TextRows:
    """What a model reads of texts, cut into rows of at most `max_tokens` of their tokens."""
    config, form, vocabulary = model.config, model.text_format, model.vocabulary
    if config.has_length_limit:
        max_tokens = min(max_tokens, config.max_length - 1)  # leaves room for the end token
    if not config.is_encoder_decoder:
        how = "the decoder reads the text"
        parts = _parts(texts, lambda text: form.targets(vocabulary, text), max_tokens)
        # Without a start token, a single token leaves nothing to predict.
        least = 2 if model.ids.start_id is None else 1
        rows = [(r, [], part) for r, part in parts if len(part) >= least]
    elif texts.targets is not None:
        how = "the encoder reads the text, the decoder the target"
        rows = list(_with_targets(form, vocabulary, texts, max_tokens))
    elif form.names_sentinels and vocabulary.num_sentinels:
        how = "the encoder reads the text with masked spans, the decoder the spans"
        rows = list(_corrupted(vocabulary, texts, max_tokens, seed))
    else:
        how = "the encoder reads the text, and the decoder writes it once more"
        end = [vocabulary.eos_id]
        rows = [
            (r, part + end * form.inputs_end_with_eos, part + end)
            for r, part in _parts(texts, vocabulary.encode, max_tokens)
        ]
    require(rows, "no text has two tokens; give longer ones")
    text_B = np.array([r for r, *_ in rows], np.int32)
    if num_too_short := len(texts.texts) - len(np.unique(text_B)):
        how += f"; {num_too_short} texts of less than two tokens are left out"
    return TextRows([(inputs, targets) for _, inputs, targets in rows], text_B, how)


def _parts(
    texts: LabelledTexts, encode: Callable[[str], Sequence[int]], most: int
) -> Iterator[tuple[int, list[int]]]:
    """Each text's number with each part of its tokens: as few even parts as `most` allows."""
    for r, text in enumerate(texts.texts):
        if tokens := encode(text):
            for part in np.array_split(np.array(tokens, np.int32), -(-len(tokens) // most)):
                yield r, part.tolist()


def _with_targets(form, vocabulary, texts: LabelledTexts, most: int):
    """Raises ValueError if a text or target is longer than a row; neither can be cut."""
    for r, (text, target) in enumerate(zip(texts.texts, texts.targets, strict=True)):
        pair = form.inputs(vocabulary, text), form.targets(vocabulary, target)
        require(
            max(map(len, pair)) <= most,
            f"text {r + 1}, {text!r:.40}, has {len(pair[0])} tokens and its target "
            f"{len(pair[1])}; a row has {most}: raise --max_tokens, or shorten them",
        )
        yield r, *pair


def _corrupted(vocabulary, texts: LabelledTexts, max_tokens: int, seed: int):
    objective = SpanCorruption()
    # Spans of 3 tokens in 15% of a row: each takes a sentinel.
    density = objective.noise_density / objective.mean_span_length
    max_tokens = min(max_tokens, int(vocabulary.num_sentinels / density))
    for number, (r, part) in enumerate(_parts(texts, vocabulary.encode, max_tokens)):
        if len(part) > 1:
            rng = np.random.default_rng((seed, number))
            row = objective.example(np.array(part, np.int32), vocabulary, None, rng)
            yield r, row.inputs.tolist(), row.targets.tolist()


def _require_tokens(rows: TextRows, labels: Labels, least: int) -> None:
    """Raises ValueError if any labels have fewer than `least` tokens."""
    num_K = labels.by_label(
        labels.by_text([len(inputs or targets) for inputs, targets in rows.pairs])
    )
    few = [
        f"{name} ({num:.0f})"
        for name, num in zip(labels.names, num_K, strict=True)
        if num < least
    ]
    require(
        not few,
        f"labels of fewer than {least} tokens: {some(few)}; give more text of them, leave them "
        "out, or lower --min_tokens",
    )


def _removed(layers: Sequence[LayerAtlas], most: int, seed: int) -> list[tuple[str, int]]:
    """Layer and expert of each removal: those that most prefer a label, then random ones."""
    every = statistics.all_experts(layers)
    first = list(dict.fromkeys(statistics.largest_takers(layers)))[:most]
    others = [each for each in every if each not in first]
    drawn = np.random.default_rng(seed).permutation(len(others))[: most - len(first)]
    chosen = {*first, *(others[i] for i in drawn)}
    return [each for each in every if each in chosen]


def drops_by_factor(
    model: api.Model,
    rows: TextRows,
    record: RoutingRecord,
    factors: Sequence[float],
    batch_size: int,
) -> DropsByFactor | str:
    """Predicts drops from a record of the rows and measures some, or says why it cannot."""
    config = model.config
    switch = model.config.switch
    router = model.config.switch.router
    if router.overflow == "dropless":  # what a capacity would drop
        router = dataclasses.replace(router, overflow="drop")
    switch = dataclasses.replace(switch, router=router, expert_capacity=None)
    has_factor = (
        not config.switch.expert_capacity and config.switch.router.overflow != "dropless"
    )
    own = switch.eval_capacity_factor if has_factor else None
    try:
        setting = dataclasses.replace(setting_of(record.info), switch=switch)
        drops, errors = Drops(record, setting), {}
    except ValueError as error:
        return str(error)
    for factor in factors:
        at = dataclasses.replace(switch, eval_capacity_factor=factor)
        limited = dataclasses.replace(model, config=dataclasses.replace(config, switch=at))
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "record.parquet"
            with RecordWriter(path, limited.record_info("score", False)) as writer:
                scorer = limited.scorer(batch_size=batch_size, dropless=False, record=writer)
                collections.deque(scorer(rows.pairs), maxlen=0)
            errors[factor] = prediction_errors(record, open_record(path))
    slot_bytes = config.d_model * jnp.dtype(config.precision.compute).itemsize
    return DropsByFactor.of(drops, errors, own, slot_bytes)


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
    """Scores texts with each given expert removed alone; compiles one program per batch shape.

    Args:
        experts: layer and number of each expert.
        most_texts: largest number of texts per label, drawn by the seed.
        options: options of `Model.scorer`.
    """
    drawn = np.random.default_rng(seed).permutation(len(labels.label_R))
    is_drawn_R = np.zeros(len(drawn), bool)
    drawn = drawn[np.isin(drawn, labels.text_B)]  # some texts have no rows
    for k in range(len(labels.names)):
        is_drawn_R[drawn[labels.label_R[drawn] == k][:most_texts]] = True
    kept = np.flatnonzero(is_drawn_R[labels.text_B])
    pairs = [rows.pairs[b] for b in kept]
    tokens_B = np.zeros(len(rows.pairs))
    reporter, loss_XR = reporter or SilentReporter(0), []
    reporter.begin(0, len(experts) + 1)
    for each in without_each(model, experts):
        loss_B = np.zeros(len(rows.pairs))
        for i, score in each.scorer(**options)(pairs):
            loss_B[kept[i]] = -score.log_likelihood
            tokens_B[kept[i]] = score.num_tokens
        loss_XR.append(labels.by_text(loss_B))
        reporter.counted(len(loss_XR))
    loss_R, *loss_XR = loss_XR
    return statistics.knock_outs(
        experts, loss_R, np.array(loss_XR), labels.by_text(tokens_B), labels, seed
    )


def _snapshots(run_folder: str) -> list[Snapshot]:
    """A run's own samples of the same tokens, by step."""
    folder = RunFolder(run_folder).routing
    if not any(folder.glob("step_*")):
        return []
    return comparable(read_snapshots(folder))


def write_page(path: pathlib.Path, atlases: Sequence[Atlas]) -> dict:
    """Writes the page of one or two models and, beside it, picture.svg of the first one.

    Returns:
        The numbers that summarize it.
    """
    names = " and ".join(atlas.name for atlas in atlases)
    first = atlases[0]
    facts = {
        "model": names,
        "Switch layers": f"{len(first.layers)} of {first.layers[0].num_experts} experts",
        "texts": f"{len(first.labels.label_R):,} of {len(first.labels.names)} labels",
    }
    drifts = _drifts(*atlases) if len(atlases) > 1 else None
    text = page(f"Atlas of {names}", facts, sections(atlases, drifts))
    write_atomically(path, text.encode())
    write_svg(picture(first), path.with_name("picture.svg"))
    return {"models": [_summary(atlas) for atlas in atlases]}


def _drifts(one: Atlas, other: Atlas) -> dict[str, LayerDrift] | str:
    """The differences between two models' choices by layer, or why there are none."""
    try:
        return drift(open_record(one.record), open_record(other.record))
    except ValueError as error:
        return str(error).replace(f"{one.record.parent}/", "")


def _summary(atlas: Atlas) -> dict:
    """The loss of each label, and what removing its specialist does to held-out texts."""
    found, removed = [], atlas.knock_outs
    for k, label in enumerate(atlas.labels.names):
        each = {"label": label, "loss": float(atlas.loss_K[k])}
        if removed is not None:
            x, tested = removed.specialist_K[k], removed.held_out
            each |= zip(("layer", "expert"), removed.experts[x], strict=True)
            each |= {
                "change": float(tested.change_XK[x, k]),
                "interval": [float(tested.low_XK[x, k]), float(tested.high_XK[x, k])],
                "p": float(tested.p_XK[x, k]),
            }
        found.append(each)
    return {"name": atlas.name, "labels": found}
