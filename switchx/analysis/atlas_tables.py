# SPDX-License-Identifier: Apache-2.0
"""The tables of an atlas: Parquet files in a folder, one row per layer, expert, label or token.

Every table begins with the column `model`, so that those of several models can be joined.
Dims: K labels, E experts, X removed experts, V token ids
"""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from switchx.analysis.atlas import LEAST_TIMES, Atlas, Labels, LayerAtlas
from switchx.analysis.routing import saturation_by_step
from switchx.moe.load_evenness import dead_experts, even_shares


class TableFolder(contextlib.ExitStack):
    """The Parquet files of a model, `FOLDER/MODEL/NAME.parquet`, to which rows are added.

    with TableFolder(folder, "mine") as tables:
        tables.add("experts", layer="encoder 1", expert=[0, 1], choices=[8, 2])
    """

    def __init__(self, folder: pathlib.Path, model: str):
        super().__init__()
        self._folder = folder / model
        self._model = model
        self._writers = {}
        self._folder.mkdir(parents=True)

    def add(self, name: str, **columns: Any) -> None:
        """Adds rows to a table; a single text or number applies to all rows."""
        import pyarrow
        import pyarrow.parquet

        columns = {"model": self._model} | columns
        (length,) = {len(each) for each in columns.values() if not np.isscalar(each)}
        if not length:
            return
        arrays = {
            key: pyarrow.repeat(each, length) if np.isscalar(each) else each
            for key, each in columns.items()
        }
        table = pyarrow.table(arrays)
        if name not in self._writers:
            path = self._folder / f"{name}.parquet"
            writer = pyarrow.parquet.ParquetWriter(path, table.schema, compression="zstd")
            self._writers[name] = self.enter_context(writer)
        self._writers[name].write_table(table)


def layer_tables(
    tables: TableFolder, layer: LayerAtlas, labels: Labels, piece: Callable[[int], str]
) -> None:
    """Adds what was counted for a layer.

    Args:
        piece: function that returns the text of a token id.
    """
    name, own = layer.layer, layer.specialization
    tables.add(
        "experts",
        layer=name,
        expert=np.arange(layer.num_experts),
        choices=layer.load_E,
        even_shares=even_shares(layer.load_E),
        is_dead=dead_experts(layer.load_E),
    )
    tables.add(
        "labels",
        layer=name,
        expert=np.repeat(np.arange(layer.num_experts), len(labels.names)),
        label=list(labels.names) * layer.num_experts,
        choices=own.count_EK.reshape(-1),
        share=own.share_EK.reshape(-1),
        even_share=layer.even_share,
        p=own.p_EK.reshape(-1),
    )
    first, second = np.nonzero(layer.together_EE * (1 - np.eye(layer.num_experts, dtype=int)))
    tables.add(
        "coactivation",
        layer=name,
        expert=first,
        other=second,
        tokens=layer.together_EE[first, second],
        share=layer.coactivation_EE[first, second],
    )
    if layer.arrivals_EE is not None:
        first, second = np.nonzero(layer.arrivals_EE)
        tables.add(
            "transitions",
            layer=layer.previous,
            expert=first,
            next_layer=name,
            next_expert=second,
            tokens=layer.arrivals_EE[first, second],
        )
    counts = layer.tokens
    is_frequent = counts.times_V[counts.index_X] >= LEAST_TIMES
    index = counts.index_X[is_frequent]
    pieces = {v: piece(int(counts.token_V[v])) for v in np.unique(index).tolist()}
    tables.add(
        "vocabulary",
        layer=name,
        expert=counts.expert_X[is_frequent],
        token=counts.token_V[index],
        text=[pieces[v] for v in index.tolist()],
        times=counts.times_V[index],
        choices=counts.count_X[is_frequent],
        share=counts.share_X[is_frequent],
    )


def model_tables(tables: TableFolder, atlas: Atlas) -> None:
    """Adds what concerns the whole model."""
    for layer in atlas.layers:
        own = layer.specialization
        tables.add(
            "layers",
            layer=[layer.layer],
            tokens=layer.num_tokens,
            choices_of_a_token=layer.num_choices,
            experts=layer.num_experts,
            effective_experts=layer.effective_experts,
            dead_experts=int(dead_experts(layer.load_E).sum()),
            max_violation=float(even_shares(layer.load_E).max()) - 1,
            dropped=layer.dropped,
            probability=layer.probability,
            margin=layer.margin,
            label_information=own.mutual,
            label_information_permuted=own.permuted,
            label_entropy=own.labels,
            label_p=own.p,
            vocabulary_specialization=layer.vocabulary,
            vocabulary_by_chance=layer.vocabulary_by_chance,
        )
        experts = [e for e, found in enumerate(layer.examples) for _ in found]
        examples = [each for found in layer.examples for each in found]
        tables.add(
            "examples",
            layer=layer.layer,
            expert=experts,
            label=[atlas.label_of(each.text) for each in examples],
            text=[each.text for each in examples],
            before=[atlas.text_of(each.before) for each in examples],
            token=[atlas.piece_of(each.token) for each in examples],
            after=[atlas.text_of(each.after) for each in examples],
            gate=[each.gate for each in examples],
        )
    if not isinstance(atlas.drops, str):
        for factor, errors in atlas.drops.errors.items():
            counts = {
                name: [getattr(each, name) for each in errors.values()]
                for name in ("choices", "predicted", "measured", "differing")
            }
            tables.add("drops", layer=list(errors), factor=factor, **counts)
    removed = atlas.knock_outs
    if removed is not None:
        X, K = removed.change_XK.shape
        names, numbers = zip(*removed.experts, strict=True)
        tables.add(
            "knockouts",
            layer=np.repeat(names, K),
            expert=np.repeat(numbers, K),
            label=atlas.labels.names * X,
            target_tokens=np.tile(removed.tokens_K, X),
            texts=np.tile(removed.texts_K, X),
            loss=np.tile(removed.loss_K, X),
            change=removed.change_XK.reshape(-1),
            change_low=removed.low_XK.reshape(-1),
            change_high=removed.high_XK.reshape(-1),
            p=removed.p_XK.reshape(-1),
        )
    if len(atlas.snapshots) > 1:
        saturation = saturation_by_step(atlas.snapshots)
        for snapshot, share_N in zip(atlas.snapshots, saturation, strict=True):
            tables.add("saturation", step=snapshot.step, layer=snapshot.layers, share=share_N)
