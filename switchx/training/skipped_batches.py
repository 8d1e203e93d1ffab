# SPDX-License-Identifier: Apache-2.0
"""Batches whose loss or gradient was not finite: who they were, kept to be looked at."""

import json
import pathlib

import jax
import numpy as np

from switchx.data.features import Batch, batch_digest
from switchx.training.step import StepMetrics


class SkippedBatches:
    """The batches of steps that were not taken.

    `<step>.<process>.npz` in the folder is the batch, `.json` its identity and the numbers
    that were not finite.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._identities: list[dict] = []

    def keep(self, step: int, batch: Batch, metrics: StepMetrics) -> str:
        """Writes one into the folder; returns a sentence for the log.

        Args:
            metrics: of the step, on the host.
        """
        identity = {
            "step": step,
            "batch": batch_digest(batch),
            "loss": repr(float(metrics.loss)),
            "grad_norm": repr(float(metrics.grad_norm)),
        }
        self._identities.append(identity)
        self._folder.mkdir(exist_ok=True)
        name = f"{step}.{jax.process_index()}"
        (self._folder / f"{name}.json").write_text(json.dumps(identity) + "\n")
        np.savez_compressed(self._folder / f"{name}.npz", **batch)
        return (
            f"step {step} is skipped: loss {identity['loss']}, gradient norm "
            f"{identity['grad_norm']}, batch {identity['batch']}; no parameter changed"
        )

    def last(self, num: int) -> str:
        """The last `num` in words: `batches 7: 0a1b2c..., 8: ..., kept in FOLDER`."""
        batches = ", ".join(
            f"{each['step']}: {each['batch']}" for each in self._identities[-num:]
        )
        return f"batches {batches}, kept in {self._folder}"
