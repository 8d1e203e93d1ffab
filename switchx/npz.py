# SPDX-License-Identifier: Apache-2.0
"""Arrays from untrusted `.npz` files: what a file declares is checked before it is read.

A zip file of a few megabytes can unpack to gigabytes, and an array's header can ask for any
amount of memory. NumPy's reader allocates whatever a header says.
"""

import math
import os
import pathlib
import zipfile
from collections.abc import Mapping

import numpy as np

from switchx.fields import require
from switchx.object_store import IS_LFS_POINTER, is_lfs_pointer

# The most bytes that a file smaller than this may unpack to: far above any sample or trace.
MOST_BYTES = 1 << 30

# Name -> kind of its elements (`np.integer`, `np.floating`, `np.str_`), number of dimensions.
Arrays = Mapping[str, tuple[type, int]]


def read_arrays(
    path: str | os.PathLike, required: Arrays, optional: Arrays | None = None
) -> dict[str, np.ndarray]:
    """Returns the named arrays of a file; it ignores any others.

    Raises:
        ValueError: the file cannot be read or is damaged, unpacks to more than `MOST_BYTES`, or
            an array is missing or of the wrong kind.
    """
    path = pathlib.Path(path)
    try:
        require(not is_lfs_pointer(path), f"it {IS_LFS_POINTER}")
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = required.keys() - members.keys()
            require(not missing, f"it has no {', '.join(sorted(missing))}")
            wanted = dict(required) | {
                name: kind for name, kind in (optional or {}).items() if name in members
            }
            size = sum(members[name].file_size for name in wanted)
            require(
                size <= max(MOST_BYTES, path.stat().st_size),
                f"it would unpack to {size:,} bytes, where {MOST_BYTES:,} are the most",
            )
            return {
                name: _array(archive, members[name], name, *kind)
                for name, kind in wanted.items()
            }
    except ValueError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _array(archive, info: zipfile.ZipInfo, name: str, kind: type, ndim: int) -> np.ndarray:
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        require(version == (1, 0), f"{name} is of version {version} of the format, not (1, 0)")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        require(
            np.issubdtype(dtype, kind) and len(shape) == ndim,
            f"{name} is {dtype} {list(shape)}, expected {kind.__name__} of {ndim} dimensions",
        )
        declared = file.tell() + math.prod(shape) * dtype.itemsize
        require(
            declared == info.file_size,
            f"{name} declares {declared:,} bytes, {info.file_size:,} are there",
        )
    with archive.open(info) as file:
        return np.lib.format.read_array(file, allow_pickle=False)
