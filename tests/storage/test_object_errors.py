"""What becomes of each answer of an object store: a stub server that says what the test wants."""

import http.server
import pickle
import socket
import threading
import time
from datetime import timedelta

import pytest

from holdfast.errors import (
    ConfigError,
    MissingExtraError,
    StorageConflictError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
)
from holdfast.storage import from_description, resolve
from holdfast.storage.object.client import errors_of
from holdfast.storage.object.object_storage import ObjectStorage

pytest.importorskip("obstore", reason="obstore is not installed")

_SECRET = "do-not-show-this-secret"


class _Stub(http.server.ThreadingHTTPServer):
    """Answers every request by ``answer(method, path)`` -> (status, code); counts them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = lambda method, path: (200, "")
        self.seen: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _do(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append(self.command)
        status, code = self.server.answer(self.command, self.path)
        whole = code if code.startswith("<") else f"<Error><Code>{code}</Code><Message>m</Message></Error>"
        body = b"" if self.command == "HEAD" else whole.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Sat, 21 Nov 2026 12:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _do

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stub():
    server = _Stub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def _storage(url: str, **options: object) -> ObjectStorage:
    return ObjectStorage(
        "s3://bucket/run",
        {
            "endpoint": url, "access_key_id": "KEYID", "secret_access_key": _SECRET, "max_retries": 1, "timeout_s": 20,
            "deadline_s": 60, **options,
        },
    )  # fmt: skip


_OPERATIONS = {
    "put": lambda storage: storage.put("a", b"1"),
    "create": lambda storage: storage.create("a", 0).close(),
    "open": lambda storage: storage.open("a"),
    "read": lambda storage: storage.read("a"),
    "stat": lambda storage: storage.stat("a"),
    "exists": lambda storage: storage.exists("a"),
    "list": lambda storage: list(storage.list()),
    "list one level": lambda storage: list(storage.list(recursive=False)),
    "delete": lambda storage: storage.delete("a"),
    "copy": lambda storage: storage.copy("a", "b"),
    "conditional put": lambda storage: storage.put("a", b"1", if_absent=True),
}


@pytest.mark.parametrize("operation", _OPERATIONS)
@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "InvalidToken", StoragePermissionError),
        (403, "AccessDenied", StoragePermissionError),
        (404, "NoSuchBucket", StorageNotFoundError),
        (507, "XMinioStorageFull", StorageFullError),
        (500, "InternalError", StorageUnavailableError),
        (503, "SlowDown", StorageUnavailableError),
        (400, "InvalidRequest", StorageError),
    ],
)
def test_translation(stub, operation, status, code, kind):
    """Every operation turns an answer into the error that says what to do; a refusal is never "not found"."""
    stub.answer = lambda method, path: (status, code)
    if status == 404 and operation in ("exists", "delete"):
        return  # what is not there need not be said
    with pytest.raises(StorageError) as caught:
        _OPERATIONS[operation](_storage(stub.url))
    assert type(caught.value) is kind
    assert "s3://bucket" in str(caught.value)
    assert _SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


_PASSING = [
    (409, "ConditionalRequestConflict"),
    (409, "OperationAborted"),
    (400, "RequestTimeout"),
    (403, "RequestTimeTooSkewed"),
]


@pytest.mark.parametrize(("status", "code"), _PASSING)
@pytest.mark.parametrize("operation", ["put", "create", "delete", "conditional put"])
def test_answers_that_pass(stub, monkeypatch, operation, status, code):
    """What the SDKs of the stores repeat is repeated; if it does not pass, the store is away, and refuses nothing."""
    monkeypatch.setattr(ObjectStorage, "conditional", True)
    monkeypatch.setattr("holdfast.storage.object.client._PAUSE_S", 0.001)
    answers = [(status, code)] * 2
    stub.answer = lambda method, path: answers.pop() if answers else (200, "")
    _OPERATIONS[operation](_storage(stub.url))
    assert len(stub.seen) == 3
    stub.answer = lambda method, path: (status, code)
    with pytest.raises(StorageUnavailableError, match=code):
        _OPERATIONS[operation](_storage(stub.url))


@pytest.mark.parametrize("status", [409, 412])
def test_a_name_that_is_taken(stub, monkeypatch, status):
    """Azure says 409 and S3 412 where the object exists: that is an answer, and is not asked for again."""
    monkeypatch.setattr(ObjectStorage, "conditional", True)
    stub.answer = lambda method, path: (status, "BlobAlreadyExists" if status == 409 else "PreconditionFailed")
    with pytest.raises(StorageExistsError):
        _storage(stub.url).put("a", b"1", if_absent=True)
    assert stub.seen == ["PUT"]


def test_a_name_that_is_no_path(stub):
    """The client lists nothing beside an object whose name has an empty part: the error says which, and what to do."""
    listing = """<ListBucketResult><Name>bucket</Name><KeyCount>1</KeyCount><IsTruncated>false</IsTruncated><Contents>
        <Key>run//x</Key><LastModified>2026-11-21T12:00:00.000Z</LastModified><ETag>"1"</ETag><Size>1</Size>
        </Contents></ListBucketResult>"""
    stub.answer = lambda method, path: (200, listing)
    with pytest.raises(StorageError, match=r"no path.*run//x.*rename or delete it"):
        list(_storage(stub.url).list())


def test_quota(stub):
    """A quota that is reported as 403 is a full storage, not a missing right."""
    stub.answer = lambda method, path: (403, "QuotaExceeded")
    with pytest.raises(StorageFullError):
        _storage(stub.url).put("a", b"1")


def test_retries(stub):
    """A server that fails twice and then works is asked three times; one that fails on is given up."""
    answers = iter([(500, "x"), (503, "x"), (200, "")])
    stub.answer = lambda method, path: next(answers)
    _storage(stub.url, max_retries=5).put("a", b"1")
    assert stub.seen == ["PUT"] * 3
    stub.seen.clear()
    stub.answer = lambda method, path: (500, "x")
    with pytest.raises(StorageError):
        _storage(stub.url, max_retries=2).put("a", b"1")
    assert stub.seen == ["PUT"] * 3


def test_a_store_that_has_answered_is_asked_for_longer(stub, monkeypatch):
    """A wrong address is said soon; a store that is away for a while, or busy (429), costs no save."""
    monkeypatch.setattr("holdfast.storage.object.client._SHORTEST", timedelta(milliseconds=1))
    monkeypatch.setattr("holdfast.storage.object.client._LONGEST", timedelta(milliseconds=5))
    options = {"endpoint": stub.url, "access_key_id": "KEYID", "secret_access_key": _SECRET}
    storage = ObjectStorage("s3://bucket/run", options)
    stub.answer = lambda method, path: (503, "SlowDown")
    with pytest.raises(StorageUnavailableError, match="after 10 retries"):
        storage.put("a", b"1")
    stub.answer = lambda method, path: (200, "")
    storage.put("a", b"1")
    answers = iter([*[(503, "SlowDown")] * 12, *[(429, "TooManyRequests")] * 12, (200, "")])
    stub.answer = lambda method, path: next(answers)
    storage.child("b").put("c", b"1")
    stub.answer = lambda method, path: (503, "SlowDown")
    for tries in (25, 10):  # what was in vain is not waited for as long once more
        with pytest.raises(StorageUnavailableError, match=f"after {tries} retries"):
            storage.put("a", b"1")
    with storage.create("b", 3) as writer:  # to gather bytes is no answer
        writer.write(memoryview(b"abc"))
        with pytest.raises(StorageUnavailableError, match="after 10 retries"):
            writer.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"endpoint": "localhost:9000"}, "endpoint='localhost:9000': give it with its scheme"),
        ({"endpoint": "'http://localhost:9000'"}, "give it with its scheme"),
        ({"endpoint": "http://localhost:9000\n"}, "give it with its scheme"),
        ({"access_key_id": "KEYID\n"}, "access_key_id begins or ends with a blank or a line break"),
        ({"access_key_id": "KEY\nID"}, "access_key_id"),
        ({"secret_access_key": f"{_SECRET}\n"}, "secret_access_key begins or ends with a blank or a line break"),
    ],
)
def test_settings_on_which_the_client_would_panic(settings, words):
    """A panic would end the thread of the writer, and the start would wait for it in vain."""
    with pytest.raises(ConfigError, match=words) as caught:
        _storage("http://127.0.0.1:1", **settings)
    assert _SECRET not in str(caught.value)


def test_a_panic_of_the_client_is_an_error():
    """It is no Exception of Python, and ends no thread of ours."""
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    with pytest.raises(StorageError, match="cannot read s3://b/a: the client failed"), errors_of("read", "s3://b/a"):
        raise panic("request valid")
    with pytest.raises(KeyboardInterrupt), errors_of("read", "s3://b/a"):
        raise KeyboardInterrupt


def test_the_environment_is_read_once(stub, monkeypatch):
    """A directory of a storage has its credentials and its connections, whatever the environment says by then."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", stub.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEYID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", _SECRET)
    storage = resolve("s3://bucket/run")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ANOTHER")
    assert storage.child("a").secrets() == storage.secrets() == {"access_key_id": "KEYID", "secret_access_key": _SECRET}


