"""A fuzzer of secrets: a marker in every place where one may stand, and all that comes out searched for it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from command_kit import invoke
from fsspec.implementations.memory import MemoryFileSystem

import holdfast as hf
from holdfast import _outgoing
from holdfast._outgoing import conceal, conceal_url, masked, masked_client, on_one_line, visible
from holdfast.errors import StorageError
from holdfast.storage import LibcloudObjectStore, resolve
from holdfast.storage.adapters.fsspec import FsspecStorage
from holdfast.storage.object.object_storage import ObjectStorage
from holdfast.torch import TorchTrainer

MARK = "zq9MarkerOfASecret"

SCHEMES = ("s3", "gs", "az", "abfs", "oci", "http", "https", "ftp", "sftp", "smb", "webhdfs", "github", "hdfs", "s4",
           "libcloud", "pyarrow+s3", "pyarrow+hdfs", "fsspec+http", "fsspec+sftp", "fsspec+memory")  # fmt: skip
PLACES = (
    "{scheme}://me:{mark}@127.0.0.1:9/bucket/run",
    "{scheme}://{mark}:@127.0.0.1:9/bucket/run",
    "{scheme}://me:{mark}/x@127.0.0.1:9/bucket/run",
    "{scheme}://me:p@{mark}@127.0.0.1:9/bucket/run",
    "{scheme}://bucket/run?sig={mark}",
    "{scheme}://bucket/run?sv=1&foo={mark}&region=eu",
    "{scheme}://bucket/my run?{mark}",
    "{scheme}://bucket/run?endpoint_override=127.0.0.1:9&scheme=http&token={mark}",
    "{scheme}://bucket/run?region=u:{mark}@x&endpoint_override=127.0.0.1:9",
    "{scheme}://bucket?token={mark}",
)
COMMANDS = ("ls", "show", "verify", "stats", "latest", "page", "log", "prune", "doctor", "sweep")


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    """No place of the environment is used, none outside of this machine asked, and no secret known from before."""
    monkeypatch.setattr(_outgoing, "_known", {})
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("OCI_NAMESPACE", "ns")
    monkeypatch.setenv("OCI_REGION", "eu")
    monkeypatch.chdir(tmp_path)


class Heard(logging.Handler):
    """Keeps records as a formatter shows them, tracebacks too."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def shown(call: Callable[[], Any]) -> str:
    """Return everything that a call lets out: what it prints and logs, its error with all causes, its result's repr."""
    heard, out = Heard(), io.StringIO()
    logger = logging.getLogger("holdfast")
    logger.addHandler(heard)
    texts: list[str] = []
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            texts.append(repr(call()))
    except Exception as error:
        texts += traceback.format_exception(error)
        texts += [str(error), repr(error)]
    finally:
        logger.removeHandler(heard)
    return "\n".join([*texts, out.getvalue(), *heard.lines])


def command(*arguments: str) -> str:
    """Run a command and return all that it prints, and its traceback if it has one."""
    result = invoke(*arguments, code=None)
    trace = [] if result.exc_info is None else traceback.format_exception(*result.exc_info)
    kept = [line for line in trace if "SystemExit" not in line]
    return "\n".join([result.stdout, result.stderr, *kept])


@pytest.mark.parametrize("place", PLACES)
def test_no_url_is_shown_with_its_secret(place):
    """Whatever a URL holds in its user part or query, no error, repr, record, traceback or `uri` shows it."""
    for scheme in SCHEMES:
        if scheme == "pyarrow+s3" and place in PLACES[:2]:
            continue  # pyarrow asks for the region of the bucket for six seconds
        uri = place.format(scheme=scheme, mark=MARK)
        calls: tuple[Callable[[], Any], ...] = (
            lambda uri=uri: resolve(uri),
            lambda uri=uri: resolve(uri).uri,
            lambda uri=uri: resolve(uri).child("a").uri,
            lambda uri=uri: hf.Checkpoint(uri),
            lambda uri=uri: hf.Checkpoint(uri).uri,
            lambda uri=uri: hf.Checkpoint(f"{uri}/x"),
            lambda uri=uri: resolve(uri, filesystem=fsspec.filesystem("memory")),
            lambda uri=uri: resolve("a", filesystem=uri),
        )
        for number, call in enumerate(calls):
            _outgoing._known.clear()  # what an earlier place has told must not hide what this place shows
            assert MARK not in shown(call), (scheme, number, shown(call))


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_shows_a_secret_of_its_path(name):
    """Commands print the places that they were given, without passwords and queries, as text and as JSON."""
    for scheme in ("s3", "s4", "fsspec+memory", "http"):
        for place in ("{scheme}://bucket/run?sig={mark}", "{scheme}://me:{mark}@127.0.0.1:9/bucket/run"):
            uri = place.format(scheme=scheme, mark=MARK)
            for more in ((), ("--json",)):
                _outgoing._known.clear()
                said = command(name, uri, *more)
                assert MARK not in said, (scheme, said)


