# SPDX-License-Identifier: Apache-2.0
"""Gradients of one step, by the stages of a pipeline and without one."""

import dataclasses
import functools

import jax
import numpy as np

from switchx.optim.updates import global_norm
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import param_shardings
from switchx.pipeline.schedule import ScheduleSpec
from switchx.training.pipelined import build_schedule, pipelined_gradients
from switchx.training.step import StepConfig, gradients
from tests.compare import assert_close_to_largest
from tests.training import jobs
from tests.training.jobs import WEIGHTY, make_batch, make_params, with_switch

ROWS, MICROBATCHES = 16, 4


def stacked(config, layers: int, *, dropout_rate=0.0, dispatcher=None):
    """The configuration with scanned stacks of so many blocks, every other one sparse."""
    # Explicit dispatchers draw the masks inside of experts on every device.
    switch = dict(dispatcher=dispatcher, expert_dropout_rate=0.0) if dispatcher else {}
    return dataclasses.replace(
        jobs.stacked(config, layers, **switch), dropout_rate=dropout_rate
    )


@functools.cache
def gradients_of(config, num_microbatches: int):
    """A jitted `(params, batch, key) -> gradients, loss, token sums, statistics`."""
    step = StepConfig(num_microbatches=num_microbatches)
    return jax.jit(functools.partial(gradients, config, WEIGHTY, step))


def unpipelined(config, num_microbatches=MICROBATCHES, batch=None, params=None):
    """Gradients, loss, token sums and statistics on one device."""
    if config.switch is not None and not config.switch.has_attention:
        config = with_switch(config, dispatcher="gather")
    batch = make_batch(config, ROWS) if batch is None else batch
    params = make_params(config) if params is None else params
    compute = gradients_of(config, num_microbatches)
    return jax.device_get(compute(params, batch, key=jax.random.key(1)))


def pipelined(config, mesh: MeshSpec, spec=None, num_microbatches=MICROBATCHES, batch=None):
    """The same by the stages of `mesh`."""
    spec = ScheduleSpec() if spec is None else spec
    schedule = build_schedule(config, spec, mesh.pipe, num_microbatches)
    compute = functools.partial(pipelined_gradients, config, WEIGHTY, schedule)
    built, params = mesh.build(), make_params(config)
    with use_mesh(built, mesh.rules):
        params = jax.device_put(params, param_shardings(mesh.rules, built, params))
        batch = make_batch(config, ROWS) if batch is None else batch
        return jax.device_get(jax.jit(compute)(params, batch, key=jax.random.key(1)))


def assert_equal(got, want):
    np.testing.assert_allclose(global_norm(got[0]), global_norm(want[0]), rtol=2e-5)
    assert_close_to_largest(got, want, 2e-5, least=1e-6)
