# SPDX-License-Identifier: Apache-2.0
"""T5 and GPT-2 of Hugging Face's transformers with the same weights: logits and gradients.

Weights are random. Names of T5 are those of `switchx convert`; GPT-2's are written out here:
`ours -> theirs`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.interop.families import FAMILIES
from switchx.interop.tensor_folder import from_torch
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params, forward
from tests.compare import assert_close_to_largest
from tests.models.batches import GPT_STYLE, make_batch
from tests.torch_weights import randomize

pytestmark = pytest.mark.hf

V, D, F, H, K, N = 50, 24, 40, 3, 8, 2
T5_V1_0 = ModelConfig("encoder_decoder", V, D, F, H, K, N, N, activation="relu")
T5_V1_1 = dataclasses.replace(T5_V1_0, activation="geglu", tie_embeddings=False)
GPT2 = ModelConfig("decoder_only", V, D, F, H, K, N, max_length=32, **GPT_STYLE)


def build_t5(config):
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    is_v1_0 = config.tie_embeddings
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=V, d_model=D, d_kv=K, d_ff=F, num_heads=H, num_layers=N,
            num_decoder_layers=N, feed_forward_proj="relu" if is_v1_0 else "gated-gelu",
            tie_word_embeddings=is_v1_0,
        )
    )  # fmt: skip
    if not is_v1_0:
        # transformers 5 ties what was not loaded; T5 1.1 has a matrix of its own.
        model.lm_head.weight = torch.nn.Parameter(torch.empty(V, D))
    return randomize(model)


def t5_names(config) -> dict:
    """Our parameter -> (their tensor, how to turn it into ours)."""
    return {
        ours: (theirs, lambda w, ours=ours: from_torch(ours, config, [w]))
        for ours, (theirs,) in FAMILIES["t5"].tensor_names(config).items()
    }


def gpt2_names() -> dict:
    """GPT-2's linear layers are already [in, out]; q, k and v are one matrix."""
    same = lambda w: w  # noqa: E731
    names = {
        "embedding/embedding_VD": ("transformer.wte.weight", same),
        "embedding/positions_LD": ("transformer.wpe.weight", same),
        "decoder/norm/scale_D": ("transformer.ln_f.weight", same),
        "decoder/norm/bias_D": ("transformer.ln_f.bias", same),
    }
    for i in range(N):
        ours, theirs = f"decoder/blocks/layer_{i}", f"transformer.h.{i}"
        for our, their in [("self_attention_norm", "ln_1"), ("ffn_norm", "ln_2")]:
            names[f"{ours}/{our}/scale_D"] = (f"{theirs}.{their}.weight", same)
            names[f"{ours}/{our}/bias_D"] = (f"{theirs}.{their}.bias", same)
        for n, part in enumerate(["query", "key", "value"]):
            third = slice(n * D, (n + 1) * D)
            names[f"{ours}/self_attention/w_{part}_DHK"] = (
                f"{theirs}.attn.c_attn.weight",
                lambda w, third=third: w[:, third].reshape(D, H, K),
            )
            names[f"{ours}/self_attention/b_{part}_HK"] = (
                f"{theirs}.attn.c_attn.bias",
                lambda b, third=third: b[third].reshape(H, K),
            )
        names[f"{ours}/self_attention/w_out_HKD"] = (
            f"{theirs}.attn.c_proj.weight",
            lambda w: w.reshape(H, K, D),
        )
        for our, their in [
            ("self_attention/b_out_D", "attn.c_proj.bias"),
            ("ffn/w_in_DF", "mlp.c_fc.weight"),
            ("ffn/b_in_F", "mlp.c_fc.bias"),
            ("ffn/w_out_FD", "mlp.c_proj.weight"),
            ("ffn/b_out_D", "mlp.c_proj.bias"),
        ]:
            names[f"{ours}/{our}"] = (f"{theirs}.{their}", same)
    return names


def mapped(config, names: dict, tensors: dict) -> dict:
    """Our nested dictionary out of their tensors; every parameter is given, in its shape."""

    def fill(path, leaf):
        name, turn = names["/".join(key.key for key in path)]
        array = np.ascontiguousarray(turn(tensors[name].detach().numpy()))
        assert array.shape == leaf.shape, (path, name)
        return array

    return jax.tree_util.tree_map_with_path(fill, abstract_params(config))


def ours(config, params, batch):
    """Logits, and gradients of the mean cross-entropy over real targets."""

    def loss(params):
        logits_BLV, stats = forward(config, params, batch, is_training=True)
        assert stats is None
        log_prob_BLV = jax.nn.log_softmax(logits_BLV)
        target_BL1 = batch["decoder_target_tokens"][..., None]
        nll_BL = -jnp.take_along_axis(log_prob_BLV, target_BL1, axis=-1)[..., 0]
        weights_BL = batch["decoder_loss_weights"]
        return jnp.sum(nll_BL * weights_BL) / jnp.sum(weights_BL), logits_BLV

    (value, logits_BLV), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return value, logits_BLV, grads


def theirs(model, batch):
    """The same of a PyTorch model, which keeps its gradients."""
    import torch

    def tensor(name, is_padding=None):
        array = torch.tensor(np.asarray(batch[name], np.int64))
        return array if is_padding is None else array.masked_fill(is_padding, -100)

    is_padding = tensor("decoder_segment_ids") == 0
    decoder_mask = (~is_padding).long()
    if "encoder_input_tokens" in batch:
        output = model(
            input_ids=tensor("encoder_input_tokens"),
            attention_mask=(tensor("encoder_segment_ids") > 0).long(),
            decoder_input_ids=tensor("decoder_input_tokens"),
            decoder_attention_mask=decoder_mask,
        )
    else:
        output = model(input_ids=tensor("decoder_input_tokens"), attention_mask=decoder_mask)
    targets = tensor("decoder_target_tokens", is_padding)
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item(), output.logits.detach().numpy()


def compare(config, model, names):
    tensors = dict(model.named_parameters())
    assert {theirs for theirs, _ in names.values()} == set(tensors)
    # Long enough for the relative buckets that several distances share.
    sizes = [[24], [4], [13]], [[7], [30], [12]]
    batch = make_batch(V, is_encoder_decoder=config.is_encoder_decoder, seed=1, sizes=sizes)
    params = mapped(config, names, tensors)
    loss, logits_BLV, grads = ours(config, params, batch)
    want_loss, want_BLV = theirs(model, batch)
    is_token_BL = batch["decoder_segment_ids"] > 0
    assert_close_to_largest(np.asarray(logits_BLV)[is_token_BL], want_BLV[is_token_BL], 1e-5)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    # Every parameter's gradient, turned like the parameter itself. That of a key's bias is
    # zero but for rounding: it moves all scores of a query alike.
    want_grads = mapped(config, names, {name: w.grad for name, w in tensors.items()})
    for name, want in tree.named_leaves(want_grads).items():
        got = tree.named_leaves(grads)[name]
        assert_close_to_largest(got, want, 1e-4, least=1e-3 if "b_key" in name else 0.0)


@pytest.mark.parametrize("config", [T5_V1_0, T5_V1_1], ids=["v1.0", "v1.1"])
def test_t5(config):
    compare(config, build_t5(config), t5_names(config))


def test_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=V, n_positions=32, n_embd=D, n_layer=N, n_head=H, n_inner=F,
            layer_norm_epsilon=1e-6, activation_function="gelu_new", bos_token_id=0,
            eos_token_id=1,
        )
    )  # fmt: skip
    compare(GPT2, randomize(model), gpt2_names())