class Echo(BaseHTTPRequestHandler):
    """Refuses every request, and says all of it again: its query and headers with the credentials in them."""

    statuses: ClassVar[tuple[int, ...]] = (403,)

    def answer(self) -> None:
        if length := int(self.headers.get("Content-Length") or 0):
            self.rfile.read(length)
        heard = f"{self.path} {dict(self.headers)}".replace("&", "&amp;").replace("<", "&lt;")
        body = f"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>{heard}</Message></Error>".encode()
        self.send_response(self.statuses[0])
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def used(storage: Any) -> Iterator[Callable[[], Any]]:
    """Each way to use a storage that fails, one after another."""
    yield lambda: storage.put("a", b"x")
    yield lambda: storage.put("a", b"x", if_absent=True)
    yield lambda: storage.read("a")
    yield lambda: storage.stat("a")
    yield lambda: list(storage.list(""))
    yield lambda: storage.delete("a")
    yield lambda: storage.copy("a", "b")
    yield storage.describe
    yield lambda: storage


@pytest.mark.parametrize(
    ("uri", "options"),
    [
        (
            "s3://bucket/run",
            {"access_key_id": f"{MARK}1", "secret_access_key": f"{MARK}2", "session_token": f"{MARK}3"},
        ),
        ("gs://bucket/run", {"bearer_token": MARK}),
        ("az://bucket/run", {"account_name": "a", "sas_key": f"sv=1&sig={MARK}"}),
        ("az://bucket/run", {"account_name": "a", "token": MARK}),
    ],
    ids=["s3", "gs", "azure-sas", "azure-token"],
)
def test_no_store_gets_its_credentials_printed(echo, uri, options):
    """A server that repeats query and headers of a refused request does not get them into any message."""
    place = {"base_url": echo} if uri.startswith("gs") else {"endpoint": echo}
    storage = ObjectStorage(uri, {**options, **place, "max_retries": 0, "deadline_s": 1})
    said = [shown(call) for call in used(storage)]
    assert MARK not in "".join(said)
    assert "cannot read" in said[2], said[2]


