# SPDX-License-Identifier: Apache-2.0
"""The folder of a teacher's logits: parts of batches by rows, whichever process wrote them.

    teacher.json           whose they are: fingerprint, step, K, sizes; every file's size
    rows_<part>.npz        digest_NB uint64 of the rows of N batches, row_B their numbers
    <number>_<part>.npz    for the same rows of one batch: token_BLK int32 and logit_BLK
                           float32, the largest first
    vocabulary.*           the teacher's, as in a run folder

Each process writes its part of every batch. Batches do not depend on the processes: any number
of processes finds its rows again, by their content.
Dims: N batches, B rows of a part, L length, K tokens kept
"""

import contextlib
import hashlib
import io
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from switchx.data.features import Batch
from switchx.fields import require
from switchx.files import write_atomically
from switchx.npz import Arrays, read_arrays
from switchx.whole_folders import new_folder, read_manifest

MANIFEST = "teacher.json"
CHECKSUM = "crc32"
_PATH_BYTES = 4096
_ROWS = {"digest_NB": (np.uint64, 2), "row_B": (np.integer, 1)}
_LOGITS = {"token_BLK": (np.integer, 3), "logit_BLK": (np.floating, 3)}


@contextlib.contextmanager
def folder_of_all(folder) -> Iterator[pathlib.Path]:
    """A folder that all processes write into; it gets its name when all have left it.

    Raises:
        ValueError: the folder exists (`whole_folders.new_folder`), or a process does not see
            it.
    """
    if jax.process_count() == 1:
        with new_folder(folder) as partial:
            yield partial
        return
    with contextlib.ExitStack() as stack:
        name = np.zeros(_PATH_BYTES, np.uint8)
        if jax.process_index() == 0:
            partial = str(stack.enter_context(new_folder(folder))).encode()
            name[: len(partial)] = np.frombuffer(partial, np.uint8)
        name = np.asarray(multihost_utils.broadcast_one_to_all(name))
        partial = pathlib.Path(name.tobytes().rstrip(b"\0").decode())
        seen = multihost_utils.process_allgather(np.array(partial.is_dir()))
        require(
            bool(np.all(seen)),
            f"{folder} is not one folder for all processes: process "
            f"{', '.join(map(str, np.flatnonzero(~seen)))} does not see it; give a folder on a "
            "file system that all machines share",
        )
        yield partial
        multihost_utils.sync_global_devices("switchx_logits_written")


class LogitsWriter:
    """Writes this process's rows of each batch, in order."""

    def __init__(self, folder: pathlib.Path, rows: Sequence[int]):
        """Writes nothing yet.

        Args:
            rows: numbers of the rows of the global batch that this process writes, ascending;
                empty if other processes write all of its rows.
        """
        self._folder = folder
        self._rows = list(rows)
        self._part = jax.process_index()
        self._digests = []

    def write(self, batch: Batch, token_BLK, logit_BLK) -> None:
        """Writes one batch, of these rows only."""
        if not self._rows:
            return
        self._digests.append(row_digests(batch))
        name = f"{len(self._digests):07d}_{self._part}.npz"
        self._save(name, token_BLK=token_BLK, logit_BLK=logit_BLK)

    def end(self) -> None:
        """Writes which rows were written."""
        if self._rows:
            digests = np.stack(self._digests)
            rows = np.array(self._rows, np.int32)
            self._save(f"rows_{self._part}.npz", digest_NB=digests, row_B=rows)

    def _save(self, name: str, **arrays) -> None:
        file = io.BytesIO()
        np.savez(file, **arrays)
        write_atomically(self._folder / name, file.getvalue())


class LogitsReader:
    """Reads the teacher's tokens and logits for the rows of batches.

    Attributes:
        about: the content of the folder's manifest.
    """

    def __init__(self, folder: pathlib.Path):
        """Reads the manifest; the digests are read when first needed.

        Raises:
            ValueError: the folder is missing or damaged.
        """
        self._folder, self._parts = folder, None
        try:
            self.about: dict[str, Any] = read_manifest(folder, MANIFEST, CHECKSUM)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}; write it again") from error

    def read(self, batch: Batch, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """`token_BLK` and `logit_BLK` of some rows of a batch.

        Args:
            batch: the rows' part of the batch.
            rows: numbers of the rows in the global batch, ascending.

        Raises:
            ValueError: the teacher has not read these rows together, or a file is damaged.
        """
        if self._parts is None:
            self._read_parts()
        number = self._number_of(row_digests(batch), np.array(rows))
        found: dict[str, list] = {"token_BLK": [], "logit_BLK": []}
        places = []
        for part, (_, row_B) in self._parts.items():
            chosen = np.flatnonzero(np.isin(row_B, rows))
            if len(chosen):
                arrays = self._load(f"{number + 1:07d}_{part}.npz", _LOGITS)
                for name, each in found.items():
                    each.append(arrays[name][chosen])
                places.append(row_B[chosen])
        order = np.argsort(np.concatenate(places))
        return {name: np.concatenate(each)[order] for name, each in found.items()}

    def _read_parts(self) -> None:
        self._parts = {}
        for name in self.about["files"]:
            if name.startswith("rows_"):
                arrays = self._load(name, _ROWS)
                part = pathlib.PurePath(name).stem.removeprefix("rows_")
                self._parts[part] = arrays["digest_NB"], arrays["row_B"]
        digests, rows = zip(*self._parts.values(), strict=True)
        order = np.argsort(np.concatenate(rows))
        self._digest_NB = np.concatenate(digests, axis=1)[:, order]
        # By the first row of a batch, of which a search finds candidates.
        self._sorted: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def _number_of(self, digest_B, row_B) -> int:
        """The batch that has these rows in these places, from 0."""
        first = int(row_B[0])
        if first not in self._sorted:
            order = np.argsort(self._digest_NB[:, first], kind="stable")
            self._sorted[first] = order, self._digest_NB[order, first]
        order, digest_N = self._sorted[first]
        low, high = (np.searchsorted(digest_N, digest_B[0], side) for side in ("left", "right"))
        for number in order[low:high]:
            if np.array_equal(self._digest_NB[number, row_B], digest_B):
                return int(number)
        raise ValueError(
            f"{self._folder} has no logits of this batch: it was written for another task, "
            "seed, BATCH_SIZE or lengths, or for fewer than TRAIN_STEPS; use those, or write "
            "it again"
        )

    def _load(self, name: str, arrays: Arrays) -> dict[str, np.ndarray]:
        path = self._folder / name
        try:
            return read_arrays(path, arrays)
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); write it again") from error


def row_digests(batch: Batch) -> np.ndarray:
    """Digests of the content of each row of a batch, uint64 [B]."""
    names = sorted(batch)

    def digest(row: int) -> int:
        made = hashlib.blake2b(digest_size=8)
        for name in names:
            values = np.ascontiguousarray(batch[name][row])
            made.update(f"{name} {values.shape} {values.dtype} ".encode())
            made.update(values)
        return int.from_bytes(made.digest(), "little")

    return np.array([digest(row) for row in range(len(batch[names[0]]))], np.uint64)
