# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: the angle, per position, by which feature pairs of queries and keys turn.

Su et al. 2021 (RoFormer, arXiv:2104.09864), section 3.2.2: feature i and feature i + r/2 of the
r rotated ones of a head are a pair, which at position p is turned by the angle p f_i, where
f_i = theta^(-2 i / r). For texts longer than those of pretraining, frequencies are divided by a
factor: all of them (Chen et al. 2023, arXiv:2306.15595), or only the low ones (YaRN, Peng et
al. 2023, arXiv:2309.00071, section 3.2; Llama 3.1, whose code is the source). The rotation is
in `positions.py`.
Dims: K pairs of features of a head
"""

import dataclasses
import math
from typing import Literal

import numpy as np

from switchx.fields import check_choices, require, require_above_zero, require_at_least


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """Frequencies of rotary positions; `ModelConfig.rotary`.

    Attributes:
        theta: base of the frequencies.
        fraction: share of a head's features that are rotated, from the first on (rounded down).
        scaling: division of frequencies for longer texts: `none`, `linear` (all are divided by
            `factor`), `yarn` or `llama3` (those of wavelengths that are long compared to
            `original_length`).
        factor: divisor of the frequencies.
        original_length: length in tokens of texts before scaling; required by yarn and llama3.
        low_frequency, high_frequency: turns within `original_length` (llama3): frequencies
            that turn less than the first are divided, those that turn more than the second
            are not.
        beta_slow, beta_fast: the same bounds for yarn.
        truncate: whether yarn rounds the bounds, as numbers of pairs, to whole ones.
        attention_factor: factor of rotated queries and keys (yarn); None takes
            0.1 ln(factor) + 1, the paper's eq. 22.
    """

    theta: float = 10000.0
    fraction: float = 1.0
    scaling: Literal["none", "linear", "yarn", "llama3"] = "none"
    factor: float = 1.0
    original_length: int | None = None
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self):
        check_choices(self)
        require_above_zero(self, "low_frequency", "high_frequency", "beta_slow", "beta_fast")
        require_above_zero(self, "attention_factor")
        require_at_least(self, 1, "factor", "original_length")
        require(
            1 < self.theta < math.inf and 0 < self.fraction <= 1,
            f"RotaryConfig.theta={self.theta}, fraction={self.fraction}; use theta above 1 and "
            "0 < fraction <= 1",
        )
        require(
            self.low_frequency < self.high_frequency and self.beta_slow < self.beta_fast,
            f"RotaryConfig.low_frequency={self.low_frequency}, high_frequency="
            f"{self.high_frequency}, beta_slow={self.beta_slow}, beta_fast={self.beta_fast}; "
            "use low_frequency < high_frequency and beta_slow < beta_fast",
        )
        require(
            self.scaling != "none" or self.factor == 1,
            f"RotaryConfig.factor={self.factor} with scaling='none'; name a scaling, or use 1",
        )
        require(
            self.scaling not in ("yarn", "llama3") or self.original_length is not None,
            f"RotaryConfig.scaling={self.scaling!r} needs original_length, the length of texts "
            "in pretraining",
        )

    def num_rotated(self, d_head: int) -> int:
        """Features of a head that are rotated."""
        return int(d_head * self.fraction)

    @property
    def magnitude(self) -> float:
        """The factor of rotated queries and keys."""
        if self.scaling != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0

    def frequencies(self, d_head: int) -> np.ndarray:
        """f_i of each pair, in radians per position, in float32.

        Args:
            d_head: size of a head.
        """
        r = self.num_rotated(d_head)
        exponent_K = np.arange(0, r, 2, dtype=np.float32) / np.float32(r)
        frequency_K = 1 / np.float32(self.theta) ** exponent_K
        if self.scaling == "none":
            return frequency_K
        if self.scaling == "linear":
            return frequency_K / np.float32(self.factor)
        if self.scaling == "llama3":
            turns_K = self.original_length * frequency_K / (2 * math.pi)
            low, high = self.low_frequency, self.high_frequency
            kept_K = np.clip((turns_K - low) / (high - low), 0, 1)
        else:
            kept_K = 1 - self._yarn_ramp(r)
        # kept_K: share of a frequency that is not divided.
        return (frequency_K * (kept_K + (1 - kept_K) / self.factor)).astype(np.float32)

    def _yarn_ramp(self, r: int) -> np.ndarray:
        """0 for pairs of high frequency, 1 for those of low, linear by their number between."""

        def pair(turns: float) -> float:
            """The number of the pair that turns so often within `original_length`."""
            angle = self.original_length / (turns * 2 * math.pi)
            return r * math.log(angle) / (2 * math.log(self.theta))

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, r - 1)
        width = last - first if last != first else 0.001
        return np.clip((np.arange(r // 2) - first) / width, 0, 1)
