# SPDX-License-Identifier: Apache-2.0
"""Experts in files, of which host memory has a quarter: the same tokens, faults by name."""

import dataclasses
import errno
import gc
import itertools
import os
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from switchx import tree
from switchx.inference.artifact import open_artifact, write_artifact
from switchx.inference.config import ExpertSlots
from switchx.inference.offload.chosen_experts import slices_of, with_slots
from switchx.inference.offload.expert_source import FileArray, OpenFile, expert_of_snapshot
from switchx.inference.quantize import quantize_experts
from switchx.models.unroll import unrolled
from switchx.moe.experts import WEIGHTS
from switchx.storage.record import Record, StoreLayout, types_of
from switchx.storage.store import RecordStore
from tests.data.refusals import refused
from tests.inference.slot_models import MODELS, E, generator, model, resident, written
from tests.inference.tiny import tokens

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

SLOW = pytest.mark.slow
DESCRIPTORS = pathlib.Path("/proc/self/fd")


def saved_artifact(folder, name: str, bits: int):
    write_artifact(folder, *model(name, bits), about={})
    return open_artifact(folder)


def saved_records(folder, name: str):
    """Records as training with experts on a disk has them, with a statistic beside weights."""
    config, params = unrolled(*model(name, None))
    leaves, layers = tree.named_leaves(params), {}
    for layer in config.sparse_layer_names:
        stack, number = layer.split()
        path = f"{stack}/blocks/layer_{number}/ffn/experts/"
        layers[layer] = {
            f"params/{path}{weight}": np.asarray(leaves[f"{path}{weight}"])
            for weight in WEIGHTS
            if f"{path}{weight}" in leaves
        }
        layers[layer][f"opt_state/mu/{path}{WEIGHTS[0]}"] = np.zeros((E, 2), np.float32)
    records = [
        Record({name: array[e] for name, array in arrays.items()}, updates=3)
        for arrays in layers.values()
        for e in range(E)
    ]
    types = {layer: types_of(records[n * E].arrays) for n, layer in enumerate(layers)}
    with RecordStore(folder / "store", StoreLayout(types, E)) as store:
        for key, record in enumerate(records):
            store.write(key, record)
        store.snapshot(folder / "experts")
    return folder / "experts"


def expert_bytes(name: str) -> int:
    """Of one float32 expert."""
    config, params = model(name, None)
    leaves = tree.named_leaves(params)
    sizes = [leaf.nbytes for n, leaf in leaves.items() if "/experts/" in n]
    return sum(sizes) // (len(config.sparse_layer_names) * E)


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=SLOW)])
def test_an_artifact_of_four_times_the_host_memory(tmp_path, bits):
    artifact = saved_artifact(tmp_path / "artifact", "gpt", bits)
    read = slices_of(artifact.config, artifact.params)
    size = tree.num_bytes(read(0, 0))
    # Two layers of four experts; host memory has two of them, the device two a layer.
    asked = ExpertSlots(2, host_bytes=2 * size)
    config, params, experts = with_slots(artifact.config, artifact.params, asked, read)
    assert experts.traffic.expert_bytes == 4 * asked.host_bytes
    got = written(generator(config, experts, 1))
    assert tokens(got) == tokens(resident("gpt", bits, 1))
    traffic = experts.traffic
    stored, missed = traffic.stored, traffic.requested - traffic.hits
    assert stored.host_bytes == asked.host_bytes
    # What the device has not is asked of host memory, what that has not is read.
    assert stored.requested == missed
    assert stored.read_bytes == (missed - stored.hits) * size
    assert 0 < stored.hits < missed
    assert "of experts in host memory" in str(traffic)
    assert tree.num_elements(params) == tree.num_elements(model("gpt", None)[1])


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_file_that_could_not_be_read_is_read_again(tmp_path, prefetch):
    artifact = saved_artifact(tmp_path / "artifact", "gpt", 4)
    slices, broken = slices_of(artifact.config, artifact.params), set()

    def read(layer, expert):
        if (layer, expert) in broken:
            raise OSError(errno.EIO, "Input/output error")
        return slices(layer, expert)

    asked = ExpertSlots(2, prefetch=prefetch, host_bytes=4 * tree.num_bytes(slices(0, 0)))
    config, _, experts = with_slots(artifact.config, artifact.params, asked, read)
    run = generator(config, experts, 1)
    num_failed = 0
    for layer, expert in itertools.product(range(2), range(E)):
        broken.add((layer, expert))
        try:
            written(run)
        except OSError:  # where it was read at all
            num_failed += 1
        broken.clear()
        assert tokens(written(run)) == tokens(resident("gpt", 4, 1))
    assert num_failed > 1


