# SPDX-License-Identifier: Apache-2.0
"""Cases of `pytest.mark.parametrize` that the default suite leaves out."""

import pytest


def slow(*values, **options):
    """A case for `make test-all` alone."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def slow_unless(is_default: bool, *values, **options):
    """A case that the default suite has where `is_default` is true."""
    return (pytest.param if is_default else slow)(*values, **options)
