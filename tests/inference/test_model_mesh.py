# SPDX-License-Identifier: Apache-2.0
"""On eight simulated devices, decoding says what it says on one; each holds its part."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest

import switchx
from switchx import tree
from switchx.data.tasks import TextFormat
from switchx.inference.artifact import write_artifact
from switchx.inference.config import DecodingConfig
from switchx.inference.decode import run_until
from switchx.inference.generate import BATCHES, Generator, for_decoding, without_capacity
from switchx.inference.model_mesh import ONE_DEVICE, ModelMesh
from switchx.inference.program_cache import PROGRAMS
from switchx.inference.running_batch import RunningBatch
from switchx.inference.score import Scorer
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from tests.cases import slow_unless
from tests.data.refusals import refused
from tests.inference.tiny import CONFIG, assert_same_texts, trained, written
from tests.training.saved_runs import SPANS, save_run

TUPE = dataclasses.replace(
    CONFIG, positions="tupe_relative", max_length=8, scale_attention=True
)
INPUTS = [
    [3, 4, 5, 8, 2], [6, 2, 7, 8, 9, 10], [5, 5, 2, 5, 5], [11, 4, 4, 3, 9, 2],
    [7, 3, 9, 2, 8], [2, 3, 2, 3, 2, 3],
]  # fmt: skip
# Sentences end at different steps, so that batches become smaller.
TOKEN_LIMITS = [6, 2, 5, 1, 3, 3]
PIPELINE_MOE = Rules(expert_params=(("E", ("model",)), ("D", ("fsdp",))))
MESHES = {
    "expert": MeshSpec(expert=4),
    "model": MeshSpec(model=4),
    "expert x model x data": MeshSpec(expert=2, model=2),
    "fsdp x expert x model": MeshSpec(fsdp=2, expert=2, model=2),
    "node x expert": MeshSpec(node=2, expert=2),
    "pipeline_moe": MeshSpec(model=4, rules=PIPELINE_MOE),
    "data": MeshSpec(),
}
# Bits of the experts, beams, a mesh and positions.
DEFAULT_CELL = (4, 1, "fsdp x expert x model", "relative")
CELLS = [
    slow_unless(cell == DEFAULT_CELL, *cell)
    for cell in (
        *((b, n, m, "relative") for b in (None, 8, 4) for n in (1, 3) for m in MESHES),
        *((None, n, m, "tupe") for n in (1, 3) for m in MESHES),
    )
]


def generator(
    devices: ModelMesh, bits=None, beam_size=1, positions="relative", **settings
) -> Generator:
    config, params = trained(bits, {"relative": CONFIG, "tupe": TUPE}[positions], group_size=4)
    decoding = DecodingConfig(max_new_tokens=6, beam_size=beam_size, **settings)
    return Generator(for_decoding(config), devices.place(params), decoding, 8, devices)


@functools.cache
def on_one_device(bits, beam_size, positions):
    one = generator(ONE_DEVICE, bits, beam_size, positions, pruning="experts")
    return written(one, INPUTS, token_limits=TOKEN_LIMITS)


@pytest.mark.parametrize(("bits", "beam_size", "mesh", "positions"), CELLS, ids=str)
def test_tokens_are_those_of_one_device(bits, beam_size, mesh, positions):
    pruning = "compact" if bits is None else "experts"  # one cell also shrinks its batch
    devices = ModelMesh.of(MESHES[mesh])
    on_mesh = generator(devices, bits, beam_size, positions, pruning=pruning)
    want = on_one_device(bits, beam_size, positions)
    assert len({tuple(hypotheses[0].tokens) for hypotheses in want}) >= 4
    assert_same_texts(written(on_mesh, INPUTS, token_limits=TOKEN_LIMITS), want, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("mesh", ["expert x model x data", "fsdp x expert x model"])
def test_so_they_are_with_processors_and_log_probabilities(mesh, beam_size):
    settings = {"no_repeat_ngram_size": 2, "forced_prefix": (7,), "repetition_penalty": 1.4}
    settings |= {"logprobs": 2, "pruning": "compact"}
    on_mesh = generator(ModelMesh.of(MESHES[mesh]), None, beam_size, **settings)
    got, want = (
        written(each, INPUTS, token_limits=TOKEN_LIMITS)
        for each in (on_mesh, generator(ONE_DEVICE, None, beam_size, **settings))
    )
    assert_same_texts(got, want, rtol=2e-5)
    for one, other in zip(sum(got, []), sum(want, []), strict=True):
        assert one.tokens[:1] == [7]
        np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, atol=1e-4)
        assert list(map(list, one.top_logprobs)) == list(map(list, other.top_logprobs))


def test_each_device_holds_its_part_of_the_experts():
    _, params = trained(4, group_size=4)
    for mesh, parts in (("expert", 4), ("model", 4), ("expert x model x data", 4)):
        placed = ModelMesh.of(MESHES[mesh]).place(params)
        leaves = {name: x for name, x in tree.named_leaves(placed).items() if "/w_" in name}
        experts = [x for name, x in leaves.items() if "/experts/" in name]
        assert experts
        total = sum(x.nbytes for x in experts)
        here = [
            shard.data.nbytes
            for x in experts
            for shard in x.addressable_shards
            if shard.device == jax.devices()[3]
        ]
        assert sum(here) == total / parts


def test_arguments_of_a_compiled_step_are_the_parts():
    """Experts and the cache by the compiler's account, bytes a device."""
    writer = generator(ModelMesh.of(MESHES["expert x model x data"]), None, 3, "tupe")
    numbers, token_limits = range(len(INPUTS)), [6] * len(INPUTS)
    batch = RunningBatch(writer.config, writer.params, writer.decoding, devices=writer.devices)
    batch.admit(INPUTS, numbers=numbers, token_limits=token_limits)
    state = batch._state
    with writer.devices.use():
        lowered = run_until.lower(
            writer.config, writer.decoding.program, writer.params, state, 0, 6
        )
    part = lowered.compile().memory_analysis().argument_size_in_bytes
    # Of 8 devices: rows over 4, heads and F over 2, experts over 2; D and the router whole.
    assert part < tree.num_bytes((writer.params, state)) / 3
    key_BHKM = state.cache[0].past.key_BHKM
    places = 16 * 3  # of the start token and of new ones
    assert {shard.data.shape for shard in key_BHKM.addressable_shards} == {(2, 2, 8, places)}


