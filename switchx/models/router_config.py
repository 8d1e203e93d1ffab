# SPDX-License-Identifier: Apache-2.0
"""What a router is: who chooses, in which order, with what noise; what a full expert does."""

import dataclasses
from typing import Literal

from switchx.models.require import require, require_choice

KINDS = ("top_k", "expert_choice", "hash")
GATES = ("softmax", "normalized")
PRIORITIES = ("position", "gate")
EXPLORATIONS = ("none", "jitter", "sample", "dropout")
OVERFLOWS = ("drop", "reroute", "dropless", "identity")
BALANCE_COUNTS = ("first_choice", "all_rounds")
SCOPES = ("group", "batch")
PADDING = ("ignored", "counted")

# Fields that mean nothing where the tokens do not choose by a router's probabilities.
_ONLY_TOP_K = {
    "num_selected": 1,
    "gate": "softmax",
    "priority": "position",
    "bias_update_rate": None,
}
_REASONS = {
    "expert_choice": "the experts choose, each as many tokens as it has slots",
    "hash": "a token's id alone decides, and there is no router",
}


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Which experts a token goes to, in which order, and what happens where one is full.

    Attributes:
        kind: who chooses. `top_k`: each token its most probable experts (Fedus et al. 2021,
            arXiv:2101.03961; k = 2: Lepikhin et al. 2020, arXiv:2006.16668).
            `expert_choice`: each expert its most probable tokens (Zhou et al. 2022,
            arXiv:2202.09368), in encoders only. `hash`: a fixed hash of the token's id
            (Roller et al. 2021, arXiv:2106.04426); no router, every gate is 1.
        num_selected: k, how many experts a token chooses.
        gate: `softmax`, the probability of each chosen expert under all experts (Switch);
            `normalized`, divided by the sum over the chosen ones (GShard).
        priority: whose choice gets a slot first: by `position` in the group, or by `gate`,
            the surest token first (batch-prioritized routing, Riquelme et al. 2021,
            arXiv:2106.05974). First choices come before second ones either way.
        exploration: in training (Switch, appendix C): `none`; `jitter` multiplies the
            router's inputs by U[1-jitter, 1+jitter]; `sample` draws experts from the
            softmax with `temperature`; `dropout` drops `input_dropout_rate` of the
            router's inputs.
        overflow: where an expert is full. `drop` leaves the token to the residual
            connection; `reroute` sends it to its next expert that has a slot
            (No-Token-Left-Behind, Switch, appendix B); `dropless` gives every expert as many
            slots as the group has tokens; `identity` adds the layer's input times the gate,
            as transformers did up to 4.51.
        max_rounds: of `reroute`: experts that a token tries, the first one included.
        balance_counts: of `reroute`: choices that the balance loss counts: each token's
            `first_choice`, as without rerouting, or `all_rounds`, each token's `max_rounds`
            best experts (Mesh-TensorFlow).
        balance_scope: tokens that the balance loss compares: those of each `group`, then
            averaged, or of the whole `batch` together.
        bias_update_rate: how far the bias that is added to the probabilities for choosing,
            not for gating, moves after every step towards an even load (Wang et al. 2024,
            arXiv:2408.15664: 0.001). None has no bias.
        padding: `ignored`: neither routed nor counted. `counted`: routed and counted as
            tokens are, for parity with Hugging Face's and flaxformer's Switch models.
    """

    kind: Literal["top_k", "expert_choice", "hash"] = "top_k"
    num_selected: int = 1
    gate: Literal["softmax", "normalized"] = "softmax"
    priority: Literal["position", "gate"] = "position"
    exploration: Literal["none", "jitter", "sample", "dropout"] = "jitter"
    jitter: float = 0.01
    temperature: float = 1.0
    input_dropout_rate: float = 0.1
    overflow: Literal["drop", "reroute", "dropless", "identity"] = "drop"
    max_rounds: int = 4
    balance_counts: Literal["first_choice", "all_rounds"] = "first_choice"
    balance_scope: Literal["group", "batch"] = "group"
    bias_update_rate: float | None = None
    padding: Literal["ignored", "counted"] = "ignored"

    def __post_init__(self):
        self._check_ranges()
        if self.kind == "top_k":
            self._check_top_k()
        else:
            self._check_other_kinds()

    def _check_ranges(self) -> None:
        choices = {
            "kind": KINDS,
            "gate": GATES,
            "priority": PRIORITIES,
            "exploration": EXPLORATIONS,
            "overflow": OVERFLOWS,
            "balance_counts": BALANCE_COUNTS,
            "balance_scope": SCOPES,
            "padding": PADDING,
        }
        for name, allowed in choices.items():
            require_choice(f"RouterConfig.{name}", getattr(self, name), allowed)
        for name in ("num_selected", "max_rounds"):
            require(
                getattr(self, name) >= 1,
                f"RouterConfig.{name}={getattr(self, name)}; use a whole number of at least 1",
            )
        require(0 <= self.jitter < 1, f"RouterConfig.jitter={self.jitter}; use 0 <= jitter < 1")
        require(
            self.temperature > 0,
            f"RouterConfig.temperature={self.temperature}; use a temperature above 0, or "
            "exploration='none' for the most probable expert",
        )
        require(
            0 <= self.input_dropout_rate < 1,
            f"RouterConfig.input_dropout_rate={self.input_dropout_rate}; use 0 <= rate < 1",
        )
        require(
            self.bias_update_rate is None or self.bias_update_rate >= 0,
            f"RouterConfig.bias_update_rate={self.bias_update_rate}; use 0 or more, or None "
            "for no bias",
        )

    def _check_top_k(self) -> None:
        require(
            self.gate == "softmax" or self.num_selected > 1,
            "RouterConfig.gate='normalized' with num_selected=1: the gate would be 1 whatever "
            "the router says, and the router would get no gradient; use gate='softmax', or "
            "num_selected=2",
        )
        require(
            self.overflow != "reroute" or self.num_selected == 1,
            f"RouterConfig.overflow='reroute' with num_selected={self.num_selected}: a token "
            "is rerouted to one expert; use num_selected=1, or overflow='drop'",
        )
        require(
            self.balance_counts == "first_choice" or self.overflow == "reroute",
            f"RouterConfig.balance_counts={self.balance_counts!r} with "
            f"overflow={self.overflow!r}: there are no rounds to count; use "
            "balance_counts='first_choice', or overflow='reroute'",
        )
        require(
            self.bias_update_rate is None or self.exploration != "sample",
            f"RouterConfig.bias_update_rate={self.bias_update_rate} with exploration='sample': "
            "the bias is added to probabilities that are compared, not drawn from; use "
            "bias_update_rate=None, or exploration='jitter'",
        )

    def _check_other_kinds(self) -> None:
        only = dict(_ONLY_TOP_K)
        only["overflow"] = ("drop", "dropless") if self.kind == "hash" else ("drop",)
        only["exploration"] = ("none",)
        if self.kind == "expert_choice":
            only["exploration"] = ("none", "jitter", "dropout")
        for name, allowed in only.items():
            value = getattr(self, name)
            allowed = allowed if isinstance(allowed, tuple) else (allowed,)
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
    def has_bias(self) -> bool:
        return self.bias_update_rate is not None
