# SPDX-License-Identifier: Apache-2.0
"""Parameters and FLOPs of a model, counted from its configuration alone.

FLOPs by Kaplan et al. 2020 (arXiv:2001.08361), section 2.1, as Fedus et al. 2021
(arXiv:2101.03961), Table 9, counts them. No array is made.
Dims: D model, H heads, K head size, F feed-forward
"""

import dataclasses

from switchx.models.config import ModelConfig, SwitchConfig, require


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Elements of the parameters by kind; biases belong to the layer that adds them.

    Attributes:
        embedding: the token table, which is also the logits' matrix if they are tied.
        positions: the learned position table; for every stack the relative bias, and TUPE's
            table and projections.
        logits: the matrix of untied logits.
        attention: matrices of self- and cross-attention; of Switch attention the output matrix.
        dense_ffn: the FFNs of dense blocks, and shared experts.
        experts: all experts of all Switch layers.
        router: weights and balancing biases.
        norms: scales and biases of norms, those of queries and keys too.
    """

    embedding: int
    positions: int
    logits: int
    attention: int
    dense_ffn: int
    experts: int
    router: int
    norms: int

    @property
    def dense(self) -> int:
        """All parameters outside of the experts."""
        return self.total - self.experts

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class SequenceFlops:
    """Forward FLOPs of one sequence by kind; a multiplication and an addition are two.

    Attributes:
        attention: query, key, value and output matrices, cross-attention's all four at
            decoder tokens (Kaplan counts every weight of a stack at each of its tokens).
        scores: products of queries and keys, 2 H K per pair, and once per stack those of TUPE's
            positions; masked and causal pairs count like others.
        dense_ffn: the FFNs of the dense blocks, and shared experts.
        experts: experts that a token meets, without dropped tokens and empty slots.
        logits: products with the whole vocabulary at every decoder token.
        router: the router's product, which no total of the paper includes.
        expert_slots: the experts on all their slots, full or empty (`slots_per_token`).
        weighted_values: attention weights times values, which Kaplan leaves out.
        cross_memory: keys and values of cross-attention run over the encoder's tokens; this
            is the difference, negative where the decoder's sequence is the longer one.
    """

    attention: int
    scores: int
    dense_ffn: int
    experts: int
    logits: int
    router: int
    expert_slots: int
    weighted_values: int
    cross_memory: int

    @property
    def total(self) -> int:
        """Kaplan's count, the FLOPs/seq of Table 9; the router is not included."""
        return self.attention + self.scores + self.dense_ffn + self.experts + self.logits

    @property
    def executed(self) -> int:
        """Every matrix product a forward pass runs, with training's capacity."""
        extra = self.router + self.weighted_values + self.cross_memory
        return self.total - self.experts + self.expert_slots + extra


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Counts the parameters of the model that `config` describes, exactly."""
    D = config.d_model
    H = config.num_heads
    K = config.d_head
    Z = config.kv_heads
    num_stacks = 2 if config.is_encoder_decoder else 1
    num_norms = num_stacks + _num_attentions(config) + _num_layers(config)
    biases = config.biases_of_attention
    projection_bias = (H + 2 * Z) * K if biases != "none" else 0
    attention_bias = projection_bias + (D if biases == "all" else 0)
    dense_ffn = _num_layers(config) * _biased_ffn(config, config.d_ff)
    attention = _num_attentions(config) * (attention_weights(config) + attention_bias)
    one_expert = router = num_experts = 0
    if switch := config.switch:
        num_experts = switch.num_experts
        num_ffns = config.num_sparse_layers * switch.has_ffn
        num_attentions = config.num_sparse_layers * switch.has_attention
        expert_bias = _expert_d_ff(config) + D if switch.expert_bias else 0
        one_expert = num_ffns * (_ffn_weights(config, _expert_d_ff(config)) + expert_bias)
        one_expert += num_attentions * _attention_expert_weights(config)
        own = switch.router
        biases = own.has_bias + own.keeps_load + own.counts_merged + own.has_logit_bias
        per_router = D * switch.router.has_weights + biases
        router = (num_ffns + num_attentions) * per_router * num_experts
        # Experts take the places of FFNs, and of all of attention but its output.
        dense_ffn -= num_ffns * _biased_ffn(config, config.d_ff)
        if switch.shared_d_ff is not None:
            shared = _biased_ffn(config, switch.shared_d_ff) + D * switch.shared_gate
            dense_ffn += num_ffns * shared
        attention -= num_attentions * (3 * D * H * K + projection_bias)

    scales = {"none": 0, "head": 2 * K, "all": (H + Z) * K}
    return ParameterCount(
        embedding=config.vocab_size * D * (2 if config.separate_embeddings else 1),
        positions=_position_weights(config),
        logits=0 if config.tie_embeddings else D * config.vocab_size,
        attention=attention,
        dense_ffn=dense_ffn,
        experts=one_expert * num_experts,
        router=router,
        norms=num_norms * (2 * D if config.norm == "layer" else D)
        + _num_attentions(config) * scales[config.qk_norm],
    )


def flops_per_sequence(
    config: ModelConfig, encoder_length: int, decoder_length: int
) -> SequenceFlops:
    """Counts the forward FLOPs of one sequence: 2 per weight and token, 2 H K per score.

    Biases, norms, softmax, activations, dropout, gathers and losses are not counted.

    Args:
        encoder_length, decoder_length: lengths in tokens; `encoder_length` is 0 in a
            decoder-only model. The papers' figures are at 512 and 114.

    Raises:
        ValueError: `encoder_length` does not fit the architecture.
    """
    require(
        config.is_encoder_decoder == (encoder_length > 0),
        f"encoder_length={encoder_length} does not fit architecture={config.architecture!r}; "
        "use 0 for decoder_only, at least 1 otherwise",
    )
    D, K = config.d_model, config.d_head
    HK, ZK = config.num_heads * K, config.kv_heads * K
    num_cross = config.num_decoder_layers if config.is_encoder_decoder else 0
    # Summed over the layers: tokens that pass an attention, pairs it scores.
    encoder_tokens = config.num_encoder_layers * encoder_length
    decoder_tokens = config.num_decoder_layers * decoder_length
    cross_tokens = num_cross * decoder_length
    pairs = (
        encoder_tokens * encoder_length
        + decoder_tokens * decoder_length
        + cross_tokens * encoder_length
    )
    ffn_tokens = encoder_tokens + decoder_tokens
    attention = 2 * attention_weights(config) * (ffn_tokens + cross_tokens)
    untied_pairs = 0
    if config.has_untied_positions:  # once per stack, whatever its layers
        untied_pairs = encoder_length**2 + decoder_length**2
        attention += 2 * _untied_projections(config) * (encoder_length + decoder_length)
    dense_ffn = 2 * _ffn_weights(config, config.d_ff) * ffn_tokens
    one_expert = router = num_selected = 0
    slots = 1.0
    if switch := config.switch:
        lengths = (("encoder", encoder_length), ("decoder", decoder_length))
        sparse = [(config.num_sparse_layers_of(stack), length) for stack, length in lengths]
        sparse_tokens = sum(layers * length for layers, length in sparse)
        in_ffns = sparse_tokens * switch.has_ffn
        in_attentions = sparse_tokens * switch.has_attention
        one_expert = 2 * _ffn_weights(config, _expert_d_ff(config)) * in_ffns
        one_expert += 2 * _attention_expert_weights(config) * in_attentions
        if switch.router.has_weights:
            router = 2 * D * switch.num_experts * (in_ffns + in_attentions)
        dense_ffn -= 2 * _ffn_weights(config, config.d_ff) * in_ffns
        dense_ffn += 2 * _ffn_weights(config, switch.shared_d_ff or 0) * in_ffns
        attention -= 2 * 3 * D * HK * in_attentions
        num_selected = experts_per_token(switch)
        slots = slots_of_sequence(config, encoder_length, decoder_length)

    return SequenceFlops(
        attention=attention,
        scores=2 * HK * (pairs + untied_pairs),
        dense_ffn=dense_ffn,
        experts=round(one_expert * num_selected),
        logits=2 * D * config.vocab_size * decoder_length,
        router=router,
        expert_slots=round(one_expert * slots),
        weighted_values=2 * HK * pairs,
        cross_memory=2 * 2 * D * ZK * num_cross * (encoder_length - decoder_length),
    )


def train_flops(config: ModelConfig, encoder_length: int, decoder_length: int) -> int:
    """FLOPs of a training step for one sequence: 3 times Kaplan's forward count.

    The backward pass takes two products where the forward one takes one; all weights are
    assumed to be trained. What remat recomputes, the router, empty slots and the optimizer are
    not included: divided by a step's seconds it is the model's FLOPs/s, not the machine's. Nor
    are attention weights times values, which PaLM's MFU counts (`weighted_values`).
    """
    return 3 * flops_per_sequence(config, encoder_length, decoder_length).total


def experts_per_token(switch: SwitchConfig) -> float:
    """Average number of experts that a token meets in a Switch layer if nothing is dropped.

    It is k; where experts choose, their slots per token, which are never empty.
    """
    if switch.router.has_choosing_experts:
        return slots_per_token(switch, switch.capacity_factor)
    return switch.router.num_selected


def slots_of_sequence(config: ModelConfig, encoder_length: int, decoder_length: int) -> float:
    """Slots per token of a sparse model's Switch layers in training, over all stacks.

    `slots_per_token` of its capacity factor; with an `expert_capacity`, from its sequences.
    """
    switch = config.switch
    if switch.expert_capacity is None or switch.router.overflow == "dropless":
        return slots_per_token(switch, switch.capacity_factor)
    lengths = (("encoder", encoder_length), ("decoder", decoder_length))
    sparse = [(config.num_sparse_layers_of(stack), length) for stack, length in lengths]
    slots = sum(layers * min(length, switch.expert_capacity) for layers, length in sparse)
    return switch.num_experts * slots / sum(layers * length for layers, length in sparse)


def slots_per_token(switch: SwitchConfig, capacity_factor: float) -> float:
    """Slots per token of a full group: eq. 3 before it is rounded up to whole slots.

    The capacity factor for each of k choices, unless `min_capacity` asks for more; an expert
    never has more slots than the group has tokens, and as many where nothing is dropped. A
    group may be all of one task, so the experts of every task have slots for it.
    """
    if switch.router.overflow == "dropless":
        return float(switch.num_experts)
    capacity_factor = capacity_factor * switch.router.num_selected * switch.router.num_tasks
    floor = switch.num_experts * switch.min_capacity / switch.group_size
    return min(float(switch.num_experts), max(capacity_factor, floor))


def _num_layers(config: ModelConfig) -> int:
    return config.num_encoder_layers + config.num_decoder_layers


def _num_attentions(config: ModelConfig) -> int:
    """One per block, and one more in each decoder block that reads an encoder."""
    num_cross = config.num_decoder_layers if config.is_encoder_decoder else 0
    return _num_layers(config) + num_cross


def _position_weights(config: ModelConfig) -> int:
    if config.positions == "learned":
        return config.max_length * config.d_model
    one_stack = config.relative_buckets * config.num_heads if config.has_relative_bias else 0
    if config.has_untied_positions:
        one_stack += config.max_length * config.d_model + _untied_projections(config)
    if config.relative_bias_per_layer:
        return one_stack * _num_layers(config)
    return one_stack * (2 if config.is_encoder_decoder else 1)


def _untied_projections(config: ModelConfig) -> int:
    """Weights of TUPE's projections of one stack's positions."""
    return 2 * config.d_model * config.num_heads * config.d_head


def _expert_d_ff(config: ModelConfig) -> int:
    return config.switch.d_ff or config.d_ff


def attention_weights(config: ModelConfig) -> int:
    """Weights of the four matrices of one attention, biases apart."""
    return 2 * config.d_model * (config.num_heads + config.kv_heads) * config.d_head


def _ffn_weights(config: ModelConfig, d_ff: int) -> int:
    """Weights of one FFN or expert, biases apart: two matrices, three when gated."""
    return (3 if config.is_gated else 2) * config.d_model * d_ff


def _biased_ffn(config: ModelConfig, d_ff: int) -> int:
    """Weights and biases of one dense FFN."""
    bias = d_ff + config.d_model if config.use_bias else 0
    return _ffn_weights(config, d_ff) + bias


def _attention_expert_weights(config: ModelConfig) -> int:
    """Weights of one expert of a Switch attention: its query's, and its key and value's."""
    D, HK = config.d_model, config.num_heads * config.d_head
    if config.switch.attention_experts == "linear":
        return 2 * D * HK
    F = _expert_d_ff(config)
    return 2 * ((2 if config.is_gated else 1) * D * F + F * HK)
