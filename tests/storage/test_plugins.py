"""Storages of other packages and of users: their contract, and how another process makes them."""

from __future__ import annotations

import json
import sys

import pytest
from docs_kit import ROOT, blocks

import holdfast as hf
from holdfast._outgoing import masked
from holdfast.errors import ConfigError, StorageConflictError
from holdfast.storage import (
    FileWriter,
    LocalStorage,
    MemoryStorage,
    PrefixStorage,
    Storage,
    StorageTraits,
    WrappedStorage,
    from_description,
    resolve,
)
from holdfast.storage.resolve import schemes
from holdfast.testing import StorageTests

BOX = ROOT / "examples" / "plugin"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install entry points: a function that takes the text of the group."""

    def install(text):
        about = tmp_path / "packages" / "somebody-1.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1\n")
        (about / "entry_points.txt").write_text(f"[holdfast.storage]\n{text}\n")
        monkeypatch.syspath_prepend(str(about.parent))
        schemes.cache_clear()

    yield install
    schemes.cache_clear()


@pytest.fixture
def box(installed, monkeypatch):
    """Make the package of examples/plugin importable, as if it were installed."""
    monkeypatch.syspath_prepend(str(BOX))
    installed("box = holdfast_box:BoxStorage.from_uri")
    import holdfast_box

    return holdfast_box


class TestBoxStorage(StorageTests):
    """Eight members are a whole storage."""

    @pytest.fixture
    def storage(self, tmp_path, monkeypatch) -> Storage:
        monkeypatch.syspath_prepend(str(BOX))
        from holdfast_box import BoxStorage

        return BoxStorage(tmp_path / "root")


class TestDocumentedStorage(StorageTests):
    """The example of docs/storage.md, word for word, as a module beside the script."""

    @pytest.fixture
    def storage(self, tmp_path, monkeypatch) -> Storage:
        (block,) = (block for block in blocks(ROOT / "docs" / "storage.md", "python") if "class SqliteStorage" in block)
        (tmp_path / "documented.py").write_text(block)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "documented", raising=False)
        import documented

        return documented.SqliteStorage(str(tmp_path / "objects.db"))


class TestWrappedStorage(StorageTests):
    """A wrapper that changes nothing is the storage below."""

    @pytest.fixture
    def storage(self, tmp_path) -> Storage:
        return WrappedStorage(LocalStorage(tmp_path / "root"))


class TestPrefixOfADisk(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path) -> Storage:
        return PrefixStorage(LocalStorage(tmp_path / "root"), "a/b")


def test_a_wrapper_passes_everything_on():
    """Whatever `Storage` gains, a wrapper passes on; what it does not is named here with the reason."""
    public = {name for name in vars(Storage) if not name.startswith("_")}
    assert public - vars(WrappedStorage).keys() == {"child"}, "which is a view of the wrapper itself"
    assert WrappedStorage.describe is Storage.describe, "each class describes itself"


def test_what_a_wrapper_changes_is_what_is_derived_from_it():
    """Whoever wraps `open`, `stat`, `delete` and `create` sees `read`, `exists`, `delete_many` and `batch` as well."""
    seen = []

    class Watched(WrappedStorage):
        def open(self, path):
            seen.append(("open", path))
            return super().open(path)

        def stat(self, path):
            seen.append(("stat", path))
            return super().stat(path)

        def delete(self, path):
            seen.append(("delete", path))
            super().delete(path)

        def create(self, path, size):
            seen.append(("create", path))
            return super().create(path, size)

    storage = Watched(MemoryStorage("watched"))
    with storage.batch(1) as batch:
        batch.add("a", b"1")
    assert storage.exists("a")
    assert storage.read("a") == b"1"
    storage.delete_many(["a"])
    assert seen == [("create", "a"), ("stat", "a"), ("open", "a"), ("delete", "a")]


class _Cipher(WrappedStorage):
    """Nothing lies below in clear."""

    def put(self, path, data, **conditions):
        return self.below.put(path, bytes(byte ^ 0x5A for byte in data), **conditions)

    def create(self, path, size):
        below = self.below.create(path, size)

        class Enciphering(FileWriter):
            def write(self, view):
                below.write(memoryview(bytes(byte ^ 0x5A for byte in view)))

            def close(self):
                below.close()

            def abort(self):
                below.abort()

        return Enciphering()


def test_nothing_goes_past_a_wrapper_that_changes_the_bytes(tmp_path):
    """What replaces an object in one step, and what would be taken over as a file, goes through its `create` too."""
    disk, file = LocalStorage(tmp_path / "root"), tmp_path / "file"
    storage = _Cipher(disk)
    file.write_bytes(b"secret")
    assert not storage.adopt(str(file), "taken")
    for content in (b"first", b"second"):
        with storage.replace("best.pt", len(content)) as writer:
            writer.write(memoryview(content))
            assert disk.exists("best.pt") is (content == b"second"), "what was there stays until the new one is whole"
        assert disk.read("best.pt") == bytes(byte ^ 0x5A for byte in content)
    with pytest.raises(StorageConflictError), storage.replace("best.pt", 5) as writer:
        writer.write(memoryview(b"third"))
        writer.publish(if_match="another")
    assert storage.read("best.pt") == disk.read("best.pt") == bytes(byte ^ 0x5A for byte in b"second")
    assert [info.path for info in disk.list()] == ["best.pt"]
    assert _Cipher(MemoryStorage(tmp_path.name)).replace("best.pt", 5) is None, "a store does so by itself"


def test_a_storage_of_an_entry_point_describes_itself(box, tmp_path):
    """By the URI that made it; so do its children, also those a class makes by copying itself."""
    storage = resolve(f"box://{tmp_path}")
    description = storage.describe()
    assert description == {"kind": "holdfast_box:BoxStorage.from_uri", "uri": f"box://{tmp_path}"}
    assert box.BoxStorage(str(tmp_path)).describe() is None, "made by hand: who knows with what arguments"
    storage.put("run/a", b"1")
    deeper = resolve(f"box://{tmp_path}")
    deeper.folder += "/elsewhere"  # as a copy rooted deeper has it
    for place in (storage.child("run"), deeper):
        rebuilt = from_description(json.loads(json.dumps(place.describe())))
        assert rebuilt.uri == place.uri
    assert from_description(storage.child("run").describe()).read("a") == b"1"


def test_a_location_with_a_password_is_refused(box):
    """A location is written into messages and files."""
    with pytest.raises(ConfigError, match="holds a password") as caught:
        resolve("box://me:hunter2@host/dir")
    assert "hunter2" not in str(caught.value)


def test_an_entry_point_that_makes_no_storage(installed):
    """Who registered what is named, and what is wrong with it."""
    installed("odd = builtins:str\ngone = no_such_module:x\nFails = builtins:int")
    with pytest.raises(ConfigError, match=r"builtins:str.*returned str"):
        resolve("odd://a")
    why = r"no_such_module:x of the package somebody 1 cannot be imported .*No module named 'no_such_module'.*install"
    with pytest.raises(ConfigError, match=why):
        resolve("gone://a")
    with pytest.raises(ConfigError, match=r"scheme='fails': builtins:int of the package somebody 1 failed \(Value"):
        resolve("fails://a")


@pytest.mark.parametrize("kind", ["os:system", "builtins:eval", "subprocess:Popen", "pathlib:Path", "holdfast:load"])
def test_a_description_calls_nothing_but_storages(kind):
    """A description may come from a file: it cannot name any function there is."""
    with pytest.raises(ConfigError, match="name a subclass of"):
        from_description({"kind": kind, "command": "false"})


def test_a_subclass_is_not_rebuilt_as_its_base(tmp_path):
    """A class that changes a disk's behaviour has no description until it writes its own: no silent LocalStorage."""

    class Careful(LocalStorage):
        def delete(self, path):
            raise AssertionError

    class Described(LocalStorage):
        def describe(self):
            return {"kind": "somewhere:Described", "root": self.uri}

    assert LocalStorage(tmp_path).describe() == {"kind": "local", "root": str(tmp_path)}
    assert Careful(tmp_path).describe() is None
    assert Described(tmp_path).describe()["kind"] == "somewhere:Described"


