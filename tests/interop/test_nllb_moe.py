# SPDX-License-Identifier: Apache-2.0
"""NLLB-MoE of transformers with random weights: logits, gradients and greedy translations.

transformers 5.23 runs experts 0 and 1 alone, whichever the router chose (it takes a mask of 0
and 1 for numbers of experts): the experts here are `sum_e gate_te expert_e(x_t)`, with the
router's own gates, and all else is theirs.
"""

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.data.special_ids import in_our_order, in_their_order
from switchx.interop.huggingface import read_checkpoint
from switchx.interop.nllb_moe import tensor_names
from switchx.interop.tensor_folder import from_torch
from switchx.models.params import forward
from switchx.tree import named_leaves
from tests.data.refusals import refused
from tests.interop.folders import change_config, change_tensors, greedy_tokens
from tests.interop.transformers_models import NLLB_SIZES, build_nllb
from tests.torch_weights import randomize

pytestmark = pytest.mark.hf

LENGTHS, M, L = np.array([17, 5, 12]), 17, 9
LANGUAGE, IDS = 40, (1, 2, 3)


def run_chosen(self, x_TD, is_first_TE, gate_TE):
    """Each token through the experts that its gates are of."""
    import torch

    y_TD = torch.zeros_like(x_TD)
    for e in range(self.num_experts):
        y_TD = y_TD + gate_TE[:, e, None] * self[f"expert_{e}"](x_TD)
    return y_TD * (1 - self.moe_token_dropout)


@contextlib.contextmanager
def experts_of_the_router():
    from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts

    with mock.patch.object(NllbMoeExperts, "forward", run_chosen):
        yield


@functools.cache
def texts():
    """Sources and targets in their ids: a decoder's input begins with the end, 2."""
    rng = np.random.default_rng(1)
    is_token_BM = np.arange(M)[None] < LENGTHS[:, None]
    source_BM = np.where(is_token_BM, rng.integers(2, NLLB_SIZES["vocab_size"], (3, M)), 1)
    target_BL = rng.integers(2, NLLB_SIZES["vocab_size"], (3, L))
    target_BL[:, :2] = 2, LANGUAGE
    return source_BM, is_token_BM, target_BL


def to_ours(id_X):
    """Our ids of theirs."""
    ids_V = in_their_order(np.arange(NLLB_SIZES["vocab_size"], dtype=np.int32), 0, IDS)
    return ids_V[id_X]


def batch():
    source_BM, is_token_BM, target_BL = texts()
    target_BL = to_ours(target_BL)
    target_BL[:, 0] = 0
    return {
        "encoder_input_tokens": to_ours(source_BM),
        "encoder_segment_ids": is_token_BM.astype(np.int32),
        "encoder_positions": np.broadcast_to(np.arange(M), source_BM.shape),
        "decoder_input_tokens": target_BL,
        "decoder_segment_ids": np.ones_like(target_BL),
        "decoder_positions": np.broadcast_to(np.arange(L), target_BL.shape),
    }


def their_logits(model):
    import torch

    source_BM, is_token_BM, target_BL = texts()
    return model(
        input_ids=torch.tensor(source_BM),
        attention_mask=torch.tensor(is_token_BM.astype(int)),
        decoder_input_ids=torch.tensor(target_BL),
    ).logits


@pytest.mark.parametrize("changes", [{}, {"router_bias": True, "decoder_sparse_step": 0}])
def test_the_same_logits(tmp_path, changes):
    model = build_nllb(**changes)
    model.save_pretrained(tmp_path)
    with experts_of_the_router():
        want_BLV = in_our_order(their_logits(model).detach().numpy(), 2, IDS)
    checkpoint = read_checkpoint(tmp_path)
    logits_BLV, _ = jax.jit(
        lambda params: forward(checkpoint.config, params, batch(), is_training=False)
    )(checkpoint.params)
    difference = np.max(np.abs(np.asarray(logits_BLV) - want_BLV))
    assert difference <= 1e-5 * np.max(np.abs(want_BLV))


