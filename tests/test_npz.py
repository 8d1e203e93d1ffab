# SPDX-License-Identifier: Apache-2.0
"""Files of arrays that are anybody's: what they declare is checked first."""

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchx import npz
from switchx.npz import read_arrays

KINDS = {"id_T": (np.integer, 1), "name_N": (np.str_, 1), "step": (np.integer, 0)}
ARRAYS = {"id_T": np.arange(40), "name_N": np.array(["a", "bc"]), "step": np.int64(3)}


def content(**changes) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **(ARRAYS | changes))
    return file.getvalue()


def with_header(header: str) -> bytes:
    """A file whose first array has another header than its numbers."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content())) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "id_T.npy":
                text = header.encode().ljust(117) + b"\n"
                data = data[:8] + len(text).to_bytes(2, "little") + text + data[128:]
            new.writestr(name, data)
    return file.getvalue()


def test_arrays_come_as_they_were_written_or_are_missed(tmp_path):
    (tmp_path / "x.npz").write_bytes(content(other=np.ones(3)))
    found = read_arrays(tmp_path / "x.npz", KINDS, {"gate_T": (np.floating, 1)})
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
    np.savez(tmp_path / "x.npz", step=3)
    with pytest.raises(ValueError, match="it has no id_T, name_N"):
        read_arrays(tmp_path / "x.npz", KINDS)
    with pytest.raises(ValueError, match="FileNotFoundError"):
        read_arrays(tmp_path / "none.npz", KINDS)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "BadZipFile"),
        (content(id_T=np.zeros(1 << 20, np.int8)), "it would unpack to .* are the most"),
        (content(id_T=np.array([{}])), "id_T is object"),
        (content(id_T=np.ones(3)), "id_T is float64 .*, expected integer of 1 dimensions"),
        (content(id_T=np.int64(3)), r"id_T is int64 \[\], expected integer of 1 dimensions"),
        (
            with_header("{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999,), }"),
            "id_T declares 800,000,000,120 bytes, 448 are there",
        ),
        (with_header("{'descr': '<i8', 'shape': ["), "Error"),
        (with_header("("), "Error"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_read(data, words, tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "MOST_BYTES", 1 << 18)
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(ValueError, match=words):
        read_arrays(tmp_path / "x.npz", KINDS)


@given(st.integers(0, len(content()) - 1), st.integers(0, 255))
def test_a_changed_byte_changes_nothing_or_is_refused(tmp_path_factory, at, byte):
    data = bytearray(content())
    data[at] = byte
    path = tmp_path_factory.getbasetemp() / "fuzzed.npz"
    path.write_bytes(data)
    try:
        found = read_arrays(path, KINDS)
    except ValueError:
        return
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