def test_refusals_are_not_repeated(stub):
    """A refusal is final: asking again would only take time."""
    stub.answer = lambda method, path: (403, "AccessDenied")
    with pytest.raises(StoragePermissionError):
        _storage(stub.url, max_retries=5).put("a", b"1")
    assert stub.seen == ["PUT"]


def test_silence(stub):
    """A server that takes connections and says nothing is given up at the deadline."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        begin = time.monotonic()
        with pytest.raises(StorageError, match="in time"):
            _storage(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5, deadline_s=1).stat("a")
        assert time.monotonic() - begin < 60


def test_a_dead_server():
    """A server that is not there is a StorageUnavailableError, soon."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(StorageError) as caught:
        _storage(url).list().__next__()
    assert type(caught.value) is StorageUnavailableError
    assert "connection refused: check the endpoint" in str(caught.value)


def test_lost_answer_of_a_conditional_put(stub, monkeypatch):
    """A first try that was carried out but whose answer was lost is not taken for another writer's object."""
    monkeypatch.setattr(ObjectStorage, "conditional", True)
    answers = iter([(500, "InternalError"), (412, "PreconditionFailed")])
    stub.answer = lambda method, path: next(answers) if method == "PUT" else (200, "")
    with pytest.raises(StorageExistsError):  # the stub's object has no nonce of ours: somebody else's
        _storage(stub.url).put("a", b"1", if_absent=True)
    assert stub.seen == ["PUT", "PUT", "HEAD"]

    nonces = []
    send = _Handler.send_header

    def with_nonce(self, name, value):
        if name == "ETag" and nonces:
            send(self, "x-amz-meta-holdfastput", nonces[0])
        send(self, name, value)

    def remember(method, path):
        return (500, "InternalError") if len(stub.seen) == 1 else (412, "x") if method == "PUT" else (200, "")

    monkeypatch.setattr(_Handler, "send_header", with_nonce)
    monkeypatch.setattr("holdfast.storage.object.object_storage.uuid.uuid4", lambda: type("U", (), {"hex": "ours"}))
    nonces.append("ours")
    stub.seen.clear()
    stub.answer = remember
    assert _storage(stub.url).put("a", b"1", if_absent=True) == '"1"'
    stub.seen.clear()
    stub.answer = lambda method, path: (412, "x") if method == "PUT" else (200, "")
    with pytest.raises(StorageConflictError):  # refused at the first try: nothing of ours can be there
        _storage(stub.url).put("a", b"1", if_match='"0"')