@pytest.mark.parametrize("policy", ["lru", pytest.param("next_use", marks=SLOW)])
def test_records_of_training_on_a_disk(tmp_path, policy):
    name = "encoder-decoder"
    folder = saved_records(tmp_path, name)
    config, params = unrolled(*model(name, None))
    size = expert_bytes(name)
    asked = ExpertSlots(2, policy, host_bytes=2 * size)
    read = expert_of_snapshot(folder, config)
    dense = {n: x for n, x in tree.named_leaves(params).items() if "/experts/" not in n}
    config, _, experts = with_slots(config, tree.nested(dense), asked, read)
    assert experts.traffic.expert_bytes == 4 * asked.host_bytes
    assert tokens(written(generator(config, experts, 2))) == tokens(resident(name, None, 2))
    assert experts.traffic.stored.read_bytes > 0


@pytest.mark.skipif(not DESCRIPTORS.exists(), reason="the system does not say what is open")
def test_an_artifact_is_read_as_it_was_opened(tmp_path):
    """Whatever is in its folder now; its one file is closed with the model."""

    def num_open():
        links = DESCRIPTORS.iterdir()
        return sum(os.path.realpath(link).startswith(str(tmp_path)) for link in links)

    def all_experts():
        return [read(layer, expert) for layer in range(2) for expert in range(E)]

    folder = tmp_path / "artifact"
    artifact = saved_artifact(folder, "gpt", 4)
    read = slices_of(artifact.config, artifact.params)
    want = all_experts()
    shutil.rmtree(folder)
    jax.tree.map(np.testing.assert_array_equal, all_experts(), want)
    config, params = model("gpt", None)
    others = jax.tree.map(lambda leaf: -leaf, params)
    write_artifact(folder, *quantize_experts(config, others, bits=4)[:2], about={})
    jax.tree.map(np.testing.assert_array_equal, all_experts(), want)
    other = open_artifact(folder)
    assert num_open() == 2
    new = slices_of(other.config, other.params)(0, 0)
    assert not np.array_equal(new["w_in_EDF"].values, want[0]["w_in_EDF"].values)
    artifact = read = other = None
    gc.collect()
    assert num_open() == 0


def test_caches_below_a_layers_slots_and_other_or_damaged_records(tmp_path):
    artifact = saved_artifact(tmp_path / "artifact", "gpt", 4)
    read = slices_of(artifact.config, artifact.params)
    size = tree.num_bytes(read(0, 0))
    with refused(
        f"host_bytes={3 * size - 1:,} holds 2 experts of {size:,} bytes, but "
        "expert_slots=3 of one layer are needed at once"
    ):
        with_slots(
            artifact.config, artifact.params, ExpertSlots(3, host_bytes=3 * size - 1), read
        )
    folder = saved_records(tmp_path, "gpt")
    other = MODELS["encoder-decoder"]
    with refused(f"{folder} has records of {E} experts in decoder 0, decoder 1"):
        expert_of_snapshot(folder, other)
    read = expert_of_snapshot(folder, MODELS["gpt"])
    file = folder / "decoder_1" / "00002"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink()  # not the store's own file, which it is a link to
    file.write_bytes(data)
    assert read(1, 1).keys() == set(WEIGHTS) - {"w_gate_EDF"}
    with pytest.raises(ValueError, match=re.escape(f"record {file}: its bytes have changed")):
        read(1, 2)
    shutil.rmtree(folder)
    with refused(f"{folder} was removed after it was loaded"):
        read(1, 0)


@settings(max_examples=20)
@given(
    st.sampled_from(["float32", "uint8", "bfloat16"]),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(0, 33),
    st.data(),
)
def test_a_file_arrays_rows_are_the_arrays(tmp_path_factory, dtype, shape, offset, data):
    array = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    path = tmp_path_factory.mktemp("files") / "array"
    path.write_bytes(bytes(offset) + array.tobytes() + b"more")
    stored = FileArray(OpenFile(path), offset, tuple(shape), np.dtype(dtype))
    first = data.draw(st.integers(0, shape[0] - 1))
    rows = slice(first, data.draw(st.integers(first, shape[0])))
    np.testing.assert_array_equal(stored[rows], array[rows])
    assert stored.ndim == array.ndim
    short = dataclasses.replace(stored, shape=(shape[0] + 9, *shape[1:]))
    with pytest.raises(ValueError, match="was cut off while it was read"):
        short[:]
