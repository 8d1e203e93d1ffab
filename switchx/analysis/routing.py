# SPDX-License-Identifier: Apache-2.0
"""What a run recorded about its routing, and what can be counted in it.

`metrics.jsonl` has means of every Switch layer over training (`RoutingHistory`), `routing/` has
where single tokens of a fixed sample went at each evaluation (`Snapshot`). Expert ids of
`num_experts` mean that nothing was chosen; all functions leave them out. Router saturation is
that of OLMoE (Muennighoff et al. 2024, arXiv:2409.02060, section 5.1).

Dims: N Switch layers, T tokens of the sample, S experts selected by a token, E experts
"""

import collections
import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Sequence

import numpy as np

from switchx.fields import require
from switchx.moe.config import SwitchConfig
from switchx.npz import read_arrays
from switchx.routing_record import open_record

_NUMBERS = {"step": (np.integer, 0), "num_experts": (np.integer, 0)}
_STACKS = {
    f"{stack}_{name}": kind
    for stack in ("encoder", "decoder")
    for name, kind in {
        "layers_N": (np.str_, 1),
        "token_T": (np.integer, 1),
        "expert_NTS": (np.integer, 3),
        "gate_NTS": (np.floating, 3),
    }.items()
}


@dataclasses.dataclass(frozen=True)
class RoutingHistory:
    """Means over the steps between two lines of the log, by step and Switch layer.

    Attributes:
        steps: steps that were logged, `[steps]`.
        load: `[steps, N, E]`, share of the layer's choices that asked for each expert.
        dropped: `[steps, N]`, share of the choices that asked for a slot and got none.
        entropy: `[steps, N]`, entropy of the router, in nats; ln E if it knows nothing.
        gate: `[steps, N]`, weight of the first choice.
        others: `[steps, N]` by name, all other numbers of the layers that every line has
            (`telemetry/metrics.routing_metrics`): `max_violation`, `information`, ...; the
            floor `expected_dropped` is a share of choices, too.
    """

    steps: np.ndarray
    load: np.ndarray
    dropped: np.ndarray
    entropy: np.ndarray
    gate: np.ndarray
    others: dict[str, np.ndarray]

    @property
    def num_experts(self) -> int:
        return self.load.shape[-1]


def read_history(path: pathlib.Path) -> RoutingHistory:
    """The routing in a `metrics.jsonl`; lines of steps that were all skipped have none.

    Raises:
        ValueError: the file is missing or damaged, holds no line, or is of a dense model.
    """
    lines = read_lines(path)
    routed = [line for line in lines if "routing" in line]
    if not lines:
        raise ValueError(f"{path} has no line yet; train until a step is logged (LOG_EVERY)")
    if not routed:
        raise ValueError(
            f"{path} has no routing, the model is dense or every step was skipped; give the "
            "folder of a run with Switch layers"
        )

    def stacked(name: str) -> np.ndarray:
        return np.array([line["routing"][name] for line in routed], np.float64)

    load = stacked("load")
    mine = {field.name for field in dataclasses.fields(RoutingHistory)} | {"asked"}
    names = set.intersection(*({*line["routing"]} for line in routed)) - mine
    others = {name: stacked(name) for name in sorted(names)}
    # With several choices per token, the loads add up to their number.
    num_choices = np.maximum(load.sum(axis=-1), 1e-12)
    asked = [  # logged where experts choose
        line["routing"].get("asked", each)
        for line, each in zip(routed, num_choices, strict=True)
    ]
    if "expected_dropped" in others:
        others["expected_dropped"] /= num_choices
    return RoutingHistory(
        steps=np.array([line["step"] for line in routed]),
        load=load / num_choices[..., None],
        dropped=stacked("dropped") / np.maximum(asked, 1e-12),
        entropy=stacked("entropy"),
        gate=stacked("gate"),
        others=others,
    )


