# SPDX-License-Identifier: Apache-2.0
"""The record of a model's routing: what each token, in whole groups, asked for and got.

A record is one Parquet file, written batch by batch and readable by any Parquet reader. A row
is a place of a batch in one stack, including padding, in the order in which the layer cuts
places into groups. A row group is one batch in one stack. Columns:

    stack, batch, batch_size, row     encoder or decoder; number of the batch, and its rows B;
                                      the row's id: its text's number where texts were given
    place, token, segment             position in the row, id read, segment (0 is padding)
    LAYER/rank r                      int16 expert of the r-th highest score, from 0
    LAYER/probability r               float32 router probability of that expert
    LAYER/margin                      float32 score of the last choice over the next one's
    LAYER/dropped s                   whether choice s asked for a slot and got none
    LAYER/expert s                    int16 expert reached, where it may be another than rank s
    LAYER/gate s                      float32 gate of choice s, where experts choose

The file's metadata (`RecordInfo`, JSON under the key `switchx`) has the rest: groups, capacity
and gates follow from it.
Dims: B batch, L length, N Switch layers, T places of a batch, R ranks, S choices of a token
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from switchx.fields import describe, fits, from_description, require
from switchx.moe.capacity import layer_capacity, layer_groups
from switchx.moe.config import SwitchConfig

VERSION = 1
KEY = b"switchx"
STACKS = ("encoder", "decoder")
_PLACES = ("batch", "batch_size", "row", "place", "token", "segment")


@dataclasses.dataclass(frozen=True)
class RecordInfo:
    """What all places of a record have in common.

    Attributes:
        switch: the Switch layers as they ran: experts, groups, capacity, router, padding rule.
        layers: names of the recorded Switch layers, by stack.
        step: training step of the parameters.
        source: source of the record: `training`, `eval`, `score` or `generate`.
        model: fingerprint of the model; "" where a run recorded itself.
        vocabulary: fingerprint of the vocabulary; None where there is none.
        is_whole: whether no batch was left out because the record was full.
        version: version of the format.
    """

    switch: SwitchConfig
    layers: dict[str, list[str]]
    step: int
    source: str
    model: str = ""
    vocabulary: str | None = None
    is_whole: bool = True
    version: int = VERSION

    @property
    def num_ranks(self) -> int:
        """R, the number of experts recorded for each token."""
        return self.switch.num_ranks

    @property
    def num_choices(self) -> int:
        """S, the number of a token's choices in the `RoutingPlan`."""
        switch = self.switch
        return switch.num_experts if self.has_choosing_experts else switch.router.num_selected

    @property
    def has_choosing_experts(self) -> bool:
        return self.switch.router.has_choosing_experts

    @property
    def reaches_others(self) -> bool:
        """Whether choice s may reach another expert than that of rank s."""
        router = self.switch.router
        return router.overflow == "reroute" or self.has_choosing_experts or router.replay

    @property
    def all_layers(self) -> list[str]:
        """Names of all layers, the encoder's first."""
        return [layer for stack in STACKS for layer in self.layers.get(stack, ())]

    def as_json(self) -> str:
        values = dataclasses.asdict(dataclasses.replace(self, switch=None))
        return json.dumps(values | {"switch": describe(self.switch, "record.switch")})

    @classmethod
    def from_json(cls, text: str) -> "RecordInfo":
        """Raises ValueError: the text does not describe a record of this version."""
        values = json.loads(text)
        require(isinstance(values, dict), "its description is no object")
        require(
            values.get("version") == VERSION,
            f"it is of version {values.get('version')} of the format, not {VERSION}",
        )
        names = {field.name for field in dataclasses.fields(cls)}
        require(values.keys() == names, f"its description has {sorted(values)}")
        values["switch"] = from_description(SwitchConfig, values["switch"], "record.switch")
        for field in dataclasses.fields(cls):
            require(
                fits(values[field.name], field.type),
                f"its {field.name} is {values[field.name]!r:.60}",
            )
        return cls(**values)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackRecord:
    """Rows of one batch in one stack, in whole routing groups.

    Attributes:
        token_BL, segment_BL: tokens and segments that the stack reads; segment 0 is padding.
        rank_NBLR: int16 experts, those with the highest scores first.
        prob_NBLR: float32 router probabilities of these; with `gate="score"`, their scores.
        margin_NBL: float32 margin of the last choice's score over the next expert's.
        is_dropped_NBLS: whether a choice asked for a slot and got none.
        expert_NBLS: int16 experts that choices asked for; `num_experts` for none.
        taken_gate_NBLS: float32 gates where experts choose, as these take tokens by more than
            the recorded probabilities; None elsewhere.
    """

    token_BL: Any
    segment_BL: Any
    rank_NBLR: Any
    prob_NBLR: Any
    margin_NBL: Any
    is_dropped_NBLS: Any
    expert_NBLS: Any
    taken_gate_NBLS: Any = None

    @property
    def is_token_BL(self):
        return self.segment_BL > 0

    def first(self, rows: int) -> "StackRecord":
        """The record of only the first rows."""

        def cut(name: str):
            x = getattr(self, name)
            return x if x is None else x[:, :rows] if "_N" in name else x[:rows]

        return StackRecord(*(cut(each.name) for each in dataclasses.fields(StackRecord)))


