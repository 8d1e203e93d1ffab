# SPDX-License-Identifier: Apache-2.0
"""Explicit broadcasting of a parameter over the leading dimensions of an activation."""


def along_last(param, x):
    """`param` in x's dtype with leading 1s, so that it lines up with x's last dimensions."""
    return param.astype(x.dtype).reshape((1,) * (x.ndim - param.ndim) + param.shape)
