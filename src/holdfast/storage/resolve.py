"""From what a user wrote, or what another process was told, to a storage."""

from __future__ import annotations

import importlib
import os
from typing import Any, cast

from ..errors import ConfigError
from .base import Storage
from .local import LocalStorage
from .memory import MemoryStorage

__all__ = ["from_description", "resolve", "split_uri"]

# Schemes that are planned: named so that the error says more than "unknown".
_LATER = ("abfs", "abfss", "az", "adl", "gcs", "gs", "hdfs", "hf", "http", "https", "oci", "r2", "s3", "s3a", "sftp")

# Kinds of descriptions. By name, because a test kind lives in a layer above and loads only where it is used.
_KINDS = {
    "local": ("holdfast.storage.local", "LocalStorage"),
    "faulty": ("holdfast.testing.faults", "FaultyStorage"),
}


def split_uri(location: str) -> tuple[str, str]:
    """Split "scheme://rest" into scheme (lower case) and rest; a plain path has the scheme "file".

    Example:
        >>> split_uri("memory://name/a"), split_uri("runs/gpt")
        (('memory', 'name/a'), ('file', 'runs/gpt'))
    """
    scheme, mark, rest = location.partition("://")
    if not mark or not scheme.replace("+", "").replace("-", "").replace(".", "").isalnum():
        return "file", location
    scheme = scheme.lower()
    if scheme == "file":
        # file:///abs and file://localhost/abs are the two forms of RFC 8089.
        from urllib.parse import unquote  # not above: slow to import, rarely needed

        return "file", unquote(rest.removeprefix("localhost") if rest.startswith("localhost/") else rest)
    return scheme, rest


def resolve(location: str | os.PathLike[str] | Storage, filesystem: Any = None) -> Storage:
    """Return the storage rooted at ``location``; nothing is created or contacted.

    Args:
        location: a path (made absolute now, so that a later chdir does not move it), a URI such as "memory://name",
            or a storage, which is returned as it is.
        filesystem: a `Storage` in which ``location`` is a path.

    Raises:
        ConfigError: no storage fits.
    """
    if isinstance(location, Storage):
        if filesystem is not None:
            raise ConfigError(f"{location!r} is a storage already: leave filesystem={filesystem!r} out")
        return location
    if not isinstance(location, (str, os.PathLike)):
        raise ConfigError(f"location {location!r}: give a path, a URI such as 'memory://name', or a Storage")
    if filesystem is not None:
        if not isinstance(filesystem, Storage):
            raise ConfigError(
                f"filesystem={filesystem!r}: this version takes a holdfast.storage.Storage; pyarrow and fsspec file "
                "systems come with a later one"
            )
        return filesystem.child(os.fspath(location).strip("/"))
    if isinstance(location, os.PathLike):
        # A path object never holds a scheme: "s3:" would be an ordinary directory name there.
        return LocalStorage(os.path.expanduser(location))
    return _from_uri(location)


def _from_uri(location: str) -> Storage:
    scheme, rest = split_uri(location)
    if not rest:
        raise ConfigError(f"location {location!r} is empty: give a directory or a URI such as 'memory://name'")
    if scheme == "file":
        return LocalStorage(os.path.expanduser(rest))
    if scheme == "memory":
        name, _, prefix = rest.partition("/")
        return MemoryStorage(name).child(prefix)
    known = "it comes with a later version" if scheme in _LATER else "no storage knows this scheme"
    raise ConfigError(f"location {location!r}: {known}; use a local path, 'file://...' or 'memory://name'")


def from_description(description: dict[str, Any]) -> Storage:
    """Rebuild the storage that `Storage.describe` described, in this process.

    Raises:
        ConfigError: the kind is unknown.
    """
    options = dict(description)
    kind = options.pop("kind", None)
    if kind == "prefix":
        return from_description(options["parent"]).child(options["prefix"])
    if kind not in _KINDS:
        raise ConfigError(f"storage description of kind {kind!r}: this Holdfast knows {sorted(_KINDS)}")
    module, name = _KINDS[kind]
    return cast("Storage", getattr(importlib.import_module(module), name)(**options))
