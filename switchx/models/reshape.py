# SPDX-License-Identifier: Apache-2.0
"""A model with fewer experts: the most used ones, or groups of similar experts merged into one.

Or one whose other experts are vectors, their mean outputs (Zhang et al. 2025, MoNE,
arXiv:2507.00390: novices), or one without experts: each Switch layer becomes one FFN, its most
used expert or the mean of all.

Dropping keeps the experts with the highest scores. Merging follows Chen et al. 2024 (HC-SMoE,
arXiv:2410.08589): experts are clustered by their outputs on a sample, average linkage; and
Li et al. 2023 (MC-SMoE, arXiv:2310.01334): hidden units are aligned before matrices are
averaged, weighted by use. In Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 3.1, having
fewer experts is the second step of deployment.

A merged expert stands for several. Its logit is fitted to the largest of theirs, which decides
whether a token chooses one of them and how it is weighted. In the softmax it counts as many
times as `sum_e exp(z_e)` is larger than that (`RouterConfig.counts_merged`), so that the
probabilities of the other experts stay. Where experts and their routers are equal, both are
exact.
Dims: E experts, D model, F ffn, R rows of the sample, C members of a cluster; X any of R and D
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.cluster.hierarchy
import scipy.optimize
import scipy.spatial.distance
import scipy.special
import scipy.stats

from switchx import tree
from switchx.fields import require, require_choice
from switchx.layers.ffn import activate
from switchx.models.config import ModelConfig, require_our_blocks
from switchx.models.unroll import unrolled
from switchx.moe.router import router_scores
from switchx.moe.routing_plan import choice_scores

# Penalty on a change of a router's weights, over the mean square of its inputs.
RIDGE = 1e-2
# Switch layer's arrays by name, without the layer's path.
Layer = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LayerSample:
    """The inputs and the load of a Switch layer on a sample of texts.

    Attributes:
        load_E: tokens that chose each expert.
        x_RD: some of the layer's inputs, float32, once for each choice of a token; experts
            have shares of the rows like those of the load.
        norm_E: sum of the norms ||y|| of each expert's outputs, over the tokens that chose it.
        gated_norm_E: the same sum of g ||y||, g the gate that the layer applied.
        sum_ED: sum of each expert's outputs over the tokens that chose it.
        harm_E: rise of the loss if each expert alone is removed, in nats per token; None if
            it was not measured.
    """

    load_E: np.ndarray
    x_RD: np.ndarray
    norm_E: np.ndarray | None = None
    gated_norm_E: np.ndarray | None = None
    sum_ED: np.ndarray | None = None
    harm_E: np.ndarray | None = None


class Reshaped(NamedTuple):
    """A model with other experts, and the earlier experts that these are made of.

    Attributes:
        config: configuration, with unrolled layers.
        params: parameters.
        origin_NE: for each Switch layer, the earlier expert that each expert is made of; for a
            merged one, the most used of its cluster; for a dense layer, expert 0.
    """

    config: ModelConfig
    params: dict
    origin_NE: tuple[np.ndarray, ...]


def check_num_experts(config: ModelConfig, num_experts: int) -> None:
    """Raises ValueError if a model cannot get so few, or so many, experts."""
    require_our_blocks(config, "changing the number of experts")
    switch = config.switch
    require(
        switch is not None,
        f"experts={num_experts} of a dense model, which has none; leave it out",
    )
    E = switch.num_experts
    require(
        1 <= num_experts <= E,
        f"experts={num_experts} of a model with {E}: experts are dropped or merged, not added; "
        f"use 1 to {E}",
    )
    require(
        not switch.has_attention,
        f"experts={num_experts} with SwitchConfig.sublayers={switch.sublayers!r}: experts of "
        "self-attention are not changed; leave it out",
    )
    require(
        switch.router.kind == "top_k",
        f"experts={num_experts} with RouterConfig.kind={switch.router.kind!r}: "
        "only experts that tokens choose by a router can be others; leave it out",
    )
    groups = switch.router.num_expert_groups
    require(
        groups == 1,
        f"experts={num_experts} with RouterConfig.num_expert_groups={groups}: groups of "
        "experts are not changed; leave it out",
    )
    copies = switch.router.num_copies
    require(
        num_experts % copies == 0,
        f"experts={num_experts} with RouterConfig.num_copies={copies}: of each expert all "
        f"copies stay or none does; use a multiple of {copies}, or 0",
    )
    dataclasses.replace(switch, num_experts=num_experts)  # refuses fewer than a token chooses


def reduced_config(config: ModelConfig, num_experts: int, *, is_merged: bool) -> ModelConfig:
    """The configuration of the model with fewer experts, layers unrolled."""
    check_num_experts(config, num_experts)
    switch = dataclasses.replace(config.switch, num_experts=num_experts)
    if is_merged and num_experts < config.switch.num_experts:
        router = dataclasses.replace(switch.router, counts_merged=True)
        switch = dataclasses.replace(switch, router=router)
    return dataclasses.replace(config, switch=switch, scan_layers=False)


def _per_token(sum_E, sample: LayerSample) -> np.ndarray:
    """The mean over the tokens that chose each expert; 0 for one that none chose."""
    return np.asarray(sum_E) / np.maximum(np.asarray(sample.load_E), 1)


def _mean_over_rms(layer: Layer, sample: LayerSample) -> np.ndarray:
    """Mean of an expert's absolute weights over their root mean square."""
    weights = [x for name, x in layer.items() if name.startswith("experts/w_")]
    flat_EX = np.concatenate([x.reshape(len(x), -1) for x in weights], 1).astype(np.float64)
    rms_E = np.sqrt(np.mean(flat_EX**2, axis=1))
    return np.mean(np.abs(flat_EX), axis=1) / np.maximum(rms_E, 1e-30)


