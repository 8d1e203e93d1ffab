# SPDX-License-Identifier: Apache-2.0
"""Bytes to a server and what comes back, for clients that no library would be."""

import json
import socket


def request_bytes(body: bytes, *headers: str, length: int | None = None) -> bytes:
    """A whole `POST /v1/generate`; `length` may lie."""
    lines = [
        "POST /v1/generate HTTP/1.1", "Host: x", "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}", *headers,
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def exchange(address, data: bytes, *, is_ended: bool = False, timeout_s: float = 20.0) -> bytes:
    """Sends bytes and reads until the server closes.

    Args:
        is_ended: the client says that it sends no more.
        timeout_s: whatever came until then is what came.
    """
    received = b""
    with socket.create_connection(address, timeout=timeout_s) as client:
        try:
            client.sendall(data)
            if is_ended:
                client.shutdown(socket.SHUT_WR)
            while part := client.recv(65536):
                received += part
        except (ConnectionError, TimeoutError):
            pass
    return received


def status_and_json(received: bytes) -> tuple[int, dict]:
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)
