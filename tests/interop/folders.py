# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints for the tests of conversion: ours, and folders in the form of others."""

import dataclasses
import json
import pathlib
from unittest import mock

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from switchx.inference.config import DecodingConfig
from switchx.inference.decode import prefill, run_until
from switchx.inference.logits_processors import Rows, RowSettings
from switchx.interop import huggingface
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from tests.training.jobs import make_params

V, D, F, H, K = 50, 12, 20, 3, 4
T5 = ModelConfig("encoder_decoder", V, D, F, H, K, 2, 2, activation="relu", dropout_rate=0.1)
T5_1_1 = dataclasses.replace(T5, activation="geglu", tie_embeddings=False)
# Blocks 1, 3 of the encoder and 1 of the decoder; 3 slots for each row and expert.
SWITCH = dataclasses.replace(
    T5,
    num_encoder_layers=4,
    num_decoder_layers=4,
    switch=SwitchConfig(
        4,
        encoder_layers=(1, 3),
        decoder_layers=(1,),
        expert_capacity=3,
        router=RouterConfig(padding="counted"),
    ),
)


def huggingface_folder(
    folder: pathlib.Path,
    config: ModelConfig = T5,
    most_shard_bytes: int = 10**9,
    **options,
) -> tuple[pathlib.Path, dict]:
    """A folder in transformers' form with random weights, and the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    params = make_params(config)
    with mock.patch.object(huggingface, "MOST_SHARD_BYTES", most_shard_bytes):
        huggingface.write_checkpoint(folder, config, params, **options)
    return folder, params


def change_config(folder: pathlib.Path, **changes) -> None:
    """Sets fields of a `config.json`; None takes one out."""
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def change_tensors(folder: pathlib.Path, change) -> None:
    """`change(tensors)` on the dictionary of all tensors of a `model.safetensors`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def assert_same_params(got: dict, want: dict) -> None:
    from switchx.tree import named_leaves

    got, want = named_leaves(got), named_leaves(want)
    assert got.keys() == want.keys()
    for name, leaf in want.items():
        assert np.asarray(got[name]).dtype == leaf.dtype, name
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(leaf), err_msg=name)


def greedy_tokens(
    checkpoint, prompt_BP, source_BM, is_source_BM, num_tokens: int
) -> np.ndarray:
    """`[B, T]`: the likeliest tokens behind the prompts, step by step with a cache."""
    B, decoding = len(prompt_BP), DecodingConfig(max_new_tokens=num_tokens)
    program = decoding.program_of(num_tokens)
    settings = RowSettings.of([decoding] * B)
    state = prefill(
        checkpoint.config,
        program,
        checkpoint.params,
        prompt_BP=jnp.asarray(prompt_BP),
        is_prompt_BP=jnp.ones(prompt_BP.shape, bool),
        rows=Rows(jnp.arange(B), jnp.ones(B, bool), jnp.full(B, num_tokens), settings),
        source_BM=jnp.asarray(source_BM, jnp.int32),
        is_source_BM=jnp.asarray(is_source_BM),
    )
    state = run_until(checkpoint.config, program, checkpoint.params, state, 0, num_tokens)
    return np.asarray(state.hypotheses.token_BT)


def tokenizer_json(path, **changes):
    """A `tokenizer.json` with a few pieces."""
    vocab = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["▁", -2.0], ["a", -1.0]]
    content = {
        "model": {"type": "Unigram", "unk_id": 2, "vocab": vocab},
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True},
        "added_tokens": [],
    } | changes
    path.write_text(json.dumps(content))
    return path
