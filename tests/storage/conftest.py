"""An S3 server for the tests of a module, and a proxy before it for each test; which storages run the suite whole.

The conformance suite runs whole where a kind of storage is its own: a disk, memory, the object stores, one tree and one
store of fsspec. Its variants (other ways to the same code) run a core of it; the rest of theirs is in the sweeps.
"""

import pytest
from bucket_fixtures import local, proxy, remote, server

from holdfast.testing import StorageTests

__all__ = ["local", "proxy", "remote", "server"]

_WHOLE = {
    "test_conformance.py": {"TestLocalStorage", "TestMemoryStorage", "TestWithoutHardLinks"},
    "test_fsspec.py": {"TestLocalThroughTheAdapter"},
    "test_object.py": {"TestS3", "TestAzure", "TestGoogle"},
    "test_plugins.py": {"TestDocumentedStorage", "TestPrefixOfADisk"},
    "test_radosgw.py": {"TestRadosgw"},
}
_CORE = {
    "test_put_then_read",
    "test_put_replaces",
    "test_put_if_absent",
    "test_put_if_match",
    "test_create_with_a_padded_last_view",
    "test_create_replaces_without_touching_copies",
    "test_unfinished_create",
    "test_replace_in_one_step",
    "test_ranges",
    "test_missing",
    "test_list_children",
    "test_delete",
    "test_delete_tree",
    "test_copy",
    "test_child",
    "test_description",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not isinstance(item, pytest.Function) or item.cls is None or not issubclass(item.cls, StorageTests):
            continue
        is_shared = getattr(item.cls, item.originalname) is getattr(StorageTests, item.originalname, None)
        is_whole = item.cls.__name__ in _WHOLE.get(item.path.name, ())
        if is_shared and not is_whole and item.originalname not in _CORE:
            item.add_marker(pytest.mark.slow)
