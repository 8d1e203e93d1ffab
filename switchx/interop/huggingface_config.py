# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's `config.json` of T5's family and Switch Transformers as ModelConfig, and back.

A file from elsewhere: every value is checked before anything is made from it. What the other
side cannot express is refused with the reason, never approximated.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Collection
from typing import Any

from switchx.fields import require
from switchx.interop.t5x import not_t5, unexpected
from switchx.layers.norm import EPSILON
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig


@dataclasses.dataclass(frozen=True)
class T5Kin:
    """A relative of T5, by how it differs from T5.

    Attributes:
        model_type: name of the family in config.json.
        architecture: class of the family in transformers.
        activation: activation of an FFN if config.json has none, by transformers' name.
        ffn: module of an FFN in the names of tensors.
        has_experts: whether its blocks may be Switch layers.
        has_bias_per_layer: whether each block has its own relative bias.
        has_own_head: whether its logits have their own matrix, whatever config.json says.
        unscaled_from: first release of transformers that does not divide tied logits by
            sqrt(D).
    """

    model_type: str
    architecture: str
    activation: str = "relu"
    ffn: str = "DenseReluDense"
    has_experts: bool = False
    has_bias_per_layer: bool = False
    has_own_head: bool = False
    unscaled_from: int | None = None


T5 = T5Kin("t5", "T5ForConditionalGeneration")
MT5 = T5Kin("mt5", "MT5ForConditionalGeneration", activation="gated-gelu", unscaled_from=5)
UMT5 = T5Kin(
    "umt5", "UMT5ForConditionalGeneration", activation="gated-gelu", has_bias_per_layer=True,
    has_own_head=True,
)  # fmt: skip
SWITCH = T5Kin(
    "switch_transformers", "SwitchTransformersForConditionalGeneration", ffn="mlp",
    has_experts=True,
)  # fmt: skip

# Our activation -> their names for it, the written one first.
_ACTIVATIONS = {
    "relu": ("relu",),
    "gelu": ("gelu_new", "gelu_pytorch_tanh"),
    "gelu_exact": ("gelu", "gelu_python"),
    "geglu": ("gated-gelu", "gated-gelu_new", "gated-gelu_pytorch_tanh"),
    "geglu_exact": ("gated-gelu_python",),
    "swiglu": ("gated-silu",),
}
_OURS = {their: our for our, theirs in _ACTIVATIONS.items() for their in theirs}
# Their name -> ours, for values with the same meaning; every file has these.
_SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "d_model",
    "d_ff": "d_ff",
    "d_kv": "d_head",
    "num_heads": "num_heads",
    "num_layers": "num_encoder_layers",
}
# What a hostile file may not exceed; the largest existing model has 30 blocks of 2048 experts.
MOST_BLOCKS = 1000
_MOST_EXPERTS = 1 << 16
_MOST_SIZE = 1 << 31
_MOST_EXPERTS_IN_ALL = 1 << 18
# Number of slots of an expert that is never reached.
_UNLIMITED = 2**31 - 1


def read_config(
    kin: T5Kin, fields: "Fields", tensors: Collection[str] = (), overflow: str = "drop"
) -> ModelConfig:
    """The model that a `config.json` describes.

    The file says whether embeddings are tied, but the tensors decide. For Switch Transformers
    they decide more: released files (switch-c-2048, switch-xxl-128) describe other blocks than
    the tensors have.

    Args:
        tensors: names of all tensors of the checkpoint; empty uses only the file's values.
        overflow: output of a Switch layer for a token whose expert is full: `drop` or another
            value of `RouterConfig.overflow`, see docs/checkpoints_of_others.md.

    Raises:
        ValueError: a value is wrong, or our models cannot do what it asks for.
    """
    fields.only("is_encoder_decoder", True, "T5 has an encoder and a decoder")
    num_layers = fields.whole("num_layers", most=MOST_BLOCKS)
    found = _Found.of(tensors) if kin.has_experts and tensors else None
    config = ModelConfig(
        architecture="encoder_decoder",
        **{ours: fields.whole(theirs) for theirs, ours in _SIZES.items()},
        num_decoder_layers=fields.whole("num_decoder_layers", num_layers, MOST_BLOCKS),
        activation=_activation(fields, kin, found),
        norm_epsilon=fields.number("layer_norm_epsilon", EPSILON),
        relative_bias_per_layer=kin.has_bias_per_layer,
        relative_buckets=fields.whole("relative_attention_num_buckets", 32),
        relative_max_distance=fields.whole("relative_attention_max_distance", 128),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        scale_tied_logits=_scales_tied_logits(fields, kin),
        dropout_rate=fields.number("dropout_rate", 0.1),
    )
    if kin.has_experts:
        if found is not None:
            counts = {f"num_{stack}_layers": n for stack, n in found.num_blocks.items()}
            config = dataclasses.replace(config, **counts)
        switch = _read_switch(fields, config, overflow, found)
        config = dataclasses.replace(config, switch=switch)
    return config


