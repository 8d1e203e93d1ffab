# SPDX-License-Identifier: Apache-2.0
"""Object stores in memory: moto for `s3://`, gcp-storage-emulator for `gs://`."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

# The emulators log every request; nothing of that is ours.
_S3 = "from moto.server import main; main(['-H', 'localhost', '-p', '{port}'])"
_GS = """
from gcp_storage_emulator.server import create_server
create_server('localhost', {port}, in_memory=True, default_bucket='bucket').run()
"""


@contextlib.contextmanager
def running(scheme: str) -> Iterator[str]:
    """The address of an empty bucket; the environment has what programs need to find it."""
    package, code = {"s3": ("moto", _S3), "gs": ("gcp_storage_emulator", _GS)}[scheme]
    for needed in (package, {"s3": "s3fs", "gs": "gcsfs"}[scheme]):
        pytest.importorskip(needed, reason=f"{scheme}:// is tested with {package}")
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-c", code.format(port=port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://localhost:{port}"
    settings = {
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_CLOUD_PROJECT": "none",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            _wait_for(port, server)
            if scheme == "s3":
                import s3fs

                s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
            yield f"{scheme}://bucket"
    finally:
        server.kill()
        server.wait()


def _wait_for(port: int, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, "the emulator did not start"
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
            return
        time.sleep(0.1)
    raise AssertionError("the emulator does not listen")
