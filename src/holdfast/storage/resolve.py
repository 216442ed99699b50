"""Make a storage from what a user wrote, or from a description that another process sent."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, cast

from holdfast._outgoing import conceal, conceal_url, masked
from holdfast.errors import ConfigError

from .base import Storage
from .local.local_storage import LocalStorage

__all__ = ["check_slashes", "from_description", "resolve", "split_uri"]

# Holdfast's own schemes: where to find the function that makes a storage of a whole URI. By name, so that only what is
# used is imported; each imports its own packages, and says which extra brings a missing package. Those of other
# packages are entry points (`plugins`).
_SCHEMES: dict[str, str] = {
    "s3": "holdfast.storage.object.object_storage:from_uri",
    "s3a": "holdfast.storage.object.object_storage:from_uri",
    "gs": "holdfast.storage.object.object_storage:from_uri",
    "gcs": "holdfast.storage.object.object_storage:from_uri",
    "az": "holdfast.storage.object.object_storage:from_uri",
    "azure": "holdfast.storage.object.object_storage:from_uri",
    "abfs": "holdfast.storage.object.object_storage:from_uri",
    "abfss": "holdfast.storage.object.object_storage:from_uri",
    "adl": "holdfast.storage.object.object_storage:from_uri",
    "oci": "holdfast.storage.object.object_storage:from_uri",
    "libcloud": "holdfast.storage.adapters.libcloud:from_uri",
    "hdfs": "holdfast.storage.adapters.pyarrow:from_uri",
    "viewfs": "holdfast.storage.adapters.pyarrow:from_uri",
}
# fsspec is asked for schemes that nobody else serves. These prefixes choose a package for any scheme it knows.
_BY_PREFIX = {
    "fsspec": "holdfast.storage.adapters.fsspec:from_uri",
    "pyarrow": "holdfast.storage.adapters.pyarrow:from_uri",
}

# Well-known schemes of fsspec: named so that the error says what to install where fsspec is missing.
_VIA_FSSPEC = ("dbfs", "ftp", "hf", "http", "https", "sftp", "smb", "ssh", "webdav", "webhdfs")

# Short names of Holdfast's own kinds of descriptions; all others are "module:Class" (`plugins`).
_KINDS = {
    "local": "holdfast.storage.local.local_storage:LocalStorage",
    "object": "holdfast.storage.object.object_storage:from_options",
    "fsspec": "holdfast.storage.adapters.fsspec:from_description",
    "pyarrow": "holdfast.storage.adapters.pyarrow:from_description",
    "libcloud": "holdfast.storage.adapters.libcloud:from_description",
}

# File system objects of other packages, by the package their class comes from: function(filesystem, path) -> Storage.
_FILESYSTEMS: dict[str, str] = {
    "fsspec": "holdfast.storage.adapters.fsspec:from_filesystem",
    "pyarrow": "holdfast.storage.adapters.pyarrow:from_filesystem",
}


def split_uri(location: str) -> tuple[str, str]:
    """Split "scheme://rest" into scheme (lower case) and rest; a plain path has the scheme "file".

    Raises:
        ConfigError: see `check_slashes`.

    Example:
        >>> split_uri("memory://name/a"), split_uri("runs/gpt")
        (('memory', 'name/a'), ('file', 'runs/gpt'))
    """
    scheme, mark, rest = location.partition("://")
    if not mark or not scheme.replace("+", "").replace("-", "").replace(".", "").isalnum():
        return "file", check_slashes(location)
    scheme = scheme.lower()
    if scheme == "file":
        # file:///abs and file://localhost/abs are the two forms of RFC 8089.
        from urllib.parse import unquote  # not above: slow to import, rarely needed

        return "file", unquote(rest.removeprefix("localhost") if rest.startswith("localhost/") else rest)
    return scheme, rest


def check_slashes(path: str) -> str:
    """Return a path unchanged; refuse what pathlib and os.path make of a URI: nobody has a directory named "s3:".

    Raises:
        ConfigError: a single slash follows a scheme.
    """
    scheme, mark, rest = path.partition(":/")
    if not mark:
        return path
    from .plugins import schemes  # not above: a path needs nothing of other packages

    if scheme.lower() in {*_SCHEMES, *_VIA_FSSPEC, "memory"} or scheme.lower() in schemes():
        raise ConfigError(
            f"location {path!r}: a URI has two slashes, which pathlib and os.path make one of; give the text "
            f"'{scheme}://{rest}'"
        )
    return path


def resolve(location: str | os.PathLike[str] | Storage, filesystem: Any = None) -> Storage:
    """Return the storage rooted at ``location``; nothing is created or contacted.

    Args:
        location: a path (made absolute now, so that a later chdir does not move it), a URI such as "memory://name",
            or a storage, which is returned as it is.
        filesystem: a `Storage`, or a file system object of fsspec or pyarrow, in which ``location`` is a path.

    Raises:
        ConfigError: no storage fits.
    """
    if isinstance(location, Storage):
        if filesystem is not None:
            raise ConfigError(f"{location!r} is a storage already: leave filesystem={_kind_of(filesystem)} out")
        conceal((location.secrets() or {}).values())
        return location
    if not isinstance(location, (str, os.PathLike)):
        raise ConfigError(f"location {location!r}: give a path, a URI such as 'memory://name', or a Storage")
    if filesystem is not None:
        _check_scheme(os.fspath(location), filesystem)
        if isinstance(filesystem, Storage):
            return filesystem.child(os.fspath(location).strip("/"))
        package = next((base.__module__ for base in type(filesystem).__mro__ if _package(base) in _FILESYSTEMS), "")
        if not package:
            raise ConfigError(
                f"filesystem={_kind_of(filesystem)}: give a holdfast.storage.Storage; file systems of "
                f"{', '.join(sorted(_FILESYSTEMS)) or 'other packages'} are the only others known here"
            )
        from .plugins import find

        adapt = find(_FILESYSTEMS[package.partition(".")[0]])
        return cast("Storage", adapt(filesystem, os.fspath(location)))
    if isinstance(location, os.PathLike):
        # A path object never holds a scheme: "://" of a text is ":/" in it.
        return LocalStorage(os.path.expanduser(check_slashes(os.fspath(location))))
    return _from_uri(location)


def _from_uri(location: str) -> Storage:
    scheme, rest = split_uri(location)
    if not rest:
        raise ConfigError(f"location {location!r} is empty: give a directory or a URI such as 'memory://name'")
    if scheme == "file":
        return LocalStorage(os.path.expanduser(rest))
    if scheme == "memory":
        name, _, prefix = rest.partition("/")
        from .memory import MemoryStorage

        return MemoryStorage(name).child(prefix)
    from .plugins import find, from_entry_point, schemes

    conceal_url(location)
    prefix, mark, _ = scheme.partition("+")
    place = _SCHEMES.get(scheme) or (_BY_PREFIX.get(prefix) if mark else None)
    if place is None and (storage := from_entry_point(location, scheme)) is not None:
        return storage
    if place is None and (scheme in _VIA_FSSPEC or importlib.util.find_spec("fsspec") is not None):
        place = _BY_PREFIX["fsspec"]
    if place is not None:
        return cast("Storage", find(place)(f"{scheme}://{rest}"))
    raise ConfigError(
        f"location {location!r}: no storage knows this scheme; use a local path, 'file://...', 'memory://name' or one "
        f"of {', '.join(f'{name}://' for name in sorted({*_SCHEMES, *schemes()}))}, or install fsspec for others"
    )


def _check_scheme(path: str, filesystem: Any) -> None:
    """Refuse a URI as the path in a file system that would take it for the name of a directory.

    Raises:
        ConfigError: it is of another scheme than those of an fsspec file system.
    """
    scheme, _ = split_uri(path)
    below = getattr(getattr(filesystem, "handler", None), "fs", filesystem)  # pyarrow wraps fsspec's
    known = getattr(below, "protocol", ())
    if scheme == "file" or scheme in ((known,) if isinstance(known, str) else known):
        return
    raise ConfigError(
        f"location {path!r} with filesystem={_kind_of(filesystem)}: with a file system give the path in it, without a "
        f"scheme ({split_uri(masked(path))[1]!r}), or leave the file system out"
    )


def _kind_of(filesystem: Any) -> str:
    """Name a file system by its class: what its repr shows is not ours to know, and may be a password."""
    return f"<{type(filesystem).__module__}.{type(filesystem).__qualname__}>"


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def from_description(description: dict[str, Any], secrets: dict[str, str] | None = None) -> Storage:
    """Rebuild the storage that `Storage.describe` described, in this process.

    Args:
        description: what `Storage.describe` returned.
        secrets: what `Storage.secrets` returned; without them, a storage takes credentials of this process.

    Raises:
        ConfigError: the kind is unknown, or cannot be imported in this process.
    """
    options = dict(description)
    kind = options.pop("kind", None)
    if kind == "prefix":
        return from_description(options["parent"], secrets).child(options["prefix"])
    from .plugins import find, rebuild

    if isinstance(kind, str) and ":" in kind:
        return rebuild(kind, options, secrets)
    if kind not in _KINDS:
        raise ConfigError(
            f"storage description of kind {kind!r}: this Holdfast knows {sorted(_KINDS)} and 'module:Class' of others"
        )
    if secrets is not None:
        options["secrets"] = secrets
    return cast("Storage", find(_KINDS[kind])(**options))