def test_batches_divide_and_a_capacity_of_quantized_experts_is_refused():
    config = for_decoding(CONFIG)
    devices = ModelMesh.of(MESHES["expert"])
    assert devices.batches(config, (1, 2, 8, 9, 96)) == (8, 16, 96)
    assert devices.batches(CONFIG, BATCHES) == BATCHES
    assert ONE_DEVICE.batches(config, BATCHES) == BATCHES
    config, params = trained(4, group_size=4)
    with refused("quantized experts with a capacity do not run on a mesh: decode without "):
        ModelMesh.of(MESHES["model"]).check(config, params)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = dataclasses.replace(CONFIG, vocab_size=384)
    return save_run(tmp_path_factory.mktemp("mesh"), model, source=SPANS)


def loaded(folder):
    """On one device, and on eight."""
    return switchx.load(folder), switchx.load(folder, mesh=MESHES["expert x model x data"])


def test_a_loaded_model_is_split_and_scores_what_it_scores_on_one_device(folder, monkeypatch):
    one, many = loaded(folder)
    w_in = many.params["encoder"]["blocks"]["layer_0"]["ffn"]["experts"]["w_in_EDF"]
    assert {shard.data.shape for shard in w_in.addressable_shards} == {(2, 16, 16)}
    texts = ["gate", "an expert", "<extra_id_0> slot"]
    starting = mock.MagicMock()
    monkeypatch.setattr(PROGRAMS, "_starting", starting)
    found = many.score(texts, texts)
    # All devices begin programs in one order, whichever thread starts them.
    assert starting.__enter__.call_count == 1
    for got, want in zip(found, one.score(texts, texts), strict=True):
        assert got.log_likelihood == pytest.approx(want.log_likelihood, rel=1e-5)
    pair = [5, 6, 7], [8, 9]
    choices = []
    record = mock.Mock(add=lambda _, parts, *rest: choices.append(parts["decoder"].expert_NBLS))
    for model in (many, one):
        how = {"devices": model.devices, "record": record}
        list(Scorer(without_capacity(model.config), model.params, **how)([pair]))
    rows = min(len(choices[0][0]), len(choices[1][0]))  # a mesh has more
    np.testing.assert_array_equal(*(expert_NBLS[:, :rows] for expert_NBLS in choices))
    assert starting.__enter__.call_count == 2


@pytest.mark.slow
def test_a_loaded_model_generates_and_gives_logits_on_a_mesh(folder):
    one, many = loaded(folder)
    texts = ["gate", "an expert", "<extra_id_0> slot"]
    assert many.generate(texts, max_length=4) == one.generate(texts, max_length=4)
    tokens = np.array([[5, 6, 7], [8, 9, 0], [4, 4, 4]])
    for is_dropless in (True, False):
        got, want = (
            model.logits(tokens, tokens, dropless=is_dropless) for model in (many, one)
        )
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_an_artifact_is_loaded_onto_a_mesh(tmp_path):
    config, params = trained(4, group_size=4)
    about = {"step": 0, "text_format": dataclasses.asdict(TextFormat(True, False, True))}
    write_artifact(tmp_path / "int4", config, params, about)
    one, many = (
        switchx.load(tmp_path / "int4", mesh=mesh) for mesh in (None, MeshSpec(expert=4))
    )
    assert many.generate(INPUTS[:3], max_length=4) == one.generate(INPUTS[:3], max_length=4)


def test_meshes_that_do_not_fit_are_refused_before_anything_is_read(folder):
    with refused("mesh data=1 x expert=3 needs 3 devices, but there are 8 (cpu)"):
        switchx.load("nowhere", mesh=MeshSpec(data=1, expert=3))
    with refused("expert dimension E=4 is not divisible by mesh axis 'expert' of size 8"):
        switchx.load(folder, mesh=MeshSpec(expert=8))
