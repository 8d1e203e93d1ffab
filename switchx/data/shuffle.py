# SPDX-License-Identifier: Apache-2.0
"""Shuffling: all records once an epoch, in another order each, without end."""

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

# Fewer records are permuted in memory; Grain's cipher works on blocks of 16 bits and
# would look for an index below n for 65536 / n rounds.
_FEW = 65_536


class Shuffled:
    """An endless sequence of records; `[i]` is known without what stands before it.

    Args:
        seed: at least 0, as many integers as wanted.
    """

    def __init__(self, records: Sequence[Any], seed: Sequence[int]):
        self._records = records
        self._seed = tuple(seed)
        self._cached = (None, None)

    def __getitem__(self, index: int) -> Any:
        epoch, position = divmod(index, len(self._records))
        return self._records[self._position(self._order_of(epoch), position)]

    def _order_of(self, epoch: int) -> np.ndarray | int:
        """The permutation, or for many records the seed of Grain's."""
        cached_epoch, order = self._cached
        if cached_epoch != epoch:
            rng = np.random.default_rng((*self._seed, epoch))
            is_few = len(self._records) < _FEW
            order = rng.permutation(len(self._records)) if is_few else int(rng.integers(2**32))
            self._cached = (epoch, order)
        return order

    def _position(self, order: np.ndarray | int, position: int) -> int:
        if isinstance(order, np.ndarray):
            return int(order[position])
        last = len(self._records) - 1
        return grain.experimental.index_shuffle(position, max_index=last, seed=order, rounds=4)
