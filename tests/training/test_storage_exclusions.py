# SPDX-License-Identifier: Apache-2.0
"""What experts in storage exclude is refused in the same words by plan, compile and train."""

import argparse
import dataclasses

import jax
import optax
import pytest

from switchx.checkpoint.retention import Retention
from switchx.checkpoint.run_folder import RunFolder
from switchx.cli import plan
from switchx.compiled.elastic import job_for_devices
from switchx.compiled.training_step import compile_step
from switchx.compiled.workload import workload_of
from switchx.hardware.spec import load_hardware
from switchx.moe.capacity import slot_notes
from switchx.moe.config import RouterConfig, SwitchConfig
from switchx.optim.protocol import Optax
from switchx.partitioning.mesh import MeshSpec
from switchx.training.distillation.soft_loss import Distillation
from switchx.training.job import InitConfig, TrainingJob
from switchx.training.offload.disk_program import LayeredProgram
from switchx.training.offload.exclusions import EXCLUSIONS
from switchx.training.offload.host_program import HostProgram
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.step import StepConfig
from switchx.training.text_evaluation import TextEvaluation
from tests.training.jobs import SPARSE, OwnConfig, make_job, with_switch

SCANNED = dataclasses.replace(SPARSE, scan_layers=True)


class Built(OwnConfig):
    def build(self, key):
        raise AssertionError("nothing is built")


REPLAY = RouterConfig(overflow="dropless", replay=True)
SLICED = MeshSpec(rules=dataclasses.replace(MeshSpec().rules, optimizer_slices=("data",)))
# What each row of the table is about, and what the refusal begins with.
CASES = {
    "model": ({"model": Built(**vars(SCANNED))}, "@Built()"),
    "StepConfig.rate_multipliers": (
        {"step": StepConfig(rate_multipliers=(("embedding/.*", 0.1),))},
        "(('embedding/.*', 0.1),)",
    ),
    "StepConfig.ema_decay": ({"step": StepConfig(ema_decay=0.9)}, "0.9"),
    "StepConfig.log_rms": ({"step": StepConfig(log_rms=True)}, "True"),
    "Rules.optimizer_slices": ({"mesh": SLICED}, "('data',)"),
    "TrainingJob.optimizer": ({"optimizer": Optax(optax.sgd)}, "@Optax()"),
    "SwitchConfig.num_replicas": ({"model": with_switch(SCANNED, num_replicas=2)}, "2"),
    "RouterConfig.replay": ({"model": with_switch(SCANNED, router=REPLAY)}, "True"),
    "TrainingJob.distillation": ({"distillation": Distillation("runs/a")}, "@Distillation()"),
    "TrainingJob.text_evaluation": ({"text_evaluation": TextEvaluation()}, "@TextEvaluation()"),
    "Retention.local_dir": ({"retention": Retention(local_dir="a")}, "'a'"),
    "InitConfig.optimizer": ({"init_from": "a", "init": InitConfig(optimizer=True)}, "True"),
}
ROWS = [(row, tier) for row in EXCLUSIONS for tier in row.tiers]


def said(call) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize("row, tier", ROWS, ids=[f"{row.name}-{tier}" for row, tier in ROWS])
def test_all_refuse_in_the_same_words(row, tier, tmp_path):
    changes, shown = CASES[row.name]
    job: TrainingJob = make_job(**{"model": SCANNED, "storage": StorageSpec(tier)} | changes)
    message = job.storage_refusal(tier, {})
    start = f"{row.name}={shown} with StorageSpec.experts={tier!r}: "
    assert message.startswith(start) and message.endswith(", or experts='device'")
    assert job.storage_refusal("device", {}) is None
    devices = jax.devices()[:1]
    if tier == "host":
        assert said(lambda: HostProgram(job, devices)) == message
    else:
        assert said(lambda: LayeredProgram(job, RunFolder(tmp_path), devices)) == message
    assert said(lambda: compile_step(job, devices, 1 << 30)) == message
    hardware = load_hardware("v5e")
    assert said(lambda: job_for_devices(job, hardware, devices)) == message
    # Asked for on plan's command line alone.
    on_device = dataclasses.replace(job, storage=StorageSpec())
    asked = argparse.Namespace(storage=tier, touched=None)
    workload = workload_of(make_job(SCANNED))
    found = said(lambda: plan._search(asked, on_device, workload, hardware, 1))
    assert found == message


def test_what_is_free_is_not_refused():
    assert CASES.keys() == {row.name for row in EXCLUSIONS}
    deeper = dataclasses.replace(SCANNED, num_decoder_layers=2 * SCANNED.num_decoder_layers)
    job = make_job(deeper)
    assert {job.storage_refusal(tier, {}) for tier in ("host", "disk")} == {None}
    on_disk = dataclasses.replace(job, storage=StorageSpec("disk"))
    message = said(lambda: compile_step(on_disk, jax.devices()[:1], 1 << 30))
    assert message.startswith("StorageSpec.experts='disk': a step is a program for each period")


@pytest.mark.parametrize(
    "changes, router, words",
    [
        ({}, {}, "SwitchConfig.capacity_factor=1.25 and RouterConfig.overflow='drop'"),
        ({"expert_capacity": 64}, {"overflow": "identity"}, "SwitchConfig.expert_capacity=64"),
        ({}, {"overflow": "dropless"}, None),
        ({"capacity_factor": 8.0}, {}, None),
        ({"capacity_factor": 4.0}, {"num_selected": 2}, None),
        ({"dispatcher": "gather"}, {}, None),
        ({}, {"kind": "expert_choice"}, None),
        (
            {"dispatcher": "gather"},
            {"overflow": "dropless", "num_selected": 2},
            "each of 8 experts has a slot for every token, which chooses 2, so experts compute "
            "4 times the rows",
        ),
        ({"dispatcher": "sliced"}, {"overflow": "dropless"}, None),
        ({"dispatcher": "gather"}, {"overflow": "dropless", "num_selected": 8}, None),
        ({"dispatcher": "gather", "sublayers": "attention"}, {"overflow": "dropless"}, None),
    ],
)
def test_a_dispatcher_that_is_not_the_overflows_is_said(changes, router, words):
    fields = {"dispatcher": "dropless"} | changes
    notes = slot_notes(SwitchConfig(8, router=RouterConfig(**router), **fields))
    assert len(notes) == (words is not None)
    for note in notes:
        way = (
            "dispatcher='dropless'" if "gather" in note else "RouterConfig.overflow='dropless'"
        )
        assert words in note and f"{way}" in note.rpartition("; ")[2]
