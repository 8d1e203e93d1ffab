# SPDX-License-Identifier: Apache-2.0
"""The files on the way of a run and of a step, traced: those of the call stack at some moments.

`docs/architecture.md` lists them. A moment is a function that is called; the files are those of
the frames from the command's `main`, or from `train_step`, to that function, ours alone.
"""

import contextlib
import functools
import inspect
import pathlib
import sys
from collections.abc import Iterator

import pytest

from switchx.checkpoint.checkpointer import Checkpointer
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.features import EncoderDecoderFeatures
from switchx.data.objectives import SpanCorruption
from switchx.moe import dispatchers
from switchx.moe.layer import RoutedLayer
from switchx.training import losses, program, step
from switchx.training.job import TrainingJob
from switchx.training.program import TrainingProgram
from tests.processes import ROOT

# What happens -> the function that is called then: where it is looked up, and its name.
RUN = {
    "the job is built": (TrainingJob, "__post_init__"),
    "the run folder is opened": (RunFolder, "create"),
    "the program is made": (TrainingProgram, "__init__"),
    "an example is made": (SpanCorruption, "example"),
    "a batch is made": (EncoderDecoderFeatures, "batch"),
    "the step is called": (program, "train_step"),
    "the evaluation is called": (program, "eval_step"),
    "a checkpoint is saved": (Checkpointer, "save"),
}
STEP = {
    "the loss": (losses, "loss_terms"),
    "the gradient": (step, "gradients"),
    "the update": (step, "take_step"),
    "the route of a Switch layer": (RoutedLayer, "route"),
    "its dispatch": (dispatchers.FUNCTIONS, "gather"),
}


@contextlib.contextmanager
def traced() -> Iterator[dict[str, set[str]]]:
    """Within, commands are traced: moment -> files of its stacks, relative to the checkout."""
    begin = step.train_step.__code__
    files = {moment: set() for moment in (*RUN, *STEP)}

    def noted(moment: str, function):
        own = inspect.getsourcefile(function)

        @functools.wraps(function)
        def call(*arguments, **options):
            frames, frame = [], sys._getframe(1)
            while frame is not None:
                frames.append(frame.f_code)
                frame = frame.f_back
            if moment in RUN or begin in frames:  # not of evaluation
                kept = frames if moment in RUN else frames[: frames.index(begin) + 1]
                paths = {pathlib.Path(p) for p in (own, *(code.co_filename for code in kept))}
                ours = (ROOT / "switchx", ROOT / "pallas_kernels")
                files[moment] |= {
                    path.relative_to(ROOT).as_posix()
                    for path in paths
                    if any(path.is_relative_to(folder) for folder in ours)
                }
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for moment, (owner, name) in (RUN | STEP).items():
            if isinstance(owner, dict):
                patch.setitem(owner, name, noted(moment, owner[name]))
            else:
                patch.setattr(owner, name, noted(moment, getattr(owner, name)))
        yield files
