# SPDX-License-Identifier: Apache-2.0
"""The cache of tuned tilings: what is found, what is not, and what is damaged."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul, quantize, quantized_grouped_matmul
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.reference import Tiling
from pallas_kernels.tiling import tuned
from pallas_kernels.tiling.tuned import Key, lookup, read, write

R, D, F, E = 13, 8, 12, 2
KEY = Key.of("grouped_matmul", "reference", jnp.float32, None, None, R, D, F, E)


def test_what_is_written_is_found_by_rows_of_the_same_bucket(tilings_file):
    assert lookup(KEY, Tiling) is None
    write(tilings_file, {KEY: Tiling(3, 4)})
    assert lookup(KEY, Tiling) == Tiling(3, 4)
    for rows, found in ((8, None), (9, Tiling(3, 4)), (16, Tiling(3, 4)), (17, None)):
        key = Key.of("grouped_matmul", "reference", jnp.float32, None, None, rows, D, F, E)
        assert lookup(key, Tiling) == found
    assert [tuned.bucket(rows) for rows in (0, 1, 2, 3, 512)] == [1, 1, 2, 4, 512]


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "NVIDIA H200"}, {"jax": "0.9"}, {"op": "quantized_grouped_matmul"},
        {"implementation": "gpu"}, {"dtype": "bfloat16"}, {"bits": 4}, {"group_size": 4},
        {"D": 9}, {"F": 9}, {"E": 9},
    ],
)  # fmt: skip
def test_another_key_is_not_found(tilings_file, changes):
    write(tilings_file, {dataclasses.replace(KEY, **changes): Tiling(3, 4)})
    assert lookup(KEY, Tiling) is None


def test_later_entries_replace_earlier_ones_and_keep_others(tilings_file):
    other = dataclasses.replace(KEY, E=3)
    write(tilings_file, {KEY: Tiling(3, 4), other: Tiling(1, 1)})
    write(tilings_file, {KEY: Tiling(5, 2)})
    assert read(tilings_file) == {
        KEY: {"rows": 5, "weight_rows": 2},
        other: {"rows": 1, "weight_rows": 1},
    }
    assert [path.name for path in tilings_file.parent.iterdir()] == [tilings_file.name]


def test_both_operations_use_it_and_a_named_tiling_wins(tilings_file, monkeypatch):
    seen = []
    monkeypatch.setattr(
        reference, "forward_on_cpu", lambda x_RD, w, s, t, tiling: seen.append(tiling) or x_RD
    )
    x_RD, w_EDF, sizes_E = jnp.ones((R, D)), jnp.ones((E, D, D)), jnp.array([4, 5])
    key = Key.of("grouped_matmul", "reference", jnp.float32, None, None, R, D, D, E)
    write(tilings_file, {key: Tiling(3, 2)})
    grouped_matmul(x_RD, w_EDF, sizes_E)
    grouped_matmul(x_RD, w_EDF, sizes_E, tiling=Tiling(2, 8))
    assert seen == [Tiling(3, 2), Tiling(2, 8)]
    q = quantize(np.ones((E, D, F), np.float32), 4, group_size=4)
    expected_RF = quantized_grouped_matmul(x_RD, q, sizes_E)
    key = Key.of("quantized_grouped_matmul", "reference", jnp.float32, 4, 4, R, D, F, E)
    write(tilings_file, {key: Tiling(99, 5)})  # 5 does not divide F: so it is this one
    with pytest.raises(ValueError, match="weight_rows=5; use a divisor of 12"):
        quantized_grouped_matmul(x_RD, q, sizes_E)
    write(tilings_file, {key: Tiling(99, 3)})
    np.testing.assert_allclose(
        np.asarray(quantized_grouped_matmul(x_RD, q, sizes_E)), np.asarray(expected_RF)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no tuned tilings .Expecting value.*run `python -m pallas_kernels tune`"),
        ("{", "holds no tuned tilings"),
        ("[]", "holds no tuned tilings"),
        ('{"format": 2, "entries": []}', "format 2, expected 1"),
        ('{"format": 1}', "'entries'"),
        ('{"format": 1, "entries": [{"key": {"device": "x"}, "tiling": {}}]}', "holds no"),
        ('{"format": 1, "entries": [{"key": {"colour": 1}, "tiling": {}}]}', "holds no"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_an_error_that_names_it(tilings_file, text, message):
    tilings_file.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        grouped_matmul(jnp.ones((R, D)), jnp.ones((E, D, F)), jnp.array([4, 5]))
    assert str(tilings_file) in str(raised.value)
    with pytest.raises(ValueError, match="holds no tuned tilings"):
        write(tilings_file, {KEY: Tiling(3, 4)})
    assert tilings_file.read_text() == text


def test_a_tiling_of_other_fields_is_an_error(tilings_file):
    write(tilings_file, {KEY: Tiling(3, 4)})
    content = json.loads(tilings_file.read_text())
    content["entries"][0]["tiling"] = {"rows": 3, "stages": 4}
    tilings_file.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match="a tiling with stages .* knows rows, weight_rows: run"
    ):
        lookup(KEY, Tiling)
    for damaged in ({"rows": 3}, {"rows": "a", "weight_rows": 4}):
        content["entries"][0]["tiling"] = damaged
        tilings_file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="damaged tiling .* or remove the file"):
            lookup(KEY, Tiling)


def test_where_the_users_file_is(tilings_file, monkeypatch, tmp_path):
    assert tuned.user_file() == tilings_file
    monkeypatch.delenv("PALLAS_KERNELS_TILINGS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned.user_file() == tmp_path / "pallas_kernels" / "tilings.json"


def test_the_version_of_jax_is_its_first_two_numbers():
    assert jax.__version__.startswith(f"{KEY.jax}.")
    assert KEY.jax.count(".") == 1


def test_paths_that_are_no_files_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "below"):
        monkeypatch.setenv("PALLAS_KERNELS_TILINGS", str(path))
        with pytest.raises(ValueError, match=f"{path} (holds no|cannot be).*set PALLAS_KERN"):
            read(tuned.user_file())
