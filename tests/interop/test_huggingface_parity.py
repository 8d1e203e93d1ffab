# SPDX-License-Identifier: Apache-2.0
"""Logits of transformers' own models with random weights, read here and written back.

The bound is 1e-5 of the largest logit, in float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.interop.families import FAMILIES
from switchx.interop.huggingface import read_checkpoint, write_checkpoint
from switchx.interop.tensor_folder import from_torch
from switchx.models.params import forward
from switchx.tree import named_leaves
from tests.interop.folders import change_config, change_tensors, greedy_tokens
from tests.interop.transformers_models import MODELS, SIZES, as_trained, build, switch

pytestmark = pytest.mark.hf

# Rows of 24, 5 and 13 tokens, padded on the right: long enough to share relative buckets.
LENGTHS, L, M = np.array([24, 5, 13]), 12, 24


def drops() -> bool:
    """Whether this release of transformers drops tokens: 5.0 to 5.18 did not."""
    import transformers

    major, minor = map(int, transformers.__version__.split(".")[:2])
    return not (major == 5 and minor < 19)


@functools.cache
def texts():
    rng = np.random.default_rng(1)
    is_token_BM = np.arange(M)[None] < LENGTHS[:, None]
    source_BM = rng.integers(3, SIZES["vocab_size"], (3, M)) * is_token_BM
    target_BL = rng.integers(3, SIZES["vocab_size"], (3, L))
    target_BL[:, 0] = 0
    return source_BM, is_token_BM, target_BL


def their_logits(model):
    import torch

    source_BM, is_token_BM, target_BL = texts()
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(source_BM),
            attention_mask=torch.tensor(is_token_BM.astype(int)),
            decoder_input_ids=torch.tensor(target_BL),
        )
    return output.logits.numpy()


def our_logits(checkpoint, params=None):
    source_BM, is_token_BM, target_BL = texts()
    batch = {
        "encoder_input_tokens": source_BM,
        "encoder_segment_ids": is_token_BM.astype(np.int32),
        "encoder_positions": np.broadcast_to(np.arange(M), source_BM.shape),
        "decoder_input_tokens": target_BL,
        "decoder_segment_ids": np.ones_like(target_BL),
        "decoder_positions": np.broadcast_to(np.arange(L), target_BL.shape),
    }

    @jax.jit
    def run(params):
        return forward(checkpoint.config, params, batch, is_training=False)

    return run(checkpoint.params if params is None else params)


def assert_close(got, want):
    assert np.max(np.abs(np.asarray(got) - want)) <= 1e-5 * np.max(np.abs(want))


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits_there_and_back(tmp_path, name):
    family, sizes = MODELS[name]
    model = build(family, sizes)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")  # in shards
    want_BLV = their_logits(model)

    of_release = "drop" if drops() else "dropless"
    overflow = of_release if family == "SwitchTransformers" else None
    checkpoint = read_checkpoint(tmp_path / "theirs", overflow=overflow)
    logits_BLV, stats = our_logits(checkpoint)
    assert_close(logits_BLV, want_BLV)
    if name == "switch_drops" and drops():
        assert np.all(np.asarray(stats.dropped) > 0)

    (tmp_path / "ours").mkdir()
    assert write_checkpoint(tmp_path / "ours", checkpoint.config, checkpoint.params) == []
    import transformers

    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours")
    assert type(loaded).__name__ == f"{family}ForConditionalGeneration".removeprefix("M")
    assert_close(their_logits(as_trained(loaded.eval())), want_BLV)


def other_names(tensors):
    """As in switch-xxl-128."""
    tensors["decoder.lm_head.weight"] = tensors.pop("lm_head.weight")


@pytest.mark.parametrize(
    "said",
    [
        {"num_layers": 12, "num_decoder_layers": 6, "num_sparse_encoder_layers": 3},
        {"num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0},
    ],
)
def test_a_config_that_describes_other_blocks_than_there_are(tmp_path, said):
    """As of switch-c-2048: all blocks are sparse."""
    _, sizes = switch(
        num_sparse_encoder_layers=4, num_sparse_decoder_layers=4, expert_capacity=64,
        tie_word_embeddings=False, router_bias=True,
    )  # fmt: skip
    model = build("SwitchTransformers", sizes)
    model.save_pretrained(tmp_path)
    change_tensors(tmp_path, other_names)
    change_config(tmp_path, tie_word_embeddings=True, router_bias=False, **said)
    checkpoint = read_checkpoint(tmp_path, overflow="drop" if drops() else "dropless")
    config = checkpoint.config
    assert (config.num_encoder_layers, config.num_decoder_layers, config.switch.every) == (
        4,
        4,
        1,
    )
    (note,) = checkpoint.notes
    assert note.endswith(
        "the tensors are 4 of 4 sparse blocks in the encoder, 4 of 4 in the decoder and "
        "activation='relu'"
    )
    assert_close(our_logits(checkpoint)[0], their_logits(model))


def test_tables_that_differ(tmp_path):
    import torch

    _, sizes = switch(tie_word_embeddings=False, expert_capacity=64)
    model = build("SwitchTransformers", sizes)
    own = torch.nn.Embedding(SIZES["vocab_size"], SIZES["d_model"])
    model.encoder.embed_tokens = own
    model.save_pretrained(tmp_path)
    tables = {f"{stack}.embed_tokens.weight": weight.detach().numpy() for stack, weight in (
        ("encoder", own.weight), ("decoder", model.decoder.embed_tokens.weight)
    )}  # fmt: skip
    change_tensors(tmp_path, lambda tensors: tensors.update(tables))
    checkpoint = read_checkpoint(tmp_path, overflow="drop" if drops() else "dropless")
    assert checkpoint.config.separate_embeddings
    assert_close(our_logits(checkpoint)[0], their_logits(model))
    with pytest.raises(ValueError, match="separate_embeddings=True .expected False"):
        write_checkpoint(tmp_path, checkpoint.config, checkpoint.params)


def test_raw_gradients_of_biases_of_each_layer(tmp_path):
    """Of UMT5, all parameters: gradients read as a checkpoint of them is."""
    import torch

    model = build(*MODELS["umt5"])
    model.save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    weights_BLV = np.random.default_rng(2).normal(size=(3, L, SIZES["vocab_size"]))
    source_BM, is_token_BM, target_BL = texts()
    output = model(
        input_ids=torch.tensor(source_BM),
        attention_mask=torch.tensor(is_token_BM.astype(int)),
        decoder_input_ids=torch.tensor(target_BL),
    )
    torch.sum(output.logits * torch.tensor(weights_BLV, dtype=torch.float32)).backward()
    gradients = {name: weight.grad.numpy() for name, weight in model.named_parameters()}

    def loss(params):
        return jnp.sum(our_logits(checkpoint, params)[0] * weights_BLV)

    ours = named_leaves(jax.jit(jax.grad(loss))(checkpoint.params))
    names = FAMILIES["umt5"].tensor_names(checkpoint.config)
    assert ours.keys() == names.keys()
    assert ours["decoder/relative_bias/bias_UH"].shape[0] == 3
    for parameter, theirs in names.items():
        want = from_torch(parameter, checkpoint.config, [gradients[name] for name in theirs])
        difference = np.max(np.abs(np.asarray(ours[parameter]) - want))
        assert difference <= 1e-4 * max(np.max(np.abs(want)), 1.0), parameter


def test_greedy_texts_with_biases_of_each_layer(tmp_path):
    """Step by step with a cache, where biases are cut out by step and by layer."""
    import torch

    model = build(*MODELS["umt5"])
    with torch.no_grad():  # so that texts depend on their sources, and do not end at once
        for name, weight in model.named_parameters():
            if "EncDecAttention" in name or "relative_attention_bias" in name:
                weight *= 3.0
        model.lm_head.weight[1] = 0.0
    model.save_pretrained(tmp_path)
    checkpoint, num_tokens = read_checkpoint(tmp_path), 10
    source_BM, is_token_BM, _ = texts()
    want_BT = model.generate(
        input_ids=torch.tensor(source_BM),
        attention_mask=torch.tensor(is_token_BM.astype(int)),
        max_new_tokens=num_tokens,
        do_sample=False,
        num_beams=1,
    ).numpy()[:, 1:]
    prompt_BP = np.zeros((len(LENGTHS), 1), np.int32)
    got_BT = greedy_tokens(checkpoint, prompt_BP, source_BM, is_token_BM, num_tokens)
    np.testing.assert_array_equal(got_BT, want_BT)
    assert len(set(map(tuple, want_BT))) == 3


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_weights_of_16_bits_are_read_exactly(tmp_path, file):
    import torch

    model = build("T5", SIZES).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    if file == "pytorch_model.bin":  # as releases before 5 wrote it, tied tables four times
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / file)
    logits_BLV, _ = our_logits(read_checkpoint(tmp_path))
    assert_close(logits_BLV, their_logits(model.to(torch.float32)))
