# SPDX-License-Identifier: Apache-2.0
"""Folders that are written whole or not at all, and know every byte that is in them.

A manifest, JSON, has what its writer says, size and SHA-256 of every other file, and a
checksum of itself. It is written last into a folder that is then renamed.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from typing import Any

_CHUNK_BYTES = 1 << 24


def require_free(folder: str | os.PathLike) -> pathlib.Path:
    """Where a folder is to be written: nothing, or an empty folder.

    Raises:
        ValueError: something is there, or no folder can be made there.
    """
    path = pathlib.Path(folder).expanduser().absolute()
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty; give a folder that is not there yet")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; give a folder that is not there yet")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be made: {error}; give another folder") from error
    return path


def write_checked(
    folder: str | os.PathLike,
    manifest: str,
    content: dict[str, Any],
    write_files: Callable[[pathlib.Path], None],
) -> int:
    """Writes a folder and its manifest.

    Args:
        manifest: its file name.
        content: JSON; `files` and `sha256` are added.
        write_files: called with the folder before it gets its name.

    Returns:
        Bytes of all files.

    Raises:
        ValueError: see `require_free`.
    """
    path = require_free(folder)
    with _renamed_to(path) as partial:
        write_files(partial)
        files = {
            file.name: [file.stat().st_size, sha256_of_file(file, flush=True)]
            for file in sorted(partial.iterdir())
        }
        content = content | {"files": files}
        text = json.dumps(content | {"sha256": sha256_of(content)}, indent=1) + "\n"
        with (partial / manifest).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    return len(text.encode()) + sum(size for size, _ in files.values())


def check_file(
    path: pathlib.Path, manifest: str, name: str, size: int, sha256: str, *, again: str
) -> None:
    """Raises ValueError where a file is not as the manifest says.

    Args:
        again: what to do then.
    """
    file = path / name
    if file.parent != path or name in ("", ".", ".."):
        raise ValueError(f"{path / manifest} names the file {name!r}, which is not in {path}")
    if not file.is_file():
        raise ValueError(f"{file} is missing; {again}")
    if file.stat().st_size != size:
        raise ValueError(f"{file} has {file.stat().st_size} bytes, not {size}; {again}")
    if sha256_of_file(file) != sha256:
        raise ValueError(f"{file} has changed since it was written; {again}")


def sha256_of_file(path: pathlib.Path, *, flush: bool = False) -> str:
    """Hex; with `flush`, the file is on the disk then."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        if flush:
            os.fsync(file.fileno())
    return digest.hexdigest()


def sha256_of(content: dict) -> str:
    """Hex, of a manifest without its checksum."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _renamed_to(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder beside `path` that gets its name at the end, and is removed on an error."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        yield partial
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
