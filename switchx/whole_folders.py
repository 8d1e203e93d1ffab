# SPDX-License-Identifier: Apache-2.0
"""Folders that are written whole or not at all, and account for every byte in them.

A manifest is JSON: its writer's content, size and checksum of every other file under `files`,
and a checksum of itself. It is written last, into a folder that is then renamed, so a folder
without one is half-written whatever else it holds. Checkpoints use CRC-32, which finds every
flipped byte and costs far less than the disk (zlib: 1 to 7 GB/s on one core); folders to be
passed on use SHA-256, whose value is also their fingerprint. Neither proves who wrote them:
whoever changes a file can write a manifest that fits it, so readers check its content, too. A
folder's description of its origin has the commit of the code that wrote it.
"""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import subprocess
import zlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from switchx.object_store import (
    IS_LFS_POINTER,
    Folder,
    files_in,
    is_address,
    is_lfs_pointer,
    read_json_object,
)

Checksum = Literal["crc32", "sha256"]


def write_manifest(
    folder: Folder,
    name: str,
    content: dict[str, Any],
    checksum: Checksum,
    *,
    left_out: tuple[str, ...] = (),
    known: Mapping[str, list] = MappingProxyType({}),
) -> dict[str, Any]:
    """Records all files in a folder; each of them and the manifest are flushed to the disk.

    In a store (object_store.py) all files must be `known` or `left_out`.

    Args:
        name: name of the manifest.
        content: JSON object; `files` and the manifest's own checksum are added.
        left_out: names directly in the folder that are changed later; they are not read.
        known: size and checksum of files that are already on the disk; they are not read.

    Returns:
        The content of the manifest, without its own checksum.
    """
    files = {
        name: known.get(name) or [num_bytes, _of_file(folder / name, checksum, True)]
        for name, num_bytes in sorted(files_in(folder).items())
        if name not in left_out
    }
    content = content | {"files": files}
    if is_address(folder):  # where a file exists only when whole
        text = json.dumps(content | {checksum: checksum_of(content, checksum)}, indent=1)
        (folder / name).write_text(text)
        return content
    partial = folder / f"{name}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content | {checksum: checksum_of(content, checksum)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / name)
    return content


def read_manifest(folder: Folder, name: str, checksum: Checksum) -> dict[str, Any]:
    """The content of a manifest, including its own checksum.

    Raises:
        ValueError: the manifest is missing or damaged; the message is a clause with "it".
    """
    try:
        content = read_json_object(folder / name)
        claimed = content.pop(checksum)
        if claimed != checksum_of(content, checksum) or not isinstance(content["files"], dict):
            raise ValueError("checksum")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"it has no {name}, so it was not written to its end") from None
    except (ValueError, KeyError):
        is_pointer = is_lfs_pointer(folder / name)
        fault = IS_LFS_POINTER if is_pointer else "is damaged"
        raise ValueError(f"its {name} {fault}") from None
    return content | {checksum: claimed}


def is_damage(error: OSError) -> bool:
    """Whether a reading error tells something about the stored data; too many open files, a
    refused login or an unreachable server do not."""
    of_files = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
    return isinstance(error, FileNotFoundError) or error.errno in of_files


