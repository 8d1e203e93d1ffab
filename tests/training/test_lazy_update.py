# SPDX-License-Identifier: Apache-2.0
"""Updates of single experts: late as in time, bit for bit; as those of whole stacks."""

import jax
import numpy as np
import optax
import pytest

from switchx import tree
from switchx.optim.adafactor import Adafactor
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import LinearWarmup
from switchx.storage.record import require_types
from switchx.training.offload.lazy_update import LazyUpdate

SCHEDULE = LinearWarmup(0.1, 3)
# Of a stack of 2 layers of 3 experts.
SHAPES = {
    "blocks/experts/w_in_EDF": (2, 3, 4, 6),
    "blocks/experts/w_out_EFD": (2, 3, 6, 4),
    "blocks/experts/b_in_EF": (2, 3, 6),
}
STEPS = 7
OPTIMIZERS = {
    "adamw": AdamW(weight_decay=0.3, epsilon=1e-4),
    "adafactor": Adafactor(min_dim_size_to_factor=5),
    "adafactor_factored": Adafactor(min_dim_size_to_factor=2),
    "adafactor_momentum": Adafactor(min_dim_size_to_factor=2, beta1=0.9, weight_decay_rate=0.1),
}


def draw(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}


def is_touched(step: int, n: int, e: int) -> bool:
    """Each step another part; one expert never, one in the first step alone."""
    return (n, e) != (0, 1) and ((step + n) % (e + 2) == 0 or (step == 0 and e == 2))


def gradient_of(step: int, n: int, e: int) -> dict[str, np.ndarray]:
    scale = 1.0 if is_touched(step, n, e) else 0.0
    return {name: scale * g[n, e][None] for name, g in draw(step + 1).items()}


def run(optimizer, *, is_lazy: bool):
    """Records after STEPS updates: of all experts in each step, or of those with a gradient."""
    lazy = LazyUpdate(optimizer, SCHEDULE)
    form = lazy.form(
        {name: jax.ShapeDtypeStruct((1, *s[2:]), "float32") for name, s in SHAPES.items()}
    )
    records = {}
    for n, e in np.ndindex(2, 3):
        params = {name: leaf[n, e][None] for name, leaf in draw(0).items()}
        records[n, e] = lazy.first_record(form, params)
        require_types(records[n, e], form.types)
    for step in range(STEPS):
        for (n, e), record in records.items():
            if is_touched(step, n, e) or not is_lazy:
                gradient = gradient_of(step, n, e)
                records[n, e] = lazy.advance(form, record, step + 1, gradient, 0.5)
    if is_lazy:
        assert {record.updates for record in records.values()} != {STEPS}
        records = {at: lazy.advance(form, each, STEPS) for at, each in records.items()}
    return records


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_late_updates_are_those_in_time_and_those_of_the_whole_stack(optimizer):
    lazy, dense = run(optimizer, is_lazy=True), run(optimizer, is_lazy=False)
    for at, record in dense.items():
        assert lazy[at].updates == record.updates == STEPS
        for name, array in record.arrays.items():
            assert lazy[at].arrays[name].tobytes() == array.tobytes(), (at, name)
    # The whole stack at once, as the resident program updates it.
    whole = optimizer.build(SCHEDULE)
    params = tree.nested(draw(0))
    state = whole.init(params)
    update = jax.jit(whole.update)
    for step in range(STEPS):
        grads = draw(step + 1)
        for n, e in np.ndindex(2, 3):
            for g in grads.values():
                g[n, e] *= is_touched(step, n, e)
        updates, state = update(tree.nested(grads), state, params, gradient_scale=0.5)
        params = optax.apply_updates(params, updates)
    leaves = tree.named_leaves({"params": params, "opt_state": state})
    for at, record in dense.items():
        for name, array in record.arrays.items():
            np.testing.assert_allclose(
                array, leaves[name][at], rtol=2e-5, atol=1e-6, err_msg=name
            )
