# SPDX-License-Identifier: Apache-2.0
"""Steps from Python: a decoder-only model, beams, two experts a token; what is measured."""

import dataclasses
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest

import switchx
from switchx import tree
from switchx.data.tokenizers import TokenIdVocabulary
from switchx.data.vocabularies import save_vocabulary
from switchx.deploy import distill
from switchx.deploy.checked_plan import GIB, DeployPlan, DeploySettings
from switchx.deploy.folders import run_steps
from switchx.deploy.measure import (
    ValidationText,
    sample_layers,
    tokens_differing,
    validation_loss,
)
from switchx.deploy.steps import Deployment
from switchx.inference.config import DecodingConfig
from switchx.inference.generate import without_capacity
from switchx.models.adapters import LoRASpec
from switchx.models.config import RouterConfig
from switchx.models.params import forward
from switchx.training.job import InitConfig
from tests.data.refusals import refused
from tests.training.jobs import SPARSE, make_job
from tests.training.saved_runs import save_run

TWO = dataclasses.replace(SPARSE.switch, router=RouterConfig(num_selected=2, jitter=0.0))
MODEL = dataclasses.replace(SPARSE, switch=TWO)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder, and its validation text."""
    folder = save_run(tmp_path_factory.mktemp("run") / "run", MODEL)
    return folder, ValidationText.of(make_job(MODEL), num_prompts=4, input_length=5)


def test_prompts_are_the_first_halves_of_texts(run):
    _, text = run
    assert len(text.prompts) == 4 and len(text.batches) == 2
    halves = []
    for batch in text.batches:
        arrays = (batch[f"decoder_{name}"] for name in ("input_tokens", "segment_ids"))
        for token_L, segment_L in zip(*arrays, strict=True):
            row = token_L[segment_L == 1].tolist()
            halves.append(row[: (len(row) + 1) // 2])
    assert text.prompts == [half[:5] for half in halves[:4]]
    whole = ValidationText.of(make_job(MODEL), num_prompts=4, input_length=10**6)
    assert whole.prompts == halves[:4] and halves[0][0] == 0


@pytest.mark.slow
def test_the_sample_is_what_the_layers_read(run):
    """Loads are those of the model's own statistics; the loss is a plain sum over tokens."""
    folder, text = run
    model = switchx.load(folder)
    (sample,) = sample_layers(model, text)
    load_E, nll, tokens = 0, 0.0, 0.0
    for batch in text.batches:
        config = without_capacity(model.config)
        logits_BLV, stats = forward(config, model.params, batch, is_training=False)
        load_E = load_E + np.asarray(stats.load_E[0])
        logits_BLV = np.asarray(logits_BLV, np.float64)
        target_BL, weight_BL = (
            batch[f"decoder_{name}"] for name in ("target_tokens", "loss_weights")
        )
        log_z_BL = np.log(np.exp(logits_BLV).sum(axis=-1))
        chosen_BL = np.take_along_axis(logits_BLV, target_BL[..., None], axis=-1)[..., 0]
        nll += np.sum((log_z_BL - chosen_BL) * weight_BL)
        tokens += np.sum(weight_BL)
    assert np.array_equal(sample.load_E, load_E)
    assert sample.x_RD.shape == (min(256, int(load_E.sum())), MODEL.d_model)
    assert np.isfinite(sample.x_RD).all()
    np.testing.assert_allclose(validation_loss(model, text), nll / tokens, rtol=1e-5)


@pytest.mark.slow
def test_outputs_are_summed_by_expert(run):
    """One batch, whose rows are all in the sample, by expert."""
    folder, text = run
    model = switchx.load(folder)
    (sample,) = sample_layers(model, dataclasses.replace(text, batches=text.batches[:1]))
    assert len(sample.x_RD) == sample.load_E.sum()
    experts = model.params["decoder"]["blocks"]["layer_1"]["ffn"]["experts"]
    for e, x_RD in enumerate(np.split(sample.x_RD, np.cumsum(sample.load_E)[:-1])):
        y_RD = np.maximum(x_RD @ experts["w_in_EDF"][e], 0) @ experts["w_out_EFD"][e]
        np.testing.assert_allclose(sample.sum_ED[e], y_RD.sum(0), rtol=1e-4, atol=1e-5)


