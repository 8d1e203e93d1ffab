# SPDX-License-Identifier: Apache-2.0
"""Answers are what the API generates, in order, against the corpus' own texts."""

import dataclasses
import json
import types
from typing import ClassVar

import jax
import pytest

import switchx
from switchx.checkpoint.run_folder import RunFolder, read_config
from switchx.data.bpe import read_bpe
from switchx.data.evaluation import EvaluationExamples, evaluation_examples
from switchx.data.features import EncoderDecoderFeatures
from switchx.data.mixtures import Mixture
from switchx.data.objectives import InputsToTargets
from switchx.data.tasks import Task
from switchx.data.text_metrics import Accuracy, Bleu, ChrF, MetricResult
from switchx.data.tokenizers import ByteVocabulary
from switchx.data.vocabularies import read_or_trained
from switchx.generated_evaluation import JobTexts, answer, ask, mean_results, rank_choices
from switchx.models.adapters import LoRASpec
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.partitioning.mesh import MeshSpec
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.programs import compiled_program
from switchx.training.start import evaluator_of
from switchx.training.text_evaluation import TextEvaluation
from tests.data.fakes import VOCABULARY, ListCorpus, pair_corpus
from tests.data.refusals import refused
from tests.data.tokenizer_files import tokenizer_folder
from tests.training.jobs import DENSE, TASK, Events, make_job, make_params
from tests.training.saved_runs import save_run

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

