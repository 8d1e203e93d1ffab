# SPDX-License-Identifier: Apache-2.0
"""Load, drops, entropy and gate of every Switch layer over training, from `metrics.jsonl`.

The first axis of what is read counts the logged steps. Dims: N E
"""

import dataclasses
import json
import pathlib

import numpy as np

# An expert with less than this part of an even share is called dead.
DEAD_FRACTION = 0.01


@dataclasses.dataclass(frozen=True)
class RoutingHistory:
    """Means over the steps between two lines of the log, by step and Switch layer.

    Attributes:
        steps: steps that were logged, `[steps]`.
        load: `[steps, N, E]`, share of the layer's choices that asked for each expert.
        dropped: `[steps, N]`, choices without a slot, per token.
        entropy: `[steps, N]`, of the router, in nats; ln E where it knows nothing.
        gate: `[steps, N]`, weight of the first choice.
    """

    steps: np.ndarray
    load: np.ndarray
    dropped: np.ndarray
    entropy: np.ndarray
    gate: np.ndarray

    @property
    def num_experts(self) -> int:
        return self.load.shape[-1]


def read_history(path: pathlib.Path) -> RoutingHistory:
    """The routing in a `metrics.jsonl`; lines of steps that were all skipped have none.

    Raises:
        ValueError: the file is missing or damaged, holds no line, or is of a dense model.
    """
    lines = _read_lines(path)
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
    return RoutingHistory(
        steps=np.array([line["step"] for line in routed]),
        # With several choices a token the loads add up to their number.
        load=load / np.maximum(load.sum(axis=-1, keepdims=True), 1e-12),
        dropped=stacked("dropped"),
        entropy=stacked("entropy"),
        gate=stacked("gate"),
    )


def even_shares(load: np.ndarray) -> np.ndarray:
    """Load `[..., E]` in units of an even share: 1 everywhere when balanced."""
    mean = np.mean(load, axis=-1, keepdims=True)
    return load / np.maximum(mean, 1e-12)


def dead_experts(load: np.ndarray, fraction: float = DEAD_FRACTION) -> np.ndarray:
    """Which experts of `[..., E]` have less than `fraction` of an even share."""
    return even_shares(load) < fraction


def _read_lines(path: pathlib.Path) -> list[dict]:
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
        except ValueError as error:
            if number == len(texts):
                break  # a run that goes on is writing it, or was killed while it did
            raise ValueError(
                f"{path}: line {number} is damaged ({error}); remove that line"
            ) from error
    return lines
