"""Take over the caller's directory: the caller may change it afterwards, and where possible it costs no copy.

A directory is renamed only if its deletion was requested; else it is cloned where the file system can share
blocks, or stays where it is until the driver's writer has copied it; where that writer is on another machine and the
run is on a store, this rank uploads the files first. Never hard-linked: `torch.save` truncates the
file it writes, and a link would follow. The caller's directory is not changed unless the caller requests it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from holdfast._log import get_logger
from holdfast.checkpoint.handle import Checkpoint
from holdfast.copying.local import clone_tree, private_directory
from holdfast.errors import CheckpointNotFoundError, ConfigError
from holdfast.format.names import MANIFEST_NAME, METADATA_FILE
from holdfast.run.names import INCOMING, is_checkpoint_name
from holdfast.storage.base import Storage
from holdfast.writer.ingest.sources import scan
from holdfast.writer.messages import IngestSource

__all__ = ["HandoffArea", "Taken", "check_source", "name_in_run", "remove_local", "take"]

_LOG = get_logger("trainers.function")
_SIBLING = re.compile(r"\.holdfast-(?P<start>[0-9a-f]{8,64})-(?P<index>[0-9a-f]+)-(?P<rank>\d+)(\.doomed)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffArea:
    """Where the directories of one rank are put until the driver's writer has taken them in.

    Attributes:
        root: of the run; None if worker processes cannot open that storage.
        uri: of the run.
        start_id: of this attempt.
        rank: of this worker.
        apart: the driver is on another machine: of this machine's files it sees only those in the run.
        past: start ids of earlier attempts of this run, which have ended.
        swept: directories in which nothing of earlier attempts is left.
    """

    root: Storage | None
    uri: str
    start_id: str
    rank: int
    apart: bool = False
    past: frozenset[str] = frozenset()
    swept: set[str] = field(default_factory=set, compare=False)

    @property
    def local(self) -> str | None:
        """The run's directory, if it has one on this machine."""
        root = None if self.root is None else self.root.local_root
        return None if root is None else os.path.realpath(root)

    @property
    def is_sent(self) -> bool:
        """Whether files of this machine reach the driver's writer through the store of the run, the only way."""
        return self.apart and self.root is not None and self.local is None

    def incoming_object(self, index: int) -> str:
        """Return a path inside the run's store for the directory of a report."""
        return f"{INCOMING}{self.start_id}/{index}-{self.rank}"

    def incoming(self, index: int) -> str | None:
        """Return a path inside the run's local directory for that of a report; None if the run is not local."""
        local = self.local
        return None if local is None else os.path.join(local, f"{INCOMING}{self.start_id}", f"{index}-{self.rank}")

    def new(self, name: str) -> str:
        """Return a path for a directory that will be reported, the same on all ranks; in the run if that is local."""
        base = self.local or private_directory("holdfast-new")
        return os.path.join(base, f"{INCOMING}{self.start_id}", name)

    def sweep_siblings(self, path: str) -> None:
        """Remove what workers of earlier attempts have taken over beside ``path`` and never delivered."""
        folder = os.path.dirname(path)
        if not self.past or folder in self.swept:
            return
        self.swept.add(folder)
        try:
            names = os.listdir(folder)
        except OSError as error:  # it may be entered and not listed
            _LOG.debug("%s is not looked through: %s", folder, error)
            return
        for name in names:
            found = _SIBLING.fullmatch(name)
            if found is not None and found["start"] in self.past and os.path.lexists(os.path.join(folder, name)):
                _LOG.warning(
                    "%s is removed: rank %s of an earlier start has reported it (report %d), and died before it was "
                    "stored", os.path.join(folder, name), found["rank"], int(found["index"], 16),
                )  # fmt: skip
                _remove_at_once(os.path.join(folder, name))