def damages(
    folder: Folder,
    files: dict[str, list],
    checksum: Checksum | None,
    *,
    must_be_read: bool = False,
) -> Iterator[str]:
    """Yields everything that is wrong with a folder's files, a clause each.

    Args:
        files: files of the manifest, by name.
        checksum: kind of the checksums; None compares only names and sizes, and reads no file.
            A file whose checksum is None is not read either.
        must_be_read: whether a reading error that is not damage is raised.

    Raises:
        OSError: it cannot be read now, for a reason that is not damage (`is_damage`).
    """
    try:
        found = files_in(folder)
    except OSError as error:
        if must_be_read and not is_damage(error):
            raise
        yield f"it cannot be read ({error})"
        return
    for name, entry in files.items():
        is_pair = isinstance(entry, list | tuple) and len(entry) == 2
        if not is_pair or type(entry[0]) is not int:
            yield f"its manifest has no size and checksum of {name!r:.80}"
            continue
        num_bytes, expected = entry
        path = folder / name
        try:
            if not is_address(folder) and not path.resolve().is_relative_to(folder.resolve()):
                yield f"its manifest names {name!r}, which is outside of it"
            elif name not in found:
                yield f"its file {name} is missing"
            elif found[name] != num_bytes:
                pointer = ", a pointer of Git LFS: run `git lfs pull`"
                pointer = pointer if is_lfs_pointer(path) else ""
                yield f"its file {name} has {found[name]} bytes, not {num_bytes}{pointer}"
            elif None not in (checksum, expected) and _of_file(path, checksum) != expected:
                yield f"its file {name} has changed since it was written"
        except OSError as error:
            if must_be_read and not is_damage(error):
                raise
            yield f"it cannot be read ({error})"


def num_bytes(folder: Folder) -> int:
    """The bytes of all files in a folder."""
    return sum(files_in(folder).values())


def require_free(folder: str | os.PathLike) -> pathlib.Path:
    """The path of a folder to be written, which does not exist or is empty.

    Raises:
        ValueError: something is already there, or no folder can be made there.
    """
    if is_address(folder):
        raise ValueError(
            f"{folder} is in a store, where a folder cannot get its name when it is whole; "
            "give a folder, and copy that"
        )
    path = pathlib.Path(folder).expanduser().absolute()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} exists; give a folder that does not exist or is empty")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be made ({error.strerror}: {error.filename}); give a folder that "
            "this user may write"
        ) from error
    return path


@contextlib.contextmanager
def new_folder(folder: str | os.PathLike) -> Iterator[pathlib.Path]:
    """A folder to write into, which gets its name when all is written, or else is deleted.

    Raises:
        ValueError: see `require_free`.
    """
    path = require_free(folder)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir()
    except OSError as error:
        raise ValueError(f"{path} cannot be made ({error}); give another folder") from error
    try:
        yield partial
        partial.rename(path)  # also onto an empty folder
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def checksum_of(content: dict[str, Any], checksum: Checksum) -> int | str:
    """The checksum of a manifest's content, which excludes the checksum itself."""
    text = json.dumps(content, sort_keys=True).encode()
    return zlib.crc32(text) if checksum == "crc32" else hashlib.sha256(text).hexdigest()


def give_mode_of_umask(path: pathlib.Path) -> None:
    """Gives a file the mode of a newly made one, as safetensors makes files that only their
    owner can read."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.mode")
    new.touch()  # reading the umask would mean setting it, for all threads
    path.chmod(new.stat().st_mode)
    new.unlink()


def flush(path: Folder) -> int:
    """Waits until a file is on the disk, without reading it; returns its size in bytes."""
    if is_address(path):
        return path.stat().length
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _of_file(path: Folder, checksum: Checksum, flush: bool = False) -> int | str:
    """The checksum of a file; with `flush`, the file is first flushed to the disk."""
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        if checksum == "sha256":
            return hashlib.file_digest(file, "sha256").hexdigest()
        crc32 = 0
        while chunk := file.read(1 << 24):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def git_commit() -> str:
    """The commit of the checkout that this code runs from, or `unknown` outside one.

    An installed copy may lie in another repository, whose commit says nothing about it:
    git's answer counts only where it tracks this file.
    """
    here = pathlib.Path(__file__)
    git = ["git", "-C", str(here.parent)]
    is_tracked = [*git, "ls-files", "--error-unmatch", here.name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        for command in (is_tracked, describe):
            process = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return process.stdout.strip()


def code_digest() -> str:
    """SHA-256 of our Python files, which also covers copies with no commit or with changes."""
    digest, here = hashlib.sha256(), pathlib.Path(__file__).parent
    for folder in (here, here.with_name("pallas_kernels")):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(here.parent)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
