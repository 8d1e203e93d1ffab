# SPDX-License-Identifier: Apache-2.0
"""Names of tensors, against those that transformers' own checkpoints have, written out."""

from switchx.interop.huggingface import tensor_names
from switchx.interop.safetensors_folder import is_linear
from switchx.models.params import abstract_params
from switchx.tree import named_leaves
from tests.interop.folders import SWITCH, T5, T5_1_1


def test_every_parameter_has_its_tensors_and_no_tensor_two_parameters():
    for config, family in ((T5, "t5"), (T5_1_1, "mt5"), (SWITCH, "switch_transformers")):
        names = tensor_names(config, family)
        assert names.keys() == named_leaves(abstract_params(config)).keys()
        tensors = [name for theirs in names.values() for name in theirs]
        assert len(tensors) == len(set(tensors))


def test_names_of_t5():
    names = tensor_names(T5_1_1, "t5")
    block = "decoder/blocks/layer_1"
    of_block = {ours: theirs for ours, (theirs,) in names.items() if block in ours}
    assert {ours.removeprefix(f"{block}/"): name for ours, name in of_block.items()} == {
        "self_attention_norm/scale_D": "decoder.block.1.layer.0.layer_norm.weight",
        "self_attention/w_query_DHK": "decoder.block.1.layer.0.SelfAttention.q.weight",
        "self_attention/w_key_DHK": "decoder.block.1.layer.0.SelfAttention.k.weight",
        "self_attention/w_value_DHK": "decoder.block.1.layer.0.SelfAttention.v.weight",
        "self_attention/w_out_HKD": "decoder.block.1.layer.0.SelfAttention.o.weight",
        "cross_attention_norm/scale_D": "decoder.block.1.layer.1.layer_norm.weight",
        "cross_attention/w_query_DHK": "decoder.block.1.layer.1.EncDecAttention.q.weight",
        "cross_attention/w_key_DHK": "decoder.block.1.layer.1.EncDecAttention.k.weight",
        "cross_attention/w_value_DHK": "decoder.block.1.layer.1.EncDecAttention.v.weight",
        "cross_attention/w_out_HKD": "decoder.block.1.layer.1.EncDecAttention.o.weight",
        "ffn_norm/scale_D": "decoder.block.1.layer.2.layer_norm.weight",
        "ffn/w_in_DF": "decoder.block.1.layer.2.DenseReluDense.wi_0.weight",
        "ffn/w_gate_DF": "decoder.block.1.layer.2.DenseReluDense.wi_1.weight",
        "ffn/w_out_FD": "decoder.block.1.layer.2.DenseReluDense.wo.weight",
    }  # fmt: skip
    assert names["embedding/w_logits_DV"] == ("lm_head.weight",)
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert names["encoder/relative_bias/bias_UH"] == (bias,)
    assert "embedding/w_logits_DV" not in tensor_names(T5, "t5")


def test_names_of_switch_transformers():
    names = tensor_names(SWITCH, "switch_transformers")
    ffn = "encoder/blocks/layer_1/ffn"
    assert names[f"{ffn}/w_router_DE"] == (
        "encoder.block.1.layer.1.mlp.router.classifier.weight",
    )
    assert names[f"{ffn}/experts/w_out_EFD"] == tuple(
        f"encoder.block.1.layer.1.mlp.experts.expert_{e}.wo.weight" for e in range(4)
    )
    assert names["decoder/blocks/layer_3/ffn/w_in_DF"] == (
        "decoder.block.3.layer.2.mlp.wi.weight",
    )


def test_what_is_a_linear_map():
    assert is_linear("a/w_query_DHK") and is_linear("a/w_router_DE")
    assert not any(map(is_linear, ("a/scale_D", "a/bias_UH", "embedding/embedding_VD")))