def test_no_variable_is_printed(echo, monkeypatch):
    """Credentials that come from the environment are no more shown than those that are given."""
    for number, name in enumerate(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")):
        monkeypatch.setenv(name, f"{MARK}{number}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", echo)
    for name in COMMANDS:
        for more in ((), ("--json",)):
            assert MARK not in command(name, "s3://bucket/run", *more), name
    monkeypatch.setenv("MY_STORE_TOKEN", MARK)
    assert MARK not in masked_client(f"refused: {MARK}")


def test_no_container_gets_its_credentials_printed(echo):
    """Libcloud puts key and secret into requests and errors; none of our messages has them."""
    host, _, port = echo.removeprefix("http://").partition(":")
    options = {"key": f"{MARK}1", "secret": f"{MARK}2", "host": host, "port": int(port), "secure": False}
    for call in used(LibcloudObjectStore("s3", "bucket", options)):
        assert MARK not in shown(call)


class Leaky(MemoryFileSystem):
    """Shows its password wherever it can: in its repr and in every error."""

    protocol = ("leaky", "memory")  # of this process alone: saves are written by a thread of it
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False
    broken = False

    def __init__(self, password: str = "", auth: tuple[str, ...] = (), headers: dict[str, str] | None = None) -> None:
        super().__init__(password=password, auth=auth, headers=headers)
        self.words = f"{password} {auth} {headers}"

    def __repr__(self) -> str:
        return f"Leaky({self.words})"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("leaky://").partition("?")[0].strip("/") if path.strip("/") else ""

    def info(self, path: str, **options: Any) -> Any:
        if self.broken:
            raise ValueError(f"cannot look at {path} with {self.words}") from KeyError(self.words)
        return super().info(path, **options)

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        if self.broken:
            raise OSError(f"403 for {self.words}")
        return super().cat_file(path, *arguments, **options)


def _failing(name: str) -> Callable[..., Any]:
    def call(self: Leaky, *arguments: Any, **options: Any) -> Any:
        if self.broken:
            raise RuntimeError(f"{name} refused for {self.words}")
        return getattr(MemoryFileSystem, name)(self, *arguments, **options)

    return call


for _name in ("ls", "pipe_file", "open", "cp_file", "rm_file"):
    setattr(Leaky, _name, _failing(_name))


def leaky() -> Leaky:
    return Leaky(password=f"{MARK}1", auth=("me", f"{MARK}2"), headers={"Authorization": f"Bearer {MARK}3"})


def test_no_client_says_its_password():
    """Errors of a file system object, the causes of errors, and its repr are not passed on with what they show."""
    filesystem = leaky()
    for call in used(FsspecStorage(filesystem, "/x")):
        filesystem.broken = True
        assert MARK not in shown(call)
    filesystem.broken = False
    calls = (
        lambda: resolve("s3://b/x", filesystem=filesystem),
        lambda: hf.Checkpoint("leaky://a/b", filesystem),
        lambda: hf.Result.from_path("nowhere", storage_filesystem=filesystem),
        lambda: TorchTrainer(print, run_config=hf.RunConfig(storage_path="x", storage_filesystem=filesystem)).fit(),
    )
    for call in calls:
        assert MARK not in shown(call), shown(call)


def test_a_file_system_is_named_by_its_class():
    """What the repr of a file system shows is not known to be a secret; so it is in no message."""

    class Odd:
        def __repr__(self) -> str:
            return f"Odd(cookie={MARK})"

    for call in (lambda: resolve("a", filesystem=Odd()), lambda: resolve("s3://b/x", filesystem=Odd())):
        said = shown(call)
        assert MARK not in said
        assert "Odd" in said


def test_no_file_of_a_run_holds_a_secret(tmp_path, monkeypatch):
    """Training at a storage with credentials: no file of the run, block, page, metrics file or command has them."""
    filesystem = leaky()
    Leaky.store.clear()
    monkeypatch.setenv("MY_TOKEN", f"{MARK}4")
    fsspec.register_implementation("leaky", Leaky, clobber=True)

    def train() -> str:
        storage = FsspecStorage(filesystem, "/runs/a")
        with hf.Checkpointer(storage, {"w": torch.zeros(3)}, every=1) as ck:
            ck.step(loss=1.0)
            ck.step(loss=0.5)
        return f"{ck.latest()!r} {ck.stats!r}"

    said = shown(train) + shown(train)
    assert "resumed" in said
    metrics = tmp_path / "holdfast.prom"
    uri = f"leaky://runs/a?token={MARK}"
    for arguments in (["ls"], ["show"], ["verify"], ["stats"], ["page", "--json"], ["page"], ["log"], ["prune"]):
        said += command(*arguments, uri)
    said += command("stats", uri, "--openmetrics", str(metrics))
    said += metrics.read_text()
    assert "checkpoints are there" in said
    assert MARK not in said, said
    for path, file in Leaky.store.items():
        assert MARK.encode() not in file.getvalue(), path
    assert any(path.endswith("run.json") for path in Leaky.store)


def test_values_are_known_however_they_are_written():
    """A credential that was concealed is found as a word and percent-encoded; short and partial ones are left alone."""
    conceal(["a+b/c=d&e?zq9", "short"])
    assert "zq9" not in masked("sent a+b/c=d&e?zq9, and a%2Bb%2Fc%3Dd%26e%3Fzq9")
    assert masked("a short word") == "a short word"
    conceal(["password1"])
    assert masked("mypassword12") == "mypassword12"


def test_errors_and_records_are_masked_wherever_they_are_made():
    """An error made anywhere, sent to another process, and a record with arguments show no URL's secret."""
    import pickle

    from holdfast._log import get_logger

    error = StorageError(f"cannot read https://h/x?sig={MARK}")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert MARK not in f"{one} {one!r} {one.args} {json.dumps(one.args)}"
    logger = get_logger("testing")

    def fail() -> None:
        try:
            raise ValueError(f"s3://me:{MARK}@host")
        except ValueError:
            logger.exception("%s failed", f"ftp://me:{MARK}@host/x")

    said = shown(fail)
    assert MARK not in said
    assert "ValueError" in said


def test_what_a_terminal_obeys_is_escaped():
    """Escape codes, line breaks, marks that turn the order of letters, and lone surrogates become escapes."""
    assert on_one_line("a\nb\x1b[2J\u202e\ud800é") == "a\\nb\\x1b[2J\\u202e\\ud800é"
    assert visible("a\n\tb\r") == "a\n\tb\\r"


def test_a_query_belongs_to_its_uri():
    """Names and patterns with a question mark beside a URI stay; words that stand in a query stay elsewhere too."""
    for text in (
        "s3://b/run: tensor 'model?a=verylongvalue1' differs",
        "cannot read s3://b/run, files match ?b=c and step_?=longlonglong",
        "missing in file:///tmp/run: w?x=12345678; layer.?.w=1",
    ):
        assert masked(text) == text
    assert masked("http://h/a?foo=abc: w?x=1 (why?)") == "http://h/a?foo=*** w?x=1 (why?)"
    conceal_url("s3://b/run?profile=layer.weight1&sig=layer.weight2")
    assert masked("tensors layer.weight1, layer.weight2") == "tensors layer.weight1, ***"
