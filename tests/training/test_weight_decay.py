# SPDX-License-Identifier: Apache-2.0
import jax.numpy as jnp
import pytest

from switchx.optim.protocol import decay_mask, is_decayed


@pytest.mark.parametrize(
    ("name", "ndim", "expected"),
    [
        ("w_in_DF", 2, True),
        ("w_in_DF", 3, True),
        ("w_out_EFD", 3, True),
        ("w_out_EFD", 4, True),
        ("w_query_DHK", 3, True),
        ("w_router_DE", 2, True),
        ("w_logits_DV", 2, True),
        ("embedding_VD", 2, False),
        ("positions_LD", 2, False),
        ("bias_UH", 2, False),
        ("bias_UH", 3, False),
        ("scale_D", 1, False),
        ("scale_D", 2, False),
        ("b_in_EF", 2, False),
        ("b_query_HK", 2, False),
        ("temperature", 0, False),
    ],
)
def test_only_matrices_of_layers_decay(name, ndim, expected):
    params = {"decoder": {name: jnp.zeros((2,) * ndim)}}
    assert is_decayed(f"decoder/{name}", params["decoder"][name]) is expected
    assert decay_mask(params) == {"decoder": {name: expected}}
