# SPDX-License-Identifier: Apache-2.0
"""A dense T5 of ours says the same in CTranslate2, and both are timed."""

import dataclasses

import pytest

from switchx.bench import ctranslate2_peer, decode
from switchx.models.config import ModelConfig

SMALL = ModelConfig(
    "encoder_decoder", 64, 16, 32, 2, 8, 1, 1, activation="relu", init_scale=2.0
)


@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.skipif(
    ctranslate2_peer.missing() is not None, reason=str(ctranslate2_peer.missing())
)
def test_texts_are_the_same(monkeypatch):
    monkeypatch.setattr(ctranslate2_peer, "CASES", ((2, 1), (2, 4)))
    monkeypatch.setattr(decode, "DENSE", SMALL)
    config = dataclasses.replace(SMALL, scan_layers=True)
    rows, checks = ctranslate2_peer.ratios(
        config, decode.inputs(2), decode.NEW_TOKENS, decode.decoder, 1
    )
    assert [check.name for check in checks] == ["ctranslate2_ratio", "ctranslate2_ratio_int8"]
    assert all(check.value > 0 for check in checks)
    float32 = [row for row in rows if row["peer"].startswith("CTranslate2 float32")]
    assert len(rows) == 6 and [row["same_texts"] for row in float32] == [1.0, 1.0]


def test_tokens_have_a_name_each():
    names = [ctranslate2_peer._name(token) for token in range(6)]
    assert names == ["<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]
    assert list(map(ctranslate2_peer._token, names)) == list(range(6))
