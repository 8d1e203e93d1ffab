# SPDX-License-Identifier: Apache-2.0
"""Decoder-only families: published configurations, what is refused, the round trip of tables.

Logits and gradients beside transformers': tests/models/test_modern_decoder.py.
"""

import contextlib
import dataclasses
import json

import pytest

from switchx.interop.decoder_descriptions import describe
from switchx.interop.decoder_families import DECODERS, read_config
from switchx.interop.decoder_tensors import tensor_names
from switchx.interop.families import family_of
from switchx.interop.huggingface import read_checkpoint
from switchx.interop.huggingface_config import Fields
from switchx.interop.peft import _tensor_names
from switchx.interop.tensor_folder import torch_shapes
from switchx.models.config import ModelConfig, Precision
from switchx.models.flops import count_parameters
from switchx.models.params import abstract_params
from switchx.models.upcycle import upcycled_config
from switchx.tree import named_leaves, num_elements
from tests.data.refusals import refused
from tests.interop.decoder_models import BASE, CASES
from tests.planner.workloads import shipped_model

# The published values that say what a model is, and the published number of its parameters.
PUBLISHED = {
    "llama_3_8b": (8_030_261_248, dict(
        model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, rms_norm_eps=1e-5,
        rope_theta=500000.0, max_position_embeddings=8192,
    )),
    "qwen3_0_6b": (596_049_920, dict(
        model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        rope_theta=1000000, max_position_embeddings=40960, tie_word_embeddings=True,
        use_sliding_window=False,
    )),
    "mixtral_8x7b": (46_702_792_704, dict(
        model_type="mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, rope_theta=1e6,
        max_position_embeddings=32768, num_local_experts=8, num_experts_per_tok=2,
        sliding_window=None,
    )),
    "olmoe_1b_7b": (6_919_161_856, dict(
        model_type="olmoe", vocab_size=50304, hidden_size=2048, intermediate_size=1024,
        num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16,
        max_position_embeddings=4096, num_experts=64, num_experts_per_tok=8, clip_qkv=None,
        norm_topk_prob=False,
    )),
    "qwen1_5_moe_a2_7b": (14_315_784_192, dict(
        model_type="qwen2_moe", vocab_size=151936, hidden_size=2048, intermediate_size=5632,
        num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16, rope_theta=1e6,
        max_position_embeddings=8192, num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, norm_topk_prob=False,
        decoder_sparse_step=1, use_sliding_window=False,
    )),
    "qwen3_30b_a3b": (30_532_122_624, dict(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        rope_theta=1e6, max_position_embeddings=40960, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[],
    )),
}  # fmt: skip
_GLM_4_5 = dict(
    model_type="glm4_moe", vocab_size=151552, num_attention_heads=96, num_key_value_heads=8,
    head_dim=128, partial_rotary_factor=0.5, rms_norm_eps=1e-5, rope_theta=1000000,
    rope_scaling=None, max_position_embeddings=131072, attention_bias=True,
    num_experts_per_tok=8, n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True,
    num_nextn_predict_layers=1, tie_word_embeddings=False,
)  # fmt: skip
# The same of models without a gin file. GLM's numbers are transformers' count, in which no MTP
# block is: published are 106 and 355 billion (GLM-4.5-Air and GLM-4.5, whose report counts that
# block and no embeddings, arXiv:2508.06471); of dots.llm1 142 (arXiv:2506.05767), of FlexOlmo
# 33, of ERNIE-4.5 21 billion. The others are the files' own totals.
WITHOUT_GIN = {
    "glm_4_5_air": (106_852_251_264, dict(
        _GLM_4_5, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46,
        use_qk_norm=False, moe_intermediate_size=1408, n_routed_experts=128,
        routed_scaling_factor=1.0, first_k_dense_replace=1,
    )),
    "glm_4_5": (352_797_829_024, dict(
        _GLM_4_5, hidden_size=5120, intermediate_size=12288, num_hidden_layers=92,
        use_qk_norm=True, moe_intermediate_size=1536, n_routed_experts=160,
        routed_scaling_factor=2.5, first_k_dense_replace=3,
    )),
    "dots_llm1": (142_774_381_696, dict(
        model_type="dots1", vocab_size=152064, hidden_size=4096, intermediate_size=10944,
        num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=32,
        rms_norm_eps=1e-5, rope_theta=10000000, rope_scaling=None,
        max_position_embeddings=32768, attention_bias=False, sliding_window=None,
        moe_intermediate_size=1408, n_routed_experts=128, num_experts_per_tok=6,
        n_shared_experts=2, routed_scaling_factor=2.5, norm_topk_prob=True,
        first_k_dense_replace=1, scoring_func="noaux_tc", tie_word_embeddings=False,
    )),
    "mistral_7b": (7_248_023_552, dict(
        model_type="mistral", vocab_size=32768, hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, rms_norm_eps=1e-5,
        rope_theta=1e6, max_position_embeddings=32768, sliding_window=None,
    )),
    "qwen2_7b": (7_615_616_512, dict(
        model_type="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944,
        num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, rope_theta=1e6,
        max_position_embeddings=131072, use_sliding_window=False,
    )),
    "olmo2_7b": (7_298_617_344, dict(
        model_type="olmo2", vocab_size=100352, hidden_size=4096, intermediate_size=11008,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32, rope_theta=500000,
        max_position_embeddings=4096, rms_norm_eps=1e-6,
    )),
    "flex_olmo_7x7b": (33_270_665_216, dict(
        model_type="flex_olmo", vocab_size=100352, hidden_size=4096, intermediate_size=11008,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32, rope_theta=500000,
        max_position_embeddings=4096, num_experts=7, num_experts_per_tok=5,
        norm_topk_prob=False,
    )),
    "granite_3_0_1b_a400m": (1_334_628_352, dict(
        model_type="granitemoe", vocab_size=49155, hidden_size=1024, intermediate_size=512,
        num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=8, rope_theta=10000,
        max_position_embeddings=4096, num_local_experts=32, num_experts_per_tok=8,
        tie_word_embeddings=True, attention_multiplier=0.015625, embedding_multiplier=12.0,
        residual_multiplier=0.22, logits_scaling=6.0,
    )),
    "ernie_4_5_21b_a3b": (21_825_437_888, dict(
        model_type="ernie4_5_moe", vocab_size=103424, hidden_size=2560, intermediate_size=12288,
        num_hidden_layers=28, num_attention_heads=20, num_key_value_heads=4, rope_theta=500000,
        max_position_embeddings=131072, moe_num_experts=64, moe_k=6, moe_intermediate_size=1536,
        moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=27,
        moe_layer_interval=1, tie_word_embeddings=True, use_bias=False,
    )),
}  # fmt: skip


