# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: size and checksum of every file, the proof that it is whole.

It is written last, into the folder that Orbax then renames to its final name, so a folder
without one is half-written whatever else it holds. CRC-32 finds every flipped byte, costs
far less than the disk (zlib: 1 to 7 GB/s on one core) and is no defence against intent.
"""

import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Iterator

NAME = "manifest.json"
# Orbax changes these after the manifest is written; nothing is read from them.
_COMMIT_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")
_CHUNK_BYTES = 1 << 24


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
