# SPDX-License-Identifier: Apache-2.0
"""Traced programs: all that one has, inside of its loops, branches and calls too."""

from collections.abc import Iterator

from jax.extend.core import jaxprs_in_params


def equations(jaxpr) -> Iterator:
    """The equations of a program and of the programs in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
