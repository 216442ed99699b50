"""Storages of other packages and of users: found by their entry points, rebuilt elsewhere from "module:Class".

A package names the schemes that it serves in the group ``holdfast.storage``; what an entry point names is called with
the whole URI. Nothing of Holdfast's own is looked for there: its schemes work without an installed distribution, and a
writer process starts without reading the metadata of all packages.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast._outgoing import conceal
from holdfast.errors import ConfigError, HoldfastError

from .base import Storage

__all__ = ["extend_path", "find", "from_entry_point", "import_paths", "importable", "load", "rebuild", "schemes"]

_GROUP = "holdfast.storage"
_OURS = frozenset({"holdfast", "fsspec"})  # packages that a writer process finds by itself
# Credentials by description, of storages that were rebuilt here with some: their handles find them again.
_known: dict[str, dict[str, str]] = {}


@functools.cache
def schemes() -> Mapping[str, str]:
    """Return the schemes that installed packages serve: "module:function" by scheme. Read once for each process."""
    from importlib.metadata import entry_points  # not above: slow to import, rarely needed

    return {entry.name.lower(): entry.value for entry in entry_points(group=_GROUP)}


def from_entry_point(uri: str, scheme: str) -> Storage | None:
    """Return the storage that an installed package makes of a URI; None if no package serves its scheme.

    Raises:
        ConfigError: the URI holds a password, or the package cannot be imported or makes no storage.
    """
    place = schemes().get(scheme)
    if place is None:
        return None
    if re.match(r"[^/]*:[^/]*@", uri.partition("://")[2]):
        raise ConfigError(
            f"{scheme}:// location: it holds a password, and a location is written into messages and files; leave it "
            "out and give credentials as the package of this scheme wants them (its environment variables)"
        )
    storage = load(place)(uri)
    if not isinstance(storage, Storage):
        raise ConfigError(
            f"entry point {scheme} = {place!r} of the group {_GROUP}: it returned {type(storage).__name__}; it has to "
            "return a holdfast.storage.Storage"
        )
    storage._made = (place, uri, storage.uri)
    return storage


def rebuild(place: str, options: Mapping[str, Any], secrets: dict[str, str] | None) -> Storage:
    """Make the storage that `Storage.describe` described with ``{"kind": place, **options}``.

    Args:
        place: "module:Class", "module:Class.method" or what an entry point names.
        options: arguments.
        secrets: what `Storage.secrets` returned; None for those that a storage of this description had before.

    Raises:
        ConfigError: it cannot be imported or made, or is no storage and no entry point: a description may come from a
            file, and must not name any function there is.
    """
    found = load(place)
    module, _, name = place.partition(":")
    owner = find(f"{module}:{name.partition('.')[0]}")
    is_storage = isinstance(owner, type) and issubclass(owner, Storage)
    is_entry = not is_storage and place in schemes().values()
    if not (is_storage or is_entry):
        raise ConfigError(
            f"storage description of kind {place!r}: name a subclass of holdfast.storage.Storage, a class method of "
            f"one, or what an entry point of the group {_GROUP} names"
        )
    key = json.dumps([place, options], sort_keys=True)
    secrets = _known.get(key) if secrets is None else secrets
    if secrets is not None:
        _known[key] = secrets
        conceal(secrets.values())
    try:
        if is_entry:
            storage: Storage = found(options["uri"])
            storage._made = (place, options["uri"], storage.uri)
            return storage
        rebuilt: Storage = found(**options, **({} if secrets is None else {"secrets": secrets}))
    except HoldfastError:
        raise
    except TypeError as error:
        raise ConfigError(
            f"storage description of kind {place!r}: it cannot be called with {sorted(options)}"
            f"{'' if secrets is None else ' and secrets'}: {error}; what describe() returns are its arguments"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"storage {place!r} cannot be made in process {os.getpid()} ({type(error).__name__}: {error}): checkpoints "
            "are written by a process of their own, which calls it with what describe() returns: nothing else of the "
            "training process is there"
        ) from error
    return rebuilt


def load(place: str) -> Any:
    """Import what "module:name" names.

    Raises:
        ConfigError: it cannot be imported in this process; the message has the reason.
    """
    try:
        return find(place)
    except Exception as error:
        raise ConfigError(
            f"storage {place!r} cannot be imported in process {os.getpid()} ({type(error).__name__}: {error}): "
            f"checkpoints are written by a process of their own, which imports {place.partition(':')[0]!r} along the "
            "sys.path that the training process has when it begins to save; put the module into a directory of "
            "sys.path (beside the script, PYTHONPATH) or install it"
        ) from error


def find(place: str) -> Any:
    """Import what "module:name" names, with the errors that this has."""
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def importable(kind: type) -> bool:
    """Tell whether another process can find a class by its name: not one of the script itself or of a function."""
    return kind.__module__ != "__main__" and "<locals>" not in kind.__qualname__


def import_paths(description: Mapping[str, Any]) -> list[str]:
    """Return where another process finds the modules that a description names; [] where it needs nothing of ours.

    That is the ``sys.path`` of this process, in its order, and the homes of modules that import hooks have found
    (editable installs).

    Raises:
        ConfigError: it names the script that runs.
    """
    modules = {module for module in _modules(description) if module.partition(".")[0] not in _OURS}
    if not modules:
        return []
    if "__main__" in modules:
        raise ConfigError(
            f"the storage {description} is a class of the script that runs (__main__), which the process that writes "
            "checkpoints cannot import without running it: move the class into a module of its own"
        )
    paths = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
    for name in sorted(modules):
        top = sys.modules.get(name.partition(".")[0])
        file = getattr(top, "__file__", None)
        folders = list(getattr(top, "__path__", ())) or ([file] if file else [])
        paths += [os.path.dirname(os.path.abspath(folder)) for folder in folders]
    return list(dict.fromkeys(paths))


def _modules(description: Mapping[str, Any]) -> Iterator[str]:
    for key in ("kind", "client"):
        place = description.get(key)
        if isinstance(place, str) and ":" in place:
            yield place.partition(":")[0]
    if isinstance(description.get("parent"), Mapping):
        yield from _modules(description["parent"])


def extend_path(paths: list[str]) -> None:
    """Let this process import from ``paths``: behind the standard library, before what was there, in their order."""
    missing = [path for path in paths if path not in sys.path]
    if missing:
        standard = os.path.dirname(os.__file__)
        first = [path for path in sys.path if path == standard or os.path.dirname(path) == standard or ".zip" in path]
        first = [path for path in first if "-packages" not in path]
        sys.path[:] = list(dict.fromkeys([*first, *paths, *sys.path]))
        schemes.cache_clear()
        importlib.invalidate_caches()
