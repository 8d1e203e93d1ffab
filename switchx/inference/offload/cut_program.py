# SPDX-License-Identifier: Apache-2.0
"""A compiled program in parts, cut where its Switch layers need their experts.

The host reads which experts the router has chosen before they are computed with, so a program
that decodes or scores is cut there: it is traced as it is, once, with `AbsentExperts` in the
place of the weights; each part is compiled by itself, and between two of them the host calls
the experts. What is computed is what the whole program computes: there is no second decoder.
Dims: R rows, D model, E experts
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)

from switchx.inference.program_cache import PROGRAMS
from switchx.moe.experts import absent_rows_p

# (number of the layer, x_RD, count_E) -> y_RD
RunRows = Callable[[int, jax.Array, jax.Array], jax.Array]
# Programs whose rows are known.
MOST_KNOWN = 256


@dataclasses.dataclass(frozen=True)
class Part:
    """Equations between two cuts, compiled.

    Attributes:
        run: the values of `inputs` -> the values of `outputs`.
        inputs: variables that it reads, of the arguments and of earlier parts.
        outputs: variables that it writes and that are read later.
        live: all variables that are read after the next cut.
    """

    run: Callable[..., Sequence[jax.Array]]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    live: tuple[Var, ...]


class CutProgram:
    """A traced program whose experts are absent, cut where it asks for them.

    Attributes:
        cuts: the equations that ask for experts.
        parts: the programs between the cuts, one more than cuts.
        rows: for each cut, the number of its layer and R.
    """

    def __init__(self, traced: jax.stages.Traced, is_donated: Sequence[bool], options=()):
        """Cuts the program; a part is compiled when it first runs.

        Args:
            traced: `jax.jit(program).trace(...)`.
            is_donated: for each argument, whether nothing else reads it after a call.
            options: compiler options, as for `Programs.run`.
        """
        self._options = options
        closed: ClosedJaxpr = traced.jaxpr
        jaxpr = closed.jaxpr
        self._arguments, self._results = jaxpr.invars, jaxpr.outvars
        self._constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._tree = jax.tree.structure(traced.out_info)
        given = zip(jaxpr.invars, is_donated, strict=True)
        kept = {var for var, is_dead in given if not is_dead}
        self.cuts: list[JaxprEqn] = []
        groups: list[list[JaxprEqn]] = [[]]
        for equation in _needed(jaxpr.eqns, jaxpr.outvars):
            if equation.primitive is absent_rows_p:
                self.cuts.append(equation)
                groups.append([])
            else:
                groups[-1].append(equation)
        self.parts = self._parts(groups, kept | self._constants.keys())
        self.rows = tuple(
            (cut.params["layer"], cut.invars[0].aval.shape[0]) for cut in self.cuts
        )

    def __call__(self, leaves: Iterable[Any], run_rows: RunRows):
        """Runs the program and returns its results.

        Args:
            leaves: the leaves of all arguments.
            run_rows: runs the experts of a layer on rows that are sorted by expert.
        """
        values = self._constants | dict(zip(self._arguments, leaves, strict=True))
        for part, cut in itertools.zip_longest(self.parts, self.cuts):
            found = part.run(*(values[var] for var in part.inputs))
            values.update(zip(part.outputs, found, strict=True))
            if cut is not None:
                x_RD, count_E = (values[var] for var in cut.invars)
                values[cut.outvars[0]] = run_rows(cut.params["layer"], x_RD, count_E)
            values = {var: values[var] for var in part.live}
        results = [
            var.val if isinstance(var, Literal) else values[var] for var in self._results
        ]
        return jax.tree.unflatten(self._tree, results)

    def _parts(self, groups: list[list[JaxprEqn]], kept: set[Var]) -> list[Part]:
        """Makes the parts from last to first: later reads decide what a part returns."""
        live, parts = variables(self._results), []
        for group, cut in zip(reversed(groups), [None, *reversed(self.cuts)], strict=True):
            after = live
            if cut is not None:
                live = {var: None for var in live if var not in cut.outvars}
                live |= variables(cut.invars)
            made = {var for equation in group for var in equation.outvars}
            outputs = tuple(var for var in live if var in made)
            live = {var: None for var in live if var not in made}
            read = variables(atom for equation in group for atom in equation.invars)
            inputs = tuple(var for var in read if var not in made)
            ended = {var for var in inputs if var not in live and var not in kept}
            run = _compiled(group, inputs, outputs, ended, self._options)
            parts.append(Part(run, inputs, outputs, tuple(after)))
            live |= dict.fromkeys(inputs)
        return parts[::-1]


def _needed(equations: Sequence[JaxprEqn], results: Sequence[Any]) -> list[JaxprEqn]:
    """The equations without those whose results nothing reads, such as statistics."""
    needed, kept = variables(results), []
    for equation in reversed(equations):
        if equation.effects or any(var in needed for var in equation.outvars):
            needed |= variables(equation.invars)
            kept.append(equation)
    return kept[::-1]


def variables(atoms: Iterable[Any]) -> dict[Var, None]:
    """A set in their order: the order of arguments is part of a program that is cached."""
    return {atom: None for atom in atoms if not isinstance(atom, Literal)}


def _compiled(equations, inputs: Sequence[Var], outputs: Sequence[Var], ended: set, options):
    """A jitted function of the inputs' values. Inputs in `ended` are donated to outputs of the
    same shape and dtype."""

    free = collections.Counter((var.aval.shape, var.aval.dtype) for var in outputs)
    donated = []
    for number, var in enumerate(inputs):
        kind = var.aval.shape, var.aval.dtype
        if var in ended and free[kind]:
            free[kind] -= 1
            donated.append(number)
    function = function_of(equations, inputs, outputs)
    return jax.jit(function, donate_argnums=donated, compiler_options=dict(options))


def function_of(equations: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Var]):
    """The function of some variables' values to others' that equations of a program compute."""
    names = DebugInfo("jit", "part", ("",) * len(inputs), ("",) * len(outputs))
    jaxpr = Jaxpr([], inputs, outputs, equations, debug_info=names)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))


def cut_program(program, settings: tuple, arrays: dict, shape: tuple, options) -> CutProgram:
    """A program for arguments of the shapes and dtypes of these, of any model; `PROGRAMS` keeps
    it.

    Args:
        settings: its static arguments.
        shape, options: see `Programs.run`.
    """
    kind = kind_of(arrays)
    key = program, settings, shape, options, kind
    return PROGRAMS.kept(key, lambda: (traced(program, settings, kind, options), 1))


@functools.lru_cache(maxsize=MOST_KNOWN)
def rows_of(program, settings: tuple, kind: tuple) -> tuple[tuple[int, int], ...]:
    """`CutProgram.rows` of a program for arguments of a kind."""
    return traced(program, settings, kind).rows


def traced(program, settings: tuple, kind: tuple, options=()) -> CutProgram:
    """A program for arguments of a kind, nothing of it compiled."""
    structure, shapes = kind
    leaves = [jax.ShapeDtypeStruct(*each) for each in shapes]
    arrays = jax.tree.unflatten(structure, leaves)
    return CutProgram(program.trace(*settings, **arrays), donated_leaves(arrays), options)


def kind_of(arrays) -> tuple:
    """The key of arguments: equal for arguments of equal structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(arrays)
    return structure, tuple((x.shape, x.dtype) for x in leaves)


def donated_leaves(arrays: dict[str, Any]) -> tuple[bool, ...]:
    """For each leaf of a program's arguments, whether it is donated: the leaves of `state`."""
    return tuple(
        name == "state" for name, each in sorted(arrays.items()) for _ in jax.tree.leaves(each)
    )
