# SPDX-License-Identifier: Apache-2.0
"""Forms of experts' matrices in use: int8, int4 or float8; on a CPU, one array per expert.

Kim et al. 2022 (arXiv:2211.10017), section 3.4: experts hold most of the weights and are
what a decoding step reads; everything else stays as it is, or is cast to another dtype.

Dims: E experts, D model, F ffn
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import QTensor, SeparateMatrices, quantization_error, quantize
from pallas_kernels.grouped_matmul.separate import MAX_EXPERTS
from pallas_kernels.implementations import form_of_int4
from switchx import tree
from switchx.models.config import ModelConfig, require_our_blocks
from switchx.models.stored_experts import EXPERT_MATRICES, EXPERTS_PATH
from switchx.models.unroll import unrolled

_TINY = np.finfo(np.float32).tiny


@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """The error of one stack of expert matrices.

    Attributes:
        name: name of the parameter.
        error, worst_error: root of the mean squared error over that of the mean square, for the
            whole stack and for the worst expert.
    """

    name: str
    error: float
    worst_error: float


@dataclasses.dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model's arrays on a device.

    Attributes:
        before, after: bytes of the whole model, before and after quantization.
        experts: bytes of all parameters of experts, before quantization.
        quantized: bytes of the experts' parameters that are quantized now; biases are not.
    """

    before: int
    after: int
    experts: int
    quantized: int


def quantize_experts(
    config: ModelConfig,
    params: dict,
    *,
    bits: int,
    method: str | None = None,
    group_size: int | None = None,
    dtype: str | None = None,
    rest: str | None = None,
) -> tuple[ModelConfig, dict, list[QuantizedMatrix], ModelBytes]:
    """Returns a model whose experts' matrices are `QTensor`s, with its layers unrolled.

    Args:
        bits, method, group_size, dtype: see `pallas_kernels.quantize`.
        rest: dtype of all other parameters, such as `bfloat16`; routers stay as they are.
            None leaves all others as they are.

    Returns:
        config, params, the error of each matrix, and the model's bytes.

    Raises:
        ValueError: a dense model; see `pallas_kernels.quantize`.
    """
    if config.switch is None or not config.switch.has_ffn:
        raise ValueError(
            "this model has no Switch FFN, and so no experts to quantize; quantize a sparse one"
        )
    require_our_blocks(config, "quantization")
    config, params = unrolled(config, params)
    before, errors = model_bytes(params), []
    bytes_of = {name: leaf.nbytes for name, leaf in tree.named_leaves(params).items()}
    experts = sum(size for name, size in bytes_of.items() if EXPERTS_PATH in name)
    quantized_bytes = sum(size for name, size in bytes_of.items() if EXPERT_MATRICES in name)

    def convert(name, leaf):
        if EXPERT_MATRICES not in name:
            keep = rest is None or "router" in name
            return leaf if keep else jnp.asarray(leaf).astype(rest)
        quantized = quantize(leaf, bits, method, group_size, dtype)
        error_E, size_E = map(np.asarray, (quantization_error(leaf, quantized), _squares(leaf)))
        whole = np.sqrt(np.sum(error_E**2 * size_E) / max(np.sum(size_E), _TINY))
        errors.append(QuantizedMatrix(name, float(whole), float(error_E.max())))
        return quantized

    params = tree.map_named(convert, params)
    if rest is not None:
        precision = dataclasses.replace(config.precision, params=rest, compute=rest)
        config = dataclasses.replace(config, precision=precision)
    sizes = ModelBytes(before, model_bytes(params), experts, quantized_bytes)
    return config, params, errors, sizes


@jax.jit
def _squares(w_EDF):
    """Mean squares of experts' matrices, float32 `[E]`."""
    return jnp.mean(jnp.square(w_EDF.astype(jnp.float32)), axis=(1, 2))


def is_quantized(leaf) -> bool:
    """Whether this is a quantized matrix, which is a leaf although it holds arrays."""
    return isinstance(leaf, QTensor)


def packed(params: dict) -> dict:
    """Parameters whose 4-bit matrices are as in files, packed two values to a byte."""
    return native(params, "cpu")


def in_bytes(params: dict) -> dict:
    """Like `packed`, with float8 as its bits, uint8, for readers whose NumPy has no float8."""

    def bits_of(leaf):
        return leaf.view(jnp.uint8) if leaf.dtype == jnp.float8_e4m3fn else leaf

    return jax.tree.map(bits_of, packed(params))


def native(params: dict, platform: str | None = None, *, in_order: bool = False) -> dict:
    """Converts quantized matrices, once, to the form that kernels read.

    On CPUs, and on GPUs other than Hopper, 4-bit values are packed; on Hopper, integers are in
    the order of its registers (`QTensor.fragments`).

    Args:
        platform: the platform, as JAX names it; None is the one in use.
        in_order: whether channels keep their order: for float32 products, which that kernel
            does not compute, and where a host's bytes are read as a device's.
    """
    form = form_of_int4(platform)
    change = getattr(QTensor, "native" if in_order and form == "fragments" else form)
    return jax.tree.map(
        lambda leaf: change(leaf) if is_quantized(leaf) else leaf, params, is_leaf=is_quantized
    )


def model_bytes(params: dict) -> int:
    """Bytes of the parameters on a device, where an int4 takes half a byte."""
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    return sum(leaf.nbytes for leaf in leaves)


def separate_experts(params: dict) -> dict:
    """Separates the experts' `w_EDF` that are arrays on one CPU into one matrix per expert.

    See `pallas_kernels.separate_matmul`. The new arrays share the old ones' memory. With 8
    experts it saves 10% of a decode step at batch 16 and 24% at batch 1, on two CPU cores; with
    64 experts up to 9%.

    Args:
        params: an unrolled model's parameters. Quantized matrices stay as they are, and so do
            matrices that are separate already.
    """

    def taken_apart(path, leaf):
        if not isinstance(leaf, jax.Array) or EXPERT_MATRICES not in tree.path_name(path):
            return leaf
        is_on_one_cpu = [device.platform for device in leaf.devices()] == ["cpu"]
        is_small = leaf.ndim == 3 and leaf.shape[0] <= MAX_EXPERTS
        return SeparateMatrices.of(leaf) if is_small and is_on_one_cpu else leaf

    return jax.tree_util.tree_map_with_path(taken_apart, params, is_leaf=is_quantized)
