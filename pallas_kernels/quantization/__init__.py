# SPDX-License-Identifier: Apache-2.0
"""Expert matrices as 8-bit or 4-bit integers with a scale for each output feature."""
