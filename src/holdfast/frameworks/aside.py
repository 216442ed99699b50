"""What another writer left under a name that is wanted is moved aside, never deleted."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from holdfast._log import get_logger

__all__ = ["move_aside", "unused"]

_LOG = get_logger("integrations")
_ASIDE = ".before-holdfast"


def move_aside(path: Path) -> None:
    """Give a file or directory another name beside it; nothing if there is none."""
    if not os.path.lexists(path):
        return
    aside = unused(f"{path}{_ASIDE}")
    os.replace(path, aside)
    _LOG.warning("%s was of another writer: it is %s now", path, aside)


def unused(path: str) -> str:
    """Return a path, with a number behind it if there is something already."""
    paths = itertools.chain([path], (f"{path}-{number}" for number in itertools.count(2)))
    return next(one for one in paths if not os.path.lexists(one))
