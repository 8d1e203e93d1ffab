# SPDX-License-Identifier: Apache-2.0
"""`switchx.load`: the model that was saved, or why there is none; what it says of texts.

Trained: integration.
"""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

import switchx
from pallas_kernels import dequantize
from switchx import tree
from switchx.api import Generated
from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.main import main
from switchx.data.features import EncoderDecoderFeatures, Example
from switchx.inference.quantize import is_quantized
from switchx.models.params import forward
from switchx.training.resume import write_run_config
from tests.data.refusals import refused
from tests.training.jobs import (
    DENSE,
    ENCODER_DECODER,
    SPARSE,
    SWITCH,
    make_job,
    make_params,
)
from tests.training.saved_runs import SPANS, save_run

# One block a stack: most of the time is compilation.
T5 = dataclasses.replace(
    ENCODER_DECODER, num_encoder_layers=1, num_decoder_layers=1,
    switch=dataclasses.replace(SWITCH, every=1),
)  # fmt: skip
DECODER = dataclasses.replace(DENSE, num_decoder_layers=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("saved"), SPARSE)


@pytest.fixture
def run(saved, tmp_path):
    """A copy that a test may change."""
    return RunFolder(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory):
    """The run of an encoder-decoder that learnt span corruption."""
    path = tmp_path_factory.mktemp("t5")
    return save_run(path, T5, source=SPANS)


@pytest.fixture(scope="module")
def t5(t5_folder):
    return switchx.load(t5_folder)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """One that learnt causal language modelling."""
    return switchx.load(save_run(tmp_path_factory.mktemp("decoder"), DECODER))


def test_the_newest_a_certain_and_the_best_checkpoint(run):
    for step, want in ((None, 9), (9, 9), (5, 5), ("best", 5)):
        model = switchx.load(run.path, step)
        assert model.step == want
        params = tree.named_leaves(make_params(SPARSE, seed=want))
        got = tree.named_leaves(model.params)
        assert got.keys() == params.keys()
        for name, leaf in params.items():
            np.testing.assert_array_equal(got[name], leaf, err_msg=name)


def test_a_model_knows_its_configuration_and_cannot_be_changed(run):
    model = switchx.load(str(run.path))
    assert model.config == SPARSE
    assert model.num_params == sum(
        leaf.size for leaf in tree.named_leaves(model.params).values()
    )
    assert model.vocabulary.decode(model.vocabulary.encode("gate")) == "gate"
    assert repr(model) == f"Model(config={SPARSE!r}, step=9)"  # not all its numbers
    with pytest.raises(dataclasses.FrozenInstanceError):
        switchx.load(run.path).step = 1


def test_a_folder_that_is_no_run(tmp_path):
    with refused(
        f"{tmp_path / 'no'} is not a run folder, its config.json cannot be read "
        "([Errno 2] No such file or directory: <any>): nothing is there"
    ):
        switchx.load(tmp_path / "no")


def test_a_run_without_a_checkpoint_or_without_this_one(run, tmp_path):
    fresh = RunFolder(tmp_path / "fresh").create()
    write_run_config(fresh, make_job())
    with refused(f"no complete checkpoint in {fresh.root}: found config.json, vocabulary.json"):
        switchx.load(fresh.path)
    with refused(f"no complete checkpoint of step 7 in {run.root}: found checkpoints 9, 5"):
        switchx.load(run.path, step=7)


def test_parameters_that_are_not_those_of_the_configuration_are_all_named(run):
    config = json.loads(run.config.read_text())
    config["model"] |= {"d_ff": 32, "tie_embeddings": False}
    run.config.write_text(json.dumps(config))
    with pytest.raises(ValueError) as caught:
        switchx.load(run.path)
    text = str(caught.value)
    block = "params/decoder/blocks"
    for line in (
        f"{block}/layer_0/ffn/w_in_DF: expected float32[16, 32], got float32[16, 24]",
        f"{block}/layer_1/ffn/experts/w_out_EFD: expected float32[8, 32, 16], got "
        "float32[8, 24, 16]",
        "params/embedding/w_logits_DV: expected float32[16, 384], got nothing",
    ):
        assert line in text
    assert "5 of 21 arrays differ" in text


def test_a_vocabulary_that_is_gone(run):
    (run.root / "vocabulary.json").unlink()
    with pytest.raises(ValueError, match=f"no vocabulary can be read from {run.root}"):
        switchx.load(run.path)


# Four of each, padded to six tokens: few programs.
SOURCES = [[10, 20, 30, 1], [40, 50, 1], [7, 1], [60, 5, 9, 9, 9, 1]]
TEXTS = ["gate", "an ex", "?", ""]


