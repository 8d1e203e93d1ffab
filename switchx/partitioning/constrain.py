# SPDX-License-Identifier: Apache-2.0
"""Sharding constraints on arrays, by dimension letters, and the mesh they are for.

The letters are the global ones of `switchx/axes.py`; `Rules` says which mesh axes split them.
"""

import contextlib
import functools
import math

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from switchx import tree
from switchx.axes import dims_of
from switchx.partitioning.rules import Rules, param_dims, param_spec, param_table

# A user context, so that a program that was traced under other rules is traced again.
_rules = jax.make_user_context(None)


@contextlib.contextmanager
def use_mesh(mesh: Mesh | AbstractMesh, rules: Rules):
    """Makes `constrain` follow `mesh` and `rules` inside of the block, also while tracing.

    An abstract mesh is for programs that are traced and lowered ahead of time.
    """
    # Not `with mesh:`: the abstract mesh would be empty, and every constraint silently lost.
    set_mesh = jax.set_mesh if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh
    with _rules(rules), set_mesh(mesh):
        yield


@contextlib.contextmanager
def use_rules(rules: Rules):
    """Uses other rules for the mesh inside of the block."""
    with _rules(rules):
        yield


def current_rules() -> Rules:
    """The rules of the innermost `use_mesh`."""
    return _rules.value


def num_devices() -> int:
    """The number of devices of the innermost mesh that the compiler may split arrays over.

    It is 1 outside of any mesh, and inside of a `jax.shard_map` over all axes, where a device
    sees only its own data.
    """
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in open_axes())


def open_axes() -> set[str]:
    """The axes of the innermost mesh that no `shard_map` around this has made manual.

    Inside of a pipeline, these are all but `pipe`: those that a nested `shard_map` may take.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.axis_names) - set(mesh.manual_axes)


def constrain(x, dims: str, uneven: str = ""):
    """Splits activation `x` as the rules say; returns it as it is outside of `use_mesh`.

    Args:
        uneven: the dimension that may be split into parts that are not all full, which the
            compiler pads; any other that does not divide stays whole.
    """
    if num_devices() == 1:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    rules = current_rules()
    shape = list(x.shape)
    is_compiled = isinstance(x, jax.core.Tracer)  # arrays have equal parts
    if uneven and is_compiled and not mesh.manual_axes:  # beside manual axes XLA aborts
        axes = rules.axes(uneven, mesh, table="activations")
        at = dims.index(uneven)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape[at] > parts:
            shape[at] += -shape[at] % parts
    return jax.lax.with_sharding_constraint(
        x, rules.spec(dims, shape, mesh, table="activations")
    )


def constrain_named(arrays):
    """Constrains all arrays of a tree, whose names end in their dimensions."""
    if num_devices() == 1:
        return arrays
    return tree.map_named(
        lambda name, x: constrain(x, dims_of(name.rsplit("/", 1)[-1], x.ndim)), arrays
    )


def constrain_params(params):
    """Splits parameters, or gradients of them, as the rules say for a training state."""
    if num_devices() == 1:
        return params
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()

    def split(name, x):
        return jax.lax.with_sharding_constraint(x, param_spec(rules, mesh, name, x.shape))

    return tree.map_named(split, params)


def gathered_where_used(params):
    """The parameters of one block, or one of another kind, with all of D on each device.

    The constraint is set where the parameters are used: if `fsdp` stands between axes of other
    kinds, the compiler would gather twice, and permute slices. In the backward pass a device
    gets the gradients of its slices. Parameters of experts stay as they are: a dispatcher
    gathers them (`moe/sharded_dispatch.py`).

    Args:
        params: a tree or a module, whose names end in their dimensions.
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    if num_devices() == 1 or not rules.axes("D", mesh, table="params"):
        return params

    def gather(name, x):
        # A module's parameter has its array, or its quantized matrix, as `value`.
        name = "/".join(part for part in name.split("/") if part != "value")
        dims = param_dims(name, x.shape)
        if "D" not in dims or param_table(dims) == "expert_params":
            return x
        return _gathered(x, name)

    return tree.map_named(gather, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(x, name: str):
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    return jax.lax.with_sharding_constraint(x, _without_d(rules, mesh, name, x.shape))


def _backward(name: str, _, gradient):
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    spec = param_spec(rules, mesh, name, gradient.shape)
    return (jax.lax.with_sharding_constraint(gradient, spec),)


_gathered.defvjp(lambda x, name: (_gathered(x, name), None), _backward)


def _without_d(rules: Rules, mesh, name: str, shape) -> PartitionSpec:
    """The partition of a parameter, all of whose D is on each device."""
    spec = zip(param_dims(name, shape), param_spec(rules, mesh, name, shape), strict=True)
    return PartitionSpec(*(None if letter == "D" else axes for letter, axes in spec))


def gathered_params(params):
    """The parameters with all of D on each device; None if no device has slices of D.

    Their other dimensions are split as the rules say.
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    if num_devices() == 1 or not rules.axes("D", mesh, table="params"):
        return None

    def gather(name, x):
        spec = _without_d(rules, mesh, name, x.shape)
        return jax.lax.with_sharding_constraint(x, spec)

    return tree.map_named(gather, params)


def whole(arrays):
    """The arrays, whole on every device; outside of `use_mesh`, as they are."""
    if num_devices() == 1:
        return arrays
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), arrays)
