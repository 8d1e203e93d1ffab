# SPDX-License-Identifier: Apache-2.0
"""A small store's records, whose numbers say which they are."""

import numpy as np

from switchx.storage.record import ArrayType, Record, StoreLayout

TYPES = {
    "params/w_in_DF": ArrayType((3, 5), "float32"),
    "params/w_out_FD": ArrayType((5, 3), "bfloat16"),
    "optimizer/mu/w_in_DF": ArrayType((3, 5), "float32"),
    "optimizer/count": ArrayType((), "int32"),
}
LAYOUT = StoreLayout({"encoder 1": TYPES, "decoder 3": TYPES}, num_experts=3)


def record(key: int, updates: int) -> Record:
    """The record of a key after so many updates."""
    rng = np.random.default_rng([key, updates])
    arrays = {
        name: (100 * rng.normal(size=each.shape)).astype(each.dtype)
        for name, each in TYPES.items()
    }
    return Record(arrays, updates)


def is_same(one: Record, other: Record) -> bool:
    """Whether two records have equal names, dtypes, shapes, bits and updates."""
    names = list(one.arrays) == list(other.arrays)
    return (
        names
        and one.updates == other.updates
        and all(
            a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
            for a, b in zip(one.arrays.values(), other.arrays.values(), strict=True)
        )
    )