def padded(lists, length):
    return np.array([[*tokens, *[0] * (length - len(tokens))] for tokens in lists])


def test_logits_are_those_of_training_features(t5):
    inputs = [np.array(tokens) for tokens in SOURCES]
    targets = [np.array(tokens[::-1]) for tokens in SOURCES]
    batch = EncoderDecoderFeatures(8, 7).batch(
        [[Example(*pair)] for pair in zip(inputs, targets, strict=True)]
    )
    got = t5.logits(batch["encoder_input_tokens"], batch["decoder_input_tokens"])
    run = jax.jit(lambda params: forward(t5.config, params, batch, is_training=False)[0])
    want = run(t5.params)
    is_target = batch["decoder_loss_weights"] > 0
    assert got.shape == (4, 7, 384)
    np.testing.assert_allclose(got[is_target], np.asarray(want)[is_target], rtol=1e-5)


def test_logits_of_a_row_without_its_neighbours_where_nothing_is_dropped(t5):
    arrays = padded(SOURCES, 8), padded([[0, *tokens] for tokens in SOURCES], 7)
    together = t5.logits(*arrays, dropless=True)
    dropping = t5.logits(*arrays)
    assert np.abs(together - dropping).max() > 1e-3  # a capacity that is felt
    # Beside rows of padding alone.
    row = [SOURCES[1], [], [], []]
    alone = t5.logits(
        padded(row, 8), padded([[0, *tokens] for tokens in row], 7), dropless=True
    )
    np.testing.assert_allclose(together[1, :4], alone[0, :4], rtol=2e-5, atol=2e-5)


def test_a_decoder_takes_one_array_and_goes_on_from_nothing(decoder):
    tokens_BL = padded([[0, 5, 6]], 11)
    want = decoder.logits(decoder_tokens=tokens_BL, dropless=True)
    np.testing.assert_array_equal(decoder.logits(tokens_BL, dropless=True), want)
    assert want.shape == (1, 11, 384)
    (tokens,) = decoder.generate([[]], max_length=4)
    assert decoder.generate([[0]], max_length=4) == [tokens]
    (score,) = decoder.score(None, [tokens])
    assert score == decoder.score([[]], [tokens])[0]


def greedy(logits_of, num_tokens):
    """The likeliest tokens of whole forward passes, and the sum of their log-probabilities."""
    tokens, total = [], 0.0
    for _ in range(num_tokens):
        logits_V = np.asarray(logits_of(tokens), np.float64)
        log_prob_V = logits_V - np.log(np.sum(np.exp(logits_V)))
        tokens.append(int(np.argmax(log_prob_V)))
        total += log_prob_V[tokens[-1]]
    return tokens, total


def test_generated_tokens_are_the_likeliest_of_logits(t5, decoder):
    def of_t5(source):
        def logits_of(tokens):
            read = padded([[0, *tokens], [], [], []], 7)
            source_BM = padded([source, [], [], []], 8)
            return t5.logits(source_BM, read, dropless=True)[0, len(tokens)]

        return logits_of

    def of_decoder(prompt):
        def logits_of(tokens):
            read = padded([[0, *prompt, *tokens]], 11)
            return decoder.logits(read, dropless=True)[0, len(prompt) + len(tokens)]

        return logits_of

    for model, logits_of in ((t5, of_t5), (decoder, of_decoder)):
        got = model.generate(SOURCES, max_length=4, with_scores=True)
        for source, result in zip(SOURCES, got, strict=True):
            assert not result.is_finished  # random weights: the end is one token of 384
            tokens, total = greedy(logits_of(source), 4)
            assert result.output == tokens
            assert result.score == pytest.approx(total / 4, rel=1e-5)
        scores = model.score(SOURCES, [each.output for each in got])
        assert [each.num_tokens for each in scores] == [4] * 4
        for score, result in zip(scores, got, strict=True):
            assert score.log_likelihood == pytest.approx(4 * result.score, rel=1e-5)


def test_neither_batch_nor_padding_nor_the_start_token_matters(t5, decoder):
    for model in (t5, decoder):
        want = model.generate(SOURCES, max_length=4)
        assert model.generate(padded(SOURCES, 8), max_length=4) == want
        if model is t5:
            assert model.generate(SOURCES[3:], max_new_tokens=4, batch_size=1) == want[3:]
    assert decoder.generate([[0, *each] for each in SOURCES], max_length=4) == want