def _remove_at_once(path: str) -> None:
    """Remove a directory that the driver may still be reading: it finds the whole directory, or nothing."""
    doomed = path if path.endswith(".doomed") else f"{path}.doomed"
    if doomed != path:
        try:
            os.rename(path, doomed)
        except FileNotFoundError:  # another rank was faster
            return
        except OSError as error:
            _LOG.warning("%s is not needed any more and stays there: %s", path, error)
            return
    remove_local(doomed)


@dataclass(slots=True, kw_only=True)
class Taken:
    """Where the files of a report are now.

    Attributes:
        path: directory, or single file, that the writer reads.
        owned: the writer may take its files away and removes the rest.
        safe: the caller cannot change them any more.
        caller: the caller's directory or file.
        delete: `caller` is still there and has to go after the commit.
        moved: (new, old) paths, to be undone if the report fails while the caller waits for it.
    """

    path: str
    owned: bool
    safe: bool
    caller: str
    delete: bool = False
    moved: tuple[tuple[str, str], ...] = ()

    def committed(self) -> None:
        """Clean up after the commit; a failure is only logged, for the checkpoint is safe."""
        if self.delete:
            remove_local(self.caller)

    def failed(self) -> None:
        """Put back what was moved: a caller that still waits gets the files back."""
        for new, old in reversed(self.moved):
            with contextlib.suppress(OSError):
                if os.path.lexists(new) and not os.path.lexists(old):
                    os.rename(new, old)
                    _LOG.warning("the report failed: %s is back in its place", old)


def take(checkpoint: Checkpoint, area: HandoffArea, index: int, *, delete: bool | None, asynchronous: bool) -> Taken:
    """Take over a local directory or file.

    Args:
        checkpoint: the caller's.
        area: of this rank.
        index: of the report.
        delete: the caller wants it deleted in the end; None: if ``asynchronous``.
        asynchronous: the caller goes on before the commit, if that can be made safe.

    Raises:
        CheckpointNotFoundError: there is nothing.
        ConfigError: the directory may not be reported, or not be deleted, or no checkpoint can hold its contents.
    """
    path = checkpoint.path
    check_source(path, area)
    wanted = asynchronous if delete is None else delete
    if wanted and _in_checkpoint(path, area):
        if delete:
            raise ConfigError(
                f"rank {area.rank}: {path} belongs to a checkpoint of this run: it cannot be deleted after the "
                "report; leave delete_local_checkpoint_after_upload out"
            )
        wanted = False
    incoming = area.incoming(index)
    # What no checkpoint can hold is refused before the files are moved.
    found = scan(IngestSource(rank=area.rank, path=path, owned=True)) if wanted else None
    # Links would lead elsewhere from another place, and what they lead to can be changed: the caller waits.
    if found is not None and all(file.movable for file in found.files):
        beside = None
        if area.is_sent or not area.apart:
            # Hidden, on the same file system.
            beside = os.path.join(os.path.dirname(path), f".holdfast-{area.start_id}-{index:x}-{area.rank}")
            area.sweep_siblings(path)
        for target in filter(None, (incoming, beside)):
            moved = _move(path, target)
            if moved:
                return Taken(path=target, owned=True, safe=True, caller=path, moved=moved)
    elif not wanted and (asynchronous or area.apart) and incoming is not None and clone_tree(path, incoming):
        _take_metadata(path, incoming)
        return Taken(path=incoming, owned=True, safe=True, caller=path)
    if incoming is not None and area.apart:
        return _bring(path, incoming, area.rank, delete=wanted)
    return Taken(path=path, owned=False, safe=False, caller=path, delete=wanted)


def _bring(path: str, incoming: str, rank: int, *, delete: bool) -> Taken:
    """Copy what only this machine has into the run, where the driver's writer takes it in."""
    scan(IngestSource(rank=rank, path=path))  # what no checkpoint can hold is refused before it is copied
    try:
        if os.path.isdir(path):
            shutil.copytree(path, incoming)
        else:
            os.makedirs(incoming)
            shutil.copyfile(path, os.path.join(incoming, os.path.basename(path)))
        _take_metadata(path, incoming)
    except BaseException:
        shutil.rmtree(incoming, ignore_errors=True)
        raise
    # If it is deleted, the caller waits for the commit: until then there is no other copy that lasts.
    return Taken(path=incoming, owned=True, safe=not delete, caller=path, delete=delete)