def read_lines(path: pathlib.Path) -> list[dict]:
    """The lines of a JSON log; a last line that is still being written is left out.

    Raises:
        ValueError: the file is missing or damaged, or a line has no step or a loss that is not
            a number.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); give the model_dir of a run that has "
            "logged a step"
        ) from error
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
            is_number = isinstance(lines[-1].get("neg_log_perplexity"), int | float | None)
            if not (is_number and isinstance(lines[-1].get("step"), int)):
                raise TypeError("expected a step, and a number as neg_log_perplexity")
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"{path}: line {number} is no line of a log ({error}); write it as it was, or "
                "remove it"
            ) from error
        except ValueError as error:
            if number == len(texts):
                break  # a running process is writing it, or was killed while it did
            raise ValueError(
                f"{path}: line {number} is damaged ({error}); remove that line"
            ) from error
    return lines


@dataclasses.dataclass(frozen=True)
class StackRouting:
    """Tokens that an encoder or a decoder read, and where its Switch layers sent them.

    Attributes:
        layers: names of the Switch layers.
        token_T: ids of the tokens read; a decoder's are its inputs, shifted right.
        expert_NTS: experts chosen.
        gate_NTS: weights of these experts.
    """

    layers: tuple[str, ...]
    token_T: np.ndarray
    expert_NTS: np.ndarray
    gate_NTS: np.ndarray

    def __post_init__(self):
        shape = self.expert_NTS.shape
        require(
            shape[:2] == (len(self.layers), len(self.token_T)) and shape == self.gate_NTS.shape,
            f"{len(self.layers)} layers, {len(self.token_T)} tokens, experts {list(shape)} and "
            f"gates {list(self.gate_NTS.shape)} do not fit each other",
        )


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The routing of a fixed sample of validation tokens at one step.

    Attributes:
        switch: configuration of the Switch layers; in the form used before 2026-11-27 only the
            number of experts is known, and all else is as in the paper.
    """

    step: int
    switch: SwitchConfig
    stacks: tuple[StackRouting, ...]

    @property
    def num_experts(self) -> int:
        return self.switch.num_experts

    @property
    def layers(self) -> list[str]:
        """Names of all Switch layers, in the order of the metrics."""
        return [layer for stack in self.stacks for layer in stack.layers]


def read_snapshots(folder: pathlib.Path) -> list[Snapshot]:
    """The samples in a run's `routing/` folder, by step.

    Raises:
        ValueError: there is none, a file is damaged, or one is of other Switch layers than the
            last.
    """
    found = {path: _of_record(path) for path in folder.glob("step_*.parquet")}
    found |= {path: _read(path) for path in folder.glob("step_*.npz")}
    if not found:
        raise ValueError(
            f"{folder} holds no routing sample; each evaluation in training writes one, so "
            "train a model with Switch layers until it is evaluated (EVAL_EVERY)"
        )
    newest, last = max(found.items(), key=lambda item: item[1].step)
    for path, each in found.items():
        require(
            (each.layers, each.num_experts) == (last.layers, last.num_experts),
            f"{path} is of {each.num_experts} experts in {', '.join(each.layers)}, and "
            f"{newest.name} of {last.num_experts} in {', '.join(last.layers)}; they are of two "
            "models: remove the one that does not belong there",
        )
    return sorted(found.values(), key=lambda snapshot: snapshot.step)


def comparable(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """The snapshots of the same tokens as the last one.

    A run that was resumed on other data has a new sample from then on.
    """

    def tokens(snapshot: Snapshot) -> list[list[int]]:
        return [stack.token_T.tolist() for stack in snapshot.stacks]

    return [each for each in snapshots if tokens(each) == tokens(snapshots[-1])]


def _of_record(path: pathlib.Path) -> Snapshot:
    """The tokens of a record, without padding."""
    record = open_record(path)
    parts = collections.defaultdict(list)
    for batch in record.batches():
        where = batch.is_token_BL
        arrays = batch.token_BL[where], batch.chosen_NBLS[:, where], batch.gate_NBLS[:, where]
        parts[batch.stack].append(arrays)
    stacks = []
    for stack, layers in record.info.layers.items():
        token, expert, gate = zip(*parts[stack], strict=True)
        joined = np.concatenate(expert, axis=1), np.concatenate(gate, axis=1)
        stacks.append(StackRouting(tuple(layers), np.concatenate(token), *joined))
    return Snapshot(record.info.step, record.info.switch, tuple(stacks))


def _read(path: pathlib.Path) -> Snapshot:
    """Reads a snapshot in the form used before 2026-11-27 (`.npz`)."""
    try:
        arrays = read_arrays(path, _NUMBERS, _STACKS)
        stacks = tuple(
            StackRouting(
                tuple(map(str, arrays[f"{stack}_layers_N"])),
                arrays[f"{stack}_token_T"],
                arrays[f"{stack}_expert_NTS"],
                arrays[f"{stack}_gate_NTS"].astype(np.float32),
            )
            for stack in ("encoder", "decoder")
            if f"{stack}_token_T" in arrays
        )
        return Snapshot(int(arrays["step"]), SwitchConfig(int(arrays["num_experts"])), stacks)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{path} is no routing sample that can be read ({error}); remove it, or restore it "
            "from a copy"
        ) from error


