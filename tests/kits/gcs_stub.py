"""The part of Google's XML API that a storage uses, with generations and their conditions, in memory.

Written from the public reference of the API; it shows that the client is driven rightly, not that Google agrees.
"""

import hashlib
import http.server
import itertools
import threading
import urllib.parse
from email.utils import formatdate
from xml.sax.saxutils import escape


class GoogleStub(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.RLock()
        self.objects: dict[str, tuple[bytes, int, dict[str, str]]] = {}
        self.uploads: dict[str, dict] = {}
        self.numbers = itertools.count(1_700_000_000_000_000)
        self.tokens: set[str] = set()
        self.fault = lambda: (
            ""
        )  # for each request: "500", "503", "lost" (not carried out), "unanswered", or "" for none
        self.num_faults = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _split(self) -> None:
        parsed = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(parsed.query, keep_blank_values=True))
        self.key = urllib.parse.unquote(parsed.path).lstrip("/").partition("/")[2]
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization", ""))

    def handle_one_request(self) -> None:
        """Carry out one request, or go wrong as the test wants."""
        self.close_after = False
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Decide about the fault when the request is known."""
        if not super().parse_request():
            return False
        fault = self.server.fault()
        self.server.num_faults += bool(fault)
        self.close_after = fault == "unanswered"
        if fault in ("500", "503"):
            self._split()
            self._error(int(fault), "SlowDown")
            return False
        if fault == "lost":
            self.close_connection = True
            return False
        return True

    def _say(self, status: int, body: bytes = b"", **headers: str) -> None:
        if self.close_after:
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if self.command != "HEAD" or "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self._say(status, f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode())

    def _marks(self) -> dict[str, str]:
        return {name: value for name, value in self.headers.items() if name.lower().startswith("x-goog-meta-")}

    def _store(self, data: bytes) -> None:
        wanted = self.headers.get("x-goog-if-generation-match")
        with self.server.lock:
            found = self.server.objects.get(self.key)
            if wanted is not None and int(wanted) != (found[1] if found else 0):
                self._error(412, "PreconditionFailed")
                return
            marks = self._marks()
            generation = next(self.server.numbers)
            self.server.objects[self.key] = (data, generation, marks)
        self._say(200, ETag=_etag(data), x_goog_generation=str(generation))

    def do_PUT(self) -> None:
        self._split()
        if "uploadId" in self.query:
            self.server.uploads[self.query["uploadId"]][int(self.query["partNumber"])] = self.body
            self._say(200, ETag=_etag(self.body))
        elif "x-goog-copy-source" in self.headers:
            source = urllib.parse.unquote(self.headers["x-goog-copy-source"]).lstrip("/").partition("/")[2]
            found = self.server.objects.get(source)
            self._error(404, "NoSuchKey") if found is None else self._store(found[0])
        else:
            self._store(self.body)

    def do_POST(self) -> None:
        self._split()
        if "uploads" in self.query:
            number = f"u{next(self.server.numbers)}"
            self.server.uploads[number] = {0: self._marks()}
            self._say(200, f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId>"
                           "</InitiateMultipartUploadResult>".encode())  # fmt: skip
        else:
            parts = self.server.uploads.pop(self.query["uploadId"], None)
            if parts is None:
                self._error(404, "NoSuchUpload")
                return
            marks = parts.pop(0)
            data = b"".join(parts[number] for number in sorted(parts))
            with self.server.lock:
                generation = next(self.server.numbers)
                self.server.objects[self.key] = (data, generation, marks)
            self._say(200, f"<CompleteMultipartUploadResult><ETag>{escape(_etag(data))}</ETag>"
                           "</CompleteMultipartUploadResult>".encode(), x_goog_generation=str(generation))  # fmt: skip

    def do_DELETE(self) -> None:
        self._split()
        if "uploadId" in self.query:
            self.server.uploads.pop(self.query["uploadId"], None)
            self._say(204)
        elif self.server.objects.pop(self.key, None) is None:
            self._error(404, "NoSuchKey")
        else:
            self._say(204)

    def do_GET(self) -> None:
        self._split()
        if not self.key:
            self._list()
            return
        found = self.server.objects.get(self.key)
        if found is None:
            self._error(404, "NoSuchKey")
            return
        data, generation, marks = found
        if self.headers.get("If-Match") not in (None, _etag(data)):
            self._error(412, "PreconditionFailed")
            return
        headers = {
            "ETag": _etag(data),
            "x_goog_generation": str(generation),
            "Last_Modified": formatdate(usegmt=True),
            **{name.replace("-", "_"): value for name, value in marks.items()},
        }
        if self.command == "HEAD":
            self._say(200, Content_Length=str(len(data)), **headers)
        elif "Range" in self.headers:
            start, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
            if int(start) >= len(data):
                self._error(416, "InvalidRange")
                return
            piece = data[int(start) : int(end) + 1]
            span = f"bytes {start}-{int(start) + len(piece) - 1}/{len(data)}"
            self._say(206, piece, Content_Range=span, **headers)
        else:
            self._say(200, data, **headers)

    do_HEAD = do_GET

    def _list(self) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        rows, folders = [], set()
        for key, (data, _, _) in sorted(self.server.objects.items()):
            if not key.startswith(prefix):
                continue
            head, mark, _ = key[len(prefix) :].partition("/")
            if delimiter and mark:
                folders.add(prefix + head + "/")
                continue
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>{escape(_etag(data))}</ETag>"
                "<LastModified>2026-11-21T12:00:00.000Z</LastModified></Contents>"
            )
        rows += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
        self._say(200, f"<ListBucketResult>{''.join(rows)}</ListBucketResult>".encode())

    def log_message(self, *_: object) -> None:
        pass


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'
