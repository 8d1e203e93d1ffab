# SPDX-License-Identifier: Apache-2.0
"""A converted model's folder is read by what reads runs."""

import numpy as np
import pytest

import switchx
from switchx.checkpoint.restore import restore_params
from switchx.checkpoint.run_folder import RunFolder
from switchx.checkpoint.scan_conversion import write_converted
from switchx.data.tokenizers import ByteVocabulary, TokenIdVocabulary
from switchx.tree import named_leaves
from tests.data.refusals import refused
from tests.training.jobs import SPARSE, make_params
from tests.training.train_states import damage


@pytest.fixture
def folder(tmp_path):
    params = named_leaves(make_params(SPARSE))
    tree = {}
    for name, leaf in params.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = np.asarray(leaf)
    write_converted(RunFolder(tmp_path), SPARSE, tree, ByteVocabulary(), "elsewhere")
    return tmp_path


def test_it_is_loaded_as_a_run_is(folder):
    model = switchx.load(folder)
    assert (model.config, model.step, model.vocabulary) == (SPARSE, 0, ByteVocabulary())
    want = named_leaves(make_params(SPARSE))
    got = named_leaves(restore_params(folder))
    assert got.keys() == want.keys()
    for name, leaf in want.items():
        np.testing.assert_array_equal(got[name], leaf)


def test_a_changed_byte_is_found(folder):
    largest = max((folder / "checkpoints/0").rglob("*"), key=lambda path: path.stat().st_size)
    damage(largest)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        switchx.load(folder)


def test_parameters_and_vocabularies_of_other_models(tmp_path):
    params = make_params(SPARSE)
    del params["embedding"]
    with pytest.raises(ValueError, match="the converted model does not fit; 1 of"):
        write_converted(RunFolder(tmp_path), SPARSE, params, ByteVocabulary(), "elsewhere")
    with refused(
        "the vocabulary has 385 ids, the model's embedding 384 rows; give the vocabulary that "
        "the model was trained with"
    ):
        write_converted(
            RunFolder(tmp_path), SPARSE, make_params(SPARSE), TokenIdVocabulary(385), "x"
        )
    assert list(tmp_path.iterdir()) == []