def recorded(config, stats, batch: dict) -> dict[str, StackRecord]:
    """The routing of a batch by stack, from the statistics of its forward pass.

    Args:
        config: a `ModelConfig` with Switch layers.
        stats: the `RoutingStats` of all layers, with `choices`.
        batch: features by T5X's names.
    """
    stacks = [stack for stack in STACKS if config.num_sparse_layers_of(stack)]
    has_gates = config.switch.router.has_choosing_experts
    return {
        stack: StackRecord(
            token_BL=batch[f"{stack}_input_tokens"],
            segment_BL=batch[f"{stack}_segment_ids"],
            rank_NBLR=choices.rank_BLR.astype(np.int16),
            prob_NBLR=choices.prob_BLR.astype(np.float32),
            margin_NBL=choices.margin_BL.astype(np.float32),
            is_dropped_NBLS=choices.dropped_BLS > 0,
            expert_NBLS=choices.expert_BLS.astype(np.int16),
            taken_gate_NBLS=choices.gate_BLS.astype(np.float32) if has_gates else None,
        )
        for stack, choices in zip(stacks, stats.choices, strict=True)
    }


@dataclasses.dataclass(frozen=True)
class RecordedBatch(StackRecord):
    """A `StackRecord` as it was read, with its place in the record.

    Attributes:
        info: what the record's batches have in common.
        stack: `encoder` or `decoder`.
        number: number of the batch.
        batch_size: number of rows of the whole batch, of which the recorded ones come first.
        row_B: ids of the rows.
        layers: names of the N layers that were read.
    """

    info: RecordInfo = None
    stack: str = ""
    number: int = 0
    batch_size: int = 0
    row_B: Any = None
    layers: tuple[str, ...] = ()

    @property
    def group_shape(self) -> tuple[int, int]:
        """(G, T) of the whole batch: the number of groups, and of places in each."""
        return layer_groups(self.info.switch, self.batch_size, self.token_BL.shape[1])

    @property
    def capacity(self) -> int:
        """C, the number of an expert's slots in each group, as the batch was routed."""
        return layer_capacity(self.info.switch, self.group_shape[1], is_training=False)

    @property
    def chosen_NBLS(self) -> np.ndarray:
        """int16 experts of the choices, including dropped ones; but where experts choose, a
        token that none took has no choice."""
        if not self.info.has_choosing_experts:
            return self.expert_NBLS
        none = np.int16(self.info.switch.num_experts)
        return np.where(self.is_dropped_NBLS, none, self.expert_NBLS)

    @property
    def gate_NBLS(self) -> np.ndarray:
        """float32 weights of the choices, as the layer applied them before drops; NaN where
        experts chose and the record, from before 2026-11-29, lacks them."""
        if self.taken_gate_NBLS is not None:
            return self.taken_gate_NBLS
        if self.info.has_choosing_experts:
            return np.full(self.expert_NBLS.shape, np.nan, np.float32)
        return gates(self.info.switch, self.rank_NBLR, self.prob_NBLR, self.expert_NBLS)


def gates(switch: SwitchConfig, rank_R, prob_R, expert_S) -> np.ndarray:
    """Weights of experts, from the ranks' probabilities; see `moe.routing_plan.chosen_gates`.

    A choice of no expert, or of one beyond the ranks (with `reroute`, and where choices are
    replayed), has a gate of 0.
    """
    is_rank_SR = expert_S[..., :, None] == rank_R[..., None, :]
    gate_S = np.sum(np.where(is_rank_SR, prob_R[..., None, :], 0), axis=-1, dtype=np.float32)
    if switch.router.gate == "normalized":
        floor = np.finfo(np.float32).tiny
        gate_S = gate_S / np.maximum(gate_S.sum(axis=-1, keepdims=True), floor)
    return gate_S * np.float32(switch.router.gate_scale)


