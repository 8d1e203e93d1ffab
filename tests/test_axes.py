# SPDX-License-Identifier: Apache-2.0
"""The dimension key: letters out of names, and matrices out of letters, worked by hand."""

import re

import pytest

from switchx.axes import (
    DIMENSIONS,
    MatrixDims,
    dims_of,
    matrix_dims,
)


def test_every_letter_has_a_name_of_its_own():
    assert all(re.fullmatch("[A-Z]", letter) for letter in DIMENSIONS)
    assert len(set(DIMENSIONS.values())) == len(DIMENSIONS)


@pytest.mark.parametrize(
    ("name", "ndim", "dims"),
    [
        ("w_in_EDF", 3, "EDF"),
        ("w_in_EDF", 4, "NEDF"),  # stacked by a scan over layers
        ("scale_D", 1, "D"),
        ("scale_D", 2, "ND"),
        ("embedding_VD", 2, "VD"),
        ("w_query_DHK", 4, "NDHK"),
        ("v_row_ED", 2, "ED"),  # an optimizer's statistic
        ("count", 0, ""),  # a scalar has no letters
        ("temperature", 1, "N"),  # one scalar a layer
    ],
)
def test_letters_come_from_the_name(name, ndim, dims):
    assert dims_of(name, ndim) == dims


@pytest.mark.parametrize(
    ("name", "ndim", "letters"),
    [
        ("w_in_EDF", 2, "EDF"),  # too few dimensions
        ("w_in_EDF", 5, "EDF"),  # stacked twice
        ("kernel", 2, ""),  # no letters
        ("w_in_DX", 2, "DX"),  # X is no dimension
        ("w_in_DF2", 2, ""),  # a digit is no letter
        ("EDF", 3, ""),  # letters follow an underscore
    ],
)
def test_a_name_that_does_not_fit_is_refused(name, ndim, letters):
    with pytest.raises(ValueError) as error:
        dims_of(name, ndim)
    assert str(error.value) == (
        f"parameter {name!r} has {ndim} dimensions but its name says {letters!r}; end the "
        "name in one known letter a dimension (BLMDHKFVNTECSRGPUZJ)"
    )


@pytest.mark.parametrize(
    ("dims", "num_batch", "num_rows", "num_columns"),
    [
        ("DF", 0, 1, 1),
        ("VD", 0, 1, 1),
        ("EDF", 1, 1, 1),  # E matrices
        ("NEDF", 2, 1, 1),
        ("DE", 0, 1, 1),  # the router is one matrix, E its columns
        ("NDE", 1, 1, 1),
        ("DHK", 0, 1, 2),  # D rows, heads and head size are one side
        ("HKD", 0, 2, 1),
        ("NHKD", 1, 2, 1),
        ("PNEDF", 3, 1, 1),
        ("UH", 0, 1, 1),
    ],
)
def test_matrices(dims, num_batch, num_rows, num_columns):
    assert matrix_dims(dims) == MatrixDims(num_batch, num_rows, num_columns)
    assert num_batch + num_rows + num_columns == len(dims)


@pytest.mark.parametrize("dims", ["", "D", "ND", "EF", "NEF", "HK", "NHK", "E", "BLD"])
def test_what_is_no_matrix(dims):
    assert matrix_dims(dims) is None
