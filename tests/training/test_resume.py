# SPDX-License-Identifier: Apache-2.0
"""What of a run may change when it goes on or is evaluated; `config.json`."""

import ast
import dataclasses
import json
import pathlib
import re

import optax
import pytest

from switchx.checkpoint.retention import Retention
from switchx.checkpoint.run_folder import RunFolder, read_config, read_model_config
from switchx.data.corpora.text_files import TextFiles
from switchx.data.loader import Prefetch
from switchx.data.mixtures import Mixture
from switchx.data.objectives import InputsToTargets
from switchx.data.text_metrics import Accuracy
from switchx.data.tokenizers import ByteVocabulary
from switchx.data.vocabularies import CorpusVocabulary, SavedVocabulary, save_vocabulary
from switchx.fields import describe
from switchx.models.adapters import LoRASpec
from switchx.models.config import ModelConfig, Precision, RouterConfig, SwitchConfig
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import Constant, WarmupCosine
from switchx.partitioning.compiler_options import CompilerOptions
from switchx.partitioning.mesh import MeshSpec
from switchx.pipeline.schedule import ScheduleSpec
from switchx.training.distillation.soft_loss import Distillation
from switchx.training.job import InitConfig, TrainingJob
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.resume import (
    check_same_model,
    check_same_run,
    with_vocabulary_of,
    write_run_config,
)
from switchx.training.step import StepConfig
from switchx.training.telemetry.metric_writers import WeightsAndBiases
from switchx.training.telemetry.routing_alarms import RoutingAlarms
from switchx.training.text_evaluation import TextEvaluation
from tests.data.refusals import refused
from tests.processes import ROOT
from tests.training.jobs import LENGTH, LOSS, SPARSE, TASK, make_job, with_switch


def sparse(switch=(), **changes) -> ModelConfig:
    return dataclasses.replace(with_switch(SPARSE, **dict(switch)), **changes)


# Of a job: what changes no mathematics.
FREE = {
    "train_steps": 100,
    "log_every": 50,
    "eval_every": 50,
    "checkpoint_every": 50,
    "eval_batches": None,
    "eval_at_start": False,
    "retention": Retention(keep_last=7),
    "max_skipped_in_a_row": 99,
    "data_dir": "elsewhere",
    "init_from": "moved",
    "metric_writers": (WeightsAndBiases("mine"),),
    "alarms": RoutingAlarms(first_lines=20),
    "init": InitConfig(step="best"),
    "mesh": MeshSpec(data=2, expert=4),
    "pipeline": ScheduleSpec(kind="gpipe"),
    "prefetch": Prefetch(num_workers=2),
    "compiler": CompilerOptions(tpu=("xla_a=1",)),
    "storage": StorageSpec("disk", host_bytes=10**9),
    "text_evaluation": TextEvaluation(),
    "step": StepConfig(num_microbatches=2, bucket_bytes=1 << 20),
    "model": sparse(
        {"dispatcher": "all_to_all", "buffer_factor": 2.0}, remat="full", scan_layers=True
    ),
}
# Field -> another value, and what the error says of it.
FIXED = {
    "model": (sparse({"num_experts": 4}), "model.switch.num_experts: 8 there, 4 here"),
    "source": (
        dataclasses.replace(TASK, name="other"),
        "source.name: 'letters' there, 'other' here",
    ),
    "optimizer": (AdamW(), "optimizer: Adafactor there, AdamW here"),
    "schedule": (Constant(0.5), "schedule.value: 0.01 there, 0.5 here"),
    "loss": (
        dataclasses.replace(LOSS, layer_reduction="sum"),
        "loss.layer_reduction: 'mean' there, 'sum' here",
    ),
    "inputs_length": (5, "inputs_length: 4 there, 5 here"),
    "targets_length": (5, "targets_length: 4 there, 5 here"),
    "batch_size": (16, "batch_size: 8 there, 16 here"),
    "seed": (1, "seed: 0 there, 1 here"),
    "packed": (False, "packed: True there, False here"),
    "distillation": (Distillation("teacher"), "distillation: None there, {<any>} here"),
    "lora": (LoRASpec("base"), "lora: None there, {<any>} here"),
    "step": (StepConfig(clip_norm=1.0), "step.clip_norm: None there, 1.0 here"),
}


@pytest.fixture
def run(tmp_path):
    """A run folder of `make_job()`."""
    folder = RunFolder(tmp_path)
    write_run_config(folder, make_job())
    return folder


def edited(run, edit) -> RunFolder:
    config = json.loads(run.config.read_text())
    edit(config)
    run.config.write_text(json.dumps(config))
    return run


def test_every_field_of_a_job_is_tried_here():
    assert FREE.keys() | FIXED.keys() == {f.name for f in dataclasses.fields(TrainingJob)}


@pytest.mark.parametrize("name", FREE)
def test_what_changes_no_mathematics_may_change(run, name):
    check_same_run(run, make_job(**{"model": SPARSE, "init_from": "it", name: FREE[name]}))


