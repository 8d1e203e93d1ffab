# SPDX-License-Identifier: Apache-2.0
"""`switchx bench storage`: training with experts on a disk against the resident program.

What must be exact (gradients, bits, bytes, order) stands here and in storage_order.py, times in
storage_time.py; what needs a process of its own, memory and `kill -9`, in storage_memory.py and
storage_resumed.py.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2.
Dims: B rows, L tokens of a row, E experts
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from switchx import tree
from switchx.bench import storage_memory, storage_order, storage_resumed, storage_time
from switchx.bench.report import Check, Report
from switchx.bench.storage_runs import (
    ADAMW,
    EXPERTS,
    LAYERS,
    MODEL,
    differing_bits,
    make_batch,
    make_job,
    opened,
    opened_resident,
    programs_compiled_once,
    record_bytes,
    records_of,
    trained,
)
from switchx.models.config import ModelConfig, RouterConfig
from switchx.optim.adafactor import Adafactor
from switchx.storage.cache import StorageSpec
from switchx.storage.simulation import POLICIES
from switchx.training.layered_step import LayeredGradients
from switchx.training.step import gradients

Rows = list[dict[str, Any]]
Note = Callable[[str], None]

OPTIMIZERS = {
    "adamw": ADAMW,
    "adafactor": Adafactor(min_dim_size_to_factor=8),
    "adafactor, momentum": Adafactor(
        min_dim_size_to_factor=8, beta1=0.9, weight_decay_rate=0.01
    ),
}
# The least is one layer's experts.
FRACTIONS = (0.1, 0.25, 0.5, 1.0)
BIT_STEPS, LOSS_STEPS = 20, 50


def run(rounds: int, *, is_quick: bool = False, note: Note = lambda text: None) -> Report:
    """All rows, each part's with its own first column, and the checks.

    Args:
        is_quick: fewer models, capacities, steps and kills.
    """
    with programs_compiled_once():
        note("times")
        times, time_checks = storage_time.measured(rounds)
        note("gradients")
        models = list(gradient_models().items())[: 1 if is_quick else None]
        of_gradients = gradient_rows(dict(models))
        note("bits, by capacity and policy")
        by_cache = cache_rows(FRACTIONS[::3] if is_quick else FRACTIONS)
        note("late updates")
        lazy = lazy_rows(list(OPTIMIZERS)[: 1 if is_quick else None])
        note("losses")
        losses = loss_rows(10 if is_quick else LOSS_STEPS)
        note("bytes and order")
        traffic, order = storage_order.traffic_rows(), storage_order.order_rows()
        note("memory")
        memory = storage_memory.rows()
        kills = storage_resumed.rows(is_quick=is_quick, note=note)
    checks = [
        Check("layered_gradient_error", largest(of_gradients, "relative_error"), "<=1e-6"),
        Check("bits_differing_by_cache", largest(by_cache, "bits_differing"), "==0"),
        Check("lazy_vs_dense_bits_differing", largest(lazy, "bits_differing"), "==0"),
        Check("loss_vs_resident", losses[0]["max_relative_difference"], "<=1e-5"),
        *time_checks,
        storage_memory.check(memory),
        *storage_order.checks(traffic, order),
        Check("kill9_differing", sum(row["differing"] for row in kills), "==0"),
    ]
    rows = of_gradients + by_cache + lazy + losses + traffic + order + times + memory + kills
    return Report("bench storage", rows, checks)


def largest(rows: Rows, column: str) -> float:
    """Of a column; NaN where one is."""
    return float(np.max([row[column] for row in rows]))


# layered_gradient_error: raw, dropout on.


def gradient_models() -> dict[str, ModelConfig]:
    """Kinds of models and routers; stacks of four blocks."""
    small = dataclasses.replace(MODEL, num_decoder_layers=4)
    both = dataclasses.replace(small, architecture="encoder_decoder", num_encoder_layers=4)

    def routed(model, router, **switch):
        switch = dataclasses.replace(model.switch, router=router, **switch)
        return dataclasses.replace(model, switch=switch)

    return {
        "decoder only": small,
        "encoder and decoder": both,
        "expert choice": routed(
            both, RouterConfig("expert_choice", exploration="none"), stacks="encoder"
        ),
        "hash": routed(small, RouterConfig("hash", exploration="none")),
        "two experts, biased": routed(
            small, RouterConfig(num_selected=2, bias_update_rate=1e-3)
        ),
    }


class KeptGradients:
    """The banks of a run's records, that also keep the gradients of experts.

    Attributes:
        grads: `[N, E, ...]` by path, as of the whole step.
    """

    def __init__(self, banks, params: Mapping[str, np.ndarray]):
        self._banks = banks
        self.grads = {name: np.zeros_like(leaf) for name, leaf in params.items()}

    def __getattr__(self, name: str):
        return getattr(self._banks, name)

    def keep_gradients(self, run, used_JE, bank) -> None:
        for name, gradient in bank.items():
            self.grads[name][run.place] += np.asarray(gradient)
        self._banks.keep_gradients(run, used_JE, bank)


def gradient_rows(models: Mapping[str, ModelConfig]) -> Rows:
    """A row a model: the distance of all raw gradients, over the norm of the resident ones."""
    return [
        {"gradients": name, "relative_error": gradient_error(model)}
        for name, model in models.items()
    ]


def gradient_error(model: ModelConfig) -> float:
    """Of experts read from records, in two microbatches, against the resident program's."""
    job, batch = make_job(model), make_batch(model, 0)
    with opened_resident(job) as resident:
        state = resident.init_state()
        compute = jax.jit(functools.partial(gradients, model, job.loss, job.step))
        want = tree.named_leaves(compute(state.params, batch, key=state.key)[0])
        params = jax.device_get(state.params)
    with opened(job) as (program, _):
        state = program.init_state(params)
        leaves = tree.named_leaves(params)
        prefix = "params/"
        on_disk = {name.removeprefix(prefix) for name in program.experts.abstract}
        banks = KeptGradients(
            program.experts, {n: leaf for n, leaf in leaves.items() if n in on_disk}
        )
        program.experts.begin_sweeps(is_training=True)
        layered = LayeredGradients(model, job.loss, job.step.num_microbatches, slots=2)
        grads, _ = layered.gradients(state.params, batch, banks, key=state.key)
    return _relative_distance(tree.named_leaves(grads) | banks.grads, want)


