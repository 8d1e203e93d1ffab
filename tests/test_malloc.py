# SPDX-License-Identifier: Apache-2.0
"""Freed memory is kept where it helps: pages that fresh arrays fault in, in processes."""

import json
import subprocess
import sys

import pytest

from switchx.malloc import keep_freed_memory, return_freed_memory
from tests.processes import child_environment

FAULTS = """
import json, resource
from switchx.malloc import keep_freed_memory, return_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(9):
        bytearray(2**25)[::4096] = bytes(2**13)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

found, says = [faults()], [keep_freed_memory()]
faults()
found += [faults()]
says += [return_freed_memory()]
faults()
print(json.dumps([says, *found, faults()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "malloc keeps freed memory"),
        ({"JAX_PLATFORMS": "cuda,cpu"}, "malloc is the system's"),
        ({"SWITCHX_MALLOC": "system"}, "malloc gives freed memory to the system (SWITCHX_"),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, "malloc is set by GLIBC_TUNABLES"),
    ],
)
def test_fresh_arrays_fault_no_page_in_where_memory_is_kept(changes, says, tmp_path):
    environment = child_environment(tmp_path, devices=1) | changes
    words = [sys.executable, "-c", FAULTS]
    done = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
    (said, then), before, kept, returned = json.loads(done.stdout)
    assert said.startswith(says)
    assert "(StorageSpec.host_bytes" in then if not changes else then == said
    least = 9 * 16  # pages of 2 MiB, where the system has huge ones
    assert before >= least and returned >= least
    assert (kept < least) == (not changes)


def test_other_settings_of_malloc_are_left_alone_or_named(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    assert keep_freed_memory() == "malloc is set by GLIBC_TUNABLES"
    monkeypatch.delenv("GLIBC_TUNABLES")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    monkeypatch.setattr("switchx.malloc._set", lambda parameters: pytest.fail("malloc is set"))
    assert return_freed_memory() == "malloc is set by MALLOC_TRIM_THRESHOLD_"
    assert keep_freed_memory() == "malloc is set by MALLOC_TRIM_THRESHOLD_"
    monkeypatch.setenv("SWITCHX_MALLOC", "jemalloc")
    with pytest.raises(ValueError, match="SWITCHX_MALLOC='jemalloc'; use 'keep', or 'system'"):
        keep_freed_memory()