@pytest.mark.parametrize("name", FIXED)
def test_what_changes_a_step_may_not_change(run, name):
    value, difference = FIXED[name]
    with refused(f"<any>belongs to another configuration ({difference}); <any>"):
        check_same_run(run, make_job(**{"model": SPARSE, name: value}))


def test_all_differences_are_listed(run):
    with refused("(batch_size: 8 there, 16 here<any>seed: 0 there, 1 here)"):
        check_same_run(run, make_job(batch_size=16, seed=1, train_steps=9))


@pytest.mark.parametrize(("rows", "is_told"), [(1, False), (2, False), (1000, True)])
def test_microbatches_that_are_smaller_than_a_group_are_told(tmp_path, caplog, rows, is_told):
    job = make_job(sparse({"group_size": rows * LENGTH}))
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    write_run_config(run, job)
    check_same_run(run, dataclasses.replace(job, step=StepConfig(num_microbatches=2)))
    assert (f"SwitchConfig.group_size={rows * LENGTH} with 2" in caplog.text) == is_told


def test_a_longer_run_may_stretch_its_schedule(tmp_path):
    run = RunFolder(tmp_path)
    write_run_config(run, make_job(schedule=WarmupCosine(0.1, 2, 10)))
    check_same_run(run, make_job(schedule=WarmupCosine(0.1, 2, 20), train_steps=20))
    with refused("schedule.peak: 0.1 there, 0.2 here"):
        check_same_run(run, make_job(schedule=WarmupCosine(0.2, 2, 10)))


def test_older_runs_lack_fields_that_have_defaults_now(run):
    def older(config):
        del (
            config["packed"],
            config["model"]["remat"],
            config["model"]["switch"]["router"]["gate"],
        )

    edited(run, older)
    check_same_run(run, make_job())
    assert read_model_config(run) == SPARSE
    with refused("(packed: True there, False here)"):
        check_same_run(run, make_job(packed=False))


def test_a_field_that_is_known_no_more_is_named(run):
    edited(run, lambda config: config["loss"].update(flux=0.5))
    with refused("(loss.flux: 0.5 there, unknown here)"):
        check_same_run(run, make_job())


def test_another_vocabulary_is_refused(run):
    job = make_job(source=dataclasses.replace(TASK, vocabulary=ByteVocabulary(num_sentinels=7)))
    for check in (check_same_run, check_same_model):
        with refused("was trained with another vocabulary: 384 ids there, 384 here"):
            check(run, job)


def test_an_evaluation_may_change_whatever_the_parameters_do_not_depend_on(run):
    check_same_model(run, make_job(batch_size=16, seed=9, optimizer=AdamW(), packed=False))
    router = RouterConfig(exploration="none", overflow="dropless")
    switch = {"eval_capacity_factor": 8.0, "dispatcher": "einsum", "router": router}
    precision = Precision(compute="bfloat16")
    check_same_model(run, make_job(sparse(switch, dropout_rate=0.5, precision=precision)))
    with refused("(model.switch.router.num_selected: 1 there, 2 here)"):
        check_same_model(run, make_job(sparse({"router": RouterConfig(num_selected=2)})))
    with refused("(model.num_heads: 2 there, 4 here<any>model.switch.num_experts: 8 there, 16"):
        check_same_model(run, make_job(sparse({"num_experts": 16}, num_heads=4)))


def test_a_description_is_json_and_says_types():
    job = make_job(retention=Retention(keep_best=2))
    text = describe(job)
    assert json.loads(json.dumps(text)) == text
    assert text["type"] == "TrainingJob" and text["source"]["type"] == "Task"
    assert text["source"]["corpus"]["type"] == "tests.data.fakes.ListCorpus"
    assert text["source"]["corpus"]["fields"] == ["text"]
    assert text["retention"]["keep_best"] == 2
    assert describe(pathlib.PurePosixPath("a/b")) == "a/b"
    assert describe(optax.lion) == "optax._src.alias.lion"


@pytest.mark.parametrize("value", [lambda step: 0.1, object()])
def test_what_cannot_be_read_again_is_refused_by_name(tmp_path, value):
    with refused("job.schedule=<any> cannot be written into a run folder"):
        write_run_config(RunFolder(tmp_path), make_job(schedule=value))
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_with_other_metrics_of_its_tasks(tmp_path):
    task = dataclasses.replace(TASK, objective=InputsToTargets())
    run = RunFolder(tmp_path).create()
    write_run_config(run, make_job(source=task))
    check_same_run(run, make_job(source=dataclasses.replace(task, metrics=(Accuracy(),))))


