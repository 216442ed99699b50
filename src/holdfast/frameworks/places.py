"""Local directories that must not outlive their use, nor be missing while they are used."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

from holdfast.run.process import birth, is_dead, machine
from holdfast.trainers.function.worker.reflink import clone_tree

__all__ = ["STAGED", "claim", "last_change", "same_as_parent", "stage", "sweep_staged"]

STAGED = "_holdfast-staged-"
"""First characters of the name of a directory made by `stage`; transformers does not upload what begins with "_"."""
_OWNER = "owner.json"
_FRESH_S = 24 * 3600.0
_TOLD = "HOLDFAST_TOLD_CHILDREN"


def claim(directory: str) -> None:
    """Make a temporary directory that belongs to this process, and remove old ones beside it whose process has died.

    The writer may still read what a process that died has left there; after a day it does not.
    """
    base = os.path.dirname(directory)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    told = os.path.join(directory, _OWNER)
    if os.path.exists(told):
        return
    for name in os.listdir(base):
        with contextlib.suppress(OSError, ValueError):
            with open(os.path.join(base, name, _OWNER), encoding="utf-8") as file:
                owner = json.load(file)
            if is_dead(owner) and time.time() - last_change(os.path.join(base, name)) > _FRESH_S:
                shutil.rmtree(os.path.join(base, name))
    with open(told, "w", encoding="utf-8") as file:
        json.dump({**machine(), "pid": os.getpid(), "pid_birth": birth(os.getpid())}, file)


def last_change(directory: str) -> float:
    """Return when something was last put into a directory, or into one right inside it."""
    with os.scandir(directory) as entries:
        return max([os.stat(directory).st_mtime, *(entry.stat(follow_symlinks=False).st_mtime for entry in entries)])


def same_as_parent(what: str, decide: Callable[[], Any]) -> Any:
    """Decide something that ranks started by this process decide alike: Lightning starts the script again for each.

    Such a rank has LOCAL_RANK from its parent; any other child process decides for itself, and so does a rank that
    asks a second time.
    """
    told = json.loads(os.environ.get(_TOLD, "{}"))
    if told.get("pid") == os.getppid() and os.environ.get("LOCAL_RANK", "0") != "0" and what in told["said"]:
        decision = told["said"].pop(what)
        os.environ[_TOLD] = json.dumps(told)
        return decision
    decision = decide()
    said = told["said"] if told.get("pid") == os.getpid() else {}
    os.environ[_TOLD] = json.dumps({"pid": os.getpid(), "said": {**said, what: decision}})
    return decision


def stage(source: str, target: str) -> bool | None:
    """Keep the files of ``source`` at hand under ``target``, whatever happens to ``source``, without copying them.

    Returns:
        True if the files of ``target`` are clones, so that they may be moved away; False if they are hard links, which
        survive a deletion and may only be read: who opens the source for writing writes to them too; None where
        neither is possible, and ``target`` does not exist.
    """
    if clone_tree(source, target):
        return True
    try:
        _link_tree(source, target)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        return None
    return False


def sweep_staged(parent: str, run_id: str, start_id: str) -> None:
    """Remove what earlier lives of a run have staged in ``parent``. The caller holds the run, so nobody uses it."""
    mine = f"{STAGED}{run_id[:8]}-"
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(mine) and not name.startswith(f"{mine}{start_id}"):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)


def _link_tree(source: str, target: str) -> None:
    os.makedirs(target)
    for entry in os.scandir(source):
        new = os.path.join(target, entry.name)
        if entry.is_dir():
            _link_tree(entry.path, new)  # a link to a directory too: its files are part of the checkpoint
        else:
            os.link(os.path.realpath(entry.path), new)
