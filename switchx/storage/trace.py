# SPDX-License-Identifier: Apache-2.0
"""Traces: which experts were requested, in which order, for simulating caches.

A trace is an `.npz` file. Runs with experts in storage write `storage/trace.npz`; for other
runs it is made from the tokens' choices that evaluations record (`routing/step_*.parquet`), as
decoding or training would request the experts. Its arrays:

    key_T                  layer * num_experts + expert
    step_T, sweep_T        of the run; sweeps are forward 0, backward 1, update 2
    request_T              number of the request; its keys are resident at the same time
    layers_N               names of the Switch layers, in the order of the forward sweep
    num_experts, record_bytes

Dims: N Switch layers, T requested keys (of routing samples: tokens), S experts of a token
"""

import collections
import dataclasses
import io
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from switchx.fields import require, require_choice
from switchx.files import write_atomically
from switchx.npz import read_arrays
from switchx.storage.cache import BACKWARD, FORWARD, SWEEPS, UPDATE, Moment

# Requests kept in a run's file: some hundred steps of some hundred layers.
LOGGED_REQUESTS = 1 << 16
_TYPES = {"key_T": np.int32, "step_T": np.int32, "sweep_T": np.int8, "request_T": np.int32}
_ARRAYS = {
    **{name: (np.integer, 1) for name in _TYPES},
    "layers_N": (np.str_, 1),
    "num_experts": (np.integer, 0),
    "record_bytes": (np.integer, 0),
}


@dataclasses.dataclass(frozen=True)
class Trace:
    """Requested keys in order; the module's docstring describes the arrays.

    Raises:
        ValueError: the arrays do not fit each other.
    """

    key_T: np.ndarray
    step_T: np.ndarray
    sweep_T: np.ndarray
    request_T: np.ndarray
    layers: tuple[str, ...]
    num_experts: int
    record_bytes: int

    def __post_init__(self):
        lengths = {name: len(getattr(self, name)) for name in _TYPES}
        require(len(set(lengths.values())) == 1, f"arrays of different lengths: {lengths}")
        require(len(self.key_T) > 0, "no expert was requested")
        least, most = int(self.key_T.min()), int(self.key_T.max())
        require(
            least >= 0 and most < self.num_keys,
            f"keys from {least} to {most}, but {len(self.layers)} layers of "
            f"{self.num_experts} experts have keys from 0 to {self.num_keys - 1}",
        )
        sweeps = np.unique(self.sweep_T).tolist()
        require(set(sweeps) <= set(range(len(SWEEPS))), f"sweeps {sweeps}; use 0, 1, 2")

    @property
    def num_keys(self) -> int:
        return len(self.layers) * self.num_experts

    @property
    def sweeps(self) -> int:
        """Number of sweeps of a step: 1 in decoding, 3 in training."""
        return len(SWEEPS) if self.sweep_T.max() > FORWARD else 1

    def requests(self) -> Iterator[tuple[np.ndarray, Moment]]:
        """Yields the keys of each request, and its moment."""
        begins = np.flatnonzero(np.diff(self.request_T, prepend=self.request_T[0] - 1))
        for begin, end in zip(begins, [*begins[1:], len(self.key_T)], strict=True):
            moment = Moment(
                int(self.step_T[begin]),
                int(self.sweep_T[begin]),
                int(self.key_T[begin]) // self.num_experts,
            )
            yield self.key_T[begin:end].astype(np.int64), moment

    def save(self, path: str | os.PathLike) -> None:
        """Writes the file, whole or not at all."""
        content = io.BytesIO()
        arrays = {name: getattr(self, name).astype(dtype) for name, dtype in _TYPES.items()}
        np.savez_compressed(
            content,
            **arrays,
            layers_N=np.array(self.layers),
            num_experts=np.int64(self.num_experts),
            record_bytes=np.int64(self.record_bytes),
        )
        write_atomically(pathlib.Path(path), content.getvalue())


