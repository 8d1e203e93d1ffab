# SPDX-License-Identifier: Apache-2.0
"""Parts that do what a card may do: measure, hang, die, go on with what was left."""

import os
import signal
import subprocess
import sys
import time

from switchx.bench.accelerator.parts import Session, row


def measures(session: Session):
    """Two cases; those that were measured before are left out."""
    for case in ("one", "two"):
        if session.is_wanted(case):
            yield row(case, 1.0, "us")


def hangs(session: Session):
    """One case, then a child process that outlives it, as a deadlock of a kernel would."""
    yield row("before", 2.0, "us")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)


def ends_its_parent(session: Session):
    """One case, then the command is told to end, as by a scheduler of machines."""
    yield row("before", 2.0, "us")
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)


def dies(session: Session):
    """One case, then the process is gone, as after an illegal access."""
    yield row("before", 3.0, "us")
    print("an illegal memory access", file=sys.stderr, flush=True)
    os._exit(134)
