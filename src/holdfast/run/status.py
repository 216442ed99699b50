"""The state of a run, as far as its files and this machine show it; for display."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.format.names import MANIFEST_NAME
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import LocalStorage

from .catalog import Catalog
from .index import RUN_FILE
from .lease import STALE_S, owner_of

__all__ = ["RunStatus", "refuse_checkpoint", "run_state", "runs_below"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a run as a word and as a short text.

    Attributes:
        word: "training", "silent" (an owner elsewhere that may be dead), "finished", "stopped", "died" or "new".
        text: who trains it and where, or how its last attempt ended; untrusted text from files.
        owner: the process that writes to the run, by lease.json, with ``alive`` added (`owner_of`); None without one.
        heard: when the owner was last heard of, in seconds since 1970 by the clock of the storage; None without one.
    """

    word: str
    text: str
    owner: Mapping[str, Any] | None = None
    heard: float | None = None

    @property
    def is_live(self) -> bool:
        """Whether the run may change by itself."""
        return self.word in ("training", "silent")


def runs_below(storage: Storage, names: Sequence[str] | None = None) -> list[tuple[str, Storage]]:
    """Return the runs directly below a folder by name, those that a symbolic link of a local folder leads to as well.

    Inside of a run no link is ever followed. A folder of runs is the reader's own, and only looked at.

    Args:
        storage: the folder.
        names: of the directories in it that may be runs, if the caller has listed them.
    """
    if names is None:
        names = [info.path.rstrip("/") for info in storage.list("", recursive=False) if info.path.endswith("/")]
    found = [(name, storage.child(name)) for name in sorted(names) if storage.exists(f"{name}/{RUN_FILE}")]
    root = storage.local_root
    if root is not None and root.is_dir():
        with os.scandir(root) as entries:
            links = [entry.name for entry in entries if entry.is_symlink() and entry.name[0] != "." and entry.is_dir()]
        linked = [(name, LocalStorage(root / name)) for name in links if (root / name / RUN_FILE).is_file()]
        found = sorted({**dict(found), **dict(linked)}.items())
    return found


def refuse_checkpoint(storage: Storage, error: type[HoldfastError]) -> None:
    """Refuse a checkpoint where a run is asked for.

    Raises:
        HoldfastError: it is one; of the class ``error``.
    """
    if storage.exists(MANIFEST_NAME):
        raise error(f"{storage.uri} is a checkpoint: give its run, the directory above it")


def run_state(catalog: Catalog) -> RunStatus:
    """Look at the lease and the attempts of a run.

    Raises:
        StorageError: the storage does not answer.
    """
    index = catalog.index
    owner, heard = owner_of(catalog.storage)
    if owner is not None and owner["alive"] is not False:
        is_fresh = heard is not None and time.time() - heard < STALE_S
        where = f"process {owner.get('trainer_pid')} on {owner.get('host')}"
        return RunStatus(
            word="training" if owner["alive"] or is_fresh else "silent", text=where, owner=owner, heard=heard
        )
    if index.has_finished:
        return RunStatus(word="finished", text="training has come to its end", owner=owner, heard=heard)
    current = index.current
    if current is None:
        return RunStatus(word="new", text="it has never been trained", owner=owner, heard=heard)
    if current.reason:
        return RunStatus(word="stopped", text=current.reason, owner=owner, heard=heard)
    text = f"attempt {current.attempt} ended without a word"
    return RunStatus(word="died", text=text, owner=owner, heard=heard)
