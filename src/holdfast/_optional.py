"""Packages that only some users need: the command that brings one, what installed ones offer, classes based on theirs.

Metadata of packages is read only when a name is given. Schemes of storages are found by `holdfast.storage.resolve`.

A framework may be installed under two names (`lightning` and `pytorch_lightning`), with classes of its own under each,
and checks `isinstance`: the base class of `Grafted` is chosen when an object is made, the one that is imported by then.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ._outgoing import masked
from .errors import ConfigError, HoldfastError, MissingExtraError

# The checkout, if this file is in one. What the functions below import is for messages: starting must not pay for it.
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TRACKER = "holdfast.tracker"
"""Group of entry points: name = "module:Class", called without arguments, gives a tracker."""
MODEL_FILES = "holdfast.model_files"
"""Group of entry points: name = "module:function", called with a state, gives what ``model_files`` takes."""


def require(module: str, *, extra: str, purpose: str) -> Any:
    """Import an optional package.

    Args:
        module: what to import.
        extra: the extra of Holdfast that brings it.
        purpose: what it is needed for, such as "s3:// locations".

    Raises:
        MissingExtraError: it is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{purpose} needs the package {module.partition('.')[0]} ({error}): {install_command(extra)}"
        ) from error


def install_command(extra: str) -> str:
    """Return the command that installs an extra.

    There need not be a release of Holdfast on any index: what was installed from a checkout, an archive or a repository
    is named by that again. Where it is no more, the packages of the extra are named themselves.

    Args:
        extra: as in ``pyproject.toml``.
    """
    kind, place = _origin()
    words = {
        "editable": [f"{place}[{extra}]"],
        "directory": [f"{place}[{extra}]"],
        "address": [f"holdfast[{extra}] @ {place}"],
        "gone": _packages(extra),
    }
    command = "pip install -e" if kind == "editable" else "pip install"
    return f"{command} {_quoted(words.get(kind) or [f'holdfast[{extra}]'])}"


def upgrade_command(version: str | None = None) -> str:
    """Return what to do for a newer Holdfast.

    Args:
        version: the least that is needed, None if nobody knows.
    """
    wanted = f"holdfast>={version}" if version else "holdfast"
    kind, place = _origin()
    if kind == "index":
        return f"pip install --upgrade {_quoted([wanted])}"
    if kind == "editable":
        return f"{wanted} is needed: update the checkout {place} (git pull)"
    if kind == "directory":
        return f"{wanted} is needed: update the checkout {place} (git pull), then pip install {_quoted([place])}"
    return f"{wanted} is needed: install it from where this Holdfast came from"


def _origin() -> tuple[str, str]:
    """Return how this Holdfast came here, and from where.

    Kinds: "editable" (code that runs from a checkout), "directory" (a checkout that was copied from), "address" (an
    archive or a repository, by its URL), "index" (its name is enough), "gone" (a folder or file that is no more).
    """
    import json
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    if _is_checkout(_ROOT):
        return "editable", _ROOT
    try:  # PEP 610: written by every installer for what did not come from an index
        found = json.loads(metadata.distribution("holdfast").read_text("direct_url.json") or "null")
        url, revision = found["url"], found.get("vcs_info", {})
    except (metadata.PackageNotFoundError, OSError, ValueError, TypeError, KeyError, AttributeError):
        return "index", ""
    if not isinstance(url, str) or not isinstance(revision, dict):
        return "index", ""
    if revision:
        commit = revision.get("commit_id")
        return "address", f"{revision.get('vcs', 'git')}+{masked(url)}{f'@{commit}' if commit else ''}"
    if not url.startswith("file:"):
        return "address", masked(url)
    path = unquote(urlsplit(url).path)
    if _is_checkout(path):
        return "directory", path
    return ("address", url) if os.path.isfile(path) else ("gone", "")


def _is_checkout(folder: str) -> bool:
    try:
        with open(os.path.join(folder, "pyproject.toml"), encoding="utf-8") as file:
            return re.search(r'^name = "holdfast"$', file.read(), re.MULTILINE) is not None
    except OSError:
        return False


def _packages(extra: str) -> list[str]:
    """Return what an extra requires, as the metadata of the installation has it."""
    from importlib import metadata

    try:
        requirements = metadata.requires("holdfast") or []
    except metadata.PackageNotFoundError:
        return []
    mark = re.compile(rf";\s*extra == ['\"]{re.escape(extra)}['\"]$")
    return [mark.sub("", one).strip() for one in requirements if mark.search(one)]


