# SPDX-License-Identifier: Apache-2.0
"""Two processes that save together, resume, and copy; the second has the faults."""

import json
import os
import pathlib
import signal
import sys
import traceback
from unittest.mock import Mock

import jax
import numpy as np

from switchx.checkpoint import checkpointer as checkpointer_module
from switchx.checkpoint import parts
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.local_copies import LocalCopies
from switchx.checkpoint.run_folder import RunFolder
from switchx.distributed import connect, distributed
from tests.processes import child_environment, free_port, run_together
from tests.promises import saves
from tests.training.train_states import damage


def main(port: str, index: str, folder: str, what: str) -> None:
    """One of two processes; the second has the faults, but that of the manifest."""
    peers = connect(f"localhost:{port}", 2, int(index), {}, start_s=120, silence_s=20)
    try:
        with distributed(peers):
            run = {"save": _save, "resume": _resume, "copy": _copy}[what.split()[0]]
            print(json.dumps(run(folder, what)))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the ordinary way out would wait for the other process


def _save(folder: str, what: str) -> list[int]:
    state = saves.random_state()
    with Checkpointer(RunFolder(folder), Retention()) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        if what == "save no_manifest":
            if jax.process_index() == 0:
                no_space = OSError(28, os.strerror(28))
                checkpointer_module.write_manifest = Mock(side_effect=no_space)
        elif jax.process_index() == 1:
            _break(what)
        checkpointer.save(2, state)
        checkpointer.wait()
        return list(checkpointer.steps)


def _break(what: str) -> None:
    """From now on, this process cannot finish a save."""
    flush = parts.flush

    def broken(path: pathlib.Path) -> int:
        is_list = path.parent.name == parts.LISTS
        if what == "save full_disk" and not is_list:
            raise OSError(28, os.strerror(28), str(path))
        size = flush(path)
        if what == "save killed" and is_list:
            os.kill(os.getpid(), signal.SIGKILL)
        return size

    parts.flush = broken


def _resume(folder: str, what: str) -> int:
    state = saves.random_state()
    with Checkpointer(RunFolder(folder), Retention()) as checkpointer:
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        step, got, _ = checkpointer.resume(target)
    _assert_same_shards(state, got)
    return step


def _assert_same_shards(state, got) -> None:
    for want, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(got), strict=True):
        for a, b in zip(want.addressable_shards, leaf.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(a.data), np.asarray(b.data))


def _copy(folder: str, what: str) -> list:
    """Copies to a local disk, of which the second process loses one and has one damaged."""
    state, copies = saves.random_state(), LocalCopies(f"{folder}/local", RunFolder(folder))
    for step in (1, 2, 3):
        copies.save(step, state, {"process": jax.process_index()})
    copies.wait()
    newest = [copies.newest(state)]
    if jax.process_index() == 1:
        copies.forget(lambda step: step == 3)
    newest.append(copies.newest(state))
    got, data = copies.restore(2, state)
    _assert_same_shards(state, got)
    if jax.process_index() == 1:
        (arrays,) = pathlib.Path(folder).glob("local/*/process_1_of_2/2/arrays.bin")
        damage(arrays)
    try:
        copies.restore(2, state)
    except parts.DamagedCheckpoint as error:
        return [newest, data, error.fault]


def in_two(folder, what, cache) -> list[tuple[int, str]]:
    """Exit status and output of both."""
    code = f"from {__name__} import main; import sys; main(*sys.argv[1:])"
    port = str(free_port())
    commands = [[sys.executable, "-c", code, port, i, str(folder), what] for i in "01"]
    return run_together(commands, child_environment(cache, devices=2))
