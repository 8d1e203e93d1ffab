# SPDX-License-Identifier: Apache-2.0
"""XLA's options: the compilers accept what is shipped, and refuse what they do not know."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.aot import tpu_compiler
from switchx.cli.config import building
from switchx.partitioning.mesh import CompilerOptions
from switchx.training.job import TrainingJob
from tests.data.refusals import refused
from tests.processes import ROOT


@pytest.fixture
def overlap(tmp_path) -> CompilerOptions:
    files = ["runs/pretrain_tiny.gin", "xla/overlap.gin"]
    building.parse_files(files, [], [])
    yield building.build("JOB", TrainingJob).compiler
    building.gin.clear_config()


def compiles(options: dict[str, str]) -> None:
    """On CPU, where XLA parses options of all platforms."""
    jax.jit(lambda x: x + 1, compiler_options=options)(jnp.ones(()))


def test_xla_knows_the_options_of_gpus(overlap):
    options = overlap.of("gpu")
    assert len(options) == len(overlap.gpu) > 5 and overlap.of("cuda") == options
    for name, value in options.items():
        compiles({name: value})


def test_xla_refuses_others():
    """Without which the test above could not fail."""
    with pytest.raises(Exception, match="No such compile option: 'xla_gpu_enable_overlap'"):
        compiles({"xla_gpu_enable_overlap": "True"})
    name = "xla_gpu_enable_latency_hiding_scheduler"
    with pytest.raises(Exception, match="not a valid bool value"):
        compiles({name: "maybe"})


TPU_PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
device = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices[0]
sharding = jax.sharding.SingleDeviceSharding(device)
x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=sharding)
for name, value in json.loads(sys.argv[1]).items():
    try:
        jax.jit(jnp.sin, compiler_options={name: value}).lower(x).compile()
    except Exception as error:
        print(name, error)
"""


@pytest.mark.aot
def test_the_tpu_compiler_knows_the_options_of_tpus(overlap):
    folder = tpu_compiler.compiler_folder()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    options = overlap.of("tpu") | {"xla_tpu_enable_overlap": "True"}
    done = subprocess.run(
        [sys.executable, "-c", TPU_PROGRAM, json.dumps(options)],
        env=environment, capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    (refusal,) = [line for line in done.stdout.splitlines() if line.startswith("xla_")]
    assert "No such compile option: 'xla_tpu_enable_overlap'" in refusal


def test_nothing_on_cpu(overlap):
    assert overlap.of("cpu") == {}


def test_each_option_is_explained():
    text = (pathlib.Path(ROOT) / "configs/xla/overlap.gin").read_text(encoding="utf-8")
    groups = [each for each in text.split("CompilerOptions.")[1:] if '"xla_' in each]
    assert len(groups) == 2
    for group in groups:
        first = next(line for line in group.splitlines()[1:] if line.strip())
        assert first.strip().startswith("#")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--xla_a=1",),
            "CompilerOptions.gpu has '--xla_a=1'; write xla_name=value, without dashes, as "
            "xla_gpu_enable_latency_hiding_scheduler=True",
        ),
        (("xla_a=1", "xla_a=2"), "CompilerOptions.gpu sets xla_a twice; keep one"),
    ],
)
def test_bad_options(options, message):
    with refused(message):
        CompilerOptions(gpu=options)
