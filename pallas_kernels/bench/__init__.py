# SPDX-License-Identifier: Apache-2.0
"""The kernels measured against each other, against XLA and against the hardware."""