def _quoted(words: list[str]) -> str:
    import shlex

    return " ".join(shlex.quote(word) for word in words)


def offered(group: str, name: str, *, what: str) -> Callable[..., Any]:
    """Import what a package offers under a name; return a function that calls it.

    Args:
        group: of entry points.
        name: as the user gave it.
        what: the argument that the user gave, for messages.

    Raises:
        ConfigError: no package offers it, or what one offers cannot be imported, or fails when it is called.
    """
    from importlib.metadata import entry_points  # not above: slow to import, rarely needed

    from ._meant import closest

    found = {entry.name: entry for entry in entry_points(group=group)}
    entry = found.get(name)
    if entry is None:
        meant = closest(name, found)
        known = f"did you mean {meant!r}?" if meant else f"there are: {', '.join(sorted(found)) or 'none'}"
        raise ConfigError(
            f"{what}={name!r}: no installed package offers this name ({known}). Install the package that does (its "
            f"entry point in the group {group!r}), or give the object itself"
        )
    of = entry.value if entry.dist is None else f"{entry.value} of the package {entry.dist.name} {entry.dist.version}"
    try:
        make: Callable[..., Any] = entry.load()
    except Exception as error:
        raise ConfigError(
            f"{what}={name!r}: {of} cannot be imported ({type(error).__name__}: {error}): install that package anew, "
            "with what it needs, or leave it out"
        ) from error

    def call(*arguments: Any) -> Any:
        try:
            return make(*arguments)
        except HoldfastError:
            raise
        except Exception as error:
            raise ConfigError(f"{what}={name!r}: {of} failed ({type(error).__name__}: {error})") from error

    return call


def tracker(given: Any, *, what: str) -> Any:
    """Return a tracker that was given by the name under which a package offers it; anything else as it is.

    Raises:
        ConfigError: as `offered`, or what it made cannot be told of checkpoints.
    """
    if not isinstance(given, str):
        return given
    made = offered(TRACKER, given, what=what)()
    if not callable(made):
        raise ConfigError(
            f"{what}={given!r}: the entry point made {type(made).__name__}, which cannot be called with a checkpoint: "
            "it has to make a holdfast.trackers.Tracker"
        )
    return made


_made: dict[tuple[type, tuple[type, ...]], type] = {}


class Grafted:
    """An object of this class is an instance of the framework's class as well.

    Attributes:
        BASES: "module:class" for each name the framework has, the preferred first. Those whose top module is imported
            are used; the first that is installed, if none is.
        EXTRA: extra of Holdfast that brings the framework.
        ALONE: take the first of them only: classes that call each other's methods with ``super()`` do not mix.
    """

    BASES: ClassVar[Sequence[str]] = ()
    EXTRA: ClassVar[str] = ""
    ALONE: ClassVar[bool] = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of a class that has the framework's among its bases."""
        return object.__new__(_grafted(cls))

    def __reduce__(self) -> Any:
        return _again, (_ungrafted(type(self)), self.__dict__)

    def graft_onto(self, names: Sequence[str] | None = None) -> None:
        """Make this object an instance of other classes from now on, subclasses of `BASES`; None: of `BASES` again."""
        self.__class__ = _grafted(_ungrafted(type(self)), names)


def _ungrafted(made: type) -> type:
    return next(cls for cls in made.__mro__ if "_grafted_onto" not in vars(cls))


def _grafted(cls: type[Grafted], names: Sequence[str] | None = None) -> type:
    if hasattr(cls, "_grafted_onto"):
        return cls
    bases = tuple(_bases(cls, names or cls.BASES))
    key = (cls, bases)
    if key not in _made:
        about = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _made[key] = type(cls.__name__, (cls, *bases), {**about, "_grafted_onto": bases})
    return _made[key]


def _bases(cls: type[Grafted], names: Sequence[str]) -> list[type]:
    here = [base for base in names if _package(base) in sys.modules]
    if not here:
        here = [base for base in names if importlib.util.find_spec(_package(base))][:1] or list(names[:1])
    found = []
    for base in here[:1] if cls.ALONE else here:
        module, _, name = base.partition(":")
        found.append(getattr(require(module, extra=cls.EXTRA, purpose=f"{cls.__module__}.{cls.__qualname__}"), name))
    return found


def _package(base: str) -> str:
    return base.partition(":")[0].partition(".")[0]


def _again(cls: type[Grafted], state: dict[str, Any]) -> Any:
    made: Any = object.__new__(_grafted(cls))
    made.__dict__.update(state)
    return made
