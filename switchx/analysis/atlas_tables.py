# SPDX-License-Identifier: Apache-2.0
"""The tables of an atlas: a folder of Parquet files, a row a layer, expert, label or token.

Every table begins with the column `model`, so that those of several models can be joined.
Dims: K labels, E experts, X removed experts, V token ids
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from switchx.analysis.atlas import LEAST_TIMES, Labels, LayerAtlas
from switchx.analysis.atlas_page import Atlas
from switchx.moe.balance import dead_experts, even_shares


class TableFolder:
    """The Parquet files of a model, `FOLDER/MODEL/NAME.parquet`, to which rows are added.

    with TableFolder(folder, "mine") as tables:
        tables.add("experts", {"layer": ..., "expert": ...})
    """

    def __init__(self, folder: pathlib.Path, model: str):
        self._folder, self._model, self._writers = folder / model, model, {}
        self._folder.mkdir(parents=True)

    def __enter__(self) -> "TableFolder":
        return self

    def __exit__(self, *exception) -> None:
        for writer in self._writers.values():
            writer.close()

    def add(self, name: str, columns: Mapping[str, Any]) -> None:
        """Adds rows to a table; single values are those of all rows."""
        import pyarrow
        import pyarrow.parquet

        lengths = [len(column) for column in columns.values() if not _is_single(column)]
        if not lengths or not lengths[0]:
            return
        arrays = {
            key: pyarrow.repeat(column, lengths[0]) if _is_single(column) else column
            for key, column in ({"model": self._model} | dict(columns)).items()
        }
        table = pyarrow.table(arrays)
        if name not in self._writers:
            path = self._folder / f"{name}.parquet"
            writer = pyarrow.parquet.ParquetWriter(path, table.schema, compression="zstd")
            self._writers[name] = writer
        self._writers[name].write_table(table)


def _is_single(column: Any) -> bool:
    return isinstance(column, str | int | float)


def layer_tables(
    tables: TableFolder, layer: LayerAtlas, labels: Labels, piece: Callable[[int], str]
) -> None:
    """Adds what was counted of a layer.

    Args:
        piece: gives the text of a token id.
    """
    name, experts, own = layer.layer, np.arange(layer.num_experts), layer.specialization
    tables.add(
        "experts",
        {
            "layer": name,
            "expert": experts,
            "choices": layer.load_E,
            "even_shares": even_shares(layer.load_E),
            "is_dead": dead_experts(layer.load_E),
        },
    )
    expert_X, label_X = (each.reshape(-1) for each in np.indices(own.count_EK.shape))
    tables.add(
        "labels",
        {
            "layer": name,
            "expert": expert_X,
            "label": [labels.names[k] for k in label_X],
            "choices": own.count_EK.reshape(-1),
            "share": own.share_EK.reshape(-1),
            "even_share": layer.even_share,
            "p": own.p_EK.reshape(-1),
        },
    )
    here, there = np.nonzero(layer.together_EE)
    is_pair = here != there
    tables.add(
        "coactivation",
        {
            "layer": name,
            "expert": here[is_pair],
            "other": there[is_pair],
            "tokens": layer.together_EE[here, there][is_pair],
            "share": layer.coactivation_EE[here, there][is_pair],
        },
    )
    if layer.arrivals_EE is not None:
        here, there = np.nonzero(layer.arrivals_EE)
        tables.add(
            "transitions",
            {
                "layer": layer.previous,
                "expert": here,
                "next_layer": name,
                "next_expert": there,
                "tokens": layer.arrivals_EE[here, there],
            },
        )
    counts = layer.tokens
    is_frequent = counts.times_V[counts.index_X] >= LEAST_TIMES
    index = counts.index_X[is_frequent]
    pieces = {int(v): piece(int(counts.token_V[v])) for v in np.unique(index)}
    tables.add(
        "vocabulary",
        {
            "layer": name,
            "expert": counts.expert_X[is_frequent],
            "token": counts.token_V[index],
            "text": [pieces[v] for v in index.tolist()],
            "times": counts.times_V[index],
            "choices": counts.count_X[is_frequent],
            "share": counts.share_X[is_frequent],
        },
    )


def model_tables(tables: TableFolder, atlas: Atlas) -> None:
    """Adds what is of the whole model."""
    layers, K = atlas.layers, range(len(atlas.labels))
    tables.add(
        "layers",
        {
            "layer": [each.layer for each in layers],
            "tokens": [each.num_tokens for each in layers],
            "choices_of_a_token": [each.num_choices for each in layers],
            "experts": [each.num_experts for each in layers],
            "effective_experts": [each.effective_experts for each in layers],
            "dead_experts": [int(dead_experts(each.load_E).sum()) for each in layers],
            "max_violation": [float(even_shares(each.load_E).max()) - 1 for each in layers],
            "dropped": [each.dropped for each in layers],
            "probability": [each.probability for each in layers],
            "margin": [each.margin for each in layers],
            "label_information": [each.specialization.mutual for each in layers],
            "label_information_permuted": [each.specialization.permuted for each in layers],
            "label_entropy": [each.specialization.labels for each in layers],
            "label_p": [each.specialization.p for each in layers],
            "vocabulary_specialization": [each.vocabulary for each in layers],
            "vocabulary_by_chance": [each.vocabulary_by_chance for each in layers],
        },
    )
    for layer in layers:
        found = [(e, each) for e, some in enumerate(layer.examples) for each in some]
        tables.add(
            "examples",
            {
                "layer": layer.layer,
                "expert": [e for e, _ in found],
                "label": [atlas.label_of(each.text) for _, each in found],
                "text": [each.text for _, each in found],
                "before": [atlas.text_of(each.before) for _, each in found],
                "token": [atlas.piece_of(each.token) for _, each in found],
                "after": [atlas.text_of(each.after) for _, each in found],
                "gate": [each.gate for _, each in found],
            },
        )
    removed = atlas.knock_outs
    if removed is not None:
        rows = [(x, k) for x in range(len(removed.layers)) for k in K]
        tables.add(
            "knockouts",
            {
                "layer": [removed.layers[x] for x, _ in rows],
                "expert": [removed.experts[x] for x, _ in rows],
                "label": [atlas.labels[k] for _, k in rows],
                "target_tokens": [int(removed.tokens_K[k]) for _, k in rows],
                "texts": [int(removed.texts_K[k]) for _, k in rows],
                "loss": [float(removed.loss_K[k]) for _, k in rows],
                "change": removed.change_XK.reshape(-1),
                "p": removed.p_XK.reshape(-1),
            },
        )
    if atlas.saturation is not None:
        steps, values, names = atlas.saturation
        for step, value_N in zip(steps.tolist(), values, strict=True):
            tables.add("saturation", {"step": step, "layer": list(names), "share": value_N})
