# SPDX-License-Identifier: Apache-2.0
"""A profile of some steps of training: a `jax.profiler` trace in the run folder.

The steps are marked with `StepTraceAnnotation`, so that TensorBoard's profile plugin and
XProf show times by step. Only process 0 writes a trace.
"""

import dataclasses
import pathlib
from collections.abc import Callable

import jax

from switchx.fields import require


@dataclasses.dataclass(frozen=True)
class ProfiledSteps:
    """The steps after step `start`, until step `end` is taken: `end - start` of them.

    Raises:
        ValueError: there are none.
    """

    start: int
    end: int

    def __post_init__(self):
        require(
            0 <= self.start < self.end,
            f"profile={self}: no step is after {self.start} and until {self.end}; use a START "
            "of at least 0 and a larger END, as 10:20 for the ten steps after step 10",
        )

    def __str__(self):
        return f"{self.start}:{self.end}"

    def require_within(self, train_steps: int) -> None:
        """Checks that the run has these steps.

        Raises:
            ValueError: the run ends before.
        """
        require(
            self.end <= train_steps,
            f"profile={self} is past the end of a run of {train_steps} steps; use an END of "
            f"at most {train_steps}, or more TRAIN_STEPS",
        )


class StepProfiler:
    """Traces the profiled steps, and marks every step.

    Attributes:
        note: sentence for the user before the first step; None for nothing.
    """

    def __init__(self, steps: ProfiledSteps | None, step: int, folder: pathlib.Path):
        """Traces nothing yet.

        Args:
            step: the last step that was taken before. If a run resumes within the profiled
                steps, as under a launcher, the remaining ones are traced; `note` says so.
            folder: folder below which traces are written.
        """
        self._steps, self._folder = steps, folder
        self._is_tracing = False
        self.note = None
        if steps is not None and steps.end <= step:
            self.note = f"nothing is profiled: profile={steps}, and step {step} is taken"
            self._steps = None
        elif steps is not None and steps.start < step:
            self._steps = ProfiledSteps(step, steps.end)
            self.note = f"profiling {self._steps} of profile={steps}: step {step} is taken"
        if jax.process_index() > 0:
            self._steps = None

    @staticmethod
    def marked(step: int) -> jax.profiler.StepTraceAnnotation:
        """The context in which step number `step` is dispatched."""
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def before(self, step: int, settle: Callable[[], None]) -> None:
        """Starts the trace if `step` is the first profiled one.

        Args:
            settle: function that waits until the devices have nothing to do.
        """
        if self._steps is not None and step == self._steps.start + 1:
            settle()
            jax.profiler.start_trace(self._folder)
            self._is_tracing = True

    def ends_after(self, step: int) -> bool:
        """Whether `step` is the last profiled one: call `stop` when it has ended."""
        return self._is_tracing and step == self._steps.end

    def stop(self) -> None:
        """Writes the trace, if there is one."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
