# SPDX-License-Identifier: Apache-2.0
"""The experts of a Switch layer: E feed-forward networks, each on its own rows.

`Experts` owns the parameters; `ExpertFFN` is the same as a pytree of weights, the expert bank
that dispatchers run and meshes split. `AbsentExperts` takes the place of weights that are not
arguments of a program.
Dims: E experts, R rows, D model, F ffn; X any of D and F
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Primitive

from pallas_kernels import (
    QTensor,
    SeparateMatrices,
    dequantize,
    grouped_matmul,
    quantized_grouped_matmul,
    separate_matmul,
)
from pallas_kernels.epilogue import apply_epilogue
from pallas_kernels.sorted_rows import rows_of_groups
from switchx.layers.adapted_weight import AdaptedWeight
from switchx.layers.dense import plus, times, weight, zeros
from switchx.layers.dropout import dropout
from switchx.layers.ffn import activate
from switchx.moe.dispatch import gated

Weight = jax.Array | QTensor | SeparateMatrices | AdaptedWeight
# In the order of `ExpertFFN`.
WEIGHTS = ("w_in_EDF", "w_out_EFD", "w_gate_EDF", "b_in_EF", "b_out_ED")

# The activation of a gated linear unit, as kernels name it.
GATED = {"geglu": "gelu", "geglu_exact": "gelu_exact", "swiglu": "silu"}

# The product of experts with blocks of rows; compiled programs name it and its gradients so.
BLOCKS = "ERD,EDF->ERF"

absent_rows_p = Primitive("absent_expert_rows")
absent_rows_p.def_abstract_eval(lambda x_RD, count_E, *, layer: x_RD)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AbsentExperts:
    """The experts of a layer that runs elsewhere, a bank without weights.

    Among a model's parameters it takes the place of the layer's `w_in_EDF`, and the layer has
    no other expert parameters. A program with it is not compiled as it is: `cut_program.py`
    cuts it where the rows of the layer are known; the next part begins with the experts'
    outputs.

    Attributes:
        layer: number of the Switch layer in its model.
    """

    ndim: ClassVar[int] = 3
    layer: int = dataclasses.field(metadata={"static": True})

    def run_rows(self, x_RD, count_E, gate_R=None):
        """Runs rows sorted by expert, each through its expert, times its gate."""
        y_RD = absent_rows_p.bind(x_RD, count_E, layer=self.layer)
        return y_RD if gate_R is None else gated(y_RD, gate_R)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CopiedWeight:
    """A layer's `w_in_EDF` and, beside it, which expert is in which slot (`expert_copies.py`).

    Among a model's parameters it takes the place of the weight.

    Attributes:
        expert_of_slot_R: int32; R slots.
    """

    ndim: ClassVar[int] = 3
    w_in_EDF: jax.Array
    expert_of_slot_R: jax.Array


class Experts(nnx.Module):
    """The parameters of E feed-forward networks."""

    def __init__(self, config, *, key):
        self.config = config
        key_in, key_gate, key_out = jax.random.split(key, 3)
        E = config.switch.num_experts
        D = config.d_model
        F = config.switch.d_ff or config.d_ff
        self.w_in_EDF = weight(config, key_in, (E, D, F), fan_in=D)
        if config.is_gated:
            self.w_gate_EDF = weight(config, key_gate, (E, D, F), fan_in=D)
        self.w_out_EFD = weight(config, key_out, (E, F, D), fan_in=F)
        if config.switch.expert_bias:
            self.b_in_EF = zeros(config, E, F)
            self.b_out_ED = zeros(config, E, D)

    def weights(self, *, key=None) -> "ExpertFFN | AbsentExperts":
        """The expert bank.

        Args:
            key: random key of the dropout inside the experts (section 2.4); None for no
                dropout.
        """
        values = [
            getattr(self, name).get_value() if hasattr(self, name) else None for name in WEIGHTS
        ]
        if isinstance(values[0], AbsentExperts):
            return values[0]
        if isinstance(values[0], CopiedWeight):
            values[0] = values[0].w_in_EDF
        return ExpertFFN.of(self.config, *values, key=key)

    @property
    def expert_of_slot_R(self) -> jax.Array | None:
        """The expert in each slot of a bank with copies; None where there are none."""
        weight = self.w_in_EDF.get_value()
        return weight.expert_of_slot_R if isinstance(weight, CopiedWeight) else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertFFN:
    """E networks `act(x w_in + b_in) w_out + b_out`, gated where there is a `w_gate_EDF`.

    Attributes:
        w_in_EDF, w_gate_EDF, w_out_EFD: arrays, `AdaptedWeight`s, or, where nothing is
            trained, `QTensor`s or `SeparateMatrices`.
        b_in_EF, b_out_ED: biases, or None.
        key: random key of dropout; None where nothing is random.
        activation, dropout_rate: activation and dropout rate of the hidden layer.
    """

    w_in_EDF: Weight
    w_out_EFD: Weight
    w_gate_EDF: Weight | None = None
    b_in_EF: jax.Array | None = None
    b_out_ED: jax.Array | None = None
    key: jax.Array | None = None
    activation: str = dataclasses.field(default="relu", metadata={"static": True})
    dropout_rate: float = dataclasses.field(default=0.0, metadata={"static": True})

    @classmethod
    def of(cls, config, *weights, key) -> "ExpertFFN":
        """The bank of a model's weights, with its activation and dropout."""
        rate = config.switch.expert_dropout_rate
        rate = config.dropout_rate if rate is None else rate
        key = key if rate else None
        return cls(*weights, key=key, activation=config.activation, dropout_rate=rate)

    def __call__(self, x_ERD):
        """Runs every expert on its own block of R rows, `[E, R, D]`."""
        return self._run(x_ERD, blocks_product)

    def run_rows(self, x_RD, count_E, gate_R=None):
        """Runs rows sorted by expert, each through its expert, times its gate.

        Biases, activation, gating and gates are the epilogues of two products
        (`pallas_kernels`), on every platform; only dropout stands between them.
        """
        product = functools.partial(rows_product, count_E=count_E)
        return self._run(x_RD, product, **({} if gate_R is None else {"gate_R": gate_R}))

    def on_device(self, index, is_first_part) -> "ExpertFFN":
        """The experts of device `index`, with its own dropout; one part adds `b_out_ED`."""

        def own(leaf):
            is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            return jax.random.fold_in(leaf, index) if is_key else leaf

        bank = jax.tree.map(own, self)
        if self.b_out_ED is None:
            return bank
        b_out_ED = jnp.where(is_first_part, self.b_out_ED, 0)
        return dataclasses.replace(bank, b_out_ED=b_out_ED)

    def _run(self, x, product, **combined):
        h = product(
            x,
            self.w_in_EDF,
            w_gate=self.w_gate_EDF,
            bias_EF=self.b_in_EF,
            activation=self.activation,
        )
        # Groups follow each other along R, so a slot's mask is that of its group and place.
        h = dropout(h, self.dropout_rate, key=self.key, rows=-2)
        return product(h, self.w_out_EFD, bias_EF=self.b_out_ED, **combined)


