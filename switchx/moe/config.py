# SPDX-License-Identifier: Apache-2.0
"""Frozen configurations of routers and Switch layers, refused if they contradict themselves.

Fedus et al. 2021 (arXiv:2101.03961); papers on individual options are cited beside them.
"""

import dataclasses
import itertools
from typing import Literal

from switchx.fields import (
    at_evaluation,
    at_resume,
    check_choices,
    require,
    require_above_zero,
    require_at_least,
    require_below_one,
)
from switchx.moe.dispatcher_traits import DISPATCHERS

BIAS_RULES = ("sign", "sign_centered", "proportional", "quantile", "quantile_logits")

_REASONS = {
    "expert_choice": "the experts choose, each as many tokens as it has slots",
    "hash": "a token's id alone decides, and there is no router",
}


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Which experts a token goes to, in which order, and what happens where one is full.

    Attributes:
        kind: the side that chooses. `top_k`: each token its most probable experts (Fedus et al.
            2021, arXiv:2101.03961; k = 2: Lepikhin et al. 2020, arXiv:2006.16668).
            `expert_choice`: each expert its most probable tokens (Zhou et al. 2022,
            arXiv:2202.09368), in encoders only. `hash`: a fixed hash of the token's id (Roller
            et al. 2021, arXiv:2106.04426); no router, every gate is 1. `task`: as `top_k`, but
            among the experts of the row's task (SE-MoE, Shen et al. 2022, arXiv:2205.10034,
            section 4.1): experts are divided evenly among `num_tasks`.
        num_tasks: number of tasks that the experts are divided among with kind `task`, in the
            order of the mixture, whose `rows` say which row belongs to which task.
        num_selected: k, the number of experts that a token chooses.
        score: function of the logits by which experts are chosen and gated: `softmax` over all
            experts; `sigmoid` of each (DeepSeek-V3, arXiv:2412.19437, eq. 15); `sqrt_softplus`,
            sqrt(log(1 + exp(z))) (DeepSeek-V4). Balance loss, entropy and gate mass use the
            scores divided by their sum, which are probabilities.
        gate: `softmax`, the probability of each chosen expert among all experts (Switch);
            `score`, the same for the other scores; `normalized`, the score divided by the sum
            over the chosen ones (GShard).
        gate_scale: factor of the gates (DeepSeek-V3's routed scaling factor, 2.5).
        num_expert_groups: number of equal groups of neighbouring experts, such as those of a
            node; 1 makes no groups.
        expert_groups_per_token: largest number of groups that a token's experts come from:
            those with the largest sums of their two best biased scores (DeepSeek-V3, section
            2.1.2; its code sums two).
        priority: order in which choices get slots: by `position` in the group, or by `gate`,
            the most confident token first (batch-prioritized routing, Riquelme et al. 2021,
            arXiv:2106.05974). First choices come before second ones either way.
        exploration: noise in training (Switch, appendix C): `none`; `jitter` multiplies the
            router's inputs by U[1-jitter, 1+jitter]; `sample` draws experts from the softmax
            with `temperature`; `dropout` drops `input_dropout_rate` of the router's inputs.
        jitter, temperature, input_dropout_rate: settings of these three.
        overflow: treatment of a token whose expert is full. `drop` leaves the token to the
            residual connection; `reroute` sends it to its next expert that has a slot
            (No-Token-Left-Behind, Switch, appendix B); `dropless` gives every expert as many
            slots as the group has tokens; `identity` adds the layer's input times the gate, as
            transformers did up to 4.51.
        max_rounds: number of experts that a token tries with `reroute`, the first one included.
        balance_counts: choices that the balance loss counts: each token's `first_choice`, all
            k of them without rerouting; with `reroute` also `all_rounds`, each token's
            `max_rounds` best experts (Mesh-TensorFlow); `unbiased`, its k best experts by score
            alone, without bias, expert groups and the draw of `sample`, but with the noise of
            the router's inputs (DeepSeek-V3, eq. 18).
        balance_scope: tokens that the balance loss compares: the tokens of each `group` or of
            each `sequence`, packed ones separately (DeepSeek-V3, eq. 17-20), averaged over
            these; or of the whole `batch` together, microbatches included (Qiu et al. 2025,
            arXiv:2501.11873).
        balance_load: load that the loss of the `batch` compares with: the `current` batch's,
            which a first forward pass counts if there are microbatches; or the
            `previous_step`'s, an approximation kept as a parameter, without that pass.
        bias_update_rate: amount by which the load-balancing bias moves after every training
            step (Wang et al. 2024, arXiv:2408.15664: 0.001); with a quantile rule, the share
            of the way to the new bias, 1 as published. The bias is added to the scores for
            choosing experts, not for gating. None means no bias; with 0 it stays as it is.
            If the batch gives the choices (`replay`), it balances the router's own.
        bias_rule: rule by which the bias moves; the load n is that of the whole batch. `sign`:
            rate times sign(mean n - n_e). `sign_centered`: that minus its mean over the experts
            (torchtitan). `proportional`: rate times (mean n - n_e) over the batch's tokens.
            `quantile`, `quantile_logits`: see `moe/quantile_balance.py`.
        padding: treatment of padding. `ignored`: neither routed nor counted. `counted`: routed
            and counted as tokens are, for parity with Hugging Face's and flaxformer's Switch
            models.
        has_logit_bias: whether a learned bias is added to the router's logits.
        counts_merged: whether an expert e counts as the m_e experts that were merged into it
            (`models/reshape.py`): its probability is `exp(z_e) / sum_j m_j exp(z_j)`, the
            probability of one of them. log m is a parameter.
        num_copies: number of copies of each expert among the experts, E / num_copies apart; a
            token chooses at most one of them, the most probable (`models/upcycle.py`).
        replay: whether a batch may say which experts its tokens go to, by its features
            `encoder_replay` and `decoder_replay` (`moe/replay.py`; Ma et al. 2025,
            arXiv:2510.11370). Training requires these; elsewhere, the routers choose for a
            batch without them.
        replay_drops: whether a replayed choice may find its expert full; otherwise replay needs
            `overflow="dropless"`, since text generation drops none.
    """

    kind: Literal["top_k", "expert_choice", "hash", "task"] = "top_k"
    num_tasks: int = 1
    num_selected: int = 1
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    gate: Literal["softmax", "score", "normalized"] = "softmax"
    gate_scale: float = 1.0
    num_expert_groups: int = 1
    expert_groups_per_token: int = 1
    priority: Literal["position", "gate"] = at_evaluation("position")
    exploration: Literal["none", "jitter", "sample", "dropout"] = at_evaluation("jitter")
    jitter: float = at_evaluation(0.01)
    temperature: float = at_evaluation(1.0)
    input_dropout_rate: float = at_evaluation(0.1)
    overflow: Literal["drop", "reroute", "dropless", "identity"] = at_evaluation("drop")
    max_rounds: int = at_evaluation(4)
    balance_counts: Literal["first_choice", "all_rounds", "unbiased"] = at_evaluation(
        "first_choice"
    )
    balance_scope: Literal["group", "sequence", "batch"] = at_evaluation("group")
    balance_load: Literal["current", "previous_step"] = "current"
    bias_update_rate: float | None = None
    bias_rule: Literal[*BIAS_RULES] = "sign"
    padding: Literal["ignored", "counted"] = at_evaluation("ignored")
    has_logit_bias: bool = False
    counts_merged: bool = False
    num_copies: int = 1
    replay: bool = at_evaluation(False)
    replay_drops: bool = at_evaluation(False)

    def __post_init__(self):
        check_choices(self)
        require_at_least(self, 1, "num_selected", "max_rounds", "num_tasks", "num_copies")
        require_at_least(self, 0, "bias_update_rate")
        require_below_one(self, "jitter", "input_dropout_rate")
        require_at_least(self, 1, "num_expert_groups", "expert_groups_per_token")
        require_above_zero(self, "temperature", "gate_scale")
        require(
            (self.kind == "task") == (self.num_tasks > 1),
            f"RouterConfig.num_tasks={self.num_tasks} with kind={self.kind!r}; use two tasks "
            "or more with kind='task', and 1 with all others",
        )
        if self.kind in ("top_k", "task"):
            self._check_top_k()
        else:
            self._check_other_kinds()
        self._check_scores()
        self._check_balance()
        self._check_replay()

    def _check_scores(self) -> None:
        require(
            self.gate in ("normalized", self.undivided_gate),
            f"RouterConfig.gate={self.gate!r} with score={self.score!r}; use gate="
            f"{self.undivided_gate!r}, or gate='normalized'",
        )
        require(
            self.score == "softmax" or not self.counts_merged,
            f"RouterConfig.counts_merged=True with score={self.score!r}: only a softmax can "
            "count an expert several times; use counts_merged=False, or score='softmax' (in "
            "`switchx reshape` and `deploy` --reduce=drop or --upcycle=more_choices)",
        )
        require(
            self.expert_groups_per_token <= self.num_expert_groups,
            f"RouterConfig.expert_groups_per_token={self.expert_groups_per_token} with "
            f"num_expert_groups={self.num_expert_groups}; use at most {self.num_expert_groups}",
        )

    def _check_balance(self) -> None:
        require(
            self.balance_load == "current" or self.balance_scope == "batch",
            f"RouterConfig.balance_load={self.balance_load!r} with balance_scope="
            f"{self.balance_scope!r}, whose load every microbatch knows; use "
            "balance_load='current', or balance_scope='batch'",
        )
        require(
            self.balance_scope != "sequence"
            or (self.padding == "ignored" and self.overflow != "reroute"),
            f"RouterConfig.balance_scope='sequence' with overflow={self.overflow!r} and "
            f"padding={self.padding!r}: it counts what each token of a sequence chose; use "
            "overflow='drop' and padding='ignored', or balance_scope='group'",
        )
        require(
            self.has_bias or self.bias_rule == "sign",
            f"RouterConfig.bias_rule={self.bias_rule!r} with bias_update_rate=None: there is "
            f"no bias; use bias_update_rate={1.0 if self.has_quantiles else 0.001}",
        )
        if not self.has_quantiles:
            return
        rule = f"RouterConfig.bias_rule={self.bias_rule!r}"
        require(
            self.bias_update_rate <= 1,
            f"{rule} with bias_update_rate={self.bias_update_rate}, a share of the way to the "
            "new bias; use 1.0, which takes it as it is, or less",
        )
        require(
            self.num_expert_groups == 1 and self.num_copies == 1,
            f"{rule} with num_expert_groups={self.num_expert_groups} and num_copies="
            f"{self.num_copies}: it balances choices among all experts; use "
            "bias_rule='sign_centered', or 1 of both",
        )
        require(
            self.overflow != "reroute",
            f"{rule} with overflow='reroute': the bias balances first choices and rerouting "
            "others; use overflow='drop'",
        )
        require(
            self.bias_rule == "quantile_logits" or self.score != "sqrt_softplus",
            f"{rule} with score='sqrt_softplus': its histogram is of scores from 0 to 1; use "
            "bias_rule='quantile_logits', or score='sigmoid'",
        )

    def _check_replay(self) -> None:
        require(
            self.replay or not self.replay_drops,
            "RouterConfig.replay_drops=True with replay=False: nothing is replayed; use "
            "replay=True, or replay_drops=False",
        )
        if not self.replay:
            return
        require(
            self.kind != "task",
            "RouterConfig.replay=True with kind='task': a row's task says which experts it "
            "has; use replay=False, or kind='top_k'",
        )
        require(
            self.overflow != "reroute",
            "RouterConfig.replay=True with overflow='reroute': a token would leave the expert "
            "that is given for it; use overflow='dropless'",
        )
        require(
            self.overflow == "dropless" or self.replay_drops,
            f"RouterConfig.replay=True with overflow={self.overflow!r}: full experts would "
            "drop tokens that may have kept theirs in the record; use overflow='dropless', or "
            "replay_drops=True, as for a record with this capacity",
        )

    def _check_top_k(self) -> None:
        require(
            self.gate != "normalized" or self.num_selected > 1,
            "RouterConfig.gate='normalized' with num_selected=1: the gate would be 1 whatever "
            "the router says, and the router would get no gradient; use gate="
            f"{self.undivided_gate!r}, or num_selected=2",
        )
        require(
            self.overflow != "reroute" or self.num_selected == 1,
            f"RouterConfig.overflow='reroute' with num_selected={self.num_selected}: a token "
            "is rerouted to one expert; use num_selected=1, or overflow='drop'",
        )
        require(
            self.balance_counts != "all_rounds" or self.overflow == "reroute",
            f"RouterConfig.balance_counts={self.balance_counts!r} with "
            f"overflow={self.overflow!r}: there are no rounds to count; use "
            "balance_counts='first_choice', or overflow='reroute'",
        )
        require(
            self.num_expert_groups == 1 or self.kind != "task" and self.num_copies == 1,
            f"RouterConfig.num_expert_groups={self.num_expert_groups} with kind={self.kind!r} "
            f"and num_copies={self.num_copies}, which limit a token's experts in another way; "
            "use num_expert_groups=1, or kind='top_k' with num_copies=1",
        )
        require(
            self.bias_update_rate is None or self.kind != "task",
            f"RouterConfig.bias_update_rate={self.bias_update_rate} with kind='task': the load "
            "of tasks is fixed by their rows; use bias_update_rate=None",
        )
        require(
            self.bias_update_rate is None or self.exploration != "sample",
            f"RouterConfig.bias_update_rate={self.bias_update_rate} with exploration='sample': "
            "the bias is added to probabilities that are compared, not drawn from; use "
            "bias_update_rate=None, or exploration='jitter'",
        )

    def _check_other_kinds(self) -> None:
        """Refuses settings without meaning if tokens do not choose by router probabilities."""
        is_hash = self.kind == "hash"
        only = {
            "num_selected": (1,),
            "score": ("softmax",),
            "gate": ("softmax",),
            "gate_scale": (1.0,),
            "num_expert_groups": (1,),
            "priority": ("position",),
            "balance_counts": ("first_choice",),
            "balance_scope": ("group", "batch"),
            "balance_load": ("current",),
            "bias_update_rate": (None,),
            "num_copies": (1,),
            "overflow": ("drop", "dropless") if is_hash else ("drop",),
            "exploration": ("none",) if is_hash else ("none", "jitter", "dropout"),
            "has_logit_bias": (False,) if is_hash else (False, True),
            "counts_merged": (False,) if is_hash else (False, True),
            "replay": (False,),
        }
        for name, allowed in only.items():
            value = getattr(self, name)
            require(
                value in allowed,
                f"RouterConfig.{name}={value!r} does not go with kind={self.kind!r}: "
                f"{_REASONS[self.kind]}; use {name}={' or '.join(map(repr, allowed))}, or "
                "kind='top_k'",
            )

    @property
    def has_weights(self) -> bool:
        """Whether there is a router at all, to learn and to explore."""
        return self.kind != "hash"

    @property
    def undivided_gate(self) -> str:
        """The name of the gate that is the score itself."""
        return "softmax" if self.score == "softmax" else "score"

    @property
    def has_bias(self) -> bool:
        return self.bias_update_rate is not None

    @property
    def has_quantiles(self) -> bool:
        """Whether the bias is computed from quantiles of the scores."""
        return self.bias_rule in ("quantile", "quantile_logits")

    @property
    def counts_first(self) -> bool:
        """Whether the balance loss of a microbatch needs the load of the whole batch."""
        return (self.balance_scope, self.balance_load) == ("batch", "current")

    @property
    def keeps_load(self) -> bool:
        """Whether layers keep the load of the previous step."""
        return self.balance_load == "previous_step"

    @property
    def has_choosing_experts(self) -> bool:
        """Whether experts choose tokens."""
        return self.kind == "expert_choice"

    @property
    def has_margin(self) -> bool:
        """Whether tokens choose by scores that are learned."""
        return self.kind in ("top_k", "task")

    @property
    def has_drop_floor(self) -> bool:
        """Whether a balanced router's drops follow `load_evenness.expected_drops`."""
        return self.kind in ("top_k", "hash") and self.overflow != "reroute"


@dataclasses.dataclass(frozen=True)
class SwitchConfig:
    """Switch layers: how many experts, in which blocks, and how tokens reach them.

    Attributes:
        num_experts: number of experts, E, in every sparse block.
        every: period of sparse blocks: the last block of each run of `every` blocks is sparse;
            1 makes all sparse.
        stacks: stacks that have sparse blocks: `all`, or the `encoder` alone.
        encoder_layers, decoder_layers: indices of the sparse blocks, from 0, ascending, if not
            those of `every` and `stacks` (Hugging Face's 1, 5, 9 of 12); both or neither.
        sublayers: sparse sublayers of a sparse block: its `ffn`, its self-`attention` (Switch,
            appendix A) or `both`.
        attention_experts: kind of the experts of a Switch attention: `linear` maps or `ffn`s.
        capacity_factor: slots of an expert over its even share of tokens, in training
            (section 2.2, eq. 3).
        eval_capacity_factor: the same outside of training.
        min_capacity: minimum number of slots of an expert.
        expert_capacity: slots that an expert has for each row of a batch, whatever the row's
            length, with rows routed separately, as in Hugging Face; the factors,
            `min_capacity` and `group_size` are then ignored. None uses factor and group.
        capacity_rounding: `up` (with a factor of 1, perfectly balanced tokens all have a
            slot), `down` (Mesh-TensorFlow) or `nearest`, halves to the even number
            (flaxformer).
        group_size: largest number of tokens routed together; groups never depend on devices.
        d_ff: F of an expert; None takes the model's.
        shared_d_ff: F of a dense FFN that every token passes through besides its expert (a
            residual or shared expert: Rajbhandari et al. 2022, arXiv:2201.05596; Dai et al.
            2024, arXiv:2401.06066); None for no such FFN.
        shared_gate: whether the shared expert's output is multiplied by sigmoid(x g) of a
            vector g `[D]` (Qwen1.5-MoE).
        expert_dropout_rate: dropout inside the experts (section 2.4, Table 4); None takes
            the model's `dropout_rate`.
        expert_bias: whether the experts have biases.
        dispatcher: the way in which tokens reach their experts; all give the same numbers:
            `gather` (the default), `einsum` (one-hot, the readable oracle), or another of
            `DISPATCHERS`; docs/dispatchers.md says when to use which. For `auto`, which the
            gin files of meshes set, a job takes `dispatchers.suited_dispatcher`.
        buffer_factor: buffer of the sliced dispatchers: tokens that a device has room for, over
            its even share; a device with more of them computes the layer again with room for
            all. None always has room for all.
        exchange_parts: number of parts in which `all_to_all` and `hierarchical` send the slots,
            so that one part travels while another is in the experts; with dropout in the
            experts, each part has masks of its own. 1 sends all at once.
        num_replicas: number of additional expert slots, which training fills with copies of
            the busiest experts, chosen at every evaluation by the load measured there
            (`moe/expert_copies.py`); experts and copies together divide over the devices that
            have experts. Outside of training there are none.
        router_init_scale: variance scale of the router; the paper scales it by 0.1 like all
            weights, flaxformer used normal(0.02) and published checkpoints that way.
        recorded_places: number of places in each evaluation's batches whose routing training
            keeps in `routing/` (at least the whole groups of one batch); see
            `switchx/routing_record.py`.
        router: choice of the experts of a token, and treatment of a full expert.
    """

    num_experts: int
    every: int = 2
    stacks: Literal["all", "encoder"] = "all"
    encoder_layers: tuple[int, ...] | None = None
    decoder_layers: tuple[int, ...] | None = None
    sublayers: Literal["ffn", "attention", "both"] = "ffn"
    attention_experts: Literal["linear", "ffn"] = "linear"
    capacity_factor: float = at_evaluation(1.25)
    eval_capacity_factor: float = at_evaluation(2.0)
    min_capacity: int = at_evaluation(4)
    expert_capacity: int | None = at_evaluation(None)
    capacity_rounding: Literal["up", "down", "nearest"] = at_evaluation("up")
    group_size: int = at_evaluation(8192)
    d_ff: int | None = None
    shared_d_ff: int | None = None
    shared_gate: bool = False
    expert_dropout_rate: float | None = at_evaluation(None)
    expert_bias: bool = False
    dispatcher: Literal["auto", *DISPATCHERS] = at_resume("gather")
    buffer_factor: float | None = at_resume(None)
    exchange_parts: int = at_resume(1)
    num_replicas: int = at_resume(0)
    router_init_scale: float = at_evaluation(0.1)
    recorded_places: int = at_evaluation(8192)
    router: RouterConfig = RouterConfig()

    @property
    def num_ranks(self) -> int:
        """R, the number of ranked experts that routing records: all that a token may try."""
        router = self.router
        tried = router.max_rounds if router.overflow == "reroute" else router.num_selected
        return min(tried, self.num_experts)

    def __post_init__(self):
        check_choices(self)
        require_at_least(self, 1, "num_experts", "every", "min_capacity", "group_size")
        require_at_least(self, 1, "expert_capacity", "d_ff", "shared_d_ff", "exchange_parts")
        require_at_least(self, 1, "recorded_places")
        require_at_least(self, 0, "num_replicas")
        require_above_zero(self, "capacity_factor", "eval_capacity_factor")
        require_above_zero(self, "buffer_factor", "router_init_scale")
        require_below_one(self, "expert_dropout_rate")
        self._check_layers()
        self._check_choices()
        require(
            self.shared_d_ff is None or self.has_ffn,
            f"SwitchConfig.shared_d_ff={self.shared_d_ff} with sublayers={self.sublayers!r}; "
            "use it where FFNs are sparse, or None",
        )
        self._check_unread()
        require(
            not self.shared_gate or self.shared_d_ff is not None,
            "SwitchConfig.shared_gate=True with shared_d_ff=None, without a shared expert; "
            "give its size, or use shared_gate=False",
        )
        require(
            not self.has_attention or self.dispatcher in ("auto", "gather", "einsum"),
            f"SwitchConfig.dispatcher={self.dispatcher!r} with sublayers={self.sublayers!r}: "
            "experts in attention are dispatched by gather or einsum; use one of them, or "
            "sublayers='ffn'",
        )
        require(
            self.exchange_parts == 1
            or (self.dispatcher != "auto" and DISPATCHERS[self.dispatcher].exchanges_slots),
            f"SwitchConfig.exchange_parts={self.exchange_parts} with dispatcher="
            f"{self.dispatcher!r}, which exchanges no slots; use 1, or dispatcher='all_to_all' "
            "or 'hierarchical'",
        )
        require(
            not (self.num_replicas and self.has_attention),
            f"SwitchConfig.num_replicas={self.num_replicas} with sublayers={self.sublayers!r}: "
            "experts in attention have no copies; use num_replicas=0, or sublayers='ffn'",
        )
        require(
            self.router.overflow != "identity" or self.sublayers == "ffn",
            f"RouterConfig.overflow='identity' with sublayers={self.sublayers!r}: only a "
            "feed-forward expert has an output like its input; use sublayers='ffn', or "
            "overflow='drop'",
        )
        require(
            not (self.router.replay and self.has_attention),
            f"RouterConfig.replay=True with sublayers={self.sublayers!r}: choices are given "
            "for feed-forward layers alone; use replay=False, or sublayers='ffn'",
        )
        require(
            not (self.num_replicas and self.router.kind == "task"),
            f"SwitchConfig.num_replicas={self.num_replicas} with RouterConfig.kind='task': "
            "each device has the experts of its rows' tasks already; use num_replicas=0",
        )
        require(
            self.num_experts % self.router.num_tasks == 0,
            f"SwitchConfig.num_experts={self.num_experts} does not divide among "
            f"RouterConfig.num_tasks={self.router.num_tasks}; use a multiple of it",
        )
        copies, num_selected = self.router.num_copies, self.router.num_selected
        require(
            copies == 1
            or (self.router.kind, self.num_experts % copies) == ("top_k", 0)
            and 1 < num_selected <= self.num_candidates // copies,
            f"RouterConfig.num_copies={copies} with kind={self.router.kind!r}, num_experts="
            f"{self.num_experts} and num_selected={num_selected}: a token chooses several "
            "experts, each in one of its copies; use num_copies=1, or a divisor of num_experts",
        )
        tried = self.router.max_rounds if self.router.overflow == "reroute" else 1
        for name, count in (("num_selected", self.router.num_selected), ("max_rounds", tried)):
            among = f" divided among {self.router.num_tasks} tasks"
            require(
                count <= self.num_candidates,
                f"RouterConfig.{name}={count} with num_experts={self.num_experts}"
                f"{among if self.router.num_tasks > 1 else ''}: a token chooses an expert "
                f"once; use {name}={self.num_candidates} at most",
            )

    def _check_unread(self) -> None:
        has_hidden = self.has_ffn or self.attention_experts == "ffn"
        unread = {
            "expert_bias": self.expert_bias and not self.has_ffn,
            "d_ff": self.d_ff is not None and not has_hidden,
        }
        found = [f"{name}={getattr(self, name)}" for name, is_set in unread.items() if is_set]
        require(
            not found,
            f"SwitchConfig.{', '.join(found)} with sublayers={self.sublayers!r}: experts of "
            f"attention, {self.attention_experts}, have no such thing; leave it out",
        )

    def _check_choices(self) -> None:
        """Refuses choices of experts for which there are too few experts."""
        router, groups = self.router, self.router.num_expert_groups
        size, rest = divmod(self.num_experts, groups)
        require(
            groups == 1
            or (
                rest == 0
                and size >= 2
                and self.num_ranks <= size * router.expert_groups_per_token
            ),
            f"RouterConfig.num_expert_groups={groups} with num_experts={self.num_experts} and "
            f"expert_groups_per_token={router.expert_groups_per_token}: groups have as many "
            f"experts each, two or more, and those of a token {self.num_ranks} in all; use "
            "fewer groups, or more of them for a token",
        )
        require(
            not router.has_quantiles or router.num_selected < self.num_experts,
            f"RouterConfig.bias_rule={router.bias_rule!r} with num_selected="
            f"{router.num_selected} of {self.num_experts} experts: all are chosen, and nothing "
            "is to balance; use bias_update_rate=None",
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
            object.__setattr__(self, name, layers)  # JSON gives a list, which is not hashable
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

    def with_dispatcher(self, name: str) -> "SwitchConfig":
        """The layers with another dispatcher, in parts only if it exchanges slots."""
        is_in_parts = name != "auto" and DISPATCHERS[name].exchanges_slots
        parts = self.exchange_parts if is_in_parts else 1
        return dataclasses.replace(self, dispatcher=name, exchange_parts=parts)

    @property
    def dispatches_rows(self) -> bool:
        """Whether devices may dispatch rows in place of groups, which then decide nothing."""
        return self.dispatcher == "dropless" and self.router.overflow == "dropless"

    @property
    def num_candidates(self) -> int:
        """Experts that one token can choose from: all, or those of its task."""
        return self.num_experts // self.router.num_tasks

    @property
    def has_named_layers(self) -> bool:
        """Whether the sparse blocks are listed, rather than every `every`-th one."""
        return self.encoder_layers is not None

    @property
    def has_ffn(self) -> bool:
        """Whether the FFN of a sparse block is a Switch layer."""
        return self.sublayers in ("ffn", "both")

    @property
    def has_attention(self) -> bool:
        """Whether the self-attention of a sparse block is a Switch layer."""
        return self.sublayers in ("attention", "both")
