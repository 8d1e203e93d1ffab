# SPDX-License-Identifier: Apache-2.0
"""`switchx` in a process that writes down every row that it reads.

`python -c 'from tests.integration.recorded_reads import main; main()' FOLDER train ...`:
`FOLDER/<process>/<n>.npz` is the n-th batch this process placed, with the numbers of its rows.
"""

import contextlib
import pathlib
import sys

import jax
import numpy as np
import pytest

from switchx.cli.main import main as switchx
from switchx.training.program import TrainingProgram

PROGRAM = f"from {__name__} import main; main()"


def main() -> None:
    folder, *words = sys.argv[1:]
    with recording(folder):
        sys.exit(switchx(words))


@contextlib.contextmanager
def recording(folder):
    place = TrainingProgram.place
    written = []

    def placed(self, batch):
        mine = pathlib.Path(folder, str(jax.process_index()))
        mine.mkdir(parents=True, exist_ok=True)
        rows = self.shard.rows(self.job.batch_size)
        np.savez(mine / f"{len(written)}.npz", row_B=np.array(rows), **batch)
        written.append(mine)
        return place(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingProgram, "place", placed)
        yield


def read(folder: pathlib.Path) -> dict[int, list[dict[str, np.ndarray]]]:
    """The batches of each process, in the order in which they were placed."""
    return {
        int(process.name): [
            dict(np.load(process / f"{n}.npz")) for n in range(len(list(process.iterdir())))
        ]
        for process in sorted(folder.iterdir())
    }
