# SPDX-License-Identifier: Apache-2.0
"""config.json: what may change on resume, and the model's configuration out of it."""

import dataclasses
import json
import pathlib

import pytest

from switchx.checkpoint.checkpointer import Retention
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.loader import Prefetch
from switchx.data.objectives import InputsToTargets
from switchx.data.text_metrics import Accuracy
from switchx.data.tokenizers import ByteVocabulary
from switchx.data.vocabularies import CorpusVocabulary
from switchx.models.config import (
    ModelConfig,
    Precision,
    RouterConfig,
    SwitchConfig,
)
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import Constant, InverseSquareRoot
from switchx.partitioning.mesh import CompilerOptions, MeshSpec
from switchx.partitioning.schedule import ScheduleSpec
from switchx.training.job import TrainingJob
from switchx.training.resume import (
    MAY_CHANGE,
    MODEL_MAY_CHANGE,
    check_same_model,
    check_same_run,
    describe,
    read_config,
    read_model_config,
    write_run_config,
)
from switchx.training.step import StepConfig
from tests.data.refusals import refused
from tests.training.jobs import LOSS, SPARSE, TASK, make_job

FREE = {
    "train_steps": 100,
    "log_every": 50,
    "eval_every": 50,
    "checkpoint_every": 50,
    "eval_batches": None,
    "retention": Retention(keep_last=7),
    "max_skipped_in_a_row": 99,
    "data_dir": "elsewhere",
    "mesh": MeshSpec(data=2, expert=4),
    "pipeline": ScheduleSpec(kind="gpipe"),
    "prefetch": Prefetch(num_workers=2),
    "compiler": CompilerOptions(tpu=("xla_a=1",)),
}
# Field -> another value, and what the error says of it.
FIXED = {
    "model": (
        dataclasses.replace(SPARSE, switch=dataclasses.replace(SPARSE.switch, num_experts=4)),
        "model.switch.num_experts: 8 there, 4 here",
    ),
    "source": (
        dataclasses.replace(TASK, name="other"),
        "source.name: 'letters' there, 'other' here",
    ),
    "optimizer": (AdamW(), "optimizer.type: 'Adafactor' there, 'AdamW' here"),
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
    "init_from": ("pretrained", "init_from: None there, 'pretrained' here"),
    "step": (StepConfig(clip_norm=1.0), "step.clip_norm: None there, 1.0 here"),
}


@pytest.fixture
def run(tmp_path):
    """A run folder of `make_job()`."""
    folder = RunFolder(tmp_path)
    write_run_config(folder, make_job())
    return folder


def test_every_field_of_a_job_is_free_or_fixed():
    names = {field.name for field in dataclasses.fields(TrainingJob)}
    assert FREE.keys() | FIXED.keys() == names and not FREE.keys() & FIXED.keys()
    assert set(MAY_CHANGE) == FREE.keys()


def test_what_changes_no_step_may_change(run):
    check_same_run(run, make_job())
    check_same_run(run, make_job(**FREE))


@pytest.mark.parametrize("name", FIXED)
def test_what_changes_a_step_may_not_change(run, name):
    value, difference = FIXED[name]
    with pytest.raises(ValueError) as caught:
        check_same_run(run, make_job(**{"model": SPARSE, name: value}))
    assert difference in str(caught.value)


def test_the_error_lists_all_differences_and_what_may_change(run):
    job = make_job(batch_size=16, seed=1, schedule=InverseSquareRoot(), train_steps=9)
    with refused(
        f"model_dir={str(run.path)!r} belongs to another configuration (batch_size: 8 there, "
        "16 here; schedule.base: None there, 1.0 here; schedule.type: 'Constant' there, "
        "'InverseSquareRoot' here; schedule.value: 0.01 there, None here; "
        "schedule.warmup_steps: None there, 10000 here; seed: 0 there, 1 here); give another "
        "model_dir, or the configuration it was made with. On resume these may change: "
        "train_steps, log_every, eval_every, checkpoint_every, eval_batches, retention, "
        "max_skipped_in_a_row, data_dir, mesh, pipeline, prefetch, compiler"
    ):
        check_same_run(run, job)


