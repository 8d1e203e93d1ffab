# SPDX-License-Identifier: Apache-2.0
"""Copies of the training state on the machines' own disks, for a run that ends between saves.

Each process writes what its devices hold; a part that several of them hold is written once. No
process waits for another and nothing crosses the network, so a copy can be taken far more often
than a checkpoint. (The local tier of Gemini, Wang et al. 2023, SOSP, and of Orbax' emergency
checkpoints.) A copy is useful where the same number of processes start again on the same
machines: all must have a whole copy of the same step, with what the mesh puts on their devices.
Otherwise the checkpoint in the run folder is used, as it would be without copies.

    LOCAL_DIR/<run>/process_1_of_4/450/
      arrays.bin      the parts, in row-major order, one after another
      manifest.json   run, step, place in the data; each part's index, offset and CRC-32

The last two are kept: a process may be killed while it writes the newest.
"""

import concurrent.futures
import hashlib
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from switchx.checkpoint.items import (
    abstract,
    data_file,
    decode_data_state,
    encode_data_state,
)
from switchx.checkpoint.parts import bounds_of, crc32_of, gathered, require_of_all
from switchx.checkpoint.run_folder import RunFolder
from switchx.files import write_atomically
from switchx.object_store import absolute
from switchx.tree import Tree, named_leaves
from switchx.whole_folders import damages, new_folder, read_manifest, write_manifest

logger = logging.getLogger(__name__)

_ARRAYS, _MANIFEST, _CHECKSUM = "arrays.bin", "manifest.json", "crc32"
_KEPT = 2

# Start and stop of a part in each dimension.
Bounds = tuple[tuple[int, int], ...]


class LocalCopies:
    """The copies of one run; where several processes train, each has its own instance.

    Attributes:
        seconds: seconds that this process' last copy took; None before the first.
    """

    def __init__(self, directory: str, run: RunFolder):
        """Makes this process' folder, and the run's identity where it has none yet.

        Args:
            directory: folder on a disk of this machine.

        Raises:
            ValueError: the folder cannot be written.
        """
        where = str(run.where)
        name = f"{run.where.name}-{hashlib.sha256(where.encode()).hexdigest()[:12]}"
        process = data_file().removesuffix(".json")
        self._folder = absolute(directory) / name / process
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / "probe", b"written")
            for partial in self._folder.glob(".*.partial"):  # left by a process that was killed
                shutil.rmtree(partial)
        except OSError as error:
            raise ValueError(
                f"Retention.local_dir={directory!r} cannot be written ({error.strerror}: "
                f"{error.filename}); give a folder on a disk of each machine, or None"
            ) from error
        self._run = _identity(run)
        self.seconds: float | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._writing: concurrent.futures.Future | None = None

    def save(self, step: int, state: Tree, data_state: Any) -> None:
        """Copies the state to the host, and writes it in the background.

        The state may be donated as soon as this returns. It waits for the previous copy. If a
        copy cannot be written, that is a warning: the run's checkpoints do not need it.
        """
        self.wait()
        begun, arrays = time.monotonic(), _on_host(state)
        header = {"run": self._run, "step": step, "data": encode_data_state(data_state)}
        self._writing = self._pool.submit(self._write, step, arrays, header, begun)

    def wait(self) -> None:
        """Returns when the copy being written is on the disk, or could not be written."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except (OSError, ValueError) as error:  # from `new_folder`, whose parent cannot be made
            logger.warning("no local copy of the state in %s: %s", self._folder, error)

    def newest(self, like: Tree) -> int | None:
        """The newest step of which every process has a whole copy that fits, or None.

        Args:
            like: arrays or ShapeDtypeStructs with the shardings of a state.
        """
        like, own = jax.tree.map(abstract, like), []
        for step in self._steps():
            if (fault := self._fault(step, like)) is None:
                own.append(step)
            else:
                logger.info(
                    "local copy of step %d in %s is not used: %s", step, self._folder, fault
                )
        of_all = gathered([own])
        return max(set.intersection(*map(set, of_all)), default=None)

    def restore(self, step: int, like: Tree) -> tuple[Tree, list]:
        """Restores the state of a step, and the data iterators' states of all processes.

        Raises:
            DamagedCheckpoint: values differ from those written, here or in another process.
        """
        folder, like = self._folder / str(step), jax.tree.map(abstract, like)
        content = read_manifest(folder, _MANIFEST, _CHECKSUM)
        leaves, faults = [], []
        with (folder / _ARRAYS).open("rb") as file:
            for name, leaf in named_leaves(like).items():
                wanted, parts = _wanted(leaf), {}
                for bounds, offset, crc in content["arrays"][name]["parts"]:
                    if (key := _key(bounds)) in wanted:
                        parts[key] = _read(file, offset, key, leaf.dtype)
                        if crc32_of(parts[key]) != crc:
                            faults.append(f"its array {name} is not what was written (CRC-32)")
                leaves.append(_placed(leaf, parts))
        require_of_all(folder, faults)
        states = [decode_data_state(each) for each in gathered([content["data"]])]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), states

    def forget(self, is_gone: Callable[[int], bool]) -> None:
        """Deletes the copies of the steps for which `is_gone` is true."""
        for step in filter(is_gone, self._steps()):
            shutil.rmtree(self._folder / str(step), ignore_errors=True)

    def close(self) -> None:
        """Waits for the copy being written and ends the thread."""
        self.wait()
        self._pool.shutdown()

    def _steps(self) -> list[int]:
        return sorted(
            int(each.name) for each in self._folder.glob("*") if each.name.isdecimal()
        )

    def _fault(self, step: int, like: Tree) -> str | None:
        """Why the copy of a step cannot be used, or None if it can; reads no array."""
        folder = self._folder / str(step)
        try:
            content = read_manifest(folder, _MANIFEST, _CHECKSUM)
            if (content["run"], content["step"]) != (self._run, step):
                return "it is of another run"
            leaves, arrays = named_leaves(like), content["arrays"]
            if leaves.keys() != arrays.keys():
                return "it has other arrays"
            for name, leaf in leaves.items():
                held = {_key(bounds) for bounds, _, _ in arrays[name]["parts"]}
                if arrays[name]["dtype"] != str(leaf.dtype) or not held >= _wanted(leaf):
                    return f"its array {name} is of another shape, dtype or mesh"
        except (OSError, ValueError) as error:
            return str(error)
        except (LookupError, TypeError, AttributeError):
            return f"its {_MANIFEST} is damaged"
        return next(damages(folder, content["files"], None), None)

    def _write(self, step: int, arrays: dict, header: dict, begun: float) -> None:
        folder = self._folder / str(step)
        shutil.rmtree(folder, ignore_errors=True)
        with new_folder(folder) as partial:
            described = {}
            with (partial / _ARRAYS).open("wb") as file:
                for name, parts in arrays.items():
                    listed = []
                    for bounds, values in parts:
                        listed.append([bounds, file.tell(), crc32_of(values)])
                        file.write(values.reshape(-1).view(np.uint8))
                    described[name] = {"dtype": str(parts[0][1].dtype), "parts": listed}
                num_bytes = file.tell()
                file.flush()
                os.fsync(file.fileno())
            content, known = header | {"arrays": described}, {_ARRAYS: [num_bytes, None]}
            write_manifest(partial, _MANIFEST, content, _CHECKSUM, known=known)
        kept = self._steps()[-_KEPT:]
        self.forget(lambda each: each not in kept)
        self.seconds = time.monotonic() - begun


def renew_identity(run: RunFolder) -> None:
    """Gives a run that begins again a new identity: earlier copies do not belong to it.

    It is overwritten and not deleted, as a store keeps files that are deleted in the mirror.
    """
    if jax.process_index() == 0 and run.identity.exists():
        _write_identity(run)


def _write_identity(run: RunFolder) -> None:
    write_atomically(run.identity, secrets.token_hex(16).encode())


def _identity(run: RunFolder) -> str:
    """The run's identity, the same in all processes; process 0 writes it if there is none."""
    words = np.zeros(16, np.uint8)
    if jax.process_index() == 0:
        if not run.identity.exists():
            _write_identity(run)
        words = np.frombuffer(bytes.fromhex(run.identity.read_text()), np.uint8)
    return bytes(multihost_utils.broadcast_one_to_all(words)).hex()


