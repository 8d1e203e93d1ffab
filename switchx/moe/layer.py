# SPDX-License-Identifier: Apache-2.0
"""The Switch layer: router, dispatcher and experts in place of a dense FFN.

Fedus et al. 2021 (arXiv:2101.03961), section 2, Figure 2. `RoutedLayer` has the router and
makes the routing plan; Switch attention is another of its subclasses.
Dims: B batch, L length, D model, G groups, T tokens of a group, E experts,
S choices of a token, W bins of a histogram, R slots for experts
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.fields import require
from switchx.layers.dense import along_last, plus, split_key, weight, zeros
from switchx.layers.ffn import DenseFFN
from switchx.moe.capacity import into_groups, layer_capacity, layer_groups, out_of_groups
from switchx.moe.dispatch import gated
from switchx.moe.dispatchers import choose_dispatcher
from switchx.moe.expert_copies import local_slots, with_copies
from switchx.moe.experts import Experts
from switchx.moe.quantile_balance import margin_counts, margin_quantiles
from switchx.moe.router import (
    explored_inputs,
    hash_logits,
    normalized_scores,
    router_logits,
    router_scores,
    task_logits,
)
from switchx.moe.routing_plan import RoutingPlan, choice_scores, make_plan, rank_experts
from switchx.moe.shared_groups import (
    assign_shared_slots,
    constrain_groups,
    keeps_groups,
    shared_axes,
)
from switchx.moe.stats import Choices, RoutingStats, measure_routing


@dataclasses.dataclass(frozen=True)
class RoutedTokens:
    """Tokens in their groups, with the router's output and plan.

    Attributes:
        x_GTD: the layer's input.
        is_token_GT: true for the tokens that are routed.
        logits_GTE, score_GTE: the router's logits and their scores, in `Precision.router`.
        biased_GTE: scores by which the tokens chose their experts, with bias and noise.
        plan: expert, gate and slot of each choice.
        segment_BL: sequence of each token, 0 for padding; None where no loss is per sequence.
        margin_EW, margin_E: sums for a bias from quantiles (`moe/quantile_balance.py`); None
            without one, and outside of training.
    """

    x_GTD: jax.Array
    is_token_GT: jax.Array
    logits_GTE: jax.Array
    score_GTE: jax.Array
    biased_GTE: jax.Array
    plan: RoutingPlan
    segment_BL: jax.Array | None = None
    margin_EW: jax.Array | None = None
    margin_E: jax.Array | None = None


class RoutedLayer(nnx.Module):
    """The router of a Switch layer; its subclasses have the experts.

    Parameters: `w_router_DE`, unless a hash routes; `b_router_E` where the logits have a bias;
    `router_log_count_E` where experts were merged; `router_bias_E` in float32 where a bias
    balances the load; `router_load_E`, the load of the previous step, where the balance loss
    compares with it. The last two get no gradient; `training/router_bias.py` updates them.
    """

    def __init__(self, config, *, key):
        require(
            config.switch.dispatcher != "auto",
            "SwitchConfig.dispatcher='auto' outside of a job, which knows the mesh; name one",
        )
        self.config = config
        D, E = config.d_model, config.switch.num_experts
        if config.switch.router.has_weights:
            self.w_router_DE = weight(
                config, key, (D, E), fan_in=D, scale=config.switch.router_init_scale
            )
        if config.switch.router.has_logit_bias:
            self.b_router_E = zeros(config, E)
        if config.switch.router.counts_merged:
            self.router_log_count_E = zeros(config, E)
        if config.switch.router.has_bias:
            self.router_bias_E = nnx.Param(jnp.zeros((E,), jnp.float32))
        if config.switch.router.keeps_load:
            self.router_load_E = nnx.Param(jnp.full((E,), 1 / E, jnp.float32))

    def route(
        self,
        x_BLD,
        is_token_BL,
        token_BL,
        task_B=None,
        replay_BLS=None,
        segment_BL=None,
        *,
        is_training: bool,
        key=None,
    ):
        """Groups the tokens and assigns them to slots of experts.

        Args:
            is_token_BL: false for padding.
            token_BL: ids of the tokens; only a hash router reads them, others accept None.
            task_B: task of each row; only a router by task reads it.
            replay_BLS: experts given in place of the router's choices; None gives none.
            segment_BL: sequence of each token in its row, 0 for padding, where the balance loss
                is per sequence; with None, each row is one sequence.
            key: random key for exploration, used only in training.
        """
        switch, router = self.config.switch, self.config.switch.router
        B, L = is_token_BL.shape
        G, T = layer_groups(switch, B, L)
        if router.padding == "counted":
            is_token_BL = jnp.ones_like(is_token_BL)
        shared = shared_axes(switch.dispatcher, G)
        x_GTD = into_groups(x_BLD, G, T)
        is_token_GT = into_groups(is_token_BL, G, T)
        if not self.dispatches_rows(G):  # otherwise tokens stay where their rows are
            x_GTD = constrain_groups(x_GTD, "GTD", shared)
            is_token_GT = constrain_groups(is_token_GT, "GT", shared)
        key = key if is_training else None
        if router.has_weights:
            logits_GTE = router_logits(
                explored_inputs(router, x_GTD.astype(self.config.precision.router), key=key),
                self.w_router_DE[...],
                dtype=self.config.precision.router,
            )
            if router.has_logit_bias:
                logits_GTE = plus(logits_GTE, self.b_router_E[...])
            if router.kind == "task":
                require(
                    task_B is not None,
                    "RouterConfig.kind='task' and a batch without task_ids: which experts a "
                    "row may have is not known; train on a Mixture with rows, and load a model "
                    "for one task: switchx.load(..., task=NAME), or --task=NAME",
                )
                task_GT = into_groups(jnp.broadcast_to(task_B[:, None], (B, L)), G, T)
                logits_GTE = task_logits(logits_GTE, task_GT, router.num_tasks)
        else:
            logits_GTE = hash_logits(into_groups(token_BL, G, T), switch.num_experts)
        score_GTE = router_scores(router.score, logits_GTE)
        if router.counts_merged:
            count_GTE = along_last(self.router_log_count_E[...], logits_GTE)
            score_GTE = jax.nn.softmax(logits_GTE + count_GTE, axis=-1) * jnp.exp(-count_GTE)
        require(
            replay_BLS is not None or not (router.replay and is_training),
            "RouterConfig.replay=True and a training batch without encoder_replay or "
            "decoder_replay: the choices to replay are not known; add them to the batch "
            "(moe/replay.py; -1 leaves a choice to the router), or use replay=False",
        )
        given_GTS = None
        if replay_BLS is not None:
            given_GTS = constrain_groups(into_groups(replay_BLS, G, T), "GTS", shared)
        choice = {"bias_E": self.selection_bias_E, "key": key}
        plan = make_plan(
            router,
            logits_GTE,
            score_GTE,
            is_token_GT,
            layer_capacity(switch, T, is_training=is_training),
            **choice,
            given_GTS=given_GTS,
            assign=functools.partial(assign_shared_slots, shared=shared),
        )
        biased_GTE = choice_scores(router, logits_GTE, score_GTE, **choice)
        routed = RoutedTokens(x_GTD, is_token_GT, logits_GTE, score_GTE, biased_GTE, plan)
        if router.balance_scope == "sequence":
            segment_BL = is_token_BL if segment_BL is None else segment_BL
            routed = dataclasses.replace(routed, segment_BL=segment_BL.astype(jnp.int32))
        if router.has_quantiles and is_training:
            of_choice = self.router_bias_E[...], is_token_GT, router.num_selected
            if router.bias_rule == "quantile":
                sums = {"margin_EW": margin_counts(score_GTE, *of_choice)}
            else:
                sums = {"margin_E": margin_quantiles(logits_GTE, *of_choice)}
            routed = dataclasses.replace(routed, **sums)
        return routed

    def dispatches_rows(self, num_groups: int) -> bool:
        """Whether rows are dispatched where they are: no device has a whole group, and none
        needs one, since nothing is dropped."""
        return self.config.switch.dispatches_rows and not keeps_groups(num_groups)

    @property
    def selection_bias_E(self):
        """The bias of the scores by which tokens choose; None without one."""
        return self.router_bias_E[...] if self.config.switch.router.has_bias else None

    def measure(self, routed: RoutedTokens, batch: int, length: int) -> RoutingStats:
        """The routing statistics, with the choices as `[batch, length, S]`."""
        switch, bias_E = self.config.switch, self.selection_bias_E
        logits_GTE = routed.logits_GTE
        if switch.router.counts_merged:  # the logits of the softmax that routes
            logits_GTE += along_last(self.router_log_count_E[...], logits_GTE)
        stats = measure_routing(
            logits_GTE,
            normalized_scores(
                switch.router.score, routed.score_GTE, counts_merged=switch.router.counts_merged
            ),
            routed.plan,
            routed.is_token_GT,
            switch.router,
            score_GTE=routed.biased_GTE,
            bias_E=bias_E,
            load_E=self.router_load_E[...] if switch.router.keeps_load else None,
            segment_BL=routed.segment_BL,
        )
        stats = dataclasses.replace(stats, margin_EW=routed.margin_EW, margin_E=routed.margin_E)
        ranked = rank_experts(routed.logits_GTE, routed.score_GTE, bias_E, switch)
        plan = routed.plan
        dropped_GTS = routed.plan.is_dropped_GTS.astype(jnp.int8)
        of_groups = jax.lax.stop_gradient(
            (plan.expert_GTS, plan.gate_GTS, dropped_GTS, *ranked)
        )
        choices = Choices(*(out_of_groups(x, batch, length) for x in of_groups))
        return dataclasses.replace(stats, choices=(choices,))


class SwitchFFN(RoutedLayer):
    """A sparse FFN: `y_BLD, stats = switch_ffn(x_BLD, is_token_BL, is_training=...)`.

    With `shared_d_ff`, the output of a dense FFN of that size is added for every token, dropped
    ones included; `shared_gate` multiplies it by sigmoid(x g), in the router's dtype.
    """

    def __init__(self, config, *, key):
        key_router, key_experts = jax.random.split(key)
        super().__init__(config, key=key_router)
        self.experts = Experts(config, key=key_experts)
        if config.switch.shared_d_ff is not None:
            shared = dataclasses.replace(config, d_ff=config.switch.shared_d_ff)
            self.shared_expert = DenseFFN(shared, key=jax.random.fold_in(key, 2))
        if config.switch.shared_gate:
            self.shared_gate_D = zeros(config, config.d_model)

    def __call__(
        self,
        x_BLD,
        is_token_BL,
        token_BL=None,
        task_B=None,
        replay_BLS=None,
        segment_BL=None,
        *,
        is_training: bool,
        key=None,
    ):
        """The layer's output and routing statistics.

        Args:
            is_token_BL: false for padding.
            token_BL: ids of the tokens, for a hash router.
            task_B: task of each row, for a router by task.
            replay_BLS: experts given in place of the router's choices (`moe/replay.py`).
            segment_BL: sequence of each token in its row; with None, each row is one sequence.
        """
        switch = self.config.switch
        B, L, _ = x_BLD.shape
        key_router, key_dropout = split_key(key, 2)
        key_shared = None if key is None else jax.random.fold_in(key, 2)
        routed = self.route(
            x_BLD,
            is_token_BL,
            token_BL,
            task_B,
            replay_BLS,
            segment_BL,
            is_training=is_training,
            key=key_router,
        )

        x_GTD, plan = routed.x_GTD, routed.plan
        if self.dispatches_rows(len(x_GTD)):
            x_GTD, plan = x_BLD, plan.of_rows(B, L)
        dispatch = choose_dispatcher(switch, plan, is_training=is_training)
        if (table_R := self.experts.expert_of_slot_R) is not None:
            is_by_task = switch.router.kind == "task"
            dispatch = local_slots(table_R) if is_by_task else with_copies(dispatch, table_R)
        y_GTD = dispatch(x_GTD, plan, self.experts.weights(key=key_dropout))
        if switch.router.overflow == "identity":
            gate_GT = jnp.sum(
                jnp.where(routed.plan.is_dropped_GTS, routed.plan.gate_GTS, 0.0), axis=-1
            )
            y_GTD = y_GTD + gated(routed.x_GTD, gate_GT)
        shared = shared_axes(switch.dispatcher, y_GTD.shape[0])
        y_BLD = out_of_groups(constrain_groups(y_GTD, "GTD", shared), B, L)
        if switch.shared_d_ff is not None:
            shared_BLD = self.shared_expert(x_BLD, key=key_shared)
            if switch.shared_gate:
                dtype = self.config.precision.router
                score_BL = x_BLD.astype(dtype) @ self.shared_gate_D[...].astype(dtype)
                shared_BLD = gated(shared_BLD, jax.nn.sigmoid(score_BL))
            y_BLD = y_BLD + shared_BLD
        return y_BLD, self.measure(routed, B, L)