def _relative_distance(got: Mapping[str, Any], want: Mapping[str, Any]) -> float:
    if got.keys() != want.keys():
        raise ValueError(f"gradients of {sorted(got.keys() ^ want.keys())} on one side alone")
    pairs = [(np.asarray(got[n], np.float64), np.asarray(want[n], np.float64)) for n in want]
    distance = sum(np.sum(np.square(a - b)) for a, b in pairs)
    return float(np.sqrt(distance / sum(np.sum(np.square(b)) for _, b in pairs)))


# bits_differing_by_cache: neither how many records are cached nor which changes a bit.


def cache_rows(fractions=FRACTIONS, num_steps: int = BIT_STEPS, policies=POLICIES) -> Rows:
    """A row a policy and capacity: bits that differ from the run with all in the cache."""
    rows, expected = [], None
    for policy in policies:
        for fraction in sorted(fractions, reverse=True):
            found, hit_rate = everything(policy, fraction, num_steps)
            expected = found if expected is None else expected
            rows.append(
                {
                    "cached": f"{fraction:.0%}, {policy}",
                    "hit_rate": hit_rate,
                    "bits": sum(8 * array.nbytes for array in found.values()),
                    "bits_differing": differing_bits(found, expected),
                }
            )
    return rows


def everything(policy: str, fraction: float, num_steps: int):
    """All that a run made: losses, the state, records; and its cache's hit rate."""
    host_bytes = round(fraction * LAYERS * EXPERTS) * record_bytes(make_job())
    job = make_job(storage=StorageSpec("disk", host_bytes=host_bytes, policy=policy))
    with opened(job) as (program, folder):
        state, losses = trained(program, num_steps)
        hit_rate = program.experts.metrics()["hit_rate"]
        parts = {"params": state.params, "opt_state": state.opt_state, "losses": losses}
        arrays = tree.named_leaves(jax.device_get(parts))
        arrays = {name: np.asarray(leaf) for name, leaf in arrays.items()}
        return arrays | records_of(program, folder / "saved"), hit_rate


# lazy_vs_dense_bits_differing: records updated when they are used, and all in each step.


def lazy_rows(optimizers=tuple(OPTIMIZERS), num_steps: int = BIT_STEPS) -> Rows:
    """A row an optimizer: bits that differ between records of late updates and in time."""
    rows = []
    for name in optimizers:
        job = make_job(optimizer=OPTIMIZERS[name])
        with opened(job) as (program, folder):
            trained(program, num_steps)
            share = program.experts.metrics()["touched_share"]
            late = records_of(program, folder / "saved")
        with opened(job) as (program, folder):
            trained(program, num_steps, program.experts.settle)
            in_time = records_of(program, folder / "saved")
        bits = differing_bits(late, in_time)
        rows.append({"late_updates": name, "touched_share": share, "bits_differing": bits})
    return rows


# loss_vs_resident


def loss_rows(num_steps: int = LOSS_STEPS) -> Rows:
    """Losses with experts on a disk, and of a control, against the resident program's.

    The control is the resident program without remat: what rounding alone does.
    """
    job = make_job()
    control = dataclasses.replace(job, model=dataclasses.replace(MODEL, remat="none"))
    with opened_resident(job) as program:
        _, expected = trained(program, num_steps)
    with opened(job) as (program, _):
        _, on_disk = trained(program, num_steps)
    with opened_resident(control) as program:
        _, without_remat = trained(program, num_steps)
    found = {"on a disk": on_disk, "control: resident, no remat": without_remat}
    return [
        {
            "losses": f"{num_steps} steps, {name}",
            "first_loss": float(each[0]),
            "last_loss": float(each[-1]),
            "max_relative_difference": float(np.max(np.abs(each / expected - 1))),
        }
        for name, each in found.items()
    ]
