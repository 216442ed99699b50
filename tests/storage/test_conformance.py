"""The conformance suite on every storage of Holdfast."""

import itertools

import pytest

from holdfast.storage import LocalStorage, MemoryStorage, PrefixStorage, Storage
from holdfast.testing import FaultyOps, FaultyStorage, StorageTests

_names = itertools.count()


class TestLocalStorage(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path) -> Storage:
        return LocalStorage(tmp_path / "root")


class TestMemoryStorage(StorageTests):
    @pytest.fixture
    def storage(self) -> Storage:
        return MemoryStorage(f"conformance-{next(_names)}")


class TestPrefixStorage(StorageTests):
    @pytest.fixture
    def storage(self) -> Storage:
        return PrefixStorage(MemoryStorage(f"conformance-{next(_names)}"), "a/b")


class TestFaultyStorageWithoutFaults(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path) -> Storage:
        return FaultyStorage(tmp_path / "root")


class TestShortWrites(StorageTests):
    """A kernel that takes a few bytes at a time changes nothing for the callers."""

    @pytest.fixture
    def storage(self, tmp_path) -> Storage:
        return FaultyStorage(tmp_path / "root", short_write=5_001)


class TestWithoutDirectWrites(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path) -> Storage:
        return FaultyStorage(tmp_path / "root", ops=FaultyOps(direct=False))


class TestWithoutHardLinks(StorageTests):
    """A file system without hard links: conditional puts use the lock, copies move bytes."""

    @pytest.fixture
    def storage(self, tmp_path) -> Storage:
        return FaultyStorage(tmp_path / "root", fail_on={"link": 1})  # EPERM, as FAT and many FUSE say
