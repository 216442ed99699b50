"""Local directories: claimed by a process, staged while they are used, moved aside where a name is wanted."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast._log import get_logger
from holdfast.run.process import birth, is_dead, machine

__all__ = ["STAGED", "claim", "last_change", "move_aside", "same_as_parent", "sweep_staged", "unused"]

_LOG = get_logger("frameworks")
STAGED = "_holdfast-staged-"
"""First characters of the name of a directory that keeps files until they are stored.

Transformers does not upload what begins with "_".
"""
_ASIDE = ".before-holdfast"
_OWNER = "owner.json"
_FRESH_S = 24 * 3600.0
_TOLD = "HOLDFAST_TOLD_CHILDREN"


def claim(directory: str) -> None:
    """Make a temporary directory that belongs to this process, and remove old ones beside it whose process has died.

    The writer may still read what a process that died has left there; after a day it does not.
    """
    base = os.path.dirname(directory)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    owner_file = os.path.join(directory, _OWNER)
    if os.path.exists(owner_file):
        return
    for name in os.listdir(base):
        with contextlib.suppress(OSError, ValueError):
            with open(os.path.join(base, name, _OWNER), encoding="utf-8") as file:
                owner = json.load(file)
            if is_dead(owner) and time.time() - last_change(os.path.join(base, name)) > _FRESH_S:
                shutil.rmtree(os.path.join(base, name))
    with open(owner_file, "w", encoding="utf-8") as file:
        json.dump({**machine(), "pid": os.getpid(), "pid_birth": birth(os.getpid())}, file)


def last_change(directory: str) -> float:
    """Return when something was last put into a directory, or into a directory right inside it."""
    with os.scandir(directory) as entries:
        return max([os.stat(directory).st_mtime, *(entry.stat(follow_symlinks=False).st_mtime for entry in entries)])


def same_as_parent(what: str, decide: Callable[[], Any]) -> Any:
    """Decide something that ranks started by this process decide alike: Lightning starts the script again for each.

    Such a rank has LOCAL_RANK from its parent; any other child process decides for itself, and so does a rank that
    asks a second time.
    """
    noted = json.loads(os.environ.get(_TOLD, "{}"))
    if noted.get("pid") == os.getppid() and os.environ.get("LOCAL_RANK", "0") != "0" and what in noted["said"]:
        decision = noted["said"].pop(what)
        os.environ[_TOLD] = json.dumps(noted)
        return decision
    decision = decide()
    said = noted["said"] if noted.get("pid") == os.getpid() else {}
    os.environ[_TOLD] = json.dumps({"pid": os.getpid(), "said": {**said, what: decision}})
    return decision


def sweep_staged(parent: str, run_id: str, start_id: str) -> None:
    """Remove what earlier lives of a run have staged in ``parent``. The caller holds the run, so nobody uses it."""
    mine = f"{STAGED}{run_id[:8]}-"
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(mine) and not name.startswith(f"{mine}{start_id}"):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)


def move_aside(path: Path) -> None:
    """Rename what another writer left under a wanted name, which is never deleted; nothing if there is none."""
    if not os.path.lexists(path):
        return
    aside = unused(f"{path}{_ASIDE}")
    os.replace(path, aside)
    _LOG.warning("%s was of another writer: it is %s now", path, aside)


def unused(path: str) -> str:
    """Return a path, with a number behind it if there is something already."""
    paths = itertools.chain([path], (f"{path}-{number}" for number in itertools.count(2)))
    return next(candidate for candidate in paths if not os.path.lexists(candidate))
