"""The fault proxy itself, between plain HTTP clients and a small server of this file."""

from __future__ import annotations

import contextlib
import gc
import http.client
import http.server
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

from holdfast.errors import ConfigError
from holdfast.testing import Fault, FaultProxy

BODY = bytes(range(256)) * 1000


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.done = []


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        size = int(self.headers.get("Content-Length") or 0)
        self.server.done.append((self.command, self.path, self.rfile.read(size)))
        self.send_response(204)
        self.end_headers()

    def do_GET(self):
        self.server.done.append((self.command, self.path, b""))
        if self.path == "/endless":  # no length told: the connection ends it
            self.send_response(200)
            self.end_headers()
            self.wfile.write(BODY)
            self.close_connection = True
            return
        self.send_response(200)
        if self.path == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (BODY[:1000], BODY[1000:]):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(BODY)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with _Server() as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield one
        one.shutdown()
        thread.join(10)


@pytest.fixture
def proxy(server):
    with FaultProxy(f"http://127.0.0.1:{server.server_port}") as one:
        yield one


@pytest.fixture
def ask(proxy):
    """Ask on one connection, which is made again when it was closed."""
    connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=20)

    def asked(method="GET", path="/a", body=None, **headers):
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except BaseException:
            connection.close()
            raise

    yield asked
    connection.close()


def statuses(ask, count, **kwargs):
    return [ask(**kwargs)[0] for _ in range(count)]


def test_nothing_changes_without_rules(server, proxy, ask):
    """Bodies of every framing pass unchanged in both directions, over one connection, and are counted and logged."""
    assert ask("PUT", "/b/up?partNumber=1", BODY) == (204, b"")
    assert ask("GET", "/chunked") == (200, BODY)
    assert ask("GET", "/endless") == (200, BODY)
    assert ask("GET", "/plain", Range="bytes=0-9") == (200, BODY)
    assert ask("HEAD", "/plain") == (200, b"")
    assert server.done[0] == ("PUT", "/b/up?partNumber=1", BODY)
    put, chunked, _, plain, head = proxy.exchanges
    assert (put.number, put.method, put.path, put.query) == (0, "PUT", "/b/up", "partNumber=1")
    assert (put.sent_bytes, put.received_bytes, put.status, put.fault) == (len(BODY), 0, 204, "")
    assert chunked.received_bytes > len(BODY)  # with the marks of the chunks
    assert (plain.range, plain.received_bytes) == ("bytes=0-9", len(BODY))
    assert (head.method, head.received_bytes, head.number) == ("HEAD", 0, 4)
    proxy.forget()
    assert proxy.exchanges == ()


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("500", 500, b"InternalError"),
        ("503", 503, b"SlowDown"),
        ("403", 403, b"AccessDenied"),
        ("expired", 400, b"ExpiredToken"),
    ],
)
@pytest.mark.parametrize("carried_out", [False, True])
def test_answers(server, proxy, ask, kind, status, code, carried_out):
    """The client is told of an error, and the server has done its work or not, as the rule says."""
    proxy.inject(Fault(kind=kind, at=0, carried_out=carried_out))
    found, body = ask("PUT", "/x", b"data")
    assert found == status
    assert code in body
    assert len(server.done) == int(carried_out)
    assert ask("PUT", "/x", b"data")[0] == 204
    assert [one.fault for one in proxy.exchanges] == [kind, ""]


@pytest.mark.parametrize("carried_out", [False, True])
def test_reset(server, proxy, ask, carried_out):
    """The connection breaks before or after the server has carried the request out."""
    proxy.inject(Fault(kind="reset", carried_out=carried_out))
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask("PUT", "/x", b"data")
    assert len(server.done) == int(carried_out)


def test_silence_is_bounded(server, proxy, ask):
    """A request that is never answered ends with the time it was given, and with the proxy."""
    proxy.inject(Fault(kind="silence", seconds=0.05))
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask()
    proxy.inject(Fault(kind="silence", seconds=1000))
    threading.Timer(0.1, proxy.close).start()
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask()
    assert server.done == []


