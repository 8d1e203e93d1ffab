# SPDX-License-Identifier: Apache-2.0
"""A frozen weight with a low-rank adapter beside it, which takes the weight's place in a model.

Hu et al. 2021 (LoRA, arXiv:2106.09685), section 4.1, equation 3: y = x W + s (x A) B, here with
dropout of the inputs of A. No product of A and B is made. `layers/dense.times` multiplies by
it, and `moe/experts.py` by that of experts.
Dims: J rank; others are those of the weight
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


def adapter_dims(dims: str, *, is_shared: bool = False) -> tuple[str, str]:
    """Dimension letters of a weight's A and B: `DJ`, `JHK` for `DHK`, `HKJ`, `JD` for `HKD`.

    Args:
        dims: the weight's own letters, without N.
        is_shared: whether all experts share A and B: both are without E then.
    """
    batch = "E" if dims.startswith("E") else ""
    matrix = dims.removeprefix(batch)
    inputs, outputs = matrix[:-1], matrix[-1]
    if matrix.startswith("D"):
        inputs, outputs = "D", matrix[1:]
    batch = "" if is_shared else batch
    return f"{batch}{inputs}J", f"{batch}J{outputs}"


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """A weight W, and A and B of x W + scale (dropout(x) A) B.

    Its arrays are named by dimensions, such as `w_in_EDF/a_EDJ`, so that a mesh splits them.

    Attributes:
        base: W, an array or a `QTensor`; it gets no gradient.
        a, b: A and B.
        key: random key of the dropout; None where nothing is random.
        dims: letters of base, a and b, without N, such as `("EDF", "EDJ", "EJF")`.
        scale: alpha over the rank.
        dropout_rate: dropout rate of the inputs of A.
    """

    base: Any
    a: Any
    b: Any
    key: Any
    dims: tuple[str, str, str]
    scale: float
    dropout_rate: float = 0.0

    def __getitem__(self, index) -> "AdaptedWeight":
        """The weight itself, as read by `parameter[...]`."""
        assert index is ..., index
        return self

    def tree_flatten_with_keys(self):
        names = map("_".join, zip(("base", "a", "b"), self.dims, strict=True))
        keys = map(jax.tree_util.GetAttrKey, (*names, "key"))
        children = self.base, self.a, self.b, self.key
        return tuple(zip(keys, children, strict=True)), (
            self.dims,
            self.scale,
            self.dropout_rate,
        )

    @classmethod
    def tree_unflatten(cls, static, children) -> "AdaptedWeight":
        return cls(*children, *static)

    def einsums(self, dimensions: str) -> tuple[str, str]:
        """The einsums of x and A, and of that and B, for a product `BLD,DF->BLF`."""
        x, w = dimensions.split("->")[0].split(",")
        y = dimensions.split("->")[1]
        # The product's letters may differ from those of the weight's name.
        _, a, b = self.dims
        own = dict(zip(self.dims[0], w, strict=True))
        a, b = ("".join(own.get(letter, letter) for letter in each) for each in (a, b))
        middle = "".join(letter for letter in x if letter in y) + "J"
        return f"{x},{a}->{middle}", f"{middle},{b}->{y}"

    def product(self) -> jax.Array:
        """s A B in float32, as large as the weight, to merge them."""
        w, a, b = self.dims
        is_shared = w.startswith("E") and not a.startswith("E")
        y = jnp.einsum(
            f"...{a},...{b}->...{w.removeprefix('E') if is_shared else w}",
            jnp.asarray(self.a, jnp.float32),
            jnp.asarray(self.b, jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        return self.scale * (y[..., None, :, :] if is_shared else y)
