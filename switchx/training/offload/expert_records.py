# SPDX-License-Identifier: Apache-2.0
"""The experts of a run on a disk: fetched for a period, updated, saved and restored.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2.2, Figure 3: experts that will be used
come from the disk into a cache in host memory, and from there to the device. A record changes
only by its own update, so a step that is not taken leaves every record as it was. A record
that misses updates (lazy_update.py) gets them when it is fetched, and is stored with them
before an evaluation and a checkpoint, whose records are then all of one update.

If several processes train, each has the records of its own devices' experts
(disk_banks.py), and a store, cache and prefetch of its own. Which experts a step used, and
how many updates each has had, is known to all of them.

Dims: D model, F ffn, N Switch layers, E experts, J Switch layers of a period, X rows of experts
that a period uses
"""

import collections
import concurrent.futures
import logging
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from switchx.fields import require
from switchx.models.params import abstract_params
from switchx.models.stages import Period, model_periods, stack_names
from switchx.partitioning.mesh import cpu_device
from switchx.storage.cache import BACKWARD, SWEEPS, UPDATE, Cache, Moment, make_policy
from switchx.storage.cached_store import CachedStore
from switchx.storage.record import Record, StoreLayout
from switchx.storage.snapshot import part_of, parts_of
from switchx.storage.store import NUM_THREADS, RecordStore, process_folder, remove_stores
from switchx.storage.trace import TraceLog
from switchx.training.job import TrainingJob
from switchx.training.offload.disk_banks import DeviceBanks
from switchx.training.offload.disk_periods import Bank
from switchx.training.offload.lazy_update import ExpertForm, LazyUpdate
from switchx.tree import named_leaves

# An expert used within this many steps is fetched before the router has chosen.
LATELY = 8

_log = logging.getLogger(__name__)


