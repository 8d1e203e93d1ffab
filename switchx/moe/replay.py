# SPDX-License-Identifier: Apache-2.0
"""Routing replay: a batch says which experts its tokens go to, in place of the routers.

Ma et al. 2025 (Rollout Routing Replay, arXiv:2510.11370): the choices made while text was
generated are constants in training, and gates stay the router's, with their gradient. The
choices are features of a batch, `encoder_replay` and `decoder_replay`, int16 or int32
`[B, L, N, S]`, for the stacks that have Switch layers: N of them, in order. They are laid out
in the rows of the batch like its tokens, with padding and packed examples, so they are cut and
sharded like these. A value is the number of an expert, before it has copies, or `UNSET`.
Dims: B batch, L length, N Switch layers of a stack, S choices of a token, E experts, R rows of
a record, K choices that it has
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from switchx.fields import require

# The token's own router chooses. Not 0, which is an expert, and not the number of experts, by
# which a `RoutingPlan` says that nothing is routed.
UNSET = -1
SUFFIX = "_replay"


def given_choices(config, batch: Mapping[str, Any], stack: str):
    """The choices `[B, L, N, S]` that a batch gives a stack's Switch layers; None without any.

    Args:
        config: a `ModelConfig`.

    Raises:
        ValueError: they have another shape, or the model's routers do not replay.
    """
    name = stack + SUFFIX
    if name not in batch:
        return None
    switch = config.switch
    require(
        switch is not None and switch.router.replay,
        f"a batch with {name}, and RouterConfig.replay=False: its choices would not be read; "
        "use RouterConfig.replay=True, or leave them out of the batch",
    )
    N, given = config.num_sparse_layers_of(stack), batch[name]
    want = (*batch[f"{stack}_segment_ids"].shape, N, switch.router.num_selected)
    require(
        given.shape == want,
        f"{name} of shape {given.shape}; expected {want}, which is [rows, tokens, the stack's "
        "Switch layers, RouterConfig.num_selected]: see moe/replay.py",
    )
    return given if N else None


def without_choices(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch for another model, whose routers choose by themselves."""
    return {name: x for name, x in batch.items() if not name.endswith(SUFFIX)}


def unset_choices(config, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The features that leave all choices of a batch to the routers of a `ModelConfig`."""
    E, S = config.switch.num_experts, config.switch.router.num_selected
    return {
        stack + SUFFIX: np.full((*batch[f"{stack}_segment_ids"].shape, N, S), UNSET, _dtype(E))
        for stack in ("encoder", "decoder")
        if (N := config.num_sparse_layers_of(stack))
    }


def choices_of_rows(
    expert_NRLK,
    row_R: Sequence[int],
    row_B: Sequence[int],
    *,
    num_experts: int,
    num_selected: int,
) -> np.ndarray:
    """The choices `[B, L, N, S]` of a batch's rows, out of those recorded in a stack.

    Args:
        expert_NRLK: experts that tokens went to, the first choice first; `num_experts` or
            `UNSET` for none, as in padding (`RecordedBatch.expert_NBLS`).
        row_R: ids of the rows recorded; `UNSET` for any that are all padding.
        row_B: ids of the batch's rows; `UNSET` for a row that is all padding.
        num_selected: S, the number of ranks that are taken.

    Raises:
        ValueError: a row was not recorded, or recorded twice or with fewer choices.
    """
    expert_NRLK = np.asarray(expert_NRLK)
    rows = [int(row) for row in row_B]
    N, R, L, K = expert_NRLK.shape
    place = {int(row): r for r, row in enumerate(row_R) if row != UNSET}
    num_ids = sum(int(row) != UNSET for row in row_R)
    require(
        len(row_R) == R and len(place) == num_ids,
        f"{R} rows were recorded with {len(row_R)} ids, {num_ids - len(place)} of them there "
        "before; expected another for each: record again",
    )
    require(
        num_selected <= K,
        f"{K} choices of a token were recorded, and RouterConfig.num_selected={num_selected}; "
        f"use num_selected={K}, or record more",
    )
    missing = [row for row in rows if row != UNSET and row not in place]
    require(
        not missing,
        f"{len(missing)} of {len(rows)} rows are not in the record, the first with id "
        f"{missing[:1]}; replay the texts that were recorded, in rows of the same lengths",
    )
    expert_NRLK = np.where(expert_NRLK == num_experts, UNSET, expert_NRLK)[..., :num_selected]
    nothing = np.full((N, 1, L, num_selected), UNSET)  # the row after the last one
    expert_NRLK = np.concatenate([expert_NRLK, nothing], axis=1)
    found = expert_NRLK[:, [R if row == UNSET else place[row] for row in rows]]
    return np.moveaxis(found, 0, 2).astype(_dtype(num_experts))


def check_replay(config, batch: Mapping[str, np.ndarray]) -> None:
    """Checks the choices that a batch gives, on the host, before a step reads it.

    Args:
        config: a `ModelConfig`.

    Raises:
        ValueError: names the feature, row, place and layer of the first choice that is out of
            range, twice in a token, missing beside others of the token, or given to padding.
    """
    for stack in ("encoder", "decoder"):
        given = given_choices(config, batch, stack)
        if given is None:
            continue
        name, given_BLNS = stack + SUFFIX, np.asarray(given)
        require(
            np.issubdtype(given_BLNS.dtype, np.signedinteger),
            f"{name} has the type {given_BLNS.dtype}; use int16 or int32",
        )
        is_token_BL = np.asarray(batch[f"{stack}_segment_ids"]) > 0
        if config.switch.router.padding == "counted":
            is_token_BL = np.ones_like(is_token_BL)
        for is_wrong_BLNS, what in _faults(given_BLNS, is_token_BL, config.switch.num_experts):
            if not np.any(is_wrong_BLNS):
                continue
            row, place, layer, _ = map(int, np.argwhere(is_wrong_BLNS)[0])
            layers = [each for each in config.sparse_layer_names if each.startswith(stack)]
            raise ValueError(
                f"{name}, row {row}, place {place}, layer {layer} ({layers[layer]}): "
                f"{given_BLNS[row, place, layer].tolist()}; {what}"
            )


def _faults(given_BLNS, is_token_BL, num_experts: int) -> Iterator[tuple[np.ndarray, str]]:
    """Where choices are wrong `[B, L, N, ...]`, and what is expected there."""
    is_set_BLNS = given_BLNS >= 0
    yield (
        (given_BLNS < UNSET) | (given_BLNS >= num_experts),
        f"expected experts 0 to {num_experts - 1}, or {UNSET} where the router chooses",
    )
    sorted_BLNS = np.sort(given_BLNS, axis=-1)
    is_twice = (sorted_BLNS[..., 1:] == sorted_BLNS[..., :-1]) & (sorted_BLNS[..., 1:] >= 0)
    yield is_twice, "an expert is there twice; a token chooses an expert once: record again"
    yield (
        is_set_BLNS != np.any(is_set_BLNS, axis=-1, keepdims=True),
        f"the router might choose one that is given; give all choices, or {UNSET} for all",
    )
    yield (
        is_set_BLNS & ~is_token_BL[:, :, None, None],
        f"this is padding, so the choices are laid out in another way than the tokens; use "
        f"{UNSET} in padding, and lay them out alike",
    )


def _dtype(num_experts: int):
    return np.int16 if num_experts <= np.iinfo(np.int16).max else np.int32
