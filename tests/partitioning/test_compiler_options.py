# SPDX-License-Identifier: Apache-2.0
"""switchx/partitioning/compiler_options.py: what a chip leaves out."""

import pytest

from switchx.partitioning.compiler_options import DECODING_OPTIONS, CompilerOptions
from tests.data.refusals import refused


@pytest.mark.parametrize("name", DECODING_OPTIONS["gpu"])
def test_a_chip_leaves_out_an_option_of_decoding(name):
    options = CompilerOptions(not_on=(("NVIDIA A100", name),))
    assert name in options.for_decoding("gpu", "NVIDIA H200")
    assert name not in options.for_decoding("gpu", "NVIDIA A100")
    with refused("CompilerOptions.not_on has xla_no_such, which no platform sets"):
        CompilerOptions(not_on=(("NVIDIA A100", "xla_no_such"),))
