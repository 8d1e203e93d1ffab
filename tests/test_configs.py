# SPDX-License-Identifier: Apache-2.0
"""Every gin file that ships parses and builds, and says what it is for."""

import dataclasses
import math
import re

import jax
import pytest

from switchx.checkpoint.retention import Retention
from switchx.gin_config import building
from switchx.gin_config.building import job_from_gin
from switchx.gin_config.writing import job_gin
from switchx.inference.generate import for_decoding
from switchx.inference.offload.expert_slots import slotted
from switchx.models.config import ModelConfig, Precision
from switchx.models.flops import count_parameters
from switchx.models.params import abstract_params
from switchx.partitioning.compiler_options import CompilerOptions
from switchx.partitioning.mesh import AXES, batch_parts
from switchx.partitioning.rules import SPREAD_RULES, param_shardings
from switchx.pipeline.schedule import ScheduleSpec
from switchx.training.distillation.student import as_teacher
from switchx.training.job import TrainingJob
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.text_evaluation import TextEvaluation
from switchx.tree import num_elements
from tests.gin_files import CONFIGS, RUNS, describe_run, names, required_macros

FOLDERS = ("models", "tasks", "meshes", "optimizers", "runs", "storage", "xla")


@pytest.fixture
def build_job(tmp_path):
    """`build_job("runs/x.gin", SEED=1)`: the job, with what the files require supplied."""
    describe_run(tmp_path)
    (tmp_path / "de.txt").write_text("ein Tor\n\nein Experte\n")
    supplies = {
        "FILES": tmp_path,
        "FOLDER": tmp_path,
        "FROM": "tfds:glue/cola",
        "INPUTS": "cola: {sentence}",
        "LANGUAGES": ("de",),
        "TARGETS": "{label}",
        "TEACHER": tmp_path,
        "INIT_FROM": tmp_path,
        "VOCABULARY_FILE": tmp_path / "t5.model",
    }

    def build(*files: str, **macros) -> TrainingJob:
        required = set().union(*(required_macros(name) for name in files))
        macros = {name: supplies[name] for name in required & supplies.keys()} | macros
        bindings = [f"{name}={value}" for name, value in macros.items()]
        building.parse_files(list(files), bindings, [])
        return building.build("JOB", TrainingJob)

    return build


def header(name: str) -> str:
    """The comment a file starts with, without its `#`, broken lines joined."""
    lines = (CONFIGS / name).read_text(encoding="utf-8").splitlines()
    stop = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(line.lstrip("# ") for line in lines[:stop]).replace("\\\n", "")


