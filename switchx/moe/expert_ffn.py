# SPDX-License-Identifier: Apache-2.0
"""E feed-forward experts as a pytree of weights: what dispatchers run and meshes split.

Dims: E R D F
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import QTensor
from pallas_kernels.sorted_rows import rows_of_groups
from switchx.layers.dropout import dropout
from switchx.layers.ffn import activate
from switchx.moe.expert_matmul import TappedWeight, expert_matmul, rows_matmul


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertFFN:
    """E networks `act(x w_in + b_in) w_out + b_out`, gated where there is a `w_gate_EDF`.

    Attributes:
        w_in_EDF, w_gate_EDF, w_out_EFD: arrays; `TappedWeight`s for equal blocks; or, where
            nothing is trained, `QTensor`s.
        b_in_EF, b_out_ED: biases, or None.
        key: for dropout; None where nothing is random.
        activation, dropout_rate: of the hidden layer.
    """

    w_in_EDF: jax.Array | TappedWeight | QTensor
    w_out_EFD: jax.Array | TappedWeight | QTensor
    w_gate_EDF: jax.Array | TappedWeight | QTensor | None = None
    b_in_EF: jax.Array | None = None
    b_out_ED: jax.Array | None = None
    key: jax.Array | None = None
    activation: str = dataclasses.field(default="relu", metadata={"static": True})
    dropout_rate: float = dataclasses.field(default=0.0, metadata={"static": True})

    @property
    def is_tapped(self) -> bool:
        """Whether gradients are to be returned as factors, which equal blocks alone can."""
        return isinstance(self.w_in_EDF, TappedWeight)

    def __call__(self, x_ERD):
        """Every expert on its own block of R rows, `[E, R, D]`."""
        return self._run(x_ERD, expert_matmul, lambda b_EX: b_EX[:, None])

    def run_rows(self, x_RD, count_E):
        """Rows sorted by expert, each through its expert; see `pallas_kernels`."""
        expert_R, _ = rows_of_groups(count_E, len(x_RD))

        def matmul(x_RD, w_EDF):
            return rows_matmul(x_RD, w_EDF, count_E)

        return self._run(x_RD, matmul, lambda b_EX: b_EX[expert_R])

    def on_device(self, index, is_first_part) -> "ExpertFFN":
        """The experts of device `index`: dropout of its own, `b_out_ED` added by one part."""
        changes = {}
        if self.key is not None:
            changes["key"] = jax.random.fold_in(self.key, index)
        if self.b_out_ED is not None:
            changes["b_out_ED"] = jnp.where(is_first_part, self.b_out_ED, 0)
        return dataclasses.replace(self, **changes)

    def _run(self, x, matmul, bias_of_row):
        h = matmul(x, self.w_in_EDF)
        if self.b_in_EF is not None:
            h = h + bias_of_row(self.b_in_EF.astype(x.dtype))
        gate = None if self.w_gate_EDF is None else matmul(x, self.w_gate_EDF)
        h = activate(self.activation, h, gate)
        h = dropout(h, self.dropout_rate, key=self.key)
        y = matmul(h, self.w_out_EFD)
        if self.b_out_ED is not None:
            y = y + bias_of_row(self.b_out_ED.astype(x.dtype))
        return y
