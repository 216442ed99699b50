"""Make a storage from what a user wrote, or from a description that another process sent.

Storages of other packages and of users are found by their entry points, and rebuilt elsewhere from "module:Class". A
package names the schemes that it serves in the group ``holdfast.storage``; what an entry point names is called with
the whole URI. Nothing of Holdfast's own is looked for there: its schemes work without an installed distribution, and a
writer process starts without reading the metadata of all packages.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

from holdfast._outgoing import conceal, conceal_url, masked
from holdfast.errors import ConfigError, HoldfastError

from .base import Storage
from .local.local_storage import LocalStorage

# Holdfast's own schemes: where to find the function that makes a storage of a whole URI. By name, so that only what is
# used is imported; each imports its own packages, and says which extra brings a missing package. Those of other
# packages are entry points (`schemes`).
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

# Short names of Holdfast's own kinds of descriptions; all others are "module:Class".
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
        ConfigError: see `check_slashes`; or a relative path behind "file://".

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

        path = unquote(rest.removeprefix("localhost") if rest.startswith("localhost/") else rest)
        if path and not path.startswith(("/", "~")):
            # Its first part is a host by RFC 8089; as a path it would lie below wherever the process happens to be.
            raise ConfigError(
                f"location {location!r}: 'file://' takes an absolute path, 'file:///{path}'; give a relative one "
                f"without it, {path!r}"
            )
        return "file", path
    return scheme, rest


def check_slashes(path: str) -> str:
    """Return a path unchanged; refuse what pathlib and os.path make of a URI: nobody has a directory named "s3:".

    Raises:
        ConfigError: a single slash follows a scheme.
    """
    scheme, mark, rest = path.partition(":/")
    if mark and (scheme.lower() in {*_SCHEMES, *_VIA_FSSPEC, "memory"} or scheme.lower() in schemes()):
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
        packages = [base.__module__.partition(".")[0] for base in type(filesystem).__mro__]
        package = next((name for name in packages if name in _FILESYSTEMS), "")
        if not package:
            raise ConfigError(
                f"filesystem={_kind_of(filesystem)}: give a holdfast.storage.Storage; file systems of "
                f"{', '.join(sorted(_FILESYSTEMS)) or 'other packages'} are the only others known here"
            )
        adapt = _find(_FILESYSTEMS[package])
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
    conceal_url(location)
    prefix, mark, _ = scheme.partition("+")
    place = _SCHEMES.get(scheme) or (_BY_PREFIX.get(prefix) if mark else None)
    if place is None and (storage := _from_entry_point(location, scheme)) is not None:
        return storage
    if place is None and (scheme in _VIA_FSSPEC or importlib.util.find_spec("fsspec") is not None):
        place = _BY_PREFIX["fsspec"]
    if place is not None:
        return cast("Storage", _find(place)(f"{scheme}://{rest}"))
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
    if isinstance(kind, str) and ":" in kind:
        return _rebuild(kind, options, secrets)
    if kind not in _KINDS:
        raise ConfigError(
            f"storage description of kind {kind!r}: this Holdfast knows {sorted(_KINDS)} and 'module:Class' of others"
        )
    if secrets is not None:
        options["secrets"] = secrets
    return cast("Storage", _find(_KINDS[kind])(**options))


# ---- storages of other packages


_GROUP = "holdfast.storage"
_OURS = frozenset({"holdfast", "fsspec"})  # packages that a writer process finds by itself
# Credentials by description, of storages that were rebuilt here with some: their handles find them again.
_known: dict[str, dict[str, str]] = {}


@functools.cache
def schemes() -> Mapping[str, str]:
    """Return the schemes that installed packages serve: "module:function" by scheme. Read once for each process."""
    from importlib.metadata import entry_points  # not above: slow to import, rarely needed

    return {entry.name.lower(): entry.value for entry in entry_points(group=_GROUP)}


def _from_entry_point(uri: str, scheme: str) -> Storage | None:
    """Return the storage that an installed package makes of a URI; None if no package serves its scheme.

    Raises:
        ConfigError: the URI holds a password, or the package cannot be imported, fails or makes no storage.
    """
    place = schemes().get(scheme)
    if place is None:
        return None
    if re.match(r"[^/]*:[^/]*@", uri.partition("://")[2]):
        raise ConfigError(
            f"{scheme}:// location: it holds a password, and a location is written into messages and files; leave it "
            "out and give credentials as the package of this scheme wants them (its environment variables)"
        )
    from holdfast._optional import offered  # not above: of schemes that a package serves only

    storage = offered(_GROUP, scheme, what="scheme")(uri)
    if not isinstance(storage, Storage):
        raise ConfigError(
            f"entry point {scheme} = {place!r} of the group {_GROUP}: it returned {type(storage).__name__}; it has to "
            "return a holdfast.storage.Storage"
        )
    storage._made = (place, uri, storage.uri)
    return storage


def _rebuild(place: str, options: Mapping[str, Any], secrets: dict[str, str] | None) -> Storage:
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
    owner = _find(f"{module}:{name.partition('.')[0]}")
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
        return _find(place)
    except Exception as error:
        raise ConfigError(
            f"storage {place!r} cannot be imported in process {os.getpid()} ({type(error).__name__}: {error}): "
            f"checkpoints are written by a process of their own, which imports {place.partition(':')[0]!r} along the "
            "sys.path that the training process has when it begins to save; put the module into a directory of "
            "sys.path (beside the script, PYTHONPATH) or install it"
        ) from error


def _find(place: str) -> Any:
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
