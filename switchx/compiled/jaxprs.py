# SPDX-License-Identifier: Apache-2.0
"""Traced programs: what one run of a jaxpr adds up to, including loops and conditionals."""

import itertools
from collections.abc import Callable


def programs_of(equation) -> list:
    """The programs that an equation of a jaxpr runs, with their constants if it has some."""
    values = equation.params.values()
    each = (value if isinstance(value, tuple | list) else [value] for value in values)
    found = itertools.chain.from_iterable(each)
    return [one for one in found if hasattr(getattr(one, "jaxpr", one), "eqns")]


def sum_of_trace(program, own: Callable, devices: Callable = lambda mesh: 1):
    """Adds up what one run of a traced program executes.

    A scan's body counts by its length; of a conditional's branches, the largest counts.

    Args:
        own: function that returns an equation's count; None for an equation that counts as
            the programs that it runs.
        devices: function that returns how often the body of a `jax.shard_map` over a mesh
            counts.
    """
    total = 0
    for equation in getattr(program, "jaxpr", program).eqns:
        if (counted := own(equation)) is None:
            inside = [sum_of_trace(each, own, devices) for each in programs_of(equation)]
            times, name = 1, equation.primitive.name
            if name == "scan":
                times = equation.params["length"]
            elif name == "shard_map":
                times = devices(equation.params["mesh"])
            counted = times * (max(inside) if name == "cond" else sum(inside))
        total += counted
    return total
