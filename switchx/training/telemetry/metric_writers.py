# SPDX-License-Identifier: Apache-2.0
"""Writers of metrics besides the run folder: Weights & Biases, or a user's own function.

`TrainingJob.metric_writers` lists them: functions `(step, metrics) -> None` that a module
defines, and `WeightsAndBiases`. They get what TensorBoard gets, numbers by flat names, with
`train/` or `validation/` before each; only process 0 calls them. An error that a writer raises
ends training, as a disk error would.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from switchx.checkpoint.run_folder import RunFolder
from switchx.fields import check_choices, require, without_gin
from switchx.files import write_atomically
from switchx.training.telemetry.metrics import flat_scalars

Write = Callable[[int, dict[str, float]], None]


@dataclasses.dataclass(frozen=True)
class WeightsAndBiases:
    """A run of Weights & Biases, which a resumed run continues.

    Attributes:
        project, entity, name: arguments of `wandb.init`; None takes its defaults.
        mode: mode of `wandb.init`; "offline" writes into the run folder, for `wandb sync`.
    """

    project: str
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline", "disabled"] = "online"

    def __post_init__(self):
        check_choices(self)

    @staticmethod
    def module():
        """The package, imported only here.

        Raises:
            ValueError: the package is not installed.
        """
        try:
            return importlib.import_module("wandb")
        except ImportError as error:
            raise ValueError(
                "TrainingJob.metric_writers has WeightsAndBiases, and wandb cannot be imported "
                f"({error}); install it with `pip install 'switchx[wandb]'`, or leave the "
                "writer out"
            ) from error

    @contextlib.contextmanager
    def opened(self, run: RunFolder, config: Mapping[str, Any]) -> Iterator[Write]:
        """The function that writes; the run of Weights & Biases ends with the context."""
        wandb, known = self.module(), run.wandb_run.is_file()
        remote = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.name,
            mode=self.mode,
            dir=str(run.root),
            config=dict(config),
            id=run.wandb_run.read_text().strip() if known else None,
            resume="allow",
        )
        write_atomically(run.wandb_run, f"{remote.id}\n".encode())
        try:
            yield lambda step, metrics: remote.log(metrics, step=step)
        finally:
            remote.finish()


Writer = WeightsAndBiases | Write


def checked_writers(writers: Sequence[Writer]) -> tuple[Writer, ...]:
    """The writers as a job keeps them.

    Raises:
        ValueError: a writer is neither callable nor a known description.
    """
    plain = tuple(map(without_gin, writers))
    for writer in plain:
        require(
            isinstance(writer, WeightsAndBiases) or callable(writer),
            f"TrainingJob.metric_writers: {writer!r} cannot be called; use functions (step, "
            "metrics) of a module, or WeightsAndBiases",
        )
    return plain


def require_writers(writers: Sequence[Writer]) -> None:
    """Checks what is known before a run begins: that packages can be imported.

    Raises:
        ValueError: a package cannot be imported.
    """
    for writer in writers:
        if isinstance(writer, WeightsAndBiases) and jax.process_index() == 0:
            writer.module()


@contextlib.contextmanager
def opened_writers(
    writers: Sequence[Writer], run: RunFolder, config: Mapping[str, Any]
) -> Iterator[Callable[[str, int, dict[str, Any]], None]]:
    """A function `(kind, step, metrics)` that passes flat numbers to all writers.

    Args:
        config: the job's settings, flat: value by dotted name.
    """
    with contextlib.ExitStack() as stack:
        writes: list[Write] = []
        for writer in writers if jax.process_index() == 0 else ():
            is_remote = isinstance(writer, WeightsAndBiases)
            opened = stack.enter_context(writer.opened(run, config)) if is_remote else writer
            writes.append(opened)

        def write_all(kind: str, step: int, metrics: dict[str, Any]) -> None:
            flat = flat_scalars(metrics, f"{kind}/") if writes else {}
            for write in writes:
                write(step, dict(flat))

        yield write_all
