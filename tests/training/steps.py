# SPDX-License-Identifier: Apache-2.0
"""Steps of a program: its raw gradients, and the states after some of them."""

import jax

from switchx.partitioning.mesh import MeshSpec
from switchx.training.step import gradients
from tests.training.jobs import make_batch, make_params

# Each axis that splits tokens, experts or weights with another, and all of them.
MESHES = {
    "data": MeshSpec(data=4),
    "fsdp": MeshSpec(data=2, fsdp=2),
    "expert": MeshSpec(expert=4),
    "model": MeshSpec(data=2, model=2),
    "all": MeshSpec(fsdp=2, expert=2, model=2),
}


def raw_gradients(program, batch=None, params=None, seam_of=lambda *beside: None):
    """Gradients, loss, token sums and statistics of a step, before any optimizer.

    Args:
        batch, params: those of NumPy, where they are not given.
        seam_of: function of what stands beside the batch; returns the step's seam.
    """
    job = program.job

    def compute(params, batch, *beside):
        parts, key = (job.model, job.loss, job.step), jax.random.key(0)
        return gradients(*parts, params, batch, key=key, seam=seam_of(*beside))

    shardings = program.shardings.params
    params = make_params(job.model) if params is None else params
    batch = make_batch(job.model, job.batch_size) if batch is None else batch
    with program.scope():
        params, batch = jax.device_put(params, shardings), program.place(batch)
        compute = jax.jit(compute, out_shardings=(shardings, None, None, None))
        return compute(params, batch, *program.beside)


def trained(program, steps: int = 5):
    """The state after some steps, and their losses and norms."""
    state, measured = program.init_state(), []
    for step in range(steps):
        batch = make_batch(program.job.model, program.job.batch_size, seed=step)
        state, metrics = program.train_step(state, program.place(batch))
        measured.append((float(metrics.loss), float(metrics.grad_norm)))
    return state, measured
