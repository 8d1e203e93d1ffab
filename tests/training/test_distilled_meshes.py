# SPDX-License-Identifier: Apache-2.0
"""Raw gradients of a distilled loss on meshes are those of one device.

Not through the optimizer, which hides a gradient that is k times too large. The reference is
computed without a mesh, a program or shardings. All in float64, but losses and statistics: the
gradient of a relative bias is a sum that cancels, of which float32 leaves 8e-7 on one device.
"""

import dataclasses

import jax
import numpy as np
import pytest

from switchx import tree
from switchx.models.config import Precision
from switchx.optim.updates import global_norm
from switchx.training.distillation.soft_loss import Distillation, Teacher, taught_by
from switchx.training.distillation.student import DistilledProgram
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
EXACT = Precision(*["float64"] * 4)
FEWER = dataclasses.replace(SPARSE, switch=dataclasses.replace(SWITCH, num_experts=4))
# Half of what experts are asked for finds no slot.
TIGHT = dataclasses.replace(SWITCH, eval_capacity_factor=0.5)
WHOLE = dataclasses.replace(
    SWITCH, router=dataclasses.replace(SWITCH.router, overflow="dropless")
)
TEACHERS = {
    "dense": dataclasses.replace(DENSE, precision=EXACT),
    "sparse": dataclasses.replace(DENSE, switch=TIGHT, precision=EXACT),
    # Its products have no float64; the reference computes all slots.
    "dropless": dataclasses.replace(DENSE, switch=WHOLE, positions="rotary"),
}
OTHERS = [(name, parts) for name in MESHES for parts in (1, 2) if (name, parts) != ("all", 1)]


@pytest.fixture(scope="module", params=["sparse", slow("dense"), slow("dropless")])
def taught(request, tmp_path_factory):
    """Distillation of a teacher's run, a student, and its raw gradients on one device."""
    config = TEACHERS[request.param]
    with jax.enable_x64(config.precision == EXACT):
        run = save_run(tmp_path_factory.mktemp(request.param) / "run", config)
        settings = Distillation(str(run), soft_weight=0.6, temperature=2.0)
        # The run's parameters are those of seed 9.
        teacher = Teacher(make_params(config, seed=9), config, settings)
        alike = {"precision": config.precision, "positions": config.positions}
        student = dataclasses.replace(FEWER, **alike)

        @jax.jit
        def compute(params, batch, teacher):
            parts, seam = (student, WEIGHTY, StepConfig()), taught_by(teacher)
            return gradients(*parts, params, batch, key=jax.random.key(0), seam=seam)

        found = compute(make_params(student), make_batch(student, ROWS), teacher)
        yield settings, student, by_name(*found)


def by_name(grads, value, sums, stats) -> dict:
    found = {"grads": grads, "norm": global_norm(grads), "value": value, "sums": sums}
    found |= {"load": stats.load_E, "dropped": stats.dropped}
    return tree.named_leaves(jax.device_get(found))


# All axes at once by default, each alone in `make test-all`.
@pytest.mark.parametrize(
    ("mesh", "microbatches"), [("all", 1), *(slow(*each) for each in OTHERS)]
)
def test_raw_gradients_are_those_of_one_device(taught, mesh, microbatches):
    (settings, student, want), spec = taught, MESHES[mesh]
    job = make_job(
        student, mesh=spec, loss=WEIGHTY, batch_size=ROWS, distillation=settings,
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
        bound = 3e-6 if name == "sums/soft_loss" else 1e-6
        assert error <= bound * size, (name, error / size)
        assert not name.startswith("grads") or size > 1e-3, name
