# SPDX-License-Identifier: Apache-2.0
"""Steps, tokens and model FLOPs per second, over the steps since the last logged one."""

import time
from typing import Any

import jax
import numpy as np

from switchx.models.flops import train_flops
from switchx.moe.load_evenness import max_violation
from switchx.training.job import TrainingJob
from switchx.training.step import StepMetrics
from switchx.training.telemetry.metrics import rms_metrics, routing_metrics, token_metrics


class Stopwatch:
    """Seconds of training, without evaluations and saves."""

    def __init__(self):
        self.seconds = 0.0
        self._since = None

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        self.seconds, self._since = self.read(), None

    def read(self) -> float:
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self.seconds + running


class Interval:
    """Adds up the steps since the last logged one."""

    def __init__(self, seconds: float):
        self._start_s = seconds
        self._steps = self._input_tokens = self._examples = self._skipped = 0
        self._losses = []
        self._grad_norms = []
        self._violations = []
        self._sums = self._routing = None
        self._rms = {}

    def add(self, metrics: StepMetrics, input_tokens: int, examples: int) -> None:
        """Adds one step.

        Args:
            metrics: metrics of the step, on the host.
            input_tokens: real tokens the model read, encoder and decoder together.
            examples: packed examples in the batch.
        """
        self._steps += 1
        self._input_tokens += input_tokens
        self._examples += examples
        self._skipped += int(metrics.is_skipped)
        if metrics.is_skipped:
            return  # its sums are not finite
        self._losses.append(float(metrics.loss))
        self._grad_norms.append(float(metrics.grad_norm))
        self._rms = metrics.rms
        if (routing := metrics.routing) is not None:
            load_NE = np.asarray(routing.load_E)
            self._violations.append(max_violation(load_NE, routing.num_tasks))
        added = (metrics.sums, metrics.routing)
        if self._sums is not None:
            added = jax.tree.map(np.add, (self._sums, self._routing), added)
        self._sums, self._routing = added

    def metrics(self, seconds: float, flops_per_step: float | None) -> dict[str, Any]:
        """Means over the interval's good steps, and rates over its time.

        `token_loss` is the tokens' part of `loss`: cross-entropy with label smoothing and
        z-loss, for a student mixed with the soft loss. The rest is the routers'.

        Args:
            flops_per_step: FLOPs from `counted_flops`; with None, no rate of them is given.
        """
        elapsed_s = max(seconds - self._start_s, 1e-9)
        good_steps = len(self._losses)
        metrics = {
            "loss": float(np.mean(self._losses)) if good_steps else float("nan"),
            "grad_norm": float(np.mean(self._grad_norms)) if good_steps else float("nan"),
            "skipped_steps": self._skipped,
            "steps_per_s": self._steps / elapsed_s,
            "tokens_per_s": self._input_tokens / elapsed_s,
            "examples_per_s": self._examples / elapsed_s,
        }
        if flops_per_step is not None:
            metrics["model_flops_per_s"] = flops_per_step * self._steps / elapsed_s
        if good_steps:
            violation_N = np.mean(self._violations, axis=0) if self._violations else None
            metrics |= token_metrics(self._sums)
            tokens = max(metrics["target_tokens"], 1.0)
            metrics["token_loss"] = float(self._sums.loss) / tokens
            metrics |= routing_metrics(self._routing, violation_N) | rms_metrics(self._rms)
        return metrics


def counted_flops(job: TrainingJob) -> float | None:
    """FLOPs of a step of the job's model; None if they are not counted: for a user's own
    modules, and if some weights have no gradients."""
    has_frozen = 0.0 in (factor for _, factor in job.step.rate_multipliers)
    if job.model.build is not None or job.lora is not None or has_frozen:
        return None
    return train_flops(job.model, *job.sequence_lengths) * job.batch_size
