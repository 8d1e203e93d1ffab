# SPDX-License-Identifier: Apache-2.0
"""Records come back bit-equal, or are refused with what is wrong with them."""

import struct
import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from switchx.storage.record import (
    Record,
    RecordError,
    decode,
    encode,
    file_crc32,
    require_types,
)
from tests.storage.stored import TYPES, is_same, record

DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "uint8",
    "int32",
    "int64",
    "bool",
)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=4,
    ),
    st.integers(0, 2**60),
)
@settings(max_examples=60)
def test_all_dtypes_and_shapes_come_back(forms, updates):
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(0, 2, shape).astype(dtype) for name, (dtype, shape) in forms.items()
    }
    data = encode(Record(arrays, updates), "decoder_3/00002")
    assert is_same(decode(data, "decoder_3/00002"), Record(arrays, updates))


def test_numbers_of_the_other_order_of_bytes_come_back():
    there = np.array([1.0, 2.5], ">f4")
    back = decode(encode(Record({"w": there}, 0), "x"), "x").arrays["w"]
    assert back.tolist() == there.tolist() and back.dtype == np.dtype("<f4")


def test_every_bit_of_bfloat16_comes_back_in_order_aligned_and_read_only():
    bits = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    got = decode(encode(Record({"a": bits}, 1), "x"), "x").arrays["a"]
    assert got.dtype == bits.dtype and got.tobytes() == bits.tobytes()
    array = np.arange(12.0).reshape(3, 4).T
    got = decode(encode(Record({"a": array}, 1), "x"), "x").arrays["a"]
    np.testing.assert_array_equal(got, array)
    for array in decode(encode(record(0, 1), "x"), "x").arrays.values():
        assert array.flags.aligned and not array.flags.writeable


def test_every_flipped_bit_is_found():
    data = encode(record(0, 1), "x")
    for i in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[i] ^= 1 << bit
            with pytest.raises(RecordError, match="^its? "):
                decode(bytes(changed), "x")


def test_every_cut_is_found_and_says_how_much_is_there():
    data = encode(record(0, 1), "x")
    for length in range(len(data)):
        with pytest.raises(RecordError, match=f"{length} bytes"):
            decode(data[:length], "x")
    with pytest.raises(RecordError, match=f"{len(data) + 3} bytes of {len(data)}"):
        decode(data + b"abc", "x")


@pytest.mark.parametrize(
    "said", [b"\xff ", b"[]", b'{"name": "x"}', b'{"name": 1, "updates": 0, "arrays": [1]}']
)
def test_a_header_of_another_form_is_no_record_whatever_its_checksum(said):
    header = said.ljust(40)
    data = struct.pack("<8sIIQ", b"switchxR", 1, 40, 72) + header
    with pytest.raises(RecordError, match="its header describes no record"):
        decode(data + b"%08x" % zlib.crc32(data), "x")


def test_a_record_of_another_expert_or_version_is_named():
    with pytest.raises(RecordError, match="'encoder_1/00001', not of 'encoder_1/00002'"):
        decode(encode(record(0, 1), "encoder_1/00001"), "encoder_1/00002")
    data = encode(record(0, 1), "x")
    other = data[:8] + struct.pack("<I", 7) + data[12:-8]
    with pytest.raises(RecordError, match="format version 7, and this switchx reads 1"):
        decode(other + b"%08x" % zlib.crc32(other), "x")


def test_the_crc_of_the_file_is_known_without_reading_it_and_differs():
    datas = [encode(record(key, 1), "x") for key in range(20)]
    assert [file_crc32(data) for data in datas] == [zlib.crc32(data) for data in datas]
    assert len({zlib.crc32(data) for data in datas}) == 20


def test_other_arrays_than_expected_are_named():
    arrays = dict(record(0, 1).arrays)
    arrays["more"] = arrays.pop("optimizer/count")
    arrays["params/w_in_DF"] = arrays["params/w_in_DF"].astype("float16")
    with pytest.raises(RecordError) as error:
        require_types(Record(arrays, 1), TYPES)
    for words in (
        "optimizer/count is missing, expected int32[]",
        "more is int32[], expected no such array",
        "params/w_in_DF is float16[3,5], expected float32[3,5]",
    ):
        assert words in str(error.value)


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.zeros(2, "V3")])
def test_what_is_no_number_is_refused(array):
    with pytest.raises(ValueError, match="'a' has dtype"):
        encode(Record({"a": array}, 1), "x")
