# SPDX-License-Identifier: Apache-2.0
"""Object stores in memory: moto for `s3://`, gcp-storage-emulator for `gs://`."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from tests.processes import ROOT


def serve_s3(port: int) -> None:
    from moto.server import main

    main(["-H", "localhost", "-p", str(port)])


def serve_gs(port: int) -> None:
    """With what TensorStore asks of the service and the emulator lacks: generations of objects.

    A generation is another after every write; a download says it, and an upload may be for one.
    """
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects
    from gcp_storage_emulator.server import create_server

    make, download = objects._make_object_resource, objects.download

    def with_generation(*arguments, **named):
        return make(*arguments, **named) | {"generation": str(time.time_ns())}

    def saying_generation(request, response, storage, *rest, **named):
        download(request, response, storage, *rest, **named)
        with contextlib.suppress(NotFound):
            name = request.params["bucket_name"], request.params["object_id"]
            response["x-goog-generation"] = storage.get_file_obj(*name)["generation"]

    def for_a_generation(upload):
        def checked(request, response, storage):
            wanted = request.query.get("ifGenerationMatch", [None])[0]
            there = "0"
            with contextlib.suppress(NotFound, KeyError):
                name = request.params["bucket_name"], request.query["name"][0]
                there = storage.get_file_obj(*name)["generation"]
            if wanted in (None, there):
                upload(request, response, storage)
            else:
                response.status = HTTPStatus.PRECONDITION_FAILED

        return checked

    objects._make_object_resource, objects.download = with_generation, saying_generation
    objects._media_upload = for_a_generation(objects._media_upload)
    objects._multipart_upload = for_a_generation(objects._multipart_upload)
    create_server("localhost", port, in_memory=True, default_bucket="bucket").run()


@contextlib.contextmanager
def running(scheme: str) -> Iterator[str]:
    """The address of an empty bucket; the environment has what programs need to find it."""
    for package in {"s3": ("moto", "s3fs"), "gs": ("gcp_storage_emulator", "gcsfs")}[scheme]:
        pytest.importorskip(package, reason=f"{scheme}:// is tested with {package}")
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    code = f"from {__name__} import serve_{scheme}; serve_{scheme}({port})"
    server = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
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
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks a service that is not emulated
        "NO_GCE_CHECK": "true",
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
