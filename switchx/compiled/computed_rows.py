# SPDX-License-Identifier: Apache-2.0
"""Expert slots that a traced program computes.

An expert's block of rows has empty slots because its capacity is rounded up; computing them is
wasted work (Fedus et al. 2021, arXiv:2101.03961, section 2.2).
Dims: E expert, R rows of an expert's block, D model, F feed-forward
"""

import math

from switchx.compiled.jaxprs import sum_of_trace
from switchx.models.config import ModelConfig
from switchx.partitioning.mesh import PIPE


def executed_slots(jaxpr, config: ModelConfig) -> float:
    """Rows that pass through experts in one run of a traced forward pass, over all devices.

    They are those of the products `[E, R, D] x [E, D, F]`: no other product of a Transformer
    has one batch dimension and contracts D. Inside `jax.shard_map` every device has its
    own rows, or its part of F.

    Args:
        jaxpr: jaxpr of a forward pass (`jax.jit(...).trace(...).jaxpr`).

    Returns:
        The number of rows; 0 if rows are not in equal blocks: then no slot is empty.
    """
    d_ff = config.switch.d_ff or config.d_ff
    inputs = 2 if config.is_gated else 1

    def own(equation) -> float | None:
        if equation.primitive.name != "dot_general":
            return None
        return _expert_rows(equation, config.d_model, d_ff, inputs)

    # Stages have their own layers, not their own tokens.
    return sum_of_trace(jaxpr, own, lambda mesh: mesh.size // mesh.shape.get(PIPE, 1))


def _expert_rows(equation, d_model: int, d_ff: int, inputs: int) -> float:
    """E R of a product of experts' inputs; all `inputs` of them together count a row once.

    A part of F counts partially. If that part is as long as D, the product with w_out has the
    same shapes and takes its share.
    """
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    left, right = (variable.aval.shape for variable in equation.invars)
    if len(batch) != 1 or len(left) != 3 or len(right) != 3:
        return 0.0
    experts = left[batch[0]]
    inner = math.prod(left[axis] for axis in contracted)
    rows = math.prod(left) // (experts * inner)
    features = math.prod(right) // (experts * inner)
    if inner != d_model or d_ff % features:
        return 0.0
    alike = inputs + 1 if features == inner else inputs
    return experts * rows * features / d_ff / alike
