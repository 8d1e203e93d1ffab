# SPDX-License-Identifier: Apache-2.0
"""Preparing together; tests/integration/test_several_hosts.py has `jax.distributed`."""

import concurrent.futures

import pytest

from switchx.hosts.distributed import Timeouts, prepared_together
from switchx.hosts.processes import Processes
from tests.data.refusals import refused
from tests.hosts.peers import close, free_port

QUICK = Timeouts(start=5.0)


def prepare_all(*prepares):
    address = f"localhost:{free_port()}"

    def one(index, prepare):
        try:
            processes = Processes(address, len(prepares), index)
            return prepared_together(processes, QUICK, prepare, lambda job: {"job": job})
        except ValueError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(prepares)) as pool:
        return list(pool.map(one, range(len(prepares)), prepares))


def test_what_was_prepared_is_stated():
    got = prepare_all(lambda: "a", lambda: "a")
    assert [prepared for prepared, _ in got] == ["a", "a"]
    close([peers for _, peers in got])
    errors = prepare_all(lambda: "a", lambda: "b")
    assert all("differs from process 0 (job: 'b', not 'a')" in each for each in errors)


@pytest.mark.parametrize("index", [0, 1])
def test_who_cannot_prepare_raises_its_own_error_and_the_others_that_it_did(index):
    def fails():
        raise ValueError("there is no gin file")

    prepares = [lambda: "a", lambda: "a"]
    prepares[index] = fails
    errors = prepare_all(*prepares)
    assert errors[index] == "there is no gin file"
    assert f"process {index} (" in errors[1 - index]
    assert errors[1 - index].endswith("cannot start: there is no gin file")


def test_timeouts():
    with refused("silence=0 seconds; use more"):
        Timeouts(silence=0)
