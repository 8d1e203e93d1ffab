# SPDX-License-Identifier: Apache-2.0
import pytest

from switchx.hosts.processes import Processes
from tests.data.refusals import refused


def test_the_parts_of_an_address():
    processes = Processes("node001:8476", 4, 3)
    assert (processes.host, processes.port, processes.is_first) == ("node001", 8476, False)
    assert (processes.jax_port, processes.jax_coordinator) == (8477, "node001:8477")
    on_ipv6 = Processes("[::1]:1", 1, 0)
    assert (on_ipv6.host, on_ipv6.jax_coordinator) == ("::1", "[::1]:2")


@pytest.mark.parametrize("address", ["node001", ":8476", "node001:", "node001:http", "a:65535"])
def test_no_address(address):
    with refused(
        f"coordinator={address!r} is no HOST:PORT with a port of 1 to 65534; give the address "
        "of process 0 as the others see it, as node001:8476"
    ):
        Processes(address, 2, 0)


@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_that_is_not_one_of_them(index):
    with refused(f"process_id={index} is not one of num_processes=4; use 0 to 3, each once"):
        Processes("a:1", 4, index)
    with refused("num_processes=0; use at least 1"):
        Processes("a:1", 0, 0)
