# SPDX-License-Identifier: Apache-2.0
"""Which errors are a paragraph, and which a traceback."""

import argparse

import pytest

from switchx.cli.progress import explain
from switchx.partitioning.mesh import MeshSpec


def arguments(traceback=False):
    return argparse.Namespace(command="train", traceback=traceback)


def ours() -> ValueError:
    try:
        MeshSpec(data=0)
    except ValueError as error:
        return error


def test_wrong_input_is_2_and_what_the_system_refuses_1(capsys):
    assert explain(ours(), arguments()) == 2
    assert explain(OSError("disk full"), arguments()) == 1
    assert explain(KeyboardInterrupt(), arguments()) == 130
    assert capsys.readouterr().err.splitlines() == [
        "switchx train: error: mesh axis 'data' has size 0; use at least 1",
        "switchx train: error: disk full",
        "switchx: interrupted",
    ]


def test_what_is_not_for_a_person_is_raised():
    with pytest.raises(ValueError, match="invalid literal"):
        try:
            int("x")
        except ValueError as error:
            explain(error, arguments())
    with pytest.raises(SystemExit):
        explain(SystemExit(3), arguments())
    with pytest.raises(ValueError, match="has size 0"):
        explain(ours(), arguments(traceback=True))
