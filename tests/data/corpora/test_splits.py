# SPDX-License-Identifier: Apache-2.0
"""Oracle: Python's own slices of the list of numbers, and TFDS' rule for percentages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchx.data.corpora.splits import open_split, parse_split
from tests.data.fakes import text_corpus
from tests.data.refusals import refused

CORPUS = text_corpus(*map(str, range(11)))


def numbers(split):
    source = open_split(CORPUS, split, None)
    return [int(source[i]["text"]) for i in range(len(source))]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", range(11)),
        ("train[:3]", range(3)),
        ("train[8:]", range(8, 11)),
        ("train[-2:]", range(9, 11)),
        ("train[:-2]", range(9)),
        ("train[:]", range(11)),
        # round(11 * 0.9) = 10, round(11 * 0.25) = 3, round(11 * 0.75) = 8.
        ("train[:90%]", range(10)),
        ("train[90%:]", range(10, 11)),
        ("train[25%:75%]", range(3, 8)),
        ("train[-10%:]", range(10, 11)),
        ("train[9:] + test[:2]", [9, 10, 0, 1]),
        ("de-validation[:1]+train[10:]+train[:1]", [0, 10, 0]),
    ],
)
def test_slices(split, expected):
    assert numbers(split) == list(expected)


@given(st.integers(1, 99), st.integers(100, 999))
def test_two_parts_are_the_whole_split(percent, size):
    parts = parse_split(f"train[:{percent}%]+train[{percent}%:]")
    (start, middle), (again, stop) = (part.bounds(size) for part in parts)
    assert (start, stop) == (0, size) and middle == again == round(size * percent / 100)


def test_fingerprints_and_names_tell_slices_apart():
    splits = ("train", "train[:3]", "train[:4]", "train[1:4]", "train[:3]+train[3:4]")
    sources = [open_split(CORPUS, split, None) for split in splits]
    assert len({source.fingerprint for source in sources}) == len(splits)
    assert sources[0].name == "list/train" and sources[1].name == "list/train[:3]"
    with pytest.raises(IndexError):
        sources[1][3]


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ("train[:x]", "the split 'train[:x]' cannot be read at 'train[:x]'"),
        ("train[3]", "the split 'train[3]' cannot be read"),
        ("", "the split '' cannot be read at ''"),
        ("train++test", "the split 'train++test' cannot be read at ''"),
        ("train[5:5]", "the split train[5:5] has no example: train has 11, and <any> [5:5]"),
        ("train[:12]", "the split train[:12] goes beyond train, which has 11 examples"),
        ("train[:101%]", "the split train[:101%] goes beyond train, which has 11 examples"),
        ("train[:1%]", "the split train[:1%] has no example"),
    ],
)
def test_bad_slices(split, said):
    with refused(said):
        numbers(split)