class TraceLog:
    """Collects a run's requests; keeps only the newest, so that a long run's fit in memory."""

    def __init__(self, layers: Sequence[str], num_experts: int, record_bytes: int):
        self._of_run = dict(
            layers=tuple(layers), num_experts=num_experts, record_bytes=record_bytes
        )
        self._requests: collections.deque[tuple[np.ndarray, Moment]] = collections.deque(
            maxlen=LOGGED_REQUESTS
        )

    def add(self, keys: np.ndarray, moment: Moment) -> None:
        """Takes note of a request of at least one key."""
        self._requests.append((np.asarray(keys), moment))

    def trace(self) -> Trace | None:
        """The requests so far; None if there are none."""
        if not self._requests:
            return None
        lengths = [len(keys) for keys, _ in self._requests]
        moments = [moment for _, moment in self._requests]
        return Trace(
            key_T=np.concatenate([keys for keys, _ in self._requests]),
            step_T=np.repeat([moment.step for moment in moments], lengths),
            sweep_T=np.repeat([moment.sweep for moment in moments], lengths),
            request_T=np.repeat(np.arange(len(lengths)), lengths),
            **self._of_run,
        )


def read_trace(path: str | os.PathLike) -> Trace:
    """Reads a trace that `Trace.save` wrote.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        arrays = read_arrays(path, _ARRAYS)
        return Trace(
            *(arrays[name] for name in _TYPES),
            layers=tuple(map(str, arrays["layers_N"])),
            num_experts=int(arrays["num_experts"]),
            record_bytes=int(arrays["record_bytes"]),
        )
    except ValueError as error:
        raise ValueError(
            f"{path} is no trace that can be read ({error}); remove it, or let a run write it "
            "again"
        ) from error


def trace_of_steps(
    steps: Iterable[Sequence[np.ndarray]],
    layers: Sequence[str],
    num_experts: int,
    record_bytes: int,
    sweeps: int,
) -> Trace:
    """Makes the trace of a run whose steps use the given experts.

    Forward and backward sweeps need all experts of a layer together; the update takes them one
    by one.

    Args:
        steps: for each step, the experts that each layer uses.
        sweeps: number of sweeps of a step: 1 in decoding, 3 in training.
    """
    require_choice("sweeps", sweeps, (1, len(SWEEPS)))
    requests = []
    for step, experts_of_layer in enumerate(steps):
        keys = [n * num_experts + np.unique(each) for n, each in enumerate(experts_of_layer)]
        requests += [(step, FORWARD, each) for each in keys]
        if sweeps > 1:
            requests += [(step, BACKWARD, each) for each in reversed(keys)]
            requests += [(step, UPDATE, key[None]) for each in keys for key in each]
    lengths = [len(keys) for _, _, keys in requests]
    return Trace(
        key_T=np.concatenate([keys for _, _, keys in requests]).astype(np.int32),
        step_T=np.repeat([step for step, _, _ in requests], lengths).astype(np.int32),
        sweep_T=np.repeat([sweep for _, sweep, _ in requests], lengths).astype(np.int8),
        request_T=np.repeat(np.arange(len(requests)), lengths).astype(np.int32),
        layers=tuple(layers),
        num_experts=num_experts,
        record_bytes=record_bytes,
    )


def trace_of_choices(
    stacks: Sequence[tuple[Sequence[str], np.ndarray]],
    num_experts: int,
    record_bytes: int,
    sweeps: int,
    tokens_per_step: int,
) -> Trace:
    """The requests of a run that reads the given tokens, a fixed number in each step.

    Where there are two stacks, each step reads an equal share of the tokens of both.

    Args:
        stacks: names of the Switch layers of a stack, and the experts `[N, T, S]` that its
            tokens chose; `num_experts` where there is no choice.
    """
    num_steps = -(-sum(expert.shape[1] for _, expert in stacks) // tokens_per_step)
    num_steps = min(num_steps, *(expert.shape[1] for _, expert in stacks))
    parts = [np.array_split(expert, num_steps, axis=1) for _, expert in stacks]
    steps = [
        [experts[experts < num_experts] for part in parts for experts in part[step]]
        for step in range(num_steps)
    ]
    layers = [name for names, _ in stacks for name in names]
    return trace_of_steps(steps, layers, num_experts, record_bytes, sweeps)
