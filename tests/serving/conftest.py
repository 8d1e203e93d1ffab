# SPDX-License-Identifier: Apache-2.0
"""One service, whose programs are compiled once, for all tests of serving."""

import copy

import pytest

from tests.compilation import compiled_once
from tests.serving import served


@pytest.fixture(scope="session")
def service(session_cache):
    with (
        compiled_once(session_cache / "compiled"),
        served.started(name="tiny") as service,
    ):
        yield service


@pytest.fixture(scope="session")
def address(service):
    """Host and port of a server of the service, over real sockets."""
    with served.listening(service) as address:
        yield address


@pytest.fixture
def limited(service, monkeypatch):
    """`limited(max_waiting=0)`: the service has other limits, which may make no sense."""

    def limited(**changes):
        limits = copy.copy(service.limits)
        for name, value in changes.items():
            object.__setattr__(limits, name, value)
        monkeypatch.setattr(service, "limits", limits)
        for each in (service._queue, service.worker):
            monkeypatch.setattr(each, "_limits", limits)

    return limited
