# SPDX-License-Identifier: Apache-2.0
"""Losses across meshes: sliced experts have one device's, a fault is seen, cells are many."""

import numpy as np
import pytest

from switchx.bench import loss_parity


@pytest.mark.slow
def test_sliced_experts_have_one_devices_losses():
    case = next(case for case in loss_parity.CASES if case.dispatcher == "sliced")
    rows = loss_parity.measured_rows((case,), num_steps=4)
    check = loss_parity.check(rows)
    assert check.holds and check.value < 1e-5
    assert rows[-1]["last_loss"] != rows[-1]["first_loss"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_mesh():
    assert loss_parity.check(loss_parity.measured_rows(num_steps=10)).holds


def test_another_loss_does_not_pass():
    one = np.array([3.0, 2.0])
    rows = [loss_parity._row(loss_parity.ONE_DEVICE, found, one) for found in (one, one * 1.01)]
    assert not loss_parity.check(rows).holds


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_loss_that_is_no_number_does_not_pass(place):
    one, broken = np.array([3.0, 2.0]), np.array([3.0, np.nan])
    rows = [
        loss_parity._row(loss_parity.ONE_DEVICE, broken if i == place else one, one)
        for i in range(3)
    ]
    assert not loss_parity.check(rows).holds


def test_meshes_are_of_every_kind():
    axes = {"pipe", "fsdp", "node", "expert", "model"}
    used = {axis for axis in axes for case in loss_parity.CASES if getattr(case.mesh, axis) > 1}
    assert used == axes
    schedules = {case.schedule.kind for case in loss_parity.CASES if case.mesh.pipe > 1}
    assert schedules == {"gpipe", "1f1b", "interleaved"}
