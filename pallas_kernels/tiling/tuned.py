# SPDX-License-Identifier: Apache-2.0
"""The cache of tuned tilings: what `pallas-kernels tune` writes and the operations look up.

`switchx tune kernels` writes the same. It is a JSON file of the user, `$PALLAS_KERNELS_TILINGS`
or `pallas_kernels/tilings.json` in the user's cache folder. A file that does not exist holds
nothing. One that is damaged or of another format is an error that names it: otherwise tuning
would be lost silently.
Dims: R rows, D inputs, F outputs, E experts
"""

import dataclasses
import functools
import json
import os
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.implementations import current_device

VARIABLE = "PALLAS_KERNELS_TILINGS"
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Key:
    """The product and device that a tiling was tuned for; all fields have to agree.

    Attributes:
        device: the device's kind, such as `NVIDIA H200`.
        jax: major and minor version: another compiler makes other code from the same tiling.
        bits: bits of a quantized weight, or None.
        rows: R rounded up to a power of two.
    """

    device: str
    jax: str
    op: str
    implementation: str
    dtype: str
    bits: int | None
    group_size: int | None
    rows: int
    D: int
    F: int
    E: int

    @classmethod
    def of(cls, op: str, implementation: str, x_dtype, bits, group_size, R, D, F, E) -> "Key":
        """The key of operands of these sizes on the current device."""
        return cls(
            device=current_device().kind,
            jax=".".join(jax.__version__.split(".")[:2]),
            op=op,
            implementation=implementation,
            dtype=jnp.dtype(x_dtype).name,
            bits=bits,
            group_size=group_size,
            rows=bucket(R),
            D=D,
            F=F,
            E=E,
        )


def bucket(R: int) -> int:
    return 1 << max(0, R - 1).bit_length()


def user_file() -> pathlib.Path:
    """The file that holds the tilings tuned by this user."""
    if os.environ.get(VARIABLE):
        return pathlib.Path(os.environ[VARIABLE])
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "pallas_kernels" / "tilings.json"


def tuned_tiling(module, x_dtype, bits, group_size, R, D, F, E) -> Any:
    """The tuned tiling of `pallas_kernels.<op>.<implementation>`; see `lookup`."""
    _, op, implementation = module.__name__.split(".")
    key = Key.of(op, implementation, x_dtype, bits, group_size, R, D, F, E)
    return lookup(key, module.Tiling)


def lookup(key: Key, tiling_type: type) -> Any:
    """The tuned tiling, or None if there is none.

    Args:
        tiling_type: the dataclass of the implementation.

    Raises:
        ValueError: a file is damaged or of another format, or its tiling has fields that
            the implementation does not know.
    """
    fields = read(path := user_file()).get(key)
    if fields is None:
        return None
    known = {field.name for field in dataclasses.fields(tiling_type)}
    if unknown := set(fields) - known:
        raise ValueError(
            f"{path} has a tiling with {', '.join(sorted(unknown))} for {key.op} on "
            f"{key.device}; this version knows {', '.join(sorted(known))}: run `python -m "
            "pallas_kernels tune` again, or remove the file"
        )
    needed = {
        f.name for f in dataclasses.fields(tiling_type) if f.default is dataclasses.MISSING
    }
    if needed - set(fields) or not all(isinstance(each, int) for each in fields.values()):
        raise ValueError(
            f"{path} has the damaged tiling {fields} for {key.op} on {key.device}: run `python "
            "-m pallas_kernels tune` again, or remove the file"
        )
    return tiling_type(**fields)


def read(path: pathlib.Path) -> dict[Key, dict[str, int]]:
    """All entries of a file; none if it does not exist.

    Raises:
        ValueError: the file is damaged or has another format.
    """
    try:
        stamp = path.stat()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}); set {VARIABLE}") from error
    # Looked up in every call that is not compiled: read again only if it has changed.
    return _read(path, stamp.st_mtime_ns, stamp.st_size)


@functools.lru_cache(maxsize=16)
def _read(path: pathlib.Path, mtime_ns: int, size: int) -> dict[Key, dict[str, int]]:
    way_out = f"run `python -m pallas_kernels tune` after removing it, or set {VARIABLE}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, expected {FORMAT}")
        return {Key(**entry["key"]): dict(entry["tiling"]) for entry in content["entries"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} holds no tuned tilings ({error}); {way_out}") from error


def write(path: pathlib.Path, entries: dict[Key, Any]) -> None:
    """Adds tilings to a file, in place of those of the same keys.

    Raises:
        ValueError: the file exists and is damaged or of another format.
    """
    merged = read(path) | {key: dataclasses.asdict(tiling) for key, tiling in entries.items()}
    content = {
        "format": FORMAT,
        "entries": [
            {"key": dataclasses.asdict(key), "tiling": tiling} for key, tiling in merged.items()
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: another process may be reading.
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
    ) as file:
        json.dump(content, file, indent=1)
    os.replace(file.name, path)
