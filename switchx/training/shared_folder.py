# SPDX-License-Identifier: Apache-2.0
"""Whether all processes of a run see one folder; on local disks a checkpoint is in pieces."""

import os
import socket
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from switchx.training.run_folder import RunFolder

# Network file systems show a new file to other machines after some seconds.
PATIENCE_S = 60.0


def require_shared(run: RunFolder, patience_s: float = PATIENCE_S) -> None:
    """Checks that what process 0 writes into the run folder is there for all.

    Raises:
        ValueError: it is not; names the processes.
    """
    if jax.process_count() == 1:
        return
    nonce = int(multihost_utils.broadcast_one_to_all(np.int32(os.getpid())))
    token = run.root / f".seen_by_all_{nonce}"
    is_first = jax.process_index() == 0
    if is_first:
        token.write_text(socket.gethostname())
    multihost_utils.sync_global_devices("switchx_token_written")
    deadline = time.monotonic() + patience_s
    while not (is_seen := token.exists()) and time.monotonic() < deadline:
        os.listdir(run.root)  # NFS looks again
        time.sleep(0.2)
    seen = multihost_utils.process_allgather(np.array(is_seen))
    if is_first:
        token.unlink(missing_ok=True)
    if blind := np.flatnonzero(~seen).tolist():
        raise ValueError(
            f"model_dir={str(run.path)!r} is not one folder for all processes: process "
            f"{', '.join(map(str, blind))} does not see what process 0 writes there; give a "
            "folder on a file system that all machines share"
        )