@pytest.mark.parametrize("ends", [True, False])
def test_greedy_translations(tmp_path, ends):
    import torch

    model = build_nllb() if ends else randomize(build_nllb(), seed=1)
    with torch.no_grad():
        for name, weight in [] if ends else model.named_parameters():
            # So that a text depends on its source, and does not end at once.
            if name.endswith("bias"):
                weight -= 1.0 + 0.5 * weight.mean()
            elif "cross_attention.out_proj" in name:
                weight *= 4.0
            elif name.endswith("shared.weight"):
                weight[2] *= 0.5
    model.save_pretrained(tmp_path)
    source_BM, is_token_BM, _ = texts()
    with experts_of_the_router():
        want_BL = model.generate(
            input_ids=torch.tensor(source_BM),
            attention_mask=torch.tensor(is_token_BM.astype(int)),
            forced_bos_token_id=LANGUAGE,
            max_new_tokens=12,
            do_sample=False,
            num_beams=1,
        ).numpy()
    checkpoint = read_checkpoint(tmp_path)
    got_BL = translated(checkpoint, 11)
    for row, want in zip(got_BL, want_BL, strict=True):
        assert list(want[:2]) == [2, LANGUAGE]
        end = list(want[2:]).index(2) if 2 in want[2:] else len(want) - 2
        assert list(row[:end]) == list(to_ours(want[2 : 2 + end]))
        assert 2 not in want[2:] or row[end] == 1
    assert len(set(map(tuple, got_BL))) == (1 if ends else 3)
    assert (2 in want_BL[:, 1:]) == ends


def test_the_same_gradients(tmp_path):
    """Of sum(logits * weights), for every parameter, read as a checkpoint of gradients is."""
    import torch

    model = build_nllb(moe_token_dropout=0.0, scale_embedding=False, router_bias=True)
    model.save_pretrained(tmp_path)
    weights_BLV = np.random.default_rng(2).normal(size=(3, L, NLLB_SIZES["vocab_size"]))
    with experts_of_the_router():
        torch.sum(
            their_logits(model) * torch.tensor(weights_BLV, dtype=torch.float32)
        ).backward()
    gradients = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    checkpoint = read_checkpoint(tmp_path)

    def loss(params):
        logits_BLV, _ = forward(checkpoint.config, params, batch(), is_training=False)
        return jnp.sum(logits_BLV * in_our_order(weights_BLV, 2, IDS))

    ours = named_leaves(jax.jit(jax.grad(loss))(checkpoint.params))
    names = tensor_names(checkpoint.config)
    assert ours.keys() - names.keys() == {"embedding/embedding_VD", "embedding/w_logits_DV"}
    for parameter, theirs in names.items():
        want = from_torch(parameter, checkpoint.config, [gradients[name] for name in theirs])
        difference = np.max(np.abs(np.asarray(ours[parameter]) - want))
        assert difference <= 2e-5 * max(np.max(np.abs(want)), 1.0), parameter
    # Theirs is one table, of which ours are two: rows of other ids have both gradients.
    table_VD = np.asarray(ours["embedding/embedding_VD"] + ours["embedding/w_logits_DV"].T)
    want_VD = gradients["model.shared.weight"][4:]
    assert np.max(np.abs(table_VD[4:] - want_VD)) <= 2e-5 * np.max(np.abs(want_VD))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"second_expert_policy": "random"}, "second_expert_policy='random' cannot be "),
        ({"moe_eval_capacity_token_fraction": 0.5}, "moe_eval_capacity_token_fraction=0.5"),
        ({"encoder_ffn_dim": 20}, "encoder_ffn_dim=20 and decoder_ffn_dim=40"),
        ({"encoder_attention_heads": 5, "decoder_attention_heads": 5}, "d_model=24 does not "),
        ({"activation_function": "mish"}, "the activation 'mish' cannot be converted"),
        ({"num_experts": 1 << 20}, "num_experts=1048576"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, changes, reason):
    build_nllb().save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    with refused(f"{tmp_path / 'config.json'}: {reason}"):
        read_checkpoint(tmp_path)


def test_tensors_that_are_others(tmp_path):
    build_nllb().save_pretrained(tmp_path)
    name = "model.encoder.layers.1.ffn.experts.expert_0.fc1.weight"
    change_tensors(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"{name}: expected shape .40, 24., got nothing"):
        read_checkpoint(tmp_path)


def translated(checkpoint, num_tokens: int):
    """Our greedy translations, behind the start and the language."""
    batch_ = batch()
    prompt_BP = np.tile(np.array([[0, LANGUAGE]], np.int32), (len(LENGTHS), 1))
    sources = batch_["encoder_input_tokens"], batch_["encoder_segment_ids"] > 0
    return greedy_tokens(checkpoint, prompt_BP, *sources, num_tokens)
