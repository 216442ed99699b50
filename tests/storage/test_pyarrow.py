"""pyarrow file systems as storages: the conformance suite, checkpoints from end to end, errors, descriptions."""

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from adapter_kit import save_load_resume
from object_kit import BUCKET, KEY, moto

import holdfast as hf
from holdfast.errors import ConfigError, StorageNotFoundError, StoragePermissionError
from holdfast.storage import LocalStorage, Storage, from_description, resolve
from holdfast.testing import StorageTests

fs = pytest.importorskip("pyarrow.fs")

from holdfast.storage.adapters.pyarrow import PyarrowStorage  # noqa: E402

_numbers = itertools.count()
SECRET = "s3cr3t-of-the-tests"


class TestLocalThroughTheAdapter(StorageTests):
    """pyarrow's local file system, which users get as a `LocalStorage`, stands for any tree that renames (HDFS)."""

    @pytest.fixture
    def storage(self, tmp_path) -> Storage:
        return PyarrowStorage(fs.LocalFileSystem(), str(tmp_path / "root"))


class TestSubTreeThroughTheAdapter(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path) -> Storage:
        return PyarrowStorage(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "root")


@pytest.fixture(scope="module")
def endpoint():
    with moto() as url:
        yield url.removeprefix("http://")


def _moto(endpoint: str) -> Storage:
    client = fs.S3FileSystem(
        access_key=KEY, secret_key=KEY, endpoint_override=endpoint, scheme="http", region="us-east-1"
    )
    return resolve(f"{BUCKET}/pyarrow-{next(_numbers)}", client)


class TestS3(StorageTests):
    """pyarrow's own S3 client against moto."""

    @pytest.fixture
    def storage(self, endpoint) -> Storage:
        return _moto(endpoint)

    def test_readers_never_see_half_a_put(self, storage: Storage) -> None:
        """A reader sees one version, whole, while an object is replaced; pyarrow asks for size and bytes apart.

        Unlike in the suite each version is another one, as those of a lease are: going back to an old one between
        the requests of one read could not be noticed.
        """

        def version(number: int) -> bytes:
            return bytes([number]) * (300_000 - number % 2 * 100_000)

        storage.put("a", version(0))
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(lambda: [storage.put("a", version(number)) for number in range(1, 60)])
            while not writing.done():
                seen = storage.read("a")
                assert seen == version(seen[0])
            writing.result()


@pytest.mark.slow
def test_checkpoints_on_s3(endpoint):
    """Saving, loading, resuming and retention work from a writer process that was told the file system as JSON."""
    storage = _moto(endpoint)
    assert storage.describe() is not None
    save_load_resume(storage)


def test_checkpoints(tmp_path):
    """Saving, loading, overwriting, resuming and retention work through the adapter."""
    save_load_resume(PyarrowStorage(fs.LocalFileSystem(), str(tmp_path)))


def test_checkpoint_with_filesystem(tmp_path, monkeypatch):
    """`Checkpoint(path, filesystem=...)` takes absolute and relative paths of a local file system."""
    monkeypatch.chdir(tmp_path)
    hf.save(hf.Checkpoint(str(tmp_path / "ck"), filesystem=fs.LocalFileSystem()), {"step": 3})
    assert hf.load(hf.Checkpoint("ck", filesystem=fs.LocalFileSystem())) == {"step": 3}
    below = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    assert hf.load(hf.Checkpoint("ck", filesystem=below)) == {"step": 3}


def test_local_file_systems_are_local(tmp_path):
    """A local file system, a part of one, and an fsspec one inside of pyarrow are what they are made of."""
    local = fs.LocalFileSystem()
    below = fs.SubTreeFileSystem(str(tmp_path), local)
    for found in (resolve(str(tmp_path / "a"), local), resolve("a", below), resolve(f"pyarrow+file://{tmp_path}/a")):
        assert isinstance(found, LocalStorage)
        assert found.uri == f"{tmp_path}/a"
    fsspec = pytest.importorskip("fsspec")
    wrapped = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    assert resolve("/a/b", wrapped).uri == "fsspec+memory:///a/b"