def test_differing_tokens_are_counted_by_place():
    assert tokens_differing([[1, 2], [3]], [[1, 2], [3]]) == 0
    assert tokens_differing([[1, 2], [3]], [[1, 4, 5], []]) == 3
    assert tokens_differing([[1]], [[1], [2, 2]]) == 2


def taught_plan(folder, teacher) -> DeployPlan:
    settings = DeploySettings(
        "cpu", experts=4, batch_size=4, input_length=5, teacher=str(teacher), distill_steps=6
    )
    return DeployPlan(folder, 9, settings)


@pytest.mark.slow  # a run
def test_a_reduced_model_is_taught_on_the_runs_task(run, tmp_path):
    """The first two steps: nearer to the text than untaught; made once, of one job."""
    folder, text = run
    plan = taught_plan(folder, folder)
    assert plan.teacher.step == 9
    with refused(f"teacher={str(folder)!r} without a job"):
        Deployment(plan, lambda: text, None, "switchx deploy")
    said, kept = [], []
    for _ in range(2):
        job = make_job(MODEL, eval_batches=1)
        deployment = Deployment(plan, lambda: text, None, "switchx deploy", job)
        deployment._note = said.append
        made = run_steps(tmp_path / "out", plan.source, deployment._steps()[:2])
        kept.append([each.is_new for each in made])
    assert kept == [[True, True], [False, False]]
    other = Deployment(plan, lambda: text, None, "switchx deploy", make_job(MODEL, seed=1))
    assert other._steps()[1].settings != deployment._steps()[1].settings
    measured = made[1].measured
    assert measured["experts"] == 4
    assert measured["validation_loss"] < measured["untaught_loss"] - 0.1
    assert any("soft loss" in line for line in said)
    model = switchx.load(made[1].path)
    assert model.config == plan.reduced and model.step == 0
    names = {each.name for each in made[1].path.iterdir()}
    assert names == {"checkpoints", "config.json", "model.gin", "step.json", "vocabulary.json"}


def test_a_student_begins_as_it_was_reduced(run, tmp_path, monkeypatch):
    """Whatever its run began with, and which rules that had."""
    jobs, loaded = [], types.SimpleNamespace(params={})
    monkeypatch.setattr(distill, "train", lambda job, *_, **__: jobs.append(job))
    monkeypatch.setattr(distill.api, "load", lambda _: loaded)
    afresh = InitConfig(step=3, rules=((".*experts.*", None),))
    begun = make_job(MODEL, init_from=str(run[0]), init=afresh)
    adapted = make_job(MODEL, lora=LoRASpec(base=str(run[0])))
    teacher, start = taught_plan(run[0], run[0]).teacher, tmp_path / "start"
    for job in (begun, adapted):
        distill.distilled(teacher, job, MODEL, start, tmp_path / "run", 2, print)
        assert jobs[-1].init_from == str(start)
        assert jobs[-1].init == InitConfig() and jobs[-1].lora is None


def test_teachers_that_cannot_teach_are_refused(run, tmp_path):
    folder, _ = run
    narrow = save_run(tmp_path / "narrow", dataclasses.replace(MODEL, vocab_size=380))
    with refused("vocab_size=384 of the student, and 380 of the teacher"):
        taught_plan(folder, narrow)
    save_vocabulary(TokenIdVocabulary(384), tmp_path / "narrow")
    (narrow / "config.json").write_bytes((folder / "config.json").read_bytes())
    with refused("narrow was trained with another vocabulary than"):
        taught_plan(folder, narrow)


DEEP = dataclasses.replace(
    MODEL, num_decoder_layers=6, switch=dataclasses.replace(TWO, every=2)
)


