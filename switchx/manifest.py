# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: size and checksum of every file, the proof that it is whole.

It is written last, into the folder that Orbax then renames to its final name, so a folder
without one is half-written whatever else it holds. CRC-32 finds every flipped byte, costs
far less than the disk (zlib: 1 to 7 GB/s on one core) and is no defence against intent.

Folders that are written whole or not at all, and know every byte that is in them.

A manifest, JSON, has what its writer says, size and SHA-256 of every other file, and a
checksum of itself. It is written last into a folder that is then renamed.

A folder that is there whole or not at all.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from typing import Any

NAME = "manifest.json"
# Orbax changes these after the manifest is written; nothing is read from them.
_COMMIT_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: steps trained.
        score: what keep-best compares, higher is better; None without an evaluation.
        metrics: the evaluation's numbers.
        files: path below the checkpoint -> [bytes, CRC-32].
    """

    step: int
    score: float | None
    metrics: dict[str, float]
    files: dict[str, list[int]]


def write_manifest(
    folder: pathlib.Path, step: int, score: float | None, metrics: dict[str, float]
) -> None:
    """Records all files in `folder`, each of them and the manifest flushed to the disk."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        str(path.relative_to(folder)): [path.stat().st_size, _crc32(path, flush=True)]
        for path in paths
        if path.parent != folder or path.name not in _COMMIT_FILES
    }
    content = dataclasses.asdict(Manifest(step, score, metrics, files))
    partial = folder / f"{NAME}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content | {"crc32": _content_crc32(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / NAME)


def read_manifest(folder: pathlib.Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises:
        ValueError: it is missing, damaged, or of another step; says which.
    """
    try:
        content = json.loads((folder / NAME).read_bytes())
        if content.pop("crc32") != _content_crc32(content):
            raise ValueError("checksum")
        manifest = Manifest(**content)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"it has no {NAME}, so its save did not finish") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"its {NAME} is damaged") from None
    if str(manifest.step) != folder.name:
        raise ValueError(f"its {NAME} is of step {manifest.step}")
    return manifest


def find_damage(folder: pathlib.Path, *, checksums: bool) -> str | None:
    """The first thing wrong with a checkpoint, or None when it is whole.

    Args:
        checksums: read every byte; otherwise only that files are there in their sizes.
    """
    return next(damages(folder, checksums=checksums), None)


def damages(folder: pathlib.Path, *, checksums: bool) -> Iterator[str]:
    """All that is wrong with the files of a checkpoint, file by file."""
    try:
        files = read_manifest(folder).files
    except ValueError as error:
        yield str(error)
        return
    except OSError as error:
        yield f"it cannot be read ({error})"
        return
    for name, (num_bytes, crc32) in files.items():
        path = folder / name
        try:
            if not path.is_file():
                yield f"its file {name} is missing"
            elif path.stat().st_size != num_bytes:
                yield f"its file {name} has {path.stat().st_size} bytes, not {num_bytes}"
            elif checksums and _crc32(path) != crc32:
                yield f"its file {name} has changed since it was written"
        except OSError as error:
            yield f"it cannot be read ({error})"


def _crc32(path: pathlib.Path, *, flush: bool = False) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
        if flush:
            os.fsync(file.fileno())
    return checksum


def _content_crc32(content: dict) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


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


@contextlib.contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """A folder to write into, which gets its name when all is written, or goes.

    Raises:
        ValueError: there is something at `path` already, or its place cannot be written.
    """
    final = pathlib.Path(path).expanduser().absolute()
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise ValueError(f"{final} exists; give a folder that is not there yet")
    partial = final.with_name(f".{final.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"{final} cannot be made ({error.strerror}: {error.filename}); give a folder that "
            "this user may write"
        ) from error
    try:
        yield partial
        partial.rename(final)  # onto an empty folder, too
    finally:
        shutil.rmtree(partial, ignore_errors=True)