class ExpertRecords:
    """The experts of a job, as `disk_step.ExpertBanks`, and as what a checkpoint stores.

    Attributes:
        layout: layout of the records of all processes.
        banks: transfers to the devices and back, and which experts this process stores.
        updates: number of updates that the optimizer has made so far.
    """

    def __init__(self, job: TrainingJob, mesh: Mesh):
        """Describes the records; `open` opens the store.

        Raises:
            ValueError: the mesh does not divide the experts, the cache has no room for a
                layer, or the optimizer is refused.
        """
        config = job.model
        self._spec, self._E = job.storage, config.switch.num_experts
        self._lazy = LazyUpdate(job.optimizer, job.schedule)
        leaves = named_leaves(abstract_params(config))
        self.periods = model_periods(config)

        def form(names):
            return self._lazy.form(
                {
                    name: jax.ShapeDtypeStruct((1, *leaves[name].shape[2:]), leaves[name].dtype)
                    for name in names
                }
            )

        self._forms: dict[int, ExpertForm] = {}  # of each Switch layer
        for stack in stack_names(config):
            periods = [period for period in self.periods if period.stack == stack]
            forms = [form(names) for names in periods[0].names]
            for period in periods:
                self._forms |= zip(period.layers, forms, strict=True)
        layers = dict(zip(config.sparse_layer_names, self._forms.values(), strict=True))
        self.layout = StoreLayout({name: f.types for name, f in layers.items()}, self._E)
        params = {
            name: jax.ShapeDtypeStruct((self._E, *form.shape[1:]), form.dtype)
            for each in self._forms.values()
            for name, form in named_leaves(each.params).items()
        }
        self.banks = DeviceBanks(mesh, job.mesh.rules, self._E, params)
        self._own_E = np.flatnonzero(self.banks.is_own_E)
        self._num_own = len(layers) * len(self._own_E)
        self._capacity = self._cache_capacity()
        self.updates = 0
        self._updates_NE = np.zeros(self.layout.num_keys, np.int64)
        self._sweeps = 0  # steps and batches of evaluation
        self._steps = 0
        self._last_step_NE = np.zeros(self.layout.num_keys, np.int64)
        self._requested: set[tuple[Period, int]] = set()
        # By layer: its experts with a gradient, and the gradients.
        self._gradients: dict[int, tuple[np.ndarray, dict[str, np.ndarray]]] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    def _cache_capacity(self) -> int:
        """Records that the host's memory has room for."""
        record_bytes = self.layout.record_bytes
        host_bytes = self._spec.host_bytes
        if host_bytes is None:
            return self._num_own
        least = len(self._own_E) * record_bytes
        require(
            host_bytes >= least,
            f"StorageSpec.host_bytes={host_bytes:,} holds {host_bytes // record_bytes} experts "
            f"of {record_bytes:,} bytes (weights and what the optimizer keeps), but the "
            f"{len(self._own_E)} of one layer may be needed at once; use at least {least:,}",
        )
        return min(host_bytes // record_bytes, self._num_own)

    @property
    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape structs of the experts in a state on the host, `[N, E, ...]` by name."""
        on_host = SingleDeviceSharding(cpu_device())
        repeats = collections.Counter(n for form in self._forms.values() for n in form.types)
        return {
            name: jax.ShapeDtypeStruct(
                (repeats[name], self._E, *each.shape), np.dtype(each.dtype), sharding=on_host
            )
            for form in self._forms.values()
            for name, each in form.types.items()
        }

    # The store.

    def open(self, default: pathlib.Path) -> None:
        """Opens the store, without records.

        Args:
            default: folder of the store if the job names none.

        Raises:
            ValueError: another run has it open, or the folder is not a store.
        """
        folder, here = self._spec.path or default, jax.process_index()
        keys = self._keys(self.banks.is_own_E)
        self._store = RecordStore(process_folder(folder, here), self.layout, keys)
        remove_stores(folder, first=jax.process_count())
        self._trace = TraceLog(list(self.layout.layers), self._E, self.layout.record_bytes)
        self._empty_cache()

    def close(self, trace_file: pathlib.Path) -> None:
        """Waits for reads and writes, and lets another run open the store.

        Args:
            trace_file: file for the trace of process 0's requests.
        """
        self._store.close()
        if jax.process_index() == 0 and (trace := self._trace.trace()) is not None:
            try:
                trace.save(trace_file)
            except OSError as error:  # how the run ends matters more
                _log.warning(f"{trace_file} is not written ({error.strerror})")

    def _keys(self, is_meant_E: np.ndarray) -> list[int]:
        """Keys of these experts in all layers."""
        return np.flatnonzero(np.tile(is_meant_E, len(self.layout.layers))).tolist()

    def _empty_cache(self) -> None:
        """Empties the cache: the next step expects all experts, later steps the used ones."""
        num_layers, sweeps = len(self.layout.layers), len(SWEEPS)
        policy = make_policy(self._spec.policy, num_layers, self._E, sweeps)
        self._cached = CachedStore(self._store, Cache(self._capacity, policy))
        self._requested.clear()
        self._last_step_NE[:] = self._steps + 1 - LATELY

    def begin(self, draw: Callable[[Period], Mapping[str, Any]]) -> None:
        """Stores experts that were never updated.

        Args:
            draw: parameters `[E, ...]` of a period's experts by path, with the sharding of
                `banks`, or on the host.
        """

        def own(leaf):
            if isinstance(leaf, jax.Array) and leaf.sharding == self.banks.sharding:
                return self.banks.local(leaf, self._own_E)
            return np.asarray(leaf)[self._own_E]

        def records():
            for period in self.periods:
                params = {name: own(leaf) for name, leaf in draw(period).items()}
                for n, names in zip(period.layers, period.names, strict=True):
                    for i, e in enumerate(self._own_E.tolist()):
                        one = {name: params[name][i][None] for name in names}
                        yield n * self._E + e, self._lazy.first_record(self._forms[n], one)

        self._write_all(records(), updates=0)

    def fill(self, leaves: Mapping[str, jax.Array], updates: int) -> None:
        """Stores experts of a training state.

        Args:
            leaves: arrays `[N, E, ...]` of the state, by the names of the records' arrays.
            updates: number of updates that the optimizer has made.
        """
        whole = {name: np.asarray(leaf) for name, leaf in leaves.items()}

        def records():
            for period in self.periods:
                for n in period.layers:
                    names = self._forms[n].types
                    for e in self._own_E.tolist():
                        arrays = {name: whole[name][period.number, e] for name in names}
                        yield n * self._E + e, Record(arrays, updates)

        self._write_all(records(), updates)

    def _write_all(self, records: Iterable[tuple[int, Record]], updates: int) -> None:
        pending: collections.deque[concurrent.futures.Future] = collections.deque()
        for key, record in records:
            if len(pending) == 2 * NUM_THREADS:
                pending.popleft().result()
            pending.append(self._store.write(key, record))
        while pending:
            pending.popleft().result()
        self._forget(updates)

    def _forget(self, updates: int) -> None:
        """Forgets what was known of the records, which have all been replaced."""
        self.updates = updates
        self._updates_NE[:] = updates
        self._empty_cache()
        self._totals_before = self._totals()

    def save(self, folder: pathlib.Path) -> None:
        """Keeps all records, of one update, in a folder that is whole or does not exist.

        If several processes train, each keeps a part of them, in a folder of its own there.

        Raises:
            StoreError: there is no space, or an earlier write failed.
        """
        self.settle()
        self._cached.flush()
        part = part_of(folder, jax.process_index(), jax.process_count())
        self._store.snapshot(part, self._keys(self.banks.is_saved_E))

    def restore(self, folder: pathlib.Path) -> None:
        """Takes the records of `save` in place of the current ones.

        Raises:
            RecordError: the records are not whole, or those of another model or optimizer.
        """
        self._store.restore(*parts_of(folder))
        self._forget(self._store.read(int(self._own_E[0])).result().updates)

    def settle(self) -> None:
        """Makes up for all updates that experts have missed."""
        for n in self._forms:
            own = n * self._E + self._own_E
            keys = own[self._updates_NE[own] < self.updates]
            self._request(keys, UPDATE, n)
            for key in keys.tolist():
                self._put(key, self._current(key))

    # The banks of a step.

    def begin_sweeps(self, *, is_training: bool) -> None:
        """Begins a step, or a batch of evaluation."""
        self._sweeps += 1
        self._steps += is_training
        self._requested.clear()
        self._gradients.clear()

    def expected(self, period: Period) -> np.ndarray:
        last_JE = self._last_step_NE.reshape(-1, self._E)[list(period.layers)]
        return self._steps - last_JE <= LATELY

    def prefetch(self, period: Period, sweep: int, used_JE: np.ndarray) -> None:
        self._requested.add((period, sweep))
        layers = list(zip(period.layers, used_JE, strict=True))
        for n, used_E in layers[::-1] if sweep == BACKWARD else layers:
            own = np.flatnonzero(used_E & self.banks.is_own_E)
            self._request(n * self._E + own, sweep, n)

    def fetch(self, period: Period, sweep: int, used_JE: np.ndarray) -> Bank:
        if (period, sweep) not in self._requested:
            self.prefetch(period, sweep, used_JE)
        self._requested.discard((period, sweep))
        bank: Bank = {}
        for n, used_E in zip(period.layers, used_JE, strict=True):
            expert_X = self.banks.rows(used_E)
            own = self.banks.own_rows(expert_X)
            keys = n * self._E + expert_X[own]
            if any(key not in self._cached for key in keys.tolist()):
                # Records of other layers, read ahead, have taken their place in the meantime.
                self._request(keys, sweep, n)
            # New memory, never written again: on a CPU the device's array may be this one.
            make = np.empty if len(own) == len(expert_X) else np.zeros
            rows = {
                name: make((len(expert_X), *form.shape[1:]), form.dtype)
                for name, form in named_leaves(self._forms[n].params).items()
            }
            for x, key in zip(own.tolist(), keys.tolist(), strict=True):
                record = self._current(key)
                for name, row in rows.items():
                    row[x] = record.arrays[f"params/{name}"]
            bank |= self.banks.put(rows, expert_X)
        return bank

    def keep_gradients(self, period: Period, used_JE: np.ndarray, bank: Bank) -> None:
        for n, names, used_E in zip(period.layers, period.names, used_JE, strict=True):
            self._last_step_NE[n * self._E + np.flatnonzero(used_E)] = self._steps
            if np.any(used_E):
                expert_X = self.banks.rows(used_E)
                self._gradients[n] = (
                    expert_X[self.banks.own_rows(expert_X)],
                    {name: self.banks.take(name, bank, expert_X) for name in names},
                )

    def update(self, gradient_scale: float) -> None:
        """Updates the experts that have a gradient, in the order of layers.

        Args:
            gradient_scale: factor of the raw gradients.
        """
        for n in sorted(self._gradients):
            experts, rows = self._gradients.pop(n)  # to be freed
            keys = n * self._E + experts
            self._request(keys, UPDATE, n)
            for t, key in enumerate(keys.tolist()):
                gradient = {name: row[t][None] for name, row in rows.items()}
                record = self._lazy.advance(
                    self._forms[n], self._get(key), self.updates + 1, gradient, gradient_scale
                )
                self._put(key, record)
            self._counts["touched"] += len(keys)
        self.updates += 1
        self._counts["updates"] += 1

    def metrics(self) -> dict[str, float]:
        """The counts since the last call.

        `touched_share` is the share of this process's experts that an update uses, the paper's
        alpha.
        """
        totals = self._totals()
        new = totals - self._totals_before
        self._totals_before = totals
        return {
            "hit_rate": new["hits"] / max(new["requested"], 1),
            "read_bytes": new["read_bytes"],
            "written_bytes": new["written_bytes"],
            "stalls": new["stalls"],
            "stall_s": new["stall_ns"] / 1e9,
            "touched_share": new["touched"] / max(new["updates"] * self._num_own, 1),
        }

    def _totals(self) -> collections.Counter[str]:
        cache = self._cached.cache
        return self._counts + collections.Counter(
            requested=cache.num_requested,
            hits=cache.num_hits,
            read_bytes=self._store.bytes_read,
            written_bytes=self._store.bytes_written,
        )

    def _request(self, keys: np.ndarray, sweep: int, n: int) -> None:
        if len(keys):
            moment = Moment(self._sweeps, sweep, n)
            self._cached.request(keys, moment)
            self._trace.add(keys, moment)

    def _get(self, key: int) -> Record:
        """A requested record, as it is stored."""
        if self._cached.is_here(key):
            return self._cached.get(key)
        begin = time.perf_counter_ns()
        record = self._cached.get(key)
        self._counts["stalls"] += 1
        self._counts["stall_ns"] += time.perf_counter_ns() - begin
        return record

    def _current(self, key: int) -> Record:
        """A requested record after all updates so far.

        It stays so in memory. The disk's is behind, but no other one: nothing is to be written.
        """
        record = self._get(key)
        if record.updates < self.updates:
            record = self._lazy.advance(self._forms[key // self._E], record, self.updates)
            self._cached.replace(key, record)
        return record

    def _put(self, key: int, record: Record) -> None:
        self._cached.put(key, record)
        self._updates_NE[key] = record.updates
