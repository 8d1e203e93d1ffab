# SPDX-License-Identifier: Apache-2.0
"""A folder that is there whole or not at all."""

import contextlib
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator


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
