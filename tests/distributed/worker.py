# SPDX-License-Identifier: Apache-2.0
"""One of several processes that add numbers until something happens to one of them.

`python -m tests.distributed.worker PORT COUNT INDEX SILENCE_S EVENT`; the last process, or with
`first_` before the event process 0, is killed, frozen, or fails; `late` is one that comes to
the first sum after a minute; `finish` is an orderly end, of the last one later.
"""

import os
import signal
import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from switchx.distributed import connect, distributed
from switchx.partitioning.collectives import connect_processes
from switchx.partitioning.mesh import MeshSpec

SECONDS = 3.0  # of adding, before it happens


def main(port: str, count: str, index: str, silence: str, event: str) -> None:
    where = (f"localhost:{port}", int(count), int(index))
    peers = connect(*where, {}, start_s=120, silence_s=int(silence))
    try:
        with distributed(peers):
            _work(int(count), int(index), event)
    except BaseException as error:
        print(f"raised: {error}", flush=True)
        os._exit(3)
    print("finished", flush=True)


def _work(count: int, index: int, event: str) -> None:
    mesh = MeshSpec().build()
    connect_processes(mesh)
    number = jax.make_array_from_callback(
        (mesh.size,),
        NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
        lambda _: np.ones(1, np.float32),
    )
    add, began = jax.jit(lambda x: x.sum()), time.monotonic()
    it_is_this_one = index == (0 if event.startswith("first_") else count - 1)
    if event == "late" and it_is_this_one:
        time.sleep(60)
    for _ in range(10 if event in ("late", "finish") else 10**9):
        assert float(add(number)) == count
        if it_is_this_one and time.monotonic() - began > SECONDS:
            _happen(event.removeprefix("first_"))
    if it_is_this_one:
        time.sleep(3)


def _happen(event: str) -> None:
    if event == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if event == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if event == "fails":
        raise OSError("no space left on device")


if __name__ == "__main__":
    main(*sys.argv[1:])
