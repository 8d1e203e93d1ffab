# SPDX-License-Identifier: Apache-2.0
"""GPT-2 of Hugging Face's transformers with the same random weights: logits and gradients.

Other families, T5's among them, are read from checkpoints: `tests/interop`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params, forward
from tests.compare import assert_close_to_largest
from tests.models.batches import GPT_STYLE, make_batch
from tests.torch_weights import randomize

pytestmark = pytest.mark.hf

V, D, F, H, K, N = 50, 24, 40, 3, 8, 2
GPT2 = ModelConfig("decoder_only", V, D, F, H, K, N, max_length=32, **GPT_STYLE)


def their_names() -> dict:
    """Our parameter -> (their tensor, how to turn it into ours).

    Linear layers are [in, out] there, too; q, k and v are one matrix.
    """
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


def mapped(names: dict, tensors: dict) -> dict:
    """Our nested dictionary out of their tensors; every parameter is given, in its shape."""

    def fill(path, leaf):
        name, turn = names[tree.path_name(path)]
        array = np.ascontiguousarray(turn(tensors[name].detach().numpy()))
        assert array.shape == leaf.shape, (path, name)
        return array

    return jax.tree_util.tree_map_with_path(fill, abstract_params(GPT2))


def ours(params, batch):
    """The mean cross-entropy over real targets with the logits, and its gradients."""

    def loss(params):
        logits_BLV, stats = forward(GPT2, params, batch, is_training=True)
        assert stats is None
        log_prob_BLV = jax.nn.log_softmax(logits_BLV)
        target_BL1 = batch["decoder_target_tokens"][..., None]
        nll_BL = -jnp.take_along_axis(log_prob_BLV, target_BL1, axis=-1)[..., 0]
        weights_BL = batch["decoder_loss_weights"]
        return jnp.sum(nll_BL * weights_BL) / jnp.sum(weights_BL), logits_BLV

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def theirs(model, batch):
    """The same of the PyTorch model, which keeps its gradients."""
    import torch

    tokens, targets, segments = (
        torch.tensor(np.asarray(batch[f"decoder_{name}"], np.int64))
        for name in ("input_tokens", "target_tokens", "segment_ids")
    )
    output = model(input_ids=tokens, attention_mask=(segments > 0).long())
    targets = targets.masked_fill(segments == 0, -100)
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item(), output.logits.detach().numpy()


def test_logits_and_gradients_are_theirs():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = randomize(GPT2LMHeadModel(
        GPT2Config(
            vocab_size=V, n_positions=32, n_embd=D, n_layer=N, n_head=H, n_inner=F,
            layer_norm_epsilon=1e-6, activation_function="gelu_new", bos_token_id=0,
            eos_token_id=1,
        )
    ))  # fmt: skip
    names, tensors = their_names(), dict(model.named_parameters())
    assert {their for their, _ in names.values()} == set(tensors)
    sizes = [[24], [4], [13]], None
    batch = make_batch(V, is_encoder_decoder=False, seed=1, sizes=sizes)
    (loss, logits_BLV), grads = ours(mapped(names, tensors), batch)
    want_loss, want_BLV = theirs(model, batch)
    is_token_BL = batch["decoder_segment_ids"] > 0
    assert_close_to_largest(np.asarray(logits_BLV)[is_token_BL], want_BLV[is_token_BL], 1e-5)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    # Every parameter's gradient, turned like the parameter itself. That of a key's bias is
    # zero but for rounding: it moves all scores of a query alike.
    want_grads = mapped(names, {name: w.grad for name, w in tensors.items()})
    for name, want in tree.named_leaves(want_grads).items():
        got = tree.named_leaves(grads)[name]
        assert_close_to_largest(got, want, 1e-4, least=1e-3 if "b_key" in name else 0.0)