def transitions(expert_NTS: np.ndarray, num_experts: int) -> np.ndarray:
    """Tokens from each expert of a layer to each expert of the next, `[N - 1, E, E]`.

    A token with several choices counts once per layer: its pairs share a weight of 1.
    """
    pairs = zip(expert_NTS, expert_NTS[1:], strict=False)
    counts = [
        transitions_between(here_TS, there_TS, num_experts) for here_TS, there_TS in pairs
    ]
    return np.reshape(counts, (-1, num_experts, num_experts))


def transitions_between(
    here_TS: np.ndarray, there_TS: np.ndarray, num_experts: int
) -> np.ndarray:
    """Tokens from each expert of one layer to each of another, `[E, E]`, as `transitions`."""
    is_here_TS, is_there_TS = here_TS < num_experts, there_TS < num_experts
    num_pairs_T = is_here_TS.sum(axis=1) * is_there_TS.sum(axis=1)
    return expert_pairs(here_TS, there_TS, num_experts, 1 / np.maximum(num_pairs_T, 1))


def expert_pairs(
    here_TS: np.ndarray, there_TS: np.ndarray, num_experts: int, weight_T: np.ndarray
) -> np.ndarray:
    """Sums of weights over tokens that chose one expert here and one there, `[E, E]`."""
    E, counts = num_experts, np.zeros(num_experts**2)
    for here_T in here_TS.T:
        for there_T in there_TS.T:
            is_pair_T = (here_T < E) & (there_T < E)
            pair = here_T[is_pair_T].astype(np.int64) * E + there_T[is_pair_T]
            counts += np.bincount(pair, weight_T[is_pair_T], minlength=E * E)
    return counts.reshape(E, E)


def rows_to_shares(counts: np.ndarray) -> np.ndarray:
    """Every row of `[..., rows, columns]` divided by its sum; NaN in empty rows."""
    sums = counts.sum(axis=-1, keepdims=True)
    return np.divide(counts, sums, out=np.full(counts.shape, np.nan), where=sums > 0)


def class_counts(
    expert_TS: np.ndarray, class_T: np.ndarray, num_experts: int, num_classes: int
) -> np.ndarray:
    """Choices of each expert by tokens of each class, `[E, classes]`.

    Args:
        class_T: class of every token, as `data/tokenizers.py` has it.
    """
    counts = np.zeros((num_experts, num_classes), np.int64)
    is_choice_TS = expert_TS < num_experts
    class_TS = np.broadcast_to(class_T[:, None], expert_TS.shape)
    np.add.at(counts, (expert_TS[is_choice_TS], class_TS[is_choice_TS]), 1)
    return counts


@dataclasses.dataclass(frozen=True)
class TypicalToken:
    """A token id that is often routed to an expert, and more often than to the other experts.

    Attributes:
        count: number of times that the token chose the expert.
        share: share of the expert in all choices of this token.
    """

    token: int
    count: int
    share: float


@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """Choices of each expert by each token id that made any: cells X, by expert.

    Attributes:
        token_V: token ids that were seen.
        times_V: number of tokens of each id.
        expert_X, index_X: expert of a cell, and the index of its token id in `token_V`.
        count_X: choices of the expert by tokens of the id.
    """

    token_V: np.ndarray
    times_V: np.ndarray
    expert_X: np.ndarray
    index_X: np.ndarray
    count_X: np.ndarray

    @functools.cached_property
    def choices_V(self) -> np.ndarray:
        """Choices by tokens of each id, of all experts together."""
        sums = np.bincount(self.index_X, self.count_X, minlength=len(self.token_V))
        return sums.astype(np.int64)

    @property
    def share_X(self) -> np.ndarray:
        """N(expert, id) / N(id): the share of the id's tokens that chose the expert."""
        return self.count_X / self.times_V[self.index_X]


