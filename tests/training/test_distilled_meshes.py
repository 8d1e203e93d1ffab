# SPDX-License-Identifier: Apache-2.0
"""Raw gradients of a distilled loss on meshes are those of one device.

Not through the optimizer, which hides a gradient that is k times too large. The reference is
computed without a mesh, a program or shardings.
"""

import dataclasses

import jax
import numpy as np
import pytest

from switchx import tree
from switchx.optim.updates import global_norm
from switchx.training.distillation.soft_loss import Distillation, Teacher, taught_by
from switchx.training.distillation.student import DistilledProgram, as_teacher
from switchx.training.step import StepConfig, gradients
from tests.cases import slow
from tests.training.jobs import (
    DENSE,
    SPARSE,
    SWITCH,
    WEIGHTY,
    make_batch,
    make_job,
    make_params,
)
from tests.training.saved_runs import save_run
from tests.training.steps import MESHES, raw_gradients

ROWS = 16
FEWER = dataclasses.replace(SPARSE, switch=dataclasses.replace(SWITCH, num_experts=4))
# Half of what experts are asked for finds no slot.
TIGHT = dataclasses.replace(SWITCH, eval_capacity_factor=0.5)
TEACHERS = {"dense": DENSE, "sparse": dataclasses.replace(SPARSE, switch=TIGHT)}
OTHERS = [(name, parts) for name in MESHES for parts in (1, 2) if (name, parts) != ("all", 1)]


@pytest.fixture(scope="module", params=["sparse", slow("dense")])
def teacher(request, tmp_path_factory):
    """Distillation of a teacher's run, and the raw gradients of a student on one device."""
    config = TEACHERS[request.param]
    run = save_run(tmp_path_factory.mktemp(request.param) / "run", config)
    settings = Distillation(str(run), soft_weight=0.6, temperature=2.0)
    # The run's parameters are those of seed 9.
    teacher = Teacher(make_params(config, seed=9), as_teacher(config), settings)

    @jax.jit
    def compute(params, batch, teacher):
        parts, seam = (FEWER, WEIGHTY, StepConfig()), taught_by(teacher)
        return gradients(*parts, params, batch, key=jax.random.key(0), seam=seam)

    return settings, by_name(*compute(make_params(FEWER), make_batch(FEWER, ROWS), teacher))


def by_name(grads, value, sums, stats) -> dict:
    found = {"grads": grads, "norm": global_norm(grads), "value": value, "sums": sums}
    found |= {"load": stats.load_E, "dropped": stats.dropped}
    return tree.named_leaves(jax.device_get(found))


# All axes at once by default, each alone in `make test-all`.
@pytest.mark.parametrize(
    ("mesh", "microbatches"), [("all", 1), *(slow(*each) for each in OTHERS)]
)
def test_raw_gradients_are_those_of_one_device(teacher, mesh, microbatches):
    (settings, want), spec = teacher, MESHES[mesh]
    job = make_job(
        FEWER, mesh=spec, loss=WEIGHTY, batch_size=ROWS, distillation=settings,
        step=StepConfig(num_microbatches=microbatches),
    )  # fmt: skip
    program = DistilledProgram(job, jax.devices()[: spec.num_devices(1)])

    def seam_of(params):
        return taught_by(Teacher(params, program.teacher, settings))

    got = by_name(*raw_gradients(program, seam_of=seam_of))
    assert got.keys() == want.keys()
    for name, leaf in want.items():
        size, error = np.linalg.norm(leaf), np.linalg.norm(got[name] - leaf)
        # The soft loss is a sum of 384 products of either sign for each token, in float32.
        bound = 3e-6 if name in ("value", "sums/loss", "sums/soft_loss") else 1e-6
        assert error <= bound * size, (name, error / size)
        assert not name.startswith("grads") or size > 1e-3, name