def test_extras(monkeypatch):
    """A missing client is a MissingExtraError that says what to install; a missing account is a ConfigError."""
    monkeypatch.setenv("GCS_KEY", "")
    for name in (
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_ACCOUNT",
        "AZURE_ACCOUNT_NAME",
        "OCI_NAMESPACE",
        "OCI_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        resolve("az://container/run")
    with pytest.raises(ConfigError, match="OCI_NAMESPACE and OCI_REGION"):
        resolve("oci://bucket/run")
    import sys

    monkeypatch.setitem(sys.modules, "obstore", None)
    for uri, extra in {"s3://b/x": "s3", "gs://b/x": "gcs", "abfs://c@account.dfs.core.windows.net/x": "azure"}.items():
        with pytest.raises(MissingExtraError, match=rf"pip install .*\[{extra}\]'"):
            resolve(uri)


def test_places(monkeypatch):
    """Endpoints and keys come from the environment in a fixed order, and what is described holds no key."""
    for name, value in {
        "AWS_ENDPOINT_URL": "http://second", "S3_ENDPOINT_URL": "http://first", "AWS_ACCESS_KEY_ID": "KEYID",
        "AWS_SECRET_ACCESS_KEY": _SECRET, "GCS_KEY": "GKEY", "GCS_SECRET": _SECRET, "OCI_NAMESPACE": "ns",
        "OCI_REGION": "eu-frankfurt-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    expected = {
        "s3://other/run": "http://first",
        "gs://other/run": "https://storage.googleapis.com",
        "oci://other/run": "https://ns.compat.objectstorage.eu-frankfurt-1.oraclecloud.com",
        "oci://other@ten/run": "https://ten.compat.objectstorage.eu-frankfurt-1.oraclecloud.com",
    }
    for uri, endpoint in expected.items():
        storage = resolve(uri)
        described = storage.describe()
        assert described["options"]["endpoint"] == endpoint
        assert storage.uri == uri
        assert _SECRET not in str(described)
        assert storage.secrets()["secret_access_key"] == _SECRET
        assert from_description(described, storage.secrets()).describe() == described
    assert resolve("s3a://other/run").uri == "s3://other/run"
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "account")  # as Composer calls them
    monkeypatch.setenv("AZURE_ACCOUNT_ACCESS_KEY", "c2VjcmV0")
    azure = resolve("azure://container/run")
    assert (azure.uri, azure.secrets()["account_key"]) == ("az://container/run", "c2VjcmV0")


