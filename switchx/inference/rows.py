# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch in decoding: whose they are, whether they go on, how far they may.

Dims: B
"""

import dataclasses

import jax
import jax.numpy as jnp

from switchx.inference.decoding_config import DecodingConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSettings:
    """What each sentence asks for by itself, where a batch is of different people's.

    They are fields of `DecodingConfig`, as numbers of the compiled program instead of
    constants: another seed or temperature compiles nothing.

    Attributes:
        seed_B: int32.
        temperature_B: float32, above 0; read where the configuration samples.
        top_k_B: int32; the vocabulary's size, or more, for all tokens.
        top_p_B: float32; 1 for all tokens.
        length_penalty_B: float32.
    """

    seed_B: jax.Array
    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    length_penalty_B: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """One sentence a row.

    Attributes:
        sentence_B: its number; -1 of rows that fill the batch up.
        is_live_B: false for finished sentences and for rows that fill up.
        room_B: most new tokens of each sentence.
        settings: of each sentence; None where all have the configuration's.
    """

    sentence_B: jax.Array
    is_live_B: jax.Array
    room_B: jax.Array
    settings: RowSettings | None = None

    def length_penalty_B(self, config: DecodingConfig) -> jax.Array:
        """float32; how long texts are weighed, see `DecodingConfig.length_penalty`."""
        if self.settings is not None:
            return self.settings.length_penalty_B
        return jnp.full(self.room_B.shape, config.length_penalty, jnp.float32)
