"""An S3 server that keeps nothing and can leave uploads waiting: what a client holds in memory then is its most."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PIECE = 1 << 20


class Sink(ThreadingHTTPServer):
    """Takes whatever is put; parts that ``holds`` says yes to wait until ``full`` of them have come.

    Args:
        holds: asked with the path and the number of a part.
        full: how many parts may wait at once.
        when_full: called when they do, before they go on.
    """

    daemon_threads = True

    def __init__(self, holds: Callable[[str, int], bool], full: int, when_full: Callable[[], None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._holds, self._full, self._when_full = holds, full, when_full
        self._num_held = 0
        self._lock = threading.Lock()
        self.was_full = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def hold(self, path: str, number: int) -> None:
        if self.was_full.is_set() or not self._holds(path, number):
            return
        with self._lock:
            self._num_held += 1
            is_full = self._num_held == self._full
        if is_full:
            self._when_full()
            self.was_full.set()
        assert self.was_full.wait(60)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Sink

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _drop(self) -> None:
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            left -= len(self.rfile.read(min(left, _PIECE)))

    def do_PUT(self) -> None:
        part = re.search(r"partNumber=(\d+)", self.path)
        if part is not None:
            self.server.hold(self.path.partition("?")[0], int(part[1]))
        self._drop()
        self._answer(200, ETag='"1"')

    def do_POST(self) -> None:
        self._drop()
        kind, inside = ("CompleteMultipartUploadResult", "<ETag>1</ETag>")
        if "uploads" in self.path:
            kind, inside = "InitiateMultipartUploadResult", "<UploadId>u</UploadId>"
        self._answer(200, f"<{kind}><Bucket>b</Bucket><Key>k</Key>{inside}</{kind}>".encode())

    def do_GET(self) -> None:
        if "list-type=2" in self.path:
            self._answer(200, b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>")
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self._answer(204)


@contextlib.contextmanager
def sink(holds: Callable[[str, int], bool], full: int, when_full: Callable[[], None]) -> Iterator[Sink]:
    """Run a sink in a thread."""
    server = Sink(holds, full, when_full)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.was_full.set()
        server.shutdown()
        thread.join()
        server.server_close()
