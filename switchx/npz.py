# SPDX-License-Identifier: Apache-2.0
"""Arrays of `.npz` files, which may come from anybody: what is declared is bounded first."""

import math
import os
import zipfile

import numpy as np

MOST_BYTES = 1 << 30  # of all arrays of a file; of routing samples and traces some megabytes


def read_arrays(path: str | os.PathLike, most_bytes: int = MOST_BYTES) -> dict[str, np.ndarray]:
    """All arrays of a file by name.

    Raises:
        ValueError: it is missing, damaged, declares more than `most_bytes`, or an array of
            another size than its member has; a clause.
    """
    try:
        with zipfile.ZipFile(path) as file:
            members = file.infolist()
            total = sum(each.file_size for each in members)
            if total > most_bytes:
                raise ValueError(f"it declares {total} bytes, expected {most_bytes} at most")
            for each in members:
                with file.open(each) as member:
                    _require_size(member, each)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as error:  # zipfile, zlib and NumPy raise many kinds
        raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())[:300]) from error


def _require_size(member, about: zipfile.ZipInfo) -> None:
    version = np.lib.format.read_magic(member)
    read = {(1, 0): np.lib.format.read_array_header_1_0}
    header = read.get(version, np.lib.format.read_array_header_2_0)
    shape, _, dtype = header(member)
    num_bytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or num_bytes != about.file_size - member.tell():
        raise ValueError(f"its {about.filename} of shape {shape} has another size")
