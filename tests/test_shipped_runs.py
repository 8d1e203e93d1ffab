# SPDX-License-Identifier: Apache-2.0
"""What the shipped configurations promise: the papers' settings, and a run on another mesh."""

import jax
import pytest

from switchx.checkpoint.run_folder import RunFolder
from switchx.gin_config import building
from switchx.moe.capacity import layer_groups
from switchx.moe.dispatchers import refusal
from switchx.partitioning.compiler_options import CompilerOptions
from switchx.partitioning.mesh import MeshSpec
from switchx.pipeline.schedule import ScheduleSpec
from switchx.training.job import TrainingJob
from switchx.training.programs import compiled_program
from switchx.training.resume import check_same_run, write_run_config
from tests.processes import ROOT

MESHES = sorted(path.name for path in (ROOT / "configs/meshes").glob("*.gin"))
TINY, GPT = "runs/pretrain_tiny.gin", "runs/pretrain_gpt_tiny.gin"
# In the place of a vocabulary that has to be trained first.
BYTES = """
from __gin__ import dynamic_registration
from switchx.data import tasks
from switchx.data import tokenizers

tasks.Task.vocabulary = @tokenizers.ByteVocabulary()
"""
# As a user writes a run of a dense baseline.
DENSE_RUN = """
from __gin__ import dynamic_registration
from switchx.models import config

include "runs/defaults.gin"
include "models/t5_{name}_paper.gin"
include "tasks/stdlib_span_corruption.gin"
include "optimizers/adafactor.gin"

MODEL = @config.ModelConfig()
VOCAB_SIZE = 32128
TRAIN_STEPS = 10
BATCH_SIZE = 8
"""


@pytest.fixture
def build_job(tmp_path):
    """`build_job("runs/x.gin", SEED=1)`: the job of some files, on bytes."""
    bytes_file = tmp_path / "bytes.gin"
    bytes_file.write_text(BYTES)

    def build(*files: str, **macros) -> TrainingJob:
        bindings = [f"{name}={value}" for name, value in macros.items()]
        building.parse_files([*files, str(bytes_file)], bindings, [])
        return building.build("JOB", TrainingJob)

    return build


@pytest.fixture
def run_of(tmp_path):
    """A run folder that holds what a job writes before its first step."""

    def begin(job: TrainingJob) -> RunFolder:
        run = RunFolder(tmp_path / "run")
        run.root.mkdir()
        write_run_config(run, job)
        return run

    return begin


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_file_leaves_nothing_of_a_mesh_bound_before(name, build_job):
    """But the three that meshes/data.gin names."""
    stay = {
        "NUM_MICROBATCHES": 4, "ModelConfig.scan_layers": True, "ModelConfig.remat": "'full'",
    }  # fmt: skip
    job = build_job(TINY, f"meshes/{name}", **stay)
    assert (job.mesh == MeshSpec()) == (name == "data.gin")
    assert (job.pipeline, job.compiler) == (ScheduleSpec(), CompilerOptions()) or (
        name == "pod.gin"
    )
    # Each file binds what meshes/data.gin binds; what one binds beside it stays through the
    # others, but for those after it that bind the same.
    every = [f"meshes/{each}" for each in MESHES]
    for before in (every, every[::-1]):
        assert build_job(TINY, *before, f"meshes/{name}", **stay) == job


@pytest.mark.parametrize("name", ["base", "large", "xxl", "c"])
def test_switch_models_are_balanced_as_the_paper_balances_them(name, build_job):
    """Alpha is 1e-2 for each layer (section 2.2), which Mesh-TensorFlow adds up."""
    job = build_job(f"runs/pretrain_switch_{name}.gin")
    assert (job.loss.layer_reduction, job.loss.balance_weight) == ("sum", 0.01)
    assert job.model.init_scale == 0.1
    # Groups decide what is dropped: the run says their size, and the mesh does not.
    assert job.model.switch.group_size == (1024 if name in ("base", "large") else 32768)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("base", (768, 2048, 12, 12)),
        ("large", (1024, 2816, 16, 24)),
        ("xxl", (4096, 10240, 64, 24)),
    ],
)
def test_dense_baselines_are_table_9s_with_the_papers_initialization(
    name, shape, build_job, tmp_path
):
    """Section 2.4: a tenth of the scale in all models, "as small as our 223M baseline"."""
    run_file = tmp_path / "dense.gin"
    run_file.write_text(DENSE_RUN.format(name=name))
    model = build_job(str(run_file)).model
    assert (model.d_model, model.d_ff, model.num_heads, model.num_encoder_layers) == shape
    assert (model.d_head, model.num_decoder_layers) == (64, shape[-1])
    assert (model.activation, model.switch, model.init_scale) == ("geglu", None, 0.1)


@pytest.mark.parametrize("name", MESHES)
def test_a_run_goes_on_on_every_mesh(name, build_job, run_of):
    """Of up to eight devices, and with the groups that docs/training.md says.

    After the two files that leave something: rematerialization, microbatches, scanned layers.
    """
    groups = {"SwitchConfig.group_size": 64}
    run = run_of(build_job(TINY, **groups))
    files = [f"meshes/{each}" for each in ("fsdp_fused.gin", "pipeline_moe_stages.gin", name)]
    # What stays of a pipeline, where none follows.
    parts = {} if name.startswith("pipeline") else {"NUM_MICROBATCHES": 1}
    job = check_same_run(run, build_job(TINY, *files, **groups, **parts))
    devices = jax.devices()[: job.mesh.num_devices(8)]
    program, switch = compiled_program(job, devices), job.model.switch
    for length in job.sequence_lengths:
        G, T = layer_groups(switch, job.batch_size // job.step.num_microbatches, length)
        sizes = dict(num_groups=G, tokens_per_group=T)
        assert refusal(switch.dispatcher, program.mesh, job.mesh.rules, **sizes) is None


def test_a_run_does_not_go_on_with_other_groups(build_job, run_of):
    run = run_of(build_job(TINY))
    other = build_job(TINY, "meshes/pod.gin", **{"SwitchConfig.group_size": 64})
    with pytest.raises(ValueError, match="model.switch.group_size: 8192 there, 64 here"):
        check_same_run(run, other)


def test_a_longer_run_stretches_the_cosine_or_keeps_it(build_job, run_of):
    job = build_job(GPT)
    assert job.schedule.total_steps == job.train_steps == 400
    run = run_of(job)
    longer = build_job(GPT, TRAIN_STEPS=800)
    assert (longer.train_steps, longer.schedule.total_steps) == (800, 800)
    kept = build_job(GPT, TRAIN_STEPS=800, COSINE_STEPS=400)
    assert (kept.train_steps, kept.schedule.total_steps) == (800, 400)
    for each in (longer, kept):
        check_same_run(run, each)


def test_an_optimizer_file_leaves_the_length_of_the_run_alone(build_job):
    job = build_job(TINY, "optimizers/adamw.gin", WARMUP_STEPS=10)
    assert job.train_steps == job.schedule.total_steps == 400
