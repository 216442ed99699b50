"""Containers of apache-libcloud as storages: the conformance suite, checkpoints from end to end, errors."""

import itertools
import json
import pickle
import threading

import pytest
from adapter_kit import save_load_resume
from object_kit import BUCKET, KEY, client, moto

import holdfast as hf
from holdfast.errors import (
    ConfigError,
    StorageError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
)
from holdfast.storage import Storage, from_description, resolve
from holdfast.testing import StorageTests

pytest.importorskip("libcloud")
pytest.importorskip("fasteners")

from holdfast.storage import LibcloudObjectStore
from holdfast.storage.adapters.common import translate_client

_numbers = itertools.count()
SECRET = "s3cr3t-of-the-tests"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "container").mkdir()
    return str(tmp_path)


class TestLocalDriver(StorageTests):
    @pytest.fixture
    def storage(self, folder) -> Storage:
        return LibcloudObjectStore("local", "container", {"key": folder}, prefix="runs")


class TestLocalDriverByUri(StorageTests):
    @pytest.fixture
    def storage(self, folder, monkeypatch) -> Storage:
        monkeypatch.setenv("HOLDFAST_LIBCLOUD_KEY", folder)
        return resolve("libcloud://local/container/runs")


@pytest.fixture(scope="module")
def endpoint():
    with moto() as url:
        yield url


def _moto(url: str) -> Storage:
    host, _, port = url.removeprefix("http://").partition(":")
    options = {"key": KEY, "secret": KEY, "host": host, "port": int(port), "secure": False}
    return LibcloudObjectStore("s3", BUCKET, options, prefix=f"libcloud-{next(_numbers)}")


class TestS3Driver(StorageTests):
    """libcloud's S3 driver against moto."""

    @pytest.fixture
    def storage(self, endpoint) -> Storage:
        return _moto(endpoint)


def test_objects_whose_names_are_no_paths_are_left_alone(endpoint, caplog):
    """Nobody could read or delete them under such a name: they are said once, not listed, and stay with the rest."""
    storage = _moto(endpoint)
    storage.put("run/a", b"1")
    place = {"Bucket": BUCKET, "Key": f"{storage.uri.rpartition('/')[2]}/run//x"}
    client(endpoint).put_object(**place, Body=b"mine")
    assert [info.path for info in storage.list("run")] == ["run/a"]
    assert [info.path for info in storage.list("run", recursive=False)] == ["run/a"]
    assert [info.path for info in storage.list("", recursive=False)] == ["run/"]
    assert caplog.text.count("run holds an object whose name is no path") == 1
    storage.delete_tree("run")
    assert client(endpoint).get_object(**place)["Body"].read() == b"mine"


@pytest.mark.slow
def test_checkpoints_on_s3(endpoint):
    """Saving, loading, resuming and retention work from a writer process."""
    save_load_resume(_moto(endpoint))


def test_checkpoints(folder):
    """Saving, loading, overwriting, resuming and retention work."""
    save_load_resume(LibcloudObjectStore("local", "container", {"key": folder}))


def test_save_to_a_uri(folder, monkeypatch):
    """`hf.save("libcloud://...")` writes there."""
    monkeypatch.setenv("HOLDFAST_LIBCLOUD_KEY", folder)
    saved = hf.save("libcloud://local/container/x/ck", {"step": 3})
    assert hf.load("libcloud://local/container/x/ck") == {"step": 3}
    assert saved.uri == "libcloud://local/container/x/ck"


def test_credentials_stay_out(monkeypatch):
    """Descriptions and URIs have no credentials; a process that is told them, or finds them, rebuilds the storage."""
    storage = LibcloudObjectStore("s3", "bucket", {"key": "AKIA-x", "secret": SECRET, "region": "eu-west-1"})
    told = json.dumps(storage.describe())
    for text in (told, storage.uri, repr(storage)):
        assert SECRET not in text
        assert "AKIA-x" not in text
    assert from_description(json.loads(told), storage.secrets())._arguments["secret"] == SECRET
    monkeypatch.setenv("MY_SECRET", SECRET)
    by_name = LibcloudObjectStore("s3", "bucket", {"key": "AKIA-x", "secret": {"environ": "MY_SECRET"}})
    assert by_name._driver.secret == SECRET
    assert "MY_SECRET" in json.dumps(by_name.describe())
    assert pickle.loads(pickle.dumps(by_name)).uri == "libcloud://s3/bucket"


@pytest.mark.parametrize(
    "uri", ["libcloud://s3", "libcloud://nowhere/c", "libcloud://s3/c?secret=x", "libcloud://k@s3/c"]
)
def test_refused(uri):
    """What names no container, an unknown provider, or holds credentials is refused."""
    with pytest.raises(ConfigError):
        resolve(uri)


def test_a_missing_container_is_said(folder):
    """A container that does not exist is an error on writing, and holds nothing."""
    storage = LibcloudObjectStore("local", "nope", {"key": folder})
    assert not storage.exists("a")
    assert list(storage.list()) == []
    with pytest.raises(StorageNotFoundError, match="nope"):
        storage.put("a", b"1")


def test_no_thread_is_left(folder):
    """Writers end their threads however they end."""
    storage = LibcloudObjectStore("local", "container", {"key": folder})
    before = set(threading.enumerate())
    storage.create("a", 10).abort()
    with pytest.raises(StorageError):
        storage.create("b", 10).close()
    with storage.create("c", 10) as writer:
        writer.write(memoryview(bytes(10)))
    assert set(threading.enumerate()) <= before


def test_translation():
    """Libcloud's exceptions become the `StorageError` a handler expects; a refusal is never "not found"."""
    from libcloud.common.exceptions import BaseHTTPError
    from libcloud.common.types import InvalidCredsError, LibcloudError, ServiceUnavailableError
    from libcloud.storage.types import ContainerDoesNotExistError, ObjectDoesNotExistError

    cases = (
        (InvalidCredsError("no"), StoragePermissionError),
        (BaseHTTPError(403, "no"), StoragePermissionError),
        (BaseHTTPError(404, "no"), StorageNotFoundError),
        (BaseHTTPError(503, "busy"), StorageUnavailableError),
        (ServiceUnavailableError(), StorageUnavailableError),
        (LibcloudError("Unknown error. Status code: 403"), StoragePermissionError),
        (LibcloudError("Unexpected status code: 500"), StorageError),
        (ObjectDoesNotExistError(None, None, "a"), StorageNotFoundError),
        (ContainerDoesNotExistError(None, None, "c"), StorageNotFoundError),
    )
    for error, kind in cases:
        assert type(translate_client(error, "read", "x")) is kind, error


def test_libcloud_does_not_copy_by_itself(tmp_path) -> None:
    """Its interface has no copy: what did not change is sent again, not brought here and sent."""
    (tmp_path / "container").mkdir()
    assert not LibcloudObjectStore("local", "container", {"key": str(tmp_path)}).traits.copies_itself
