# SPDX-License-Identifier: Apache-2.0
"""A job that goes on with fewer devices, for what must not change its losses."""

import dataclasses

import jax
import pytest

from switchx.checkpoint.run_folder import RunFolder
from switchx.compiled.elastic import job_for_devices
from switchx.hardware.spec import load_hardware
from switchx.training.loop import train
from tests.training.jobs import Events
from tests.training.saved_runs import losses_of

V5E = load_hardware("v5e")


def losses_on_fewer(job, folder) -> None:
    """Trains to step 2 on seven devices and on with two, to the losses of one."""
    whole, elastic = RunFolder(folder / "whole"), RunFolder(folder / "elastic")
    train(job, whole, Events(), devices=jax.devices()[:1])
    for count, steps in ((7, 2), (2, 4)):
        here = job_for_devices(job, V5E, jax.devices()[:count])
        part = dataclasses.replace(here.job, train_steps=steps)
        train(part, elastic, Events(), devices=here.devices)
    assert losses_of(elastic) == pytest.approx(losses_of(whole), rel=1e-5)
