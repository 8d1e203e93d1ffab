# SPDX-License-Identifier: Apache-2.0
"""Runs made to raise each alarm, through the command: step of the alarm, step of the loss.

`pytest -s -m slow tests/integration/test_routing_alarms.py` prints them, a row a
fault; one is in docs/routing_statistics.md.
"""

import math

import pytest

from switchx.cli.main import main
from tests.compilation import on_devices
from tests.integration import rates
from tests.integration.runs import arguments, lines, write_corpus

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("steps_traced_once")]

STEPS = 300
SETTINGS = (
    f"TRAIN_STEPS={STEPS}", "LOG_EVERY=5", f"EVAL_EVERY={STEPS}", f"CHECKPOINT_EVERY={STEPS}",
    "TrainingJob.eval_batches=1", "TrainingJob.eval_at_start=False",
)  # fmt: skip
FROZEN = "StepConfig.rate_multipliers=((r'.*/w_router_DE', 0.0),)"
# What is made wrong, and the alarms that it has to raise.
FAULTS = {
    "balance weight 0": (["LossConfig.balance_weight=0.0"], {"dropped", "dead_expert"}),
    "router uniform and frozen": (
        [FROZEN, "SwitchConfig.router_init_scale=0.000001"],
        {"information"},
    ),
    "balance weight 0, and a bias that drifts": (
        ["LossConfig.balance_weight=0.0", "RouterConfig.bias_update_rate=0.000000001"],
        {"bias"},
    ),
    # Later some steps are not finite, and the command fails.
    "learning rate times 10 from step 200 on": (
        ["rates.Jump.step=200", "TRAIN_STEPS=240"],
        {"max_violation"},
    ),
}
# The loss shows a fault where it is this much over the healthy run's in three lines running.
SEEN_NATS = 0.1


@pytest.fixture(scope="module")
def trained(tmp_path_factory, session_cache):
    """Trains a run of these bindings; its folder."""
    base = tmp_path_factory.mktemp("alarms")
    files = write_corpus(base)

    (base / "jump.gin").write_text(rates.GIN)

    def train(name: str, *bindings: str):
        folder = base / name.replace(" ", "_")
        words = arguments(folder, files, *SETTINGS, *bindings)
        if any(each.startswith("rates.") for each in bindings):
            words.insert(1, f"--gin_file={base / 'jump.gin'}")
        with on_devices(1):
            assert main(["train", *words]) == 0
        return folder

    return train


@pytest.fixture(scope="module")
def healthy(trained):
    return trained("healthy")


def seen_in_loss(folder, healthy) -> float:
    """The step at which the loss shows the fault; infinity where it never does."""
    in_a_row = 0
    others = {line["step"]: line["loss"] for line in lines(healthy / "metrics.jsonl")}
    for line in lines(folder / "metrics.jsonl"):
        in_a_row = in_a_row + 1 if line["loss"] > others[line["step"]] + SEEN_NATS else 0
        if in_a_row == 3:
            return line["step"]
    return math.inf


def test_a_healthy_run_raises_none(healthy):
    assert not (healthy / "alarms.jsonl").exists()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_raises_its_alarms_before_the_loss_shows_it(fault, trained, healthy, capsys):
    bindings, kinds = FAULTS[fault]
    folder = trained(fault, *bindings)
    first = {}
    for alarm in lines(folder / "alarms.jsonl"):
        first.setdefault(alarm["kind"], alarm["step"])
    seen = seen_in_loss(folder, healthy)
    with capsys.disabled():
        said = ", ".join(f"{kind} {step}" for kind, step in first.items())
        print(f"\n| {fault} | {said} | {seen if seen < math.inf else f'not in {STEPS}'} |")
    assert kinds <= first.keys()
    assert min(first[kind] for kind in kinds) < seen


PLACES = {
    "stages": (4, ["meshes/pipeline.gin"]),
    "experts in host memory": (1, ["optimizers/adamw.gin", "storage/host.gin"]),
    "experts on a disk": (1, ["optimizers/adamw.gin", "storage/disk.gin"]),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_alarm_ends_training_wherever_the_model_is(place, in_a_folder, capsys):
    """The one fault is the threshold: more information than there can be."""
    devices, files = PLACES[place]
    bindings = [
        *("RoutingAlarms.least_information=9.0", "RoutingAlarms.lines_in_a_row=2"),
        *("RoutingAlarms.first_lines=1", "RoutingAlarms.dropped_factor=None"),
        *("ModelConfig.num_encoder_layers=2", "ModelConfig.num_decoder_layers=2"),
        *("ModelConfig.scan_layers=True", "TrainingJob.eval_at_start=False"),
        *("RoutingAlarms.violation_factor=None", "WARMUP_STEPS=2"),
    ]
    words = arguments("run", write_corpus(in_a_folder), *bindings)
    words[1:1] = [f"--gin_file={file}" for file in files]
    with on_devices(devices):
        assert main(["train", *words, "--stop_on_alarm"]) == 3
    said = capsys.readouterr().err
    assert "alarm at step 6: encoder 0: a token tells " in said
    assert {alarm["step"] for alarm in lines(in_a_folder / "run/alarms.jsonl")} == {6}
    assert (in_a_folder / "run/checkpoints/6").is_dir()