# Scores by which experts stay, highest first; copies that exclude each other have their sum:
#   frequency    tokens that chose the expert
#   ean          sum of ||y|| over these tokens (expert activation norm)
#   reap         mean of g ||y|| over these (Lasby et al. 2025, arXiv:2510.13999, eq. 9)
#   mean_norm    mean of ||y|| over these
#   aimer        mean |w| over the root mean square of w, without data (arXiv:2603.18492)
#   brute_force  rise of the loss if the expert alone is removed
# DEFAULT_SCORE cost 0.010 nats where frequency cost 0.201 (experiments/quality_by_bytes).
DEFAULT_SCORE = "reap"
SCORES: dict[str, Callable[[Layer, LayerSample], np.ndarray]] = {
    "frequency": lambda layer, sample: np.asarray(sample.load_E),
    "ean": lambda layer, sample: np.asarray(sample.norm_E),
    "reap": lambda layer, sample: _per_token(sample.gated_norm_E, sample),
    "mean_norm": lambda layer, sample: _per_token(sample.norm_E, sample),
    "aimer": _mean_over_rms,
    "brute_force": lambda layer, sample: np.asarray(sample.harm_E),
}


def drop_experts(
    config: ModelConfig,
    params: dict,
    samples: Sequence[LayerSample],
    num_experts: int,
    score: str = DEFAULT_SCORE,
) -> Reshaped:
    """The model with the `num_experts` experts of the highest scores in each Switch layer.

    They keep their order. If two have equal scores, the first stays. The router's softmax is
    over those that stay, so all gates rise.

    Args:
        samples: measurements of all Switch layers, in the order of `config.sparse_layer_names`.
        score: a name of `SCORES`.

    Raises:
        ValueError: see `check_num_experts`; there is no such score.
    """
    require_choice("score", score, SCORES)

    def drop(layer: Layer, sample: LayerSample) -> tuple[Layer, np.ndarray]:
        kept = _best(config, layer, sample, num_experts, score)
        return taken(layer, kept), kept

    reduced = reduced_config(config, num_experts, is_merged=False)
    return reshaped(reduced, config, params, drop, samples)


