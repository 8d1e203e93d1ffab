# SPDX-License-Identifier: Apache-2.0
"""Frozen, validated configurations of models, with every derived size as a property."""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import ml_dtypes  # noqa: F401, teaches NumPy bfloat16
import numpy as np

from switchx.fields import (
    at_evaluation,
    at_resume,
    check_choices,
    from_description,
    require,
    require_above_zero,
    require_at_least,
    require_below_one,
)
from switchx.layers.rotary import RotaryConfig
from switchx.moe.config import RouterConfig, SwitchConfig

__all__ = ["ModelConfig", "Precision", "RotaryConfig", "RouterConfig", "SwitchConfig"]

# Limits for files from elsewhere: the largest existing model has 30 blocks of 2048
# experts. They are checked before anything is built or counted.
_SIZES = (
    "vocab_size",
    "d_model",
    "d_ff",
    "num_heads",
    "num_kv_heads",
    "d_head",
    "max_length",
    "relative_buckets",
)
MOST_OF_MODEL = dict.fromkeys(_SIZES, 1 << 31) | dict.fromkeys(
    ("num_encoder_layers", "num_decoder_layers"), 1000
)
MOST_OF_SWITCH = {"num_experts": 1 << 16, "every": 1000}
DTYPES = ("float32", "bfloat16", "float16", "float64")
# The fewest tokens whose logits are in memory at a time: with 4,096 words they take 8 MB.
LEAST_TOKENS_OF_LOGITS = 512
# Tokens of a decoder-only model's text that are read at a time (inference/chunked_prefill.py):
# enough rows for the products; at 2^15 places, scores of 64 MiB per head and row.
PREFILL_CHUNK = 512
# Training attentions that keep no attention weights and do not run where a mesh axis is manual.
FLASH_ATTENTION = ("cudnn", "splash")


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a model's parts.

    Selective precision (Fedus et al. 2021, arXiv:2101.03961, section 2.4): the router computes
    in float32 whatever dtype the layers around it use, and only its gates leave the device in
    float32.

    Attributes:
        params: dtype of the parameters.
        compute: dtype of activations and of weights in products.
        router: dtype of the router's product and probabilities.
        logits: dtype of the logits.
    """

    params: Literal[DTYPES] = "float32"
    compute: Literal[DTYPES] = "float32"
    router: Literal[DTYPES] = "float32"
    logits: Literal[DTYPES] = "float32"

    def __post_init__(self):
        check_choices(self)

    @property
    def compute_dtype(self):
        return np.dtype(self.compute)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Transformer, dense or sparse, encoder-decoder or decoder-only.

    The T5 1.1 family is `norm="rms"`, `positions="relative"`, no biases, no scaling in
    attention; the GPT family of Pipeline MoE and SE-MoE is `norm="layer"`,
    `positions="learned"`, `use_bias=True`, `scale_attention=True`. Llama's family is
    `positions="rotary"`, `scale_attention=True`, `activation="swiglu"`, `num_kv_heads`.

    Positions are T5's `relative` bias, a table of `learned` ones added to the words, or TUPE's
    correlations of positions apart from those of words (Ke et al. 2020, arXiv:2006.15595):
    `tupe` absolute, `tupe_relative` with T5's bias too; or `sinusoidal` ones, which have no
    parameters, added to the words (Vaswani et al. 2017, arXiv:1706.03762; fairseq's form); or
    `rotary` ones, which turn the queries and keys of self-attention (layers/rotary.py).

    A frozen subclass with a method `build(key)` describes a user's own model: a Flax NNX
    module, called as `logits_BLV, stats = model(batch, is_training=..., key=...)`, with stats
    None or RoutingStats (docs/own_code.md).

    Attributes:
        architecture: `encoder_decoder` or `decoder_only`.
        vocab_size: V, rows of the embedding table.
        d_model, d_ff, num_heads, d_head: D, F, H and K.
        num_kv_heads: Z, heads of keys and values; each is read by H / Z heads of queries
            (arXiv:2305.13245). None takes H.
        qk_norm: RMSNorm of queries and keys before positions: `head`, of each head with one
            scale `[K]`; `all`, of all heads together with a scale `[H, K]`; or `none`.
        attention_bias: biases in attention: of queries, keys and values (`qkv`), of the output
            too (`all`), or `none`; None takes `use_bias`.
        norm_place: place of a block's norms: `before` its sublayers, or `after` them, where
            their outputs join the residual stream.
        rotary: frequencies of `rotary` positions.
        num_encoder_layers: blocks of the encoder; 0 in a decoder-only model.
        num_decoder_layers: blocks of the decoder.
        activation: activation of the FFNs, with a gate (`geglu`, `swiglu`) or without.
        norm: RMSNorm (`rms`) or LayerNorm (`layer`).
        positions: kind of positions, as above.
        use_bias: whether FFNs, and by default attention, have biases.
        scale_attention: whether scores are divided by sqrt(K); T5's are not.
        precision: dtypes of parameters, computation, routers and logits.
        switch: the Switch layers, or None for a dense model.
        norm_epsilon: epsilon that is added to the variance in norms.
        max_length: rows of the position table, where there is one: `learned` and TUPE's; with
            `rotary` the most positions of a text, None for no limit.
        relative_buckets, relative_max_distance: number of T5's relative position buckets, and
            the distance from which all share the last one.
        relative_bias_per_layer: whether every block has a relative bias of its own (UMT5), and
            the stack shares none.
        separate_embeddings: whether the encoder has an embedding table of its own.
        tie_embeddings: whether logits are computed with the embedding table, the decoder's
            where there are two.
        scale_tied_logits: whether tied logits are divided by sqrt(D), as T5 does.
        init_scale: variance scale of every matrix's initializer (the paper's 0.1,
            section 2.4, Table 3).
        dropout_rate: dropout rate of embeddings, attention weights and each sub-layer's output.
        training_attention: implementation of attention, in training steps only: `einsum`;
            `cudnn`, flash attention on NVIDIA GPUs; `splash`, the same on TPUs, of decoder-only
            models without positional biases and without bidirectional inputs; or `auto`, flash
            attention of the device where attention is such, else einsum (docs/compiled.md).
        scan_layers: whether one `lax.scan` runs over the repeated blocks, with parameters
            stacked over N; otherwise the blocks are unrolled.
        remat: activations that the backward pass recomputes: `none`, `minimal` (all but matmul
            results) or `full` (all of a block). Choices of experts are kept under each of them.
    """

    architecture: Literal["encoder_decoder", "decoder_only"]
    vocab_size: int
    d_model: int
    d_ff: int
    num_heads: int
    d_head: int
    num_decoder_layers: int
    num_encoder_layers: int = 0
    activation: Literal["relu", "gelu", "gelu_exact", "geglu", "geglu_exact", "swiglu"] = (
        "geglu"
    )
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: float = 1e-6
    norm_place: Literal["before", "after"] = "before"
    positions: Literal[
        "relative", "learned", "tupe", "tupe_relative", "sinusoidal", "rotary"
    ] = "relative"
    rotary: RotaryConfig = at_evaluation(RotaryConfig())
    max_length: int | None = at_evaluation(None)
    relative_buckets: int = 32
    relative_max_distance: int = 128
    relative_bias_per_layer: bool = False
    separate_embeddings: bool = False
    use_bias: bool = False
    attention_bias: Literal["none", "qkv", "all"] | None = None
    scale_attention: bool = False
    num_kv_heads: int | None = None
    qk_norm: Literal["none", "head", "all"] = "none"
    tie_embeddings: bool = True
    scale_tied_logits: bool = True
    init_scale: float = at_evaluation(1.0)
    dropout_rate: float = at_evaluation(0.0)
    switch: SwitchConfig | None = None
    training_attention: Literal["einsum", "cudnn", "splash", "auto"] = at_resume("einsum")
    scan_layers: bool = at_resume(False)
    remat: Literal["none", "minimal", "full"] = at_resume("none")
    precision: Precision = at_evaluation(Precision())

    build: ClassVar[Any] = None

    def __post_init__(self):
        check_choices(self)
        sizes = ("vocab_size", "d_model", "d_ff", "num_heads", "d_head", "num_decoder_layers")
        require_at_least(self, 1, *sizes, "max_length", "num_kv_heads")
        fewest, most = (1, math.inf) if self.is_encoder_decoder else (0, 0)
        require(
            fewest <= self.num_encoder_layers <= most,
            f"num_encoder_layers={self.num_encoder_layers} does not fit architecture="
            f"{self.architecture!r}; use 0 for decoder_only, at least 1 otherwise",
        )
        require(
            not self.has_length_limit or self.max_length is not None,
            f"positions={self.positions!r} needs max_length, the rows of the position table",
        )
        require(
            not self.has_untied_positions or self.scale_attention,
            f"positions={self.positions!r} with scale_attention=False: TUPE divides its scores "
            "by sqrt(2 d_head); use scale_attention=True",
        )
        # Half of a stack's buckets hold one distance each; in an encoder, half of a half.
        require(
            self.relative_buckets >= 4
            and self.relative_max_distance > self.relative_buckets // 2,
            f"relative_buckets={self.relative_buckets} with relative_max_distance="
            f"{self.relative_max_distance}; use at least 4 buckets, and a distance of more "
            "than half of them",
        )
        self._check_tables()
        self._check_attention()
        require_above_zero(self, "init_scale", "norm_epsilon")
        require_below_one(self, "dropout_rate")
        if self.switch is not None:
            self._check_stacks()
        self._check_layers()

    def _check_tables(self) -> None:
        require(
            not self.separate_embeddings or self.is_encoder_decoder,
            "separate_embeddings=True in a decoder_only model, which has one stack; use False",
        )
        require(
            self.positions != "sinusoidal" or self.d_model >= 4,
            f"positions='sinusoidal' with d_model={self.d_model}; use 4 or more",
        )
        if self.relative_bias_per_layer:
            require(
                self.positions == "relative" and not self.scan_layers,
                f"relative_bias_per_layer=True with positions={self.positions!r} and "
                f"scan_layers={self.scan_layers}; use positions='relative' and "
                "scan_layers=False",
            )

    def _check_attention(self) -> None:
        require(
            self.attention_bias in (None, "none", "qkv", "all"),
            f"ModelConfig.attention_bias={self.attention_bias!r}; use none, qkv, all or None",
        )
        require(
            self.num_heads % self.kv_heads == 0,
            f"ModelConfig.num_kv_heads={self.num_kv_heads} with num_heads={self.num_heads}; "
            "use a divisor of num_heads: each head of keys is read by as many of queries",
        )
        rotated = self.rotary.num_rotated(self.d_head)
        require(
            self.positions != "rotary" or (rotated >= 2 and rotated % 2 == 0),
            f"RotaryConfig.fraction={self.rotary.fraction} of d_head={self.d_head} is "
            f"{rotated} features, which are turned in pairs; use a fraction that makes it even",
        )
        require(
            self.positions == "rotary" or self.rotary == RotaryConfig(),
            f"ModelConfig.rotary={self.rotary} with positions={self.positions!r}, which reads "
            "no frequencies; use positions='rotary'",
        )
        require(
            self.training_attention != "splash" or self.has_plain_scores,
            f"ModelConfig.training_attention='splash' with architecture={self.architecture!r} "
            f"and positions={self.positions!r}: it takes decoder-only models whose positions "
            "add nothing to scores; use 'einsum' or 'auto'",
        )
        own = {
            "positions": self.positions == "rotary",
            "num_kv_heads": self.kv_heads != self.num_heads,
            "qk_norm": self.qk_norm != "none",
            "attention_bias": self.biases_of_attention == "qkv",
        }
        found = [f"{name}={getattr(self, name)!r}" for name, is_set in own.items() if is_set]
        require(
            not (found and self.switch is not None and self.switch.has_attention),
            f"ModelConfig.{', '.join(found)} with SwitchConfig.sublayers="
            f"{self.switch and self.switch.sublayers!r}: experts that make queries and keys "
            "have none of these; use sublayers='ffn'",
        )

    def _check_layers(self) -> None:
        for stack in ("encoder", "decoder"):
            name = f"num_{stack}_layers"
            count = getattr(self, name)
            if self.switch is not None and self.switch.has_named_layers:
                layers = getattr(self.switch, f"{stack}_layers")
                require(
                    not layers or layers[-1] < count,
                    f"SwitchConfig.{stack}_layers={layers} with {name}={count}; use numbers "
                    f"below {count}",
                )
                continue
            below = count // self.period * self.period
            fitting = [str(n) for n in (below, below + self.period) if n]
            require(
                count % self.period == 0,
                f"{name}={count} is not divisible by switch.every={self.period}; use "
                f"{' or '.join(fitting)} layers, or every=1",
            )

    def _check_stacks(self) -> None:
        is_in_decoder = self.switch.stacks == "all"
        if self.switch.has_named_layers:
            is_in_decoder = bool(self.switch.decoder_layers)
            require(
                not self.scan_layers,
                f"scan_layers=True with SwitchConfig.encoder_layers="
                f"{self.switch.encoder_layers}: what is scanned repeats one pattern; use "
                "scan_layers=False, or every",
            )
        require(
            self.switch.stacks == "all" or self.is_encoder_decoder,
            "SwitchConfig.stacks='encoder' in a decoder_only model, which has no encoder; use "
            "stacks='all'",
        )
        way_out = "SwitchConfig.stacks='encoder'" if self.is_encoder_decoder else "kind='top_k'"
        require(
            not (self.switch.router.has_choosing_experts and is_in_decoder),
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
        return self.activation in ("geglu", "geglu_exact", "swiglu")

    @property
    def has_length_limit(self) -> bool:
        """Whether a text can have no more than `max_length` positions."""
        if self.positions == "rotary":
            return self.max_length is not None
        return self.positions not in ("relative", "sinusoidal")

    @property
    def kv_heads(self) -> int:
        """Z, the heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def biases_of_attention(self) -> Literal["none", "qkv", "all"]:
        if self.attention_bias is not None:
            return self.attention_bias
        return "all" if self.use_bias else "none"

    @property
    def has_relative_bias(self) -> bool:
        return self.positions in ("relative", "tupe_relative")

    @property
    def has_untied_positions(self) -> bool:
        """Whether positions have correlations of their own (TUPE)."""
        return self.positions in ("tupe", "tupe_relative")

    @property
    def num_correlations(self) -> int:
        """Products that a self-attention score sums: of words and, with TUPE, of positions."""
        return 2 if self.has_untied_positions else 1

    @property
    def period(self) -> int:
        """Blocks after which the pattern of dense and sparse repeats."""
        if self.switch is None or self.switch.has_named_layers:
            return 1
        return self.switch.every

    @property
    def scanned_period(self) -> int | None:
        """Blocks of the period whose repeats are stacked; None where layers are unrolled."""
        return self.period if self.scan_layers else None

    @property
    def can_be_scanned(self) -> bool:
        """Whether `scan_layers` may be True: blocks repeat one pattern and share their bias."""
        has_named_layers = self.switch is not None and self.switch.has_named_layers
        return not (has_named_layers or self.relative_bias_per_layer)

    @property
    def has_plain_scores(self) -> bool:
        """Whether scores are products of queries and keys alone, in one causal stack."""
        has_bias = self.has_relative_bias or self.has_untied_positions
        return not (self.is_encoder_decoder or has_bias)

    @property
    def may_skip_scores(self) -> bool:
        """Whether training may run flash attention that supports only causal masks."""
        return self.training_attention in ("splash", "auto") and self.has_plain_scores

    def num_logit_parts(self, tokens: int) -> int:
        """Number of equal parts of a device's tokens in the loss, for fewer logits at a time.

        Each part adds to the gradient `[D, V]` of the logits' matrix: with fewer tokens than
        twice D, that would be most of what is read and written.
        """
        most = tokens // max(LEAST_TOKENS_OF_LOGITS, 2 * self.d_model)
        return next((parts for parts in range(most, 1, -1) if tokens % parts == 0), 1)

    @property
    def num_sparse_layers(self) -> int:
        """Blocks that are sparse, in all stacks together."""
        return sum(self.num_sparse_layers_of(stack) for stack in ("encoder", "decoder"))

    @property
    def sparse_layers_by_stack(self) -> dict[str, list[str]]:
        """Names of the Switch layers of each stack that has some."""
        names = {
            stack: [name for name in self.sparse_layer_names if name.startswith(stack)]
            for stack in ("encoder", "decoder")
        }
        return {stack: layers for stack, layers in names.items() if layers}

    @property
    def sparse_layer_names(self) -> list[str]:
        """`encoder 1`, ...: Switch layers by stack and block, from 0, in the order of metrics.

        Where attention is sparse too, it comes first: `encoder 1 attention`, `encoder 1 ffn`.
        """
        parts = {"ffn": [""], "attention": [" attention"], "both": [" attention", " ffn"]}
        return [
            f"{stack} {layer}{part}"
            for stack in ("encoder", "decoder")
            for layer in range(getattr(self, f"num_{stack}_layers"))
            if self.is_sparse(layer, stack)
            for part in parts[self.switch.sublayers]
        ]

    def num_sparse_layers_of(self, stack: Literal["encoder", "decoder"]) -> int:
        """Blocks of one stack that are sparse."""
        num_layers = getattr(self, f"num_{stack}_layers")
        return sum(self.is_sparse(layer, stack) for layer in range(num_layers))

    def is_sparse(self, layer: int, stack: Literal["encoder", "decoder"] = "encoder") -> bool:
        """Whether block `layer`, from 0, of a stack has Switch layers."""
        if self.switch is None:
            return False
        if self.switch.has_named_layers:
            return layer in getattr(self.switch, f"{stack}_layers")
        if stack == "decoder" and self.switch.stacks == "encoder":
            return False
        return layer % self.period == self.period - 1


def require_one_task(config: ModelConfig) -> None:
    """Raises ValueError if experts are divided among tasks: no input says its task."""
    if config.switch is not None and (tasks := config.switch.router.num_tasks) > 1:
        raise ValueError(
            f"the experts of this model are divided among {tasks} tasks (SOURCE in its "
            "operative_config.gin names them); load those of one: --task=NAME of generate, "
            "score, serve, quantize or export, or switchx.load(..., task=NAME)"
        )


def require_our_blocks(config: ModelConfig, what: str) -> None:
    """Raises ValueError if the module is a user's own, since `what` takes the model apart."""
    require(
        config.build is None,
        f"{type(config).__name__} builds a module of its own, and {what} knows the blocks of "
        "switchx alone; such a model can be trained, evaluated and scored with, on meshes "
        "without stages and buckets",
    )


def model_from_description(description: dict[str, Any], where: str) -> ModelConfig:
    """The configuration that `fields.describe`, or `dataclasses.asdict`, gave this description.

    Args:
        where: the file that it was read from, for messages.

    Raises:
        ValueError: see `fields.from_description`; or a size is one that no model has.
    """
    switch = description.get("switch")
    for part, most in ((description, MOST_OF_MODEL), (switch, MOST_OF_SWITCH)):
        for name in most.keys() & (part.keys() if isinstance(part, dict) else ()):
            value = part[name]
            require(
                not isinstance(value, int | float) or abs(value) <= most[name],
                f"{where}: {name}={value!r:.40}; expected {most[name]} at most: do not use it",
            )
    return from_description(ModelConfig, description, where)
