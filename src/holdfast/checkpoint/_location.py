"""Where a `Checkpoint` is: from what users write to a storage and a name, and back."""

from __future__ import annotations

import importlib.util
import os
import weakref
from typing import Any

from holdfast.errors import ConfigError
from holdfast.storage.base import Storage, check_path
from holdfast.storage.local.local_storage import LocalStorage, absolute
from holdfast.storage.memory import MemoryStorage
from holdfast.storage.resolve import check_slashes, resolve, split_uri

__all__ = ["DictStore", "file_system", "locate"]


def locate(path: str | os.PathLike[str], filesystem: Any) -> tuple[Storage, str]:
    """Split a location into the storage of its parent and its name."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ConfigError(f"Checkpoint({path!r}): give a path or a URI")
    text = os.fspath(path)
    if filesystem is not None:
        if not isinstance(filesystem, Storage):
            # A file system of pyarrow or fsspec: the path follows its rules, and local ones know the current directory.
            head, slash, name = text.rstrip("/").rpartition("/")
            return resolve(head or slash, filesystem), check_path(name)
        storage = filesystem
        base = split_uri(storage.uri)[1].rstrip("/") + "/"
        if text.startswith("/") and not text.startswith(base):
            raise ConfigError(f"Checkpoint({text!r}): the path is outside of {storage!r}")
        head, _, name = text.removeprefix(base).rstrip("/").rpartition("/")
        return storage.child(head), check_path(name)
    scheme, rest = ("file", check_slashes(text)) if isinstance(path, os.PathLike) else split_uri(text)
    if scheme == "file":
        full = absolute(os.path.expanduser(rest))
        # A link such as `latest` moves on while we read: what it means now is what this handle means.
        head, name = os.path.split(os.path.realpath(full) if os.path.islink(full) else full)
        if not name:
            raise ConfigError(f"Checkpoint({text!r}): the root of the file system cannot be a checkpoint")
        return LocalStorage(head), name
    rest, settings = _without_settings(scheme, rest)
    head, slash, name = rest.rstrip("/").rpartition("/")
    if not slash:
        raise ConfigError(f"Checkpoint({text!r}): give a directory inside of it, as in {text}/checkpoint")
    return resolve(f"{scheme}://{head}{settings}"), check_path(name)


def _without_settings(scheme: str, rest: str) -> tuple[str, str]:
    """Split off settings of the storage, such as ``?endpoint_override=...``, which stand behind the whole path.

    Whatever stands there is a matter of the storage: no part of the name of a checkpoint, which is shown.
    """
    if scheme not in ("s3", "s3a") or "?" not in rest:
        rest, mark, settings = rest.partition("?") if scheme != "memory" else (rest, "", "")
        return rest, mark + settings
    from holdfast.storage.object.bucket import split_settings

    whole = f"{scheme}://{rest}"
    place, _ = split_settings(whole)
    if place == whole:  # nothing that is known: the storage refuses it
        place = whole.partition("?")[0]
    return place[len(scheme) + 3 :], whole[len(place) :]


def file_system(storage: Storage) -> Any:
    """Return the file system of pyarrow that shows a storage; the storage itself where pyarrow is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        return storage
    from holdfast.storage.adapters.for_pyarrow import as_pyarrow

    return as_pyarrow(storage)


class DictStore:
    """Owns the memory behind `Checkpoint.from_dict`; handles hold it, and it empties itself after the last."""

    def __init__(self, name: str) -> None:
        storage = MemoryStorage(f"holdfast-dict-{name}")
        self.name = name
        self.uri = storage.uri
        _dict_stores[self.uri] = self
        weakref.finalize(self, storage.delete_tree, "")

    @staticmethod
    def of(storage: Storage) -> DictStore | None:
        """Return the owner of a storage that a dictionary lives in, None for all others."""
        return _dict_stores.get(storage.uri)


_dict_stores: weakref.WeakValueDictionary[str, DictStore] = weakref.WeakValueDictionary()
