# SPDX-License-Identifier: Apache-2.0
"""Batches that were not learnt: kept as they were, and named in words."""

import json
import types

import numpy as np

from switchx.data.features import batch_digest
from switchx.training.metrics import SkippedBatches
from tests.training.jobs import DENSE, make_batch


def metrics(loss, grad_norm):
    return types.SimpleNamespace(loss=np.float32(loss), grad_norm=np.float32(grad_norm))


def test_a_batch_is_kept_with_its_identity(tmp_path):
    skipped, batch = SkippedBatches(tmp_path / "skipped"), make_batch(DENSE, 2)
    digest = batch_digest(batch)
    assert skipped.keep(7, batch, metrics(np.nan, np.inf)) == (
        f"step 7 is skipped: loss nan, gradient norm inf, batch {digest}; no parameter changed"
    )
    assert {path.name for path in (tmp_path / "skipped").iterdir()} == {"7.0.json", "7.0.npz"}
    text = (tmp_path / "skipped" / "7.0.json").read_text()
    assert json.loads(text, parse_constant=lambda name: 1 / 0) == {
        "step": 7,
        "batch": digest,
        "loss": "nan",
        "grad_norm": "inf",
    }
    with np.load(tmp_path / "skipped" / "7.0.npz") as kept:
        assert set(kept) == set(batch)
        assert batch_digest(dict(kept)) == digest


def test_the_last_ones_are_named_in_order(tmp_path):
    skipped = SkippedBatches(tmp_path)
    batches = {step: make_batch(DENSE, 2, seed=step) for step in (3, 5, 6)}
    for step, batch in batches.items():
        skipped.keep(step, batch, metrics(np.nan, np.nan))
    five, six = batch_digest(batches[5]), batch_digest(batches[6])
    assert skipped.last(2) == f"batches 5: {five}, 6: {six}, kept in {tmp_path}"


def test_nothing_is_written_while_nothing_is_skipped(tmp_path):
    SkippedBatches(tmp_path / "skipped")
    assert list(tmp_path.iterdir()) == []