def read(values: dict) -> ModelConfig:
    return read_config(DECODERS[values["model_type"]], Fields(values, "config.json"))


def counted(values: dict) -> int:
    """The parameters that a config.json describes, by a formula of its own."""
    D, N, V = (values[n] for n in ("hidden_size", "num_hidden_layers", "vocab_size"))
    H, Z = values["num_attention_heads"], values["num_key_value_heads"]
    K, kind = values.get("head_dim", D // H), values["model_type"]
    block = 2 * D * K * (H + Z) + 2 * D
    whole = dict.fromkeys(("olmoe", "olmo2", "flex_olmo"), (H + Z) * K)
    block += {"qwen3": 2 * K, "qwen3_moe": 2 * K, **whole}.get(kind, 0)
    has_biases = kind in ("qwen2", "qwen2_moe") or values.get("attention_bias")
    block += (H + 2 * Z) * K if has_biases else 0
    block += 2 * K if values.get("use_qk_norm") or kind == "dots1" else 0
    experts = values.get("num_experts", values.get("num_local_experts"))
    F = values.get("moe_intermediate_size", values["intermediate_size"])
    block += 3 * D * F * (experts or 1) + D * (experts or 0)
    tables = V * D * (1 if values.get("tie_word_embeddings") else 2)
    dense = values.get("first_k_dense_replace", values.get("moe_layer_start_index", 0))
    if dense:
        E = values.get("n_routed_experts", values.get("moe_num_experts"))
        count = values.get("n_shared_experts", values.get("moe_num_shared_experts"))
        sparse = block + 3 * D * F * (E + count - 1) + (D + 1) * E
        block += 3 * D * (values["intermediate_size"] - F)
        return dense * block + (N - dense) * sparse + D + tables
    if shared := values.get("shared_expert_intermediate_size"):
        block += 3 * D * shared + D
    return N * block + D + tables


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_the_gin_files_and_have_as_many_parameters(name):
    parameters, values = PUBLISHED[name]
    config, shipped = read(values), shipped_model(name)
    assert counted(values) == parameters
    assert count_parameters(config).total == parameters
    assert num_elements(abstract_params(shipped)) == parameters
    # How it is computed is the gin file's.
    same = dict(scan_layers=False, remat="none", precision=Precision())
    assert dataclasses.replace(shipped, **same) == config
    unrolled = dataclasses.replace(config, num_decoder_layers=2)
    names = tensor_names(DECODERS[values["model_type"]], unrolled)
    assert names.keys() == named_leaves(abstract_params(unrolled)).keys()
    theirs = [each for parts in names.values() for each in parts]
    assert len(set(theirs)) == len(theirs) == len(torch_shapes(names, unrolled))


@pytest.mark.parametrize("name", WITHOUT_GIN)
def test_models_without_a_gin_file_have_as_many_parameters_as_are_published(name):
    parameters, values = WITHOUT_GIN[name]
    assert counted(values) == parameters
    assert num_elements(abstract_params(read(values))) == parameters
    assert read(describe(read(values))[1]) == read(values)


@pytest.mark.hf
@pytest.mark.parametrize("name", WITHOUT_GIN)
def test_models_without_a_gin_file_have_as_many_parameters_as_theirs(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    parameters, values = WITHOUT_GIN[name]
    values = {name: value for name, value in values.items() if name != "model_type"}
    config = AutoConfig.for_model(WITHOUT_GIN[name][1]["model_type"], **values)
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(config).state_dict(keep_vars=True)
    own = {id(each): each for each in tensors.values()}  # a tied table has two names
    assert sum(each.numel() for each in own.values()) == parameters


LLAMA = PUBLISHED["llama_3_8b"][1]
YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=2048)


def test_old_and_new_fields_of_rotary_positions_are_read():
    old = read(LLAMA | dict(rope_scaling=YARN)).rotary
    new = dict(factor=4.0, original_max_position_embeddings=2048, rope_type="yarn")
    new["rope_theta"] = 5e5
    values = {n: v for n, v in LLAMA.items() if n != "rope_theta"}
    assert read(values | dict(rope_parameters=new)).rotary == old
    assert (old.theta, old.scaling, old.factor, old.original_length) == (5e5, "yarn", 4, 2048)
    assert read(values).rotary.theta == 1e4
    mixtral = {n: v for n, v in PUBLISHED["mixtral_8x7b"][1].items() if n != "rope_theta"}
    assert read(mixtral).rotary.theta == 1e6
    scales = dict(YARN, mscale=1.0, mscale_all_dim=0.5)
    magnitude = read(LLAMA | dict(rope_scaling=scales)).rotary.magnitude
    assert magnitude == pytest.approx(1.1386294 / 1.0693147)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_the_original_length_may_stand_beside_the_ropes_settings(kind):
    """As transformers 5 reads it."""
    rope = {"rope_type": kind, "factor": 4.0}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    values = LLAMA | {"original_max_position_embeddings": 1024}
    assert read(values | {"rope_scaling": rope}).rotary.original_length == 1024
    rope["original_max_position_embeddings"] = 2048
    with refused(
        "original_max_position_embeddings is 1024, and 2048 in the rope's own settings"
    ):
        read(values | {"rope_scaling": rope})


def test_a_window_as_long_as_the_context_hides_nothing():
    """Mistral has one of 4,096 where its file has none."""
    mistral = {n: v for n, v in PUBLISHED["llama_3_8b"][1].items() if n != "model_type"}
    mistral |= dict(model_type="mistral", max_position_embeddings=4096)
    for more in ({}, dict(sliding_window=4096), dict(sliding_window=None)):
        assert read(mistral | more).max_length == 4096
    mistral["max_position_embeddings"] = 8192
    assert read(mistral | dict(sliding_window=None)).max_length == 8192
    for more in ({}, dict(sliding_window=4096)):
        with refused("sliding_window=4096 cannot be converted: switchx has no windows, and"):
            read(mistral | more)


def test_a_window_of_no_block_hides_nothing():
    """`max_window_layers` and `layer_types` of dots1 say which blocks have it."""
    dots = WITHOUT_GIN["dots_llm1"][1] | dict(sliding_window=4096)
    for more in ({}, dict(layer_types=["full_attention"] * 62), dict(max_window_layers=70)):
        assert read(dots | more).max_length == 32768
    qwen = PUBLISHED["qwen3_0_6b"][1] | dict(sliding_window=4, max_window_layers=28)
    for more in ({}, dict(use_sliding_window=True)):
        assert read(qwen | more).num_decoder_layers == 28
    kinds = ["full_attention"] * 61 + ["sliding_attention"]
    for more in (dict(max_window_layers=61), dict(layer_types=kinds)):
        with refused("sliding_window=4096 cannot be converted: switchx has no windows, and"):
            read(dots | more)


def test_partial_heads_are_read_as_transformers_does():
    """`rope_parameters` come first, then the field of its own, then the family's half."""
    glm = WITHOUT_GIN["glm_4_5_air"][1]
    rope = dict(rope_type="default", partial_rotary_factor=0.25)
    assert read(glm).rotary.fraction == 0.5
    assert read(glm | dict(partial_rotary_factor=1.0)).rotary.fraction == 1
    assert read(glm | dict(rope_parameters=rope)).rotary.fraction == 0.25
    del (without := dict(glm))["partial_rotary_factor"]
    assert read(without).rotary.fraction == 0.5


def test_a_head_of_every_family_may_have_a_size_of_its_own():
    """As transformers has it, whose qwen2 and olmoe read head_dim where a file has one."""
    for _, values in PUBLISHED.values():
        assert read(values | dict(head_dim=96)).d_head == 96


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("llama_3_8b", dict(hidden_act="gelu"), "hidden_act='gelu' cannot be converted"),
        ("llama_3_8b", dict(mlp_bias=True), "mlp_bias=True cannot be converted"),
        ("llama_3_8b", dict(num_key_value_heads=3), "num_kv_heads=3 with num_heads=32"),
        ("llama_3_8b", dict(num_attention_heads=24), "hidden_size=4096 does not divide by"),
        ("llama_3_8b", dict(num_hidden_layers=10**6), "num_hidden_layers=1000000"),
        ("llama_3_8b", dict(hidden_size=[4096]), "hidden_size=[4096]"),
        (
            "llama_3_8b", dict(rope_scaling=dict(type="dynamic", factor=2.0)),
            "switchx has not angles by the text's length (InternLM2 needs them)",
        ),
        (
            "llama_3_8b", dict(rope_scaling=dict(rope_type="longrope")),
            "rope type 'longrope' cannot be converted: switchx has not two tables of factors "
            "(Phi-3.5-MoE",
        ),
        (
            "llama_3_8b", dict(rope_scaling=YARN, rope_parameters=dict(rope_type="default")),
            "rope_parameters={'rope_type': 'default'} differ",
        ),
        (
            "llama_3_8b", dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))),
            "expected one object of numbers for all layers",
        ),
        ("llama_3_8b", dict(rope_scaling=7), "rope_scaling=7; expected one object"),
        ("llama_3_8b", dict(rope_scaling=dict(rope_type=["yarn"])), "rope_type=['yarn']; exp"),
        (
            "llama_3_8b", dict(rope_parameters=dict(rope_theta=1e4)),
            "rope_theta=500000.0 and the rope_theta=10000.0 of rope_parameters differ",
        ),
        ("llama_3_8b", dict(rope_scaling=dict(YARN, mscale=1, mscale_all_dim=-1)), "(1.0, -1"),
        ("llama_3_8b", dict(rope_theta=10**400), "rope_theta=1000"),
        ("llama_3_8b", dict(rope_scaling=dict(type="linear")), "factor=None; expected a num"),
        (
            "llama_3_8b", dict(rope_scaling=dict(rope_type="llama3", factor=8.0)),
            "low_freq_factor=None; expected a number",
        ),
        (
            "llama_3_8b", dict(partial_rotary_factor=0.5),
            "partial_rotary_factor=0.5 cannot be converted: LlamaForCausalLM turns whole heads",
        ),
        (
            "qwen3_30b_a3b", dict(rope_parameters=dict(partial_rotary_factor=0.25)),
            "partial_rotary_factor=0.25 cannot be converted",
        ),
        ("mixtral_8x7b", dict(sliding_window=4096), "sliding_window=4096 cannot be converted"),
        ("mixtral_8x7b", dict(num_local_experts=10**9), "num_local_experts=1000000000"),
        (
            "mixtral_8x7b", dict(num_local_experts=65536, num_hidden_layers=1000),
            "num_local_experts=65536 in each of 1000 blocks; expected 262144 in all at most",
        ),
        ("mixtral_8x7b", dict(num_experts_per_tok=1), "num_experts_per_tok=1 with normalized"),
        (
            "olmoe_1b_7b", dict(num_experts_per_tok=1, norm_topk_prob=True),
            "expected 2 or more, or norm_topk_prob=false",
        ),
        ("mixtral_8x7b", dict(sliding_window=[1]), "sliding_window=[1] cannot be converted"),
        ("olmoe_1b_7b", dict(clip_qkv=8.0), "clip_qkv=8.0 cannot be converted"),
        (
            "qwen3_30b_a3b", dict(use_sliding_window=True),
            "sliding_window=4096 cannot be converted",
        ),
        ("qwen3_30b_a3b", dict(mlp_only_layers=3), "mlp_only_layers=3; expected a list"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(model, changes, message):
    with refused(message):
        read(PUBLISHED[model][1] | changes)


@pytest.mark.parametrize(
    ("kind", "changes", "sparse"),
    [
        ("qwen3_moe", dict(num_hidden_layers=5, decoder_sparse_step=2), (1, 3)),
        ("qwen3_moe", dict(num_hidden_layers=7, decoder_sparse_step=3), (2, 5)),
        ("ernie4_5_moe", dict(num_hidden_layers=5, moe_layer_interval=2), (1, 3)),
        ("qwen3_moe", dict(num_hidden_layers=6, decoder_sparse_step=3), None),
    ],
)
def test_sparse_blocks_need_not_end_with_the_last_block(kind, changes, sparse):
    config = read(valid(kind) | dict(mlp_only_layers=[]) | changes)
    assert config.switch.decoder_layers == sparse
    assert read(describe(config)[1]) == config


def test_olmoe_has_norms_of_heads_that_make_up_the_model():
    """transformers gives q_norm the size of the model, whatever head_dim is."""
    config = read(PUBLISHED["olmoe_1b_7b"][1])
    assert describe(config)[0].model_type == "olmoe"
    with refused("as OlmoeForCausalLM<any>d_head=256 (expected 128)"):
        describe(dataclasses.replace(config, d_head=256))


def test_adapters_of_an_upcycled_qwen2_are_named_as_it_is_written():
    """Its family has a shared expert, which is of zeros there."""
    config = read(WITHOUT_GIN["qwen2_7b"][1])
    names = _tensor_names(upcycled_config(config, 4, num_selected=2, every=1))
    assert any("mlp.experts.3.down_proj" in name for each in names.values() for name in each)


def test_two_families_that_are_one_model_are_said_to_be():
    """GLM-4-MoE of whole heads without biases is dots1, tensors and all."""
    glm = valid("glm4_moe") | dict(attention_bias=False)
    for fraction, kind in ((1.0, "dots1"), (0.5, "glm4_moe")):
        config = read(glm | dict(partial_rotary_factor=fraction))
        kin, _, notes = describe(config)
        assert kin.model_type == kind
        assert [note[:9] for note in notes] == ["GLM-4-MoE"] * (kind == "dots1")
        assert tensor_names(kin, config) == tensor_names(DECODERS["glm4_moe"], config)


def valid(kind: str) -> dict:
    return BASE | dict(num_experts_per_tok=2) | CASES[kind][1] | dict(model_type=kind)


HOSTILE = (
    [], {}, [[]], {"a": {}}, "x", True, None, -1, 0, 1.5, float("nan"), 1e308, 2**30, 2**63,
    10**400, -(10**400),
)  # fmt: skip


@pytest.mark.parametrize("kind", DECODERS)
def test_hostile_values_of_a_config_are_refused_in_a_line(kind):
    """Each value in turn, of the family and of rotary positions: a model, or one line."""
    own = describe(read(valid(kind)))[1] | valid(kind) | dict(rope_scaling=None)
    whole = own | dict(rope_parameters=None)
    yarn = YARN | dict(beta_fast=32, truncate=True, mscale=1, mscale_all_dim=1, rope_theta=1e4)
    changed = [whole | {name: bad} for name in whole for bad in HOSTILE]
    changed += [
        whole | {place: yarn | {name: bad}, "rope_theta": None}
        for place in ("rope_scaling", "rope_parameters")
        for name in (*yarn, "rope_type", "partial_rotary_factor", "attention_factor")
        for bad in HOSTILE
    ]
    refusals = 0
    for values in changed:
        fields = Fields(values, "config.json")
        try:
            assert isinstance(family_of(fields).read_config(fields), ModelConfig)
        except ValueError as error:
            said, refusals = str(error), refusals + 1
            assert "\n" not in said and 10 < len(said) < 700, said[:300]
    assert 0.3 * len(changed) < refusals < 0.9 * len(changed)


def test_fused_experts_of_another_number_are_refused_before_they_are_taken_apart(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(valid("olmoe")))
    shape = [10**9, 0, 4]
    for layer, message in ((1, f"has shape {shape}"), (2, f"nothing, got shape {shape}")):
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        head = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
        head = json.dumps(head).encode()
        (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
        with refused(message):
            read_checkpoint(tmp_path)


def test_a_bias_is_written_whatever_rate_it_was_trained_with():
    ernie = dict(
        model_type="ernie4_5_moe", vocab_size=99, hidden_size=32, intermediate_size=48,
        num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64,
        moe_num_experts=4, moe_k=2, moe_intermediate_size=24, moe_layer_start_index=1,
    )  # fmt: skip
    config = read(ernie)
    assert config.switch.decoder_layers == (1, 2, 3)
    trained = dict(
        bias_rule="sign_centered", balance_load="previous_step", balance_scope="batch"
    )
    for rate, refusal in ((0.001, None), (None, "router bias=False (expected True)")):
        rules = dict(bias_update_rate=rate) | (trained if rate else {})
        router = dataclasses.replace(config.switch.router, **rules)
        switch = dataclasses.replace(config.switch, router=router)
        with refused(refusal) if refusal else contextlib.nullcontext():
            kin, values, _ = describe(dataclasses.replace(config, switch=switch))
    assert read(values) == config and kin.model_type == "ernie4_5_moe"
    with refused("moe_norm_min=0.5 cannot be converted"):  # the least sum of gates
        read(ernie | dict(moe_norm_min=0.5))


def test_a_llama_that_transformers_does_not_open_is_not_written():
    llama = read(PUBLISHED["llama_3_8b"][1])
    with refused("d_model % num_heads=1 (expected 0)"):
        describe(dataclasses.replace(llama, num_heads=3, num_kv_heads=3, d_model=4096))
