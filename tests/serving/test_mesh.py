# SPDX-License-Identifier: Apache-2.0
"""On eight simulated devices a server answers what it answers on one device."""

import concurrent.futures
import dataclasses
import functools

import jax
import pytest

from switchx.inference.model_mesh import ModelMesh
from switchx.inference.program_cache import COMPILATIONS, PROGRAMS
from switchx.models.params import init_params
from switchx.partitioning.mesh import MeshSpec
from switchx.serving.models import Models
from tests.serving import served

MESHES = {
    "data x expert x model": MeshSpec(expert=2, model=2),
    "data": MeshSpec(),
    "expert": MeshSpec(expert=2),
    "model": MeshSpec(model=2),
    "fsdp x expert": MeshSpec(fsdp=2, expert=2),
}
SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in list(MESHES)[1:]]
BEAMS = {"beam_size": 2}


@functools.cache
def model():
    """One whose heads divide over two devices."""
    config = dataclasses.replace(served.CONFIG, num_heads=2)
    params = init_params(config, jax.random.key(33))
    return dataclasses.replace(served.model(), config=config, params=params)


@functools.cache
def said(beam_size: int = 1):
    """By text, what it says on one device."""
    settings = {"max_length": 8, "with_scores": True, "pruning": "none"}
    answers = model().generate(served.TEXTS, beam_size=beam_size, **settings)
    return dict(zip(served.TEXTS, answers, strict=True))


@pytest.mark.parametrize("mesh", [next(iter(MESHES)), *SLOW])
def test_answers_are_those_of_one_device(service, mesh):
    """The programs of searches are compiled beside the greedy ones that are answered."""
    devices = ModelMesh.of(MESHES[mesh])
    on_mesh = dataclasses.replace(
        model(), params=devices.place(model().params), devices=devices
    )
    assert len({each.output for each in said().values()}) > 3
    asked = []
    with (
        served.started(served.LIMITS, on_mesh, name="split") as split,
        served.listening(Models([split])) as address,
        concurrent.futures.ThreadPoolExecutor(6) as pool,
    ):
        for number in range(24):
            text, settings = served.TEXTS[number % 8], BEAMS if number % 3 == 0 else {}
            body = {"inputs": text} | settings
            asked.append((text, settings, pool.submit(served.post, address, body)))
        for text, settings, each in asked:
            status, body = each.result()
            assert status == 200, body
            (got,), want = body["results"], said(**settings)[text]
            assert (got["text"], got["is_finished"]) == (want.output, want.is_finished)
            assert got["score"] == pytest.approx(want.score, rel=1e-4)
    assert split.worker.error is None
    leaf = on_mesh.params["encoder"]["blocks"]["layer_0"]["ffn"]["experts"]["w_in_EDF"]
    assert len(leaf.sharding.device_set) == 8


def test_threads_begin_programs_of_a_mesh_one_after_the_other():
    """They compile beside each other. Without that order XLA's collectives wait for ever."""
    devices = ModelMesh.of(MeshSpec(model=8))
    sharding = jax.sharding.NamedSharding(devices.mesh, jax.sharding.PartitionSpec("model"))
    x_B = jax.device_put(jax.numpy.ones(8), sharding)

    def total(scale, x_B):
        return x_B.sum() * scale

    def work(scale):
        with devices.use():
            for _ in range(200):
                found = PROGRAMS.run(total, (scale,), (), is_on_mesh=True, x_B=x_B)
        return float(found)

    before = COMPILATIONS.number
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(1, 5))) == [8.0, 16.0, 24.0, 32.0]
    assert COMPILATIONS.number - before == 4  # each program once
