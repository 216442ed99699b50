"""What installed packages offer by entry points, under a name: trackers and small files of models.

Metadata of packages is read only when a name is given. Schemes of storages are found by `holdfast.storage.plugins`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._suggest import closest
from .errors import ConfigError, HoldfastError

__all__ = ["MODEL_FILES", "TRACKER", "made_by_package", "tracker"]

TRACKER = "holdfast.tracker"
"""Group of entry points: name = "module:Class", called without arguments, gives a tracker."""
MODEL_FILES = "holdfast.model_files"
"""Group of entry points: name = "module:function", called with a state, gives what ``model_files`` takes."""


def made_by_package(group: str, name: str, *arguments: Any, what: str) -> Any:
    """Call what a package offers under a name.

    Args:
        group: of entry points.
        name: as the user gave it.
        *arguments: of the call.
        what: the argument that the user gave, for messages.

    Raises:
        ConfigError: no package offers it, or what one offers cannot be imported or fails.
    """
    from importlib.metadata import entry_points  # not above: slow to import, rarely needed

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
    try:
        return make(*arguments)
    except HoldfastError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}={name!r}: {of} failed ({type(error).__name__}: {error})") from error


def tracker(given: Any, *, what: str) -> Any:
    """Return a tracker that was given by the name under which a package offers it; anything else as it is.

    Raises:
        ConfigError: as `made_by_package`, or what it made cannot be told of checkpoints.
    """
    if not isinstance(given, str):
        return given
    made = made_by_package(TRACKER, given, what=what)
    if not callable(made):
        raise ConfigError(
            f"{what}={given!r}: the entry point made {type(made).__name__}, which cannot be called with a checkpoint: "
            "it has to make a holdfast.trackers.Tracker"
        )
    return made
