# SPDX-License-Identifier: Apache-2.0
"""What Switch layers are: how many experts, in which blocks, and how tokens reach them."""

import dataclasses
import itertools
from typing import Literal

from switchx.models.require import require, require_choice
from switchx.models.router_config import RouterConfig

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
class SwitchConfig:
    """Switch layers: how many experts, in which blocks, and how tokens reach them.

    Attributes:
        num_experts: E, in every sparse block.
        every: the last block of each run of `every` blocks is sparse; 1 makes all sparse.
        stacks: whose blocks: `all`, or those of the `encoder` alone.
        encoder_layers, decoder_layers: numbers of the sparse blocks, from 0, ascending, where
            they are others than `every` and `stacks` say (Hugging Face's 1, 5, 9 of 12); both
            or neither.
        sublayers: what is sparse in a sparse block: its `ffn`, its self-`attention` (Switch,
            appendix A) or `both`.
        attention_experts: experts of a Switch attention are `linear` maps, or each an `ffn`.
        capacity_factor: slots of an expert over its even share of tokens, in training
            (section 2.2, eq. 3); `eval_capacity_factor` where nothing is trained.
        min_capacity: fewest slots an expert has.
        expert_capacity: slots that an expert has for each row of a batch, whatever the row's
            length, where rows are routed apart as Hugging Face does; then no factor, no
            `min_capacity` and no `group_size` counts. None counts slots by factor and group.
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
    encoder_layers: tuple[int, ...] | None = None
    decoder_layers: tuple[int, ...] | None = None
    sublayers: Literal["ffn", "attention", "both"] = "ffn"
    attention_experts: Literal["linear", "ffn"] = "linear"
    capacity_factor: float = 1.25
    eval_capacity_factor: float = 2.0
    min_capacity: int = 4
    expert_capacity: int | None = None
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
        require(
            self.expert_capacity is None or self.expert_capacity >= 1,
            f"SwitchConfig.expert_capacity={self.expert_capacity}; use a whole number of at "
            "least 1, or None for slots by capacity_factor",
        )
        self._check_layers()
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
        require(
            self.router.overflow != "identity" or self.sublayers == "ffn",
            f"RouterConfig.overflow='identity' with sublayers={self.sublayers!r}: only a "
            "feed-forward expert has an output like its input; use sublayers='ffn', or "
            "overflow='drop'",
        )
        tried = self.router.max_rounds if self.router.overflow == "reroute" else 1
        for name, count in (("num_selected", self.router.num_selected), ("max_rounds", tried)):
            require(
                count <= self.num_experts,
                f"RouterConfig.{name}={count} with num_experts={self.num_experts}: a token "
                f"meets an expert once; use {name}={self.num_experts} at most",
            )

    def _check_layers(self) -> None:
        require(
            (self.encoder_layers is None) == (self.decoder_layers is None),
            f"SwitchConfig.encoder_layers={self.encoder_layers} with decoder_layers="
            f"{self.decoder_layers}; give both, () for a stack without sparse blocks",
        )
        if not self.has_named_layers:
            return
        for name in ("encoder_layers", "decoder_layers"):
            layers = tuple(getattr(self, name))
            object.__setattr__(self, name, layers)  # JSON gives a list, which is no key
            require(
                all(a < b for a, b in itertools.pairwise((-1, *layers))),
                f"SwitchConfig.{name}={layers}; use numbers of blocks from 0, ascending",
            )
        require(
            bool(self.encoder_layers or self.decoder_layers),
            "SwitchConfig.encoder_layers=() with decoder_layers=(); use "
            "ModelConfig.switch=None for a dense model",
        )
        require(
            self.stacks == "all",
            f"SwitchConfig.stacks={self.stacks!r} with encoder_layers={self.encoder_layers}; "
            "use stacks='all', and decoder_layers=() for none in the decoder",
        )

    @property
    def has_named_layers(self) -> bool:
        """Whether the sparse blocks are listed, and not every `every`-th one."""
        return self.encoder_layers is not None

    @property
    def has_ffn(self) -> bool:
        """Whether the FFN of a sparse block is a Switch layer."""
        return self.sublayers in ("ffn", "both")

    @property
    def has_attention(self) -> bool:
        """Whether the self-attention of a sparse block is a Switch layer."""
        return self.sublayers in ("attention", "both")
