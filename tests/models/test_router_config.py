# SPDX-License-Identifier: Apache-2.0
"""Router descriptions: Switch's router by default, and every refusal's message in full."""

import re

import pytest

from switchx.moe.config import RouterConfig, SwitchConfig


def test_the_default_is_the_papers_router():
    router = RouterConfig()
    assert (router.kind, router.num_selected, router.gate) == ("top_k", 1, "softmax")
    assert (router.exploration, router.jitter) == ("jitter", 0.01)
    assert (router.priority, router.overflow, router.padding) == ("position", "drop", "ignored")
    assert (router.has_weights, router.has_bias) == (True, False)


def test_what_a_router_owns():
    assert not RouterConfig(kind="hash", exploration="none").has_weights
    assert RouterConfig(bias_update_rate=0.0).has_bias  # a bias that stays as it is
    assert RouterConfig(kind="expert_choice").has_weights


QUANTILE = {"bias_rule": "quantile", "bias_update_rate": 1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gate": "normalized"},
            "gate='normalized' with num_selected=1: the gate would be 1 whatever the "
            "router says, and the router would get no gradient",
        ),
        (
            {"overflow": "reroute", "num_selected": 2},
            "overflow='reroute' with num_selected=2: a token is rerouted to one expert",
        ),
        (
            {"balance_counts": "all_rounds"},
            "balance_counts='all_rounds' with overflow='drop': there are no rounds to count",
        ),
        (
            {"bias_update_rate": 0.001, "exploration": "sample"},
            "bias_update_rate=0.001 with exploration='sample': the bias is added to "
            "probabilities that are compared, not drawn from",
        ),
        ({"gate": "score"}, "gate='score' with score='softmax'; use gate='softmax', or gate="),
        (
            {"score": "sigmoid"},
            "gate='softmax' with score='sigmoid'; use gate='score', or gate",
        ),
        (
            {"score": "sigmoid", "gate": "normalized"},
            "gate='normalized' with num_selected=1: the gate would be 1 whatever the router "
            "says, and the router would get no gradient; use gate='score', or num_selected=2",
        ),
        (
            {"score": "sigmoid", "gate": "score", "counts_merged": True},
            "counts_merged=True with score='sigmoid': only a softmax can count an expert",
        ),
        ({"expert_groups_per_token": 2}, "expert_groups_per_token=2 with num_expert_groups=1"),
        (
            {"num_expert_groups": 2, "num_tasks": 2, "kind": "task"},
            "num_expert_groups=2 with kind='task' and num_copies=1, which limit a token's",
        ),
        (
            {"balance_load": "previous_step"},
            "balance_load='previous_step' with balance_scope='group', whose load every",
        ),
        (
            {"balance_scope": "sequence", "overflow": "reroute"},
            "balance_scope='sequence' with overflow='reroute' and padding='ignored'",
        ),
        ({"bias_rule": "quantile"}, "bias_rule='quantile' with bias_update_rate=None"),
        (
            QUANTILE | {"bias_update_rate": 1.5},
            "bias_rule='quantile' with bias_update_rate=1.5, a share of the way",
        ),
        (
            QUANTILE | {"num_expert_groups": 4},
            "bias_rule='quantile' with num_expert_groups=4 and num_copies=1",
        ),
        (QUANTILE | {"overflow": "reroute"}, "bias_rule='quantile' with overflow='reroute'"),
        (
            QUANTILE | {"score": "sqrt_softplus", "gate": "score"},
            "bias_rule='quantile' with score='sqrt_softplus': its histogram is of scores",
        ),
        ({"replay_drops": True}, "replay_drops=True with replay=False: nothing is replayed"),
        ({"replay": True}, "replay=True with overflow='drop': full experts would drop tokens"),
        (
            {"replay": True, "overflow": "reroute", "replay_drops": True},
            "replay=True with overflow='reroute': a token would leave the expert that is given",
        ),
        (
            {"replay": True, "overflow": "dropless", "kind": "task", "num_tasks": 2},
            "replay=True with kind='task': a row's task says which experts it has",
        ),
    ],
)
def test_a_router_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=f"RouterConfig.{re.escape(message)}"):
        RouterConfig(**changes)


@pytest.mark.parametrize(
    ("num_experts", "changes", "message"),
    [
        (6, {"num_expert_groups": 4}, "num_expert_groups=4 with num_experts=6"),
        (4, {"num_expert_groups": 4}, "num_expert_groups=4 with num_experts=4"),
        (
            8,
            {"num_expert_groups": 4, "num_selected": 3},
            "num_expert_groups=4 with num_experts=8 and expert_groups_per_token=1: groups have "
            "as many experts each, two or more, and those of a token 3 in all; use fewer",
        ),
        (2, QUANTILE | {"num_selected": 2}, "bias_rule='quantile' with num_selected=2 of 2"),
    ],
)
def test_a_choice_that_experts_are_too_few_for_is_refused(num_experts, changes, message):
    with pytest.raises(ValueError, match=f"RouterConfig.{message}"):
        SwitchConfig(num_experts, router=RouterConfig(**changes))


CHOOSE = "the experts choose, each as many tokens as it has slots"
HASH = "a token's id alone decides, and there is no router"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("expert_choice", {"num_selected": 2}, f"num_selected=2 {CHOOSE} num_selected=1"),
        (
            "expert_choice",
            {"priority": "gate"},
            f"priority='gate' {CHOOSE} priority='position'",
        ),
        (
            "expert_choice",
            {"overflow": "dropless"},
            f"overflow='dropless' {CHOOSE} overflow='drop'",
        ),
        (
            "expert_choice",
            {"exploration": "sample"},
            f"exploration='sample' {CHOOSE} exploration='none' or 'jitter' or 'dropout'",
        ),
        (
            "expert_choice",
            {"bias_update_rate": 0.1},
            f"bias_update_rate=0.1 {CHOOSE} bias_update_rate=None",
        ),
        ("expert_choice", {"replay": True}, f"replay=True {CHOOSE} replay=False"),
        ("hash", {"replay": True, "exploration": "none"}, f"replay=True {HASH} replay=False"),
        ("hash", {}, f"exploration='jitter' {HASH} exploration='none'"),
        ("hash", {"gate": "normalized"}, f"gate='normalized' {HASH} gate='softmax'"),
        (
            "hash",
            {"overflow": "reroute", "exploration": "none"},
            f"overflow='reroute' {HASH} overflow='drop' or 'dropless'",
        ),
    ],
)
def test_fields_of_another_kind_are_refused(kind, changes, message):
    reason = HASH if kind == "hash" else CHOOSE
    given, advised = message.split(f" {reason} ")
    with pytest.raises(ValueError) as error:
        RouterConfig(kind=kind, **changes)
    assert str(error.value) == (
        f"RouterConfig.{given} does not go with kind={kind!r}: {reason}; use {advised}, or "
        "kind='top_k'"
    )