def token_counts(expert_TS: np.ndarray, token_T: np.ndarray, num_experts: int) -> TokenCounts:
    """Counts the choices of each expert by each token id."""
    token_V, index_T, times_V = np.unique(token_T, return_inverse=True, return_counts=True)
    is_choice_TS = expert_TS < num_experts
    index_TS = np.broadcast_to(index_T[:, None], expert_TS.shape)[is_choice_TS]
    V = max(len(token_V), 1)
    cells, count_X = np.unique(
        expert_TS[is_choice_TS].astype(np.int64) * V + index_TS, return_counts=True
    )
    return TokenCounts(token_V, times_V, cells // V, cells % V, count_X)


def typical_tokens(counts: TokenCounts, expert: int, num: int) -> list[TypicalToken]:
    """The `num` token ids that tell most about an expert, the most telling first.

    They are ordered by their part of the divergence KL(tokens of the expert || tokens of
    all): q ln(q / p), with q the token's share of the expert's choices, p that of all choices.
    Token ids with q <= p, no more frequent at the expert than overall, are left out.
    """
    choices_V = counts.choices_V
    cells = slice(*np.searchsorted(counts.expert_X, (expert, expert + 1)))
    index, count = counts.index_X[cells], counts.count_X[cells]
    q = count / max(count.sum(), 1)
    p = choices_V[index] / max(choices_V.sum(), 1)
    told = q * np.log(q / p)
    order = np.argsort(-told, kind="stable")[:num]
    return [
        TypicalToken(
            int(counts.token_V[index[i]]),
            int(count[i]),
            float(count[i] / choices_V[index[i]]),
        )
        for i in order
        if told[i] > 0
    ]


def saturation(expert_NTS: np.ndarray, final_NTS: np.ndarray, num_experts: int) -> np.ndarray:
    """The share of the final routing that is already reached, `[N]`: the mean over tokens of
    |E_t intersected with E_final| / |E_final|, E being the set of experts that a token chose.

    Tokens that end without an expert are left out.

    Raises:
        ValueError: the two differ in layers or tokens.
    """
    if expert_NTS.shape[:2] != final_NTS.shape[:2]:
        raise ValueError(
            f"routing of shape {expert_NTS.shape} cannot be compared with the final one of "
            f"shape {final_NTS.shape}; compare samples of the same tokens (`comparable`)"
        )
    is_final_NTS = final_NTS < num_experts
    is_shared_NTS = (final_NTS[..., :, None] == expert_NTS[..., None, :]).any(axis=-1)
    shared_NT = (is_shared_NTS & is_final_NTS).sum(axis=-1)
    chosen_NT = is_final_NTS.sum(axis=-1)
    share_NT = shared_NT / np.maximum(chosen_NT, 1)
    tokens_N = np.maximum((chosen_NT > 0).sum(axis=-1), 1)
    return share_NT.sum(axis=-1) / tokens_N


def saturation_by_step(snapshots: Sequence[Snapshot]) -> np.ndarray:
    """Saturation of every snapshot against the last, `[snapshots, N]` over all layers."""
    last = snapshots[-1]

    def of_layers(snapshot: Snapshot) -> np.ndarray:
        pairs = zip(snapshot.stacks, last.stacks, strict=True)
        return np.concatenate(
            [saturation(a.expert_NTS, b.expert_NTS, last.num_experts) for a, b in pairs]
        )

    return np.array([of_layers(each) for each in snapshots])


def layer_similarity(expert_NTS: np.ndarray, num_experts: int) -> np.ndarray:
    """Normalised mutual information of the layers' first choices, `[N, N]`.

    I(A; B) / sqrt(H(A) H(B)): 1 if one layer's expert determines the other's, however experts
    are numbered; 0 if it tells nothing. A layer that sends all tokens to one expert tells
    nothing: its row is 0.
    """
    first_NT = expert_NTS[..., 0]
    similarity_NN = np.zeros((len(first_NT), len(first_NT)))
    for a, here_T in enumerate(first_NT):
        for b, there_T in enumerate(first_NT):
            # The class of a token is its other expert; those without one are the last.
            counts = class_counts(here_T[:, None], there_T, num_experts, num_experts + 1)
            similarity_NN[a, b] = information(counts[:, :-1]).normalised
    return similarity_NN


@dataclasses.dataclass(frozen=True)
class Information:
    """The mutual information of rows and columns of a table of counts, in nats.

    Attributes:
        mutual: I(row; column).
        rows, columns: entropies of the rows and the columns.
    """

    mutual: float
    rows: float
    columns: float

    @property
    def normalised(self) -> float:
        """I / sqrt(H(row) H(column)); 0 if one of them is always the same."""
        if min(self.rows, self.columns) < 1e-9:  # one expert, up to rounding
            return 0.0
        return self.mutual / math.sqrt(self.rows * self.columns)


def information(counts: np.ndarray) -> Information:
    """The information in a table of counts `[rows, columns]`, such as `class_counts`.

    The counts are taken as frequencies: I = H(row) + H(column) - H(row, column). For a sample,
    I is biased upwards: compare it with I of permuted labels.
    """

    def entropy(share: np.ndarray) -> float:
        return float(-np.sum(share[share > 0] * np.log(share[share > 0])))

    joint = counts / max(counts.sum(), 1)
    rows, columns = entropy(joint.sum(axis=1)), entropy(joint.sum(axis=0))
    return Information(rows + columns - entropy(joint), rows, columns)
