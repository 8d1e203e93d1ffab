# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers with random weights."""

from tests.torch_weights import randomize

SIZES = dict(
    vocab_size=50,
    d_model=24,
    d_kv=8,
    d_ff=40,
    num_heads=3,
    num_layers=4,
    num_decoder_layers=4,
    decoder_start_token_id=0,
)


def switch(**changes):
    sparse = dict(num_experts=4, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2)
    return "SwitchTransformers", SIZES | sparse | changes


MODELS = {
    "t5": ("T5", SIZES),
    "t5_deep_encoder_silu": (
        "T5",
        SIZES | {"num_decoder_layers": 1, "feed_forward_proj": "gated-silu"},
    ),
    "t5_1_1": ("T5", SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", SIZES),
    "mt5_untied": ("MT5", SIZES | {"tie_word_embeddings": False}),
    # Two slots: in rows of 24 tokens at least 16 are dropped in every encoder layer.
    "switch_drops": switch(expert_capacity=2),
    "switch_steps": switch(num_sparse_decoder_layers=1, expert_capacity=64),
    "switch_all_sparse": switch(
        num_sparse_encoder_layers=4, num_sparse_decoder_layers=0, expert_capacity=3
    ),
    "t5_gelu": ("T5", SIZES | {"feed_forward_proj": "gelu", "layer_norm_epsilon": 1e-3}),
    "umt5": ("UMT5", SIZES | {"num_decoder_layers": 3}),
    "switch_gelu": switch(dense_act_fn="gelu", router_bias=True, expert_capacity=5),
    "switch_untied": switch(tie_word_embeddings=False, expert_capacity=5),
}


def build(family: str, sizes: dict):
    """A model of transformers, by the name of its family."""
    import torch
    import transformers

    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    if family == "UMT5" or not sizes.get("tie_word_embeddings", True):
        # transformers 5 ties what was not loaded; the released ones have a matrix of their own.
        shape = model.lm_head.weight.shape
        model.lm_head.weight = torch.nn.Parameter(torch.empty(shape))
        for stack in (model.encoder, model.decoder):  # one table, as they all have
            stack.embed_tokens = model.shared
    return as_trained(randomize(model))


def as_trained(model):
    """transformers 5.0 to 5.23 divide UMT5's logits by sqrt(D) even where they have their own
    matrix; 5.24 asks the second of these fields."""
    if type(model).__name__.startswith("UMT5"):
        model.config.tie_word_embeddings = model.config.scale_decoder_outputs = False
    return model


NLLB_SIZES = dict(
    vocab_size=50,
    d_model=24,
    encoder_ffn_dim=40,
    decoder_ffn_dim=40,
    encoder_attention_heads=3,
    decoder_attention_heads=3,
    encoder_layers=4,
    decoder_layers=4,
    encoder_sparse_step=2,
    decoder_sparse_step=2,
    num_experts=5,
    moe_token_dropout=0.2,
)


def build_nllb(**changes):
    import transformers

    return randomize(
        transformers.NllbMoeForConditionalGeneration(
            transformers.NllbMoeConfig(**NLLB_SIZES | changes)
        )
    )
