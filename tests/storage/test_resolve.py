"""From what a user writes to a storage."""

from pathlib import Path

import pytest

from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import ConfigError
from holdfast.storage import LocalStorage, MemoryStorage, from_description, resolve, split_uri


@pytest.mark.parametrize(
    ("location", "uri"),
    [
        ("runs/gpt", "{cwd}/runs/gpt"),
        ("./runs/../gpt", "{cwd}/gpt"),
        ("/abs/with space", "/abs/with space"),
        ("file:///abs/a%20b", "/abs/a b"),
        ("FILE://localhost/abs", "/abs"),
        ("~/runs", "{home}/runs"),
        (Path("/abs/x"), "/abs/x"),
        (Path("~/x"), "{home}/x"),
        ("a=1:b", "{cwd}/a=1:b"),
        ("memory://name", "memory://name"),
        ("memory://name/a/b/", "memory://name/a/b"),
    ],
)
def test_locations(location, uri, tmp_path, monkeypatch):
    """Paths become absolute at once, "~" is the home, file and memory URIs are known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert resolve(location).uri == uri.format(cwd=tmp_path, home="/home/somebody")


@pytest.mark.parametrize("location", ["", "file://", "memory://", "s3://", "gs:///x", "nope://x", 3, None])
def test_refused(location):
    """What no storage fits is a ConfigError that quotes it."""
    with pytest.raises(ConfigError):
        resolve(location)


@pytest.mark.parametrize("kind", [resolve, Checkpoint])
@pytest.mark.parametrize("location", ["s3:/bucket/x", Path("s3://bucket/x"), Path("memory://bucket/x")])
def test_what_pathlib_makes_of_a_uri(location, kind):
    """Nothing is written into a local directory named "s3:"."""
    with pytest.raises(ConfigError, match=r"two slashes.*'(s3|memory)://bucket/x'"):
        kind(location)


@pytest.mark.parametrize("kind", [resolve, Checkpoint])
def test_a_file_uri_is_absolute(kind):
    """What follows two slashes would be a host; it is not a path below whatever directory the process is in."""
    with pytest.raises(ConfigError, match=r"'file:///data/runs/a'; give a relative one without it, 'data/runs/a'"):
        kind("file://data/runs/a")


def test_unknown_scheme_is_said():
    """A scheme that nobody knows is a ConfigError that names those that are known."""
    with pytest.raises(ConfigError, match="no storage knows"):
        resolve("nope://x")


def test_storage_and_filesystem(tmp_path):
    """A storage resolves to itself; with filesystem= the location is a path inside it."""
    storage = LocalStorage(tmp_path)
    assert resolve(storage) is storage
    assert resolve("a/b/", storage).uri == f"{tmp_path}/a/b"
    with pytest.raises(ConfigError):
        resolve(storage, storage)
    with pytest.raises(ConfigError):
        resolve("a", object())


def test_memory_is_shared_by_name():
    """The same name is the same store, also through a prefix; another name is another."""
    resolve("memory://resolve-one/a").put("b", b"1")
    assert MemoryStorage("resolve-one").read("a/b") == b"1"
    assert not resolve("memory://resolve-two/a").exists("b")


def test_split_uri():
    """Only "scheme://" makes a URI; everything else is a path."""
    assert split_uri("S3://bucket/key") == ("s3", "bucket/key")
    assert split_uri("a:b/c") == ("file", "a:b/c")
    assert split_uri("dir/x://y") == ("file", "dir/x://y")


def test_descriptions(tmp_path):
    """Only known kinds are rebuilt."""
    assert from_description({"kind": "local", "root": str(tmp_path)}).uri == str(tmp_path)
    assert MemoryStorage("x").describe() is None
    for bad in ({"kind": "os.system", "root": "x"}, {}):
        with pytest.raises(ConfigError, match="kind"):
            from_description(bad)