def describe(config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """The content of `config.json`, and what a reader should also know.

    Raises:
        ValueError: transformers has no such model; gives all reasons.
    """
    reasons = not_t5(config) + (_sparse_reasons(config) if config.switch else [])
    require(
        not reasons,
        f"this model cannot be written for transformers: {'; '.join(reasons)}; there are T5, "
        "and Switch Transformers with top-1 routing, to write for",
    )
    kin = SWITCH if config.switch else UMT5 if config.relative_bias_per_layer else T5
    description = {
        "architectures": [kin.architecture],
        "model_type": kin.model_type,
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "num_decoder_layers": config.num_decoder_layers,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_max_distance,
        "dropout_rate": config.dropout_rate,
        "layer_norm_epsilon": config.norm_epsilon,
        # Tied logits are scaled in transformers; otherwise the table is written twice.
        "tie_word_embeddings": config.tie_embeddings and config.scale_tied_logits,
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "torch_dtype": config.precision.params,
    }
    activation = _ACTIVATIONS[config.activation][0]
    require(
        not config.relative_bias_per_layer
        or (kin == UMT5 and not description["tie_word_embeddings"]),
        "this model cannot be written for transformers: relative_bias_per_layer=True is UMT5, "
        "which is dense and has an lm_head of its own",
    )
    if config.switch is None:
        return description | {"feed_forward_proj": activation}, []
    switch_fields, notes = _describe_switch(config)
    return description | {"dense_act_fn": activation} | switch_fields, notes


@dataclasses.dataclass(frozen=True)
class Fields:
    """A JSON object whose values are taken one by one, each with the required type.

    Attributes:
        where: the file, for messages.
    """

    values: dict[str, Any]
    where: str

    def whole(
        self, name: str, default: int | None = None, most: int = _MOST_SIZE, least: int = 1
    ) -> int:
        """A whole number from `least` to `most`."""
        expected = f"a whole number from {least} to {most}"

        def is_right(value) -> bool:
            return type(value) is int and least <= value <= most

        return self._take(name, default, expected, is_right)

    def experts(self, name: str, num_blocks: int, default: int | None = None) -> int:
        """The number of experts in each of `num_blocks` blocks, whose tensors can be listed."""
        count = self.whole(name, default, _MOST_EXPERTS)
        require(
            count * num_blocks <= _MOST_EXPERTS_IN_ALL,
            f"{self.where}: {name}={count} in each of {num_blocks} blocks; expected "
            f"{_MOST_EXPERTS_IN_ALL} in all at most",
        )
        return count

    def number(self, name: str, default: float | None = None) -> float:
        def is_number(value) -> bool:
            # An int is compared exactly; float() of a larger int overflows.
            return type(value) in (int, float) and abs(value) <= sys.float_info.max

        return float(self._take(name, default, "a number", is_number))

    def flag(self, name: str, default: bool) -> bool:
        return self._take(name, default, "true or false", lambda value: type(value) is bool)

    def text(self, name: str, default: str) -> str:
        return self._take(name, default, "a text", lambda value: isinstance(value, str))

    def only(self, name: str, expected, reason: str) -> None:
        """Requires that a value, if there is one, is `expected`."""
        value = self.values.get(name)
        require(
            value is None or (value == expected and type(value) is type(expected)),
            f"{self.where}: {name}={shown(value)} cannot be converted: {reason}; expected "
            f"{shown(expected)}",
        )

    def activation(self, name: str, default: str) -> str:
        """Our name of the activation that is named there."""
        return self.our_activation(self.text(name, default))

    def our_activation(self, theirs: str) -> str:
        require(
            theirs in _OURS,
            f"{self.where}: the activation {shown(theirs)} cannot be converted; expected one "
            f"of {', '.join(_OURS)}",
        )
        return _OURS[theirs]

    def _take(self, name: str, default, expected: str, is_right: Callable[[Any], bool]):
        value = self.values.get(name)
        value = default if value is None else value
        require(is_right(value), f"{self.where}: {name}={shown(value)}; expected {expected}")
        return value


def shown(value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _activation(fields: Fields, kin: T5Kin, found: "_Found | None" = None) -> str:
    """The FFN's activation; all names that a file has for it have to agree."""
    name = fields.text("feed_forward_proj", kin.activation)
    if kin.has_experts:
        # As transformers: dense_act_fn, where "gelu" is GELU's exact form.
        plain = fields.text("dense_act_fn", name if "gated" in name else "relu")
        is_gated = "gated" in plain + name or fields.flag("is_gated_act", False)
        is_gated = is_gated if found is None else found.is_gated
        if not is_gated:
            name = plain.removeprefix("gated-")
        elif plain.startswith("gated-"):
            name = plain
        else:
            name = "gated-gelu_python" if plain == "gelu" else f"gated-{plain}"
    ours = fields.our_activation(name)
    if not kin.has_experts:
        is_gated = name.startswith("gated-")
        plain = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
        fields.only("is_gated_act", is_gated, f"feed_forward_proj={name!r} says otherwise")
        fields.only("dense_act_fn", plain, f"feed_forward_proj={name!r} says otherwise")
    return ours


def _scales_tied_logits(fields: Fields, kin: T5Kin) -> bool:
    """Whether logits from the embedding table are divided by sqrt(D)."""
    is_tied = fields.flag("tie_word_embeddings", True)
    if kin.unscaled_from is not None:
        version = fields.text("transformers_version", "4").partition(".")[0]
        return is_tied and not (version.isdecimal() and int(version) >= kin.unscaled_from)
    # transformers 5 says that these embeddings are tied, whether or not they are.
    return is_tied if kin.has_experts else fields.flag("scale_decoder_outputs", is_tied)


_BLOCK = re.compile(r"(encoder|decoder)\.block\.([0-9]{1,4})\.layer\.[0-9]\.(.*)")


@dataclasses.dataclass(frozen=True)
class _Found:
    """The facts about a Switch Transformer that its tensors' names determine."""

    num_blocks: dict[str, int]
    sparse: dict[str, tuple[int, ...]]
    is_gated: bool
    has_router_bias: bool

    @classmethod
    def of(cls, tensors: Collection[str]) -> "_Found":
        blocks = {"encoder": {-1}, "decoder": {-1}}
        sparse = {"encoder": set(), "decoder": set()}
        rests = set()
        for match in filter(None, map(_BLOCK.fullmatch, tensors)):
            stack = match[1]
            number = int(match[2])
            rest = match[3]
            blocks[stack].add(number)
            if rest == "mlp.router.classifier.weight":
                sparse[stack].add(number)
            rests.add(rest)
        return cls(
            {stack: max(1, max(numbers) + 1) for stack, numbers in blocks.items()},
            {stack: tuple(sorted(numbers)) for stack, numbers in sparse.items()},
            any(rest.endswith("wi_0.weight") for rest in rests),
            "mlp.router.classifier.bias" in rests,
        )


def _read_switch(
    fields: Fields, config: ModelConfig, overflow: str, found: _Found | None
) -> SwitchConfig | None:
    has_bias = fields.flag("router_bias", False)
    fields.only("router_dtype", "float32", "routers run in float32 (selective precision)")
    blocks = []
    for stack in ("encoder", "decoder"):
        name = f"num_sparse_{stack}_layers"
        is_none = fields.values.get(name) == 0
        count = 0 if is_none else fields.whole(name, 3, MOST_BLOCKS)
        stated = sparse_blocks(getattr(config, f"num_{stack}_layers"), count)
        blocks.append(stated if found is None else found.sparse[stack])
    if not any(blocks):
        return None
    return SwitchConfig(
        num_experts=fields.experts("num_experts", sum(map(len, blocks)), 8),
        expert_capacity=fields.whole("expert_capacity", 64),
        dispatcher="dropless" if overflow == "dropless" else "gather",
        router=RouterConfig(
            jitter=fields.number("router_jitter_noise", 0.01),
            overflow=overflow,
            padding="counted",
            has_logit_bias=has_bias if found is None else found.has_router_bias,
        ),
        **switch_layers(config, *blocks),
    )


def _describe_switch(config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    switch, router, notes = config.switch, config.switch.router, []
    capacity = switch.expert_capacity
    if router.overflow == "dropless" or capacity is None:
        capacity = _UNLIMITED
    if router.overflow == "drop" and switch.expert_capacity is None:
        notes.append(
            "transformers counts an expert's slots for each sequence, switchx here by a "
            f"capacity factor ({switch.eval_capacity_factor} in evaluation) in groups of up to "
            f"{switch.group_size} tokens: the export drops nothing. Set expert_capacity in its "
            "config.json for a limit"
        )
    if router.overflow == "identity":
        notes.append(
            "a token whose expert is full keeps its input here, as in transformers up to 4.51; "
            "later releases drop it"
        )
    return {
        "num_experts": switch.num_experts,
        "expert_capacity": capacity,
        **{
            f"num_sparse_{stack}_layers": num_sparse(num_layers, blocks)
            for stack, num_layers, blocks in _sparse_blocks(config)
        },
        "router_bias": router.has_logit_bias,
        "router_dtype": "float32",
        "router_jitter_noise": router.jitter if router.exploration == "jitter" else 0.0,
    }, notes


def _sparse_reasons(config: ModelConfig) -> list[str]:
    switch, router = config.switch, config.switch.router
    reasons = unexpected(
        ("SwitchConfig.d_ff", switch.d_ff or config.d_ff, config.d_ff),
        ("RouterConfig.kind", router.kind, "top_k"),
        ("RouterConfig.num_selected", router.num_selected, 1),
        ("Precision.router", config.precision.router, "float32"),
    )
    if router.overflow == "reroute":
        reasons.append("RouterConfig.overflow='reroute' (expected 'drop' or 'dropless')")
    if config.is_gated:
        reasons.append(
            f"activation={config.activation!r} with experts (its experts have one input "
            "matrix: expected 'relu' or 'gelu')"
        )
    return reasons + [
        f"the sparse blocks {', '.join(map(str, blocks))} of the {num_layers} of the {stack} "
        "(expected 1 and every n-th after it, all or none)"
        for stack, num_layers, blocks in _sparse_blocks(config)
        if num_layers and num_sparse(num_layers, blocks) is None
    ]


def _sparse_blocks(config: ModelConfig) -> list[tuple[str, int, tuple[int, ...]]]:
    """Each stack, the number of its blocks, and which of them are sparse."""
    counts = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    return [
        (stack, count, tuple(i for i in range(count) if config.is_sparse(i, stack)))
        for stack, count in counts.items()
    ]


def sparse_blocks(num_layers: int, num_sparse: int) -> tuple[int, ...]:
    """Numbers of the sparse blocks that transformers derives from its two counts.

    Its step is `num_layers // num_sparse`, and block 1 and every step-th after it are sparse:
    1, 5, 9 of 12 with 3. A step of 1 makes all sparse. If none is asked for, the step is
    `num_layers`, and block 1 is still sparse.
    """
    step = num_layers // num_sparse if num_sparse else num_layers
    if step == 0:
        return ()
    return tuple(i for i in range(num_layers) if step == 1 or i % step == 1)


def num_sparse(num_layers: int, blocks: tuple[int, ...]) -> int | None:
    """A count from which transformers makes these sparse blocks, or None if there is none."""
    counts = [len(blocks), *range(num_layers + 2)]  # above num_layers, none is sparse
    return next((n for n in counts if sparse_blocks(num_layers, n) == blocks), None)


def switch_layers(
    config: ModelConfig, encoder: tuple[int, ...], decoder: tuple[int, ...]
) -> dict[str, Any]:
    """Fields of a SwitchConfig for these sparse blocks: `every` if they form a pattern."""
    counts = (config.num_encoder_layers, config.num_decoder_layers)
    for every in range(1, min(counts) + 1):
        ours, theirs = (tuple(range(every - 1, count, every)) for count in counts)
        divides = not any(count % every for count in counts)
        if divides and encoder == ours and decoder in (theirs, ()):
            return {"every": every, "stacks": "all" if decoder else "encoder"}
    return {"encoder_layers": encoder, "decoder_layers": decoder}