@pytest.mark.parametrize("uri", ["s3://user:pass@bucket/x", "s3://", "s3:///x", "s3://b/x?sig=abc", "s3://a/../b"])
def test_refused(uri):
    """A URI without a bucket, or with what may be a credential in it, is refused without repeating it."""
    with pytest.raises(ConfigError) as caught:
        resolve(uri)
    assert "pass" not in str(caught.value)
    assert "abc" not in str(caught.value)


def test_profile(tmp_path, monkeypatch):
    """Static keys of the AWS tools' files are found, which the client itself does not read."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "S3_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "credentials").write_text(f"[lab]\naws_access_key_id = K\naws_secret_access_key = {_SECRET}\n")
    (tmp_path / "config").write_text("[profile lab]\nregion = eu-west-3\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    storage = resolve("s3://profiled/x")
    assert storage.secrets() == {"access_key_id": "K", "secret_access_key": _SECRET}
    assert storage.describe()["options"]["region"] == "eu-west-3"


def test_no_credentials(stub, monkeypatch):
    """Without credentials anywhere the message says that, not that rights are missing."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    # The service that lends credentials to virtual machines, played by the stub: it has none.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", stub.url)
    stub.answer = lambda method, path: (404, "x")
    options = {"endpoint": stub.url, "max_retries": 0, "deadline_s": 20, "timeout_s": 10}
    with pytest.raises(StoragePermissionError, match="no credentials were found"):
        ObjectStorage("s3://lonely/x", options).put("a", b"1")


def test_settings_the_client_refuses():
    """A setting that the client does not know is a ConfigError at the first use, without the credentials."""
    with pytest.raises(ConfigError, match="no_such_setting") as caught:
        _storage("http://127.0.0.1:1", no_such_setting="x").stat("a")
    assert _SECRET not in str(caught.value)


def test_forked_process(stub, monkeypatch):
    """A process forked from one that used the client is told so at once instead of hanging."""
    storage = _storage(stub.url)
    storage.put("a", b"1")
    monkeypatch.setattr("holdfast.storage.object.client.os.getpid", lambda: -1)
    for call in (
        lambda: storage.put("a", b"1"),
        lambda: storage.put("a", b"1", if_absent=True),
        lambda: storage.stat("a"),
        lambda: list(storage.list()),
    ):
        with pytest.raises(StorageError, match="forked"):
            call()


def test_credentials_by_hand(monkeypatch):
    """A storage rebuilt in this process finds credentials given by hand again; a plain URI takes the environment's."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x" * 9)
    by_hand = ObjectStorage("s3://by-hand/x", {"access_key_id": "HAND", "secret_access_key": _SECRET})
    for rebuilt in (pickle.loads(pickle.dumps(by_hand)), from_description(by_hand.child("y").describe())):
        assert rebuilt.secrets() == {"access_key_id": "HAND", "secret_access_key": _SECRET}
    assert resolve("s3://by-hand/x").secrets()["access_key_id"] == "of-the-environment"
    assert "session_token" not in by_hand.secrets()