def check_source(path: str, area: HandoffArea) -> None:
    """Refuse a missing directory, and a directory that holds the run itself.

    Raises:
        CheckpointNotFoundError: there is nothing.
        ConfigError: the run's directory lies inside.
    """
    if not os.path.exists(path):
        raise CheckpointNotFoundError(
            f"rank {area.rank}: there is no {path} to report: it was never written on this rank, or is deleted "
            "already (do two ranks share one directory, and the other's report took it away? Give each rank its own)"
        )
    local, real = area.local, os.path.realpath(path)
    if local is not None and (local + os.sep).startswith(real.rstrip(os.sep) + os.sep):
        raise ConfigError(
            f"rank {area.rank}: {path} holds the run itself ({local}): a checkpoint of it would contain all others; "
            "write each checkpoint into a directory of its own and report that"
        )


def name_in_run(checkpoint: Checkpoint, area: HandoffArea) -> str:
    """Return the directory name, inside the run, of a checkpoint that the caller has put there.

    Raises:
        ConfigError: it lies elsewhere.
    """
    local = area.local
    if local is not None and checkpoint.storage.local_root is not None:
        name = os.path.relpath(os.path.realpath(checkpoint.path), local)
    else:
        uri, root = checkpoint.uri, area.uri.rstrip("/") + "/"
        name = uri[len(root) :] if uri.startswith(root) else ".."
    if not is_checkpoint_name(name):
        raise ConfigError(
            f"rank {area.rank}: {checkpoint.uri} is no place in this run: what you upload yourself has to be a "
            f"directory right below {area.uri} (get_context().get_storage().build_checkpoint_path_from_name(name))"
        )
    return name


def _in_checkpoint(path: str, area: HandoffArea) -> bool:
    """Return whether a path is a committed checkpoint of the run, or inside of a checkpoint."""
    local, real = area.local, os.path.realpath(path)
    if local is None or not real.startswith(local + os.sep):
        return False
    first = real[len(local) + 1 :].split(os.sep)[0]
    return os.path.exists(os.path.join(local, first, MANIFEST_NAME))


def _move(path: str, target: str) -> tuple[tuple[str, str], ...]:
    """Rename a directory to ``target``, or a file into it; return (new, old) paths, () where that is impossible."""
    made = False
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(path):
            os.rename(path, target)
            return ((target, path),)
        os.mkdir(target)
        made = True
        new = os.path.join(target, os.path.basename(path))
        os.rename(path, new)
    except OSError as error:
        # Another file system, a mount point, no permission there: the next target, or a copy.
        _LOG.debug("%s cannot be renamed to %s: %s", path, target, error)
        if made:
            os.rmdir(target)
        return ()
    moved = [(new, path)]
    metadata = _metadata_of(path)
    with contextlib.suppress(FileNotFoundError):
        os.rename(metadata, os.path.join(target, METADATA_FILE))
        moved.append((os.path.join(target, METADATA_FILE), metadata))
    return tuple(moved)


def _take_metadata(path: str, directory: str) -> None:
    """Copy the metadata of a file, which lie beside it, into the directory under their name there."""
    if os.path.isfile(path):
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(_metadata_of(path), os.path.join(directory, METADATA_FILE))


def _metadata_of(path: str) -> str:
    found = Path(path)
    return str(found.with_name(f".{found.name}{METADATA_FILE}"))


def remove_local(path: str) -> None:
    """Remove the caller's directory or file; a failure is only logged, for what was in it is safe."""
    try:
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_metadata_of(path))
    except FileNotFoundError:
        pass
    except OSError as error:
        _LOG.warning("%s is committed, but could not be deleted here: %s", path, error)