def test_texts_are_read_as_training_read_them_and_come_back_as_texts(t5, decoder):
    assert t5.prompts(["", "a"]) == [[1], [100, 1]]  # an empty text is its end alone
    for model, end in ((t5, [1]), (decoder, [])):
        tokens = [model.vocabulary.encode(text) + end for text in TEXTS]
        want = model.generate(tokens, max_length=4)
        texts = model.generate(TEXTS, max_length=4)
        assert texts == [model.vocabulary.decode(each) for each in want]
        targets = ["a", "bbb", "", "c"]
        got = model.score(TEXTS, targets)
        ended = [[*model.vocabulary.encode(text), 1] for text in targets]
        assert got == model.score(tokens, ended)
    sentinel = t5.generate(["a <extra_id_0> b"], max_length=4, with_scores=True)
    tokens = [*t5.vocabulary.encode("a "), 258, *t5.vocabulary.encode(" b"), 1]
    (want,) = t5.generate([tokens], max_length=4, with_scores=True)
    assert sentinel == [
        Generated(t5.vocabulary.decode(want.output), want.score, want.is_finished)
    ]


def test_a_quantized_model_is_the_one_with_the_weights_it_stands_for(t5, t5_folder, tmp_path):
    output = tmp_path / "int4"
    assert main(["quantize", f"--model_dir={t5_folder}", f"--output={output}", "--bits=4"]) == 0
    quantized = switchx.load(output)
    assert (quantized.step, quantized.text_format) == (9, t5.text_format)
    assert quantized.vocabulary.fingerprint() == t5.vocabulary.fingerprint()
    assert quantized.fingerprint != t5.fingerprint

    floats = dataclasses.replace(
        quantized,
        params=jax.tree.map(
            lambda leaf: dequantize(leaf) if is_quantized(leaf) else leaf,
            quantized.params,
            is_leaf=is_quantized,
        ),
    )
    got, want = (
        model.generate(SOURCES, max_length=4, with_scores=True) for model in (quantized, floats)
    )
    assert [each.output for each in got] == [each.output for each in want]
    np.testing.assert_allclose(
        [each.score for each in got], [each.score for each in want], rtol=1e-5
    )
    unquantized = t5.generate(SOURCES, max_length=4, with_scores=True)
    assert abs(unquantized[0].score - got[0].score) > 1e-5
    with refused(f"step=3 of {output}, which is a quantized model and has one"):
        switchx.load(output, step=3)


def test_a_model_from_elsewhere_may_have_no_vocabulary(run):
    config = json.loads(run.config.read_text())
    run.config.write_text(json.dumps({"model": config["model"]}))
    (run.root / "vocabulary.json").unlink()
    model = switchx.load(run.path)
    assert model.vocabulary is None
    with refused("this model came without a vocabulary, so it cannot read texts"):
        model.generate(["a"])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda t5: t5.generate("gate"), "inputs is one text, 'gate'"),
        (lambda t5: t5.generate([[5], []]), "input 1 is empty"),
        (lambda t5: t5.generate([[5, 0, 6]]), "inputs[0] has padding, id 0, before its end"),
        (lambda t5: t5.generate(["a", [5]]), "inputs[0] is 'a'"),
        (lambda t5: t5.generate([[0.5]]), "inputs[0] is [0.5]"),
        (lambda t5: t5.generate([[384]]), "input 0 has token id 384, the vocabulary"),
        (
            lambda t5: t5.generate([[5]], max_length=3, max_new_tokens=4),
            "max_length and max_new_tokens are the same",
        ),
        (lambda t5: t5.score(["a"], ["a", "b"]), "1 inputs for 2 targets"),
        (
            lambda t5: t5.logits(np.ones((1, 2), int)),
            "architecture='encoder_decoder' reads encoder_tokens and decoder_tokens",
        ),
        (
            lambda t5: t5.logits(np.ones((1, 2)), np.ones((1, 2), int)),
            "encoder_tokens is float64[1, 2]",
        ),
        (
            lambda t5: t5.logits(np.ones((2, 2), int), np.ones((1, 2), int)),
            "got encoder_tokens (2, 2), decoder_tokens (1, 2)",
        ),
        (
            lambda t5: t5.logits(np.full((1, 2), 384), np.ones((1, 2), int)),
            "encoder_tokens has ids from 384 to 384, the vocabulary has 0 to 383",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused(t5, call, said):
    with refused(said):
        call(t5)


def test_bad_input_of_a_decoder_is_refused(decoder):
    with refused("architecture='decoder_only' reads decoder_tokens alone"):
        decoder.logits(np.ones((1, 2), int), np.ones((1, 2), int))