def test_a_run_goes_on_with_other_tasks_to_evaluate_that_have_its_vocabulary(tmp_path):
    run = RunFolder(tmp_path).create()
    write_run_config(run, make_job(source=Mixture((TASK,))))
    other = dataclasses.replace(TASK, name="other", vocabulary=SavedVocabulary(str(tmp_path)))
    job = make_job(source=Mixture((TASK,), evaluation=(other,)))
    check_same_run(run, job)
    source = with_vocabulary_of(run, job).source
    assert source.evaluation[0].vocabulary == source.tasks[0].vocabulary == TASK.vocabulary
    of_files = CorpusVocabulary(TextFiles(["gone.txt"]), 300)  # has a list, and cannot be read
    job = make_job(source=dataclasses.replace(TASK, vocabulary=of_files))
    assert with_vocabulary_of(run, job).source.vocabulary == TASK.vocabulary
    (tmp_path / "elsewhere").mkdir()
    save_vocabulary(ByteVocabulary(num_sentinels=3), tmp_path / "elsewhere")
    odd = dataclasses.replace(other, vocabulary=SavedVocabulary(str(tmp_path / "elsewhere")))
    with refused("the tasks ['letters', 'other'] have different vocabularies"):
        Mixture((TASK,), evaluation=(odd,))
    with refused("Mixture.rows gives experts to the tasks that are learnt"):
        Mixture((TASK,), rows=(1,), evaluation=(TASK,))


MODELS = {
    "sparse": dataclasses.replace(
        SPARSE,
        switch=SwitchConfig(
            6,
            every=2,
            d_ff=12,
            expert_dropout_rate=0.4,
            dispatcher="einsum",
            router=RouterConfig(num_selected=2, gate="normalized", bias_update_rate=0.1),
        ),
        precision=Precision(params="bfloat16", compute="float16"),
        num_decoder_layers=6,
    ),
    "dense": ModelConfig(
        "encoder_decoder", 100, 16, 24, 2, 8, 2, 3, positions="learned", max_length=64
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_model_configuration_comes_back_equal(tmp_path, name):
    model = dataclasses.replace(MODELS[name], vocab_size=384)
    write_run_config(RunFolder(tmp_path), make_job(model))
    assert read_model_config(RunFolder(tmp_path)) == model


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda model: model.update(flux=1, d_ffn=2), "ModelConfig has no d_ffn, flux"),
        (lambda model: model["switch"].update(num_expert=1), "SwitchConfig has no num_expert"),
        (lambda model: model["switch"]["router"].update(k=2), "RouterConfig has no k"),
        (lambda model: model["precision"].update(gates=1), "Precision has no gates"),
        (lambda model: model.pop("d_model"), "ModelConfig needs d_model"),
        (lambda model: model["switch"].pop("num_experts"), "SwitchConfig needs num_experts"),
    ],
)
def test_a_field_that_is_unknown_or_missing_is_named(run, edit, complaint):
    edited(run, lambda config: edit(config["model"]))
    with refused(f"{run.config}: {complaint}"):
        read_model_config(run)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "[Errno 2] No such file or directory: <any>"),
        ('{"model": {"d_model"', "Expecting ':' delimiter: <any>"),
        ("[]", "expected an object, got a list"),
        ('{"train_steps": 3}', "it describes no model"),
    ],
)
def test_a_folder_without_a_readable_configuration_is_refused(tmp_path, text, reason):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    found = "empty" if text is None else "found config.json"
    with refused(
        f"{tmp_path} is not a run folder, its config.json cannot be read ({reason}): {found}; "
        "give the model_dir of a run"
    ):
        read_config(RunFolder(tmp_path))


def test_a_kill_while_writing_leaves_no_half_written_configuration(tmp_path, monkeypatch):
    def killed(path, content):
        path.with_suffix(".partial").write_bytes(content[:50])
        raise KeyboardInterrupt

    monkeypatch.setattr("switchx.training.resume.write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        write_run_config(RunFolder(tmp_path), make_job())
    assert (tmp_path / "vocabulary.json").exists()  # written first
    assert not (tmp_path / "config.json").exists()


def declared() -> set[str]:
    """`Class.field` of all fields of switchx that say `at_resume()`."""
    found = set()
    for path in (ROOT / "switchx").rglob("*.py"):
        for cls in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(cls, ast.ClassDef):
                continue
            for field in cls.body:
                value = getattr(field, "value", None)
                if isinstance(value, ast.Call) and ast.unparse(value.func) == "at_resume":
                    found.add(f"{cls.name}.{field.target.id}")
    return found


def test_the_page_has_all_fields_that_may_change():
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    table = page.partition("| may change on resume | fields |")[2].partition("\n\n")[0]
    named = set()
    for row in table.splitlines()[2:]:
        for name in re.findall(r"`([\w.]+)`", row.split("|")[2]):
            named.add(name if "." in name or name[0].isupper() else f"TrainingJob.{name}")
    # `storage` and `init` may change, so all of them may.
    whole = {"StorageSpec", "InitConfig"}
    assert whole <= named
    assert named - whole == {each for each in declared() if each.split(".")[0] not in whole}