def _s3(endpoint: str = "127.0.0.1:9", **options) -> "fs.S3FileSystem":
    return fs.S3FileSystem(
        access_key="AKIA", secret_key=SECRET, endpoint_override=endpoint, scheme="http", region="eu-west-1", **options
    )


def test_description_without_secrets():
    """An S3 file system travels as JSON; its keys go another way and are in no URI and no message."""
    storage = resolve("bucket/runs", _s3())
    told = json.dumps(storage.describe())
    assert SECRET not in told + storage.uri + repr(storage)
    assert storage.uri == "pyarrow+s3://bucket/runs"
    rebuilt = from_description(json.loads(told), storage.secrets())
    assert isinstance(rebuilt, PyarrowStorage)
    assert rebuilt.filesystem == _s3()
    assert rebuilt.child("a").uri == "pyarrow+s3://bucket/runs/a"
    from holdfast.storage.adapters import common

    common._known.clear()
    with pytest.raises(ConfigError, match="credentials"):
        from_description(json.loads(told))


def test_only_known_kinds_are_rebuilt():
    """A description cannot name any class."""
    with pytest.raises(ConfigError):
        from_description({"kind": "pyarrow", "client": {"type": "PyFileSystem"}, "root": "a", "uri": "x"})
    assert PyarrowStorage(fs.PyFileSystem(_Nothing()), "a").describe() is None


class _Nothing(fs.FileSystemHandler):
    def get_type_name(self):
        return "nothing"

    def __getattr__(self, name):
        raise AttributeError(name)

    copy_file = create_dir = delete_dir = delete_dir_contents = delete_file = delete_root_dir_contents = None
    get_file_info = get_file_info_selector = move = normalize_path = open_append_stream = None
    open_input_file = open_input_stream = open_output_stream = None


@pytest.fixture
def refusing():
    """An endpoint that answers every request with the status set on it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self):
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            code = {403: "AccessDenied", 404: "NoSuchKey"}[server.status]
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            listing = server.status == 404 and self.command == "GET" and "list-type" in self.path
            if listing:
                body = b"<?xml version='1.0'?><ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>"
            self.send_response(200 if listing else server.status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.status = 403
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_refusals_are_no_absence(refusing):
    """403 of an S3 endpoint is StoragePermissionError for every operation; 404 is "not found"."""
    storage = resolve("bucket/runs", _s3(f"127.0.0.1:{refusing.server_port}"))
    for call in (
        lambda: storage.stat("a"),
        lambda: storage.exists("a"),
        lambda: storage.open("a"),
        lambda: list(storage.list("d")),
        lambda: storage.put("a", b"1"),
        lambda: storage.delete("a"),
    ):
        with pytest.raises(StoragePermissionError):
            call()
    refusing.status = 404
    assert not storage.exists("a")
    with pytest.raises(StorageNotFoundError):
        storage.open("a")


def test_local_paths_are_written_as_everywhere(tmp_path, monkeypatch):
    """A tilde is the home directory; the URI of another store is refused, not made a directory of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    local = fs.LocalFileSystem()
    assert resolve("~/runs", local).uri == resolve("~/runs").uri == f"{tmp_path}/runs"
    assert resolve(f"file://{tmp_path}/runs", local).uri == f"{tmp_path}/runs"
    with pytest.raises(ConfigError, match=r"give the path in it, without a scheme \('bucket/x'\)"):
        resolve("s3://bucket/x", local)
    with pytest.raises(ConfigError, match="without a scheme"):
        hf.Checkpoint("s3://bucket/x", local)
    with pytest.raises(ConfigError, match="without a scheme"):
        resolve("s3://bucket/x", LocalStorage(tmp_path))