def _best(config, layer: Layer, sample: LayerSample, number: int, score: str) -> np.ndarray:
    copies = config.switch.router.num_copies
    score_E = SCORES[score](layer, sample).reshape(copies, -1).sum(axis=0)
    kept = np.sort(np.argsort(-score_E, kind="stable")[: number // copies])
    return np.concatenate([kept + n * len(score_E) for n in range(copies)])


def novice_experts(
    config: ModelConfig,
    params: dict,
    samples: Sequence[LayerSample],
    num_experts: int,
    score: str = DEFAULT_SCORE,
) -> Reshaped:
    """The model in which all but `num_experts` experts per Switch layer are novices.

    A novice's output is `b_out`, its mean over the tokens that chose it, 0 if none did; its
    matrices are zeros. Routers and gates stay.

    Args, Raises: as in `drop_experts`.
    """
    require_choice("score", score, SCORES)

    def replace(layer: Layer, sample: LayerSample) -> tuple[Layer, np.ndarray]:
        E = len(sample.load_E)
        is_novice_E = ~np.isin(np.arange(E), _best(config, layer, sample, num_experts, score))
        w_in_EDF = layer["experts/w_in_EDF"]
        biases = {"b_in_EF": w_in_EDF[:, 0], "b_out_ED": w_in_EDF[..., 0]}  # of these shapes
        changed = {f"experts/{name}": np.zeros_like(x) for name, x in biases.items()} | layer
        for name in changed:
            if name.startswith("experts/"):
                changed[name] = np.array(changed[name])
                changed[name][is_novice_E] = 0
        mean_ED = np.asarray(sample.sum_ED) / np.maximum(sample.load_E, 1)[:, None]
        changed["experts/b_out_ED"][is_novice_E] = mean_ED[is_novice_E]
        return changed, np.arange(E)

    check_num_experts(config, num_experts)
    switch = dataclasses.replace(config.switch, expert_bias=True)
    novices = dataclasses.replace(config, switch=switch, scan_layers=False)
    return reshaped(novices, config, params, replace, samples)


def agreement(config: ModelConfig, params: dict, samples: Sequence[LayerSample]) -> list[str]:
    """How well each score orders a layer's experts as brute force does, the best first.

    This is Spearman's rank correlation with `harm_E`, averaged over layers, with its 95%
    interval by a bootstrap over layers and experts.
    """
    scores: dict[str, list[np.ndarray]] = {name: [] for name in SCORES}

    def keep(layer: Layer, sample: LayerSample) -> tuple[Layer, np.ndarray]:
        for name, score in SCORES.items():
            scores[name].append(np.asarray(score(layer, sample), np.float64))
        return layer, np.arange(len(sample.load_E))

    reshaped(config, config, params, keep, samples)
    harm_NE = np.stack(scores.pop("brute_force"))
    N, E = harm_NE.shape
    rng = np.random.default_rng(0)
    drawn = [(rng.integers(N, size=N), rng.integers(E, size=(N, E))) for _ in range(1000)]

    def correlation(score_NE, layer_N, expert_NE) -> float:
        pairs = [
            scipy.stats.spearmanr(score_NE[n, e], harm_NE[n, e]).statistic
            for n, e in zip(layer_N, expert_NE, strict=True)
            if np.ptp(score_NE[n, e]) and np.ptp(harm_NE[n, e])
        ]
        return float(np.mean(pairs)) if pairs else np.nan

    found = []
    for name, score in scores.items():
        score_NE = np.stack(score)
        mean = correlation(score_NE, np.arange(N), np.tile(np.arange(E), (N, 1)))
        bootstrapped = [correlation(score_NE, *each) for each in drawn]
        low, high = np.nanquantile(bootstrapped, (0.025, 0.975))
        text = f"rank correlation with brute force {mean:.2f} ({low:.2f} to {high:.2f})"
        found.append((mean, f"{name}: {text}"))
    return [line for _, line in sorted(found, reverse=True)]


def merge_experts(
    config: ModelConfig, params: dict, samples: Sequence[LayerSample], num_experts: int
) -> Reshaped:
    """The model with `num_experts` experts per Switch layer, similar ones merged (see above).

    With as many experts as there are, it is the model itself, unrolled.

    Args, Raises: as in `drop_experts`.
    """
    reduced = reduced_config(config, num_experts, is_merged=True)

    def merge(layer: Layer, sample: LayerSample) -> tuple[Layer, np.ndarray]:
        if num_experts == len(sample.load_E):
            return layer, np.arange(num_experts)
        hidden_ERF = _hidden(config, layer, sample.x_RD)
        # Experts with their copies are compared; then first copies are merged, second ones, ...
        copies = config.switch.router.num_copies
        y_ERD = _outputs(layer, hidden_ERF)
        apart = len(y_ERD) // copies
        y_ERD = np.concatenate(np.split(y_ERD, copies), axis=1)
        alike = [np.array(each) for each in cluster_experts(y_ERD, num_experts // copies)]
        clusters = [(each + n * apart).tolist() for n in range(copies) for each in alike]
        lead = [members[int(np.argmax(sample.load_E[members]))] for members in clusters]
        return _merged(layer, sample, hidden_ERF, clusters), np.array(lead)

    return reshaped(reduced, config, params, merge, samples)


def dense_config(config: ModelConfig) -> ModelConfig:
    """The configuration of a sparse model without experts, layers unrolled.

    Raises:
        ValueError: the Switch layers have something that a dense FFN does not have.
    """
    check_num_experts(config, config.switch.num_experts)
    switch = config.switch
    for name, is_like in (
        (f"SwitchConfig.d_ff={switch.d_ff}", switch.d_ff in (None, config.d_ff)),
        (f"SwitchConfig.shared_d_ff={switch.shared_d_ff}", switch.shared_d_ff is None),
        (
            f"SwitchConfig.expert_bias={switch.expert_bias}",
            switch.expert_bias == config.use_bias,
        ),
    ):
        require(
            is_like,
            f"experts=0 of a model with {name}: the FFNs of a dense model are all of d_ff="
            f"{config.d_ff}, with use_bias={config.use_bias}; use at least 1 expert",
        )
    return dataclasses.replace(config, switch=None, scan_layers=False)


def to_dense(
    config: ModelConfig, params: dict, samples: Sequence[LayerSample], *, is_merged: bool
) -> Reshaped:
    """The model with one FFN in place of each Switch layer.

    Its output is that of an expert times the average sum of a token's gates: for equal experts
    with normalized gates, it is exact.

    Args:
        is_merged: the mean of all experts, hidden units aligned, weighted by use; otherwise
            the most used one.

    Raises: as in `drop_experts`; see `dense_config`.
    """
    dense = dense_config(config)

    def replace(layer: Layer, sample: LayerSample) -> tuple[Layer, np.ndarray]:
        use_E = np.asarray(sample.load_E, np.float64)
        most_used = np.array([np.argmax(use_E)])
        if is_merged:
            share_E = (use_E + 1e-9) / np.sum(use_E + 1e-9)
            hidden_ERF = _hidden(config, layer, sample.x_RD)
            expert = _merged_expert(layer, hidden_ERF, list(range(len(use_E))), share_E)
        else:
            alone = taken(layer, most_used).items()
            expert = {name: x[0] for name, x in alone if name.startswith("experts/")}
        scale, ffn = _mean_gate(config, layer, sample.x_RD), {}
        for name, value in expert.items():
            kind, _, dims = name.removeprefix("experts/").rpartition("_")
            value = value * scale if kind in ("w_out", "b_out") else value
            ffn[f"{kind}_{dims.removeprefix('E')}"] = value.astype(layer[name].dtype)
        return ffn, most_used

    return reshaped(dense, config, params, replace, samples)


def _mean_gate(config: ModelConfig, layer: Layer, x_RD) -> float:
    """The sum of a token's gates, averaged over the sample."""
    scale = config.switch.router.gate_scale
    if config.switch.router.gate == "normalized":
        return scale
    score_RE, order_RS = _scores(config, layer, x_RD)
    return scale * float(np.take_along_axis(score_RE, order_RS, axis=-1).sum(axis=-1).mean())


def gates_of_rows(config: ModelConfig, layer: Layer, x_RD, expert_R) -> np.ndarray:
    """The gate with which each row's expert is weighted, `[R]`.

    Args:
        layer: arrays of the router, without the layer's path.
    """
    score_RE, order_RS = _scores(config, layer, x_RD)
    gate_R = np.take_along_axis(score_RE, expert_R[:, None], axis=-1)[:, 0]
    if config.switch.router.gate == "normalized":
        gate_R = gate_R / np.take_along_axis(score_RE, order_RS, axis=-1).sum(axis=-1)
    return config.switch.router.gate_scale * gate_R


def _scores(config: ModelConfig, layer: Layer, x_RD) -> tuple[np.ndarray, np.ndarray]:
    """The router's scores `[R, E]`, and the experts that rows choose, `[R, S]`."""
    router = config.switch.router
    logits_RE = np.asarray(x_RD, np.float64) @ layer["w_router_DE"].astype(np.float64)
    logits_RE = logits_RE + np.asarray(layer.get("b_router_E", 0.0), np.float64)
    log_count_E = np.asarray(layer.get("router_log_count_E", 0.0), np.float64)
    if router.score == "softmax":
        score_RE = scipy.special.softmax(logits_RE + log_count_E, axis=-1)
        score_RE = score_RE * np.exp(-log_count_E)
    else:
        score_RE = np.asarray(router_scores(router.score, logits_RE), np.float64)
    bias_E = layer.get("router_bias_E")
    biased_RE = np.asarray(choice_scores(router, logits_RE, score_RE, bias_E=bias_E))
    return score_RE, np.argsort(-biased_RE, axis=-1)[:, : router.num_selected]


def cluster_experts(y_ERD, num_clusters: int) -> list[list[int]]:
    """Clusters of experts with similar outputs, ordered by the first of each.

    The distance of two experts is that of all their outputs over the root of the product of
    their norms; clusters are joined by the average distance of their members.

    Args:
        y_ERD: output of each expert for the same rows.
    """
    E = len(y_ERD)
    flat = np.asarray(y_ERD, np.float64).reshape(E, -1)
    norm_E = np.maximum(np.linalg.norm(flat, axis=1), 1e-30)
    squares_EE = norm_E[:, None] ** 2 + norm_E**2 - 2 * flat @ flat.T
    distance_EE = np.sqrt(np.maximum(squares_EE, 0) / np.outer(norm_E, norm_E))
    np.fill_diagonal(distance_EE, 0)
    if E == 1:
        return [[0]]
    pairs = scipy.spatial.distance.squareform(distance_EE, checks=False)
    joined = scipy.cluster.hierarchy.linkage(pairs, "average")
    label_E = scipy.cluster.hierarchy.cut_tree(joined, n_clusters=num_clusters)[:, 0]
    clusters = [np.flatnonzero(label_E == label).tolist() for label in np.unique(label_E)]
    return sorted(clusters)


def reshaped(
    after: ModelConfig,
    config: ModelConfig,
    params: dict,
    change: Callable[..., tuple[Layer, np.ndarray]],
    *samples: Sequence,
) -> Reshaped:
    """The model with each Switch layer changed, one after the other.

    Args:
        after: configuration of the changed model, layers unrolled.
        config, params: the model; one of the two is sparse, and says which layers are changed.
        change: function of a layer's arrays and of its `samples`; returns the new arrays and
            the layer's part of `Reshaped.origin_NE`.
    """
    names = (after if config.switch is None else config).sparse_layer_names
    leaves, origin_NE = tree.named_leaves(unrolled(config, params)[1]), []
    for name, *of_layer in zip(names, *samples, strict=True):
        stack, number = name.split()
        path = f"{stack}/blocks/layer_{number}/ffn/"
        layer = {
            leaf.removeprefix(path): np.asarray(leaves.pop(leaf))
            for leaf in list(leaves)
            if leaf.startswith(path) and not leaf.startswith(f"{path}shared_")
        }
        changed, origin_E = change(layer, *of_layer)
        leaves |= {f"{path}{leaf}": value for leaf, value in changed.items()}
        origin_NE.append(origin_E)
    return Reshaped(after, tree.nested(leaves), tuple(origin_NE))


def taken(layer: Layer, experts: np.ndarray) -> Layer:
    """The layer with these experts only; E is the last dimension of a router's arrays. Their
    loads are shares of what they had together."""
    found = {
        name: array[experts] if name.startswith("experts/") else array[..., experts]
        for name, array in layer.items()
    }
    if (load_E := found.get("router_load_E")) is not None:
        total = load_E.sum(axis=-1, keepdims=True)
        found["router_load_E"] = np.where(total > 0, load_E / np.where(total > 0, total, 1), 0)
    return found


def _hidden(config: ModelConfig, layer: Layer, x_RD) -> np.ndarray:
    """`[E, R, F]`: the experts' activations of the same rows, one expert at a time."""
    x_RD = np.asarray(x_RD, np.float32)
    b_in_EF = layer.get("experts/b_in_EF")
    gates = layer.get("experts/w_gate_EDF")
    hidden = []
    for e, w_in_DF in enumerate(layer["experts/w_in_EDF"]):
        h_RF = x_RD @ w_in_DF.astype(np.float32)
        if b_in_EF is not None:
            h_RF = h_RF + b_in_EF[e].astype(np.float32)[None]
        gate_RF = None if gates is None else x_RD @ gates[e].astype(np.float32)
        hidden.append(np.asarray(activate(config.activation, h_RF, gate_RF)))
    return np.stack(hidden)


def _outputs(layer: Layer, hidden_ERF) -> np.ndarray:
    """`[E, R, D]`: the experts' outputs, from their activations."""
    w_out_EFD = layer["experts/w_out_EFD"]
    b_out_ED = layer.get("experts/b_out_ED")
    outputs = []
    for e, (h_RF, w_out_FD) in enumerate(zip(hidden_ERF, w_out_EFD, strict=True)):
        y_RD = h_RF @ w_out_FD.astype(np.float32)
        outputs.append(
            y_RD if b_out_ED is None else y_RD + b_out_ED[e].astype(np.float32)[None]
        )
    return np.stack(outputs)


def _merged(layer: Layer, sample: LayerSample, hidden_ERF, clusters) -> Layer:
    """The layer with one expert per cluster."""
    x_RD = sample.x_RD.astype(np.float64)
    w_router_DE = layer["w_router_DE"].astype(np.float64)
    zero_E = np.zeros(len(sample.load_E))
    log_count_E = layer.get("router_log_count_E", zero_E).astype(np.float64)
    bias_E = layer.get("b_router_E", zero_E).astype(np.float64)
    columns = []
    biases = []
    log_counts = []
    experts = []
    for members in clusters:
        use = np.asarray(sample.load_E, np.float64)[members] + 1e-9
        share = use / use.sum()
        column_D = w_router_DE[:, members[0]]
        log_count = log_count_E[members[0]]
        if len(members) > 1:
            column_D, log_count = _merged_router(
                x_RD, w_router_DE[:, members], bias_E[members], log_count_E[members], share
            )
        columns.append(column_D)
        log_counts.append(log_count)
        biases.append(bias_E[members] @ share)
        experts.append(_merged_expert(layer, hidden_ERF, members, share))
    dtype = layer["w_router_DE"].dtype
    merged = {
        "w_router_DE": np.stack(columns, axis=-1).astype(dtype),
        "router_log_count_E": np.array(log_counts).astype(dtype),
    }
    if "router_bias_E" in layer:
        balance_E = layer["router_bias_E"]
        merged["router_bias_E"] = np.array([balance_E[m].mean() for m in clusters], np.float32)
    if "router_load_E" in layer:
        load_E = layer["router_load_E"]
        merged["router_load_E"] = np.array([load_E[m].sum() for m in clusters], np.float32)
    if "b_router_E" in layer:
        merged["b_router_E"] = np.array(biases).astype(layer["b_router_E"].dtype)
    for name in experts[0]:
        values = np.stack([expert[name] for expert in experts])
        merged[name] = values.astype(layer[name].dtype)
    return merged


def _merged_router(x_RD, w_DC, bias_C, log_count_C, share):
    """A column whose logit is near the largest of a cluster's, and the logarithm of its count.

    The logit's bias is the mean of `bias_C`, weighted by `share`.

    By ridge regression of what the mean of the cluster's columns leaves over.
    """
    mean_D = w_DC @ share
    logits_RC = x_RD @ w_DC + bias_C[None] - bias_C @ share
    rest_R = logits_RC.max(axis=1) - x_RD @ mean_D
    penalty = RIDGE * np.sum(x_RD**2) / len(mean_D) + 1e-12
    square_DD = x_RD.T @ x_RD + penalty * np.eye(len(mean_D))
    column_D = mean_D + np.linalg.solve(square_DD, x_RD.T @ rest_R)
    sum_R = np.logaddexp.reduce(logits_RC + log_count_C[None], axis=1)
    return column_D, np.mean(sum_R - x_RD @ column_D)


def _merged_expert(layer: Layer, hidden_ERF, members: list[int], share) -> Layer:
    """The weighted mean of the members, their hidden units in the order of the most used one.

    Hidden units are paired so that the products of their activations and of their input weights
    are the largest: the latter distinguish units that the sample never activates.
    """
    lead = members[int(np.argmax(share))]
    w_in_EDF = layer["experts/w_in_EDF"]
    merged: dict[str, Any] = {}
    for member, weight in zip(members, share, strict=True):
        order_F = np.arange(hidden_ERF.shape[-1])
        if member != lead:
            likeness_FF = _products(hidden_ERF[lead], hidden_ERF[member])
            likeness_FF = likeness_FF + _products(w_in_EDF[lead], w_in_EDF[member])
            _, order_F = scipy.optimize.linear_sum_assignment(likeness_FF, maximize=True)
        for name, array in layer.items():
            if name.startswith("experts/"):
                value = array[member].astype(np.float64)
                value = _ordered(name.rsplit("_", 1)[-1], value, order_F)
                merged[name] = merged.get(name, 0.0) + weight * value
    return merged


def _products(a_XF, b_XF) -> np.ndarray:
    """Products of all pairs of columns, `[F, F]`, over the root of all columns' norms."""
    a_XF, b_XF = a_XF.astype(np.float64), b_XF.astype(np.float64)
    return a_XF.T @ b_XF / max(np.linalg.norm(a_XF) * np.linalg.norm(b_XF), 1e-30)


def _ordered(dims: str, value, order_F):
    """An expert's array, dimensions as in `EDF`, with its hidden units in another order."""
    axis = dims[1:].find("F")
    return value if axis < 0 else np.take(value, order_F, axis=axis)