class RecordWriter:
    """Writes a record batch by batch; the file appears when all of it is written.

        with RecordWriter(path, info) as writer:
            writer.add(number, parts, batch_size)

    Attributes:
        places: number of places written so far, in all stacks.
        is_full: whether a batch was left out because of `max_places`.
    """

    def __init__(self, path: str | os.PathLike, info: RecordInfo, max_places: float = math.inf):
        """Writes nothing yet.

        Args:
            max_places: most places in the record; further batches are left out, and
                `RecordInfo.is_whole` says so.

        Raises:
            ValueError: the file's folder does not exist, or there are more experts than int16
                can count.
        """
        self._path = pathlib.Path(path).expanduser().absolute()
        self._partial, self._file = _partial_of(self._path), None
        self._info, self._most, self._writer = info, max_places, None
        self.places, self.is_full = 0, False
        require(
            not self._path.is_dir() and os.access(self._path.parent, os.W_OK | os.X_OK),
            f"record={str(self._path)!r} cannot be written: its folder is not there or is "
            "locked, or it is a folder; give a file in a folder that exists",
        )
        require(
            info.switch.num_experts < np.iinfo(np.int16).max,
            f"{info.switch.num_experts} experts; a record counts them in 16 bits",
        )

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """Writes the file's end, or leaves no file behind if something was raised.

        Raises:
            ValueError: nothing was added; then there is no file.
        """
        if self._writer is not None:
            info = dataclasses.replace(self._info, is_whole=not self.is_full)
            self._writer.add_key_value_metadata({KEY: info.as_json()})
            self._writer.close()
            with self._file:  # which frees its lock
                if kind is None:
                    self._partial.replace(self._path)
                else:
                    self._partial.unlink()
        require(
            kind is not None or self._writer is not None,
            f"{self._path}: nothing was recorded; record a model with Switch layers",
        )

    def add(
        self,
        number: int,
        parts: dict[str, StackRecord],
        batch_size: int,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Writes the first rows of a batch, as NumPy arrays.

        Args:
            number: number of the batch.
            parts: the record of each stack, in whole groups.
            batch_size: number of rows of the whole batch.
            rows: ids of the recorded rows; None counts the rows of all batches.
        """
        self.is_full |= bool(parts) and self.places >= self._most
        if self.is_full:
            return
        for stack in filter(parts.__contains__, STACKS):
            part = parts[stack]
            B = len(part.token_BL)
            row_B = number * batch_size + np.arange(B) if rows is None else np.asarray(rows)
            self._write(stack, part, number, batch_size, row_B)
            self.places += part.token_BL.size

    def _write(self, stack, part, number, batch_size, row_B) -> None:
        import pyarrow

        B, L = part.token_BL.shape
        columns = {
            "stack": pyarrow.DictionaryArray.from_arrays(
                np.full(B * L, STACKS.index(stack), np.int8), list(STACKS)
            ),
            "batch": np.full(B * L, number, np.int32),
            "batch_size": np.full(B * L, batch_size, np.int32),
            "row": np.repeat(row_B.astype(np.int64), L),
            "place": np.tile(np.arange(L, dtype=np.int32), B),
            "token": part.token_BL.reshape(-1).astype(np.int32),
            "segment": part.segment_BL.reshape(-1).astype(np.int32),
        }
        for layer in self._info.all_layers:
            is_here = layer in self._info.layers[stack]
            n = self._info.layers[stack].index(layer) if is_here else None
            for attribute, (kind, names) in _columns(self._info).items():
                values = [pyarrow.nulls(B * L, kind)] * len(names)
                if is_here:
                    each_RT = getattr(part, attribute)[n].reshape(B * L, -1).T
                    values = [pyarrow.array(np.ascontiguousarray(x), kind) for x in each_RT]
                names = [f"{layer}/{name}" for name in names]
                columns |= zip(names, values, strict=True)
        table = pyarrow.table(columns)
        if self._writer is None:
            self._open(table.schema)
        self._writer.write_table(table, row_group_size=B * L)

    def _open(self, schema) -> None:
        import pyarrow.parquet

        floats = [field.name for field in schema if str(field.type) == "float"]
        file = self._partial.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_own = os.path.samestat(os.fstat(file.fileno()), self._partial.stat())
        except OSError:  # locked, or just finished
            is_own = False
        if not is_own:
            file.close()
        require(
            is_own,
            f"record={str(self._path)!r} is being written by another process; give another "
            "file",
        )
        file.truncate(0)  # left by a recorder that was killed
        self._file = file
        self._writer = pyarrow.parquet.ParquetWriter(
            file,
            schema,
            compression="zstd",
            use_dictionary=[name for name in schema.names if name not in floats],
            column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
            write_page_checksum=True,
        )

    def summary(self) -> str:
        """A description of what was written."""
        size = self._path.stat().st_size
        cut = f"; more were left out: {self._most:,} are the most" if self.is_full else ""
        return (
            f"{self._path}: {self.places:,} places of {len(self._info.all_layers)} Switch "
            f"layers, {size / max(self.places, 1):.1f} bytes each{cut}"
        )


def _columns(info: RecordInfo) -> dict[str, tuple[Any, list[str]]]:
    """Type and names of a layer's columns, by the `StackRecord` attribute that they hold."""
    import pyarrow

    R, S = range(info.num_ranks), range(info.num_choices)
    columns = {
        "rank_NBLR": (pyarrow.int16(), [f"rank {r}" for r in R]),
        "prob_NBLR": (pyarrow.float32(), [f"probability {r}" for r in R]),
        "margin_NBL": (pyarrow.float32(), ["margin"]),
        "is_dropped_NBLS": (pyarrow.bool_(), [f"dropped {s}" for s in S]),
    }
    if info.reaches_others:
        columns["expert_NBLS"] = pyarrow.int16(), [f"expert {s}" for s in S]
    if info.has_choosing_experts:
        columns["taken_gate_NBLS"] = pyarrow.float32(), [f"gate {s}" for s in S]
    return columns


@dataclasses.dataclass(frozen=True)
class RoutingRecord:
    """A record's file; `batches` reads it.

    Attributes:
        path: the file.
        info: description of what all its places have in common.
        num_places: number of places in all stacks.
    """

    path: pathlib.Path
    info: RecordInfo
    num_places: int

    def require_model(self, layers: Sequence[str], num_experts: int) -> None:
        """Raises ValueError: the record is from other Switch layers."""
        own = self.info.switch.num_experts, self.info.all_layers
        require(
            own == (num_experts, list(layers)),
            f"{self.path} is of {own[0]} experts in {', '.join(own[1])}, and the model has "
            f"{num_experts} in {', '.join(layers)}; give a record of a model of this form",
        )

    def batches(
        self, stacks: Iterable[str] | None = None, layers: Iterable[str] | None = None
    ) -> Iterator[RecordedBatch]:
        """Reads one batch of one stack at a time, in the order of recording.

        Args:
            stacks: stacks to read; None means all.
            layers: names of the layers to read; None means all.

        Raises:
            ValueError: the file is damaged, or a batch does not have whole rows and groups.
        """
        with _faults_named(self.path), _opened(self.path) as file:
            for group in range(file.num_row_groups):
                batch = self._batch(file, group, stacks, layers)
                if batch is not None:
                    yield batch

    def _batch(self, file, group, stacks, layers) -> RecordedBatch | None:
        head = file.read_row_group(group, columns=["stack", *_PLACES])
        stack = head["stack"][0].as_py()
        if stacks is not None and stack not in stacks:
            return None
        place = {name: head[name].to_numpy() for name in _PLACES}
        names = [
            name for name in self.info.layers[stack] if layers is None or name in set(layers)
        ]
        if not names:
            return None  # a stack without any requested layers
        L = max(int(place["place"].max()) + 1, 1)
        B = len(place["place"]) // L
        numbers = np.unique(place["batch"])
        sizes = np.unique(place["batch_size"])
        require(
            len(place["place"]) == B * L
            and (place["place"].reshape(B, L) == np.arange(L)).all()
            and len(numbers) == len(sizes) == 1
            and sizes[0] >= B,
            f"row group {group} is not of whole rows of one batch",
        )
        G, T = layer_groups(self.info.switch, int(sizes[0]), L)
        require(
            sizes[0] == B or B * L % T == 0,
            f"row group {group} has {B} rows of {L} places of a batch of {sizes[0]}, and "
            f"groups of {T} places that these do not fill",
        )
        S = self.info.num_choices
        E = self.info.switch.num_experts
        columns = _columns(self.info)
        if f"{names[0]}/gate 0" not in file.schema_arrow.names:  # an older record
            columns.pop("taken_gate_NBLS", None)
        suffixes = [name for _, some in columns.values() for name in some]
        wanted = [f"{layer}/{name}" for layer in names for name in suffixes]
        table = file.read_row_group(group, columns=wanted)

        def stacked(kind, suffixes) -> np.ndarray:
            array = np.empty((len(names), B, L, len(suffixes)), kind.to_pandas_dtype())
            for n, layer in enumerate(names):
                for s, name in enumerate(suffixes):
                    array[n, ..., s] = table[f"{layer}/{name}"].to_numpy().reshape(B, L)
            return array

        arrays = {attribute: stacked(*how) for attribute, how in columns.items()}
        rank_NBLR = arrays["rank_NBLR"]
        arrays["margin_NBL"] = arrays["margin_NBL"][..., 0]
        if "expert_NBLS" not in arrays:
            is_routed_BL = place["segment"].reshape(B, L, 1) > 0
            is_routed_BL |= self.info.switch.router.padding == "counted"
            arrays["expert_NBLS"] = np.where(is_routed_BL, rank_NBLR[..., :S], np.int16(E))
        ids = np.concatenate([rank_NBLR.reshape(-1), arrays["expert_NBLS"].reshape(-1)])
        require(
            not ids.size or (ids.min() >= 0 and ids.max() <= E),
            f"row group {group} has experts from {ids.min(initial=0)} to {ids.max(initial=0)}, "
            f"and the model {E}",
        )
        return RecordedBatch(
            token_BL=place["token"].reshape(B, L),
            segment_BL=place["segment"].reshape(B, L),
            **arrays,
            info=self.info,
            stack=stack,
            number=int(numbers[0]),
            batch_size=int(sizes[0]),
            row_B=place["row"].reshape(B, L)[:, 0],
            layers=tuple(names),
        )


def open_record(path: str | os.PathLike) -> RoutingRecord:
    """Opens a record; places are read by `RoutingRecord.batches`.

    Raises:
        ValueError: there is no such file, it is cut short or damaged, is not a record, has
            another version, or its columns are not those that it describes.
    """
    path = pathlib.Path(path).expanduser()
    with _faults_named(path), _opened(path) as file:
        encoded = (file.schema_arrow.metadata or {}).get(KEY)
        encoded = (file.metadata.metadata or {}).get(KEY, encoded)
        require(encoded is not None, "it is a Parquet file of something else")
        info = RecordInfo.from_json(encoded.decode())
        has_places = file.metadata.num_rows > 0 and info.all_layers
        require(has_places, "it has no places, or no layers")
        wanted = {"stack": None} | dict.fromkeys(_PLACES)
        for layer, (kind, names) in itertools.product(info.all_layers, _columns(info).values()):
            wanted |= {f"{layer}/{name}": kind for name in names}
        found = {field.name: field.type for field in file.schema_arrow}
        has_gates = any("/gate " in name for name in found)  # older records lack them
        missing = [
            name
            for name, kind in wanted.items()
            if (has_gates or "/gate " not in name)
            and (name not in found or kind not in (None, found[name]))
        ]
        require(not missing, f"it lacks {', '.join(missing[:3])}, which it describes")
        return RoutingRecord(path, info, file.metadata.num_rows)


def _opened(path: pathlib.Path):
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)


def _partial_of(path: pathlib.Path) -> pathlib.Path:
    """The file into which a record is written until it is whole."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def _faults_named(path: pathlib.Path):
    """Turns a file's faults into one line with its name."""
    import pyarrow

    try:
        yield
    except (
        *(ValueError, LookupError, TypeError, OSError, RecursionError),
        pyarrow.ArrowException,
    ) as error:
        reason = getattr(error, "strerror", None) or error
        if path.suffix == ".partial" or not path.exists() and _partial_of(path).exists():
            reason = "its recording goes on, or was killed"
        raise ValueError(
            f"{path} is no routing record that can be read ({reason}); give a whole file of "
            "`--record`, or record again"
        ) from error
