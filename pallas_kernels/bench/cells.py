# SPDX-License-Identifier: Apache-2.0
"""The measured products: matrices, experts with rows, rows of each, and their spread.

The form of Table 1 of Kim et al. 2022 (arXiv:2211.10017): speed by the number of active
experts.
Dims: R rows, D inputs, F outputs, E experts; A active experts
"""

import dataclasses

import numpy as np

MATRICES = ((1024, 4096), (4096, 1024), (768, 3072), (4096, 14336))
ACTIVE_OF_EXPERTS = ((1, 32), (4, 32), (8, 32), (16, 32), (24, 32), (32, 32), (128, 128))
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measured product.

    Attributes:
        active: experts with rows, of E.
        tokens: rows of an active expert, on average.
        load: `balanced`, or `skewed`: the k-th of the active experts has a share of 1 / k.
    """

    D: int
    F: int
    active: int
    E: int
    tokens: int
    load: str = "balanced"

    @property
    def R(self) -> int:
        return self.active * self.tokens

    @property
    def flops(self) -> int:
        return 2 * self.R * self.D * self.F

    def group_sizes(self, first: int = 0) -> np.ndarray:
        """int32 `[E]`, summing to R; `first` and those after it are the active experts."""
        share_A = np.ones(self.active)
        if self.load == "skewed":
            share_A = 1 / np.arange(1, self.active + 1)
        # One row for each, the others by shares; what rounding leaves goes to the largest.
        size_A = 1 + np.floor((self.R - self.active) * share_A / share_A.sum()).astype(np.int32)
        size_A[0] += self.R - size_A.sum()
        sizes_E = np.zeros(self.E, np.int32)
        sizes_E[(first + np.arange(self.active)) % self.E] = size_A
        return sizes_E

    def labels(self) -> dict[str, int | str]:
        return {
            "matrix": f"{self.D}x{self.F}",
            "active": self.active,
            "experts": self.E,
            "tokens": self.tokens,
            "load": self.load,
        }


def all_cells() -> list[Cell]:
    """The grid for an accelerator."""
    return [
        Cell(D, F, active, E, tokens, load)
        for D, F in MATRICES
        for active, E in ACTIVE_OF_EXPERTS
        for tokens in TOKENS
        for load in ("balanced", "skewed")
        if load == "balanced" or min(active, tokens) > 1  # else they are the same
    ]


def cells_of_a_cpu() -> list[Cell]:
    """A grid of two to three minutes on two cores: every kind of cell, few of each."""
    cells = [Cell(1024, 4096, 8, 8, tokens) for tokens in (1, 4, 16, 64, 512)]
    cells += [Cell(4096, 1024, 8, 8, tokens) for tokens in (1, 16)]
    cells += [Cell(1024, 4096, 8, 8, 16, "skewed")]
    cells += [Cell(1024, 4096, active, 32, 4) for active in (1, 8, 32)]
    return cells + [Cell(768, 3072, 32, 32, tokens) for tokens in (1, 16)]
