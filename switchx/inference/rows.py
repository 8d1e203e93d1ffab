# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch in decoding: whose they are, whether they go on, how far they may.

Dims: B
"""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """One sentence a row.

    Attributes:
        sentence_B: its number; -1 of rows that fill the batch up.
        is_live_B: false for finished sentences and for rows that fill up.
        room_B: most new tokens of each sentence.
    """

    sentence_B: jax.Array
    is_live_B: jax.Array
    room_B: jax.Array
