"""A small S3 server on loopback that keeps its objects in memory, counts requests, and does what goes wrong."""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"

Fault = Callable[[str, str], str | None]
"""``fault(method, name)``: what goes wrong with a request: hang, reset, 503, cut, short, flip, other, or nothing.

``cut`` ends the connection in the body's midst, ``short`` answers with half of the object as if it were all of it,
``flip`` with one bit changed, ``other`` with another object of the same kind.
"""


class S3Server(ThreadingHTTPServer):
    """The server.

    Attributes:
        objects: what it holds.
        requests: (method, name) of each request so far.
        fault: see :data:`Fault`.
        conditions: whether it knows of If-None-Match and If-Match.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.fault: Fault = lambda method, name: None
        self.conditions = True
        self.lock = threading.Lock()
        self.closing = threading.Event()

    @property
    def options(self) -> dict[str, Any]:
        """What obstore needs to reach it."""
        return {
            "endpoint": f"http://127.0.0.1:{self.server_address[1]}",
            "access_key_id": "key",
            "secret_access_key": "secret",
            "region": "us-east-1",
            "client_options": {"allow_http": True},
        }

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are no news."""


@contextmanager
def s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3Server

    def log_message(self, *args: Any) -> None:
        pass

    def _begin(self) -> str | None:
        """The object's name; ``None`` where the request is answered already."""
        name = unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}").lstrip("/")
        self.server.requests.append((self.command, name))
        self.kind = self.server.fault(self.command, name)
        if self.kind == "hang":
            self.server.closing.wait(30)
        if self.kind in ("hang", "reset"):
            # Zero seconds to linger: closing sends a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return None
        if self.kind == "503":
            self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
            return None
        return name

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        length = headers.pop("length", str(len(body)))
        for key, value in {"content-length": length, "connection": "close", **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.close_connection = True
        self.wfile.write(body[: len(body) // 2] if self.kind == "cut" else body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self._begin()
        if name is None:
            return
        if not name:
            self._list()
            return
        data = self.server.objects.get(name)
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>" if self.command == "GET" else b"")
            return
        data = self._spoiled(name, data)
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        if self.server.conditions and self.headers.get("if-match") not in (None, tag):
            self._answer(412)
            return
        headers = {"etag": tag, "last_modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")
        if self.command == "HEAD":
            self._answer(200, length=str(len(data)), **headers)
        elif asked is None:
            self._answer(200, data, **headers)
        elif int(asked[1]) >= len(data):
            self._answer(416)
        else:
            part = data[int(asked[1]) : int(asked[2]) + 1 if asked[2] else None]
            end = int(asked[1]) + len(part) - 1
            self._answer(206, part, content_range=f"bytes {asked[1]}-{end}/{len(data)}", **headers)

    def _spoiled(self, name: str, data: bytes) -> bytes:
        if self.kind == "short":
            return data[: len(data) // 2]
        if self.kind == "flip":
            at = len(data) * 3 // 4
            return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        if self.kind == "other":
            suffix = name.rpartition(".")[2]
            return next(
                (o for n, o in sorted(self.server.objects.items()) if n != name and n.endswith(suffix) and o != data),
                b"nothing",
            )
        return data

    def do_PUT(self) -> None:
        name = self._begin()
        if name is None:
            return
        body = self._body()
        with self.server.lock:
            if self.server.conditions and self.headers.get("if-none-match") and name in self.server.objects:
                self._answer(412)
                return
            self.server.objects[name] = body
        self._answer(200, etag=f'"{hashlib.md5(body).hexdigest()}"')

    def do_POST(self) -> None:
        if self._begin() is None:
            return
        keys = re.findall(r"<Key>(.*?)</Key>", self._body().decode())
        for key in keys:
            self.server.objects.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def _list(self) -> None:
        prefix = parse_qs(urlsplit(self.path).query).get("prefix", [""])[0]
        found = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, data in sorted(self.server.objects.items())
            if name.startswith(prefix)
        )
        self._answer(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())


def within(seconds: float, call: Callable[[], Any]) -> tuple[float, Any]:
    """How long a call took, and what it gave."""
    began = time.monotonic()
    result = call()
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.2f} s"
    return took, result
