# SPDX-License-Identifier: Apache-2.0
"""Experts of a model in use, each matrix an array by itself where that is faster: on a CPU.

See `pallas_kernels.separate_matmul`. The arrays are parts of the old ones' memory. With 8
experts it earns 10% of a decode step at batch 16 and 24% at batch 1, on two CPU cores; with 64
experts up to 9%.

Dims: E experts, D model, F ffn
"""

import jax

from pallas_kernels import QTensor, SeparateMatrices
from pallas_kernels.grouped_matmul.separate import MAX_EXPERTS
from switchx import tree
from switchx.inference.quantize import EXPERTS


def separate_experts(params: dict) -> dict:
    """The same parameters, the `w_EDF` of experts that are arrays on one CPU taken apart.

    Args:
        params: of an unrolled model. Quantized matrices stay as they are, and so do those
            that are taken apart already.
    """

    def taken_apart(name: str, leaf):
        if isinstance(leaf, QTensor) or EXPERTS not in name or not _is_on_one_cpu(leaf):
            return leaf
        return leaf if leaf.shape[0] > MAX_EXPERTS else SeparateMatrices.of(leaf)

    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: taken_apart(tree.path_name(path), leaf),
        params,
        is_leaf=lambda leaf: isinstance(leaf, QTensor),
    )


def _is_on_one_cpu(leaf) -> bool:
    if not isinstance(leaf, jax.Array) or leaf.ndim != 3:
        return False
    devices = leaf.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"
