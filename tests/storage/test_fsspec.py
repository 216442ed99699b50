"""fsspec file systems as storages: the conformance suite, checkpoints from end to end, errors, descriptions."""

import asyncio
import itertools
import json
import logging
import os

import pytest
from adapter_kit import save_load_resume

import holdfast as hf
from holdfast._outgoing import masked_client
from holdfast.errors import (
    ConfigError,
    StorageConflictError,
    StorageError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
)
from holdfast.storage import LocalStorage, Storage, from_description, resolve
from holdfast.storage.adapters.common import translate_client
from holdfast.testing import StorageTests

fsspec = pytest.importorskip("fsspec")
paramiko = pytest.importorskip("paramiko")

from sftp_server import PASSWORD, SftpServer  # noqa: E402

from holdfast.storage.adapters.fsspec import FsspecStorage  # noqa: E402

_numbers = itertools.count()


@pytest.fixture
def memory_root():
    return f"/holdfast-{next(_numbers)}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = SftpServer(tmp_path_factory.mktemp("sftp"))
    yield server
    server.close()


@pytest.fixture
def sftp(server):
    """A file system with a directory of its own for each test."""
    server.denied.clear()
    return fsspec.filesystem("sftp", **server.options), f"/test-{next(_numbers)}"


class TestMemory(StorageTests):
    @pytest.fixture
    def storage(self, memory_root) -> Storage:
        return resolve(memory_root, fsspec.filesystem("memory"))


class TestMemoryByUri(StorageTests):
    @pytest.fixture
    def storage(self, memory_root) -> Storage:
        return resolve(f"fsspec+memory:/{memory_root}")


class TestSftp(StorageTests):
    @pytest.fixture
    def storage(self, sftp) -> Storage:
        return resolve(sftp[1], sftp[0])


class TestLocalThroughTheAdapter(StorageTests):
    """fsspec's own local file system, which users get as a `LocalStorage`, stands for any tree that renames."""

    @pytest.fixture
    def storage(self, tmp_path) -> Storage:
        return FsspecStorage(fsspec.filesystem("file"), str(tmp_path / "root"))


class _Strict(fsspec.get_filesystem_class("file")):
    """A server that renames to free names alone, as some of SMB and FTP do.

    Attributes:
        failing: the number of the rename that fails, counted from 1.
    """

    protocol, cachable, failing = "strict", False, 0

    def mv(self, path1, path2, **options):
        self.failing -= 1
        if os.path.exists(path2) or self.failing == 0:
            raise OSError("Failure")
        os.rename(path1, path2)


@pytest.mark.parametrize("way", ["put", "replace"])
def test_an_object_that_cannot_be_replaced_stays(tmp_path, way):
    """Where it makes room for its successor and that does not get the name, it gets its name back."""
    server = _Strict()
    storage = FsspecStorage(server, str(tmp_path))

    def store(content):
        if way == "put":
            storage.put("run/it", content)
            return
        with storage.replace("run/it", len(content)) as writer:
            writer.write(memoryview(content))

    store(b"old")
    store(b"older")
    server.failing = 3  # refused; the old one makes room; this one; the old one has its name back
    with pytest.raises(StorageError):
        store(b"new")
    assert storage.read("run/it") == b"older"
    assert os.listdir(tmp_path / "run") == ["it"]
    store(b"newest")
    assert storage.read("run/it") == b"newest"


class _ReadsOnly(fsspec.AbstractFileSystem):
    """A file system that leaves copying to fsspec, as HTTP's does."""


@pytest.mark.parametrize(
    ("filesystem", "copies"),
    [(fsspec.filesystem("memory"), True), (fsspec.filesystem("file"), True), (_ReadsOnly(), False)],
    ids=["memory", "file", "reads-only"],
)
def test_who_copies(filesystem: fsspec.AbstractFileSystem, copies: bool) -> None:
    """A file system with a copy of its own is asked for it; another would bring the bytes here and send them back."""
    assert FsspecStorage(filesystem, "/root").traits.copies_itself is copies


