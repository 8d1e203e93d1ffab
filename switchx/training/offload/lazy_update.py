# SPDX-License-Identifier: Apache-2.0
"""The optimizer for one expert at a time, late: updates that an expert missed are made up.

An expert that no token chose has a gradient of zero, but its optimizer still moves it: momentum
continues, weights and second moments decay. Updating all experts in each step would read and
write every record (SE-MoE, Shen et al. 2022, arXiv:2205.10034, section 2.1). Here a record that
is behind by k updates gets k updates by a zero gradient before the next one by its own. All
updates of an expert are iterations of one loop of one program, which chooses the gradient when
it runs: so the compiler makes the same code for each, and late updates equal timely ones, bit
for bit. Do not remove the loop where one update is due, nor make a separate program for a zero
gradient: XLA fuses those differently, and AdamW is off by an ulp.

The optimizers of PER_EXPERT (exclusions.py) compute nothing over several experts: AdamW
is elementwise, Adafactor takes every mean, and with it update clipping and parameter scale,
within one matrix of one expert. So an expert alone is updated like the same one in a stack.

Dims: E experts, 1 here; D model, F ffn
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

from switchx import tree
from switchx.optim.protocol import Optimizer
from switchx.optim.schedules import Schedule
from switchx.partitioning.mesh import cpu_device
from switchx.storage.record import ArrayType, Record


class ExpertForm:
    """One expert of a Switch layer as a tree of arrays `[1, ...]`, and as a record.

    The tree is a training state's `params` and `opt_state` for this expert only. An array of
    the record has the name of the array of the whole state that it is a part of, without that
    one's N and E. The optimizer's counts are not stored: they are the record's `updates`.

    Attributes:
        types: arrays of the record by name.
        params: shape structs of the tree's parameters.
    """

    def __init__(self, optimizer, params: Mapping[str, jax.ShapeDtypeStruct]):
        """The form of an expert with these parameters `[1, ...]`, by path."""
        self.params = tree.nested(params)
        state = {
            "params": self.params,
            "opt_state": jax.eval_shape(optimizer.init, self.params),
        }
        self._structure = jax.tree.structure(state)
        self._leaves = tree.named_leaves(state)
        self.types = {
            name: ArrayType(leaf.shape[1:], leaf.dtype.name)
            for name, leaf in self._leaves.items()
            if leaf.shape
        }

    def state(self, record: Record):
        """The tree of a record; its arrays are views of the record's."""
        leaves = [
            record.arrays[name][None] if leaf.shape else np.asarray(record.updates, leaf.dtype)
            for name, leaf in self._leaves.items()
        ]
        return jax.tree.unflatten(self._structure, leaves)

    def record(self, state, updates: int) -> Record:
        """The record of a tree of arrays; waits until they are computed."""
        leaves = tree.named_leaves(state)
        arrays = {name: np.asarray(leaves[name])[0] for name in self.types}
        return Record(arrays, updates)


class LazyUpdate:
    """A job's optimizer as a program for one expert, on JAX's CPU back end."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule):
        """Builds an optimizer of `PER_EXPERT`; compiles at the first expert of each form."""
        self._optimizer = optimizer.build(schedule)
        self._cpu = cpu_device()
        self._mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=[self._cpu])
        self._init = jax.jit(self._optimizer.init)
        self._advance = jax.jit(self._advance_state)

    def form(self, params: Mapping[str, jax.ShapeDtypeStruct]) -> ExpertForm:
        """The form of an expert with these parameters `[1, ...]`, by path."""
        return ExpertForm(self._optimizer, params)

    def first_record(self, form: ExpertForm, params: Mapping[str, np.ndarray]) -> Record:
        """An expert before its first update.

        Args:
            params: arrays `[1, ...]` by path.
        """
        params = tree.nested(params)
        with jax.set_mesh(self._mesh):
            opt_state = self._init(jax.device_put(params, self._cpu))
        return form.record({"params": params, "opt_state": opt_state}, 0)

    def advance(
        self,
        form: ExpertForm,
        record: Record,
        updates: int,
        gradient: Mapping[str, np.ndarray] | None = None,
        gradient_scale: float = 1.0,
    ) -> Record:
        """The expert after `updates` updates in all, the last of them by a gradient.

        Args:
            gradient: raw gradients, `[1, ...]` by path of the parameter; None if the last one
                was missed too.
            gradient_scale: factor of the gradient.
        """
        if gradient is None:
            own = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), form.params)
        else:
            own = tree.nested(gradient)
        arguments = (
            form.state(record),
            own,
            np.int32(updates - record.updates),
            np.bool_(gradient is not None),
            np.float32(gradient_scale),
        )
        with jax.set_mesh(self._mesh):
            # It may use NumPy's memory as it is, none of which is written again.
            state = self._advance(*jax.device_put(arguments, self._cpu))
        return form.record(state, updates)

    def _advance_state(self, state, gradient, turns, has_gradient, gradient_scale):
        def turn(number, state):
            is_own = has_gradient & (number == turns - 1)
            now = jax.tree.map(lambda g: jnp.where(is_own, g, jnp.zeros_like(g)), gradient)
            updates, opt_state = self._optimizer.update(
                now, state["opt_state"], state["params"], gradient_scale=gradient_scale
            )
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt_state": opt_state}

        return jax.lax.fori_loop(0, turns, turn, state)
