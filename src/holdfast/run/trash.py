"""The trash of a run on a disk: what ``holdfast rm`` and ``prune`` took away, for a week.

A checkpoint goes there by one rename, and comes back by one, so that a kill at any moment leaves it in one of the two
places, whole. In the trash its manifest has another name, so that nobody takes it for a checkpoint. What is emptied
loses its manifest first, and is not brought back after that.

The week is counted by the clock that runs since the machine was booted, which nobody can set; after another boot, or on
another machine, by that and the wall clock, of which the lesser counts.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from holdfast._units import format_bytes
from holdfast.errors import CheckpointError, CheckpointNotFoundError
from holdfast.format.names import MANIFEST_NAME
from holdfast.storage.base import Storage, errors_of
from holdfast.storage.local.beneath import OpenDirectory
from holdfast.storage.local.local_storage import door_of

from .process import boot_id

TRASH = ".trash"  # directories whose names begin with a dot are never looked into for checkpoints
WEEK_S = 7 * 86400.0
_KEPT_MANIFEST = "manifest.in-trash.json"
_ENTRY = re.compile(r"(?P<ms>[0-9]{13})-(?:b(?P<boot>[0-9a-f]{8})\.(?P<up>[0-9]+)-)?(?P<name>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrashEntry:
    """A checkpoint in the trash.

    Attributes:
        name: that it had in the run.
        directory: path below the run.
        taken: when, in seconds since 1970.
        boot: of the machine, "" where that is not known.
        up_s: seconds since that boot.
    """

    name: str
    directory: str
    taken: float
    boot: str = ""
    up_s: int = 0

    def age_s(self) -> float:
        """Return for how many seconds it has been there at least."""
        by_wall, now = time.time() - self.taken, _boot()
        if not self.boot or now is None:
            return by_wall
        return float(now[1] - self.up_s) if now[0] == self.boot else min(by_wall, float(now[1]))


class Trash:
    """The trash of the run in ``storage``; whoever changes it holds the lease of the run."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._place = door_of(storage)

    @property
    def exists(self) -> bool:
        """Whether the run can have one: a store cannot move what it holds, and would copy every byte."""
        return self._place is not None

    def entries(self) -> list[TrashEntry]:
        """List what is in it, newest first."""
        if not self.exists:
            return []
        found = []
        for info in self._storage.list(TRASH, recursive=False):
            match = _ENTRY.fullmatch(info.path.rstrip("/").rpartition("/")[2])
            if match is not None:
                directory = f"{TRASH}/{match[0]}"
                entry = TrashEntry(
                    name=match["name"], directory=directory, taken=int(match["ms"]) / 1000,
                    boot=match["boot"] or "", up_s=int(match["up"] or 0),
                )  # fmt: skip
                found.append(entry)
        return sorted(found, key=lambda entry: entry.taken, reverse=True)

    def take(self, name: str) -> None:
        """Move the checkpoint ``name`` into it; durable on return.

        Raises:
            StorageError: it stays where it is.
        """
        boot = _boot()
        since = "" if boot is None else f"b{boot[0]}.{boot[1]}-"
        entry = f"{int(time.time() * 1000):013d}-{since}{name}"
        with errors_of("move", f"{self._storage.uri}/{name}"):
            with self._open("") as root:
                if root.lstat(TRASH) is None:
                    os.mkdir(TRASH, 0o777, dir_fd=root.fd)
                with self._open(TRASH) as trash:
                    os.rename(name, entry, src_dir_fd=root.fd, dst_dir_fd=trash.fd)
                    os.fsync(trash.fd)
                os.fsync(root.fd)
            self._rename_manifest(f"{TRASH}/{entry}", MANIFEST_NAME, _KEPT_MANIFEST)

    def restore(self, name: str) -> None:
        """Move the newest checkpoint that was called ``name`` back; durable on return.

        Raises:
            CheckpointNotFoundError: there is none in the trash, or none that is still whole.
            CheckpointError: the run has something of this name.
            StorageError: it stays in the trash.
        """
        found = next((entry for entry in self.entries() if entry.name == name), None)
        where = f"{self._storage.uri}/{TRASH}"
        if found is None:
            names = ", ".join(dict.fromkeys(entry.name for entry in self.entries()))
            raise CheckpointNotFoundError(f"{where} has no checkpoint {name}; there is: {names or 'nothing'}")
        manifests = [f"{found.directory}/{manifest}" for manifest in (MANIFEST_NAME, _KEPT_MANIFEST)]
        if not any(map(self._storage.exists, manifests)):
            raise CheckpointNotFoundError(f"{self._storage.uri}/{found.directory} is not whole: its deletion had begun")
        with errors_of("move", f"{self._storage.uri}/{found.directory}"), self._open("") as root:
            if root.lstat(name) is not None:
                raise CheckpointError(f"{self._storage.uri}/{name} is there by now: move that away first")
            self._rename_manifest(found.directory, _KEPT_MANIFEST, MANIFEST_NAME)
            with self._open(TRASH) as trash:
                os.rename(found.directory.rpartition("/")[2], name, src_dir_fd=trash.fd, dst_dir_fd=root.fd)
                os.fsync(root.fd)
                os.fsync(trash.fd)

    def in_words(self) -> str:
        """Say how much room it keeps, and how to get that back; "" if it is empty."""
        entries = self.entries()
        if not entries:
            return ""
        size = sum(info.size for info in self._storage.list(TRASH))
        many = f"{len(entries)} checkpoint{'s' * (len(entries) != 1)}"
        return (
            f"the trash of the run, {self._storage.uri}/{TRASH}, keeps {many} that `holdfast rm` or `prune` took away, "
            f"{format_bytes(size)}: delete that folder to have the room at once"
        )

    def outdated(self) -> list[str]:
        """Return the names of what the next `empty` deletes for good."""
        return [entry.name for entry in self.entries() if entry.age_s() > WEEK_S]

    def empty(self, *, older_s: float = WEEK_S) -> list[str]:
        """Delete for good what has been there for longer; return the names it had."""
        gone = []
        for entry in self.entries():
            if entry.age_s() > older_s:
                for manifest in (MANIFEST_NAME, _KEPT_MANIFEST):
                    self._storage.delete(f"{entry.directory}/{manifest}")
                self._storage.delete_tree(entry.directory)
                gone.append(entry.name)
        return gone

    def _rename_manifest(self, directory: str, old: str, new: str) -> None:
        with self._open(directory) as folder:
            if folder.lstat(old) is not None:
                os.rename(old, new, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
                os.fsync(folder.fd)

    def _open(self, inside: str) -> OpenDirectory:
        assert self._place is not None
        door, prefix = self._place
        return door.folder("/".join(part for part in (prefix, inside) if part))


def _boot() -> tuple[str, int] | None:
    """Return which boot of the machine this is, and for how many seconds it has been up; None if nobody can tell."""
    try:
        return boot_id()[:8], int(time.clock_gettime(time.CLOCK_BOOTTIME))
    except (OSError, ValueError, AttributeError):
        return None
