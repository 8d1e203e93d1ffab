# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels of sparse models, usable without switchx: plain arrays in and out."""

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.separate import SeparateMatrices, separate_matmul
from pallas_kernels.quantization.packed_int32 import from_awq, from_gptq
from pallas_kernels.quantization.qtensor import QTensor
from pallas_kernels.quantization.quantize import (
    dequantize,
    quantization_error,
    quantize,
    quantize_rows,
)
from pallas_kernels.quantized_grouped_matmul.api import quantized_grouped_matmul

__all__ = [
    "QTensor",
    "SeparateMatrices",
    "dequantize",
    "from_awq",
    "from_gptq",
    "grouped_matmul",
    "quantization_error",
    "quantize",
    "quantize_rows",
    "quantized_grouped_matmul",
    "separate_matmul",
]