@pytest.mark.parametrize("kind", ["memory", "sftp"])
def test_checkpoints(kind, memory_root, sftp):
    """Saving, loading, overwriting, resuming and retention work, in a writer thread as in a writer process."""
    fs, root = sftp if kind == "sftp" else (fsspec.filesystem("memory"), memory_root)
    save_load_resume(resolve(root, fs))


def test_checkpoint_with_filesystem(sftp):
    """`Checkpoint(path, filesystem=...)` takes paths of the file system, and pickles."""
    fs, root = sftp
    checkpoint = hf.Checkpoint(f"{root}/ck", filesystem=fs)
    hf.save(checkpoint, {"step": 3})
    assert hf.load(hf.Checkpoint(f"{root}/ck", filesystem=fs)) == {"step": 3}
    assert fs.exists(f"{root}/ck/manifest.json")


def test_save_to_a_uri(server, monkeypatch):
    """`hf.save("sftp://...")` writes there; the URI that is shown has no password."""
    user = server.options["username"]
    uri = f"sftp://{user}:{PASSWORD}@127.0.0.1:{server.port}/by-uri/{next(_numbers)}"
    saved = hf.save(f"{uri}/ck", {"step": 3})
    assert hf.load(f"{uri}/ck") == {"step": 3}
    assert PASSWORD not in saved.uri
    assert saved.uri.startswith(f"sftp://{user}@127.0.0.1:{server.port}/by-uri/")


def test_credentials_stay_out(server, sftp, caplog):
    """Descriptions, URIs and messages have no password; `secrets` has it, and with it another process connects."""
    storage = resolve(sftp[1], sftp[0])
    storage.put("a", b"1")
    told = json.dumps(storage.describe())
    assert PASSWORD not in told + storage.uri + repr(storage) + caplog.text
    assert storage.secrets() == {"/options/password": PASSWORD}
    assert from_description(json.loads(told), storage.secrets()).read("a") == b"1"
    from holdfast.storage.adapters import common

    common._known.clear()
    with pytest.raises(ConfigError, match="password"):
        from_description(json.loads(told))


def test_a_connection_that_was_cut_is_made_again(server, sftp):
    """A server that restarted costs one failed request at most, never the run."""
    storage = resolve(sftp[1], sftp[0])
    storage.put("a", b"1")
    server.cut()
    for _ in range(2):
        try:
            assert storage.read("a") == b"1"
            break
        except StorageError:
            continue
    else:
        pytest.fail("the connection was not made again")


def test_refusals_are_no_absence(server, sftp):
    """A "permission denied" while looking, listing or reading is StoragePermissionError, never "not found"."""
    storage = resolve(sftp[1], sftp[0])
    storage.put("d/a", b"1")
    server.denied |= {"stat", "list_folder", "open"}
    for call in (
        lambda: storage.stat("d/a"),
        lambda: storage.exists("d/a"),
        lambda: storage.exists("d/no"),
        lambda: list(storage.list()),
        lambda: storage.open("d/a"),
        lambda: storage.put("d/b", b"1"),
        lambda: storage.delete("d/a"),
    ):
        with pytest.raises(StoragePermissionError):
            call()
    server.denied.clear()
    assert storage.read("d/a") == b"1"


def test_wrong_password_is_a_refusal(server):
    """A login that fails says so."""
    storage = resolve(f"sftp://holdfast:wrong@127.0.0.1:{server.port}/x")
    with pytest.raises(StoragePermissionError, match="credentials"):
        storage.exists("a")


def test_litter_of_dead_writers_is_removed(sftp):
    """Temporary files are never listed, and go with their directory."""
    fs, root = sftp
    storage = resolve(root, fs)
    storage.put("run/a", b"1")
    fs.pipe_file(f"{root}/run/.tmp-99-dead", b"half")
    assert [info.path for info in storage.list()] == ["run/a"]
    storage.delete_tree("run")
    assert not fs.exists(f"{root}/run")


def test_conditions_hold_in_this_process_alone(memory_root, caplog):
    """The storage says that conditions are not enforced by the server, once in the log."""
    storage = resolve(memory_root, fsspec.filesystem("memory"))
    assert storage.conditional is False
    with caplog.at_level(logging.WARNING, "holdfast.storage"):
        tag = storage.put("a", b"1", if_absent=True)
        storage.put("a", b"2", if_match=tag)
        with pytest.raises(StorageConflictError):
            storage.child("b").put("c", b"2", if_match=tag)
    assert caplog.text.count("no conditional writes") == 1