def test_no_file_is_outside_the_folders_and_each_says_what_it_is_for():
    everything = {path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*")}
    files = {name for name in everything if (CONFIGS / name).is_file()}
    assert RUNS and files == set(names(*FOLDERS))
    assert [name for name in files if not header(name).strip()] == []


@pytest.mark.parametrize("name", RUNS)
def test_a_run_says_the_score_that_it_reached_or_that_none_is_known(name):
    said = header(name).replace("\n", " ")
    assert bool(re.search(r"reached: -?\d", said)) != ("no score has been measured" in said)


@pytest.mark.parametrize("name", names("models"))
def test_model_builds(name, tmp_path):
    """The whole model is traced without allocating it, and has the planner's size."""
    file = tmp_path / "model.gin"
    file.write_text(
        "from __gin__ import dynamic_registration\n"
        "from switchx.models import config\n"
        f'include "{name}"\n'
        "MODEL = @config.ModelConfig()\n"
    )
    building.parse_files([str(file)], [], [])
    config = building.build("MODEL", ModelConfig)
    params = abstract_params(config)
    total = count_parameters(config).total
    assert num_elements(params) == total
    for claim in re.findall(r"([\d.]+)M parameters", header(name)):
        decimals = len(claim.partition(".")[2])
        assert f"{total / 1e6:.{decimals}f}" == claim
    assert all(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_honours_macros_is_decoded_teaches_and_is_written_as_a_file(
    name, build_job, tmp_path
):
    tasks = ("tasks/glue_cola.gin",) if name == "runs/finetune_task.gin" else ()
    job = build_job(
        name, *tasks, TRAIN_STEPS=7000, BATCH_SIZE=48, SEED=11, LOG_EVERY=2, EVAL_EVERY=3,
        CHECKPOINT_EVERY=5, DATA_DIR="some/where",
    )  # fmt: skip
    assert (job.train_steps, job.batch_size, job.seed) == (7000, 48, 11)
    assert (job.log_every, job.eval_every, job.checkpoint_every) == (2, 3, 5)
    assert job.data_dir == "some/where" and job.features
    # By dispatchers that exchange no slots, whatever the run's own one does in parts.
    model = job.model
    abstract_params(model)
    others = [
        for_decoding(model),
        for_decoding(model, is_dropless=False),
        as_teacher(model, job.mesh),
    ]
    if model.switch is None:
        assert others == [model] * 3
    else:
        parts = {other.switch.exchange_parts for other in (*others, slotted(model))}
        assert parts == {1}
    # The file is taken by macros and files after it, as the run's own.
    file, mesh = tmp_path / "written.gin", "meshes/one_device.gin"
    file.write_text(job_gin(job))
    assert job_from_gin(file) == job
    changed = job_from_gin([file, mesh], ["TRAIN_STEPS=7", "NUM_MICROBATCHES=2"])
    assert changed.mesh != job.mesh or changed.mesh == build_job(name, *tasks, mesh).mesh
    assert (changed.train_steps, changed.step.num_microbatches) == (7, 2)
    # The dispatcher is a mesh's.
    is_dropless = model.switch and model.switch.router.overflow == "dropless"
    name = "dropless" if is_dropless else "gather"
    switch = model.switch and model.switch.with_dispatcher(name)
    assert changed.seed == 11 and changed.model == dataclasses.replace(model, switch=switch)


def test_parts_with_defaults_are_found_on_a_command_line(build_job):
    """All runs bind them, so that `--gin.Precision.compute=float16` is no unknown name."""
    plain = build_job("runs/pretrain_tiny.gin")
    assert plain.model.precision == Precision() and plain.storage == StorageSpec()
    assert plain.pipeline == ScheduleSpec() and plain.compiler == CompilerOptions()
    bindings = {
        "Precision.compute": "float16",
        "StorageSpec.slots": 3,
        "ScheduleSpec.kind": "gpipe",
        "CompilerOptions.tpu": ("xla_name=True",),
    }
    job = build_job("runs/pretrain_tiny.gin", **bindings)
    assert (job.model.precision.compute, job.storage.slots) == ("float16", 3)
    assert (job.pipeline.kind, job.compiler.tpu) == ("gpipe", ("xla_name=True",))


@pytest.mark.parametrize("name", RUNS)
def test_run_says_question_hardware_time_metric_and_command(name):
    text = header(name)
    for field in ("Question|Paper", "Hardware", "Metric", "Command"):
        assert re.search(rf"^({field}): +\S", text, re.MULTILINE), f"{name} has no {field}:"
    assert re.search(r"\d+ (minutes?|hours?|days?)\b|not run", text), f"{name}: how long?"
    assert f"--gin_file=configs/{name} " in text


@pytest.mark.parametrize("name", names("tasks", "meshes", "optimizers", "storage", "xla"))
def test_part_builds_in_a_run(name, build_job):
    """A task, mesh or optimizer takes the place of the one the tiny run has."""
    # More steps than the warm-up of any optimizer.
    assert build_job("runs/pretrain_tiny.gin", name, TRAIN_STEPS=2000).batches


@pytest.mark.parametrize("name", names("meshes"))
def test_mesh_spans_the_simulated_devices(name, build_job):
    job = build_job("runs/pretrain_tiny.gin", name)
    sizes = [getattr(job.mesh, axis) for axis in AXES]
    mesh = job.mesh.build(jax.devices()[: None if None in sizes else math.prod(sizes)])
    assert mesh.size in (len(jax.devices()), math.prod(size or 1 for size in sizes))
    assert job.batch_size % batch_parts(mesh, job.mesh.rules) == 0
    # Every parameter divides, and no two dimensions claim one axis.
    param_shardings(job.mesh.rules, mesh, abstract_params(job.model))


def test_command_line_form_is_the_same_file_and_texts_are_evaluated_where_said(
    build_job, tmp_path
):
    assert build_job("configs/runs/pretrain_tiny.gin") == build_job("runs/pretrain_tiny.gin")
    assert build_job("runs/pretrain_tiny.gin").text_evaluation is None
    job = build_job(
        "runs/finetune_task.gin",
        INIT_FROM=tmp_path,
        EVAL_TIME_SHARE=0.5,
        BEST_METRIC="trec/accuracy",
    )
    assert job.text_evaluation == TextEvaluation(time_share=0.5)
    assert job.retention == Retention(best_metric="trec/accuracy")


def test_the_planner_has_the_rules_of_pods(build_job):
    """But for stages, which no pod's file has."""
    rules = build_job("runs/pretrain_tiny.gin", "meshes/pod.gin").mesh.rules
    planned = dataclasses.asdict(SPREAD_RULES)
    for table in ("params", "expert_params"):
        planned[table] = tuple(rule for rule in planned[table] if rule[0] != "N")
    assert dataclasses.asdict(rules) == planned


def test_own_text_for_decoders_trains_its_own_vocabulary_where_the_run_trains_one():
    """It once took that of the run file's own corpus, in silence."""
    files = ["configs/runs/pretrain_gpt_tiny.gin", "configs/tasks/text_causal_lm.gin"]
    job = job_from_gin(files, ["FILES='texts'", "VOCAB_SIZE=1024"])
    trained = job.vocabulary
    assert (trained.corpus, trained.size) == (job.source.corpus, job.model.vocab_size)
    assert trained.corpus.path == "texts" and trained.size == 1024
    given = [*files[:1], "configs/models/mixtral_8x7b.gin", files[1]]
    bindings = ["FILES='texts'", "VOCABULARY_FILE='tokenizer.json'"]
    assert type(job_from_gin(given, bindings).vocabulary).__name__ == "SavedVocabulary"