def test_another_vocabulary_is_refused(run):
    other = dataclasses.replace(TASK, vocabulary=ByteVocabulary(num_sentinels=7))
    saved = json.loads(run.config.read_text())
    saved["source"]["vocabulary"]["num_sentinels"] = 7  # as a model file changed in its place
    run.config.write_text(json.dumps(saved))
    for check in (check_same_run, check_same_model):
        with refused(
            f"model_dir={str(run.path)!r} was trained with another vocabulary: 384 ids there, "
            "384 here, or other pieces; the same ids would mean other things. Its copy is in "
            "that folder: use it, or give another model_dir"
        ):
            check(run, make_job(source=other))


def with_model(**changes):
    """A job whose model differs; `switch_` names a field of the Switch layers."""
    switch = {n.removeprefix("switch_"): v for n, v in changes.items() if "switch_" in n}
    model = {n: v for n, v in changes.items() if "switch_" not in n}
    return make_job(
        dataclasses.replace(
            SPARSE, switch=dataclasses.replace(SPARSE.switch, **switch), **model
        )
    )


def test_an_evaluation_may_change_whatever_the_parameters_do_not_depend_on(run):
    check_same_model(run, make_job(batch_size=16, seed=9, optimizer=AdamW(), packed=False))
    check_same_model(
        run,
        with_model(
            dropout_rate=0.5,
            precision=Precision(compute="bfloat16"),
            switch_eval_capacity_factor=8.0,
            switch_dispatcher="einsum",
            switch_router=RouterConfig(exploration="none", overflow="dropless"),
        ),
    )
    with pytest.raises(ValueError, match="model.switch.router.num_selected: 1 there, 2 here"):
        check_same_model(run, with_model(switch_router=RouterConfig(num_selected=2)))
    fields = {f"model.{field.name}" for field in dataclasses.fields(ModelConfig)}
    fields |= {f"model.switch.{field.name}" for field in dataclasses.fields(SwitchConfig)}
    fields |= {
        f"model.switch.router.{field.name}" for field in dataclasses.fields(RouterConfig)
    }
    assert set(MODEL_MAY_CHANGE) <= fields  # none is misspelt


def test_another_model_is_refused_by_an_evaluation(run):
    with refused(
        f"model_dir={str(run.path)!r} holds another model (model.num_heads: 2 there, 4 here; "
        "model.switch.num_experts: 8 there, 16 here); use the configuration that it was "
        f"trained with. These may be others: {', '.join(MODEL_MAY_CHANGE)}, and all that is "
        "not of the model"
    ):
        check_same_model(run, with_model(num_heads=4, switch_num_experts=16))


def test_a_description_is_json_and_says_types():
    job = make_job(retention=Retention(keep_best=2))
    text = describe(job)
    assert json.loads(json.dumps(text)) == text
    assert text["type"] == "TrainingJob" and text["source"]["type"] == "Task"
    assert text["source"]["corpus"]["type"] == "ListCorpus"
    assert text["source"]["corpus"]["fields"] == ["text"]
    assert text["retention"]["keep_best"] == 2
    assert describe(pathlib.PurePosixPath("a/b")) == "a/b"


def test_a_run_goes_on_with_other_metrics_of_its_tasks(tmp_path):
    task = dataclasses.replace(TASK, objective=InputsToTargets())
    run = RunFolder(tmp_path).create()
    write_run_config(run, make_job(source=task))
    check_same_run(run, make_job(source=dataclasses.replace(task, metrics=(Accuracy(),))))


def test_where_data_lies_is_described_for_the_job_alone():
    vocabulary = CorpusVocabulary(TASK.corpus, 256, data_dir="here")
    description = describe(make_job(data_dir="there"))
    assert description["data_dir"] == "there"
    assert "data_dir" not in describe(vocabulary) and describe(vocabulary)["size"] == 256


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


def edited(run, edit) -> RunFolder:
    config = json.loads(run.config.read_text())
    edit(config["model"])
    run.config.write_text(json.dumps(config))
    return run


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
    edited(run, edit)
    with refused(
        f"{run.config}: {complaint}; it was written by another version of switchx: read it "
        "with that one, or correct the file"
    ):
        read_model_config(run)


def test_fields_of_later_versions_that_have_defaults_may_be_missing(run):
    edited(run, lambda model: model.pop("remat"))
    assert read_model_config(run) == SPARSE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "[Errno 2] No such file or directory: <any>"),
        ('{"model": {"d_model"', "Expecting ':' delimiter: <any>"),
        ("[]", "it describes no model"),
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
