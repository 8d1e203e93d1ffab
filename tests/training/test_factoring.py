# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from switchx.optim.adafactor import factoring_of, parameter_scale


@pytest.mark.parametrize(
    ("name", "shape", "batch", "rows", "columns"),
    [
        ("w_in_DF", (8, 16), (), (0,), (1,)),
        ("encoder/layer_1/ffn/w_in_EDF", (2, 8, 16), (0,), (1,), (2,)),
        ("w_in_EDF", (3, 2, 8, 16), (0, 1), (2,), (3,)),
        ("w_query_DHK", (8, 2, 4), (), (0,), (1, 2)),
        ("w_out_HKD", (3, 2, 4, 8), (0,), (1, 2), (3,)),
        ("embedding_VD", (32, 8), (), (0,), (1,)),
        ("w_router_DE", (8, 8), (), (0,), (1,)),
        # Not matrices.
        ("scale_D", (8,), (), (), ()),
        ("scale_D", (3, 8), (0,), (), ()),
        ("b_in_EF", (2, 16), (0,), (), ()),
        ("b_in_EF", (3, 2, 16), (0, 1), (), ()),
        ("b_query_HK", (2, 8), (), (), ()),
        ("b_query_HK", (3, 2, 8), (0,), (), ()),
        ("bias_E", (8,), (), (), ()),  # a vector over experts, not E scalars
        ("bias_E", (3, 8), (0,), (), ()),
        ("w_stages_PDF", (2, 8, 16), (0,), (1,), (2,)),
        ("temperature", (), (), (), ()),
        ("temperature", (3,), (0,), (), ()),
        # Too small: rows and columns, heads and head size together, and E of the router.
        ("w_in_EDF", (64, 7, 16), (0,), (), ()),
        ("w_out_HKD", (2, 3, 8), (), (), ()),
        ("w_router_DE", (3, 8, 4), (0,), (), ()),
    ],
)
def test_axes(name, shape, batch, rows, columns):
    factoring = factoring_of(name, shape, 8)
    assert (factoring.batch, factoring.rows, factoring.columns) == (batch, rows, columns)
    assert factoring.is_factored == bool(rows)
    assert factoring.within == tuple(range(len(batch), len(shape)))


def test_statistics_are_named_by_their_dimensions():
    stacked = factoring_of("w_out_HKD", (3, 2, 4, 8), 8)
    assert stacked.state_name("v_row", stacked.columns) == "v_row_HK"
    assert stacked.state_name("v_col", stacked.rows) == "v_col_D"
    assert stacked.state_name("momentum") == "momentum_HKD"
    expert = factoring_of("w_in_EDF", (2, 8, 8), 8)
    assert expert.state_name("v_row", expert.columns) == "v_row_ED"
    assert expert.state_name("v_col", expert.rows) == "v_col_EF"
    assert factoring_of("temperature", (3,), 8).state_name("v") == "v"
    # A name may say N itself.
    assert factoring_of("scale_ND", (3, 8), 8).state_name("v") == "v_ND"


def test_name_that_does_not_fit():
    with pytest.raises(ValueError, match="'w_in_DF' has 4 dimensions but its name says 'DF'"):
        factoring_of("ffn/w_in_DF", (1, 2, 3, 4), 8)


def test_parameter_scale_by_hand():
    w_EDF = np.array([[[3.0, -4.0], [0.0, 5.0]], [[1e-4, 0.0], [0.0, 0.0]]], np.float16)
    scale_E = parameter_scale(w_EDF, (1, 2), 1e-3)
    assert scale_E.dtype == np.float32
    np.testing.assert_allclose(scale_E, [np.sqrt(50 / 4), 1e-3], rtol=1e-6)
