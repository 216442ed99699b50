"""What another writer left under a name that is wanted is moved aside, never deleted."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

__all__ = ["move_aside"]

_LOG = logging.getLogger("holdfast.integrations")
_ASIDE = ".before-holdfast"


def move_aside(path: Path) -> None:
    """Give a file or directory another name beside it; nothing if there is none."""
    if not os.path.lexists(path):
        return
    names = itertools.chain([path.name + _ASIDE], (f"{path.name}{_ASIDE}-{number}" for number in itertools.count(2)))
    aside = next(new for name in names if not os.path.lexists(new := path.with_name(name)))
    os.replace(path, aside)
    _LOG.warning("%s was of another writer: it is %s now", path, aside)
