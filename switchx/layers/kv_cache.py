# SPDX-License-Identifier: Apache-2.0
"""Keys and values as attention reads them, of a memory or of a KV cache.

Dims: B batch, H heads of keys and values, M places, K head size
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeysValues:
    """The memory of one attention; also the KV cache, of which the first places are used.

    Both products of a decode step read them as they lie: heads come before places, and each
    number of a key lies beside those of the other places.
    """

    key_BHKM: jax.Array
    value_BHMK: jax.Array

    @classmethod
    def empty(cls, shape_BHMK, dtype) -> "KeysValues":
        B, H, M, K = shape_BHMK
        return cls(jnp.zeros((B, H, K, M), dtype), jnp.zeros(shape_BHMK, dtype))

    def written(self, index, new: "KeysValues") -> "KeysValues":
        """The keys and values with new ones written from `index` on."""
        put = jax.lax.dynamic_update_slice_in_dim
        return KeysValues(
            put(self.key_BHKM, new.key_BHKM, index, axis=3),
            put(self.value_BHMK, new.value_BHMK, index, axis=2),
        )

    def first(self, places: int) -> "KeysValues":
        """The keys and values of the first `places` places."""
        return KeysValues(self.key_BHKM[..., :places], self.value_BHMK[:, :, :places])