def test_members_of_before_are_named():
    """Who wrote a storage against the earlier contract learns what to write instead."""
    with pytest.raises(ConfigError, match=r"Old defines max_file_bytes, num_parallel.*StorageTraits\(max_file_bytes="):

        class Old(MemoryStorage):
            num_parallel = 4

            @property
            def max_file_bytes(self):
                return 5

    class New(MemoryStorage):
        traits = StorageTraits(num_parallel=4, conditional=False)

    assert (New("new").traits.num_parallel, New("new").conditional) == (4, False)


def test_the_writer_says_why_it_cannot_import(tmp_path, monkeypatch):
    """A class that only this process has fails at the first save with the import error and what to do, by name."""
    (tmp_path / "vanishing.py").write_text(
        "from holdfast.storage import LocalStorage\n\n\n"
        "class Vanishing(LocalStorage):\n"
        "    def describe(self):\n"
        "        return {'kind': 'vanishing:Vanishing', 'root': self.uri}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import vanishing

    monkeypatch.delitem(sys.modules, "vanishing")
    (tmp_path / "vanishing.py").unlink()
    target = hf.Checkpoint.at(vanishing.Vanishing(tmp_path / "run"), "one")
    with pytest.raises(ConfigError, match=r"ModuleNotFoundError: No module named 'vanishing'.*put the module into"):
        hf.save(target, {"step": 1})


def test_a_class_of_the_script_that_describes_itself_is_refused(tmp_path):
    """It cannot be imported without running the script: said at once, with what to do."""

    class Here(LocalStorage):
        def describe(self):
            return {"kind": "__main__:Here", "root": self.uri}

    with pytest.raises(ConfigError, match="move the class into a module of its own"):
        hf.save(hf.Checkpoint.at(Here(tmp_path), "one"), {"step": 1})


def test_credentials_travel_apart(box, tmp_path, monkeypatch):
    """What `secrets` gives reaches the rebuilt storage by its own argument, and handles made later find it again."""
    import holdfast_box

    class Locked(holdfast_box.BoxStorage):
        def __init__(self, folder, secrets=None):
            super().__init__(folder)
            self.given = secrets

        def describe(self):
            return {"kind": "holdfast_box:Locked", "folder": self.folder}

        def secrets(self):
            return self.given

    monkeypatch.setattr(holdfast_box, "Locked", Locked, raising=False)
    storage = Locked(str(tmp_path), {"key": "hunter2"})
    assert "hunter2" not in json.dumps(storage.describe())
    assert from_description(storage.describe()).given is None
    assert from_description(storage.describe(), storage.secrets()).given == {"key": "hunter2"}
    assert from_description(storage.describe()).given == {"key": "hunter2"}
    named = Locked(str(tmp_path), {"key": "correct-horse-battery"})
    assert resolve(named) is named
    assert masked("refused: correct-horse-battery") == "refused: ***"


def test_a_storage_that_the_writer_cannot_make_says_why(tmp_path, monkeypatch):
    """What its constructor raises in the process that writes is the error of the save, not that the writer broke."""
    (tmp_path / "at_home.py").write_text(
        "import os\n"
        "from holdfast.storage import LocalStorage\n"
        "class AtHome(LocalStorage):\n"
        "    def __init__(self, root, home=None):\n"
        "        super().__init__(root)\n"
        "        self.about = {'kind': 'at_home:AtHome', 'root': str(root), 'home': home or os.getpid()}\n"
        "        if home not in (None, os.getpid()):\n"
        "            raise ValueError('no token file here')\n"
        "    def describe(self):\n"
        "        return self.about\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "at_home", raising=False)
    import at_home

    with pytest.raises(ConfigError, match="no token file here"), hf.Checkpointer(at_home.AtHome(tmp_path / "run"), {}):
        pass