MODEL = ModelConfig("encoder_decoder", 384, 8, 8, 2, 8, 1, 1, switch=SwitchConfig(2, every=1))
PAIRS = (("a gate", "ein Tor"), ("an expert ", "  ein\u00a0Experte"), ("of", "von"))
PREFIX = "to German: "
LETTERS = Task("letters", pair_corpus(*PAIRS), ByteVocabulary(), InputsToTargets(PREFIX))
MEASURED = dataclasses.replace(LETTERS, metrics=(Accuracy(), ChrF()))
LETTERS_APART = dataclasses.replace(LETTERS, name="apart")
FEATURES = EncoderDecoderFeatures(16, 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return switchx.load(save_run(tmp_path_factory.mktemp("run"), MODEL, source=LETTERS))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    config = dataclasses.replace(DENSE, num_decoder_layers=1)
    return switchx.load(save_run(tmp_path_factory.mktemp("decoder"), config, source=LETTERS))


def test_answers_are_those_of_the_api_in_order(model, decoder):
    for each in (model, decoder):
        asked = ask(each, evaluation_examples(LETTERS, "test", FEATURES))
        texts = asked.examples.inputs, asked.examples.targets
        assert texts == tuple(map(list, zip(*PAIRS, strict=True)))
        done = []
        got = answer(each, each.generator(max_new_tokens=4), asked, done.append)
        want = each.generate([PREFIX + text for text in asked.examples.inputs], max_length=4)
        assert got.texts == want
        assert (got.num_unfinished, done) == (3, [1, 2, 3])  # random weights never end
        ended = dataclasses.replace(each, decoding={"stop": [want[0][:1]]})
        got = answer(ended, ended.generator(max_new_tokens=4), asked)
        assert got.texts == [text.partition(want[0][:1])[0] for text in want]


def test_the_first_examples_of_a_split_and_inputs_that_are_cut(model):
    asked = ask(model, evaluation_examples(LETTERS, "test", FEATURES, max_examples=2))
    assert asked.examples.inputs == ["a gate", "an expert "]
    asked = ask(model, evaluation_examples(LETTERS, "test", FEATURES, max_examples=9))
    assert len(asked.examples.inputs) == 3
    asked = ask(model, evaluation_examples(LETTERS, "test", FEATURES))
    assert ([len(each) for each in asked.prompts], asked.examples.num_cut) == ([18, 22, 14], 0)
    cutting = dataclasses.replace(LETTERS, too_long="truncate")
    asked = ask(model, evaluation_examples(cutting, "test", FEATURES))
    assert ([len(each) for each in asked.prompts], asked.examples.num_cut) == ([16, 16, 14], 2)
    assert asked.prompts[0][-1] == cutting.vocabulary.eos_id


def test_bad_input(model):
    of_letters = evaluation_examples(LETTERS, "test", FEATURES)
    other = dataclasses.replace(LETTERS, vocabulary=VOCABULARY)
    with refused("task 'letters': CausalLM has no texts for targets"):
        ask(model, evaluation_examples(TASK, "test", FEATURES))
    with refused(
        "task 'letters' has a vocabulary of 1000 ids, the model has another one, of 384 ids"
    ):
        ask(model, dataclasses.replace(of_letters, task=other))
    asked = ask(model, of_letters)
    asked.prompts[1] = []
    with refused("task 'letters': example 1 is empty"):
        answer(model, model.generator(max_new_tokens=4), asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [MeshSpec(data=1), MeshSpec(data=2, expert=2, model=2)], ids=str
)
def test_a_job_writes_what_its_checkpoint_writes(model, mesh):
    """In training, on its mesh, batch by batch until there is no time for more."""
    job = make_job(
        MODEL, source=MEASURED, inputs_length=16, targets_length=8, mesh=mesh,
        text_evaluation=TextEvaluation(batch_size=2, max_new_tokens=4),
    )  # fmt: skip
    devices = jax.devices()[: mesh.num_devices(1)]
    program = compiled_program(job, devices)
    texts = JobTexts(job, program.mesh)
    params = jax.device_put(make_params(MODEL, seed=9), program.shardings.params)
    asked = ask(model, evaluation_examples(MEASURED, "validation", FEATURES))
    want = answer(model, model.generator(max_new_tokens=4), asked).texts
    with program.scope():  # as the loop calls it
        all_of_them = texts(params, lambda: True)["letters"]
        first = texts(params, lambda: False)["letters"]
    assert all_of_them.predictions == want
    assert all_of_them.metrics == asked.examples.metrics(want)
    assert (all_of_them.num_left_out, all_of_them.num_unfinished) == (0, 3)
    assert (first.predictions, first.inputs) == (want[:2], asked.examples.inputs[:2])
    assert first.metrics == asked.examples.first(2).metrics(want[:2])
    assert (first.num_left_out, first.num_unfinished) == (1, 2)


def test_tasks_take_turns_and_those_without_metrics_are_not_asked(model):
    corpus = pair_corpus(("a gate", "ein Tor"), name="other")
    shorter = dataclasses.replace(MEASURED, name="shorter", corpus=corpus)
    source = Mixture((MEASURED, LETTERS_APART, shorter), rates=(1.0, 1.0, 1.0))
    spec = TextEvaluation(batch_size=2, max_new_tokens=4)
    job = make_job(
        MODEL, source=source, inputs_length=16, targets_length=8, text_evaluation=spec
    )
    mesh = MeshSpec(data=1).build(jax.devices()[:1])
    answers = iter((True, False))
    got = JobTexts(job, mesh)(make_params(MODEL, seed=9), lambda: next(answers))
    assert got.keys() == {"letters", "shorter"}
    assert [len(each.predictions) for each in got.values()] == [3, 1]
    assert got["shorter"].predictions == got["letters"].predictions[:1]


@pytest.mark.parametrize("by", ["init_from", "lora"])
def test_a_job_decodes_as_what_it_begins_with(by, tmp_path):
    """Choosing among the ids that its vocabulary has, as `switchx eval` does."""
    tokenizer = tokenizer_folder(tmp_path / "tokenizer", "neox")
    size = read_bpe(tokenizer).size
    model = dataclasses.replace(DENSE, vocab_size=size + 8)
    base = RunFolder(save_run(tmp_path / "base", model))
    base.config.write_text(json.dumps(read_config(base) | {"decoding": {"stop": ["e"]}}))
    begins = str(base.root) if by == "init_from" else LoRASpec(str(base.root), 9)
    task = dataclasses.replace(MEASURED, vocabulary=read_or_trained(str(tokenizer)))
    spec = TextEvaluation(batch_size=2, max_new_tokens=4)
    job = make_job(model, source=task, text_evaluation=spec, **{by: begins})
    mesh = MeshSpec(data=1).build(jax.devices()[:1])
    texts = evaluator_of(job, RunFolder(tmp_path / "run"), mesh, JobTexts)
    decoding = texts._model.decoding_config()
    assert decoding.stop == ("e",) and decoding.num_ids == size


@dataclasses.dataclass(frozen=True)
class Own(InputsToTargets):
    is_prefix_bidirectional: ClassVar[bool] = True


def test_a_model_that_reads_causally_is_scored_as_it_generates(tmp_path):
    """The likelihood is that of the API, whatever attention the evaluated task names."""
    run, events = save_run(tmp_path / "run", DENSE), Events()
    events.note("an empty reporter is none")
    rows = dict(inputs_length=24, targets_length=16)
    task = dataclasses.replace(LETTERS, evaluation_split="test")
    asked = ask(switchx.load(run), evaluation_examples(LETTERS, "test", FEATURES))
    targets = [[*ByteVocabulary().encode(text), 1] for _, text in PAIRS]
    scores = switchx.load(run).score(asked.prompts, targets)
    want = -sum(s.log_likelihood for s in scores) / sum(s.num_tokens for s in scores)
    for source in (task, Mixture((LETTERS_APART,), evaluation=(task,))):
        got = switchx.evaluate(
            run, make_job(DENSE, source=source, **rows), metrics=[], reporter=events
        )
        assert got["cross_entropy"] == pytest.approx(want, rel=1e-5)
    assert any("reads prompts causally, and so inputs of letters" in e for e in events.notes)
    assert any("inputs of letters end with the id of eos, 1" in e for e in events.notes)
    own = dataclasses.replace(task, objective=Own())
    with refused("task 'letters': Own.is_prefix_bidirectional is True"):
        switchx.evaluate(run, make_job(DENSE, source=own, **rows), metrics=[], reporter=events)
    # A run that learnt to see its inputs whole is evaluated so.
    saved, events = save_run(tmp_path / "whole", DENSE, source=LETTERS), Events()
    events.note("an empty reporter is none")
    whole = switchx.evaluate(
        saved, make_job(DENSE, source=task, **rows), metrics=[], reporter=events
    )
    assert abs(whole["cross_entropy"] - want) > 1e-3 and not any(
        "causally" in note or "eos" in note for note in events.notes
    )


def test_what_a_job_cannot_write_is_refused_before_it_trains():
    def made(model=MODEL, **changes):
        fields = dict(source=MEASURED, inputs_length=16, text_evaluation=TextEvaluation())
        job = make_job(model, **(fields | changes))
        sizes = {"pipe": job.mesh.pipe}
        return JobTexts(job, types.SimpleNamespace(shape=sizes))

    with refused("no task of letters has metrics"):
        made(source=LETTERS)
    with refused("TrainingJob.text_evaluation with mesh axis 'pipe' of size 2: texts are"):
        made(mesh=MeshSpec(pipe=2))
    with refused("=@TextEvaluation() with StorageSpec.experts='disk': texts are"):
        made(storage=StorageSpec("disk", path="experts"))
    switch = dataclasses.replace(MODEL.switch, sublayers="attention")
    with refused("SwitchConfig.sublayers='attention': experts in self-attention have no cache"):
        made(dataclasses.replace(MODEL, switch=switch))
    table = dataclasses.replace(MODEL, positions="learned", max_length=24)
    with refused("task 'letters': example 0 needs 129 positions, the model has 24"):
        made(table)


def test_choices_are_ranked_by_the_scores_of_the_api(model, decoder):
    """The oracle scores all choices as texts; labels are chosen so that one of two is right."""
    inputs, choices = ["a gate", "of"], ("ein Tor", "von", "ja")
    for each in (model, decoder):
        scores = [
            [s.log_likelihood for s in each.score([PREFIX + text] * 3, choices)]
            for text in inputs
        ]
        best = [values.index(max(values)) for values in scores]
        labels = [best[0], (best[1] + 1) % 3]
        facts = [json.dumps({"choices": choices, "label": label}) for label in labels]
        records = zip(inputs, (choices[label] for label in labels), facts, strict=True)
        corpus = ListCorpus(tuple(records), ("inputs", "targets", "facts"))
        asked = ask(
            each,
            evaluation_examples(dataclasses.replace(LETTERS, corpus=corpus), "test", FEATURES),
        )
        done = []
        accuracy, f1 = rank_choices(each, asked, progressed=done.append)
        assert (accuracy.name, accuracy.score) == ("rank_accuracy", 50.0)
        assert f1.name == "rank_mean_3class_f1" and len(done) == 6
    with refused("task 'letters': example 0 of 'test' has no choices of which one is known"):
        rank_choices(model, ask(model, evaluation_examples(LETTERS, "test", FEATURES)))


def test_means_are_of_the_same_metric():
    def measure(metrics, texts, targets):
        examples = EvaluationExamples(LETTERS, "test", texts, targets, [], 0)
        return examples.results(texts, metrics)

    texts, targets = ["a b c d", "x"], ["a b c d", "y"]
    results = measure((Accuracy(), ChrF()), texts, targets)
    assert [each.name for each in results] == ["accuracy", "chrf"]
    assert results[0].score == 50.0
    (other,) = measure((Accuracy(),), ["a"], ["b"])
    lower = measure((Bleu(lowercase=True),), texts, targets)
    plain = measure((Bleu(),), texts, targets)
    assert mean_results([[*results, *plain], [other, *lower]]) == [
        MetricResult("accuracy", 25.0, other.signature),
        results[1],
        *plain,
        *lower,
    ]
    failed = MetricResult("accuracy", None, "", note="why")
    means = mean_results([results, [failed]])
    assert [(each.name, each.score) for each in means] == [
        ("accuracy", None),
        ("chrf", results[1].score),
    ]
    assert means[0].note == "a task has no score, and so there is no mean"
