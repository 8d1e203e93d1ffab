# SPDX-License-Identifier: Apache-2.0
"""The data folder: the one the user names, `SWITCHX_DATA_DIR`, the cache, in this order."""

import os
from pathlib import Path

ENVIRONMENT_VARIABLE = "SWITCHX_DATA_DIR"


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/switchx`, by default `~/.cache/switchx`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "switchx"


def data_dirs(data_dir: str | None) -> list[Path]:
    """Folders to search, in order of preference; the cache always comes last.

    Raises:
        ValueError: `data_dir` or the environment variable names a file or a remote address.
    """
    named = {"data_dir": data_dir, ENVIRONMENT_VARIABLE: os.environ.get(ENVIRONMENT_VARIABLE)}
    folders = []
    for origin, name in named.items():
        if not name:
            continue
        if "://" in name:
            raise ValueError(
                f"{origin}={name!r} is a remote address and this corpus is prepared in a local "
                "folder; name a folder on this machine"
            )
        folder = Path(name).expanduser()
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{origin}={name!r} is a file; name a folder")
        folders.append(folder)
    return list(dict.fromkeys([*folders, cache_dir()]))


def local_or_none(data_dir: str | None) -> str | None:
    """The folder itself; None for a remote address, from which data are read and not prepared.

    What is prepared from remote data goes where `SWITCHX_DATA_DIR` says, or into the cache.
    """
    return None if data_dir is not None and "://" in data_dir else data_dir


def writable_dir(data_dir: str | None) -> Path:
    """The first of `data_dirs` that can be written; created if it does not exist.

    Raises:
        ValueError: none can be written.
    """
    folders = data_dirs(data_dir)
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise ValueError(
        f"no folder for prepared data can be written: {', '.join(map(str, folders))}; "
        f"set DATA_DIR or {ENVIRONMENT_VARIABLE} to one that can"
    )


def find_or_place(relative: str, data_dir: str | None) -> Path:
    """Path of `relative` where it exists, otherwise where it should be written."""
    for folder in data_dirs(data_dir):
        if (folder / relative).exists():
            return folder / relative
    return writable_dir(data_dir) / relative
