# SPDX-License-Identifier: Apache-2.0
"""What a model is: frozen, validated descriptions with every derived size as a property."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from switchx.models.require import require, require_choice
from switchx.models.router_config import RouterConfig

DTYPES = ("float32", "bfloat16", "float16", "float64")

DISPATCHERS = (
    "sort",
    "einsum",
    "dropless",
    "all_to_all",
    "hierarchical",
    "ragged_all_to_all",
    "sliced",
    "sliced_scatter",
)


@dataclasses.dataclass(frozen=True)
class Precision:
    """Where which dtype is used.

    Selective precision (Fedus et al. 2021, arXiv:2101.03961, section 2.4): the router runs
    in float32 whatever the layers around it use, and nothing of it leaves the device in
    float32 except the gates.
    """

    params: str = "float32"
    compute: str = "float32"
    router: str = "float32"
    logits: str = "float32"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            require_choice(f"Precision.{field.name}", getattr(self, field.name), DTYPES)

    @property
    def compute_dtype(self):
        return jnp.dtype(self.compute)


@dataclasses.dataclass(frozen=True)
class SwitchConfig:
    """Switch layers: how many experts, in which blocks, and how tokens reach them.

    Attributes:
        num_experts: E, in every sparse block.
        every: the last block of each run of `every` blocks is sparse; 1 makes all sparse.
        stacks: whose blocks: `all`, or those of the `encoder` alone.
        sublayers: what is sparse in a sparse block: its `ffn`, its self-`attention` (Switch,
            appendix A) or `both`.
        attention_experts: experts of a Switch attention are `linear` maps, or each an `ffn`.
        capacity_factor: slots of an expert over its even share of tokens, in training
            (section 2.2, eq. 3); `eval_capacity_factor` where nothing is trained.
        min_capacity: fewest slots an expert has.
        capacity_rounding: `up` (a factor of 1 has a slot for each of perfectly balanced
            tokens), `down` (Mesh-TensorFlow) or `nearest`, halves to the even number
            (flaxformer).
        group_size: tokens routed together, at most; groups never depend on the devices.
        d_ff: F of an expert; None takes the model's.
        shared_d_ff: F of a dense FFN that every token passes beside its expert (a residual
            or shared expert: Rajbhandari et al. 2022, arXiv:2201.05596; Dai et al. 2024,
            arXiv:2401.06066); None has none.
        expert_dropout_rate: dropout inside the experts (section 2.4, Table 4); None takes
            the model's `dropout_rate`.
        expert_bias: biases in the experts.
        dispatcher: how tokens reach their experts, the same numbers from each: `sort`
            (gathers, the default), `einsum` (one-hot, the readable oracle), or another of
            `DISPATCHERS`; docs/dispatchers.md says which is for what.
        buffer_factor: in the sliced dispatchers, tokens that a device keeps room for over
            its even share; a device with more of them computes the layer again with room
            for all. None always has room for all.
        router_init_scale: variance scale of the router; the paper scales it by 0.1 as all
            else, flaxformer took normal(0.02) and published checkpoints that way.
        router: which experts a token goes to, and what happens where one is full.
    """

    num_experts: int
    every: int = 2
    stacks: Literal["all", "encoder"] = "all"
    sublayers: Literal["ffn", "attention", "both"] = "ffn"
    attention_experts: Literal["linear", "ffn"] = "linear"
    capacity_factor: float = 1.25
    eval_capacity_factor: float = 2.0
    min_capacity: int = 4
    capacity_rounding: Literal["up", "down", "nearest"] = "up"
    group_size: int = 8192
    d_ff: int | None = None
    shared_d_ff: int | None = None
    expert_dropout_rate: float | None = None
    expert_bias: bool = False
    dispatcher: Literal[DISPATCHERS] = "sort"
    buffer_factor: float | None = None
    router_init_scale: float = 0.1
    router: RouterConfig = RouterConfig()

    def __post_init__(self):
        require_choice("SwitchConfig.dispatcher", self.dispatcher, DISPATCHERS)
        for name, choices in (
            ("capacity_rounding", ("up", "down", "nearest")),
            ("stacks", ("all", "encoder")),
            ("sublayers", ("ffn", "attention", "both")),
            ("attention_experts", ("linear", "ffn")),
        ):
            require_choice(f"SwitchConfig.{name}", getattr(self, name), choices)
        for name in ("num_experts", "every", "min_capacity", "group_size"):
            require(
                getattr(self, name) >= 1,
                f"SwitchConfig.{name}={getattr(self, name)}; use a whole number of at least 1",
            )
        for name in ("capacity_factor", "eval_capacity_factor"):
            require(
                getattr(self, name) > 0,
                f"SwitchConfig.{name}={getattr(self, name)}; "
                "use a factor above 0, usually 1.0 to 2.0",
            )
        require(
            self.d_ff is None or self.d_ff >= 1,
            f"SwitchConfig.d_ff={self.d_ff}; use a whole number of at least 1, or None for the "
            "model's",
        )
        require(
            self.shared_d_ff is None or (self.shared_d_ff >= 1 and self.has_ffn),
            f"SwitchConfig.shared_d_ff={self.shared_d_ff} with sublayers={self.sublayers!r}; "
            "use a whole number of at least 1 where FFNs are sparse, or None",
        )
        rate = self.expert_dropout_rate
        require(
            rate is None or 0 <= rate < 1,
            f"SwitchConfig.expert_dropout_rate={rate}; use 0 <= rate < 1, or None for the "
            "model's",
        )
        require(
            self.buffer_factor is None or self.buffer_factor > 0,
            f"SwitchConfig.buffer_factor={self.buffer_factor}; use a factor above 0, usually "
            "1.5 to 4, or None for room for all",
        )
        require(
            self.router_init_scale > 0,
            f"SwitchConfig.router_init_scale={self.router_init_scale}; use a scale above 0",
        )
        require(
            not self.has_attention or self.dispatcher in ("sort", "einsum"),
            f"SwitchConfig.dispatcher={self.dispatcher!r} with sublayers={self.sublayers!r}: "
            "experts in attention are dispatched by sort or einsum; use one of them, or "
            "sublayers='ffn'",
        )
        tried = self.router.max_rounds if self.router.overflow == "reroute" else 1
        for name, count in (("num_selected", self.router.num_selected), ("max_rounds", tried)):
            require(
                count <= self.num_experts,
                f"RouterConfig.{name}={count} with num_experts={self.num_experts}: a token "
                f"meets an expert once; use {name}={self.num_experts} at most",
            )

    @property
    def has_ffn(self) -> bool:
        """Whether the FFN of a sparse block is a Switch layer."""
        return self.sublayers in ("ffn", "both")

    @property
    def has_attention(self) -> bool:
        """Whether the self-attention of a sparse block is a Switch layer."""
        return self.sublayers in ("attention", "both")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Transformer, dense or sparse, encoder-decoder or decoder-only.

    The T5 1.1 family is `norm="rms"`, `positions="relative"`, no biases, no scaling in
    attention; the GPT family of Pipeline MoE and SE-MoE is `norm="layer"`,
    `positions="learned"`, `use_bias=True`, `scale_attention=True`.

    Attributes:
        d_model, d_ff, num_heads, d_head: D, F, H and K.
        num_encoder_layers: 0 in a decoder-only model.
        switch: the Switch layers, or None for a dense model.
        max_length: rows of the learned position table.
        relative_buckets, relative_max_distance: T5's shared relative position buckets.
        tie_embeddings: logits from the embedding table.
        scale_tied_logits: divide tied logits by sqrt(D), as T5 does.
        init_scale: variance scale of every matrix's initializer (the paper's 0.1,
            section 2.4, Table 3).
        dropout_rate: on embeddings, attention weights and each sub-layer's output.
        scan_layers: one `lax.scan` over repeated blocks, parameters stacked over N;
            otherwise the blocks are unrolled.
        remat: what the backward pass computes again: `none`, `minimal` (all but matmul
            results) or `full` (all of a block).
    """

    architecture: Literal["encoder_decoder", "decoder_only"]
    vocab_size: int
    d_model: int
    d_ff: int
    num_heads: int
    d_head: int
    num_decoder_layers: int
    num_encoder_layers: int = 0
    activation: Literal["relu", "gelu", "geglu", "swiglu"] = "geglu"
    norm: Literal["rms", "layer"] = "rms"
    positions: Literal["relative", "learned"] = "relative"
    max_length: int | None = None
    relative_buckets: int = 32
    relative_max_distance: int = 128
    use_bias: bool = False
    scale_attention: bool = False
    tie_embeddings: bool = True
    scale_tied_logits: bool = True
    init_scale: float = 1.0
    dropout_rate: float = 0.0
    switch: SwitchConfig | None = None
    scan_layers: bool = False
    remat: Literal["none", "minimal", "full"] = "none"
    precision: Precision = Precision()

    def __post_init__(self):
        require_choice("architecture", self.architecture, ("encoder_decoder", "decoder_only"))
        require_choice("activation", self.activation, ("relu", "gelu", "geglu", "swiglu"))
        require_choice("norm", self.norm, ("rms", "layer"))
        require_choice("positions", self.positions, ("relative", "learned"))
        require_choice("remat", self.remat, ("none", "minimal", "full"))
        sizes = ("vocab_size", "d_model", "d_ff", "num_heads", "d_head", "num_decoder_layers")
        for name in sizes:
            require(
                getattr(self, name) >= 1,
                f"ModelConfig.{name}={getattr(self, name)}; use a whole number of at least 1",
            )
        fewest, most = (1, math.inf) if self.is_encoder_decoder else (0, 0)
        require(
            fewest <= self.num_encoder_layers <= most,
            f"num_encoder_layers={self.num_encoder_layers} does not fit architecture="
            f"{self.architecture!r}; use 0 for decoder_only, at least 1 otherwise",
        )
        require(
            self.positions == "relative" or self.max_length is not None,
            "positions='learned' needs max_length, the rows of the position table",
        )
        require(
            self.max_length is None or self.max_length >= 1,
            f"max_length={self.max_length}; use a whole number of at least 1",
        )
        # Half of a stack's buckets hold one distance each, in an encoder half of a half.
        require(
            self.relative_buckets >= 4
            and self.relative_max_distance > self.relative_buckets // 2,
            f"relative_buckets={self.relative_buckets} with relative_max_distance="
            f"{self.relative_max_distance}; use at least 4 buckets, and a distance of more "
            "than half of them",
        )
        require(self.init_scale > 0, f"init_scale={self.init_scale}; use a scale above 0")
        require(
            0 <= self.dropout_rate < 1, f"dropout_rate={self.dropout_rate}; use 0 <= rate < 1"
        )
        if self.switch is not None:
            self._check_stacks()
        for name in ("num_encoder_layers", "num_decoder_layers"):
            count = getattr(self, name)
            below = count // self.period * self.period
            fitting = [str(n) for n in (below, below + self.period) if n]
            require(
                count % self.period == 0,
                f"{name}={count} is not divisible by switch.every={self.period}; use "
                f"{' or '.join(fitting)} layers, or every=1",
            )

    def _check_stacks(self) -> None:
        is_in_decoder = self.switch.stacks == "all"
        require(
            is_in_decoder or self.is_encoder_decoder,
            "SwitchConfig.stacks='encoder' in a decoder_only model, which has no encoder; use "
            "stacks='all'",
        )
        way_out = "SwitchConfig.stacks='encoder'" if self.is_encoder_decoder else "kind='top_k'"
        require(
            not (self.switch.router.kind == "expert_choice" and is_in_decoder),
            "RouterConfig.kind='expert_choice' in a causal decoder: whether an expert takes a "
            "token would depend on the tokens after it, which are not known when text is "
            f"written; use {way_out}",
        )

    @property
    def is_encoder_decoder(self) -> bool:
        return self.architecture == "encoder_decoder"

    @property
    def is_gated(self) -> bool:
        """Whether an FFN has a second input matrix."""
        return self.activation in ("geglu", "swiglu")

    @property
    def period(self) -> int:
        """Blocks after which the pattern of dense and sparse repeats."""
        return self.switch.every if self.switch else 1

    @property
    def num_sparse_layers(self) -> int:
        """Blocks that are sparse, in all stacks together."""
        layers = self.num_encoder_layers
        if self.switch is None or self.switch.stacks == "all":
            layers += self.num_decoder_layers
        return layers // self.switch.every if self.switch else 0

    @property
    def sparse_layer_names(self) -> list[str]:
        """`encoder 1`, ...: Switch layers by stack and block, from 0, in the order of metrics.

        Where attention is sparse too, it comes first: `encoder 1 attention`, `encoder 1 ffn`.
        """
        parts = {"ffn": [""], "attention": [" attention"], "both": [" attention", " ffn"]}
        stacks = {"encoder": self.num_encoder_layers, "decoder": self.num_decoder_layers}
        return [
            f"{stack} {layer}{part}"
            for stack, num_layers in stacks.items()
            for layer in range(num_layers)
            if self.is_sparse(layer, stack)
            for part in parts[self.switch.sublayers]
        ]

    def is_sparse(self, layer: int, stack: Literal["encoder", "decoder"] = "encoder") -> bool:
        """Whether block `layer`, from 0, of a stack has Switch layers."""
        if self.switch is None or (stack == "decoder" and self.switch.stacks == "encoder"):
            return False
        return layer % self.period == self.period - 1