def _on_host(state: Tree) -> dict[str, list[tuple[Bounds, np.ndarray]]]:
    """The parts of each array on this process' devices, each part once."""
    held: dict[str, dict[Bounds, jax.Array]] = {}
    for name, leaf in named_leaves(state).items():
        held[name] = {}
        for shard in leaf.addressable_shards:
            held[name].setdefault(bounds_of(shard.index, leaf.shape), shard.data)
        for data in held[name].values():
            data.copy_to_host_async()
    # Copies, as `np.asarray` of an array on a CPU shares its memory, which is donated.
    return {
        name: [(bounds, np.array(data)) for bounds, data in parts.items()]
        for name, parts in held.items()
    }


def _wanted(leaf) -> set[Bounds]:
    """The parts of an array that the devices of this process will hold."""
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return {bounds_of(index, leaf.shape) for index in indices.values()}


def _key(bounds: list[list[int]]) -> Bounds:
    """Converts bounds from their form in JSON."""
    return tuple((first, last) for first, last in bounds)


def _read(file: BinaryIO, offset: int, bounds: Bounds, dtype) -> np.ndarray:
    shape = [last - first for first, last in bounds]
    file.seek(offset)
    data = file.read(math.prod(shape) * np.dtype(dtype).itemsize)
    return np.frombuffer(data, dtype).reshape(shape)


def _placed(leaf, parts: dict[Bounds, np.ndarray]) -> jax.Array:
    """Builds an array from the parts that its devices hold.

    Each device gets a copy: on a CPU an array may share the memory that it was made from, and
    training then writes there.
    """
    sharding = leaf.sharding
    indices = sharding.addressable_devices_indices_map(leaf.shape)
    arrays = [
        jax.device_put(
            parts[bounds_of(index, leaf.shape)].copy(),
            SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
        )
        for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)
