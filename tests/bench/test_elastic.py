# SPDX-License-Identifier: Apache-2.0
"""`switchx check elastic`: it holds, and another batch is found."""

import contextlib
import json

import pytest

from switchx.bench import elastic
from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.main import main


@pytest.mark.slow  # four whole programs
def test_losing_devices_changes_nothing(capsys):
    assert main(["check", "elastic", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["devices"] for row in report["results"][:3]] == [8, 6, 2]
    assert {each["name"]: each["holds"] for each in report["checks"]} == {
        "loss_after_losing_devices": True,
        "token_ids_differing": True,
        "replica_gradient_error": True,
        "imbalance_zipf1": True,
        "ufo_rows_per_device_4": True,
        "ufo_rows_per_device_8": True,
    }


def test_a_batch_of_another_step_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(elastic, "PARTS", ((1, 1), (1, 2)))
    for step, differs in ((1, False), (2, True)):
        with contextlib.closing(elastic._loader(elastic.make_job())) as loader:
            for _ in range(step):
                next(loader)
            state = loader.state()
        monkeypatch.setattr(elastic, "read_data_states", lambda path, state=state: [state])
        found = elastic._token_ids_differing(elastic.make_job(), RunFolder(tmp_path))
        assert (found > 0) == differs
