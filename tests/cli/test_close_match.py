# SPDX-License-Identifier: Apache-2.0
from switchx.cli.config.files import close_match, did_you_mean

NAMES = ("TRAIN_STEPS", "WARMUP_STEPS", "SEED")


def test_nearest_name_is_found():
    assert close_match("TRAIN_STEP", NAMES) == "TRAIN_STEPS"
    assert did_you_mean("TRAIN_STEP", NAMES) == " (did you mean TRAIN_STEPS?)"


def test_nothing_is_made_up():
    assert close_match("LEARNING", NAMES) is None
    assert did_you_mean("LEARNING", NAMES) == ""
    assert did_you_mean("STEPS", NAMES, cutoff=0.85) == ""