def test_local_file_systems_are_local(tmp_path, monkeypatch):
    """Fsspec's local file system and a `DirFileSystem` over it are a `LocalStorage`: durable, without an adapter."""
    monkeypatch.chdir(tmp_path)
    local = fsspec.filesystem("file")
    assert resolve(str(tmp_path / "a"), local).uri == f"{tmp_path}/a"
    assert resolve("runs/x", local).uri == f"{tmp_path}/runs/x"
    below = fsspec.filesystem("dir", path=str(tmp_path), fs=local)
    found = resolve("a/b", below)
    assert isinstance(found, LocalStorage)
    assert found.uri == f"{tmp_path}/a/b"


def test_refused(tmp_path):
    """Caches and chains serve old content; unknown schemes are named; secrets are not repeated."""
    cached = fsspec.filesystem("filecache", target_protocol="memory", cache_storage=str(tmp_path))
    with pytest.raises(ConfigError, match="old content"):
        resolve("a", cached)
    with pytest.raises(ConfigError, match="old content"):
        resolve("simplecache::memory://a".replace("::", "://x::"))
    with pytest.raises(ConfigError, match="no storage knows"):
        resolve("nope://x")


def test_memory_cannot_travel(memory_root):
    """What lives in this process says so, and the local engine refuses it with a message."""
    storage = resolve(memory_root, fsspec.filesystem("memory"))
    assert storage.describe() is None
    from holdfast.torch import TorchTrainer

    run = hf.RunConfig(storage_path=memory_root, storage_filesystem=fsspec.filesystem("memory"), name="a")
    with pytest.raises(ConfigError, match="memory of this process"):
        TorchTrainer(print, scaling_config=hf.ScalingConfig(num_workers=1), run_config=run).fit()


class _Answer(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"answer {status}")
        self.status = status


class _NoCredentialsError(Exception):
    pass


_NoCredentialsError.__name__ = "NoCredentialsError"


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("a"), StorageNotFoundError),
        (_caused(FileNotFoundError("http://x/a"), _Answer(404)), StorageNotFoundError),
        (_caused(FileNotFoundError("http://x/a"), _Answer(403)), StoragePermissionError),
        (_caused(FileNotFoundError("http://x/a"), _Answer(503)), StorageUnavailableError),
        (_caused(FileNotFoundError("http://x/a"), ConnectionRefusedError(111, "refused")), StorageUnavailableError),
        (_Answer(401), StoragePermissionError),
        (_Answer(403), StoragePermissionError),
        (_Answer(500), StorageUnavailableError),
        (_Answer(507), StorageFullError),
        (PermissionError(13, "no"), StoragePermissionError),
        (OSError(28, "no space"), StorageFullError),
        (OSError("Forbidden: https://storage.googleapis.com/b/o"), StoragePermissionError),
        (OSError("When reading: AWS Error ACCESS_DENIED during HeadObject operation"), StoragePermissionError),
        (paramiko.AuthenticationException("Authentication failed."), StoragePermissionError),
        (paramiko.SSHException("Server connection dropped"), StorageUnavailableError),
        (_NoCredentialsError("Unable to locate credentials"), StoragePermissionError),
        (asyncio.TimeoutError(), StorageUnavailableError),
        (NotImplementedError(), StorageError),
        (EOFError(), StorageUnavailableError),
    ],
    ids=repr,
)
def test_translation(error, kind):
    """Each client's exception becomes the `StorageError` a handler expects; 403 is never "not found"."""
    found = translate_client(error, "read", "x://a")
    assert type(found) is kind
    assert "x://a" in str(found)


def test_redaction():
    """User parts and queries of URLs and named secrets are left out of messages."""
    text = masked_client("GET https://me:pw@host/a?sig=abc failed, secret_key='xyz', password=hunter2")
    for secret in ("pw@", "abc", "xyz", "hunter2"):
        assert secret not in text