@pytest.fixture(scope="module")
def deep_run(tmp_path_factory):
    """A run of three Switch layers of which a device need not have all."""
    return save_run(tmp_path_factory.mktemp("deep") / "run", DEEP)


def planned(folder, share: float, **changes) -> DeployPlan:
    """For a device with this share of what the resident model needs."""
    settings = DeploySettings(
        "tpu",
        batch_size=4,
        input_length=5,
        decoding=DecodingConfig(max_new_tokens=4),
        **changes,
    )
    whole = DeployPlan(folder, None, settings).split.total
    return DeployPlan(
        folder, None, dataclasses.replace(settings, memory_gib=share * whole / GIB)
    )


def test_the_memory_decides_between_resident_and_a_ring(deep_run):
    """The most slots that fit; of three layers, two slots stream all."""
    resident = planned(deep_run, 1.0)
    assert resident.ring is None and resident.because.startswith("all fit: ")
    whole = resident.split
    ring = planned(deep_run, 0.999).ring
    layer = ring.layer_bytes
    # Layers of E experts: two matrices, in float32.
    assert layer == DEEP.switch.num_experts * 2 * DEEP.d_model * DEEP.d_ff * 4
    assert (ring.slots, ring.streamed, ring.host) == (2, {"decoder": 3}, 3 * layer)
    assert (whole.weights - ring.weights, whole.cache) == (layer, ring.cache)
    because = planned(deep_run, 0.999).because
    assert "with 2 slots" in because and "decoder, 20 tokens: " in because
    assert "decoder, 4 tokens: 1.00 an expert do not (from " in because
    with refused("and with all experts in host memory and a ring of 2 slots 0.000<any>"):
        planned(deep_run, 1 - 1.1 * layer / whole.total)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}], ids=["float32", "bfloat16"])
def test_a_ring_changes_no_token(deep_run, run, tmp_path, changes):
    plan, (_, text) = planned(deep_run, 0.99, **changes), run
    with pytest.warns(UserWarning, match="kinds of memory have no effect"):
        made = Deployment(plan, lambda: text, None, "switchx deploy").run(tmp_path / "out")
    assert [each.measured["tokens_differing"] for each in made] == [None, None, 0, 0, 0, 0]
    optimized = made[4].measured
    assert optimized["experts_are"] == "a ring of 2 slots"
    assert optimized["because"] == plan.because
    manifest = json.loads((made[5].path / "export.json").read_text())
    assert manifest["ring"]["slots"] == 2
    # More memory: the steps that it does not concern are kept.
    again = Deployment(planned(deep_run, 1.0, **changes), lambda: text, None, "switchx deploy")
    kept = [each.is_new for each in again.run(tmp_path / "out")]
    assert kept == [False] * 4 + [True] * 2


@pytest.mark.slow
def test_a_decoder_with_two_experts_a_token_and_beams(run, tmp_path):
    folder, text = run
    settings = DeploySettings(
        "cpu", experts=4, bits=8, batch_size=4, input_length=5,
        decoding=DecodingConfig(max_new_tokens=4, beam_size=2),
    )  # fmt: skip
    plan = DeployPlan(folder, 9, settings)
    made = Deployment(plan, lambda: text, None, "switchx deploy").run(tmp_path / "out")
    assert [each.measured["tokens_differing"] for each in made] == [None, None, 0, 0, 0, 0]
    losses = [each.measured["validation_loss"] for each in made]
    assert losses[1] == losses[2] == losses[3] and losses[4] == losses[5] != losses[3]
    reduced = tree.named_leaves(switchx.load(made[1].path).params)
    count = {name: x for name, x in reduced.items() if "router_log_count_E" in name}
    assert [x.shape for x in count.values()] == [(4,)]
    assert all(jnp.any(x > 0) for x in count.values())
    # A run folder, which says what its texts are, and who made it.
    config = json.loads((made[1].path / "config.json").read_text())
    assert config["model"]["switch"]["router"]["counts_merged"] and "source" in config
