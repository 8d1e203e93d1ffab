# SPDX-License-Identifier: Apache-2.0
"""Layouts against loops over single numbers, there and back; every difference in one error."""

import numpy as np
import pytest

from switchx.interop.safetensors_folder import (
    MOST_LINES,
    fill,
    from_torch,
    nested,
    require_same_tensors,
    to_torch,
    torch_shape,
)
from tests.data.refusals import refused
from tests.interop.folders import SWITCH, D, F, H, K

E = 4
rng = np.random.default_rng(0)


def test_heads_are_joined_and_maps_transposed():
    w_DHK = rng.normal(size=(D, H, K))
    (w,) = to_torch("a/w_query_DHK", w_DHK)
    assert w.shape == torch_shape("a/w_query_DHK", SWITCH) == (H * K, D)
    assert all(w[h * K + k, d] == w_DHK[d, h, k] for d, h, k in np.ndindex(D, H, K))
    np.testing.assert_array_equal(from_torch("a/w_query_DHK", SWITCH, [w]), w_DHK)

    w_HKD = rng.normal(size=(H, K, D))
    (w,) = to_torch("a/w_out_HKD", w_HKD)
    assert w.shape == torch_shape("a/w_out_HKD", SWITCH) == (D, H * K)
    assert all(w[d, h * K + k] == w_HKD[h, k, d] for d, h, k in np.ndindex(D, H, K))
    np.testing.assert_array_equal(from_torch("a/w_out_HKD", SWITCH, [w]), w_HKD)


def test_every_expert_has_a_tensor_of_its_own():
    w_EDF = rng.normal(size=(E, D, F))
    tensors = to_torch("a/w_in_EDF", w_EDF)
    assert len(tensors) == E
    for e, w in enumerate(tensors):
        assert w.shape == torch_shape("a/w_in_EDF", SWITCH) == (F, D)
        np.testing.assert_array_equal(w, w_EDF[e].T)
    np.testing.assert_array_equal(from_torch("a/w_in_EDF", SWITCH, iter(tensors)), w_EDF)


@pytest.mark.parametrize("name, shape", [("w_router_DE", (E, D)), ("w_in_DF", (F, D))])
def test_a_router_is_one_map(name, shape):
    value = rng.normal(size=shape[::-1])
    (w,) = to_torch(f"a/{name}", value)
    assert w.shape == torch_shape(f"a/{name}", SWITCH) == shape
    np.testing.assert_array_equal(from_torch(f"a/{name}", SWITCH, [w]), value)


def test_tables_and_scales_stay_as_they_are():
    for name in ("embedding_VD", "bias_UH", "scale_D"):
        value = rng.normal(size=torch_shape(f"a/{name}", SWITCH))
        assert to_torch(f"a/{name}", value)[0].shape == value.shape
        assert from_torch(f"a/{name}", SWITCH, [value]) is value


def test_fill_reads_tensor_by_tensor():
    read = {"x": np.ones(D), "y": np.zeros((D, F))}
    params = fill(SWITCH, {"a/b/scale_D": ("x",), "a/w_out_FD": ("y",)}, read.__getitem__)
    assert params["a"]["b"]["scale_D"] is read["x"]
    assert params["a"]["w_out_FD"].shape == (F, D)
    assert nested({"a": 1, "b/c": 2}) == {"a": 1, "b": {"c": 2}}


def test_all_differences_are_in_one_error():
    with refused(
        "there does not hold the model that is described; 3 of 4 tensors differ:\n"
        "  b: expected shape [2, 3], got shape [3, 2]\n"
        "  c: expected shape [1], got nothing\n"
        "  d: expected nothing, got shape []\ndo this"
    ):
        require_same_tensors(
            {"a": (1,), "b": (2, 3), "c": (1,)},
            {"a": (1,), "b": (3, 2), "d": ()},
            "there",
            "do this",
        )
    many = {f"t{i}": (1,) for i in range(MOST_LINES + 5)}
    with pytest.raises(ValueError, match="got nothing\n  and 5 more\n"):
        require_same_tensors(many, {}, "there", "do this")
