# SPDX-License-Identifier: Apache-2.0
"""Damaged and half-written checkpoints: moved aside with a warning, never deleted.

Only the trainer about to write moves them, to `<step>.damaged-<n>`: Orbax deletes what is in
its way. Each warning says what all of them take, so that the disk does not fill in silence.
"""

import logging
import os
import pathlib

import orbax.checkpoint as ocp

logger = logging.getLogger(__name__)

UNFINISHED = ocp.path.atomicity.TMP_DIR_SUFFIX  # `<step>` + this, while it is being written
MIB = 1 << 20


def set_aside(path: pathlib.Path, damage: str) -> None:
    """Renames one checkpoint; `damage` says why, for the warning."""
    stem, number = path.name.removesuffix(UNFINISHED), 1
    while (target := path.with_name(f"{stem}.damaged-{number}")).exists():
        number += 1
    path.rename(target)
    logger.warning(
        "checkpoint %s is skipped: %s. It is kept as %s; all %s take %.1f MiB and are yours to "
        "delete",
        path,
        damage,
        target.name,
        path.with_name("*.damaged-*"),
        damaged_bytes(path.parent) / MIB,
    )


def set_aside_unfinished(checkpoints: pathlib.Path, step: int | None = None) -> None:
    """Renames what a save that was cut short left behind, of one step or of all."""
    for path in sorted(checkpoints.glob(f"{'*' if step is None else step}{UNFINISHED}")):
        set_aside(path, "its save did not finish")


def damaged_bytes(checkpoints: pathlib.Path) -> int:
    """Bytes of everything that was set aside."""
    return sum(os.lstat(path).st_size for path in checkpoints.glob("*.damaged-*/**/*"))