def blocks_product(x_ERD, w: Weight, *, w_gate=None, bias_EF=None, activation=None):
    """`act(x_ERD w_EDF + bias) (x_ERD w_gate)` for each expert, in the dtype of x.

    It consists of einsums, which the compiler splits over a mesh and fuses with what follows.
    """
    if isinstance(w, QTensor | SeparateMatrices):
        E, R, D = x_ERD.shape
        y_RF = rows_product(
            x_ERD.reshape(E * R, D),
            w,
            count_E=jnp.full((E,), R, jnp.int32),
            w_gate=w_gate,
            bias_EF=bias_EF,
            activation=activation,
        )
        return y_RF.reshape(E, R, -1)
    matrices = [w] if w_gate is None else [w, w_gate]
    h, *gate = (times(BLOCKS, x_ERD, each) for each in matrices)
    if bias_EF is not None:
        h = plus(h, bias_EF[:, None])
    return h if activation is None else activate(activation, h, *gate)


def rows_product(
    x_RD, w: Weight, *, count_E, w_gate=None, bias_EF=None, activation=None, gate_R=None
):
    """`gate_r act(x_r w_e + bias_e) (x_r w_gate_e)` for rows sorted by expert, in x's dtype."""
    epilogue = {
        "bias_EF": bias_EF,
        "activation": GATED.get(activation, activation),
        "gate_R": gate_R,
    }
    if isinstance(w, AdaptedWeight):
        matrices = [w] if w_gate is None else [w, w_gate]
        sums = [_adapted_product(x_RD, each, count_E) for each in matrices]
        groups = rows_of_groups(count_E, len(x_RD))
        y_RF, _ = apply_epilogue(sums, *groups, **epilogue)
        return y_RF.astype(x_RD.dtype)
    if isinstance(w, QTensor):
        return quantized_grouped_matmul(x_RD, w, count_E, w_gate=w_gate, **epilogue)
    if isinstance(w, SeparateMatrices):
        return separate_matmul(x_RD, w, count_E, w_gate=w_gate, **epilogue)
    return grouped_matmul(x_RD, w, count_E, w_gate_EDF=w_gate, **epilogue)


def _adapted_product(x_RD, w: AdaptedWeight, count_E):
    """`x_r W_e + s (x_r A_e) B_e` for rows sorted by expert, summed in float32."""
    is_quantized = isinstance(w.base, QTensor)
    multiply = _quantized_product if is_quantized else _product
    seen_RD = dropout(x_RD, w.dropout_rate, key=w.key)
    if w.a.ndim == 2:  # shared by all experts
        y_RF = (seen_RD @ w.a.astype(x_RD.dtype)) @ w.b.astype(x_RD.dtype)
    else:
        y_RF = _product(_product(seen_RD, w.a, count_E).astype(x_RD.dtype), w.b, count_E)
    return multiply(x_RD, w.base, count_E) + w.scale * y_RF.astype(jnp.float32)


def _product(x_RD, w_EDF, count_E):
    return grouped_matmul(x_RD, w_EDF, count_E, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _quantized_product(x_RD, w: QTensor, count_E):
    """The product of rows and quantized experts; its gradient of x is that of `dequantize(w)`.

    Dettmers et al. 2023 (QLoRA, arXiv:2305.14314), section 3: the weights get no gradient.
    """
    return quantized_grouped_matmul(x_RD, w, count_E, preferred_element_type=jnp.float32)


def _quantized_backward(saved, dy_RF):
    like_RD, w, count_E = saved
    w_EDF = dequantize(w).astype(like_RD.dtype)
    dy_RF = dy_RF.astype(like_RD.dtype)
    return grouped_matmul(dy_RF, w_EDF, count_E, transpose_w=True), None, None


_quantized_product.defvjp(
    lambda x_RD, w, count_E: (_quantized_product(x_RD, w, count_E), (x_RD[:0], w, count_E)),
    _quantized_backward,
)