def test_cut_answers(proxy, ask):
    """A truncated answer breaks off; a short one looks whole."""
    proxy.inject(Fault(kind="truncated", at=0))
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask()
    assert caught.value.partial == BODY[: len(BODY) // 2]
    proxy.inject(Fault(kind="short", at=0))
    assert ask() == (200, BODY[: len(BODY) // 2])
    assert ask() == (200, BODY)


def test_slow(proxy, ask):
    """Latency and bandwidth are those of the rule, in both directions."""
    proxy.inject(Fault(kind="slow", seconds=0.1, bytes_per_s=2_560_000))
    begin = time.monotonic()
    assert ask("GET", "/plain") == (200, BODY)
    assert time.monotonic() - begin >= 0.19
    begin = time.monotonic()
    assert ask("PUT", "/up", BODY)[0] == 204
    assert time.monotonic() - begin >= 0.19


def test_selection(proxy, ask):
    """Rules hit by number, by period, by a chance that repeats, by method and path, and only so often."""
    proxy.inject(Fault(kind="503", every=3))
    assert statuses(ask, 6) == [200, 200, 503, 200, 200, 503]
    proxy.inject(Fault(kind="503", every=2, times=1))
    assert statuses(ask, 4) == [200, 503, 200, 200]
    proxy.inject(Fault(kind="500", method="PUT", path=r"/b\?"), Fault(kind="503", at=1))
    assert [ask("PUT", "/b")[0], ask("PUT", "/c")[0], ask("GET", "/b")[0]] == [500, 503, 200]
    seen = []
    for seed in (1, 1, 2):
        proxy.inject(Fault(kind="503", share=0.3, seed=seed))
        seen.append(statuses(ask, 40))
    assert seen[0] == seen[1] != seen[2]
    assert 4 <= seen[0].count(503) <= 20


def test_call(server, proxy, ask):
    """A function is called at one request, before or after the server knows of it, and may break the connection."""
    seen = []
    proxy.inject(Fault(kind="call", at=1, call=lambda one: seen.append((one.number, len(server.done)))))
    assert statuses(ask, 3) == [200] * 3
    proxy.inject(Fault(kind="call", at=0, call=lambda one: seen.append((one.number, len(server.done))) or True))
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask()
    proxy.inject(Fault(kind="call", at=0, carried_out=True, call=lambda one: seen.append(len(server.done))))
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask()
    assert seen == [(1, 1), (3, 3), 4]


def test_a_server_that_is_gone(server, proxy, ask):
    """Without its server the proxy closes connections, and goes on."""
    server.shutdown()
    server.server_close()
    for _ in range(2):
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask()
    assert [one.status for one in proxy.exchanges] == [0, 0]


@pytest.mark.parametrize("wrong", [{"kind": "404"}, {"kind": "500", "share": 0.1, "at": 1}, {"kind": "call"}])
def test_refused(wrong):
    """A rule that makes no sense is refused when it is made."""
    with pytest.raises(ConfigError):
        Fault(**wrong)


def test_refused_server():
    """Only plain HTTP can be looked into."""
    with pytest.raises(ConfigError, match="http://127"):
        FaultProxy("https://example.org")


def test_connections_that_come_while_it_closes_are_closed() -> None:
    """What asyncio has accepted when its listener closes becomes no connection of its own; none may stay open."""
    for _ in range(8):
        proxy = FaultProxy("http://127.0.0.1:1")
        host, port = proxy.url.removeprefix("http://").split(":")
        clients: list[socket.socket] = []

        def connect(place: tuple[str, int] = (host, int(port)), clients: list[socket.socket] = clients) -> None:
            with contextlib.suppress(OSError):
                clients.extend(socket.create_connection(place, timeout=5) for _ in range(60))

        connecting = threading.Thread(target=connect)
        connecting.start()
        time.sleep(0.002)  # in the midst of them
        proxy.close()
        connecting.join()
        for client in clients:
            client.close()
        del proxy
        gc.collect()  # a socket that was left open warns, which is an error here
